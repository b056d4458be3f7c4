"""Reading of an event log while its processes write it."""

from __future__ import annotations

from tieredckpt.event_log.event_types import StepEvent
from tieredckpt.event_log.log_follower import EventLogFollower
from tieredckpt.event_log.log_writer import EventLogWriter


def steps(follower):
    return [event.step for event in follower.read_new() if isinstance(event, StepEvent)]


def step(number):
    return StepEvent(0, 0, number, 100.0 + number, 1.0)


def test_each_read_returns_only_new_events(tmp_path):
    follower = EventLogFollower(tmp_path / "log")
    assert steps(follower) == []
    writer = EventLogWriter(tmp_path / "log")
    writer.write(step(1))
    writer.write(step(2))
    assert steps(follower) == [1, 2]
    assert steps(follower) == []
    writer.write(step(3))
    assert steps(follower) == [3]


def test_incomplete_line_is_read_once_it_is_complete(tmp_path):
    writer = EventLogWriter(tmp_path)
    writer.write(step(1))
    (path,) = tmp_path.glob("*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    follower = EventLogFollower(tmp_path)
    path.write_bytes(b"".join(lines)[:-9])
    assert steps(follower) == []
    path.write_bytes(b"".join(lines))
    assert steps(follower) == [1]


def test_unreadable_lines_are_skipped(tmp_path):
    writer = EventLogWriter(tmp_path)
    writer.write(step(1))
    (path,) = tmp_path.glob("*.jsonl")
    with path.open("ab") as file:
        file.write(b'\xff{"event":"step"}\n\n[]\n' + b"x" * (3 << 20) + b"\n")
    writer.write(step(2))
    assert steps(EventLogFollower(tmp_path)) == [1, 2]


def test_files_of_the_first_name_are_read_first(tmp_path):
    for name, number in (("alpha", 1), ("coordinator", 2), ("zeta", 3)):
        EventLogWriter(tmp_path, name=name).write(step(number))
    assert steps(EventLogFollower(tmp_path, first="coordinator")) == [2, 1, 3]


def test_deleted_file_is_skipped_and_a_new_one_is_read(tmp_path):
    writer = EventLogWriter(tmp_path, part_bytes=300, parts=2)
    follower = EventLogFollower(tmp_path)
    found = []
    for number in range(40):
        writer.write(step(number))
        found += steps(follower)
    assert found == [*range(40)]
    assert len(follower._offsets) == len([*tmp_path.glob("*.jsonl")])
