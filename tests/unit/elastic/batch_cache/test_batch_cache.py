"""``BatchCache`` in one process: preparation, reuse, eviction, and safety of the mapped tensors."""

import logging
import os
import pickle
import threading
from pathlib import Path

import pytest
import torch

from elastic.batch_cache import (
    BatchCache,
    CacheDirectoryError,
    CacheFullError,
    UnsupportedBatchError,
    cache_directory,
    remove_job_batches,
)
from elastic.batch_cache import cache as keeping_module
from elastic.batch_cache.cache_directory import remove_unused_fingerprint
from elastic.errors import PolicyError
from peerstore.errors import InvalidNameError
from tests.support.batch_reader import file_names
from tests.support.bits import assert_same_bits


class Prepare:
    """A ``prepare`` function that records the indices it prepares."""

    def __init__(self, numel=64):
        self.asked = []
        self._numel = numel

    def __call__(self, index):
        self.asked.append(index)
        return {"ids": torch.arange(self._numel) + index, "text": f"batch {index}"}


@pytest.fixture
def opened(tmp_path):
    """Caches over one directory, closed at the end."""
    caches = []

    def opening(**options):
        options = {"fingerprint": "f", "directory": tmp_path / "prepared", **options}
        caches.append(BatchCache(options.pop("job", "job"), **options))
        return caches[-1]

    def close():
        for cache in caches:
            cache.close()

    opening.close = close
    yield opening
    close()


def batch_bytes(cache, prepare):
    cache.get(0, prepare)
    size = cache.used_bytes()
    cache.clear()
    prepare.asked.clear()
    return size


def test_a_batch_is_prepared_once_and_mapped_from_then_on(opened):
    cache, prepare = opened(), Prepare()
    for _ in range(3):
        assert_same_bits(Prepare()(5), cache.get(5, prepare))
    assert prepare.asked == [5]
    assert_same_bits(Prepare()(5), opened().get(5, prepare))
    assert prepare.asked == [5]
    assert (cache.counts.prepared, cache.counts.stored, cache.counts.hits) == (1, 1, 3)
    assert cache.cached_indices() == [5]
    assert file_names(cache.directory) == ["00000000000000000005.batch", "tally"]


def test_tensors_are_the_files_own_pages_and_may_be_changed(opened):
    cache, prepare = opened(), Prepare(numel=1 << 16)
    first = cache.get(5, prepare)
    assert "00000000000000000005.batch" in mapping_of(first["ids"].data_ptr())
    first["ids"].mul_(0).add_(7)
    assert first["ids"].unique().tolist() == [7]
    assert_same_bits(Prepare(numel=1 << 16)(5), cache.get(5, prepare))
    assert prepare.asked == [5]


def mapping_of(address):
    def spans(line):
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        return start <= address < end

    return next(line for line in Path("/proc/self/maps").read_text().splitlines() if spans(line))


def test_a_mapped_batch_outlives_its_file_and_its_cache(opened):
    cache, prepare = opened(), Prepare()
    batch = cache.get(5, prepare)
    cache.clear()
    cache.close()
    assert_same_bits(Prepare()(5), batch)


def test_error_of_prepare_is_raised_and_leaves_no_file(opened):
    cache = opened()

    def broken(index):
        raise ZeroDivisionError(index)

    with pytest.raises(ZeroDivisionError):
        cache.get(3, broken)
    assert file_names(cache.directory) == ["tally"]
    assert_same_bits(Prepare()(3), cache.get(3, Prepare()))


def test_unsupported_batch_is_an_error_even_with_an_optional_cache(opened):
    cache = opened()
    with pytest.raises(UnsupportedBatchError, match=r"batch 3\['ids'\]"):
        cache.get(3, lambda _: {"ids": {1, 2}})
    assert file_names(cache.directory) == ["tally"]


