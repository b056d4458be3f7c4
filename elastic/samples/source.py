"""What runs in the processes that read samples: one microbatch at a time, with the random numbers of its samples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterableDataset, get_worker_info

from elastic.errors import PolicyError
from elastic.samples.permutation import key_of
from elastic.samples.seeds import kept, sample_key, set_all


class Task(NamedTuple):
    """One microbatch to read. It may have no samples: a rank without a share of a step takes its turn all the same."""

    generation: int
    """Which of the loader's beginnings it belongs to; what belongs to an old one is not wanted any more."""
    step: int
    first: int
    """Its first sample's place in the global batch."""
    position: int
    """The same over all epochs."""
    indices: tuple[int, ...]


class Fetched(NamedTuple):
    """What became of a task."""

    data: Any
    error: ExceptionWrapper | None = None


def size_of(dataset: Any) -> int:
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


class Source:
    """A dataset as torch's ``DataLoader`` sees it; an index is a :class:`Task`."""

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
        self._samples = size_of(dataset)
        self._collate = collate
        self._seed = seed
        self._generation = generation
        """Shared with the loader, which changes it when it begins anew."""
        self._seed_samples = seed_samples

    def __getitems__(self, task: Task) -> Fetched:
        if not task.indices:
            return Fetched(None)
        here = get_worker_info() is None and self._seed_samples
        with kept() if here else contextlib.nullcontext():
            try:
                samples = self._read(task)
                return Fetched(None if samples is None else self._collate(samples))
            except Exception:  # noqa: BLE001 - whatever a dataset raises is the reader's to see, if it is still wanted
                return Fetched(None, ExceptionWrapper(where=_where(task)))

    def _read(self, task: Task) -> list[Any] | None:
        """``None``: nobody wants it any more."""
        many: Callable[[Sequence[int]], list[Any]] | None = getattr(self.dataset, "__getitems__", None)
        if many is not None:
            if self._stale(task):
                return None
            if self._seed_samples:
                set_all(key_of("samples", self._seed, task.position))
            return many(list(task.indices))
        one = getattr(self.dataset, "__getitem__", None) or self.dataset.get
        samples = []
        for position, index in enumerate(task.indices, task.position):
            if self._stale(task):
                return None
            if self._seed_samples:
                set_all(sample_key(self._seed, position // self._samples, index))
            samples.append(one(index))
        return samples

    def _stale(self, task: Task) -> bool:
        return task.generation != self._generation.item()


def _where(task: Task) -> str:
    worker = get_worker_info()
    who = "the loader's own process" if worker is None else f"worker {worker.id}"
    return (
        f"in {who}, reading samples {list(task.indices[:8])}{' and more' * (len(task.indices) > 8)} of step {task.step}"
    )


def as_it_is(fetched: Fetched) -> Fetched:
    """The source has collated already; a function of its own, since it is sent to workers."""
    return fetched
