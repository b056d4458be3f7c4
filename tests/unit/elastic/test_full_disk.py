"""A disk that is full costs what would have been written to it, and not the job."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from elastic.control import coordinator as shell
from elastic.control import tasks
from elastic.control.coordinator import Coordinator
from elastic.control.door import Door
from elastic.control.messages import Over
from elastic.control.runs import RunPlace
from elastic.control.tasks import CoordinatorTask
from elastic.world.policy import ScalingPolicy

FULL = Path("/dev/full")


def test_a_world_is_noted_in_place(tmp_path):
    """On a disk without room no file is made, and none that is there grows."""
    note = tmp_path / "epoch"
    assert shell.has_room(note)
    assert shell._epoch_in(note) == -1
    before = note.stat()
    for epoch in (3, 12345):
        shell._note_epoch(note, epoch)
        assert shell._epoch_in(note) == epoch
    after = note.stat()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)
    assert list(tmp_path.iterdir()) == [note]


def test_where_no_world_can_be_noted_from_the_beginning_that_is_said(caplog):
    assert not shell.has_room(FULL)
    assert "learns the world's number from its nodes" in caplog.text


@pytest.fixture
def task(tmp_path):
    return CoordinatorTask(
        "job", "", "127.0.0.1:0", ScalingPolicy(), 1, fresh=True, epoch_file=str(FULL), end_file=str(tmp_path / "end")
    )


def test_the_last_words_are_said_where_they_cannot_be_written(task, tmp_path, monkeypatch, caplog):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    (tmp_path / "secret").write_text("s" * 32)
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setattr(tasks, "write_private", full)
    monkeypatch.setattr(tasks, "coordinate", lambda *_: (Over.STOPPED, "stopped: by a person"))
    given = tasks.msgspec.json.encode(tasks.msgspec.structs.replace(task, secret_file=str(tmp_path / "secret")))
    with caplog.at_level(logging.WARNING):
        assert tasks.main(given.decode()) == tasks.STATUS[Over.STOPPED]
    assert "stopped: by a person" in caplog.text


def test_one_that_is_started_again_needs_no_file(task, tmp_path, monkeypatch):
    """Where it listens is written down already, and the number of the world has no room."""
    ran = []

    def run(self):
        self.close()
        ran.append(self._epoch_file)
        return Over.STOPPED, ""

    monkeypatch.setattr(Coordinator, "run", run)
    monkeypatch.setattr(tasks, "heed", lambda _: None)
    away = str(tmp_path / "not there" / "address")
    tasks.coordinate(tasks.msgspec.structs.replace(task, fresh=False, address_file=away), b"s" * 32)
    assert ran == [None]


def test_a_directory_that_lets_nobody_in_keeps_what_is_in_it_and_ends_no_job_that_has_finished(tmp_path, monkeypatch):
    def forbidden(path, missing_ok=False):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    place = RunPlace(tmp_path / "run", "job")
    place.prepare()
    door = Door(tmp_path / "rank.sock", came=lambda *_: "", said=lambda *_: None, left=lambda *_: None)
    monkeypatch.setattr(Path, "unlink", forbidden)
    door.close()
    place.remove()
