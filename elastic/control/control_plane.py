"""The ControlPlane interface between a rank and the system that runs its job, and its plug-ins.

The calls of a rank::

    wait_for_assignment() ──> train … notice() at every step boundary … ──> agree_on_step(step) ──> target
       ^     ^                              │ broken epoch                          │ train until target
       │     │                              v                                       v
       │     └─────────────── (groups aborted)                           report_sealed(target)
       └────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

import msgspec

from elastic.errors import PolicyError
from elastic.world.world_state import ErrorPosition, ReachedStep, RequestedStep, SealedStep
from peerstore.shard_records import NonNegativeIntOrMinusOne


class NoticeKind(enum.Enum):
    """Change that a rank must make."""

    RESIZE = "resize"
    """Stop at a common step, seal it, and wait for the next world."""
    STOP = "stop"
    """Stop at a common step and seal it. The job ends; a later run may resume it."""
    RESTART = "restart"
    """Leave the step at once and wait for the next world, as this one is broken. There is no common step."""


class LeaveStage(enum.Enum):
    """Stages of a process that leaves a broken world, in their order."""

    ENTER = "entering the world"
    TRAIN = "the train function"
    SURVIVOR = "setting the survivor's state aside"
    CLEANUP = "the callbacks of world.add_cleanup"
    BARRIER = "closing the step barrier"
    GROUPS = "destroying the process groups"
    RESET = "freeing the memory of the world"
    HEALTH = "the health check"


class ControlNotice(msgspec.Struct, frozen=True):
    """Change that the ranks of an epoch must make.

    A later notice of the same epoch replaces an earlier one.
    """

    epoch: int
    kind: NoticeKind
    reason: str
    """Text for people, such as ``node n3 was preempted``."""
    deadline_s: float | None = None
    """Seconds left when the notice was read; ``None`` for no limit.

    A rank that has not stopped by the deadline is killed. In a broken world, a process that has not left is replaced.
    """


class RankAssignment(msgspec.Struct, frozen=True):
    """Assignment of a rank in one world."""

    epoch: int
    """Number of the world, increasing. It names keys in the store and fences late messages."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_count: int
    store: str
    """``host:port`` of a ``torch.distributed.TCPStore`` outside the ranks."""
    restarts: int = 0
    """Number of earlier worlds that ended by a fault."""
    reason: str = ""
    """Why the world was formed, for people."""
    stores: tuple[str, ...] = ()
    """Addresses of all stores if the keys are spread over several, in the same order for all ranks.

    ``store`` is then one of them, for ``MASTER_ADDR`` and the like. If empty, ``store`` has all keys."""
    hang_s: float | None = None
    """Seconds without progress of any rank that count as a hang; ``None`` for no limit."""
    resume_from: SealedStep | None = None
    """The only step that this world may restore: the previous world sealed it before it ended in order."""
    requested_step: RequestedStep | None = None
    """The only step that this world may restore: the run's command line requests it."""
    incarnation_epoch: int = 0
    """Least epoch of incarnations that begin in this world; 0 if its ranks must agree on one."""
    reached: ReachedStep | None = None
    """Newest step that any rank of an earlier world is known to have sealed."""


class RankProgress(msgspec.Struct, frozen=True):
    """Progress of a rank. The newest report counts."""

    step: NonNegativeIntOrMinusOne
    """Steps completed."""
    sealed: NonNegativeIntOrMinusOne = -1
    """Newest step that this rank is known to have sealed, or -1."""
    idle: bool = False
    """Whether the rank is outside of steps and will not begin one, so that hang limits do not apply."""
    has_sealed: bool = False
    """Whether this rank has sealed a step in this world."""
    job: str = ""
    """Checkpoint job of the step ``sealed``."""
    base_step: NonNegativeIntOrMinusOne | None = None
    """Step that this world resumed from, -1 for nothing; ``None`` until this rank has sealed a step in it."""


