"""The event log reader parses valid lines, counts the others, and reports unreadable files."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import EventLogNotFoundError, UsageError
from tieredckpt.event_log import read_event_log
from tieredckpt.event_log.event_types import FaultEvent, LogEvent, ProcessBegan, StepEvent
from tieredckpt.event_log.log_reader import UnreadableLine, parse_event_files, parse_event_line

STEP = StepEvent(epoch=1, rank=0, step=7, began=10.0, seconds=1.5)
LINE = msgspec.json.encode(STEP)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (LINE, STEP),
        (b'{"event":"step","epoch":1,"rank":0,"step":7,"began":10,"seconds":1.5,"of tomorrow":{"a":[1]}}', STEP),
        (b'{"event":"prophecy","at":3.0}', UnreadableLine.UNKNOWN),
        (b'{"event":"step","epoch":1}', UnreadableLine.DAMAGED),
        (b'{"event":"step","epoch":1,"rank":0,"step":7,"began":1e300,"seconds":1}', UnreadableLine.DAMAGED),
        (b'{"event":"step","epoch":1,"rank":0,"step":7,"began":1,"seconds":-1}', UnreadableLine.DAMAGED),
        (b'{"event":"step","epoch":1,"rank":0,"step":7,"began":1e999,"seconds":1}', UnreadableLine.DAMAGED),
        (b'{"event":3}', UnreadableLine.DAMAGED),
        (b"[" * 100_000, UnreadableLine.DAMAGED),
        (b"\xff\xfe", UnreadableLine.DAMAGED),
        (b'{"event":"\xff\xfe"}', UnreadableLine.DAMAGED),
        (b"null", UnreadableLine.DAMAGED),
        (LINE[:-4], UnreadableLine.DAMAGED),
    ],
)
def test_a_line(line, found):
    assert parse_event_line(line) == found


@given(st.binary(max_size=60))
def test_any_line_is_an_event_or_counted(line):
    assert isinstance(parse_event_line(line), LogEvent | UnreadableLine)


@given(st.integers(0, len(LINE) - 1))
def test_truncated_last_line_is_not_an_error(length):
    read = parse_event_files({"a": LINE + b"\n" + LINE[:length]})
    assert read.events == (STEP,)
    assert (read.truncated_lines, read.damaged_lines) == (int(length > 0), 0)
    assert read.warnings == ()


def test_every_event_round_trips():
    for event in (
        ProcessBegan(1.0, "job", "coordinator", again=True),
        FaultEvent(2.0, 3, "n1", 0, "node", "gone", since=1.5),
    ):
        assert parse_event_line(msgspec.json.encode(event)) == event


def test_absent_empty_and_invalid_directories_differ(tmp_path):
    with pytest.raises(EventLogNotFoundError, match="there is no event log"):
        read_event_log(tmp_path / "none")
    with pytest.raises(EventLogNotFoundError, match="nothing has been written"):
        read_event_log(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        read_event_log(tmp_path / "file")


def test_files_of_a_newer_release_are_read_with_a_warning(tmp_path):
    (tmp_path / "n0.1.2.jsonl").write_bytes(b'{"event":"opened","at":1,"pid":1,"version":2}\n' + LINE + b"\n")
    read = read_event_log(tmp_path)
    assert STEP in read.events
    assert read.warnings == ("1 files were written by a newer release",)
