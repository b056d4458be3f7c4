"""The order of samples for torchdata's ``StatefulDataLoader``, which keeps in its own state how far it handed them out.

::

    loader = StatefulDataLoader(dataset, batch_sampler=StatefulBatches(sampler), num_workers=4)

Nothing is committed on the sampler here: a state of torchdata's is past the batch that it gave last. Saved at the end
of a step it can be loaded by any rank of any world with as many workers; within a step, only for the same microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Sampler

from elastic.samples.course import Place
from elastic.samples.errors import CursorError
from elastic.samples.feed import Portion
from elastic.samples.sampler import ElasticSampler


class StatefulBatches(Sampler[list[int]]):
    """Lists of indices, one for each of this rank's microbatches; an iteration has one data epoch of them."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self.sampler = sampler
        self.next_place = sampler.place
        """Where an iteration begins that is not told otherwise: behind the one before."""

    def __iter__(self) -> StatefulIterator:
        return StatefulIterator(self)


class StatefulIterator(Iterator[list[int]]):
    """One data epoch of microbatches, that can be saved after any of them."""

    def __init__(self, batches: StatefulBatches) -> None:
        self._batches = batches
        self._sampler = batches.sampler
        self._place = batches.next_place
        self._until = self._sampler.course.epoch(self._place.cursor) + 1
        self._portions = self._sampler.portions(self._place, self._until)
        self._portion: Portion | None = None
        """The step whose microbatches are handed out, where some are left of it."""
        self._waiting: list[list[int]] = []

    def __next__(self) -> list[int]:
        portion = self._portion or self._open()
        if portion is None:
            self._batches.next_place = self._place
            raise StopIteration
        found = self._waiting.pop(0)
        if not self._waiting:
            self._place = Place(portion.place.step + 1, portion.batch.after)
            self._portion = None
        return found

    def state_dict(self) -> dict[str, Any]:
        slices = self._portion.slices if self._portion is not None else ()
        read = slices[: len(slices) - len(self._waiting)]
        return {
            **self._sampler.course.state(self._place),
            "until": self._until,
            "read": [list(piece) for piece in read],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        place = self._sampler.course.place(state, self._sampler.allow)
        self._batches.next_place = self._place = place
        self._until = state["until"]
        self._portions = self._sampler.portions(place, self._until)
        self._portion, self._waiting = None, []
        if read := [tuple(piece) for piece in state["read"]]:
            portion = self._open()
            if portion is None or list(portion.slices[: len(read)]) != read:
                raise CursorError(
                    f"this was saved within step {place.step}, when another share of it had been read: save at the end"
                    " of steps"
                )
            self._waiting = self._waiting[len(read) :]

    def _open(self) -> Portion | None:
        self._portion = next(self._portions, None)
        self._waiting = [] if self._portion is None else self._sampler.hand(self._portion)
        return self._portion
