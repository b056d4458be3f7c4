import os
import random
import signal

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from elastic.errors import CursorError, DataWorkersLostError, PolicyError, StepOrderError
from elastic.samples import DataPosition, ElasticDataLoader, SampleAudit, SampleLog
from elastic.samples.sample_audit import verify_sample_logs
from tests.support.batch_shares import even_share
from tests.support.example_counts import examples

pytestmark = [
    pytest.mark.slow,
    # Workers are forked because spawning takes seconds; no thread of torch holds a lock at that time.
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]
workers = pytest.mark.parametrize("num_workers", [0, 2])


class Numbers:
    """Samples that return their index and the random numbers they drew."""

    def __init__(self, samples=23):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        if not 0 <= index < self.samples:
            raise IndexError(index)
        drawn = int(torch.randint(1 << 30, ())), random.getrandbits(30), int(np.random.randint(1 << 30))  # noqa: NPY002
        return torch.tensor([index, *drawn])


def loader(shares, dataset=None, num_workers=0, **options):
    if num_workers:
        options.update(num_workers=num_workers, multiprocessing_context="fork")
    return ElasticDataLoader(Numbers() if dataset is None else dataset, shares, **{"seed": 5, **options})


def read(step):
    """Return all samples of a step, and commit it."""
    found = torch.cat([batch.data for batch in step]).tolist() if len(step) else []
    step.commit()
    return found


class Job:
    """A job of any number of ranks, each with its own loader."""

    def __init__(self, batch, microbatch, **options):
        self.batch, self.microbatch, self.options = batch, microbatch, options
        self.ranks = []
        self.done = {}
        """step -> what all ranks together read of it."""
        self.ledger = SampleAudit()

    def shares(self, world):
        return [even_share(self.batch, self.microbatch, rank, world) for rank in range(world)]

    def start(self, world, state=None):
        """Start new processes."""
        self.close()
        self.ranks = [loader(share, **self.options) for share in self.shares(world)]
        for rank in self.ranks:
            if state is not None:
                rank.load_state_dict(state)
            iter(rank)

    def resize(self, world, place):
        """Resize the existing processes and start new ones."""
        for rank in self.ranks[world:]:
            rank.close()
        self.ranks = self.ranks[:world]
        for rank, share in zip(self.ranks, self.shares(world), strict=False):
            rank.set_share(share, place)
        for share in self.shares(world)[len(self.ranks) :]:
            new = loader(share, **self.options)
            new.set_share(share, place)
            self.ranks.append(new)
        for rank in self.ranks:
            iter(rank)

    def step(self):
        """Return whether the ranks did a step."""
        steps = [next(rank, None) for rank in self.ranks]
        if None in steps:
            assert not any(steps)
            return False
        total = SampleAudit()
        for step in steps:
            mine = SampleAudit()
            mine.record(step.number, step.epochs(), step.indices())
            total.merge(mine)
        number = steps[0].number
        self.ledger.rewind(number)
        self.ledger.merge(total)
        self.done[number] = [sample for step in steps for sample in read(step)]
        assert len({rank.position for rank in self.ranks}) == 1
        return True

    def crash_within(self):
        """Begin a step on some ranks; one of them has read a sample of it."""
        for number, rank in enumerate(self.ranks):
            step = next(rank, None)
            if step is not None and number % 2 == 0:
                next(iter(step), None)

    def close(self):
        for rank in self.ranks:
            rank.close()

    @property
    def place(self):
        return self.ranks[0].position

    def committed(self):
        return [self.done[number] for number in range(self.place.step)]


