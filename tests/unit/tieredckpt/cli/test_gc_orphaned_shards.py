"""Shards without a manifest that ``gc`` deletes."""

from types import SimpleNamespace

import pytest

from peerstore.shard_records import VersionId
from tieredckpt.agent.durable_catalog import OrphanedStep
from tieredckpt.cli import gc
from tieredckpt.durable.object_store import ObjectInfo
from tieredckpt.resolve_step import Tier
from tieredckpt.step_inventory import StepInventory, StepStatus

ONE, TWO = VersionId(1, 1, 0, "a"), VersionId(1, 2, 0, "a")


@pytest.mark.parametrize(
    ("unreachable", "gone"),
    [({}, [ONE]), ({Tier.MEMORY: "no agent answers"}, [ONE]), ({Tier.PEER: "n2: no answer"}, [])],
    ids=["all were asked", "no agent here", "a node is silent"],
)
def test_gc_keeps_shards_that_a_node_may_hold_in_memory(monkeypatch, unreachable, gone):
    monkeypatch.setattr(gc, "orphaned_parts", lambda *_: (1, 2, False))
    views = (StepStatus(TWO, 2, {0: (Tier.MEMORY,)}),)
    sight = SimpleNamespace(survey=lambda job: StepInventory(views, unreachable))
    lost = [OrphanedStep(group, (ObjectInfo("a", 10, 0.0),)) for group in (ONE, TWO)]
    fates = gc._orphan_decisions(sight, None, "job", lost, 60.0, every=0, enough=9)
    assert [one.version_id for one, _, goes in fates if goes] == gone
    assert all(("n2: no answer" in why) is (not gone) for one, why, _ in fates if one.version_id == ONE)
