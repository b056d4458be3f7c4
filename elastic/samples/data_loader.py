"""ElasticDataLoader: steps that are committed, microbatches prefetched by workers, a position of one integer.

A step is open from when it is handed out until it is committed. What is saved is always what is committed, so that a
checkpoint never has samples that the model has not seen, nor lacks any that it has::

    for step in loader:                 # begins at the committed place
        for batch in step:              # this rank's microbatches, possibly none
            ...
        optimizer.step()
        step.commit()                   # now, and not before, state_dict() is past this step
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
    """What one forward and backward pass works on."""

    step: int
    number: int
    """Place of its first sample in the global batch: its name for :func:`~elastic.samples.rng.seeded`."""
    indices: tuple[int, ...]
    data: Any
    """Collated."""

    def __len__(self) -> int:
        return len(self.indices)


class DataStep:
    """This rank's share of one step: microbatches, to be committed when the model has learnt from them."""

    def __init__(self, loader: ElasticDataLoader, portion: StepPortion) -> None:
        self._loader = loader
        self._portion = portion
        self._course = loader.schedule
        self.unread = len(portion.slices)

    @property
    def number(self) -> int:
        return self._portion.position.step

    @property
    def epoch(self) -> int:
        """Of the data, at the step's first sample."""
        return self._course.epoch_at(self._portion.position.cursor)

    @property
    def samples(self) -> int:
        """Of the whole step, over all ranks: what gradients are divided by."""
        return self._portion.batch.size

    @property
    def next_position(self) -> DataPosition:
        """Where the job stands when this step is committed."""
        return DataPosition(self.number + 1, self._portion.batch.end_cursor)

    def indices(self) -> I64:
        """Which samples this rank has of the step, for a :class:`~elastic.samples.sample_audit.SampleAudit`."""
        found = portion_indices(self._course, self._portion)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def epochs(self) -> I64:
        """The data epoch of each of them."""
        start = self._portion.batch.first
        found = [self._course.order.epochs(start + piece.first, piece.size) for piece in self._portion.slices]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def __len__(self) -> int:
        """Microbatches, read or not."""
        return len(self._portion.slices)

    def __iter__(self) -> Iterator[LoadedMicrobatch]:
        while self.unread:
            self._loader._check_open(self)
            yield self._loader._read(self)

    def commit(self) -> DataPosition:
        """The model has learnt from this step: it is not handed out again."""
        self._loader._commit(self)
        return self.next_position


