"""Microbatches of this rank, step by step, whatever the world is; where it stands is one integer.

A step is open from when it is handed out until it is committed. What is saved is always what is committed, so that a
checkpoint never has samples that the model has not seen, nor lacks any that it has::

    for step in loader:                 # begins at the committed place
        for batch in step:              # this rank's microbatches, possibly none
            ...
        optimizer.step()
        step.commit()                   # now, and not before, state_dict() is past this step
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from elastic.errors import PolicyError
from elastic.samples.course import START, Course, Place
from elastic.samples.errors import StepError
from elastic.samples.feed import Feed, Portion, indices_of
from elastic.samples.lines import Lines
from elastic.samples.order import Order
from elastic.samples.permutation import I64
from elastic.samples.shares import Shares
from elastic.samples.source import Fetched, Source, Task, size_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Microbatch:
    """What one forward and backward pass works on."""

    step: int
    number: int
    """Place of its first sample in the global batch: its name for :func:`~elastic.samples.seeds.seeded`."""
    indices: tuple[int, ...]
    data: Any
    """Collated."""

    def __len__(self) -> int:
        return len(self.indices)


class Step:
    """This rank's share of one step: microbatches, to be committed when the model has learnt from them."""

    def __init__(self, loader: ElasticDataLoader, portion: Portion) -> None:
        self._loader = loader
        self._portion = portion
        self._course = loader.course
        self.unread = len(portion.slices)

    @property
    def number(self) -> int:
        return self._portion.place.step

    @property
    def epoch(self) -> int:
        """Of the data, at the step's first sample."""
        return self._course.epoch(self._portion.place.cursor)

    @property
    def samples(self) -> int:
        """Of the whole step, over all ranks: what gradients are divided by."""
        return self._portion.batch.size

    @property
    def after(self) -> Place:
        """Where the job stands when this step is committed."""
        return Place(self.number + 1, self._portion.batch.after)

    def indices(self) -> I64:
        """Which samples this rank has of the step, for a :class:`~elastic.samples.ledger.Ledger`."""
        found = indices_of(self._course, self._portion)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def epochs(self) -> I64:
        """The data epoch of each of them."""
        start = self._portion.batch.first
        found = [self._course.order.epochs(start + piece.first, piece.size) for piece in self._portion.slices]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def __len__(self) -> int:
        """Microbatches, read or not."""
        return len(self._portion.slices)

    def __iter__(self) -> Iterator[Microbatch]:
        while self.unread:
            self._loader._check_open(self)
            yield self._loader._read(self)

    def commit(self) -> Place:
        """The model has learnt from this step: it is not handed out again."""
        self._loader._commit(self)
        return self.after


