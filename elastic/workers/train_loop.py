"""``elastic.run`` and ``recoverable``: one process trains in one world after the other."""

from __future__ import annotations

import enum
import functools
import logging
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, overload

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from elastic.control.control_plane import (
    ControlNotice,
    ControlPlane,
    Dismissed,
    LeaveStage,
    NoticeKind,
    RankAssignment,
)
from elastic.control.supervisor_client import SupervisorClient
from elastic.errors import ElasticError, JobFailedError, NonFiniteLossError, UnhealthyProcessError, WorldChanged
from elastic.gradients.exact_gradients import use_finite_check
from elastic.workers.in_process_restart import (
    DeviceHealthCheck,
    ProcessHealthCheck,
    SurvivorRecovery,
    drop_traceback_frames,
    freeze_startup_objects,
    reset_process_state,
)
from elastic.workers.injected_faults import RankFaults, rank_faults
from elastic.workers.leave_deadline import LeaveDeadline, stacks_on_signal
from elastic.workers.process_groups import ProcessGroups, UserProcessGroups, parse_store_address, process_groups_for
from elastic.workers.rank_timeline import RankTimeline, open_rank_timeline
from elastic.workers.shared_agent import expect_steps_of_shared_agent
from elastic.workers.step_barrier import NoticeWatcher, StepBarrier, default_signal_requests, forward_signals
from elastic.workers.world_handle import NonFiniteGuard, NonFiniteMode, World, newest_step_sealed_here
from elastic.world.peer_loss import blames_another_rank
from elastic.world.world_state import ErrorPosition
from tieredckpt.checkpointer.preemption import sigterm_handled_elsewhere
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointLostError,
    CheckpointNotFoundError,
    TieredCheckpointError,
    UsageError,
)
from tieredckpt.live.abort_fence import AbortFence, use_fence

log = logging.getLogger(__name__)
_STEP_ERRORS = (CheckpointNotFoundError, CheckpointLostError, CheckpointDamagedError)
"""Errors of a restore that cannot load its step.

A second attempt at a requested step fails the same way.
"""

T = TypeVar("T")
TrainFunction = Callable[[World], T]
WarmupFunction = Callable[[], Any]


class RunOutcome(enum.Enum):
    """Outcome of a rank's part in a job."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """The job stopped at a sealed step. A later run resumes it."""
    DISMISSED = "dismissed"
    """The job continues without this process."""


@dataclass(frozen=True)
class RunResult(Generic[T]):
    """Result of this rank. A process whose run returns one exits with status 0."""

    outcome: RunOutcome
    value: T | None = None
    """Return value of the train function, if it finished."""
    steps: int = 0
    """Number of completed steps."""
    worlds: int = 0
    """Number of worlds that this process was in."""

    def __str__(self) -> str:
        if self.outcome is RunOutcome.STOPPED:
            if not self.steps:
                return "stopped before the first step"
            return f"stopped after step {self.steps - 1}; start it again to resume from step {self.steps - 1}"
        if self.outcome is RunOutcome.DISMISSED and not self.worlds:
            return "not needed: this process ended without having been in a world"
        return f"{self.outcome.value} after {self.worlds} world{'s' if self.worlds != 1 else ''}"


@dataclass(frozen=True)
class RecoveryPolicy:
    """Options of a rank's recovery loop."""

    backend: str | None = None
    """Backend of the default process group.

    ``None``: NCCL for CUDA tensors if there is a GPU, and gloo for the others. ``"none"``: the train function creates
    its groups, and destroys them.
    """
    timeout: timedelta | None = None
    """Timeout of its collectives.

    ``None``: longer than hang detection takes, and at least torch's default.
    """
    on_error: Literal["retry", "raise"] = "retry"
    """Reaction to an exception of the train function.

    ``"retry"``: join the next world; the launcher or coordinator limits
    the number of faults. ``"raise"``: report it and raise.
    """
    peer_loss_wait_s: float = 10.0
    """Seconds to wait for a reported loss of another rank, after an error that such a loss can cause."""
    sigterm_grace_s: float = 25.0
    """Seconds that the process has left after SIGTERM."""
    nonfinite: NonFiniteMode = "fault"
    """Reaction to a loss that ``world.check_finite`` finds not to be finite.

    ``"fault"``: all ranks retry the step, and the job fails after ``nonfinite_attempts``. ``"skip"``: all ranks skip
    the step after these attempts. ``"ignore"``: none.
    """
    nonfinite_attempts: int = 2
    """Attempts at one step."""
    nonfinite_max_skips: int = 10
    """Steps that the job may skip; one more fails the job."""
    health_check: ProcessHealthCheck = field(default_factory=DeviceHealthCheck)
    """Function called between two worlds. If it raises, this process ends and another one replaces it."""
    abort_steps: tuple[Literal["groups", "connections"] | Callable[[], Any], ...] = ("groups", "connections")
    """Steps of the abort, in this order, when a world breaks while this rank may hang in it.

    They run in a separate thread. A function closes or wakes objects that the script itself waits for, before, between
    or after the two.
    """


