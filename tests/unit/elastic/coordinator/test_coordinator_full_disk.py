"""A full disk costs the record that needed it, but not the job."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from elastic import launcher
from elastic.control.control_messages import ExitReason
from elastic.control.run_directory import RunDirectory
from elastic.coordinator import coordinator as shell
from elastic.coordinator.coordinator import Coordinator
from elastic.launcher import CoordinatorSpec, JobEnd
from elastic.supervisor.rank_server import RankServer
from elastic.world.scaling_policy import ScalingPolicy

FULL = Path("/dev/full")


def test_world_record_is_written_in_place(tmp_path):
    """On a full disk no file is created and no existing file grows."""
    note = tmp_path / "epoch"
    assert shell.can_write_epoch(note)
    assert shell._read_epochs(note) == (-1, 0)
    before = note.stat()
    for epochs in ((3, 1_790_000_000_123), (12345, 1_790_000_001_147)):
        shell._write_epochs(note, *epochs)
        assert shell._read_epochs(note) == epochs
    after = note.stat()
    assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)
    assert list(tmp_path.iterdir()) == [note]


def test_full_disk_at_startup_is_logged(caplog):
    assert not shell.can_write_epoch(FULL)
    assert "learns the world's number from its nodes" in caplog.text


@pytest.fixture
def task(tmp_path):
    return CoordinatorSpec(
        "job", "", "127.0.0.1:0", ScalingPolicy(), 1, fresh=True, epoch_file=str(FULL), end_file=str(tmp_path / "end")
    )


def test_final_message_is_printed_when_it_cannot_be_written(task, tmp_path, monkeypatch, caplog):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    (tmp_path / "secret").write_text("s" * 32)
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setattr(launcher, "write_private_file", full)
    monkeypatch.setattr(launcher, "run_coordinator", lambda *_: JobEnd(ExitReason.STOPPED, "by a person"))
    given = launcher.msgspec.json.encode(launcher.msgspec.structs.replace(task, secret_file=str(tmp_path / "secret")))
    with caplog.at_level(logging.WARNING):
        assert launcher.main(given.decode()) == launcher.EXIT_STATUS[ExitReason.STOPPED]
    assert "stopped: by a person" in caplog.text


def test_restarted_coordinator_needs_no_file(task, tmp_path, monkeypatch):
    """Where it listens is written down already, and the number of the world has no room."""
    ran = []

    def run(self):
        self.close()
        ran.append(self._epoch_file)
        return ExitReason.STOPPED, ""

    monkeypatch.setattr(Coordinator, "run", run)
    monkeypatch.setattr(launcher, "handle_signals", lambda _: None)
    away = str(tmp_path / "not there" / "address")
    launcher.run_coordinator(launcher.msgspec.structs.replace(task, fresh=False, address_file=away), b"s" * 32)
    assert ran == [None]


def test_inaccessible_directory_keeps_its_files_and_fails_no_finished_job(tmp_path, monkeypatch):
    def forbidden(path, missing_ok=False):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    place = RunDirectory(tmp_path / "run", "job")
    place.prepare()
    door = RankServer(
        tmp_path / "rank.sock", on_connect=lambda *_: "", on_status=lambda *_: None, on_disconnect=lambda *_: None
    )
    monkeypatch.setattr(Path, "unlink", forbidden)
    door.close()
    place.remove()
