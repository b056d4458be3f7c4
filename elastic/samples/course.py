"""How a job goes through the data: which positions a step takes, where an epoch ends, what is saved of it. Pure.

With 10 samples and global batches of 4, by what is done about the end of an epoch::

    positions   0 1 2 3  4 5 6 7  8 9|0 1  2 3 4 5
    wrap        step 0   step 1   step 2   step 3         the third batch is from two epochs; nothing is left out
    drop        step 0   step 1   -  -|step 2             the last two of an epoch are left out
    short       step 0   step 1   s. 2|step 3             the last batch of an epoch has two samples

"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from elastic.errors import PolicyError
from elastic.samples.errors import CursorError
from elastic.samples.order import Order

VERSION = 1
"""Of the order and of the state; a cursor of another version means other samples."""
TAILS = ("wrap", "drop", "short")
_ORDERING = ("samples", "seed", "shuffle")
CHANGES = (*_ORDERING, "tail")
"""What a job may change on purpose between saving a cursor and using it."""


class Place(NamedTuple):
    """Where in the data a job stands."""

    step: int
    """So many steps are committed."""
    cursor: int
    """So many positions are behind them, over all epochs."""


START = Place(0, 0)


class Stretch(NamedTuple):
    """The positions of one global batch."""

    first: int
    size: int
    after: int
    """The cursor when this batch is done."""


@dataclass(frozen=True)
class Course:
    """An order of samples, taken so many at a step."""

    order: Order
    global_batch: int
    tail: str = "wrap"

    def __post_init__(self) -> None:
        if self.tail not in TAILS:
            raise PolicyError(f"tail={self.tail!r}: known are {', '.join(TAILS)}")
        if self.global_batch < 1:
            raise PolicyError(f"global_batch={self.global_batch}: a step takes at least 1 sample")
        if self.tail == "drop" and self.global_batch > self.order.samples:
            raise PolicyError(
                f"tail='drop' with {self.order.samples} samples and global batches of {self.global_batch} leaves every"
                " sample out: use tail='wrap', or smaller batches"
            )

    def batch(self, cursor: int) -> Stretch:
        """What the step takes that begins here."""
        first = self._settled(cursor)
        size = self.global_batch
        if self.tail == "short":
            size = min(size, self.order.samples - first % self.order.samples)
        return Stretch(first, size, self._settled(first + size))

    def epoch(self, cursor: int) -> int:
        """Of the next sample."""
        return self._settled(cursor) // self.order.samples

    def at(self, step: int) -> Place:
        """Where a job stands that has had this course from its beginning."""
        epochs, steps = divmod(step, self.steps_per_epoch) if self.tail != "wrap" else (0, step)
        return Place(step, self._settled(epochs * self.order.samples + steps * self.global_batch))

    @property
    def steps_per_epoch(self) -> int:
        """Beginning with the first sample of one."""
        whole, rest = divmod(self.order.samples, self.global_batch)
        return whole + (rest > 0 and self.tail != "drop")

    def until(self, cursor: int, epoch: int) -> tuple[int, int]:
        """What is left until this epoch, the next one, begins: steps of a whole batch, and samples of a short one."""
        left = epoch * self.order.samples - self._settled(cursor)
        if left <= 0:
            return 0, 0
        whole, rest = divmod(left, self.global_batch)
        if self.tail == "wrap":
            return whole + (rest > 0), 0
        return whole, rest if self.tail == "short" else 0

    def taken(self, cursor: int) -> Iterator[tuple[int, int, int]]:
        """What a job has had that came this far on this course, by epoch: (epoch, first in it, how many)."""
        samples = self.order.samples
        used = samples - samples % self.global_batch if self.tail == "drop" else samples
        for epoch, offset, count in self.order.runs(0, cursor):
            yield epoch, offset, min(count, used)

    def state(self, place: Place) -> dict[str, Any]:
        """What a checkpoint has to have of this."""
        order = self.order
        return {
            "version": VERSION,
            **place._asdict(),
            "samples": order.samples,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "tail": self.tail,
        }

    def place(self, state: Mapping[str, Any], allow: Collection[str] = ()) -> Place:
        """Where to go on, by what a checkpoint has.

        After an allowed change of what the order is made of, a job goes on with the first whole epoch of the new order:
        it does not repeat a sample within an epoch, and leaves out the rest of the one it was in.
        """
        _check_state(state)
        mine = self.state(START)
        changed = [name for name in CHANGES if state[name] != mine[name]]
        if wrong := [name for name in changed if name not in allow]:
            what = "; ".join(f"{name} was {state[name]!r} and is {mine[name]!r}" for name in wrong)
            raise CursorError(
                f"the cursor was saved for other samples: {what}. Use what it was saved with,"
                f" or allow the change on purpose: allow={tuple(wrong)!r}"
            )
        cursor = state["cursor"]
        if any(name in changed for name in _ORDERING):
            cursor = -(-cursor // state["samples"]) * self.order.samples
        return Place(state["step"], self._settled(cursor))

    def _settled(self, cursor: int) -> int:
        """Past what is left out at an epoch's end."""
        left = self.order.samples - cursor % self.order.samples
        return cursor + left if self.tail == "drop" and left < self.global_batch else cursor


def _check_state(state: Mapping[str, Any]) -> None:
    version = state.get("version")
    if version != VERSION:
        raise CursorError(
            f"the cursor is of version {version!r}, this release has {VERSION}: use the release it is from"
        )
    for name in ("step", "cursor", "samples", "seed"):
        value = state.get(name)
        if type(value) is not int or (value < 0 and name != "seed"):
            raise CursorError(f"not a saved cursor: {name} is {value!r}")
    if state["samples"] == 0 or not all(isinstance(state.get(name), str) for name in ("shuffle", "tail")):
        raise CursorError(f"not a saved cursor: {dict(state)!r}")