@st.composite
def histories(draw):
    samples = draw(st.integers(1, 40))
    epoch_end = draw(st.sampled_from(["wrap", "short", "drop"]))
    batch = draw(st.integers(1, samples if epoch_end == "drop" else 12))
    worlds = st.integers(1, 4)
    events = st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 6)),
        st.tuples(st.sampled_from(["crash", "resize", "crash within", "rollback", "restart"]), worlds),
    )
    options = {
        "epoch_end": epoch_end,
        "shuffle": draw(st.sampled_from(["full", "blocks:3*2", "none"])),
        "dataset": Numbers(samples),
    }
    return options, batch, draw(st.integers(1, 5)), draw(st.lists(events, min_size=1, max_size=12))


def live_through(job, events):
    """Run the job through every kind of fault; it restarts from its last saved state."""
    job.start(2)
    saved = job.ranks[0].state_dict()
    for what, number in events:
        if what == "steps":
            for _ in range(number):
                job.step()
            if number % 2:
                saved = job.ranks[-1].state_dict()
        elif what == "crash":
            job.start(number, saved)
        elif what == "crash within":
            job.crash_within()
            job.start(number, saved)
        elif what == "restart":  # the job repeats the steps that had begun
            job.crash_within()
            for rank in job.ranks:
                iter(rank)
        elif what == "resize":
            job.resize(number, job.place)
        else:
            job.resize(number, DataPosition(saved["step"], saved["cursor"]))
    job.step()


def undisturbed(job, steps):
    alone = Job(job.batch, job.microbatch, **job.options)
    alone.start(1)
    for _ in range(steps):
        alone.step()
    alone.close()
    return alone.committed()


def check(job):
    """Check that each sample occurs once, in the order and with the numbers of a fault-free run."""
    committed = job.committed()
    assert committed == undisturbed(job, len(committed))
    course = job.ranks[0].schedule
    positions = [
        epoch * course.order.samples + first + k
        for epoch, first, size in course.consumed_by_epoch(job.place.cursor)
        for k in range(size)
    ]
    indices = [course.order.indices(position, 1)[0] for position in positions]
    assert [sample[0] for step in committed for sample in step] == indices
    job.ledger.rewind(job.place.step)
    assert job.ledger.verify(course, job.place.cursor) == []


@settings(max_examples=examples(40))
@given(histories())
def test_every_sample_is_used_once_in_random_histories(history):
    options, batch, microbatch, events = history
    job = Job(batch, microbatch, **options)
    live_through(job, events)
    check(job)
    job.close()


@pytest.mark.nightly
@settings(max_examples=3000)
@given(histories())
def test_every_sample_is_used_once_in_long_random_histories(history):
    options, batch, microbatch, events = history
    job = Job(batch, microbatch, **options)
    live_through(job, events)
    check(job)
    job.close()


STORY = [
    ("steps", 3),
    ("resize", 3),
    ("steps", 2),
    ("crash within", 1),
    ("steps", 1),
    ("restart", 1),
    ("steps", 2),
    ("rollback", 2),
    ("steps", 4),
]


@pytest.mark.parametrize(("num_workers", "epoch_end"), [(0, "wrap"), (1, "short"), (2, "drop"), (3, "wrap")])
def test_every_sample_once_with_any_number_of_workers(num_workers, epoch_end):
    job = Job(6, 2, epoch_end=epoch_end, num_workers=num_workers)
    live_through(job, STORY)
    assert job.place.step == 9
    job.options["num_workers"] = 0
    check(job)
    job.close()


@pytest.mark.nightly
@settings(max_examples=60)
@given(histories(), st.integers(1, 3))
def test_every_sample_once_with_workers_for_long(history, num_workers):
    options, batch, microbatch, events = history
    job = Job(batch, microbatch, **options, num_workers=num_workers)
    live_through(job, events)
    job.options["num_workers"] = 0
    check(job)
    job.close()


def test_the_loader_ends_with_its_epochs_and_leaves_nothing_running():
    whole = loader(even_share(6, 2), epoch_end="short", epochs=2, num_workers=2)
    sizes = [len(read(step)) for step in whole]
    assert sizes == [6, 6, 6, 5] * 2
    assert list(whole) == []
    whole.set_share(even_share(6, 2), DataPosition(4, 23))
    assert [len(read(step)) for step in whole] == [6, 6, 6, 5]


