"""Kills by the kernel for lack of memory, from the counters of a control group and of the machine."""

from __future__ import annotations

import pytest

from elastic.control.oom_detector import OomDetector


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("memory.events", "low 0\noom 3\noom_kill {}\noom_group_kill 0\n", "control group"),
        ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n", "control group"),
    ],
)
def test_oom_kill_is_reported_once(tmp_path, file, before, after):
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


def test_missing_counters_report_no_kill(tmp_path):
    kills = OomDetector(tmp_path / "absent", tmp_path / "absent")
    assert kills.new_kills() == ""
    OomDetector().new_kills()  # the counters of this machine can be read