@overload
def recoverable(train: TrainFunction[T]) -> Callable[[], RunResult[T]]: ...
@overload
def recoverable(
    *, plane: ControlPlane | None = None, policy: RecoveryPolicy | None = None, warmup: WarmupFunction | None = None
) -> Callable[[TrainFunction[T]], Callable[[], RunResult[T]]]: ...


def recoverable(
    train: TrainFunction[T] | None = None,
    *,
    plane: ControlPlane | None = None,
    policy: RecoveryPolicy | None = None,
    warmup: WarmupFunction | None = None,
) -> Any:
    """Decorate a train function: the result takes no arguments and calls :func:`run` with it."""

    def decorate(inner: TrainFunction[T]) -> Callable[[], RunResult[T]]:
        @functools.wraps(inner)
        def call() -> RunResult[T]:
            return run(inner, plane=plane, policy=policy, warmup=warmup)

        return call

    return decorate if train is None else decorate(train)


def run(
    train: TrainFunction[T],
    *,
    plane: ControlPlane | None = None,
    policy: RecoveryPolicy | None = None,
    warmup: WarmupFunction | None = None,
) -> RunResult[T]:
    """Call ``train`` with every world that this process joins, until it returns.

    ``plane`` is the control plane, by default the plane of the launcher: ``elastic run``, a platform plugin,
    ``torchrun``, or none. Faults of other ranks, resizes and (``policy.on_error``) exceptions of ``train`` end one call
    and begin the next. Imported modules, compiled code and caches of the process remain. Raises
    :class:`~elastic.errors.JobFailedError` from the last exception of ``train`` when no further world follows.

    ``warmup`` is called once, before this process requests an assignment, and without a process group. A spare that
    replaces a lost rank has then imported, compiled or mapped what it needs.
    """
    if plane is None:
        from elastic.workers.launch_environment import detect_control_plane

        plane = detect_control_plane()
    try:
        policy = policy or RecoveryPolicy()
        with (
            sigterm_handled_elsewhere(),
            expect_steps_of_shared_agent(),
            open_rank_timeline() as record,
            rank_faults(plane) as faults,
            stacks_on_signal(),
        ):
            if warmup is not None:
                warmup()
            hydrating = SurvivorRecovery(plane, own_groups=policy.backend == "none", settle_s=policy.peer_loss_wait_s)
            with freeze_startup_objects(), hydrating:
                ended = _Rank(train, plane, policy, record=record, hydrating=hydrating, faults=faults).run()
            record.ended(ended.outcome.value)
            return ended
    finally:
        plane.close()


