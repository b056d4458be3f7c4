"""ElasticDataLoader: committed steps, prefetched microbatches, and a position of one integer.

A step is open from its delivery until its commit. The saved state contains committed steps only. So a checkpoint has
exactly the samples that the model was trained with::

    for step in loader:                 # begins at the committed position
        for batch in step:              # this rank's microbatches, possibly none
            ...
        optimizer.step()
        step.commit()                   # only now state_dict() is past this step
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from elastic.batch_cache.microbatch_cache import MicrobatchCache
from elastic.batch_scaling.batch_plan import PlannedMicrobatch, RankPlan
from elastic.errors import PolicyError, StepOrderError
from elastic.samples.prefetching_reader import FetchedBatch, PrefetchingReader, ReadTask, WorkerDataset, dataset_size
from elastic.samples.sample_schedule import (
    I64,
    START_POSITION,
    BatchRange,
    DataPosition,
    SampleOrder,
    SampleSchedule,
)

if TYPE_CHECKING:
    from elastic.batch_cache.cache import BatchCache

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedMicrobatch:
    """Data of one forward and backward pass."""

    step: int
    number: int
    """Position of its first sample in the global batch: its id for :func:`~elastic.samples.rng.seeded`."""
    indices: tuple[int, ...]
    data: Any
    """Collated samples."""

    def __len__(self) -> int:
        return len(self.indices)


class DataStep:
    """This rank's share of one step: microbatches, to commit after the optimizer step."""

    def __init__(self, loader: ElasticDataLoader, portion: StepPortion) -> None:
        self._loader = loader
        self._portion = portion
        self._schedule = loader.schedule
        self.unread = len(portion.microbatches)

    @property
    def number(self) -> int:
        return self._portion.position.step

    @property
    def epoch(self) -> int:
        """Data epoch of the step's first sample."""
        return self._schedule.epoch_at(self._portion.position.cursor)

    @property
    def samples(self) -> int:
        """Number of samples of the whole step over all ranks, which gradients are divided by."""
        return self._portion.batch.size

    @property
    def next_position(self) -> DataPosition:
        """Position of the job after the commit of this step."""
        return DataPosition(self.number + 1, self._portion.batch.end_cursor)

    def indices(self) -> I64:
        """Return the indices of this rank's samples, for a :class:`~elastic.samples.sample_audit.SampleAudit`."""
        found = portion_indices(self._schedule, self._portion)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def epochs(self) -> I64:
        """Return the data epoch of each of them."""
        start = self._portion.batch.first
        found = [self._schedule.order.epochs(start + one.first, one.samples) for one in self._portion.microbatches]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def __len__(self) -> int:
        """Return the number of microbatches, read or not."""
        return len(self._portion.microbatches)

    def __iter__(self) -> Iterator[LoadedMicrobatch]:
        while self.unread:
            self._loader._check_open(self)
            yield self._loader._read(self)

    def commit(self) -> DataPosition:
        """Commit the step: the model was trained with it, and it is not delivered again."""
        self._loader._commit(self)
        return self.next_position


