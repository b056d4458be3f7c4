import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from elastic.errors import CursorError, PolicyError, StepOrderError
from elastic.samples import DataPosition, ElasticDataLoader, ElasticSampler, SampleOrder
from elastic.samples.sampler import StatefulMicrobatchSampler
from tests.support.batch_shares import even_share, position_after

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),  # torchdata's, with torch 2.13
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]
DATA = list(range(23))


def sampler(world=1, rank=0, batch=6, microbatch=2, **options):
    return ElasticSampler(DATA, even_share(batch, microbatch, rank, world), **{"seed": 5, **options})


def expected(epochs=1):
    return SampleOrder(23, 5).indices(0, 23 * epochs).tolist()


def workers(count):
    return {"num_workers": count, "multiprocessing_context": "fork"} if count else {}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_are_for_torchs_own_loader(num_workers):
    mine = sampler(epoch_end="short")
    loader = DataLoader(DATA, batch_sampler=mine.batches(), **workers(num_workers))
    assert len(loader) == 12
    found = []
    for _ in range(2):
        for number, batch in enumerate(loader, 1):
            found += batch.tolist()
            if number % 3 == 0:
                mine.commit()
    assert found == expected(2)
    assert mine.position == (8, 46)


def test_all_ranks_together_have_every_sample_once():
    ranks = [sampler(3, rank, epoch_end="short") for rank in range(3)]
    steps = zip(*(list(rank.batches()) for rank in ranks), strict=True)
    assert [index for step in steps for batch in step for index in batch] == expected()


@given(st.integers(1, 30), st.integers(1, 12), st.integers(1, 5), st.integers(0, 9), st.sampled_from(["wrap", "short"]))
def test_sampler_lengths_are_known_in_advance(samples, batch, microbatch, step, epoch_end):
    mine = ElasticSampler(samples, even_share(batch, microbatch), seed=1, epoch_end=epoch_end)
    mine.set_share(mine.share, position_after(mine.schedule, step))
    batches = list(mine.batches())
    assert (len(mine), len(mine.batches())) == (sum(map(len, batches)), len(batches))
    mine.set_share(mine.share)
    assert list(mine) == list(itertools.chain(*batches))


def test_iteration_starts_at_the_committed_position():
    mine = sampler()
    batches = iter(mine.batches())
    first = [next(batches) for _ in range(5)]
    mine.commit()
    assert list(itertools.islice(mine.batches(), 2)) == first[3:]
    again = sampler()
    again.load_state_dict(mine.state_dict())
    assert again.position == (1, 6)
    assert list(itertools.islice(again.batches(), 2)) == first[3:]
    again.set_share(even_share(6, 2, 1, 3), at=DataPosition(0, 0))
    assert next(iter(again.batches())) == first[1]


def test_repeating_an_uncommitted_epoch_raises():
    mine = sampler()
    list(mine.batches())
    with pytest.raises(StepOrderError, match="without a committed step"):
        list(mine.batches())
    mine.commit()
    assert next(iter(mine)) == mine.schedule.order.indices(6, 1)[0]


def test_batch_not_handed_out_cannot_be_committed():
    mine = sampler()
    with pytest.raises(StepOrderError, match="step 0 cannot be committed: 0 were handed out"):
        mine.commit()
    next(iter(mine.batches()))
    mine.commit()
    with pytest.raises(StepOrderError, match="step 1 cannot be committed: 1 were handed out"):
        mine.commit()


def test_a_rank_without_samples_is_refused():
    mine = sampler(world=9, rank=8)
    with pytest.raises(PolicyError, match="no samples at step 0"):
        list(mine.batches())


def test_a_cursor_of_other_samples_is_refused():
    with pytest.raises(CursorError, match="seed was 5 and is 6"):
        sampler(seed=6).load_state_dict(sampler().state_dict())


def test_sampler_and_loader_have_the_same_order():
    shares = even_share(6, 2, 1, 2)
    with ElasticDataLoader(DATA, shares, seed=5) as loader:
        step = next(loader)
        assert [list(batch.indices) for batch in step] == list(itertools.islice(sampler(2, 1).batches(), len(step)))


