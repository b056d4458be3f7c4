"""A loader over a batch cache: the same data as without it, and no sample is read twice on a node."""

import itertools
import multiprocessing
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.batch_cache import BatchCache
from elastic.errors import CacheFullError
from elastic.samples import DataPosition, ElasticDataLoader
from tests.support.batch_shares import even_share
from tests.support.example_counts import examples
from tieredckpt.tensors.device import accelerator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]
workers = pytest.mark.parametrize("num_workers", [0, 2])
SAMPLES = 23


class LoggedSamples:
    """Samples with a random number each, which log every read."""

    def __init__(self, log, fail_at=-1):
        self._log, self._fail_at = log, fail_at

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        with self._log.open("a") as file:
            file.write(f"{index} {os.getpid()}\n")
        if index == self._fail_at:
            raise ZeroDivisionError(f"sample {index}")
        return torch.tensor([index, int(torch.randint(1 << 30, ()))])

    def reads(self):
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return [int(line.split()[0]) for line in lines]

    def readers(self):
        return {int(line.split()[1]) for line in self._log.read_text().splitlines()}


@pytest.fixture
def samples(tmp_path):
    return LoggedSamples(tmp_path / "log")


@pytest.fixture
def open_cache(tmp_path):
    opened = []

    def open_one(**options):
        opened.append(BatchCache("job", fingerprint="numbers", directory=tmp_path / "cache", **options))
        return opened[-1]

    yield open_one
    for cache in opened:
        cache.close()


def loader(dataset, share, cache=None, num_workers=0, **options):
    if num_workers:
        options.update(num_workers=num_workers, multiprocessing_context="fork")
    return ElasticDataLoader(dataset, share, seed=options.pop("seed", 5), cache=cache, **options)


def read(data, steps):
    """Return the samples of the next steps, and commit them."""
    found = []
    for step in itertools.islice(data, steps):
        found += [batch.data.tolist() for batch in step]
        step.commit()
    return found


@workers
def test_restarted_loader_maps_cached_microbatches(samples, open_cache, num_workers):
    share = even_share(8, 2)
    with loader(samples, share, num_workers=num_workers) as plain:
        expected = read(plain, 4)
    read_first = len(samples.reads())
    with loader(samples, share, open_cache(), num_workers) as data:
        assert read(data, 4) == expected
    assert (os.getpid() in samples.readers()) == (num_workers == 0)
    before = len(samples.reads())
    assert before >= 2 * read_first if not num_workers else before > read_first
    others = multiprocessing.active_children()
    with loader(samples, share, open_cache(), num_workers, epochs=1) as data:
        assert read(data, 2) == expected[:8]
        assert multiprocessing.active_children() == others
    assert len(samples.reads()) == before


def test_ranks_of_a_node_and_of_another_world_share_microbatches(samples, open_cache):
    with loader(samples, even_share(8, 2), open_cache()) as alone:
        expected = read(alone, 3)
    before = len(samples.reads())
    found = []
    for rank in range(2):
        with loader(samples, even_share(8, 2, rank, 2), open_cache()) as data:
            found.append(read(data, 3))
    pairs = [list(zip(rank[::2], rank[1::2], strict=True)) for rank in found]  # two microbatches in a step
    assert [batch for step in zip(*pairs, strict=True) for part in step for batch in part] == expected
    assert len(samples.reads()) == before


@pytest.mark.parametrize(
    ("share", "options"),
    [(even_share(8, 4), {}), (even_share(8, 2), {"seed": 6}), (even_share(8, 2), {"shuffle": "none"})],
    ids=["another microbatch", "another seed", "another order"],
)
def test_other_samples_at_a_position_replace_the_cached_ones(samples, open_cache, share, options):
    with loader(samples, share, **options) as plain:
        expected = read(plain, 3)
    with loader(samples, even_share(8, 2), open_cache()) as data:
        read(data, 3)
    with loader(samples, share, open_cache(), **options) as data:
        assert read(data, 3) == expected
    before = len(samples.reads())
    with loader(samples, share, open_cache(), **options) as data:
        assert read(data, 3) == expected
    assert len(samples.reads()) == before


