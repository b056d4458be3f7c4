"""A loader's batches by number, its position, another number of ranks, and a data module around it."""

import pickle

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from elastic.batch_cache import BatchCache, CachedDataModule, CachedLoader, cached_loader
from elastic.batch_cache.cached_loader import IndexedLoader
from elastic.errors import PolicyError


class Rows(Dataset):
    def __init__(self, count=20):
        self._count = count
        self.read = []

    def __len__(self):
        return self._count

    def __getitem__(self, row):
        self.read.append(row)
        return {"row": torch.tensor(row), "ids": torch.arange(4) + row}


class AllAtOnce(Rows):
    def __getitems__(self, rows):
        return [super(AllAtOnce, self).__getitem__(row) for row in rows]

    def __getitem__(self, row):
        raise AssertionError


class Stream(IterableDataset):
    def __iter__(self):
        yield 1


class EpochSampler(SequentialSampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([(row + self.epoch) % 20 for row in super().__iter__()])


@pytest.fixture
def cache(tmp_path):
    with BatchCache("job", fingerprint="f", directory=tmp_path / "prepared") as one:
        yield one


def rows(batches):
    return [batch["row"].tolist() for batch in batches]


def flat(batches):
    return [row for batch in batches for row in batch]


def pairs(index):
    return {"row": torch.tensor([2 * index, 2 * index + 1])}


# -- batches by number --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Rows, AllAtOnce])
def test_batches_are_those_of_the_loader(kind):
    loader = DataLoader(kind(), batch_size=3)
    batches = IndexedLoader(loader)
    assert batches.per_epoch == len(loader) == 7
    assert rows(map(batches, range(7))) == rows(loader)
    assert rows(map(batches, range(7, 14))) == rows(loader)


def test_shuffle_depends_on_seed_and_epoch():
    generator = torch.Generator()
    loader = DataLoader(Rows(), batch_size=3, shuffle=True, generator=generator)
    batches, again = IndexedLoader(loader, seed=5), pickle.loads(pickle.dumps(IndexedLoader(loader, seed=5)))
    state = torch.get_rng_state()
    second = rows(map(batches, range(7, 14)))  # in any order
    first = rows(map(batches, range(7)))
    assert first != second
    assert rows(map(again, range(14))) == first + second
    assert rows(map(IndexedLoader(loader, seed=6), range(7))) == second
    assert torch.equal(torch.get_rng_state(), state)
    for epoch, expected in enumerate([first, second]):
        sampler = RandomSampler(range(20), generator=torch.Generator().manual_seed(5 + epoch))
        assert flat(expected) == list(sampler)


def test_sampler_with_set_epoch_receives_the_epoch():
    sampler = EpochSampler(range(20))
    for loader in (
        DataLoader(Rows(), batch_size=4, sampler=sampler),
        DataLoader(Rows(), batch_sampler=BatchSampler(sampler, 4, drop_last=True)),
    ):
        assert rows(map(IndexedLoader(loader), [0, 5, 11])) == [[0, 1, 2, 3], [1, 2, 3, 4], [6, 7, 8, 9]]
    assert sampler.epoch == 0


def test_a_loader_without_batches_gives_samples():
    loader = DataLoader(Rows(), batch_size=None)
    assert rows(map(IndexedLoader(loader), [3, 19, 20])) == [3, 19, 0]


def test_loader_without_batch_numbers_is_refused():
    with pytest.raises(PolicyError, match="prepare"):
        IndexedLoader(DataLoader(Stream()))
    with pytest.raises(PolicyError, match="no batches"):
        IndexedLoader(DataLoader(Rows(2), batch_size=3, drop_last=True))


# -- a position ---------------------------------------------------------------------------------------------------


def test_successive_epochs_are_read_once(cache):
    data = Rows(8)
    loader = cached_loader(DataLoader(data, batch_size=2, shuffle=True), cache, seed=1, ahead=2)
    first, second = rows(loader), rows(loader)
    assert len(loader) == 4
    assert (loader.epoch, loader.position) == (2, 8)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(8))
    assert first != second
    assert len(data.read) == 16
    again = cached_loader(DataLoader(data, batch_size=2, shuffle=True), cache, seed=1)
    assert rows(again) == first
    assert len(data.read) == 16


def test_interrupted_loader_resumes_at_its_position(cache):
    loader = CachedLoader(cache, pairs, per_epoch=6)
    batches = iter(loader)
    assert rows([next(batches), next(batches)]) == [[0, 1], [2, 3]]
    batches.close()
    assert (loader.position, len(loader)) == (2, 4)
    other = CachedLoader(cache, pairs, per_epoch=6)
    other.load_state_dict(loader.state_dict())
    assert rows(other) == [[4, 5], [6, 7], [8, 9], [10, 11]]