@pytest.mark.parametrize("index", [-1, 1 << 62, 1.0, True, "3", None])
def test_index_must_be_an_integer(opened, index):
    with pytest.raises(PolicyError, match="whole number"):
        opened().get(index, Prepare())


@pytest.mark.parametrize("name", ["..", "a/b", "", "a\0b", "x" * 129])
@pytest.mark.parametrize("which", ["job", "stream"])
def test_names_are_names(opened, name, which):
    with pytest.raises(InvalidNameError):
        opened(**{which: name})


# -- fingerprints -------------------------------------------------------------------------------------------------


def test_another_fingerprint_finds_nothing_and_sweeps(opened):
    old, prepare = opened(fingerprint={"data": "wiki", "seed": 1}), Prepare()
    old.get(0, prepare)
    again = opened(fingerprint={"seed": 1, "data": "wiki"})  # the order of the keys does not matter
    assert again.cached_indices() == [0]
    new = opened(fingerprint={"data": "wiki", "seed": 2})
    assert new.cached_indices() == []
    assert old.directory.exists()  # it is in use
    old.close()
    again.close()
    opened(fingerprint={"data": "wiki", "seed": 2})
    assert not old.directory.exists()
    assert new.directory.exists()


def test_streams_and_jobs_do_not_meet(opened):
    train, prepare = opened(), Prepare()
    train.get(0, prepare)
    train.close()
    assert opened(stream="val", fingerprint="other").cached_indices() == []
    assert opened(job="job2", fingerprint="other").cached_indices() == []
    assert opened().cached_indices() == [0]


def test_a_job_that_has_ended_is_forgotten(opened, tmp_path):
    root, prepare = tmp_path / "prepared", Prepare()
    assert remove_job_batches("job", directory=root) == []
    for options in ({}, {"stream": "val"}, {"job": "job2"}):
        opened(**options).get(0, prepare)
    opened.close()
    used, *unused = (opened(), opened(stream="val"), opened(job="job2"))
    for cache in unused:
        cache.close()
    assert remove_job_batches("job", directory=root) == [used.directory]
    assert used.cached_indices() == [0]
    opened.close()
    (root / "job" / "mine").mkdir(mode=0o700)
    assert remove_job_batches("job", directory=root) == []
    assert file_names(root) == ["job2"]
    assert opened(job="job2").cached_indices() == [0]
    with pytest.raises(InvalidNameError):
        remove_job_batches("..", directory=root)


def test_a_fingerprint_is_made_of_plain_values(opened):
    with pytest.raises(PolicyError, match="plain values"):
        opened(fingerprint={"tokenizer": object()})


# -- room ---------------------------------------------------------------------------------------------------------


def test_batches_behind_the_cursor_are_evicted_first(opened):
    prepare = Prepare()
    cache = opened(max_bytes=4 * batch_bytes(opened(), prepare))
    for index in range(4):
        cache.get(index, prepare)
    cache.mark_committed(2)
    cache.get(4, prepare)
    assert cache.cached_indices() == [2, 3, 4]
    cache.get(5, prepare)
    cache.get(6, prepare)  # all four are needed earlier
    assert cache.cached_indices() == [2, 3, 4, 5]
    cache.mark_committed(3)
    cache.get(9, prepare)
    cache.get(6, prepare)
    assert cache.cached_indices() == [3, 4, 5, 6]  # batch 9 was evicted for batch 6
    assert prepare.asked == [0, 1, 2, 3, 4, 5, 6, 9, 6]


def test_the_cursor_is_the_nodes(opened):
    prepare = Prepare()
    size = batch_bytes(opened(), prepare)
    one, other = opened(max_bytes=2 * size), opened(max_bytes=2 * size)
    for index in (0, 1):
        one.get(index, prepare)
    other.mark_committed(1)
    one.get(2, prepare)
    assert other.cached_indices() == [1, 2]