class ElasticDataLoader:
    """Hands out each sample once per data epoch over all ranks, in an order that no world, fault or worker changes.

    All ranks make one with the same ``dataset``, ``seed``, ``shuffle`` and ``epoch_end``, each with its own ``share``.
    Only the share changes when the world does: see :meth:`set_share`. One thread uses a loader.
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
        """``shuffle`` is as in :class:`~elastic.samples.sample_schedule.SampleOrder`, ``epoch_end`` as in
        :mod:`elastic.samples.sample_schedule`.

        ``epochs`` of the data, over all restarts; without, the loader does not end. ``seed_samples`` sets the random
        generators for each sample, which takes 8 us. ``allow_changes`` names what may differ from the checkpoint
        (``samples``, ``seed``, ``shuffle``, ``epoch_end``). The rest is as in torch.
        """
        self.schedule = SampleSchedule(SampleOrder(dataset_size(dataset), seed, shuffle), share.global_batch, epoch_end)
        self._place = START_POSITION
        self._feed = ReadTaskIterator(self.schedule, share, START_POSITION, epochs)
        self._allow_changes = tuple(allow_changes)
        self._generation = torch.full((1,), self._feed.generation)
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
        self._lines = PrefetchingReader(self._source, self._feed, **self._options)
        self._open: DataStep | None = None
        self._closed = False

    @property
    def position(self) -> DataPosition:
        """After the last committed step."""
        return self._place

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: a few integers, the same on every rank."""
        return self.schedule.to_state(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where this was saved, in whatever world; what was read ahead is dropped."""
        self._begin(self._feed.share, self.schedule.position_from_state(state, self._allow_changes))

    def set_share(self, share: ShareSource, at: DataPosition | None = None) -> None:
        """Another share of every step from here on (or from ``at``), as after a resize or a rollback.

        Workers stay; what they read ahead for the old share is dropped, and an open step with it.
        """
        if at is None and share == self._feed.share and self._open is None:
            return
        self._begin(share, self._place if at is None else at)

    def __iter__(self) -> Iterator[DataStep]:
        """From the committed place on: a step that was left open by an exception comes again."""
        if self._open is not None:
            self._begin(self._feed.share, self._place)
        return self

    def __next__(self) -> DataStep:
        if self._closed:
            raise StepOrderError("this loader is closed")
        if self._open is not None:
            raise StepOrderError(
                f"step {self._open.number} was not committed: call commit() on it when the optimizer's step is done, or"
                " iter() on the loader to have it again"
            )
        if self._feed.is_end(self._place):
            self._lines.close()
            raise StopIteration
        step = DataStep(self, self._feed.portion(self._place))
        self._open = step
        if not len(step):
            self._receive(step)
        return step

    def collate_samples(self, indices: Sequence[int]) -> Any:
        """Read and collate these samples in this process; the position does not change."""
        task = ReadTask(self._feed.generation, self._place.step, 0, 0, tuple(indices))
        fetched = self._source.__getitems__(task)
        if fetched.error is not None:
            fetched.error.reraise()
        return fetched.data

    def close(self) -> None:
        """No worker is left. Idempotent; where the loader stands can still be asked."""
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
        course = SampleSchedule(self.schedule.order, share.global_batch, self.schedule.epoch_end)
        if place.step < 0 or place.cursor < 0:
            raise PolicyError(f"{place} is nowhere in the data")
        if self._feed.is_exhausted:  # torch's loader sends less ahead once there was nothing to send
            self._lines.close()
        self._feed.restart(course, share, place)
        self.schedule, self._place, self._open = course, place, None
        self._generation.fill_(self._feed.generation)

    def _check_open(self, step: DataStep) -> None:
        if step is not self._open:
            raise StepOrderError(
                f"step {step.number} is not open any more: the loader began anew at step {self._place.step}"
            )

    def _read(self, step: DataStep) -> LoadedMicrobatch:
        task, fetched = self._receive(step)
        step.unread -= 1
        return LoadedMicrobatch(task.step, task.first, task.indices, fetched.data)

    def _receive(self, step: DataStep) -> tuple[ReadTask, FetchedBatch]:
        try:
            task, fetched = self._lines.read_next()
            while task.generation != self._feed.generation:
                task, fetched = self._lines.read_next()
            if fetched.error is not None:
                fetched.error.reraise()
        except BaseException:
            # The step cannot be finished: it has to be asked for anew, and reading begins with it.
            self._begin(self._feed.share, self._place)
            raise
        if (task.step, task.generation) != (step.number, self._feed.generation):
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
    """Whether workers can look at it, and hand over what they read: not where the machine's shared memory is full."""
    try:
        generation.share_memory_()
    except RuntimeError as error:
        log.warning("this process reads its samples itself, as its workers have no shared memory: %s", error)
        return False
    return True


class StepPortion(NamedTuple):
    """This rank's part of one step."""

    position: DataPosition
    batch: BatchRange
    slices: tuple[MicrobatchSlice, ...]


class ReadTaskIterator:
    """Tasks from a place on, up to an epoch's end or without one."""

    def __init__(self, course: SampleSchedule, share: ShareSource, place: DataPosition, epochs: int | None) -> None:
        self.generation = 0
        self._epochs = epochs
        self.restart(course, share, place)

    def restart(self, course: SampleSchedule, share: ShareSource, place: DataPosition) -> None:
        """Anew; what was handed out before is of an old generation."""
        whole = validated_slices(share, course.global_batch)  # before anything is changed: the plan may be impossible
        self.generation += 1
        self.schedule, self.share = course, share
        self._cut = {course.global_batch: whole}
        self._place = place
        self._waiting: deque[ReadTask] = deque()
        self.is_exhausted = self.is_end(place)

    def is_end(self, place: DataPosition) -> bool:
        """Whether no step begins here."""
        return self._epochs is not None and self.schedule.epoch_at(place.cursor) >= self._epochs

    def slices_of(self, samples: int) -> tuple[MicrobatchSlice, ...]:
        """This rank's part of a batch of so many."""
        if samples not in self._cut:
            self._cut[samples] = validated_slices(self.share, samples)
        return self._cut[samples]

    def portion(self, place: DataPosition) -> StepPortion:
        """This rank's part of the step that begins here."""
        batch = self.schedule.batch_at(place.cursor)
        return StepPortion(place, batch, self.slices_of(batch.size))

    def __iter__(self) -> Iterator[ReadTask]:
        return self

    def __next__(self) -> ReadTask:
        if not self._waiting:
            if self.is_exhausted:
                raise StopIteration
            self._next_step()
        return self._waiting.popleft()

    def _next_step(self) -> None:
        portion = self.portion(self._place)
        step, batch = self._place.step, portion.batch
        for piece, indices in zip(portion.slices, portion_indices(self.schedule, portion), strict=True):
            position = batch.first + piece.first
            self._waiting.append(ReadTask(self.generation, step, piece.first, position, tuple(indices.tolist())))
        if not portion.slices:
            self._waiting.append(ReadTask(self.generation, step, 0, batch.first, ()))
        self._place = DataPosition(step + 1, batch.end_cursor)
        self.is_exhausted = self.is_end(self._place)


def portion_indices(course: SampleSchedule, portion: StepPortion) -> list[I64]:
    """The samples of each slice, found in one go where they are side by side: a call costs as much as 500 samples."""
    slices = portion.slices
    if not slices:
        return []
    first, end = slices[0].first, slices[-1].first + slices[-1].size
    if end - first > 2 * sum(piece.size for piece in slices):
        return [course.order.indices(portion.batch.first + piece.first, piece.size) for piece in slices]
    found = course.order.indices(portion.batch.first + first, end - first)
    return [found[piece.first - first : piece.first - first + piece.size] for piece in slices]


_DIED = ("exited unexpectedly", "killed by signal")


class PrefetchingReader:
    """Processes, or with no workers this one, that read what ``tasks`` has; the first ``read_next`` starts them."""

    def __init__(self, source: WorkerDataset, tasks: Iterator[ReadTask], **options: Any) -> None:
        self._tasks = tasks
        self._out: deque[ReadTask] = deque()
        # A generator of its own: otherwise torch draws the workers' first seed from the one of the training.
        self._loader: DataLoader[Any] = DataLoader(
            source,  # type: ignore[arg-type] # __getitems__ is all that is asked of it
            batch_sampler=_Noted(tasks, self._out),  # type: ignore[arg-type] # nor is it ever asked for lists
            collate_fn=identity_collate,  # type: ignore[arg-type] # nor does it ask what comes back
            generator=torch.Generator(),
            **options,
        )
        self._running: Any = None

    def read_next(self) -> tuple[ReadTask, FetchedBatch]:
        """The oldest task that has not come back, and what became of it. Whatever is raised has ended the lines."""
        try:
            if self._running is None:
                self._running = iter(self._loader)
            fetched = next(self._running)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError) and any(words in str(error) for words in _DIED):
                raise DataWorkersLostError(
                    f"{error}. The loader is where its last committed step left it: iterate again to go on with new"
                    " workers. If they were killed for memory, use fewer of them or a smaller prefetch_factor"
                ) from error
            raise
        return self._out.popleft(), fetched

    def close(self) -> None:
        """No process is left, nor what they had read. Idempotent."""
        running, self._running = self._running, None
        self._out.clear()
        shutdown: Callable[[], None] | None = getattr(running, "_shutdown_workers", None)
        if shutdown is not None:
            with contextlib.suppress(RuntimeError):  # that one of them had died: it is over anyway
                shutdown()