def test_resized_world_reads_batches_prepared_before(cache):
    two = [CachedLoader(cache, pairs, per_epoch=12, rank=rank, world_size=2) for rank in range(2)]
    shares = []
    for loader in two:
        batches = iter(loader)
        shares.append(rows([next(batches) for _ in range(3)]))
        batches.close()
    assert shares == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    (state,) = {tuple(loader.state_dict().items()) for loader in two}
    before = set(cache.cached_indices())
    asked = []

    def prepare(index):
        asked.append(index)
        return pairs(index)

    three = [CachedLoader(cache, prepare, per_epoch=12, rank=rank, world_size=3) for rank in range(3)]
    for loader in three:
        loader.load_state_dict(dict(state))
    assert [rows(loader) for loader in three] == [
        [[2 * index, 2 * index + 1] for index in (6 + rank, 9 + rank)] for rank in range(3)
    ]
    assert not before.intersection(asked)


def test_incomplete_last_round_is_dropped(cache):
    loader = CachedLoader(cache, pairs, per_epoch=7, rank=1, world_size=3)
    assert rows(loader) == [[2, 3], [8, 9]]
    assert loader.position == 7
    assert rows(loader) == [[16, 17], [22, 23]]


def test_the_checkpoint_before_the_last_is_committed(cache, tmp_path):
    def prepare(index):
        return bytes(300)

    for index in range(12):
        cache.get(index, prepare)
    size = cache.used_bytes() // 12
    loader = CachedLoader(cache, prepare, per_epoch=12)
    for number, _ in enumerate(loader):
        if number in (4, 9):
            loader.state_dict()
    with BatchCache("job", fingerprint="f", directory=tmp_path / "prepared", max_bytes=size) as small:
        small.get(99, prepare)
        assert small.cached_indices() == list(range(12))  # no space even after everything behind the cursor is evicted
    with BatchCache("job", fingerprint="f", directory=tmp_path / "prepared", max_bytes=8 * size) as small:
        small.get(12, prepare)
        assert small.cached_indices() == [5, 6, 7, 8, 9, 10, 11, 12]


def test_fresh_job_resets_the_old_cursor(cache, tmp_path):
    for index in (50, 51, 52):
        cache.get(index, pairs)
    cache.mark_committed(50)
    with BatchCache("job", fingerprint="f", directory=tmp_path / "prepared", max_bytes=cache.used_bytes()) as small:
        assert len(rows(CachedLoader(small, pairs, per_epoch=2))) == 2
        assert small.cached_indices() == [0, 1, 50]


def test_a_position_in_other_batches_is_refused(cache, tmp_path):
    state = CachedLoader(cache, pairs, per_epoch=6).state_dict()
    with (
        BatchCache("job", fingerprint="another", directory=tmp_path / "prepared") as other,
        pytest.raises(PolicyError, match="tokenizer"),
    ):
        CachedLoader(other, pairs, per_epoch=6).load_state_dict(state)


@pytest.mark.parametrize("wrong", [{"rank": 2, "world_size": 2}, {"rank": -1}, {"world_size": 7}])
def test_a_rank_that_cannot_be_is_refused(cache, wrong):
    with pytest.raises(PolicyError, match="at least one"):
        CachedLoader(cache, pairs, per_epoch=6, **wrong)


# -- a data module ------------------------------------------------------------------------------------------------


class Module:
    """A data module as a user writes it for Lightning."""

    def __init__(self):
        self.data = Rows(12)
        self.stages = []
        self.state = {"seen": 1}

    def setup(self, stage):
        self.stages.append(stage)

    def teardown(self, stage):
        self.stages.append(f"end of {stage}")

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=2)

    def val_dataloader(self):
        return "mine"

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = dict(state)


def module_over(tmp_path, module):
    def open_cache():
        return BatchCache("job", fingerprint="f", directory=tmp_path / "prepared")

    return CachedDataModule(module, open_cache, ahead=1)


def test_data_module_resumes_without_rereading_data(tmp_path):
    first = module_over(tmp_path, Module())
    first.setup("fit")
    first.setup("validate")
    batches = iter(first.train_dataloader())
    assert rows([next(batches), next(batches)]) == [[0, 1], [2, 3]]
    state = pickle.loads(pickle.dumps(first.state_dict()))
    next(batches)  # trained on after the checkpoint
    batches.close()
    assert first.val_dataloader() == "mine"
    first.teardown("fit")
    assert first.stages == ["fit", "validate", "end of fit"]

    second = module_over(tmp_path, Module())
    second.load_state_dict(state)
    assert second.state_dict()["loader"] == state["loader"]
    second.setup("fit")
    batches = iter(second.train_dataloader())
    assert rows([next(batches)]) == [[4, 5]]
    assert 4 not in second.data.read
    batches.close()
    assert second.train_dataloader().position == 3  # a new loader continues from the same position
    second.teardown("fit")


def test_data_module_without_setup_raises(tmp_path):
    module = module_over(tmp_path, Module())
    with pytest.raises(PolicyError, match="setup"):
        module.train_dataloader()
    with pytest.raises(AttributeError):
        module.nothing_of_that_name  # noqa: B018
