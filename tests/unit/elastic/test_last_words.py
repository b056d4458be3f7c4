"""What is known of how a process and a job ended: the kernel's kills, and the step that is left to go on from."""

from __future__ import annotations

import pytest

from elastic.control.kills import Kills
from elastic.control.messages import Formed, NodeSays
from elastic.control.plane import Progress
from elastic.control.processes import told
from elastic.control.wholeness import Wholeness
from elastic.control.world_state import WorldState

WORLD = Formed(3, ("n0", "n8"), 0, "")


def says(*sealed, node="n0"):
    steps = tuple(None if step is None else Progress(step + 1, step) for step in sealed)
    return NodeSays(1, node, 1, len(sealed), formed=WORLD, steps=steps)


def test_a_step_is_whole_when_all_ranks_of_a_world_have_sealed_it():
    whole, state = Wholeness(), WorldState(WORLD)
    assert "no step" in str(whole)

    def said(report):
        state.said(report)
        whole.said(state)

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
    kills = Kills(counted, machine)
    assert kills.since_asked() == ""
    counted.write_text(before.format(3))
    machine.write_text("nr_free_pages 7\noom_kill 3\n")
    assert after in kills.since_asked()
    assert kills.since_asked() == ""
    machine.write_text("nr_free_pages 7\noom_kill 4\n")
    assert "on this machine" in kills.since_asked()


def test_where_nobody_counts_nothing_is_said(tmp_path):
    kills = Kills(tmp_path / "absent", tmp_path / "absent")
    assert kills.since_asked() == ""
    Kills().since_asked()  # whatever this machine counts, it can be read


def test_how_a_process_ended_is_said_in_words():
    assert told(3) == "it ended with status 3"
    assert told(-9) == "it was killed by signal 9 (SIGKILL)"
    assert told(-63) == "it was killed by signal 63"
