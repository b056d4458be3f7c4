"""World, the object a train function receives: ranks, steps, finite-loss check, cleanup.

A rank that sees one makes a fault of it, before its optimizer steps: everybody drops the step and goes back to the last
whole one. A flip of a bit is gone at the second attempt; what is in the batch or in the state is not, and then the job
ends and says so, or the step is left out by all ranks. They agree on that where they meet again after a fault, so that
asking costs no collective.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, TypeVar

from elastic.control.control_plane import ControlNotice, ControlPlane, NoticeKind, RankAssignment, RankProgress
from elastic.errors import ElasticError, NonFiniteLossError, PolicyError, WorldChanged
from elastic.workers.rank_timeline import RankTimeline, open_rank_timeline
from elastic.workers.step_barrier import BoundaryDecision, StepBarrier
from elastic.world.world_state import SealedStep
from tieredckpt.errors import TieredCheckpointError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from peerstore.shard_records import ShardKey
    from tieredckpt.checkpointer.checkpointer import Checkpointer
    from tieredckpt.checkpointer.null_checkpointer import NullCheckpointer
    from tieredckpt.live.survivor_state import Hydration

log = logging.getLogger(__name__)

SealFunction = Callable[[int], object]
"""Makes sure that the state after a step is safe; returns when it is."""
TrainState = dict[str, Any]
_PATIENCE_S = 600.0
_KEPT_BACK = 0.2
"""Of the time left, what is kept for everything that comes after sealing."""


class World:
    """The ranks that train together now. Its groups are initialised; they end when the train function is left.

    ::

        with Checkpointer("tiered://job") as ckpt:
            for step in world.steps(ckpt.restore(state) + 1, total, checkpoint=(ckpt, state)):
                train_one_step()
                ckpt.save(state, step)
    """

    def __init__(
        self,
        assignment: RankAssignment,
        plane: ControlPlane,
        gate: StepBarrier,
        *,
        record: RankTimeline | None = None,
        losses: NonFiniteGuard | None = None,
    ) -> None:
        self._place = assignment
        self._record = record or open_rank_timeline()
        self._plane = plane
        self._gate = gate
        self._losses = losses or NonFiniteGuard("fault", 1, 0)
        self._finalizers = CleanupStack()
        self._calls = 0
        self._steps_taken = False
        self._done = -1
        """How many steps are completed, once one was in this world: what comes before that is no step."""
        self.completed = 0
        """Steps completed, as far as :meth:`steps` was told."""
        self.stop_notice: ControlNotice | None = None
        """Why all ranks stopped at a common step; ``None`` while they have not."""
        self.is_sealed = False
        """Whether the step they stopped after is safe."""
        self.hydration: Hydration | None = None
        """After a fault: where the state comes from, ``live`` or ``snapshot``, and which step had been reached."""

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def size(self) -> int:
        return self._place.world_size

    @property
    def world_size(self) -> int:
        return self._place.world_size

    @property
    def local_rank(self) -> int:
        return self._place.local_rank

    @property
    def local_world_size(self) -> int:
        return self._place.local_world_size

    @property
    def node_rank(self) -> int:
        return self._place.node_rank

    @property
    def node_count(self) -> int:
        return self._place.node_count

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        import torch

        from tieredckpt.tensors.device import accelerator

        device = accelerator()
        if not device.device_count():
            return torch.device("cpu")
        return torch.device(device.type, self.local_rank % device.device_count())

    @property
    def epoch(self) -> int:
        return self._place.epoch

    @property
    def step(self) -> int:
        """The step that is being done, as far as it is known here; -1 before the first."""
        return self.completed if self._steps_taken else self._calls - 1

    @property
    def has_completed_step(self) -> bool:
        """Whether this rank has completed a step in this world."""
        return self._done >= 0

    @property
    def restarts(self) -> int:
        """How many worlds ended by a fault so far."""
        return self._place.restarts

    @property
    def reason(self) -> str:
        """Why there is a new world; for people."""
        return self._place.reason

    def mesh(
        self, shape: Sequence[int] | None = None, names: Sequence[str] = ("dp",), *, device_type: str | None = None
    ) -> DeviceMesh:
        """A device mesh over all ranks. One entry of ``shape`` may be -1: what is left. Default: one dimension."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(
            device_type or self.device.type, resolve_mesh_shape(self.size, shape or (-1,)), mesh_dim_names=tuple(names)
        )

    # -- steps --------------------------------------------------------------------------------------------------------

    def steps(
        self,
        first: int,
        total: int | None = None,
        *,
        checkpoint: tuple[Checkpointer | NullCheckpointer, TrainState | Callable[[], TrainState]] | None = None,
        seal: SealFunction | None = None,
    ) -> Iterator[int]:
        """The steps from ``first`` up to ``total``, or until this world ends.

        Between two steps costs a look at memory. When another world is wanted all ranks go on to the same step; then
        what it left is sealed, by ``checkpoint`` (and what its state is then) or by ``seal(step)``, and
        :class:`WorldChanged` leaves the train function through its ``with`` blocks.
        """
        if checkpoint is not None and seal is not None:
            raise PolicyError("steps(checkpoint=, seal=): one of the two seals, not both")
        if checkpoint is not None:
            seal = self.sealing(*checkpoint)
        self.completed = first
        while self.begin_step(total, seal):
            yield self.completed
            self.end_step(checkpoint)

    def begin_step(self, total: int | None, seal: SealFunction | None) -> bool:
        """Begin the step after the completed ones, as :meth:`steps` does; False if ``total`` steps are completed."""
        way = self._gate.pass_boundary(self.completed)
        if way is BoundaryDecision.ABORT:
            raise WorldChanged(self._gate.broken_reason)
        if total is not None and self.completed >= total:
            self._say(free=True)
            return False
        if way is BoundaryDecision.PAUSE:
            self._stop(seal)
        self._steps_taken = True
        self._record.step_began(self.completed)
        return True

    def end_step(
        self, checkpoint: tuple[Checkpointer | NullCheckpointer, TrainState | Callable[[], TrainState]] | None
    ) -> None:
        """Complete the step that :meth:`begin_step` began, as :meth:`steps` does."""
        self._record.step_ended(self.completed)
        if checkpoint is not None:
            _note(*checkpoint, self.completed)
        self.completed += 1
        self._done = self.completed
        self._say()

    def _say(self, *, free: bool = False) -> None:
        self._plane.report_progress(rank_progress(self._done, idle=free))

    @contextmanager
    def pause_watchdog(self) -> Iterator[None]:
        """In this block, an evaluation say, no rank is expected to get on: however long it takes, it does not hang."""
        self._say(free=True)
        try:
            yield
        finally:
            self._say()

    def check_finite(self, loss: float | torch.Tensor, *, step: int | None = None, what: str = "the loss") -> bool:
        """Whether the gradients of this step may be used; asked after ``backward`` and before the optimizer steps.

        In a world that is known to be broken by then it raises, as a boundary between two steps does: what an aborted
        collective left in the gradients is not used. A loss that is not finite is what
        :class:`elastic.workers.train_loop.RecoveryPolicy` makes of it: a fault, by which all ranks drop the step and
        try it again, and in the end the job's, or a step that all ranks leave out: then all of them get False, and go
        on to the next
        step. ``step`` is the one of :meth:`steps`, where it is not given. The loss is read from its device, which takes
        as long as the device does.
        """
        return self._losses.check(
            max(0, self.step) if step is None else step, loss, what, raise_if_broken=self.raise_if_broken
        )

    def raise_if_broken(self) -> None:
        """Raises :class:`WorldChanged` once this world is known to be broken: before anything of it is aborted."""
        if self._gate.broken_reason is not None:
            raise WorldChanged(self._gate.broken_reason)

    def add_cleanup(self, call: CleanupCall) -> CleanupCall:
        """Have ``call`` called when this world is left, whichever way; what was added last is called first.

        The process groups are still there, and may be broken.
        """
        return self._finalizers.add(call)

    def run_cleanups(self) -> None:
        """The train function has been left: what it wanted to be called is."""
        self._finalizers.run()
        with suppress(ElasticError):  # nobody is there to be told
            self._say()

    def event_detected(self) -> bool:
        """Called once a step by all ranks: whether to save and leave, with the same answer for all of them.

        For loops that count steps themselves. Who gets True saves and returns from the train function.
        """
        if self.stop_notice is not None:
            return True
        if self._calls > 0:
            self._record.step_ended(self._record.next_step + self._calls - 1)
            self._done = self._calls
            self._say()
        way = self._gate.pass_boundary(self._calls)
        if way is BoundaryDecision.ABORT:
            raise WorldChanged(self._gate.broken_reason)
        if way is BoundaryDecision.CONTINUE:
            self._record.step_began(self._record.next_step + self._calls)
            self._calls += 1
            return False
        self._record.pause_began()
        self.completed = self._calls
        self.stop_notice = self._notice()
        return True

    def report(
        self, *, loss: SupportsFloat | None = None, tokens: int | None = None, samples: int | None = None
    ) -> None:
        """What is to be known of the step that runs, in the run's event log. Tokens and samples are those of all ranks.

        Only the first rank's words count; on all others, and where there is no log, ``loss`` is not even looked at.
        """
        self._record.step_metrics(loss, tokens, samples)

    def wait_broken(self, within_s: float) -> bool:
        """Whether it is known by then that this world has lost a rank."""
        return self._gate.wait_broken(within_s)

    def _stop(self, seal: SealFunction | None) -> None:
        self._record.pause_began()
        notice = self._notice()
        try:
            if self.completed > 0 and seal is not None:
                seal(self.completed - 1)
        except TieredCheckpointError as error:
            # An older step is whole: better to lose some than to keep a world that is to end.
            log.error("step %d could not be sealed before this world ended: %s", self.completed - 1, error)
            self.stop_notice = notice
        else:
            self.stop_notice = notice
            self.report_sealed()
        raise WorldChanged(notice.reason)

    def report_sealed(self) -> None:
        """Tell who runs the job that this rank may be asked to go from here on."""
        try:
            self._plane.report_sealed(self.completed, checkpoint=sealed_here())
            self.is_sealed = True
            self._record.sealed()
        except ElasticError as error:  # what comes next is the same
            log.warning("it was not heard that the state after %d steps is sealed: %s", self.completed, error)

    def _notice(self) -> ControlNotice:
        return self._plane.notice() or ControlNotice(self.epoch, NoticeKind.RESIZE, "asked to stop")

    def sealing(
        self, ckpt: Checkpointer | NullCheckpointer, state: TrainState | Callable[[], TrainState]
    ) -> SealFunction:
        """Return the function that seals ``state`` when this world stops, within the time that the notice leaves."""

        def seal(step: int) -> None:
            notice = self._notice()
            left = notice.deadline_s
            patience_s = _PATIENCE_S if left is None else max(0.0, left * (1 - _KEPT_BACK))
            ckpt.seal(
                state() if callable(state) else state,
                step,
                durable=notice.kind is NoticeKind.STOP,
                timeout_s=patience_s,
            )

        return seal