class ControlPlane(Protocol):
    """Interface between a rank and the system that runs its job.

    Every control plane must ensure the following (tests: ``tests/contract/test_control_plane.py``):

    - ``wait_for_assignment`` returns a :class:`RankAssignment` of an epoch above all that it returned before in this
      process. All ranks of the epoch receive the same epoch, world size and stores, and each rank is assigned once.
    - ``notice`` only reads memory, within a few microseconds, without messages or collectives. A notice remains until
      the rank has left its epoch.
    - ``agree_on_step`` returns the same step to all ranks of the epoch: the greatest that any of them reported. So no
      rank must undo a step, and a rank that is behind can finish alone the steps that the others have finished.
    - A fault ends the wait of other ranks in ``agree_on_step`` and ``wait_for_assignment``: ``agree_on_step`` raises
      :class:`StaleEpochError`.
    - Reports of a rank of an old epoch raise :class:`StaleEpochError` and change nothing.
    - ``ControlPlaneUnavailableError`` means that the state is unknown. The control plane may recover, and
      ``wait_for_assignment`` waits for that.
    - Any thread may call any method. A call that exceeds its ``timeout_s`` raises ``ControlDeadlineError``.
    - After a ``STOP`` that all ranks have sealed, ``wait_for_assignment`` raises :class:`Dismissed`.
    """

    @property
    def restarts_processes(self) -> bool:
        """Whether a fault or another size restarts all processes, so that this one is in a single world."""

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        """Wait for the assignment of this process in the next world.

        The process must have left all process groups. Raise :class:`~elastic.errors.JobFailedError` if the job has
        failed, and :class:`Dismissed` if this process is not needed any longer.
        """

    def notice(self) -> ControlNotice | None:
        """Return the change that this rank must make, or ``None``."""

    def agree_on_step(self, step: int, *, timeout_s: float | None = None) -> int:
        """Report ``step`` begun steps, and return the common target of all ranks of the epoch.

        Wait until all of them have reported. All ranks stop after that number of steps. Call this as soon as the notice
        arrives, from a separate thread: a call after the step would block the ranks in the same step.
        """

    def report_sealed(self, step: int, *, checkpoint: SealedStep | None = None, timeout_s: float | None = None) -> None:
        """Report that this rank has stopped at the common step and that its state is safe.

        The rank may be dismissed afterwards. ``checkpoint`` is the step that contains the state. If all ranks report
        the same one, the next world restores it.
        """

    def report_progress(self, progress: RankProgress) -> None:
        """Report progress. This only writes memory; the next heartbeat sends the report."""

    def report_fault(self, reason: str, *, final: bool = False, position: ErrorPosition | None = None) -> None:
        """Report a fault of this rank, such as an exception or a non-finite loss. It breaks the world.

        ``final`` means that another attempt would end the same way, so the job fails. ``position`` is where the train
        function raised an error that does not follow from another rank. If the next worlds end with an equal fault at
        the same position, a control plane may treat it as final. Further faults of the same epoch change nothing.
        """

    def request_change(
        self, want: NoticeKind, reason: str, *, deadline_s: float | None = None, nodes: int | None = None
    ) -> None:
        """Request a change, for the script or because a signal announced the preemption of this machine.

        ``RESIZE`` with ``nodes`` limits the number of nodes. With ``deadline_s`` alone, this rank's machine is
        preempted within that many seconds. With neither, the job uses as many nodes as the policy allows.
        """

    def on_broken(self, call: Callable[[ControlNotice], None]) -> None:
        """Run ``call`` on a thread of the plane as soon as an epoch is broken, to abort hung collectives."""

    def report_finished(self) -> None:
        """Report that this rank has finished. The job succeeds when all ranks have."""

    def close(self) -> None:
        """Disconnect. Idempotent. A rank that closes without ``report_finished`` counts as lost."""


class Dismissed(Exception):  # noqa: N818 - not an error: the rank is not in the next world
    """This process is neither in the next world nor a spare: it must exit with status 0."""


CONTROL_PLANE_ENTRY_POINTS = "elastic.control_planes"

ControlPlaneFactory = Callable[[Mapping[str, str]], "ControlPlane | None"]
"""Returns the control plane for a process's environment, or ``None`` on another platform."""


def platform_control_plane(
    environ: Mapping[str, str], found: Iterable[EntryPoint] | None = None
) -> ControlPlane | None:
    """Return the control plane of the first platform, by name, that started this process, or ``None``."""
    for entry in sorted(
        entry_points(group=CONTROL_PLANE_ENTRY_POINTS) if found is None else found,
        key=lambda entry: (entry.name, entry.value),
    ):
        plane = _load_factory(entry)(environ)
        if plane is not None:
            return plane
    return None


def _load_factory(entry: EntryPoint) -> ControlPlaneFactory:
    """Load a plug-in, or raise :class:`PolicyError`: the plug-in may be the one that runs this job."""
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"{entry.value}, a plane called {entry.name}, cannot be loaded: {error}") from error
