"""The state of the last step boundary in this process, retained from a fault until the next world has it.

Outside of a loop that goes from world to world nobody could be given anything, and nothing is noted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import xxhash

from tieredckpt.live.abort_fence import current_fence, raise_if_aborted

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

    from tieredckpt.settings import Settings
    from tieredckpt.tensors.device import DeviceWork

log = logging.getLogger(__name__)

HydrationMode = Literal["live", "snapshot"]
_REPLAYED = (
    "device work was replayed from a graph (torch.cuda.graph, or mode='reduce-overhead' of torch.compile), and nobody "
    "can see what that changes"
)


@dataclass(frozen=True)
class Hydration:
    """Where a world's state comes from."""

    job: str
    mode: HydrationMode
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
            return (
                f"{self.job}: resuming from the state that the surviving ranks have of step {self.step}; the last step "
                f"reached was {self.reached}"
            )
        return f"{self.job}: resuming from the newest checkpoint; the last step reached was {self.reached} ({self.why})"


@dataclass(frozen=True)
class RetainedState:
    """The state of one step boundary, in the tensors that trained it."""

    step: int
    world_epoch: int
    """The world it was reached in."""
    values: Mapping[str, Any]
    """Local tensors and Python objects, by name."""
    plan: SavePlan
    settings: Settings
    has_all_names: bool = False
    """Its names are known to be those of the whole state."""
    replicated_names: frozenset[str] = frozenset()
    """Tensors of which replicas have the same: parameters and moments, not buffers or what else is small."""


class RecordedBoundary(Protocol):
    """A step boundary as it was noted."""

    step: int
    settings: Settings
    names_digest: str
    """A digest of what the state has, by name."""

    device_work: DeviceWork
    """All that devices had to do until it was there."""

    def why_changed(self) -> str:
        """Why the state is not that of the boundary any more; empty while it is."""

    def retain(self, left: int, *, complete: bool) -> RetainedState: ...


@dataclass
class SurvivorState:
    """One process's. Used by the thread that trains; ``optimizer_stepped`` is also set by an optimizer's hook."""

    boundaries: dict[str, RecordedBoundary] = field(default_factory=dict)
    """The newest boundary of each job in this world."""
    retained: dict[str, RetainedState] = field(default_factory=dict)
    reached_steps: dict[str, int] = field(default_factory=dict)
    """The newest step of each job that was noted in the world that was left last."""
    trusted_steps: dict[str, int] = field(default_factory=dict)
    """The newest step of each job that was complete here before anything of that world was aborted."""
    aborts_silently: bool = False
    """In that world collectives may have ended with garbage, without an error, once any of its ranks aborted them."""
    last_world_epoch: int = -1
    """The last world that was trained in."""
    optimizer_stepped: bool = False
    """An optimizer's step has begun since the last note."""
    hook_has_fired: bool = False
    """It was seen that optimizers' steps are seen."""
    complete_name_digests: dict[str, set[str]] = field(default_factory=dict)
    """By job digests of names that are known to be all that the state has, whatever rank one asks."""
    replays: bool = False
    """In this world device work was replayed from a graph: that changes tensors, and calls no hook."""
    hydrations: dict[str, Hydration] = field(default_factory=dict)
    contribute_attempts: int = 0
    """Worlds that what is kept was to be given to."""

    def record(self, job: str, noted: RecordedBoundary) -> None:
        """``noted`` is what counts now."""
        if self.optimizer_stepped:
            for other in [name for name in self.boundaries if name != job]:
                del self.boundaries[other]
        self.boundaries[job] = noted
        self.reached_steps[job] = noted.step
        self.optimizer_stepped = False

    def enter_world(self, epoch: int, *, silent: bool = False) -> None:
        """The world's training begins: what an older one left is not wanted any more.

        ``silent``: its collectives end without an error when they are aborted.
        """
        self.clear()
        self.contribute_attempts = 0
        self.reached_steps.clear()
        self.trusted_steps.clear()
        self.complete_name_digests.clear()
        self.last_world_epoch, self.aborts_silently, self.replays = epoch, silent, False

    def is_replayed(self) -> None:
        """Device work is replayed from a graph, by any thread."""
        self.replays = True

    def why_not(self) -> str:
        """Why boundaries of this world are not noted; empty where they are."""
        return _REPLAYED if self.replays else ""

    def mark_names_complete(self, job: str, names: str) -> None:
        """Nothing belongs to the state of this world but what ``names`` is a digest of."""
        self.complete_name_digests.setdefault(job, set()).add(names)

    def retain_after_fault(self) -> None:
        """The world was left by a fault. What is intact is kept, everything else let go of.

        Called in its fence, before this thread aborts anything. What another thread has aborted let collectives end
        with garbage, so only that is believed which had completed before.
        """
        for job, noted in self.boundaries.items():
            believed = current_fence().trusts(noted.device_work)
            if believed:
                self.trusted_steps[job] = noted.step
            why = "" if believed else "its device work had not completed when the world was aborted"
            why = why or self._not_seen() or noted.why_changed()
            if why:
                log.info("%s: step %d cannot be given from here: %s", job, noted.step, why)
            else:
                self.retained[job] = noted.retain(
                    self.last_world_epoch, complete=noted.names_digest in self.complete_name_digests.get(job, ())
                )
        self.boundaries.clear()
        self.optimizer_stepped = False

    def _not_seen(self) -> str:
        if self.replays:
            return _REPLAYED
        if self.optimizer_stepped:
            return "an optimizer's step had begun"
        return "" if self.hook_has_fired else "no step of an optimizer of torch.optim was seen"

    def end_world(self) -> None:
        """The world has ended well: nothing was lost."""
        self.clear()
        self.reached_steps.clear()
        self.trusted_steps.clear()

    def clear(self) -> None:
        """Nothing is wanted: also nothing is kept in memory."""
        self.boundaries.clear()
        self.retained.clear()
        self.optimizer_stepped = False


def names_digest(names: Iterable[str]) -> str:
    """The same for the same names, in whatever order and however often."""
    return xxhash.xxh3_128_hexdigest("\0".join(sorted({*names})).encode())


_keepers: list[SurvivorState] = []


def current_survivor_state() -> SurvivorState | None:
    """This process's, where what is noted can be given to somebody."""
    return _keepers[-1] if _keepers else None


@contextmanager
def track_step_boundaries() -> Iterator[SurvivorState]:
    """While the block runs step boundaries are noted, and every step of an optimizer is seen."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from tieredckpt.tensors.device import accelerator

    one = SurvivorState()

    def begun(_optimizer: Any, _args: Any, _named: Any) -> None:
        if not torch.compiler.is_compiling():  # a compiled step would be compiled anew when the answer changes
            raise_if_aborted()  # first: a step that is refused leaves the boundary before it as it was
        one.optimizer_stepped = (
            True  # only written: a compiled step that read it would be compiled anew when it changes
        )
        one.hook_has_fired = True

    handle = register_optimizer_step_pre_hook(begun)
    _keepers.append(one)
    try:
        with accelerator().on_replay(one.is_replayed):
            yield one
    finally:
        _keepers.remove(one)
        handle.remove()
        one.clear()