def newest_step_sealed_here() -> int:
    """The newest step that this process has sealed, in any job; -1 for none."""
    key = _newest_sealed_key()
    return -1 if key is None else key.version


def rank_progress(steps: int, *, idle: bool) -> RankProgress:
    """Return the progress of this process, which has completed ``steps`` in its world; -1 for none."""
    session: Any = sys.modules.get("tieredckpt.session.session")
    saves_elsewhere = session is None or not session.has_sessions()  # which is not seen here
    has_sealed = steps >= 0 if saves_elsewhere else sealed_here() is not None
    return RankProgress(steps, newest_step_sealed_here(), idle, has_sealed)


def sealed_here() -> SealedStep | None:
    """The newest step that this process has sealed for what it writes now; ``None`` where it wrote nothing yet."""
    key = _newest_sealed_key(current=True)
    return None if key is None else SealedStep(key.job, key.version, key.epoch)


def _newest_sealed_key(*, current: bool = False) -> ShardKey | None:
    session: Any = sys.modules.get("tieredckpt.session.session")
    return None if session is None else session.newest_sealed_key(current=current)


def _note(ckpt: Checkpointer | NullCheckpointer, state: TrainState | Callable[[], TrainState], step: int) -> None:
    """Also where the train function saves seldom. What is made by calling is noted by who saves, alone."""
    if not callable(state):
        ckpt.record_boundary(state, step)


