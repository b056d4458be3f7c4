"""Contract of every store of the leader record; tests of each store call these checks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from elastic.control.leader_election import UNKNOWN_HOLDER, LeaderRecord, LeaderRecordStore

replace = msgspec.structs.replace
FULL = LeaderRecord(
    *("n0-7a", 1_790_000_000_123, "[fd00::7]:7400", 41, 2.5, "stopped", 'it was "asked" to\nstop', ""),
    incarnation_epoch=1_790_000_000_456,
)


def check_read_after_write(place: LeaderRecordStore) -> None:
    assert place.read() is None
    written = place.write(FULL, None)
    assert written is not None
    assert replace(written, version="") == FULL
    assert written.version
    assert place.read() == written
    released = place.write(LeaderRecord("", FULL.term, duration_s=2.5), written)
    assert released is not None
    assert released.version != written.version
    assert place.read() == released


def check_conditional_write(place: LeaderRecordStore) -> None:
    first = place.write(LeaderRecord(UNKNOWN_HOLDER, 1), None)
    assert place.write(LeaderRecord("b", 2), None) is None
    second = place.write(LeaderRecord("a", 2), first)
    assert place.write(LeaderRecord("b", 2), first) is None
    assert place.read() == second
    assert place.write(replace(second, epoch=4), second).epoch == 4


def check_deleted_record_stays_deleted(place: LeaderRecordStore, delete: Callable[[], None]) -> None:
    """Check that a stale write fails, even if another record with equal content exists."""
    first = place.write(LeaderRecord("a", 2), None)
    delete()
    assert place.read() is None
    assert place.write(replace(first, epoch=1), first) is None
    again = place.write(LeaderRecord("a", 2), None)
    assert again.version != first.version
    assert place.write(replace(first, epoch=1), first) is None
    assert place.read() == again


def check_concurrent_writes(places: list[LeaderRecordStore]) -> None:
    """Check that of concurrent writes over the same record exactly one succeeds."""
    record = places[0].write(LeaderRecord(UNKNOWN_HOLDER, 1), None)
    for number in range(5):
        together = threading.Barrier(len(places))

        def attempt(
            place: LeaderRecordStore, name: str, over: LeaderRecord = record, together=together
        ) -> LeaderRecord | None:
            assert place.read() == over
            together.wait(200)
            return place.write(LeaderRecord(name, over.term + 1), over)

        with ThreadPoolExecutor(len(places)) as pool:
            names = [f"c{number}" for number in range(len(places))]
            answers = [one for one in pool.map(attempt, places, names) if one is not None]
        assert len(answers) == 1
        record = places[0].read()
        assert record == answers[0]
        assert record.term == number + 2
