from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clusters import Cluster, make_cluster
from tests.support.ranks import RankPool


@pytest.fixture
def nodes(ranks: RankPool) -> Iterator[Cluster]:
    """Yield two nodes, ``n1`` and ``n2``, in two failure domains."""
    with make_cluster(ranks, "n1", "n2", labels=lambda name: f"rack=r{name[1:]}") as made:
        yield made
