"""What is known of how a process and a job ended: the kernel's kills, and the step that is left to go on from."""

from __future__ import annotations

import pytest

from elastic.control.child_processes import describe_exit
from elastic.control.control_messages import NodeStatus, WorldSpec
from elastic.control.control_plane import RankProgress
from elastic.control.oom_detector import OomDetector
from elastic.coordinator.node_reports import LastCommittedStep, WorldProgress

WORLD = WorldSpec(3, ("n0", "n8"), 0, "")


def says(*sealed, node="n0"):
    steps = tuple(None if step is None else RankProgress(step + 1, step) for step in sealed)
    return NodeStatus(1, node, 1, len(sealed), world=WORLD, rank_progress=steps)


def test_a_step_is_whole_when_all_ranks_of_a_world_have_sealed_it():
    whole, state = LastCommittedStep(), WorldProgress(WORLD)
    assert "no step" in str(whole)

    def said(report):
        state.update(report)
        whole.observe(state)

    said(says(7, 9))  # the other node has not said anything
    said(says(8, None, node="n8"))
    assert whole.step == -1
    said(says(8, 0, node="n8"))
    assert str(whole) == "the last whole step is 0"
    said(says(8, 6, node="n8"))
    said(says(8, None, node="n8"))  # a process was replaced: what was whole is still so
    assert str(whole) == "the last whole step is 6"


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("memory.events", "low 0\noom 3\noom_kill {}\noom_group_kill 0\n", "control group"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n", "control group"),
    ],
)
def test_a_kill_for_lack_of_memory_is_told_once(tmp_path, file, before, after):
    counted, machine = tmp_path / file, tmp_path / "vmstat"
    counted.write_text(before.format(2))
    machine.write_text("nr_free_pages 7\noom_kill 2\n")
    kills = OomDetector(counted, machine)
    assert kills.new_kills() == ""
    counted.write_text(before.format(3))
    machine.write_text("nr_free_pages 7\noom_kill 3\n")
    assert after in kills.new_kills()
    assert kills.new_kills() == ""
    machine.write_text("nr_free_pages 7\noom_kill 4\n")
    assert "on this machine" in kills.new_kills()


def test_where_nobody_counts_nothing_is_said(tmp_path):
    kills = OomDetector(tmp_path / "absent", tmp_path / "absent")
    assert kills.new_kills() == ""
    OomDetector().new_kills()  # whatever this machine counts, it can be read


def test_how_a_process_ended_is_said_in_words():
    assert describe_exit(3) == "it ended with status 3"
    assert describe_exit(-9) == "it was killed by signal 9 (SIGKILL)"
    assert describe_exit(-63) == "it was killed by signal 63"