def test_a_batch_over_the_end_of_an_epoch_is_of_both():
    with loader(even_share(15, 15), epochs=1) as whole:
        steps = [(step.number, step.epoch, step.epochs().tolist(), read(step)) for step in whole]
    assert [epochs for _, _, epochs, _ in steps] == [[0] * 15, [0] * 8 + [1] * 7]
    assert sorted(
        sample[0] for _, _, epochs, found in steps for epoch, sample in zip(epochs, found, strict=True) if epoch == 0
    ) == list(range(23))


@workers
def test_rank_without_samples_still_steps(num_workers):
    with loader(even_share(4, 2, rank=2, world=3), num_workers=num_workers) as idle:
        for number in range(5):
            step = next(idle)
            assert (step.number, len(step), list(step), step.samples, step.indices().tolist()) == (number, 0, [], 4, [])
            step.commit()


def test_a_step_has_to_be_committed_before_the_next():
    with loader(even_share(4, 2)) as steps:
        step = next(steps)
        assert steps.state_dict()["cursor"] == 0
        first = list(step)
        assert steps.state_dict()["cursor"] == 0
        with pytest.raises(StepOrderError, match="step 0 was not committed"):
            next(steps)
        assert step.commit() == (1, 4) == steps.position
        with pytest.raises(StepOrderError, match="no longer open"):
            step.commit()
        assert [batch.number for batch in first] == [0, 2]
        assert next(steps).number == 1


def test_samples_that_were_not_read_cannot_be_committed():
    with loader(even_share(4, 2)) as steps:
        step = next(steps)
        next(iter(step))
        with pytest.raises(StepOrderError, match="1 of 2 microbatches of step 0 were not read"):
            step.commit()
        assert len(list(step)) == 1
        step.commit()


def test_step_interrupted_by_an_error_is_repeated():
    with loader(even_share(4, 2), num_workers=2) as steps:
        for step in steps:
            if step.number == 2:
                break
            read(step)
        first = next(iter(step))
        again = next(iter(steps))
        assert again.number == 2
        assert next(iter(again)).indices == first.indices
        with pytest.raises(StepOrderError, match="no longer open"):
            next(iter(step))


def pids(elastic):
    return [worker.pid for worker in elastic._lines._running._workers]


def test_resize_keeps_workers_and_discards_their_prefetched_samples():
    with loader(even_share(8, 2, 0, 2), num_workers=2, prefetch_factor=3) as steps:
        read(next(steps))
        before = pids(steps)
        steps.set_share(even_share(8, 2, 2, 4))
        step = next(steps)
        indices = step.indices().tolist()
        assert [sample[0] for sample in read(step)] == indices
        assert len(indices) == 2
        steps.set_share(even_share(8, 2, 2, 4), at=DataPosition(0, 0))
        step = next(steps)
        assert (step.number, step.indices().tolist()) == (0, steps.schedule.order.indices(4, 2).tolist())
        read(step)
        assert pids(steps) == before


def test_a_plan_that_cannot_be_changes_nothing():
    with loader(even_share(8, 2), epoch_end="drop") as steps:
        read(next(steps))
        with pytest.raises(PolicyError, match="global batches of 200"):
            steps.set_share(even_share(200, 2))
        with pytest.raises(PolicyError, match="nowhere"):
            steps.set_share(even_share(8, 2), at=DataPosition(-1, 0))
        assert next(steps).indices().tolist() == steps.schedule.order.indices(8, 8).tolist()


