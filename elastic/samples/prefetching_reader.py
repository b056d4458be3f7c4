"""Microbatches read ahead of training, by the workers of a ``DataLoader`` or from a cache."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from elastic.batch_cache.microbatch_cache import MicrobatchCache
from elastic.errors import DataWorkersLostError, PolicyError
from elastic.samples.rng import preserved_rng, sample_key, seed_generators
from elastic.samples.sample_schedule import hash_key
from tieredckpt.tensors.device import accelerator

_DIED = ("exited unexpectedly", "killed by signal")


class PrefetchingReader:
    """Reader of ``tasks`` in worker processes, or in this process without workers.

    The workers start at the first ``read_next``, or with a cache once one of the next microbatches is not in it.
    """

    def __init__(self, source: WorkerDataset, tasks: Iterator[ReadTask], **options: Any) -> None:
        self._source, self._tasks = source, tasks
        self._in_flight: deque[ReadTask] = deque()
        self._mapped: deque[tuple[ReadTask, FetchedBatch]] = deque()
        """Microbatches that were in the cache before a worker started."""
        self._uncached: deque[ReadTask] = deque()
        """The first task that was not."""
        self._ahead = max(1, options["num_workers"] * (options["prefetch_factor"] or 2))
        self._pin_memory = options["pin_memory"] and accelerator().device_count() > 0
        # A separate generator: otherwise torch draws the workers' first seed from the training's generator.
        self._loader: DataLoader[Any] = DataLoader(
            source,  # type: ignore[arg-type] # torch only calls its __getitems__
            batch_sampler=_RecordingIterator(self._uncached, tasks, self._in_flight),  # type: ignore[arg-type] # torch only iterates over it
            collate_fn=identity_collate,  # type: ignore[arg-type] # torch returns its result unchanged
            generator=torch.Generator(),
            **options,
        )
        self._running: Any = None

    def read_next(self) -> tuple[ReadTask, FetchedBatch]:
        """Return the oldest pending task and its result. Any exception closes the reader."""
        try:
            self._map_cached()
            if self._mapped:
                return self._mapped.popleft()
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
        task = self._in_flight.popleft()
        if fetched.is_cached:
            fetched = self._map(task) or self._source.read(task)
        return task, fetched

    def _map_cached(self) -> None:
        """Map up to two microbatches. The first that is not in the cache starts the workers.

        One of them is read now, so the distance to the reader grows without a delay of the first microbatch.
        """
        for _ in range(2):
            if self._running is not None or self._source.cache is None or len(self._mapped) >= self._ahead:
                return
            task = next(self._tasks, None)
            if task is None:
                return
            found = self._map(task)
            if found is None:
                self._uncached.append(task)
                self._running = iter(self._loader)
            else:
                self._mapped.append((task, found))

    def _map(self, task: ReadTask) -> FetchedBatch | None:
        found = self._source.lookup(task)
        return found if found is None or not self._pin_memory else FetchedBatch(pin_memory(found.data))

    def close(self) -> None:
        """Stop the workers and drop the samples that they read. Idempotent."""
        running, self._running = self._running, None
        for dropped in (self._in_flight, self._mapped, self._uncached):
            dropped.clear()
        shutdown: Callable[[], None] | None = getattr(running, "_shutdown_workers", None)
        if shutdown is not None:
            with contextlib.suppress(RuntimeError):  # raised if a worker has died: the reader closes anyway
                shutdown()


class _RecordingIterator:
    """Iterator over tasks, those of ``first`` before all others, that records each task it yields."""

    def __init__(self, first: deque[ReadTask], tasks: Iterator[ReadTask], out: deque[ReadTask]) -> None:
        self._first, self._tasks, self._in_flight = first, tasks, out

    def __iter__(self) -> Iterator[ReadTask]:
        return self

    def __next__(self) -> ReadTask:
        task = self._first.popleft() if self._first else next(self._tasks)
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
    is_cached: bool = False
    """Whether the data is in the cache, and not here."""


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
        cache: MicrobatchCache | None,
    ) -> None:
        self.cache = cache
        self.dataset = dataset
        self._samples = dataset_size(dataset)
        self._collate = collate
        self._seed = seed
        self._generation = generation
        """Shared with the loader, which changes it when it restarts."""
        self._seed_samples = seed_samples

    def __getitems__(self, task: ReadTask) -> FetchedBatch:
        if self.cache is None or not task.indices:
            return self.read(task)
        try:
            result = self.cache.prepare(
                task.position,
                task.indices,
                functools.partial(self._collated, task),
                should_stop=functools.partial(self._stale, task),
            )
        except Exception as error:  # noqa: BLE001 - the training process raises it if the task is current
            return _failed(task, error)
        return FetchedBatch(result.batch, is_cached=result.is_cached)

    def read(self, task: ReadTask) -> FetchedBatch:
        """Read the samples, without the cache."""
        if not task.indices:
            return FetchedBatch(None)
        try:
            return FetchedBatch(self._collated(task))
        except Exception as error:  # noqa: BLE001 - as above
            return _failed(task, error)

    def lookup(self, task: ReadTask) -> FetchedBatch | None:
        """Return the microbatch if the cache has it, or ``None``."""
        if self.cache is None or not task.indices:
            return None if task.indices else FetchedBatch(None)
        found = self.cache.lookup(task.position, task.indices)
        return FetchedBatch(found.batch) if found.is_cached else None

    def _collated(self, task: ReadTask) -> Any:
        is_own_process = get_worker_info() is None and self._seed_samples
        with preserved_rng() if is_own_process else contextlib.nullcontext():
            samples = self._read(task)
            if samples is None:
                raise _TaskDroppedError
            return self._collate(samples)

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


class _TaskDroppedError(Exception):
    """The loader restarted, and drops the result of this task."""


def _failed(task: ReadTask, error: Exception) -> FetchedBatch:
    """Return the result of a task whose error is handled now."""
    return FetchedBatch(None, None if isinstance(error, _TaskDroppedError) else ExceptionWrapper(where=_where(task)))


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