class _Rank(Generic[T]):
    """Recovery loop of one process through its worlds."""

    def __init__(
        self,
        train: TrainFunction[T],
        plane: ControlPlane,
        policy: RecoveryPolicy,
        *,
        record: RankTimeline,
        hydrating: SurvivorRecovery,
        faults: RankFaults,
    ) -> None:
        self._train = train
        self._record = record
        self._hydrating = hydrating
        self._faults = faults
        self._plane = plane
        self._policy = policy
        self._deadline = LeaveDeadline(plane)  # before any watch thread: its abort may hang
        self._groups: ProcessGroups | UserProcessGroups | None = None
        self._fence: AbortFence | None = None
        """Fence of the world that ``_groups`` belongs to."""
        self._sealed_before = -1
        """Newest step that this process had sealed when it entered its world."""
        self._worlds = 0
        self._steps = 0
        self._last_error: BaseException | None = None
        self._losses = NonFiniteGuard(policy.nonfinite, policy.nonfinite_attempts, policy.nonfinite_max_skips)
        self._finished: list[T] = []
        """Return value of the train function, once it finished and the plane accepted the report."""

    def run(self) -> RunResult[T]:
        watch = NoticeWatcher(self._plane, self._abort, self._close_connections_again)
        try:
            with forward_signals(watch, default_signal_requests(self._policy.sigterm_grace_s)):
                while True:
                    self._record.waiting_began()
                    self._deadline.left()
                    try:
                        place = self._plane.wait_for_assignment()
                    except Dismissed:
                        return self._result(RunOutcome.DISMISSED)
                    except JobFailedError as error:
                        raise error from self._last_error
                    self._record.assigned(place)
                    world = self._run_world(watch, place)
                    if self._finished:
                        return self._result(RunOutcome.FINISHED)
                    if world.stop_notice is not None and world.stop_notice.kind is NoticeKind.STOP and world.is_sealed:
                        return self._result(RunOutcome.STOPPED)
                    self._check_health()
        finally:
            self._deadline.left()
            watch.close()

    def _result(self, how: RunOutcome) -> RunResult[T]:
        return RunResult(how, self._finished[0] if self._finished else None, self._steps, self._worlds)

    @contextmanager
    def _use_world_for_saves(self, place: RankAssignment) -> Iterator[None]:
        """Use the world's epoch for incarnations that begin in it, and the nodes outside it for replicas."""
        from tieredckpt.session.agent_discovery import use_standby_nodes
        from tieredckpt.session.incarnation import use_world_epoch

        plane = self._plane
        nodes = (lambda: plane.standby_nodes) if isinstance(plane, SupervisorClient) else tuple
        with use_world_epoch(place.incarnation_epoch), use_standby_nodes(nodes):
            yield

    def _abort(self, notice: ControlNotice) -> None:
        self._record.fault_detected()
        groups = self._groups
        if groups is not None:
            if self._fence is not None:
                self._fence.close()  # later completions may be garbage
            log.warning("world %d is broken: %s", notice.epoch, notice.reason)
            named_steps = {"groups": groups.abort_groups, "connections": groups.close_connections}
            for step in self._policy.abort_steps:
                try:
                    with self._deadline.aborting(str(step)):
                        (named_steps[step] if isinstance(step, str) else step)()
                except Exception as error:  # the following steps run all the same
                    log.error("%s failed when the world was aborted", step, exc_info=error)

    def _close_connections_again(self, epoch: int) -> None:
        groups = self._groups
        if groups is not None and groups.epoch == epoch and "connections" in self._policy.abort_steps:
            groups.close_connections()

    def _reset_process(self) -> None:
        self._deadline.at(LeaveStage.RESET)
        reset_process_state()

    def _check_health(self) -> None:
        """Raise :class:`UnhealthyProcessError` if the process is not fit for another world.

        Starting a new process costs less than a failure in the next world.
        """
        self._deadline.at(LeaveStage.HEALTH)
        try:
            self._policy.health_check()
        except UnhealthyProcessError:
            raise
        except Exception as error:
            raise UnhealthyProcessError(f"this process is not fit for another world: {error}") from error

    def _run_world(self, watch: NoticeWatcher, place: RankAssignment) -> World:
        self._deadline.enter(place.epoch)
        barrier = StepBarrier(self._plane, place.epoch)
        world = World(place, self._plane, barrier, record=self._record, losses=self._losses)
        self._fence = fence = AbortFence(world.raise_if_broken)
        self._groups = groups = process_groups_for(place, self._policy.backend, self._policy.timeout)
        self._sealed_before = newest_step_sealed_here()
        is_clean = False
        watch.watch_barrier(barrier)
        try:
            with (
                _environment(place),
                _current(world),
                use_fence(fence),
                _resume_from(place),
                self._use_world_for_saves(place),
            ):
                self._faults.enter_world(world)
                groups.initialize()
                self._record.groups_ready()
                self._losses.synchronize(place.restarts)
                self._worlds += 1
                self._hydrating.restore_into(world, silent=groups.aborts_silently)
                if place.requested_step is not None and world.hydration is not None and world.hydration.mode == "live":
                    _waive_required_step()
                self._record.survivors_asked(world.hydration is not None)
                self._deadline.at(LeaveStage.TRAIN)
                value = self._train(world)
            is_clean = True
            self._returned(world, value)
        except WorldChanged as change:
            is_clean = world.stop_notice is not None
            if not is_clean:
                self._record.fault_detected()
            log.info("world %d has ended: %s", place.epoch, change)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - a user's callback; torch derives the latter from BaseException
            is_clean = self._failed(world, barrier, error, requested=place.requested_step is not None)
            drop_traceback_frames(error)  # its frames hold objects such as the model
        finally:
            self._faults.leave_world()
            self._steps = max(self._steps, world.completed)
            at = self._deadline.at
            at(LeaveStage.SURVIVOR)
            with use_fence(fence):
                self._hydrating.keep_state(sealed=bool(self._finished) or world.is_sealed)
            at(LeaveStage.CLEANUP)
            world.run_cleanups()
            watch.watch_barrier(None)
            at(LeaveStage.BARRIER)
            barrier.close()
            at(LeaveStage.GROUPS)
            groups.destroy(broken=not is_clean, collect=self._reset_process)
        return world

    def _returned(self, world: World, value: T) -> None:
        """End a world whose train function returned: it finished, or it saw the stop notice."""
        if world.stop_notice is not None:
            if not world.is_sealed:
                world.report_sealed()
            return
        try:
            self._plane.report_finished()
        except ElasticError as error:  # another rank was lost in its last steps, which are repeated
            log.warning("cannot report that this rank has finished: %s", error)
            return
        self._finished.append(value)

    def _failed(self, world: World, barrier: StepBarrier, error: BaseException, *, requested: bool = False) -> bool:
        """Report the error of the train function, and return whether the world still ended well.

        ``requested``: the run names the step that it restores.
        """
        if world.stop_notice is not None:
            log.warning("while this rank left world %d: %s: %s", world.epoch, type(error).__name__, error)
            return True
        self._record.fault_detected()
        wait_s = self._policy.peer_loss_wait_s if may_follow_from_lost_rank(error) else 0.0
        if barrier.wait_broken(wait_s):
            log.info("world %d is broken (%s): %s", world.epoch, barrier.broken_reason, error)
            return False
        self._last_error = error
        log.error("world %d, rank %d: the train function failed", world.epoch, world.rank, exc_info=error)
        final = error.final if isinstance(error, NonFiniteLossError) else isinstance(error, UsageError)
        is_own = isinstance(error, CheckpointNotFoundError) or not (
            isinstance(error, NonFiniteLossError) or may_follow_from_lost_rank(error)
        )
        stepped = world.completed_here >= 0 or newest_step_sealed_here() != self._sealed_before
        final = final or (requested and not stepped and isinstance(error, _STEP_ERRORS))
        position = ErrorPosition(world.step, newest_step_sealed_here(), before_first_step=not stepped)
        try:
            self._plane.report_fault(
                f"{type(error).__name__}: {error}{error_location(error)}",
                final=final,
                position=position if is_own else None,
            )
        except ElasticError as report_error:
            log.warning("cannot report the fault: %s", report_error)
        if self._policy.on_error == "raise":
            raise error
        return False


