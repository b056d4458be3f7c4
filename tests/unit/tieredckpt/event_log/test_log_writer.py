"""The event log writer never raises into the training and truncates at most one line."""

import logging
import os
import shutil
import subprocess
import sys
import threading

import pytest

from tieredckpt.event_log import EVENT_LOG_ENV, EventLogWriter, NullEventLog, event_log_from_environ, read_event_log
from tieredckpt.event_log.event_types import FileOpened, StepEvent


def step(number, **more):
    return StepEvent(epoch=0, rank=0, step=number, began=1000.0 + number, seconds=0.5, **more)


def steps(read):
    return sorted(event.step for event in read.events if isinstance(event, StepEvent))


def test_written_events_are_read(tmp_path):
    writer = EventLogWriter(tmp_path / "ledger", name="n0")
    written = [step(n, loss=0.5, tokens=n) for n in range(10)]
    for event in written:
        writer.write(event)
    writer.close()
    read = read_event_log(tmp_path / "ledger")
    assert [event for event in read.events if isinstance(event, StepEvent)] == written
    assert (read.files, read.truncated_lines, read.damaged_lines, read.unknown_events, read.missing_files) == (
        1,
        0,
        0,
        0,
        0,
    )
    assert [event.pid for event in read.events if isinstance(event, FileOpened)] == [os.getpid()]


def test_nothing_is_made_before_there_is_something_to_write(tmp_path):
    EventLogWriter(tmp_path / "ledger").close()
    assert not list(tmp_path.iterdir())


def test_forked_child_writes_its_own_file(tmp_path):
    writer = EventLogWriter(tmp_path)
    writer.write(step(0))
    child = os.fork()
    if child == 0:
        writer.write(step(1))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.write(step(2))
    writer.close()
    read = read_event_log(tmp_path)
    assert (steps(read), read.files, read.damaged_lines) == ([0, 1, 2], 2, 0)


def test_threads_do_not_mix_their_lines(tmp_path):
    writer = EventLogWriter(tmp_path, part_bytes=4096)
    threads = [
        threading.Thread(target=lambda base=base: [writer.write(step(base + n)) for n in range(50)])
        for base in range(0, 400, 50)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    writer.close()
    read = read_event_log(tmp_path)
    assert steps(read) == list(range(400))
    assert read.damaged_lines == read.truncated_lines == read.missing_files == 0


def test_log_size_is_bounded_and_missing_files_are_reported(tmp_path):
    writer = EventLogWriter(tmp_path, part_bytes=1000, parts=3)
    for n in range(200):
        writer.write(step(n))
    writer.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3000
    read = read_event_log(tmp_path)
    kept = steps(read)
    assert kept == list(range(kept[0], 200))
    assert read.missing_files > 0
    assert any("missing" in one for one in read.warnings)


def test_full_disk_warns_once_and_counts_lost_events(caplog):
    """``/dev/full`` behaves like a full disk."""
    writer = EventLogWriter("/dev/full")
    with caplog.at_level(logging.WARNING):
        for n in range(5):
            writer.write(step(n))
    assert writer.lost == 5
    assert len(caplog.records) == 1


def test_truncated_write_damages_a_single_line(tmp_path, monkeypatch):
    writer = EventLogWriter(tmp_path)
    writer.write(step(0))
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:20]))
    writer.write(step(1))
    monkeypatch.undo()
    writer.write(step(2))
    writer.close()
    read = read_event_log(tmp_path)
    assert (steps(read), read.damaged_lines, writer.lost) == ([0, 2], 1, 1)


def test_deleted_directory_is_recreated(tmp_path):
    writer = EventLogWriter(tmp_path / "ledger")
    writer.write(step(0))
    shutil.rmtree(tmp_path / "ledger")
    for n in range(1, 200):
        writer.write(step(n))
    writer.close()
    assert steps(read_event_log(tmp_path / "ledger"))[-1] == 199


def test_unencodable_event_is_counted(tmp_path):
    writer = EventLogWriter(tmp_path)
    writer.write(step(0, tokens=object()))
    writer.write(step(1))
    assert (steps(read_event_log(tmp_path)), writer.lost) == ([1], 1)
    writer.close()


def test_process_has_at_most_one_event_log(tmp_path):
    assert isinstance(event_log_from_environ({}), NullEventLog)
    environ = {EVENT_LOG_ENV: str(tmp_path / "ledger")}
    one = event_log_from_environ(environ)
    assert isinstance(one, EventLogWriter)
    assert event_log_from_environ(environ) is one


@pytest.mark.parametrize("module", ["tieredckpt.event_log", "tieredckpt.event_log.event_types"])
def test_event_log_imports_no_torch(module):
    code = f"import sys, {module}; assert 'torch' not in sys.modules and 'boto3' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_event_log_variable_is_not_a_setting():
    from tieredckpt.settings import load_settings

    assert load_settings({EVENT_LOG_ENV: "/somewhere"}).enabled
