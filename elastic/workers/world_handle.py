"""World, the argument of a train function: ranks, steps, check for finite losses, cleanup.

A rank with a non-finite loss raises a fault before its optimizer steps: all ranks drop the step and return to the last
complete one. The second attempt corrects a flipped bit. If the batch or the state causes it, the job fails with a
message, or all ranks skip the step. They agree on that when they meet after a fault, so the check needs no collective.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat, TypeVar

from elastic.control.control_plane import ControlNotice, ControlPlane, NoticeKind, RankAssignment, RankProgress
from elastic.errors import ElasticError, NonFiniteLossError, PolicyError, WorldChanged
from elastic.workers.rank_timeline import RankTimeline, open_rank_timeline
from elastic.workers.step_barrier import BoundaryDecision, StepBarrier
from elastic.world.world_state import SealedStep
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.session import session

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from tieredckpt.checkpointer.checkpointer import Checkpointer
    from tieredckpt.checkpointer.null_checkpointer import NullCheckpointer
    from tieredckpt.live.survivor_state import Hydration

log = logging.getLogger(__name__)

SealFunction = Callable[[int], object]
"""Function that seals the state after a step, and returns when it is sealed."""
TrainState = dict[str, Any]
_SEAL_TIMEOUT_S = 600.0
_RESERVED_SHARE = 0.2
"""Share of the remaining time that is reserved for the work after sealing."""


class World:
    """The ranks that train together now. Its process groups exist until the train function is left.

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
        barrier: StepBarrier,
        *,
        record: RankTimeline | None = None,
        losses: NonFiniteGuard | None = None,
    ) -> None:
        self._place = assignment
        self._record = record or open_rank_timeline()
        self._plane = plane
        self._gate = barrier
        self._losses = losses or NonFiniteGuard("fault", 1, 0)
        self._cleanups = CleanupStack()
        self._calls = 0
        self._steps_taken = False
        self.completed_here = -1
        """Number of completed steps; -1 until this world completes one."""
        self.completed = 0
        """Number of completed steps, as far as :meth:`steps` knows."""
        self.stop_notice: ControlNotice | None = None
        """Reason why all ranks stopped at a common step; ``None`` while they have not."""
        self.is_sealed = False
        """Whether the step before the stop is sealed."""
        self.hydration: Hydration | None = None
        """After a fault: source of the state, ``live`` or ``snapshot``, and the step that had been reached."""

    @property
    def rank(self) -> int:
        return self._place.rank

    @property
    def size(self) -> int:
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
        """Device of this rank."""
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
        """Number of the running step, as far as this object knows; -1 before the first."""
        return self.completed if self._steps_taken else self._calls - 1

    @property
    def restarts(self) -> int:
        """Number of worlds that ended with a fault so far."""
        return self._place.restarts

    @property
    def reason(self) -> str:
        """Reason for this world, for logs."""
        return self._place.reason

    def mesh(
        self, shape: Sequence[int] | None = None, names: Sequence[str] = ("dp",), *, device_type: str | None = None
    ) -> DeviceMesh:
        """Return a device mesh over all ranks, by default with one dimension.

        One entry of ``shape`` may be -1: its size follows from the others.
        """
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(
            device_type or self.device.type, resolve_mesh_shape(self.size, shape or (-1,)), mesh_dim_names=tuple(names)
        )

    def steps(
        self,
        first: int,
        total: int | None = None,
        *,
        checkpoint: tuple[Checkpointer | NullCheckpointer, TrainState | Callable[[], TrainState]] | None = None,
        seal: SealFunction | None = None,
    ) -> Iterator[int]:
        """Yield the steps from ``first`` up to ``total``, or until this world ends.

        Between two steps this only reads memory. When the world is about to change, all ranks stop after the same step.
        Then ``checkpoint`` (with its state at that time) or ``seal(step)`` seals it, and :class:`WorldChanged` leaves
        the train function through its ``with`` blocks.
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
        """Begin the next step, as :meth:`steps` does; return False if ``total`` steps are completed."""
        decision = self._gate.pass_boundary(self.completed)
        if decision is BoundaryDecision.ABORT:
            raise WorldChanged(self._gate.broken_reason)
        if total is not None and self.completed >= total:
            self._report_progress(idle=True)
            return False
        if decision is BoundaryDecision.PAUSE:
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
            _record_boundary(*checkpoint, self.completed)
        self.completed += 1
        self.completed_here = self.completed
        self._report_progress()

    def _report_progress(self, *, idle: bool = False) -> None:
        self._plane.report_progress(rank_progress(self.completed_here, idle=idle))

    @contextmanager
    def pause_watchdog(self) -> Iterator[None]:
        """Expect no progress of this rank within this block, for example an evaluation: it may take any time."""
        self._report_progress(idle=True)
        try:
            yield
        finally:
            self._report_progress()

    def check_finite(self, loss: float | torch.Tensor, *, step: int | None = None, what: str = "the loss") -> bool:
        """Return whether to use the gradients of this step.

        Call it after ``backward`` and before the optimizer steps.

        In a broken world it raises, as a step boundary does: an aborted collective may have left garbage in the
        gradients. For a non-finite loss :class:`elastic.workers.train_loop.RecoveryPolicy` decides. Either all ranks
        drop the step and retry it, and the job fails after the last attempt. Or all ranks skip the step: then every
        rank gets False and continues with the next step. ``step`` is the running step of :meth:`steps` by default.
        Reading the loss waits for its device.
        """
        return self._losses.check(
            max(0, self.step) if step is None else step, loss, what, raise_if_broken=self.raise_if_broken
        )

    def raise_if_broken(self) -> None:
        """Raise :class:`WorldChanged` if this world is known to be broken.

        That is known before the abort begins.
        """
        if self._gate.broken_reason is not None:
            raise WorldChanged(self._gate.broken_reason)

    def add_cleanup(self, call: CleanupCall) -> CleanupCall:
        """Call ``call`` when this world is left for any reason, in reverse order of addition.

        The process groups still exist then, and may be broken.
        """
        return self._cleanups.add(call)

    def run_cleanups(self) -> None:
        """Run the cleanups, after the train function was left."""
        self._cleanups.run()
        with suppress(ElasticError):  # the coordinator may not run
            self._report_progress()

    def event_detected(self) -> bool:
        """Return whether to save and leave. All ranks call it once per step and get the same answer.

        For loops that count steps themselves. On True, save and return from the train function.
        """
        if self.stop_notice is not None:
            return True
        if self._calls > 0:
            self._record.step_ended(self._record.next_step + self._calls - 1)
            self.completed_here = self._calls
            self._report_progress()
        decision = self._gate.pass_boundary(self._calls)
        if decision is BoundaryDecision.ABORT:
            raise WorldChanged(self._gate.broken_reason)
        if decision is BoundaryDecision.CONTINUE:
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
        """Write metrics of the running step to the run's event log.

        Tokens and samples are totals of all ranks.

        Only rank 0 writes. Other ranks, and runs without a log, do not read ``loss``.
        """
        self._record.step_metrics(loss, tokens, samples)

    def wait_broken(self, within_s: float) -> bool:
        """Wait up to ``within_s`` seconds, and return whether this world is known to be broken."""
        return self._gate.wait_broken(within_s)

    def _stop(self, seal: SealFunction | None) -> None:
        self._record.pause_began()
        notice = self._notice()
        try:
            if self.completed > 0 and seal is not None:
                seal(self.completed - 1)
        except TieredCheckpointError as error:
            # An older step is complete: losing some steps is better than staying in a world that ends.
            log.error("step %d could not be sealed before this world ended: %s", self.completed - 1, error)
            self.stop_notice = notice
        else:
            self.stop_notice = notice
            self.report_sealed()
        raise WorldChanged(notice.reason)

    def report_sealed(self) -> None:
        """Report to the control plane that this rank's state is sealed, so that the rank may be stopped."""
        self._report_progress()  # the last save may have completed after the last step
        try:
            self._plane.report_sealed(self.completed, checkpoint=sealed_here())
            self.is_sealed = True
            self._record.sealed()
        except ElasticError as error:  # the next steps are the same
            log.warning("cannot report that the state after %d steps is sealed: %s", self.completed, error)

    def _notice(self) -> ControlNotice:
        return self._plane.notice() or ControlNotice(self.epoch, NoticeKind.RESIZE, "asked to stop")

    def sealing(
        self, ckpt: Checkpointer | NullCheckpointer, state: TrainState | Callable[[], TrainState]
    ) -> SealFunction:
        """Return the function that seals ``state`` when this world stops, within the time limit of the notice."""

        def seal(step: int) -> None:
            notice = self._notice()
            left = notice.deadline_s
            timeout_s = _SEAL_TIMEOUT_S if left is None else max(0.0, left * (1 - _RESERVED_SHARE))
            ckpt.seal(
                state() if callable(state) else state,
                step,
                durable=notice.kind is NoticeKind.STOP,
                timeout_s=timeout_s,
            )

        return seal


