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

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from elastic.errors import DataWorkersLostError, PolicyError, StepOrderError
from elastic.samples.rng import preserved_rng, sample_key, seed_generators
from elastic.samples.sample_schedule import (
    I64,
    START_POSITION,
    BatchRange,
    DataPosition,
    MicrobatchSlice,
    SampleOrder,
    SampleSchedule,
    ShareSource,
    hash_key,
    validated_slices,
)

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
        self.unread = len(portion.slices)

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
        found = [self._schedule.order.epochs(start + piece.first, piece.size) for piece in self._portion.slices]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def __len__(self) -> int:
        """Return the number of microbatches, read or not."""
        return len(self._portion.slices)

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
        share: ShareSource,
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
    ) -> None:
        """Create the loader.

        ``shuffle`` is as in :class:`~elastic.samples.sample_schedule.SampleOrder`, ``epoch_end`` as in
        :mod:`elastic.samples.sample_schedule`.

        ``epochs`` is the number of data epochs over all restarts; ``None``: no end. ``seed_samples`` seeds the random
        generators for each sample, which takes 8 us. ``allow_changes`` names settings that may differ from the
        checkpoint (``samples``, ``seed``, ``shuffle``, ``epoch_end``). The other arguments are those of torch's
        ``DataLoader``.
        """
        self.schedule = SampleSchedule(SampleOrder(dataset_size(dataset), seed, shuffle), share.global_batch, epoch_end)
        self._place = START_POSITION
        self._task_iterator = ReadTaskIterator(self.schedule, share, START_POSITION, epochs)
        self._allow_changes = tuple(allow_changes)
        self._generation = torch.full((1,), self._task_iterator.generation)
        if num_workers and not _is_shared(self._generation):
            num_workers, prefetch_factor, timeout_s, multiprocessing_context = 0, None, 0, None
        self._source = WorkerDataset(
            dataset, collate_fn, seed=seed, generation=self._generation, seed_samples=seed_samples
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
        """Return the state for a checkpoint: a few integers, the same on every rank."""
        return self.schedule.to_state(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the saved position, in any world. Drops samples that were read ahead."""
        self._begin(self._task_iterator.share, self.schedule.position_from_state(state, self._allow_changes))

    def set_share(self, share: ShareSource, at: DataPosition | None = None) -> None:
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
        if not len(step):
            self._receive(step)
        return step

    def collate_samples(self, indices: Sequence[int]) -> Any:
        """Read and collate these samples in this process; the position does not change."""
        task = ReadTask(self._task_iterator.generation, self._place.step, 0, 0, tuple(indices))
        fetched = self._source.__getitems__(task)
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

    def _begin(self, share: ShareSource, place: DataPosition) -> None:
        schedule = SampleSchedule(self.schedule.order, share.global_batch, self.schedule.epoch_end)
        if place.step < 0 or place.cursor < 0:
            raise PolicyError(f"{place} is nowhere in the data")
        if self._task_iterator.is_exhausted:  # an exhausted loader of torch sends fewer tasks ahead afterwards
            self._lines.close()
        self._task_iterator.restart(schedule, share, place)
        self.schedule, self._place, self._open = schedule, place, None
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
    slices: tuple[MicrobatchSlice, ...]


class ReadTaskIterator:
    """Iterator over read tasks from a position, up to the end of an epoch or without an end."""

    def __init__(self, schedule: SampleSchedule, share: ShareSource, place: DataPosition, epochs: int | None) -> None:
        self.generation = 0
        self._epochs = epochs
        self.restart(schedule, share, place)

    def restart(self, schedule: SampleSchedule, share: ShareSource, place: DataPosition) -> None:
        """Restart at ``place``. Tasks that were issued before belong to an old generation."""
        whole = validated_slices(share, schedule.global_batch)  # before any change: this raises for an impossible plan
        self.generation += 1
        self.schedule, self.share = schedule, share
        self._slices_by_size = {schedule.global_batch: whole}
        self._place = place
        self._pending: deque[ReadTask] = deque()
        self.is_exhausted = self.is_end(place)

    def is_end(self, place: DataPosition) -> bool:
        """Return whether no step begins at ``place``."""
        return self._epochs is not None and self.schedule.epoch_at(place.cursor) >= self._epochs

    def slices_of(self, samples: int) -> tuple[MicrobatchSlice, ...]:
        """Return this rank's slices of a batch of ``samples``."""
        if samples not in self._slices_by_size:
            self._slices_by_size[samples] = validated_slices(self.share, samples)
        return self._slices_by_size[samples]

    def portion(self, place: DataPosition) -> StepPortion:
        """Return this rank's share of the step that begins at ``place``."""
        batch = self.schedule.batch_at(place.cursor)
        return StepPortion(place, batch, self.slices_of(batch.size))

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
        for piece, indices in zip(portion.slices, portion_indices(self.schedule, portion), strict=True):
            position = batch.first + piece.first
            self._pending.append(ReadTask(self.generation, step, piece.first, position, tuple(indices.tolist())))
        if not portion.slices:
            self._pending.append(ReadTask(self.generation, step, 0, batch.first, ()))
        self._place = DataPosition(step + 1, batch.end_cursor)
        self.is_exhausted = self.is_end(self._place)


def portion_indices(schedule: SampleSchedule, portion: StepPortion) -> list[I64]:
    """Return the indices of each slice.

    Adjacent slices share one call, which costs the time of 500 samples.
    """
    slices = portion.slices
    if not slices:
        return []
    first, end = slices[0].first, slices[-1].first + slices[-1].size
    if end - first > 2 * sum(piece.size for piece in slices):
        return [schedule.order.indices(portion.batch.first + piece.first, piece.size) for piece in slices]
    found = schedule.order.indices(portion.batch.first + first, end - first)
    return [found[piece.first - first : piece.first - first + piece.size] for piece in slices]


_DIED = ("exited unexpectedly", "killed by signal")


class PrefetchingReader:
    """Reader of ``tasks`` in worker processes, or in this process without workers.

    The first ``read_next`` starts the workers.
    """

    def __init__(self, source: WorkerDataset, tasks: Iterator[ReadTask], **options: Any) -> None:
        self._tasks = tasks
        self._in_flight: deque[ReadTask] = deque()
        # A separate generator: otherwise torch draws the workers' first seed from the training's generator.
        self._loader: DataLoader[Any] = DataLoader(
            source,  # type: ignore[arg-type] # torch only calls its __getitems__
            batch_sampler=_RecordingIterator(tasks, self._in_flight),  # type: ignore[arg-type] # torch only iterates over it
            collate_fn=identity_collate,  # type: ignore[arg-type] # torch returns its result unchanged
            generator=torch.Generator(),
            **options,
        )
        self._running: Any = None

    def read_next(self) -> tuple[ReadTask, FetchedBatch]:
        """Return the oldest pending task and its result. Any exception closes the reader."""
        try:
            if self._running is None:
                self._running = iter(self._loader)
            fetched = next(self._running)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError) and any(words in str(error) for words in _DIED):
                raise DataWorkersLostError(
                    f"{error}. The loader is at its last committed step: iterate again to continue with new workers."
                    " If they were killed for memory, use fewer of them or a smaller prefetch_factor"
                ) from error
            raise
        return self._in_flight.popleft(), fetched

    def close(self) -> None:
        """Stop the workers and drop the samples that they read. Idempotent."""
        running, self._running = self._running, None
        self._in_flight.clear()
        shutdown: Callable[[], None] | None = getattr(running, "_shutdown_workers", None)
        if shutdown is not None:
            with contextlib.suppress(RuntimeError):  # raised if a worker has died: the reader closes anyway
                shutdown()


class _RecordingIterator:
    """Iterator over tasks that records each task it yields."""

    def __init__(self, tasks: Iterator[ReadTask], out: deque[ReadTask]) -> None:
        self._tasks, self._in_flight = tasks, out

    def __iter__(self) -> Iterator[ReadTask]:
        return self

    def __next__(self) -> ReadTask:
        task = next(self._tasks)
        self._in_flight.append(task)
        return task


class ReadTask(NamedTuple):
    """One microbatch to read. It has no samples if this rank has no share of a step."""

    generation: int
    """Generation of the loader, which counts its restarts. Results of older ones are dropped."""
    step: int
    first: int
    """Position of its first sample in the global batch."""
    position: int
    """Position of its first sample over all epochs."""
    indices: tuple[int, ...]


class FetchedBatch(NamedTuple):
    """Result of a task."""

    data: Any
    error: ExceptionWrapper | None = None


def dataset_size(dataset: Any) -> int:
    """Return the number of samples.

    Raises :class:`PolicyError` for a dataset without random access or length.
    """
    what = type(dataset).__name__
    reads = any(callable(getattr(dataset, name, None)) for name in ("__getitem__", "__getitems__", "get"))
    if isinstance(dataset, IterableDataset) or not reads:
        raise PolicyError(
            f"{what} can only be read from its beginning. The loader reads samples by index, so that none is lost or"
            " repeated when ranks join or leave. Pass a dataset with __len__ and __getitem__ or get(index)"
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise PolicyError(f"{what} has no length, so the loader cannot order its samples: add a __len__") from error


class WorkerDataset:
    """Dataset for torch's ``DataLoader`` whose index is a :class:`ReadTask`."""

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        *,
        seed: int,
        generation: torch.Tensor,
        seed_samples: bool,
    ) -> None:
        self.dataset = dataset
        self._samples = dataset_size(dataset)
        self._collate = collate
        self._seed = seed
        self._generation = generation
        """Shared with the loader, which changes it when it restarts."""
        self._seed_samples = seed_samples

    def __getitems__(self, task: ReadTask) -> FetchedBatch:
        if not task.indices:
            return FetchedBatch(None)
        is_own_process = get_worker_info() is None and self._seed_samples
        with preserved_rng() if is_own_process else contextlib.nullcontext():
            try:
                samples = self._read(task)
                return FetchedBatch(None if samples is None else self._collate(samples))
            except Exception:  # noqa: BLE001 - the training process raises it if the task is current
                return FetchedBatch(None, ExceptionWrapper(where=_where(task)))

    def _read(self, task: ReadTask) -> list[Any] | None:
        """Return the samples; ``None`` if the loader dropped the task meanwhile."""
        read_many: Callable[[Sequence[int]], list[Any]] | None = getattr(self.dataset, "__getitems__", None)
        if read_many is not None:
            if self._stale(task):
                return None
            if self._seed_samples:
                seed_generators(hash_key("samples", self._seed, task.position))
            return read_many(list(task.indices))
        one = getattr(self.dataset, "__getitem__", None) or self.dataset.get
        samples = []
        for position, index in enumerate(task.indices, task.position):
            if self._stale(task):
                return None
            if self._seed_samples:
                seed_generators(sample_key(self._seed, position // self._samples, index))
            samples.append(one(index))
        return samples

    def _stale(self, task: ReadTask) -> bool:
        return task.generation != self._generation.item()


def _where(task: ReadTask) -> str:
    worker = get_worker_info()
    reader = "the loader's own process" if worker is None else f"worker {worker.id}"
    samples = f"{list(task.indices[:8])}{' and more' * (len(task.indices) > 8)}"
    return f"in {reader}, reading samples {samples} of step {task.step}"


def identity_collate(fetched: FetchedBatch) -> FetchedBatch:
    """Return the batch unchanged: the source has collated it.

    A module-level function, so that workers can unpickle it.
    """
    return fetched