class Fatal(Numbers):
    """Samples that kill their reader at one index while a flag file exists."""

    def __init__(self, flag, index):
        super().__init__()
        self.flag, self.index = flag, index

    def __getitem__(self, index):
        if index == self.index and self.flag.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_dead_workers_are_reported_and_replaced(tmp_path):
    flag = tmp_path / "flag"
    flag.touch()
    with loader(even_share(6, 2)) as whole:
        expected = [read(next(whole)) for _ in range(3)]
    victim = expected[1][3][0]
    with loader(even_share(6, 2), Fatal(flag, victim), num_workers=2, prefetch_factor=1) as steps:
        assert read(next(steps)) == expected[0]
        with pytest.raises(DataWorkersLostError, match="iterate again"):
            read(next(steps))
        assert steps.position.step == 1
        flag.unlink()
        assert [read(step) for step, _ in zip(steps, range(2), strict=False)] == expected[1:]


class Broken(Numbers):
    def __init__(self, index):
        super().__init__()
        self.index = index

    def __getitem__(self, index):
        if index == self.index:
            raise LookupError(f"no page {index}")
        return super().__getitem__(index)


@workers
def test_dataset_error_is_raised_at_its_step(num_workers):
    order = [sample for step in undisturbed(Job(6, 2), 3) for sample, *_ in step]
    with loader(even_share(6, 2), Broken(order[8]), num_workers=num_workers) as steps:
        assert len(read(next(steps))) == 6
        step = next(steps)
        assert next(iter(step)).number == 0
        with pytest.raises(LookupError, match=f"(?s)reading samples.*{order[8]}.* of step 1.*no page {order[8]}"):
            list(step)
        assert steps.position == (1, 6)
        with pytest.raises(LookupError):
            read(next(steps))


@workers
def test_error_in_a_discarded_sample_is_ignored(num_workers):
    order = [sample for step in undisturbed(Job(6, 2), 2) for sample, *_ in step]
    with loader(even_share(6, 2), Broken(order[8]), num_workers=num_workers) as steps:
        read(next(steps))
        steps.set_share(even_share(6, 2, 0, 3))
        assert len(read(next(steps))) == 2


@workers
def test_random_numbers_of_a_sample_are_its_own_in_every_epoch(num_workers):
    with loader(even_share(23, 4), num_workers=num_workers) as steps:
        epochs = [{index: drawn for index, *drawn in read(next(steps))} for _ in range(2)]
    assert epochs == [{index: drawn for index, *drawn in step} for step in undisturbed(Job(23, 7), 2)]
    assert all(epochs[0][index] != epochs[1][index] for index in range(23))


@workers
def test_the_random_numbers_of_the_training_are_left_alone(num_workers):
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(3).tolist(), random.random()
    torch.manual_seed(1)
    random.seed(1)
    with loader(even_share(6, 2), num_workers=num_workers) as steps:
        read(next(steps))
        assert (torch.rand(3).tolist(), random.random()) == expected


def test_samples_need_not_be_seeded():
    with loader(even_share(6, 6), seed_samples=False) as steps:
        torch.manual_seed(1)
        expected = torch.randint(1 << 30, (6,)).tolist()
        torch.manual_seed(1)
        assert [drawn for _, drawn, *_ in read(next(steps))] == expected


class Pages:
    """By ``get``, as streaming formats have it."""

    def __len__(self):
        return 9

    def get(self, index):
        return {"page": index}