class _Noted:
    """Tasks, noted down as they go out."""

    def __init__(self, tasks: Iterator[ReadTask], out: deque[ReadTask]) -> None:
        self._tasks, self._out = tasks, out

    def __iter__(self) -> Iterator[ReadTask]:
        return self

    def __next__(self) -> ReadTask:
        task = next(self._tasks)
        self._out.append(task)
        return task


class ReadTask(NamedTuple):
    """One microbatch to read. It may have no samples: a rank without a share of a step takes its turn all the same."""

    generation: int
    """Which of the loader's beginnings it belongs to; what belongs to an old one is not wanted any more."""
    step: int
    first: int
    """Its first sample's place in the global batch."""
    position: int
    """The same over all epochs."""
    indices: tuple[int, ...]


class FetchedBatch(NamedTuple):
    """What became of a task."""

    data: Any
    error: ExceptionWrapper | None = None


def dataset_size(dataset: Any) -> int:
    """How many samples there are, if they can be had by their numbers."""
    what = type(dataset).__name__
    reads = any(callable(getattr(dataset, name, None)) for name in ("__getitem__", "__getitems__", "get"))
    if isinstance(dataset, IterableDataset) or not reads:
        raise PolicyError(
            f"{what} can only be read from its beginning: samples are handed out by their numbers, so that nothing is"
            " lost or repeated when ranks come and go. Give a dataset with __len__ and __getitem__ or get(index)"
        )
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise PolicyError(
            f"{what} does not say how many samples it has, so that there is no order of them: give it a __len__"
        ) from error


class WorkerDataset:
    """A dataset as torch's ``DataLoader`` sees it; an index is a :class:`ReadTask`."""

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
        """Shared with the loader, which changes it when it begins anew."""
        self._seed_samples = seed_samples

    def __getitems__(self, task: ReadTask) -> FetchedBatch:
        if not task.indices:
            return FetchedBatch(None)
        here = get_worker_info() is None and self._seed_samples
        with preserved_rng() if here else contextlib.nullcontext():
            try:
                samples = self._read(task)
                return FetchedBatch(None if samples is None else self._collate(samples))
            except Exception:  # noqa: BLE001 - whatever a dataset raises is the reader's to see, if it is still wanted
                return FetchedBatch(None, ExceptionWrapper(where=_where(task)))

    def _read(self, task: ReadTask) -> list[Any] | None:
        """``None``: nobody wants it any more."""
        many: Callable[[Sequence[int]], list[Any]] | None = getattr(self.dataset, "__getitems__", None)
        if many is not None:
            if self._stale(task):
                return None
            if self._seed_samples:
                seed_generators(hash_key("samples", self._seed, task.position))
            return many(list(task.indices))
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
    who = "the loader's own process" if worker is None else f"worker {worker.id}"
    return (
        f"in {who}, reading samples {list(task.indices[:8])}{' and more' * (len(task.indices) > 8)} of step {task.step}"
    )


def identity_collate(fetched: FetchedBatch) -> FetchedBatch:
    """The source has collated already; a function of its own, since it is sent to workers."""
    return fetched