# torchdata's StatefulDataLoader


def iterated(stateful, count):
    """Return the batches of an iterator and its state before each."""
    batches, states = iter(stateful), []
    found = []
    for _ in range(count):
        states.append(batches.state_dict())
        found.append(next(batches))
    return found, states


def test_stateful_iterator_resumes_after_any_batch():
    whole, states = iterated(StatefulMicrobatchSampler(sampler(epoch_end="short")), 12)
    for number, state in enumerate(states):
        again = iter(StatefulMicrobatchSampler(sampler(epoch_end="short")))
        again.load_state_dict(state)
        assert list(again) == whole[number:]


def test_state_saved_at_the_end_of_a_step_fits_any_world():
    _, states = iterated(StatefulMicrobatchSampler(sampler(epoch_end="short")), 12)
    found = []
    for rank in range(3):
        again = iter(StatefulMicrobatchSampler(sampler(3, rank, epoch_end="short")))
        again.load_state_dict(states[6])
        found.append(list(again))
        if rank:
            with pytest.raises(CursorError, match="save at the end of steps"):
                iter(StatefulMicrobatchSampler(sampler(3, rank, epoch_end="short"))).load_state_dict(states[5])
    assert [index for step in zip(*found, strict=True) for batch in step for index in batch] == expected()[12:]


def test_the_next_iteration_has_the_next_epoch():
    batches = StatefulMicrobatchSampler(sampler(epoch_end="short"))
    assert list(itertools.chain(*batches, *batches)) == expected(2)


POSITIONS = [
    pytest.param(at, num_workers, marks=pytest.mark.nightly if num_workers and at not in (3, 12) else ())
    for at in (0, 3, 5, 12, 15)
    for num_workers in (0, 2)
]


@pytest.mark.parametrize(("at", "num_workers"), POSITIONS)
def test_torchdata_loader_resumes_at_its_position(num_workers, at):
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader():
        batches = StatefulMicrobatchSampler(sampler(epoch_end="short"))
        return stateful.StatefulDataLoader(DATA, batch_sampler=batches, **workers(num_workers))

    def epochs(one, count):
        return [batch.tolist() for _ in range(count) for batch in one]

    first = loader()
    running = itertools.chain.from_iterable(iter(first) for _ in range(3))
    had = [batch.tolist() for batch in itertools.islice(running, at)]
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    rest = epochs(second, 2)
    assert list(itertools.chain(*had, *rest))[: 2 * 23] == expected(2)
    del running, first, second


# Hugging Face's datasets


class Rows:
    """A map-style dataset with single rows and, for loaders, many rows at a time."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, key):
        return {"id": torch.tensor(key), "text": f"row {key}"}

    def __getitems__(self, keys):
        return [self[key] for key in keys]


class Stream:
    """A streaming dataset without rows."""

    def __iter__(self):
        return iter(())


def all_rows(dataset):
    found = []
    with ElasticDataLoader(dataset, even_share(4, 4), seed=1, epochs=1, epoch_end="short") as loader:
        for step in loader:
            for batch in step:
                assert batch.data["text"] == [f"row {index}" for index in batch.indices]
                found += batch.data["id"].tolist()
            step.commit()
    return found


def test_rows_of_hugging_face_by_their_interface():
    assert sorted(all_rows(Rows(10))) == list(range(10))
    with pytest.raises(PolicyError, match="Stream can only be read from its beginning"):
        ElasticDataLoader(Stream(), even_share(4, 4), seed=1)


def test_rows_of_hugging_face(monkeypatch):
    import datasets

    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # its progress bars would leave a thread
    columns = {"id": list(range(10)), "text": [f"row {row}" for row in range(10)]}
    table = datasets.Dataset.from_dict(columns)
    assert all_rows(table.with_format("torch")) == all_rows(Rows(10))
    with pytest.raises(PolicyError, match="only be read from its beginning"):
        ElasticDataLoader(table.to_iterable_dataset(), even_share(4, 4), seed=1)