class ElasticDataLoader:
    """Data loader that delivers each sample once per data epoch over all ranks.

    The order does not depend on the world, on faults or on workers. All ranks create one with the same ``dataset``,
    ``seed``, ``shuffle`` and ``epoch_end``, each with its own ``share``. A change of the world only changes the share:
    see :meth:`set_share`. Not thread-safe.
    """

    def __init__(
        self,
        dataset: Any,
        share: RankPlan,
        *,
        seed: int,
        shuffle: str = "full",
        epoch_end: str = "wrap",
        epochs: int | None = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        seed_samples: bool = True,
        allow_changes: Collection[str] = (),
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        timeout_s: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        cache: BatchCache | None = None,
    ) -> None:
        """Create the loader.

        ``shuffle`` is as in :class:`~elastic.samples.sample_schedule.SampleOrder`, ``epoch_end`` as in
        :mod:`elastic.samples.sample_schedule`.

        ``epochs`` is the number of data epochs over all restarts; ``None``: no end. ``seed_samples`` seeds the random
        generators for each sample, which takes 8 us. ``allow_changes`` names settings that may differ from the
        checkpoint (``samples``, ``seed``, ``shuffle``, ``epoch_end``). ``cache`` stores collated microbatches, so that
        a restarted process on this node maps them instead. Its fingerprint must include all that changes a sample. The
        other arguments are those of torch's ``DataLoader``.
        """
        self.schedule = SampleSchedule(SampleOrder(dataset_size(dataset), seed, shuffle), share.global_batch, epoch_end)
        self._place = START_POSITION
        self._task_iterator = ReadTaskIterator(self.schedule, share, START_POSITION, epochs)
        self._allow_changes = tuple(allow_changes)
        self._generation = torch.full((1,), self._task_iterator.generation)
        if num_workers and not _is_shared(self._generation):
            num_workers, prefetch_factor, timeout_s, multiprocessing_context = 0, None, 0, None
        self._cache = None if cache is None else MicrobatchCache(cache, seed)
        self._committed: int | None = None
        """Cursor that the cache knows as committed; ``None`` before the first step from a position."""
        self._source = WorkerDataset(
            dataset, collate_fn, seed=seed, generation=self._generation, seed_samples=seed_samples, cache=self._cache
        )
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "pin_memory": pin_memory,
            "timeout": timeout_s,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
        }
        self._lines = PrefetchingReader(self._source, self._task_iterator, **self._options)
        self._open: DataStep | None = None
        self._closed = False

    @property
    def position(self) -> DataPosition:
        """Position after the last committed step."""
        return self._place

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: a few integers, the same on every rank.

        A cache may then evict what comes before the previous state.
        """
        if self._cache is not None and self._committed is not None:
            self._cache.mark_committed(self._committed)
            self._committed = self._place.cursor
        return self.schedule.to_state(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the saved position, in any world. Drops samples that were read ahead."""
        self._begin(self._task_iterator.share, self.schedule.position_from_state(state, self._allow_changes))

    def set_share(self, share: RankPlan, at: DataPosition | None = None) -> None:
        """Use another share from the committed position, or from ``at``, as after a resize or a rollback.

        Workers continue. Samples that they read ahead for the old share are dropped, as is an open step.
        """
        if at is None and share == self._task_iterator.share and self._open is None:
            return
        self._begin(share, self._place if at is None else at)

    def __iter__(self) -> Iterator[DataStep]:
        """Iterate from the committed position: a step that an exception left open is delivered again."""
        if self._open is not None:
            self._begin(self._task_iterator.share, self._place)
        return self

    def __next__(self) -> DataStep:
        if self._closed:
            raise StepOrderError("this loader is closed")
        if self._open is not None:
            raise StepOrderError(
                f"step {self._open.number} was not committed: call commit() on it when the optimizer's step is done, or"
                " iter() on the loader to have it again"
            )
        if self._task_iterator.is_end(self._place):
            self._lines.close()
            raise StopIteration
        step = DataStep(self, self._task_iterator.portion(self._place))
        self._open = step
        if self._cache is not None and self._committed is None:
            self._committed = self._place.cursor
            self._cache.mark_committed(self._committed)
        if not len(step):
            self._receive(step)
        return step

    def collate_samples(self, indices: Sequence[int]) -> Any:
        """Read and collate these samples in this process; the position does not change."""
        task = ReadTask(self._task_iterator.generation, self._place.step, 0, 0, tuple(indices))
        fetched = self._source.read(task)
        if fetched.error is not None:
            fetched.error.reraise()
        return fetched.data

    def close(self) -> None:
        """Stop the workers. Idempotent; the position remains readable."""
        self._closed = True
        self._open = None
        self._lines.close()

    def __enter__(self) -> ElasticDataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, share: RankPlan, place: DataPosition) -> None:
        schedule = SampleSchedule(self.schedule.order, share.global_batch, self.schedule.epoch_end)
        if place.step < 0 or place.cursor < 0:
            raise PolicyError(f"{place} is nowhere in the data")
        if self._task_iterator.is_exhausted:  # an exhausted loader of torch sends fewer tasks ahead afterwards
            self._lines.close()
        self._task_iterator.restart(schedule, share, place)
        self.schedule, self._place, self._open, self._committed = schedule, place, None, None
        self._generation.fill_(self._task_iterator.generation)

    def _check_open(self, step: DataStep) -> None:
        if step is not self._open:
            raise StepOrderError(f"step {step.number} is no longer open: the loader is at step {self._place.step}")

    def _read(self, step: DataStep) -> LoadedMicrobatch:
        task, fetched = self._receive(step)
        step.unread -= 1
        return LoadedMicrobatch(task.step, task.first, task.indices, fetched.data)

    def _receive(self, step: DataStep) -> tuple[ReadTask, FetchedBatch]:
        try:
            task, fetched = self._lines.read_next()
            while task.generation != self._task_iterator.generation:
                task, fetched = self._lines.read_next()
            if fetched.error is not None:
                fetched.error.reraise()
        except BaseException:
            # The step cannot be completed. It has to be requested again, and reading restarts with it.
            self._begin(self._task_iterator.share, self._place)
            raise
        if (task.step, task.generation) != (step.number, self._task_iterator.generation):
            raise AssertionError(f"{task} came back for step {step.number}")
        return task, fetched

    def _commit(self, step: DataStep) -> None:
        self._check_open(step)
        if step.unread:
            raise StepOrderError(
                f"{step.unread} of {len(step)} microbatches of step {step.number} were not read: committed now, their"
                " samples would be lost"
            )
        self._place, self._open = step.next_position, None


