"""State of the last step boundary, retained from a fault until the next world has loaded it.

A process without a recovery loop has no next world, so it records no boundaries.
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
    "device work was replayed from a graph (torch.cuda.graph, or mode='reduce-overhead' of torch.compile), and its "
    "changes to tensors cannot be detected"
)


@dataclass(frozen=True)
class Hydration:
    """Origin of the state of a new world."""

    job: str
    mode: HydrationMode
    """``live``: the tensors of survivors. ``snapshot``: the newest complete checkpoint."""
    step: int
    """Step of the survivors' state. With ``snapshot`` -1: the restore chooses the step."""
    reached: int
    """Last step that any rank had completed."""
    why: str = ""
    """Reason why the mode is not ``live``."""
    failed: bool = False
    """Whether survivors had a state that could not be saved."""

    def __str__(self) -> str:
        if self.mode == "live":
            return (
                f"{self.job}: resuming from the state that the surviving ranks have of step {self.step}; the last step "
                f"reached was {self.reached}"
            )
        return f"{self.job}: resuming from the newest checkpoint; the last step reached was {self.reached} ({self.why})"


@dataclass(frozen=True)
class RetainedState:
    """State of one step boundary, in the tensors of the training."""

    step: int
    world_epoch: int
    """Epoch of the world that reached the step."""
    values: Mapping[str, Any]
    """Local tensors and Python objects, by name."""
    plan: SavePlan
    settings: Settings
    has_all_names: bool = False
    """Whether its names are known to be those of the whole state."""
    replicated_names: frozenset[str] = frozenset()
    """Names of tensors that are equal on replicas: parameters and moments, not small tensors."""


class RecordedBoundary(Protocol):
    """A recorded step boundary."""

    step: int
    settings: Settings
    names_digest: str
    """Digest of the names in the state."""

    device_work: DeviceWork
    """Device work that must complete before the state is valid."""

    def why_changed(self) -> str:
        """Return why the state has changed since the boundary. Empty: it has not changed."""

    def retain(self, left: int, *, complete: bool) -> RetainedState: ...


@dataclass
class SurvivorState:
    """Survivor state of one process, for the training thread and optimizer hooks.

    Any thread may set ``replays``.
    """

    boundaries: dict[str, RecordedBoundary] = field(default_factory=dict)
    """The newest boundary of each job in this world."""
    retained: dict[str, RetainedState] = field(default_factory=dict)
    reached_steps: dict[str, int] = field(default_factory=dict)
    """Newest step of each job that was recorded in the last world."""
    trusted_steps: dict[str, int] = field(default_factory=dict)
    """Newest step of each job with completed device work before that world's groups were aborted."""
    aborts_silently: bool = False
    """Whether aborted collectives of that world end without an error, with undefined outputs."""
    last_world_epoch: int = -1
    """Epoch of the last world that this process trained in. -1: none."""
    optimizer_stepped: bool = False
    """Whether an optimizer step has begun since the last boundary."""
    hook_has_fired: bool = False
    """Whether the optimizer hook has run at least once, so steps can be detected."""
    complete_name_digests: dict[str, set[str]] = field(default_factory=dict)
    """For each job, digests of names that are known to be those of the whole state on every rank."""
    replays: bool = False
    """Whether this world replayed device work from a graph, which changes tensors without a hook."""
    hydrations: dict[str, Hydration] = field(default_factory=dict)
    contribute_attempts: int = 0
    """Number of worlds that tried to load the retained state."""

    def record(self, job: str, noted: RecordedBoundary) -> None:
        """Make ``noted`` the newest boundary of ``job``.

        After an optimizer step the boundaries of other jobs are dropped: they are out of date.
        """
        if self.optimizer_stepped:
            for other in [name for name in self.boundaries if name != job]:
                del self.boundaries[other]
        self.boundaries[job] = noted
        self.reached_steps[job] = noted.step
        self.optimizer_stepped = False

    def enter_world(self, epoch: int, *, silent: bool = False) -> None:
        """Discard the state of older worlds, because the training of world ``epoch`` begins.

        ``silent``: its collectives end without an error when they are aborted.
        """
        self.clear()
        self.contribute_attempts = 0
        self.reached_steps.clear()
        self.trusted_steps.clear()
        self.complete_name_digests.clear()
        self.last_world_epoch, self.aborts_silently, self.replays = epoch, silent, False

    def is_replayed(self) -> None:
        """Record that device work is replayed from a graph. Any thread may call this."""
        self.replays = True

    def why_not(self) -> str:
        """Return why boundaries of this world are not recorded. Empty: they are."""
        return _REPLAYED if self.replays else ""

    def mark_names_complete(self, job: str, names: str) -> None:
        """Record that the names with digest ``names`` are those of the whole state in this world."""
        self.complete_name_digests.setdefault(job, set()).add(names)

    def retain_after_fault(self) -> None:
        """Retain the intact boundaries after a fault, and drop the others.

        Call it while the world's fence is current, before this thread aborts anything. Another thread's abort ends
        collectives with undefined outputs, so only device work that completed before it is trusted.
        """
        for job, noted in self.boundaries.items():
            believed = current_fence().trusts(noted.device_work)
            if believed:
                self.trusted_steps[job] = noted.step
            why = "" if believed else "its device work had not completed when the world was aborted"
            why = why or self._why_untracked() or noted.why_changed()
            if why:
                log.info("%s: the survivor state of step %d cannot be used: %s", job, noted.step, why)
            else:
                self.retained[job] = noted.retain(
                    self.last_world_epoch, complete=noted.names_digest in self.complete_name_digests.get(job, ())
                )
        self.boundaries.clear()
        self.optimizer_stepped = False

    def _why_untracked(self) -> str:
        if self.replays:
            return _REPLAYED
        if self.optimizer_stepped:
            return "an optimizer's step had started"
        return "" if self.hook_has_fired else "no step of an optimizer of torch.optim was seen"

    def end_world(self) -> None:
        """Discard all state after a world that ended without a fault."""
        self.clear()
        self.reached_steps.clear()
        self.trusted_steps.clear()

    def clear(self) -> None:
        """Drop the boundaries and the retained state, to free their memory."""
        self.boundaries.clear()
        self.retained.clear()
        self.optimizer_stepped = False


def names_digest(names: Iterable[str]) -> str:
    """Return a digest of the set of ``names``: order and repetitions do not matter."""
    return xxhash.xxh3_128_hexdigest("\0".join(sorted({*names})).encode())


_active: list[SurvivorState] = []


def current_survivor_state() -> SurvivorState | None:
    """Return the survivor state of this process. ``None``: no recovery loop runs."""
    return _active[-1] if _active else None


@contextmanager
def track_step_boundaries() -> Iterator[SurvivorState]:
    """Record step boundaries and detect optimizer steps while the block runs."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from tieredckpt.tensors.device import accelerator

    one = SurvivorState()

    def begun(_optimizer: Any, _args: Any, _named: Any) -> None:
        if not torch.compiler.is_compiling():  # the check would recompile a compiled step whenever its result changes
            raise_if_aborted()  # first: a refused step must not invalidate the last boundary
        one.optimizer_stepped = True  # write only: a read would recompile a compiled step whenever the value changes
        one.hook_has_fired = True

    handle = register_optimizer_step_pre_hook(begun)
    _active.append(one)
    try:
        with accelerator().on_replay(one.is_replayed):
            yield one
    finally:
        _active.remove(one)
        handle.remove()
        one.clear()
