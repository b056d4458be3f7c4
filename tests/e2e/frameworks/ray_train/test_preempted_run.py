"""A run of Ray Train on a node that is about to be preempted."""

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install tieredckpt[ray]")

from tests.support.ray_training import fit
from tieredckpt import Checkpointer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def test_step_becomes_durable_before_the_preemption(cluster, tmp_path):
    durable = {"durable": str(tmp_path / "durable"), "durable_every": 1000}
    fit(tmp_path, name="preempted", options=durable, drain=3)
    with Checkpointer("preempted", **durable) as ckpt:
        assert {one.step for one in ckpt.steps() if "durable" in one.tiers} == {0, 3}
