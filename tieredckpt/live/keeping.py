"""What this process has of the last step boundary: held from a fault until it is given to the next world.

Outside of a loop that goes from world to world nobody could be given anything, and nothing is noted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import xxhash

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

    from tieredckpt.settings import Settings

log = logging.getLogger(__name__)

Mode = Literal["live", "snapshot"]


@dataclass(frozen=True)
class Hydration:
    """Where a world's state comes from."""

    job: str
    mode: Mode
    """``live``: from what survivors had in their tensors; ``snapshot``: from the newest whole step that was saved."""
    step: int
    """The step that was given; with ``snapshot`` -1, because restoring says which one it is."""
    reached: int
    """The last step that any rank had completed."""
    why: str = ""
    """Why not ``live``."""
    failed: bool = False
    """It was there, and could not be saved."""

    def __str__(self) -> str:
        if self.mode == "live":
            return f"{self.job}: step {self.step} of {self.reached} reached was given by its survivors"
        return f"{self.job}: what was saved is used, up to step {self.reached} was reached: {self.why}"


@dataclass(frozen=True)
class Kept:
    """The state of one step boundary, in the tensors that trained it."""

    step: int
    left: int
    """The world it was reached in."""
    values: Mapping[str, Any]
    """Local tensors and Python objects, by name."""
    plan: SavePlan
    settings: Settings
    complete: bool = False
    """Its names are known to be those of the whole state."""


class Noted(Protocol):
    """A step boundary as it was noted."""

    step: int
    settings: Settings
    names: str
    """A digest of what the state has, by name."""

    def torn(self) -> str:
        """Why the state is not that of the boundary any more; empty while it is."""

    def kept(self, left: int, *, complete: bool) -> Kept: ...


@dataclass
class Keeper:
    """One process's. Used by the thread that trains; ``stepped`` is also set by an optimizer's hook."""

    notes: dict[str, Noted] = field(default_factory=dict)
    """The newest boundary of each job in this world."""
    kept: dict[str, Kept] = field(default_factory=dict)
    reached: dict[str, int] = field(default_factory=dict)
    """The newest step of each job that was noted in the world that was left last."""
    left: int = -1
    """The last world that was trained in."""
    stepped: bool = False
    """An optimizer's step has begun since the last note."""
    sees: bool = False
    """It was seen that optimizers' steps are seen."""
    complete: dict[str, set[str]] = field(default_factory=dict)
    """By job digests of names that are known to be all that the state has, whatever rank one asks."""
    hydrations: dict[str, Hydration] = field(default_factory=dict)
    tries: int = 0
    """Worlds that what is kept was to be given to."""

    def note(self, job: str, noted: Noted) -> None:
        """``noted`` is what counts now."""
        if self.stepped:
            for other in [name for name in self.notes if name != job]:
                del self.notes[other]
        self.notes[job] = noted
        self.reached[job] = noted.step
        self.stepped = False

    def enter(self, epoch: int) -> None:
        """The world's training begins: what an older one left is not wanted any more."""
        self.drop()
        self.tries = 0
        self.reached.clear()
        self.complete.clear()
        self.left = epoch

    def completes(self, job: str, names: str) -> None:
        """Nothing belongs to the state of this world but what ``names`` is a digest of."""
        self.complete.setdefault(job, set()).add(names)

    def hold(self) -> None:
        """The world was left by a fault. What is intact is kept, everything else let go of."""
        for job, noted in self.notes.items():
            why = self._not_seen() or noted.torn()
            if why:
                log.info("%s: step %d cannot be given from here: %s", job, noted.step, why)
            else:
                self.kept[job] = noted.kept(self.left, complete=noted.names in self.complete.get(job, ()))
        self.notes.clear()
        self.stepped = False

    def _not_seen(self) -> str:
        if self.stepped:
            return "an optimizer's step had begun"
        return "" if self.sees else "no step of an optimizer of torch.optim was seen"

    def end(self) -> None:
        """The world has ended well: nothing was lost."""
        self.drop()
        self.reached.clear()

    def drop(self) -> None:
        """Nothing is wanted: also nothing is kept in memory."""
        self.notes.clear()
        self.kept.clear()
        self.stepped = False


def digest_of_names(names: Iterable[str]) -> str:
    """The same for the same names, in whatever order and however often."""
    return xxhash.xxh3_128_hexdigest("\0".join(sorted({*names})).encode())


_keepers: list[Keeper] = []


def keeper() -> Keeper | None:
    """This process's, where what is noted can be given to somebody."""
    return _keepers[-1] if _keepers else None


@contextmanager
def watching() -> Iterator[Keeper]:
    """While the block runs step boundaries are noted, and every step of an optimizer is seen."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    one = Keeper()

    def begun(_optimizer: Any, _args: Any, _named: Any) -> None:
        one.stepped = True  # only written: a compiled step that read it would be compiled anew when it changes
        one.sees = True

    handle = register_optimizer_step_pre_hook(begun)
    _keepers.append(one)
    try:
        yield one
    finally:
        _keepers.remove(one)
        handle.remove()
        one.drop()