@contextmanager
def _resume_from(place: RankAssignment) -> Iterator[None]:
    """Make the first restore in this world restore the step that the assignment names, or raise.

    If it names none, the restore reports the steps that are done again.
    """
    sealed, requested, reached = place.resume_from, place.requested_step, place.reached
    if sealed is None and requested is None and reached is None:
        yield
        return
    from tieredckpt.checkpointer.progress_hook import ANY_JOB, expect_reached_step, require_step

    if sealed is not None:
        source = f"the ranks sealed step {sealed.step} before this world"
        first_restore = require_step(sealed.job, sealed.step, sealed.epoch, source)
    elif requested is not None:
        source = f"elastic run --resume-from {requested}"
        first_restore = require_step(ANY_JOB, requested.step, requested.epoch, source)
    elif reached is not None:
        first_restore = expect_reached_step(reached.job, reached.step)
    with first_restore:
        yield


def _waive_required_step() -> None:
    """Let this world restore the newest step: the survivors' step, which continues from the requested one."""
    from tieredckpt.checkpointer.progress_hook import waive_required_step

    waive_required_step()


@contextmanager
def _environment(place: RankAssignment) -> Iterator[None]:
    """Set the environment variables of a launcher within this block."""
    host, port = parse_store_address(place.store)
    values = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": place.node_count,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": place.restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Frameworks use this variable to detect a launcher.
        "TORCHELASTIC_RUN_ID": os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("ELASTIC_JOB") or "elastic",
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_worlds: list[World] = []


@contextmanager
def _current(world: World) -> Iterator[None]:
    _worlds.append(world)
    try:
        with use_finite_check(world.check_finite):
            yield
    finally:
        _worlds.remove(world)


def current_world() -> World | None:
    """Return the world in which this process trains now, or ``None``."""
    return _worlds[-1] if _worlds else None


_LOSS_ERRORS = (dist.DistError, ConnectionError, TieredCheckpointError)
_MAX_CHAIN = 20


def may_follow_from_lost_rank(error: BaseException) -> bool:
    """Return whether the loss of another rank can cause this error.

    Then the caller waits a moment for a report of that loss.
    """
    return any(_may_be_loss(one) for one in error_chain(error))


_LIBRARIES = (*{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},)
_PACKAGE_PATH = str(Path(__file__).parents[1])


def error_location(error: BaseException) -> str:
    """Return " (FILE:LINE in FUNCTION)" of the script's innermost frame, or "" if the error has none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, _PACKAGE_PATH))]
    if not own:
        return ""
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})"


def error_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, at most ``_MAX_CHAIN`` of them."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _MAX_CHAIN:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, CheckpointException):
            waiting += [failure for failure, _ in one.failures.values()]
        waiting += [other for other in (one.__cause__, one.__context__) if other is not None]


def _may_be_loss(error: BaseException) -> bool:
    if isinstance(error, _LOSS_ERRORS):
        return True
    return isinstance(error, RuntimeError) and blames_another_rank(str(error))