def test_batches_already_read_are_evicted_without_a_cursor(opened):
    prepare = Prepare()
    cache = opened(max_bytes=3 * batch_bytes(opened(), prepare))
    for index in range(10):
        cache.get(index, prepare)
    assert cache.cached_indices()[-1] == 9
    assert len(cache.cached_indices()) <= 3
    assert prepare.asked == list(range(10))


def test_cache_size_never_exceeds_its_bound(opened):
    cache = opened(max_bytes=10_000)
    for index, numel in enumerate([1, 900, 10, 1200, 2000, 5, 300, 1100] * 3):
        batch = cache.get(index, Prepare(numel=numel))
        assert batch["ids"][0] == index
        assert cache.used_bytes() <= 10_000


def test_opening_recounts_the_used_bytes(opened):
    prepare = Prepare()
    size = batch_bytes(opened(), prepare)
    cache = opened(max_bytes=2 * size)
    cache.get(0, prepare)
    cache.get(1, prepare)
    for name in file_names(cache.directory):
        if name != "tally":
            (cache.directory / name).unlink()
    again = opened(max_bytes=2 * size)
    for index in (2, 3):
        again.get(index, prepare)
    assert again.cached_indices() == [2, 3]
    assert again.used_bytes() == 2 * size


def test_full_cache_warns_once_and_still_returns_the_batch(opened, caplog):
    cache, prepare = opened(max_bytes=100), Prepare()
    with caplog.at_level(logging.WARNING):
        for index in (0, 1):
            assert_same_bits(Prepare()(index), cache.get(index, prepare))
    (said,) = caplog.messages
    assert "does not fit into 100 B" in said
    assert "--shm-size" in said
    assert file_names(cache.directory) == ["tally"]
    assert prepare.asked == [0, 1]


def test_full_required_cache_raises(opened):
    cache = opened(max_bytes=100, required=True)
    with pytest.raises(CacheFullError, match="max_bytes"):
        cache.get(0, Prepare())
    assert file_names(cache.directory) == ["tally"]


def full_from(monkeypatch, calls):
    """Make writes fail for lack of space, starting with the write of that number."""
    done, write = [], os.pwrite

    def pwrite(fd, data, at):
        done.append(at)
        if len(done) >= calls:
            raise OSError(28, "No space left on device")
        return write(fd, data, at)

    monkeypatch.setattr(keeping_module.os, "pwrite", pwrite)


@pytest.mark.parametrize("calls", [1, 2])
def test_a_full_file_system_leaves_nothing_half_written(opened, monkeypatch, caplog, calls):
    cache, prepare = opened(), Prepare()
    with monkeypatch.context() as patch:
        full_from(patch, calls)
        assert_same_bits(Prepare()(0), cache.get(0, prepare))
    assert "No space left" in caplog.text
    assert cache.cached_indices() == []
    cache.get(0, prepare)
    assert cache.cached_indices() == [0]
    assert prepare.asked == [0, 0]


def test_a_directory_that_was_removed_does_not_end_training(opened, caplog):
    cache, prepare = opened(), Prepare()
    cache.clear()
    for name in file_names(cache.directory):
        (cache.directory / name).unlink()
    cache.directory.rmdir()
    assert_same_bits(Prepare()(0), cache.get(0, prepare))
    assert "going on without" in caplog.text


# -- several at once ----------------------------------------------------------------------------------------------


def test_only_one_of_many_threads_prepares_a_batch(opened):
    begun, go_on, prepare = threading.Event(), threading.Event(), Prepare()

    def slow(index):
        begun.set()
        go_on.wait()
        return prepare(index)

    caches = [opened(), opened()]
    found = []
    threads = [threading.Thread(target=lambda c=cache: found.append(c.get(3, slow))) for cache in caches * 3]
    for thread in threads:
        thread.start()
    begun.wait()
    go_on.set()
    for thread in threads:
        thread.join()
    assert prepare.asked == [3]
    assert len(found) == 6
    for batch in found:
        assert_same_bits(Prepare()(3), batch)
    assert not list(caches[0].directory.glob("*.partial"))


