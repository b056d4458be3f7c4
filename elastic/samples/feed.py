"""Which microbatches a rank reads, one after another, as far ahead as somebody asks. To torch it is a sampler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from elastic.samples.course import Course, Place, Stretch
from elastic.samples.permutation import I64
from elastic.samples.shares import Shares, Slice, checked
from elastic.samples.source import Task


class Portion(NamedTuple):
    """This rank's part of one step."""

    place: Place
    batch: Stretch
    slices: tuple[Slice, ...]


class Feed:
    """Tasks from a place on, up to an epoch's end or without one."""

    def __init__(self, course: Course, shares: Shares, place: Place, epochs: int | None) -> None:
        self.generation = 0
        self._epochs = epochs
        self.begin(course, shares, place)

    def begin(self, course: Course, shares: Shares, place: Place) -> None:
        """Anew; what was handed out before is of an old generation."""
        whole = checked(shares, course.global_batch)  # before anything is changed: the plan may be impossible
        self.generation += 1
        self.course, self.shares = course, shares
        self._cut = {course.global_batch: whole}
        self._place = place
        self._waiting: deque[Task] = deque()
        self.over = self.ended(place)

    def ended(self, place: Place) -> bool:
        """Whether no step begins here."""
        return self._epochs is not None and self.course.epoch(place.cursor) >= self._epochs

    def cut(self, samples: int) -> tuple[Slice, ...]:
        """This rank's part of a batch of so many."""
        if samples not in self._cut:
            self._cut[samples] = checked(self.shares, samples)
        return self._cut[samples]

    def portion(self, place: Place) -> Portion:
        """This rank's part of the step that begins here."""
        batch = self.course.batch(place.cursor)
        return Portion(place, batch, self.cut(batch.size))

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        if not self._waiting:
            if self.over:
                raise StopIteration
            self._next_step()
        return self._waiting.popleft()

    def _next_step(self) -> None:
        portion = self.portion(self._place)
        step, batch = self._place.step, portion.batch
        for piece, indices in zip(portion.slices, indices_of(self.course, portion), strict=True):
            position = batch.first + piece.first
            self._waiting.append(Task(self.generation, step, piece.first, position, tuple(indices.tolist())))
        if not portion.slices:
            self._waiting.append(Task(self.generation, step, 0, batch.first, ()))
        self._place = Place(step + 1, batch.after)
        self.over = self.ended(self._place)


def indices_of(course: Course, portion: Portion) -> list[I64]:
    """The samples of each slice, found in one go where they are side by side: a call costs as much as 500 samples."""
    slices = portion.slices
    if not slices:
        return []
    first, end = slices[0].first, slices[-1].first + slices[-1].size
    if end - first > 2 * sum(piece.size for piece in slices):
        return [course.order.indices(portion.batch.first + piece.first, piece.size) for piece in slices]
    found = course.order.indices(portion.batch.first + first, end - first)
    return [found[piece.first - first : piece.first - first + piece.size] for piece in slices]