def resolve_mesh_shape(size: int, shape: Sequence[int]) -> tuple[int, ...]:
    """``shape`` with its -1 replaced so that it has ``size`` places."""
    known = 1
    for one in shape:
        known *= one if one != -1 else 1
    open_places = [at for at, one in enumerate(shape) if one == -1]
    if len(open_places) > 1 or known < 1 or any(one < 1 and one != -1 for one in shape):
        raise PolicyError(f"mesh {tuple(shape)}: sizes are at least 1, and at most one of them is -1")
    if size % known or (not open_places and known != size):
        raise PolicyError(f"mesh {tuple(shape)} does not fit {size} ranks")
    return tuple(size // known if one == -1 else one for one in shape)


NonFiniteMode = Literal["fault", "skip", "ignore"]
_KNOWN = ("fault", "skip", "ignore")


class NonFiniteGuard:
    """What this process knows of losses that were not finite, in all worlds it was in."""

    def __init__(self, mode: NonFiniteMode, attempts: int, max_skips: int) -> None:
        if mode not in _KNOWN or attempts < 1 or max_skips < 0:
            raise PolicyError(
                f"nonfinite={mode!r}, nonfinite_attempts={attempts}, nonfinite_max_skips={max_skips}: the first is one "
                f"of {', '.join(_KNOWN)}, the second at least 1, the third at least 0"
            )
        self._how = mode
        self._tries = attempts
        self._most = max_skips
        self.seen: dict[int, int] = {}
        """Step, and in how many worlds its loss was not finite."""
        self._agreed: frozenset[int] = frozenset()

    def synchronize(self, restarts: int) -> None:
        """In the groups of a new world, all ranks at once: everybody knows from here on what any of them did."""
        import torch.distributed as dist

        if self._how == "ignore" or restarts == 0 or not dist.is_initialized():
            return
        known: list[dict[int, int]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(known, self.seen)
        self.seen = {step: max(one.get(step, 0) for one in known) for step in set[int]().union(*known)}
        if self._how == "skip":
            self._agreed = frozenset(step for step, count in self.seen.items() if count >= self._tries)

    def check(
        self,
        step: int,
        loss: float | torch.Tensor,
        what: str = "the loss",
        *,
        raise_if_broken: Callable[[], None] = lambda: None,
    ) -> bool:
        """Whether the step's gradients are to be used: the same answer at all ranks, or a fault that says ``what``.

        ``raise_if_broken`` raises where the world is broken, and what was read of ``loss`` may be anything.
        """
        if step in self._agreed:
            return False
        is_good = self._how == "ignore" or _is_finite(loss)
        raise_if_broken()
        if is_good:
            return True
        count = self.seen[step] = self.seen.get(step, 0) + 1
        what = f"{what} of step {step} is not finite ({_shown(loss)})"
        if count < self._tries:
            raise NonFiniteLossError(f"{what}; trying again")
        if self._how == "fault" or count > self._tries:  # the latter where there were no groups to agree in
            raise NonFiniteLossError(f"{what}, in {count} attempts of {self._tries} (nonfinite_attempts)", final=True)
        if len(self._agreed) >= self._most:
            left_out = f"{len(self._agreed)} steps were left out before (nonfinite_max_skips={self._most})"
            raise NonFiniteLossError(f"{what}, in {count} attempts, and {left_out}", final=True)
        raise NonFiniteLossError(f"{what}, in {count} attempts; all ranks leave it out from here on")


def _is_finite(loss: float | torch.Tensor) -> bool:
    if isinstance(loss, int | float):
        return math.isfinite(loss)
    return bool(loss.detach().isfinite().all())


def _shown(loss: float | torch.Tensor) -> str:
    if isinstance(loss, int | float) or loss.numel() == 1:
        return f"{float(loss)}"
    return f"{int((~loss.detach().isfinite()).sum())} of {loss.numel()} values"


CleanupCall = TypeVar("CleanupCall", bound=Callable[[], Any])


class CleanupStack:
    """Called once, the last one added first. One that fails is told of, and keeps no other from being called."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []

    def add(self, call: CleanupCall) -> CleanupCall:
        self._calls.append(call)
        return call

    def run(self) -> None:
        while self._calls:
            call = self._calls.pop()
            try:
                call()
            except Exception as error:  # the world is left all the same
                name = getattr(call, "__qualname__", repr(call))
                log.error("%s failed when its world was left", name, exc_info=error)