@workers
def test_error_of_a_sample_is_raised_at_its_step_and_not_cached(tmp_path, open_cache, num_workers):
    failing = LoggedSamples(tmp_path / "failing", fail_at=9)
    with loader(failing, even_share(8, 2), open_cache(), num_workers, shuffle="none") as data:
        assert len(read(data, 1)) == 4
        with pytest.raises(ZeroDivisionError, match="sample 9"):
            read(data, 1)
        assert data.position.step == 1
    good = LoggedSamples(tmp_path / "good")
    with loader(good, even_share(8, 2), open_cache(), shuffle="none") as data:
        found = [row[0] for batch in read(data, 2) for row in batch]
    assert found == list(range(16))
    assert 9 in good.reads()
    assert 0 not in good.reads()


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
def test_pinned_microbatches_come_from_the_cache(samples, open_cache):
    with loader(samples, even_share(8, 2), open_cache(), pin_memory=True) as data:
        expected = read(data, 2)
    before = len(samples.reads())
    with loader(samples, even_share(8, 2), open_cache(), pin_memory=True) as data:
        step = next(iter(data))
        found = [batch.data for batch in step]
    assert [one.tolist() for one in found] == expected[:4]
    assert {one.is_pinned() for one in found} == {accelerator().device_count() > 0}
    assert len(samples.reads()) == before


@workers
def test_full_cache_costs_no_sample(samples, open_cache, num_workers):
    with loader(samples, even_share(8, 2)) as plain:
        expected = read(plain, 6)
    with loader(samples, even_share(8, 2), open_cache(max_bytes=2000), num_workers) as data:
        assert read(data, 6) == expected
    cache = open_cache(stream="other", max_bytes=10, required=True)
    with loader(samples, even_share(8, 2), cache) as data, pytest.raises(CacheFullError):
        read(data, 1)


def test_microbatches_before_the_previous_state_may_be_evicted(samples, open_cache):
    cache = open_cache(max_bytes=4096)
    with loader(samples, even_share(8, 2), cache) as data:
        for _ in range(10):
            read(data, 1)
            data.state_dict()
        kept = cache.cached_indices()
        assert kept
        assert min(kept) > 0
        assert max(kept) == 78
        assert cache.counts.prepared == 40


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 4)),
        st.tuples(st.just("open"), st.integers(0, 3)),
        st.tuples(st.just("back"), st.integers(0, 6)),
        st.tuples(st.just("share"), st.sampled_from([1, 2, 3, 4])),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=8,
)


@settings(max_examples=examples(20), deadline=None)
@given(OPERATIONS, st.sampled_from([0, 0, 0, 2]))
def test_cache_never_changes_the_data(tmp_path_factory, operations, num_workers):
    folder = tmp_path_factory.mktemp("cache")
    dataset = LoggedSamples(folder / "log")

    def run(cache, num_workers):
        size, found = 2, []
        data = loader(dataset, even_share(8, size), cache, num_workers)
        for name, number in operations:
            if name == "steps":
                found += read(data, number)
            elif name == "open":  # an exception leaves the step open
                step = next(iter(data))
                found += [batch.data.tolist() for batch in itertools.islice(step, number)]
                iter(data)
            elif name == "back":
                data.set_share(even_share(8, size), DataPosition(number, 8 * number))
            elif name == "share":
                size = number
                data.set_share(even_share(8, size))
            else:
                state = data.state_dict()
                data.close()
                data = loader(dataset, even_share(8, size), cache, num_workers)
                data.load_state_dict(state)
        found += read(data, 2)
        data.close()
        return found

    with BatchCache("job", fingerprint="numbers", directory=folder, max_bytes=6000) as cache:
        assert run(cache, num_workers) == run(None, 0)
