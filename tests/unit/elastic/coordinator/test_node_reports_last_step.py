"""The last committed step, from the reports of all nodes of a world."""

from __future__ import annotations

from elastic.control.control_messages import NodeStatus, WorldSpec
from elastic.control.control_plane import RankProgress
from elastic.coordinator.node_reports import LastCommittedStep, WorldProgress

WORLD = WorldSpec(3, ("n0", "n8"), 0, "")


def says(*sealed, node="n0"):
    steps = tuple(None if step is None else RankProgress(step + 1, step) for step in sealed)
    return NodeStatus(1, node, 1, len(sealed), world=WORLD, rank_progress=steps)


def test_step_is_committed_when_all_ranks_sealed_it():
    whole, state = LastCommittedStep(), WorldProgress(WORLD)
    assert str(whole) == ""

    def said(report):
        state.update(report)
        whole.observe(state)

    said(says(7, 9))  # the other node has not reported yet
    said(says(8, None, node="n8"))
    assert whole.step == -1
    said(says(8, 0, node="n8"))
    assert str(whole) == "the last complete step is 0"
    said(says(8, 6, node="n8"))
    said(says(8, None, node="n8"))  # a process was replaced: the step stays complete
    assert str(whole) == "the last complete step is 6"
