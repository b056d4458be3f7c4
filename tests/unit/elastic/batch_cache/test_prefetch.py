"""``PrefetchIterator``: batch order, limits, errors at their index, and cleanup."""

import contextlib
import itertools
import threading

import pytest
import torch

from elastic.batch_cache import BatchCache, PrefetchIterator, PrepareError
from elastic.batch_cache.prefetch import PrepareWorker, PrepareWorkerLostError
from elastic.errors import PolicyError
from tests.support.batch_reader import prepare_or_exit, prepare_or_raise, raise_unpicklable
from tests.support.bits import assert_same_bits


class Gate:
    """A ``prepare`` function that records the indices it begins and waits for ``open``."""

    def __init__(self, *, is_open=False):
        self._changed = threading.Condition()
        self._begun = []
        self._open = is_open

    def __call__(self, index):
        with self._changed:
            self._begun.append(index)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open)
        return index

    def open(self):
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def wait_begun(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._begun) >= count, 60)

    @property
    def begun(self):
        with self._changed:
            return list(self._begun)


@pytest.fixture
def cache(tmp_path):
    with BatchCache("job", fingerprint="f", directory=tmp_path / "prepared") as one:
        yield one


@pytest.mark.parametrize("ahead", [1, 3, 50])
def test_batches_come_in_their_order(cache, ahead):
    indices = [5, 3, 8, 3, 0, *range(10, 30)]
    with PrefetchIterator(cache, indices, lambda index: [index], ahead=ahead) as batches:
        assert list(batches) == [[index] for index in indices]
        assert next(batches, None) is None
    assert cache.counts.prepared == len(set(indices))


def test_a_batch_may_be_anything(cache):
    values = [None, [], 0, "", torch.zeros(3)]
    with PrefetchIterator(cache, range(5), values.__getitem__) as batches:
        assert_same_bits(dict(enumerate(values)), dict(enumerate(batches)))
    assert cache.counts.prepared == 5


def test_prefetch_never_exceeds_its_limit(cache):
    prepare = Gate(is_open=True)
    with PrefetchIterator(cache, itertools.count(), prepare, ahead=3) as batches:
        for read in range(6):
            prepare.wait_begun(read + 3)
            assert prepare.begun[: read + 3] == list(range(read + 3))
            assert len(prepare.begun) == read + 3
            assert next(batches) == read


def test_iterator_can_be_closed_early(cache):
    prepare = Gate(is_open=True)
    before = set(threading.enumerate())
    batches = PrefetchIterator(cache, itertools.count(), prepare, ahead=4)
    assert next(batches) == 0
    batches.close()
    batches.close()
    assert set(threading.enumerate()) <= before
    assert next(batches, None) is None


def test_close_waits_for_the_batch_in_preparation(cache):
    prepare = Gate()
    batches = PrefetchIterator(cache, range(9), prepare)
    prepare.wait_begun(1)
    closing = threading.Thread(target=batches.close)
    closing.start()
    assert next(batches, None) is None  # the reader is released at once
    prepare.open()
    closing.join()
    assert prepare.begun == [0]


@pytest.mark.parametrize("workers", [0, 1])
def test_error_is_raised_at_the_index_of_its_batch(cache, workers):
    with PrefetchIterator(cache, range(9), prepare_or_raise, workers=workers) as batches:
        assert [next(batches) for _ in range(3)] == [0, 1, 2]
        for _ in range(2):  # and from then on
            with pytest.raises(PrepareError, match="batch 3 could not be prepared: ZeroDivisionError: three") as raised:
                next(batches)
            assert raised.value.index == 3
            assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_error_in_the_index_iterator_becomes_a_prepare_error(cache):
    def indices():
        yield 0
        raise KeyError("order")

    with PrefetchIterator(cache, indices(), prepare_or_raise) as batches:
        assert next(batches) == 0
        with pytest.raises(PrepareError, match="the next index is not known") as raised:
            next(batches)
        assert isinstance(raised.value.__cause__, KeyError)


@contextlib.contextmanager
def worker(cache, prepare):
    one = PrepareWorker(cache, prepare, "spawn")
    try:
        yield one
    finally:
        one.close()


def test_a_worker_that_dies_is_an_error(cache):
    with worker(cache, prepare_or_exit) as one:
        assert [one.prepare(index, 0).is_cached for index in range(3)] == [True] * 3
        assert one.is_up()
        with pytest.raises(PrepareWorkerLostError, match="ended with status 9"):
            one.prepare(3, 0)
        with pytest.raises(PrepareWorkerLostError, match="ended with status 9"):
            one.prepare(4, 0)
    assert cache.cached_indices() == [0, 1, 2]
    assert [cache.get(index, None) for index in range(3)] == [0, 1, 2]


def test_unpicklable_error_is_reported_as_text(cache):
    with worker(cache, raise_unpicklable) as one:
        with pytest.raises(RuntimeError, match="UnpicklableError: quite strange") as raised:
            one.prepare(0, 0)
        assert "Traceback" in str(raised.value.__cause__)


def test_worker_killed_before_startup_raises(cache):
    with worker(cache, prepare_or_exit) as one:
        one.kill()
        with pytest.raises(PrepareWorkerLostError, match="signal 9"):
            one.prepare(0, 0)
        assert one.is_up()  # the worker has ended


def test_small_cache_prepares_prefetched_batches_once(tmp_path):
    """Batches already read are evicted before prefetched ones: each batch is prepared once."""
    with BatchCache("job", fingerprint="f", directory=tmp_path / "prepared", max_bytes=1500) as cache:
        with PrefetchIterator(cache, range(40), lambda index: bytes(400), ahead=8) as batches:
            assert len(list(batches)) == 40
        assert cache.counts.prepared == 40
        assert cache.used_bytes() <= 1500


@pytest.mark.parametrize("wrong", [{"ahead": 0}, {"workers": -1}])
def test_invalid_prefetch_options_are_refused(cache, wrong):
    with pytest.raises(PolicyError, match="at least one batch ahead"):
        PrefetchIterator(cache, range(3), prepare_or_raise, **wrong)