class ElasticDataLoader:
    """Hands out each sample once per data epoch over all ranks, in an order that no world, fault or worker changes.

    All ranks make one with the same ``dataset``, ``seed``, ``shuffle`` and ``tail``, each with its own ``shares``.
    Only shares change when the world does: see :meth:`reshape`. One thread uses a loader.
    """

    def __init__(
        self,
        dataset: Any,
        shares: Shares,
        *,
        seed: int,
        shuffle: str = "full",
        tail: str = "wrap",
        epochs: int | None = None,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        seed_samples: bool = True,
        allow: Collection[str] = (),
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        timeout_s: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
    ) -> None:
        """``shuffle`` is as in :class:`~elastic.samples.order.Order`, ``tail`` as in :mod:`elastic.samples.course`.

        ``epochs`` of the data, over all restarts; without, the loader does not end. ``seed_samples`` sets the random
        generators for each sample, which takes 8 us. ``allow`` names what may differ from the checkpoint (``samples``,
        ``seed``, ``shuffle``, ``tail``). The rest is as in torch.
        """
        self.course = Course(Order(size_of(dataset), seed, shuffle), shares.global_batch, tail)
        self._place = START
        self._feed = Feed(self.course, shares, START, epochs)
        self._allow = tuple(allow)
        self._generation = torch.full((1,), self._feed.generation)
        if num_workers and not _is_shared(self._generation):
            num_workers, prefetch_factor, timeout_s, multiprocessing_context = 0, None, 0, None
        self._source = Source(dataset, collate_fn, seed=seed, generation=self._generation, seed_samples=seed_samples)
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "pin_memory": pin_memory,
            "timeout": timeout_s,
            "worker_init_fn": worker_init_fn,
            "multiprocessing_context": multiprocessing_context,
        }
        self._lines = Lines(self._source, self._feed, **self._options)
        self._open: Step | None = None
        self._closed = False

    @property
    def place(self) -> Place:
        """After the last committed step."""
        return self._place

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs: a few integers, the same on every rank."""
        return self.course.state(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where this was saved, in whatever world; what was read ahead is dropped."""
        self._begin(self._feed.shares, self.course.place(state, self._allow))

    def reshape(self, shares: Shares, at: Place | None = None) -> None:
        """Another share of every step from here on (or from ``at``), as after a resize or a rollback.

        Workers stay; what they read ahead for the old share is dropped, and an open step with it.
        """
        if at is None and shares == self._feed.shares and self._open is None:
            return
        self._begin(shares, self._place if at is None else at)

    def __iter__(self) -> Iterator[Step]:
        """From the committed place on: a step that was left open by an exception comes again."""
        if self._open is not None:
            self._begin(self._feed.shares, self._place)
        return self

    def __next__(self) -> Step:
        if self._closed:
            raise StepError("this loader is closed")
        if self._open is not None:
            raise StepError(
                f"step {self._open.number} was not committed: call commit() on it when the optimizer's step is done, or"
                " iter() on the loader to have it again"
            )
        if self._feed.ended(self._place):
            self._lines.close()
            raise StopIteration
        step = Step(self, self._feed.portion(self._place))
        self._open = step
        if not len(step):
            self._receive(step)
        return step

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

    def _begin(self, shares: Shares, place: Place) -> None:
        course = Course(self.course.order, shares.global_batch, self.course.tail)
        if place.step < 0 or place.cursor < 0:
            raise PolicyError(f"{place} is nowhere in the data")
        if self._feed.over:  # torch's loader sends less ahead once there was nothing to send
            self._lines.close()
        self._feed.begin(course, shares, place)
        self.course, self._place, self._open = course, place, None
        self._generation.fill_(self._feed.generation)

    def _check_open(self, step: Step) -> None:
        if step is not self._open:
            raise StepError(
                f"step {step.number} is not open any more: the loader began anew at step {self._place.step}"
            )

    def _read(self, step: Step) -> Microbatch:
        task, fetched = self._receive(step)
        step.unread -= 1
        return Microbatch(task.step, task.first, task.indices, fetched.data)

    def _receive(self, step: Step) -> tuple[Task, Fetched]:
        try:
            task, fetched = self._lines.next()
            while task.generation != self._feed.generation:
                task, fetched = self._lines.next()
            if fetched.error is not None:
                fetched.error.reraise()
        except BaseException:
            # The step cannot be finished: it has to be asked for anew, and reading begins with it.
            self._begin(self._feed.shares, self._place)
            raise
        if (task.step, task.generation) != (step.number, self._feed.generation):
            raise AssertionError(f"{task} came back for step {step.number}")
        return task, fetched

    def _commit(self, step: Step) -> None:
        self._check_open(step)
        if step.unread:
            raise StepError(
                f"{step.unread} of {len(step)} microbatches of step {step.number} were not read: committed now, their"
                " samples would be lost"
            )
        self._place, self._open = step.after, None


def _is_shared(generation: torch.Tensor) -> bool:
    """Whether workers can look at it, and hand over what they read: not where the machine's shared memory is full."""
    try:
        generation.share_memory_()
    except RuntimeError as error:
        log.warning("this process reads its samples itself, as its workers have no shared memory: %s", error)
        return False
    return True
