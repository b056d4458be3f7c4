"""A large job's supervisors, simulated, against the real coordinator process: how long it takes is printed only."""

from __future__ import annotations

import pytest

from peerstore.daemon_process import raise_open_file_limit
from tests.simulation.supervisors import Figures, measure


def _assert_complete(figures: Figures, losses: int) -> None:
    """Every survivor of every loss heard of it, and of the next world."""
    heard = losses * (figures.nodes - 1)
    assert (len(figures.broken_s), len(figures.formed_s), figures.hung_up) == (heard, heard, 0)


def test_lost_nodes_are_replaced_in_succession():
    figures = measure(60, losses=2, rest_s=0.5)
    print(f"figure: {figures}")
    _assert_complete(figures, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("nodes", [500, 1000, 2000])
def test_a_large_job(nodes):
    raise_open_file_limit()
    figures = measure(nodes, losses=5, rest_s=20.0)
    print(f"figure: {figures}")
    _assert_complete(figures, 5)
    assert figures.peak_bytes < 1 << 30
