"""Processes that share a cache survive kills: cached batches are complete and prepared only once."""

import signal
import threading
import time

import pytest

from peerstore.daemon_process import process_start_time
from tests.support.batch_reader import (
    LoggedPrepare,
    batch_of,
    file_names,
    hang_in_prepare,
    open_cache,
    prepare_counts,
    preparer_pids,
    read_ahead,
    read_batches,
)
from tests.support.crashes import crash_environ

pytestmark = pytest.mark.e2e

CRASH_POINTS = (
    "prepared.claimed",
    "prepared.encoded",
    "prepared.reserved",
    "prepared.half",
    "prepared.written",
    "prepared.published",
    "prepared.gave-up",
)
"""Failpoints of :mod:`elastic.batch_cache` in the process that prepares a batch."""
_BATCHES = 20
_FIVE_BATCHES = 5 * 8200


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "prepared"


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def crash(point, times):
    return crash_environ(f"{point}:{times}")


def wait_processes_ended(pids, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while any(process_start_time(pid) >= 0 for pid in pids):
        assert time.monotonic() < deadline, f"one of {pids} still runs"
        time.sleep(0.005)


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_cache_survives_a_kill_at_any_point(zygote, directory, log, point):
    """Kill at the third pass of each point; for evictions, that is the third batch over the limit."""
    making_room = point == "prepared.gave-up"
    limit = _FIVE_BATCHES if making_room else 1 << 30
    ended = zygote.run(read_batches, directory, log, _BATCHES, limit, environ=crash(point, 3))
    assert ended.status == -signal.SIGKILL
    before = prepare_counts(log)
    assert set(before.values()) == {1}
    with open_cache(directory) as cache:
        there = cache.cached_indices()
        assert file_names(cache.directory) == [
            *(f"{index:020d}.batch" for index in there),
            "tally",
        ]  # and no partial file
        for index in there:
            assert cache.lookup(index).batch == batch_of(index)
        assert cache.counts.damaged == 0
        if not making_room:
            assert there == ([0, 1, 2] if point == "prepared.published" else [0, 1])
    assert zygote.run(read_batches, directory, log, _BATCHES).status == 0
    again = {index for index, times in prepare_counts(log).items() if times > 1}
    assert again == set(before) - set(there)
    with open_cache(directory) as cache:
        assert cache.cached_indices() == list(range(_BATCHES))


def test_size_bound_holds_after_a_kill_during_eviction(zygote, directory, log):
    ended = zygote.run(read_batches, directory, log, _BATCHES, _FIVE_BATCHES, environ=crash("prepared.gave-up", 2))
    assert ended.status == -signal.SIGKILL
    with open_cache(directory, max_bytes=_FIVE_BATCHES) as cache:
        for index in range(50, 70):
            assert cache.get(index, batch_of) == batch_of(index)
            assert cache.used_bytes() <= _FIVE_BATCHES


def test_only_one_of_several_processes_prepares_each_batch(zygote, directory, log):
    running = [zygote.start(read_batches, directory, log, 100) for _ in range(4)]
    assert [one.wait().status for one in running] == [0] * 4
    assert prepare_counts(log) == dict.fromkeys(range(100), 1)


def test_waiter_prepares_when_the_preparing_process_dies(zygote, directory, log):
    waiting, found = threading.Event(), []

    def wait_for_it():
        def stop():
            waiting.set()
            return False

        with open_cache(directory) as cache:
            found.append(cache.get(0, LoggedPrepare(log), should_stop=stop))

    running = zygote.start(hang_in_prepare, directory, log)
    running.wait_line("preparing")
    thread = threading.Thread(target=wait_for_it)
    thread.start()
    assert waiting.wait(60)
    assert not found
    running.kill()
    running.wait()
    thread.join()
    assert found == [batch_of(0)]
    assert prepare_counts(log) == {0: 2}


@pytest.mark.parametrize("workers", [0, 2])
def test_restarted_loader_reads_no_prepared_batch_again(zygote, directory, log, workers):
    running = zygote.start(read_ahead, directory, log, _BATCHES, workers, 4)
    running.wait_line("read")
    running.kill()
    running.wait()
    wait_processes_ended(preparer_pids(log))  # workers end with their trainer
    with open_cache(directory) as cache:
        there = cache.cached_indices()
    assert set(range(5)) <= set(there) <= set(range(11))  # the five batches that were read, and up to six ahead
    before = prepare_counts(log)
    assert zygote.run(read_ahead, directory, log, _BATCHES, workers).status == 0
    more = prepare_counts(log) - before
    assert set(more) == set(range(_BATCHES)) - set(there)
    assert set(more.values()) == {1}


def test_cached_batches_are_mapped_after_a_kill_without_workers(zygote, directory, log):
    assert zygote.run(read_ahead, directory, log, _BATCHES, 0).status == 0
    before = log.read_text()
    assert zygote.run(read_ahead, directory, log, _BATCHES, 2).result == 0
    assert log.read_text() == before
