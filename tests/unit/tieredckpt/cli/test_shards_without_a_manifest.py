"""Which shards without a manifest ``gc`` deletes."""

from types import SimpleNamespace

import pytest

from peerstore.records import Group
from tieredckpt.agent.orphans import Orphan
from tieredckpt.cli import collecting
from tieredckpt.durable.store import ObjectInfo
from tieredckpt.node import StepView, Survey
from tieredckpt.resolve import Tier

ONE, TWO = Group(1, 1, 0, "a"), Group(1, 2, 0, "a")


@pytest.mark.parametrize(
    ("unreachable", "gone"),
    [({}, [ONE]), ({Tier.MEMORY: "no agent answers"}, [ONE]), ({Tier.PEER: "n2: no answer"}, [])],
    ids=["all were asked", "no agent here", "a node is silent"],
)
def test_what_a_node_may_still_have_in_memory_stays(monkeypatch, unreachable, gone):
    monkeypatch.setattr(collecting, "parts_of", lambda *_: (1, 2, False))
    views = (StepView(TWO, 2, {0: (Tier.MEMORY,)}),)
    sight = SimpleNamespace(survey=lambda job: Survey(views, unreachable))
    lost = [Orphan(group, (ObjectInfo("a", 10, 0.0),)) for group in (ONE, TWO)]
    fates = collecting._fates(sight, None, "job", lost, 60.0, every=0, enough=9)
    assert [one.group for one, _, goes in fates if goes] == gone
    assert all(("n2: no answer" in why) is (not gone) for one, why, _ in fates if one.group == ONE)
