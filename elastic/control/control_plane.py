"""ControlPlane, the interface between a rank and the system that runs its job, and its entry-point plug-ins.

A rank's life, as it looks from here::

    ready() ──> Assignment ──> train … notice() at every step boundary … ──> pause(step) ──> target
       ^                                    │ broken epoch                        │ train on until target
       │                                    v                                     v
       └──────────────── left(epoch) <── (groups aborted)                     sealed(target)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Protocol

import msgspec

from elastic.errors import PolicyError
from elastic.world.world_state import ErrorPosition, RequestedStep, SealedStep
from peerstore.shard_records import NonNegativeIntOrMinusOne


class NoticeKind(enum.Enum):
    """What is wanted of a rank."""

    RESIZE = "resize"
    """Stop at a step that is agreed on, seal, and come back for the next world."""
    STOP = "stop"
    """The same, but there will be no next world: the job ends here, to be resumed another time."""
    RESTART = "restart"
    """The world is broken (a rank was lost): leave the step at once, and come back. Nothing is agreed on."""


class LeaveStage(enum.Enum):
    """Stage in which a process is while it leaves a broken world, in this order."""

    ENTER = "entering the world"
    TRAIN = "the train function"
    SURVIVOR = "setting the survivor's state aside"
    CLEANUP = "the callbacks of world.add_cleanup"
    BARRIER = "closing the step barrier"
    GROUPS = "destroying the process groups"
    RESET = "freeing the memory of the world"
    HEALTH = "the health check"


class ControlNotice(msgspec.Struct, frozen=True):
    """What is wanted of the ranks of an epoch. A later notice of the same epoch replaces an earlier one."""

    epoch: int
    kind: NoticeKind
    reason: str
    """For people: ``node n3 was preempted``."""
    deadline_s: float | None = None
    """Seconds left, when the notice was read; ``None`` for no limit.

    A rank that has not stopped by then is stopped. In a broken world, a process that has not left is replaced.
    """


class RankAssignment(msgspec.Struct, frozen=True):
    """A rank's place in one world."""

    epoch: int
    """Greater with every world. Names the process groups' keys in the store, and fences late messages."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_count: int
    store: str
    """``host:port`` of a ``torch.distributed.TCPStore`` that lives in no rank."""
    restarts: int = 0
    """How many worlds ended by a fault before this one."""
    reason: str = ""
    """Why there is a new world; for people."""
    stores: tuple[str, ...] = ()
    """Where the keys of this epoch are spread over several such stores, the same and in the same order for all ranks:
    ``store`` is one of them then, for who asks by the environment. None: ``store`` has them all."""
    hang_s: float | None = None
    """After how long without any rank getting on that is a hang; ``None``: never, or nobody looks."""
    resume_from: SealedStep | None = None
    """What this world restores, and nothing else: the world before it ended in order and sealed this."""
    requested_step: RequestedStep | None = None
    """What this world restores, and nothing else: the command line of the run requests it."""
    incarnation_epoch: int = 0
    """The least epoch of incarnations that begin in this world; 0: its ranks agree on one alone."""


class RankProgress(msgspec.Struct, frozen=True):
    """What a rank says of itself now and then; the last one said is the one that counts."""

    step: NonNegativeIntOrMinusOne
    """Steps completed."""
    sealed: NonNegativeIntOrMinusOne = -1
    """Newest step known to be sealed by this rank, or -1."""
    idle: bool = False
    """It is in no step, and not about to begin one: how long that takes says nothing."""
    has_sealed: bool = False
    """Whether this rank has sealed a step in this world."""


class ControlPlane(Protocol):
    """What a rank asks of whoever runs the job.

    Promises every control plane makes (``tests/contract/test_control_plane.py`` holds it to them):

    - ``wait_for_assignment`` returns a :class:`RankAssignment` of an epoch newer than every one it returned before in
      this process; all ranks of that epoch get the same epoch, world size and stores, and each rank once.
    - ``notice`` reads memory: no message, no collective, less than a few microseconds. A notice is never lost: it stays
      until the epoch it is about has been left.
    - ``agree_on_step`` returns the same step to all ranks of the epoch, and it is the greatest that any of them said:
      nobody is asked to undo a step, and a rank that is behind can finish alone what the others have finished.
    - A fault while others wait in ``agree_on_step`` or ``wait_for_assignment`` ends the wait: ``agree_on_step`` raises
      :class:`StaleEpochError`.
    - What a rank of an old epoch says is refused with :class:`StaleEpochError`, and changes nothing.
    - ``ControlPlaneUnavailableError`` means unknown; the control plane may come back, and ``wait_for_assignment`` waits
      for that.
    - Any thread may call any method. No call outlives its ``timeout_s``: then it raises ``ControlDeadlineError``.
    - After a ``STOP`` that all have sealed, ``wait_for_assignment`` raises :class:`Dismissed`.
    """

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        """This process is warm, in no process group, and waits for a place in the next world.

        Raises :class:`~elastic.errors.JobFailedError` when there will be none, and :class:`Dismissed` where this
        process has no place in it.
        """

    def notice(self) -> ControlNotice | None:
        """What is wanted of this rank by now, if anything."""

    def agree_on_step(self, step: int, *, timeout_s: float | None = None) -> int:
        """Having begun ``step`` steps: wait until all ranks of the epoch have said where they stand.

        Returns the number of steps after which all of them stop. Say it as soon as the notice is there, from a thread
        of its own: one that waited for its step to end would keep those waiting who are in that step with it.
        """

    def report_sealed(self, step: int, *, checkpoint: SealedStep | None = None, timeout_s: float | None = None) -> None:
        """This rank stands at the agreed step and its state is safe; it may be asked to go from here on.

        ``checkpoint`` is where that state is. Where all ranks name the same one, the next world restores it.
        """

    def report_progress(self, progress: RankProgress) -> None:
        """Where this rank is; costs a write to memory, is passed on with the next heartbeat."""

    def report_fault(self, reason: str, *, final: bool = False, position: ErrorPosition | None = None) -> None:
        """Something went wrong in this rank (an exception, a loss that is not finite): the world is broken.

        ``final``: another attempt would end the same way, so there is to be none. ``position``: where the
        train function raised an error that does not follow from another rank. If the next worlds end with an equal
        fault at the same position, a plane may treat it as final.
        Further faults of the same epoch are accepted and change nothing.
        """

    def request_change(
        self, want: NoticeKind, reason: str, *, deadline_s: float | None = None, nodes: int | None = None
    ) -> None:
        """Ask for a change: by the script, or because this process was told (a signal) that its machine goes away.

        ``RESIZE`` with ``nodes``: so many at the most. With a deadline and without ``nodes``: this rank's machine is
        preempted by then. With neither: as many as the policy allows.
        """

    def on_broken(self, call: Callable[[ControlNotice], None]) -> None:
        """Have ``call`` run, in a thread of the plane, as soon as an epoch is broken: to abort what a rank hangs in."""

    def report_finished(self) -> None:
        """This rank has nothing left to do; when all say so the job has succeeded."""

    def close(self) -> None:
        """Idempotent; a rank that closes without ``report_finished`` is a lost rank."""


class Dismissed(Exception):  # noqa: N818 - no error: what a rank is told that is not in the next world
    """This process is not in the next world, and not kept as a spare either: it is to end, with status 0."""


CONTROL_PLANE_ENTRY_POINTS = "elastic.control_planes"

ControlPlaneFactory = Callable[[Mapping[str, str]], "ControlPlane | None"]
"""Called with the environment of a process; ``None`` where it was not started by that platform."""


def platform_control_plane(
    environ: Mapping[str, str], found: Iterable[EntryPoint] | None = None
) -> ControlPlane | None:
    """Of the first platform, by name, that started this process."""
    for entry in sorted(
        entry_points(group=CONTROL_PLANE_ENTRY_POINTS) if found is None else found,
        key=lambda one: (one.name, one.value),
    ):
        plane = _loaded(entry)(environ)
        if plane is not None:
            return plane
    return None


def _loaded(entry: EntryPoint) -> ControlPlaneFactory:
    """One that cannot be loaded may be the one that runs this job: to go on without it would be a guess."""
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"{entry.value}, a plane called {entry.name}, cannot be loaded: {error}") from error