def newest_step_sealed_here() -> int:
    """Return the newest step that this process has sealed, in any job; -1 for none."""
    key = session.newest_sealed_key()
    return -1 if key is None else key.version


def rank_progress(steps: int, *, idle: bool) -> RankProgress:
    """Return the progress of this process, which has completed ``steps`` in its world; -1 for none."""
    saves_elsewhere = not session.has_sessions()  # sealed outside tieredckpt, unknown here
    current = session.newest_sealed_key(current=True)
    has_sealed = steps >= 0 if saves_elsewhere else current is not None
    key = session.newest_sealed_key()
    if key is None:
        return RankProgress(steps, idle=idle, has_sealed=has_sealed)
    base_step = session.base_step_of(current) if current is not None and current.job == key.job else None
    return RankProgress(steps, key.version, idle, has_sealed, key.job, base_step)


def sealed_here() -> SealedStep | None:
    """Return the newest step that this process sealed in its current sessions; ``None`` for none."""
    key = session.newest_sealed_key(current=True)
    return None if key is None else SealedStep(key.job, key.version, key.epoch)


def _record_boundary(
    ckpt: Checkpointer | NullCheckpointer, state: TrainState | Callable[[], TrainState], step: int
) -> None:
    """Record the step boundary, even if the train function saves seldom.

    A callable state is recorded only by saves.
    """
    if not callable(state):
        ckpt.record_boundary(state, step)