def _is_shared(generation: torch.Tensor) -> bool:
    """Return whether workers can share memory with this process; False if the shared memory is full."""
    try:
        generation.share_memory_()
    except RuntimeError as error:
        log.warning("this process reads its samples itself, as its workers have no shared memory: %s", error)
        return False
    return True


class StepPortion(NamedTuple):
    """This rank's share of one step."""

    position: DataPosition
    batch: BatchRange
    microbatches: tuple[PlannedMicrobatch, ...]


class ReadTaskIterator:
    """Iterator over read tasks from a position, up to the end of an epoch or without an end."""

    def __init__(self, schedule: SampleSchedule, share: RankPlan, place: DataPosition, epochs: int | None) -> None:
        self.generation = 0
        self._epochs = epochs
        self.restart(schedule, share, place)

    def restart(self, schedule: SampleSchedule, share: RankPlan, place: DataPosition) -> None:
        """Restart at ``place``. Tasks that were issued before belong to an old generation."""
        self.generation += 1
        self.schedule, self.share = schedule, share
        self._place = place
        self._pending: deque[ReadTask] = deque()
        self.is_exhausted = self.is_end(place)

    def is_end(self, place: DataPosition) -> bool:
        """Return whether no step begins at ``place``."""
        return self._epochs is not None and self.schedule.epoch_at(place.cursor) >= self._epochs

    def portion(self, place: DataPosition) -> StepPortion:
        """Return this rank's share of the step that begins at ``place``."""
        batch = self.schedule.batch_at(place.cursor)
        return StepPortion(place, batch, self.share.microbatches_of(batch.size))

    def __iter__(self) -> Iterator[ReadTask]:
        return self

    def __next__(self) -> ReadTask:
        if not self._pending:
            if self.is_exhausted:
                raise StopIteration
            self._next_step()
        return self._pending.popleft()

    def _next_step(self) -> None:
        portion = self.portion(self._place)
        step, batch = self._place.step, portion.batch
        for one, indices in zip(portion.microbatches, portion_indices(self.schedule, portion), strict=True):
            position = batch.first + one.first
            self._pending.append(ReadTask(self.generation, step, one.first, position, tuple(indices.tolist())))
        if not portion.microbatches:
            self._pending.append(ReadTask(self.generation, step, 0, batch.first, ()))
        self._place = DataPosition(step + 1, batch.end_cursor)
        self.is_exhausted = self.is_end(self._place)


def portion_indices(schedule: SampleSchedule, portion: StepPortion) -> list[I64]:
    """Return the indices of each microbatch.

    All of them share one call, which costs the time of 500 samples.
    """
    own = portion.microbatches
    if not own:
        return []
    first, end = own[0].first, own[-1].first + own[-1].samples
    found = schedule.order.indices(portion.batch.first + first, end - first)
    return [found[one.first - first : one.first - first + one.samples] for one in own]
