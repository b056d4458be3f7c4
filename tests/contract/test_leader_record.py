"""Contract of every leader record store; ``tests/system/kubernetes`` covers Lease objects."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.control.leader_election import LeaderRecord, LeaderRecordStore, open_leader_record
from elastic.errors import ControlPlaneRefusedError, ControlPlaneUnavailableError
from elastic.testing import MemoryLeadership
from tests.support import leadership_contract as contract


class RecordCase:
    def __init__(self, open_one: Callable[[], LeaderRecordStore], delete: Callable[[], None]) -> None:
        self.open, self.delete = open_one, delete


@pytest.fixture(params=["memory", "file"])
def record_case(request: pytest.FixtureRequest, tmp_path: Path) -> RecordCase:
    if request.param == "memory":
        memory = MemoryLeadership()
        return RecordCase(lambda: memory, lambda: setattr(memory, "record", None))
    path = tmp_path / "who leads"
    return RecordCase(lambda: open_leader_record(f"file://{tmp_path}/who%20leads?lease=2.5"), path.unlink)


def test_record_keeps_its_content(record_case: RecordCase) -> None:
    contract.check_read_after_write(record_case.open())


def test_record_is_changed_only_by_its_latest_reader(record_case: RecordCase) -> None:
    contract.check_conditional_write(record_case.open())


def test_deleted_record_is_not_overwritten(record_case: RecordCase) -> None:
    contract.check_deleted_record_stays_deleted(record_case.open(), record_case.delete)


def test_only_one_of_many_writers_succeeds(record_case: RecordCase) -> None:
    contract.check_concurrent_writes([record_case.open() for _ in range(4)])


def count_updates(url: str, times: int) -> None:
    """Run in a separate process."""
    place = open_leader_record(url)
    done = 0
    while done < times:
        record = place.read()
        if record is not None and place.write(LeaderRecord("x", record.term + 1), record) is not None:
            done += 1


def test_file_is_changed_by_one_process_at_a_time(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/leader"
    place = open_leader_record(url)
    place.write(LeaderRecord("", 0), None)
    context = multiprocessing.get_context("fork" if threading.active_count() == 1 else "spawn")
    processes = [context.Process(target=count_updates, args=(url, 50)) for _ in range(3)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(60)
        assert one.exitcode == 0
    assert place.read().term == 150


def test_invalid_record_file_is_unavailable(tmp_path: Path) -> None:
    place = open_leader_record(f"file://{tmp_path}/leader")
    (tmp_path / "leader").write_text('{"holder": 7}')
    with pytest.raises(ControlPlaneUnavailableError, match="does not say who leads"):
        place.read()
    (tmp_path / "leader").unlink()
    os.mkfifo(tmp_path / "leader")
    with pytest.raises(ControlPlaneUnavailableError):
        place.read()


def test_a_directory_that_others_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ControlPlaneRefusedError, match="no other user can write to"):
        open_leader_record(f"file://{folder}/leader").read()


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ControlPlaneRefusedError, match="No such file or directory"):
        open_leader_record(f"file://{tmp_path}/away/leader").read()