def test_waiter_prepares_and_stores_when_the_preparer_fails(opened):
    failing, other, prepare = opened(), opened(), Prepare()
    waiting, found = threading.Event(), []

    def stop():
        waiting.set()
        return False

    thread = threading.Thread(target=lambda: found.append(other.get(3, prepare, should_stop=stop)))

    def broken(index):
        thread.start()
        waiting.wait()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing.get(3, broken)
    thread.join()
    assert_same_bits(Prepare()(3), found[0])
    assert other.cached_indices() == [3]
    assert (prepare.asked, other.counts.stored) == ([3], 1)


def test_opening_during_a_sweep_recreates_the_directory(opened, monkeypatch):
    swept = []

    lock_file = cache_directory.lock_file

    def acquire(fd, **options):
        if options.get("shared") and not swept:
            swept.append(None)
            swept.append(remove_unused_fingerprint(cache_name, stream))
        return lock_file(fd, **options)

    first = opened()
    first.close()
    cache_name, stream = first.directory.name, os.open(first.directory.parent, os.O_RDONLY)
    monkeypatch.setattr(cache_directory, "lock_file", acquire)
    cache = opened()
    os.close(stream)
    cache.get(0, Prepare())
    assert swept == [None, True]
    assert file_names(first.directory) == ["00000000000000000000.batch", "tally"]


def test_lock_is_released_despite_a_forked_descriptor(tmp_path):
    with (tmp_path / "lock").open("w") as one, (tmp_path / "lock").open() as other:
        copy = os.dup(one.fileno())
        assert cache_directory.lock_file(one.fileno(), wait_s=0)
        with cache_directory.unlock_at_end(one.fileno()):
            assert not cache_directory.lock_file(other.fileno(), wait_s=0)
        assert cache_directory.lock_file(other.fileno(), wait_s=0)
        os.close(copy)


def test_waiter_prepares_its_own_batch_after_the_timeout(opened):
    slow, hasty, prepare = opened(), opened(wait_s=0), Prepare()

    def prepare_and_ask(index):
        assert_same_bits(Prepare()(index), hasty.get(index, prepare))
        return prepare(index)

    slow.get(3, prepare_and_ask)
    assert prepare.asked == [3, 3]
    assert slow.cached_indices() == [3]


def test_a_wait_can_be_ended(opened):
    slow, waiting, prepare = opened(), opened(), Prepare()

    def prepare_and_ask(index):
        waiting.get(index, prepare, should_stop=lambda: True)
        return prepare(index)

    slow.get(3, prepare_and_ask)
    assert prepare.asked == [3, 3]


# -- places -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("below", [(), ("job",), ("job", "train")])
def test_a_directory_others_can_enter_is_refused(opened, tmp_path, below):
    opened().close()
    tmp_path.joinpath("prepared", *below).chmod(0o755)
    with pytest.raises(CacheDirectoryError, match="mode 0755"):
        opened()


@pytest.mark.parametrize("below", [(), ("job",), ("job", "train")])
def test_a_link_instead_of_a_directory_is_refused(opened, tmp_path, below):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    place = tmp_path.joinpath("prepared", *below)
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for parent in [*place.parents][: len(below)]:
        parent.chmod(0o700)
    place.symlink_to(elsewhere)
    with pytest.raises(CacheDirectoryError):
        opened()
    assert file_names(elsewhere) == []


def test_closed_cache_raises(opened):
    cache = opened()
    cache.close()
    cache.close()
    with pytest.raises(PolicyError, match="was closed"):
        cache.get(0, Prepare())


def test_pickled_cache_reopens(opened):
    cache, prepare = opened(), Prepare()
    cache.get(4, prepare)
    with pickle.loads(pickle.dumps(cache)) as other:
        assert_same_bits(Prepare()(4), other.get(4, prepare))
    assert prepare.asked == [4]
