"""The ledger's reader takes what it can, counts the rest, and tells absent from unreadable."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.errors import LedgerNotFoundError, UsageError
from tieredckpt.ledger import read_ledger
from tieredckpt.ledger.events import Began, Event, Fault, Step
from tieredckpt.ledger.reading import Line, read_files, read_line

STEP = Step(epoch=1, rank=0, step=7, began=10.0, seconds=1.5)
LINE = msgspec.json.encode(STEP)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (LINE, STEP),
        (b'{"event":"step","epoch":1,"rank":0,"step":7,"began":10,"seconds":1.5,"of tomorrow":{"a":[1]}}', STEP),
        (b'{"event":"prophecy","at":3.0}', Line.UNKNOWN),
        (b'{"event":"step","epoch":1}', Line.DAMAGED),
        (b'{"event":"step","epoch":1,"rank":0,"step":7,"began":1e300,"seconds":1}', Line.DAMAGED),
        (b'{"event":"step","epoch":1,"rank":0,"step":7,"began":1,"seconds":-1}', Line.DAMAGED),
        (b'{"event":"step","epoch":1,"rank":0,"step":7,"began":1e999,"seconds":1}', Line.DAMAGED),
        (b'{"event":3}', Line.DAMAGED),
        (b"[" * 100_000, Line.DAMAGED),
        (b"\xff\xfe", Line.DAMAGED),
        (b'{"event":"\xff\xfe"}', Line.DAMAGED),
        (b"null", Line.DAMAGED),
        (LINE[:-4], Line.DAMAGED),
    ],
)
def test_a_line(line, found):
    assert read_line(line) == found


@given(st.binary(max_size=60))
def test_any_line_is_an_event_or_counted(line):
    assert isinstance(read_line(line), Event | Line)


@given(st.integers(0, len(LINE) - 1))
def test_a_torn_last_line_is_normal(length):
    read = read_files({"a": LINE + b"\n" + LINE[:length]})
    assert read.events == (STEP,)
    assert (read.torn, read.damaged) == (int(length > 0), 0)
    assert read.complaints == ()


def test_every_event_survives_its_way():
    for event in (Began(1.0, "job", "coordinator", again=True), Fault(2.0, 3, "n1", 0, "node", "gone", since=1.5)):
        assert read_line(msgspec.json.encode(event)) == event


def test_absent_empty_and_no_directory_are_told_apart(tmp_path):
    with pytest.raises(LedgerNotFoundError, match="there is no ledger"):
        read_ledger(tmp_path / "none")
    with pytest.raises(LedgerNotFoundError, match="nothing has been written"):
        read_ledger(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        read_ledger(tmp_path / "file")


def test_files_of_a_newer_release_are_read_and_said(tmp_path):
    (tmp_path / "n0.1.2.jsonl").write_bytes(b'{"event":"opened","at":1,"pid":1,"version":2}\n' + LINE + b"\n")
    read = read_ledger(tmp_path)
    assert STEP in read.events
    assert read.complaints == ("1 files were written by a newer release",)