class Tables(Dataset):
    """Many at a time, as Hugging Face's datasets have it."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        raise AssertionError("one by one is slow")

    def __getitems__(self, indices):
        assert type(indices) is list
        return [{"row": index, "drawn": random.random()} for index in indices]


def test_samples_may_be_had_by_get():
    with loader(even_share(9, 9), Pages(), collate_fn=list) as steps:
        (batch,) = next(steps)
    assert sorted(row["page"] for row in batch.data) == list(range(9))
    assert batch.data == [{"page": index} for index in batch.indices]


@workers
def test_samples_may_be_had_many_at_a_time(num_workers):
    def rows(world):
        found = []
        for rank in range(world):
            with loader(even_share(9, 3, rank, world), Tables(), collate_fn=list, num_workers=num_workers) as steps:
                found += [row for batch in next(steps) for row in batch.data]
        return found

    assert rows(1) == rows(2) == rows(3)
    assert sorted(row["row"] for row in rows(1)) == list(range(9))


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(9))


class Unsized(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "words"),
    [(Endless(), "only be read from its beginning"), (iter([1]), "only be read"), (Unsized(), "has no length")],
)
def test_data_without_numbers_or_length_is_refused(dataset, words):
    with pytest.raises(PolicyError, match=words):
        loader(even_share(4, 2), dataset)
    with pytest.raises(PolicyError, match="1 to"):
        loader(even_share(4, 2), [])


def test_a_checkpoint_of_other_data_is_refused():
    state = loader(even_share(4, 2)).state_dict()
    with pytest.raises(CursorError, match="samples was 23 and is 24"):
        loader(even_share(4, 2), Numbers(24)).load_state_dict(state)
    loader(even_share(4, 2), Numbers(24), allow_changes=["samples"]).load_state_dict(state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_loader_state_is_saved_by_dcp(tmp_path):
    with loader(even_share(6, 2)) as steps:
        read(next(steps))
        dcp.save({"samples": steps}, checkpoint_id=tmp_path, no_dist=True)
        expected = read(next(steps))
    for rank in range(2):
        with loader(even_share(6, 2, rank, 2)) as again:
            dcp.load({"samples": again}, checkpoint_id=tmp_path, no_dist=True)
            assert again.position == (1, 6)
            found = read(next(again))
            assert found == expected[: len(found)]
            del expected[: len(found)]
    assert expected == []


def test_closed_is_closed():
    steps = loader(even_share(4, 2), num_workers=1)
    step = next(steps)
    list(step)
    steps.close()
    steps.close()
    with pytest.raises(StepOrderError, match="closed"):
        next(steps)
    with pytest.raises(StepOrderError):
        step.commit()
    assert steps.state_dict()["cursor"] == 0


def test_unused_loader_starts_no_workers():
    steps = loader(even_share(4, 2), num_workers=2)
    steps.set_share(even_share(4, 1))
    assert steps._lines._running is None


def test_journals_of_two_worlds(tmp_path):
    """The last step of the first world had begun, and another world repeats it."""
    files = []
    for world, ranks, place, steps in [(1, 3, DataPosition(0, 0), 5), (2, 2, DataPosition(4, 24), 4)]:
        for rank in range(ranks):
            files.append(tmp_path / f"{world}-{rank}")
            share = even_share(6, 2, rank, ranks)
            with SampleLog(files[-1]) as journal, loader(share) as mine:
                mine.set_share(share, place)
                for step, _ in zip(mine, range(steps), strict=False):
                    journal.record(world, step.number, step.epochs(), step.indices())
                    read(step)
    assert verify_sample_logs(files, mine.schedule, *DataPosition(8, 48)) == []


def test_pinned_memory_is_passed_on():
    if torch.accelerator.is_available():
        with loader(even_share(4, 2), pin_memory=True, num_workers=1) as steps:
            assert all(batch.data.is_pinned() for batch in next(steps))
    else:
        with (
            pytest.warns(UserWarning, match="no accelerator"),
            loader(even_share(4, 2), pin_memory=True) as steps,
        ):
            assert len(read(next(steps))) == 4


def test_process_reads_its_own_samples_without_shared_memory(monkeypatch, caplog):
    def full(_):
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    def read(num_workers):
        options = {"prefetch_factor": 2, "timeout_s": 5, "multiprocessing_context": "fork"} if num_workers else {}
        with ElasticDataLoader(
            Numbers(), even_share(4, 2), seed=3, epochs=1, num_workers=num_workers, **options
        ) as loader:
            found = []
            for step in loader:
                found += [[part.tolist() for part in batch.data] for batch in step]
                step.commit()
            return found

    expected = read(0)
    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    found = read(2)
    assert found == expected
    assert "No space left on device" in caplog.text