def resolve_mesh_shape(size: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return ``shape`` with its -1 replaced, so that the mesh has ``size`` ranks."""
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
    """Non-finite losses of this process, over all its worlds."""

    def __init__(self, mode: NonFiniteMode, attempts: int, max_skips: int) -> None:
        if mode not in _KNOWN or attempts < 1 or max_skips < 0:
            raise PolicyError(
                f"nonfinite={mode!r}, nonfinite_attempts={attempts}, nonfinite_max_skips={max_skips}: the first is one "
                f"of {', '.join(_KNOWN)}, the second at least 1, the third at least 0"
            )
        self._mode = mode
        self._attempts = attempts
        self._max_skips = max_skips
        self.seen: dict[int, int] = {}
        """Per step, the number of worlds in which its loss was not finite."""
        self._agreed: frozenset[int] = frozenset()

    def synchronize(self, restarts: int) -> None:
        """Exchange the counts of all ranks. Collective, in the groups of a new world."""
        import torch.distributed as dist

        if self._mode == "ignore" or restarts == 0 or not dist.is_initialized():
            return
        known: list[dict[int, int]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(known, self.seen)
        self.seen = {step: max(one.get(step, 0) for one in known) for step in set[int]().union(*known)}
        if self._mode == "skip":
            self._agreed = frozenset(step for step, count in self.seen.items() if count >= self._attempts)

    def check(
        self,
        step: int,
        loss: float | torch.Tensor,
        what: str = "the loss",
        *,
        raise_if_broken: Callable[[], None] = lambda: None,
    ) -> bool:
        """Return whether to use the gradients of ``step``, or raise a fault that names ``what``.

        All ranks get the same result.

        ``raise_if_broken`` raises in a broken world, where the value of ``loss`` may be garbage.
        """
        if step in self._agreed:
            return False
        is_usable = self._mode == "ignore" or _is_finite(loss)
        raise_if_broken()
        if is_usable:
            return True
        count = self.seen[step] = self.seen.get(step, 0) + 1
        what = f"{what} of step {step} is not finite ({_shown(loss)})"
        if count < self._attempts:
            raise NonFiniteLossError(f"{what}; trying again")
        if self._mode == "fault" or count > self._attempts:  # the second case: no groups to agree in
            raise NonFiniteLossError(
                f"{what}, in {count} attempts of {self._attempts} (nonfinite_attempts)", final=True
            )
        if len(self._agreed) >= self._max_skips:
            left_out = f"{len(self._agreed)} steps were left out before (nonfinite_max_skips={self._max_skips})"
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
    """Functions to call once, in reverse order of addition.

    If one fails, log its error and call the others.
    """

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
