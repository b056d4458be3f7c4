"""Membership of a world as a value, the events that change it, and the actions that follow.

::

              all ready             fault                         nobody to wait for, and too few
    FORMING ────────────> RUNNING ────────> FORMING <──> WAITING ──────────────────────────────────> STOPPED
       ^                   │    │                        (for a replacement)
       │     all sealed    │    │ all finished
       └──── PAUSING  <────┘    └───────────> FINISHED                     restart budget used up: JOB_FAILED
             (pausing)  ────────────────────────^

``life`` counts the starts of a node's supervisor: what is said of an earlier life changes nothing, and a life that was
declared lost or was released never comes back; its supervisor begins a new one.

``births`` counts the processes that a supervisor has put into ranks' seats in this life, spares that were promoted
included: ``nproc`` from the start on, one more with every replacement. It tells an old process from the new one in the
same seat. A supervisor replaces a rank only when it is told to, and what it ends by order it does not report as lost.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from peerstore.shard_records import NonNegativeInt, NonNegativeIntOrMinusOne

_SAME_ERRORS = 3
"""Equal errors in a row at the same step, after which the job fails."""
_SAME_ERRORS_AT_START = 2
"""Equal errors in a row before the first step, after which the job fails."""


class WorldPhase(enum.Enum):
    FORMING = "forming"
    """There is no world; the ranks of the next one are on their way."""
    WAITING = "waiting"
    """The same, but nodes are missing: a replacement may come in time."""
    RUNNING = "running"
    PAUSING = "pausing"
    """The ranks were asked to stop at a step; the world still runs."""
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self in (WorldPhase.STOPPED, WorldPhase.FINISHED, WorldPhase.FAILED)

    @property
    def is_running(self) -> bool:
        """Ranks are in a world."""
        return self in (WorldPhase.RUNNING, WorldPhase.PAUSING)


class SealedStep(msgspec.Struct, frozen=True):
    """A step that all ranks of a world sealed before they left it."""

    job: str
    """Of the checkpoints."""
    step: NonNegativeInt
    epoch: NonNegativeInt
    """Of the incarnation that saved it: a step of another one with the same number is another step."""


class RequestedStep(msgspec.Struct, frozen=True):
    """The step that the first world of a run restores, whatever its checkpoint job is called."""

    step: NonNegativeInt
    epoch: NonNegativeInt | None = None
    """Of the incarnation that saved it; ``None``: the newest that did."""

    def __str__(self) -> str:
        return str(self.step) if self.epoch is None else f"{self.step}@{self.epoch}"


class ErrorPosition(msgspec.Struct, frozen=True):
    """Position in a rank's training at which its train function raised an error."""

    step: NonNegativeIntOrMinusOne
    """The step in progress; -1 where the train function does not report steps."""
    sealed: NonNegativeIntOrMinusOne = -1
    """The newest step that the rank's process has sealed."""
    before_first_step: bool = False
    """The rank had completed no step in this world."""

    def __str__(self) -> str:
        if self.before_first_step:
            return "before the first step"
        return "before a new step was sealed" if self.step < 0 else f"at step {self.step}"


class RepeatedError(msgspec.Struct, frozen=True):
    """An error of the train function that broke one or more worlds in a row at the same position."""

    reason: str
    position: ErrorPosition
    count: int = 1
    """Worlds in a row that it broke, with no new sealed step in between."""

    def next(self, reason: str, position: ErrorPosition) -> RepeatedError:
        """Return the error after it broke another world; the count begins anew for another error."""
        at = msgspec.structs.replace(position, sealed=self.position.sealed)
        same = (reason, at) == (self.reason, self.position) and position.sealed <= self.position.sealed
        return RepeatedError(reason, self.position, self.count + 1) if same else RepeatedError(reason, position)

    @property
    def is_permanent(self) -> bool:
        """Whether another attempt would end in the same way."""
        return self.count >= (_SAME_ERRORS_AT_START if self.position.before_first_step else _SAME_ERRORS)


class PendingReplacement(msgspec.Struct, frozen=True):
    """A seat whose process is being replaced."""

    local_rank: int
    spawn_count: int
    """How many processes the node had started when the old one was lost."""
    spare: bool = False
    """A warm spare takes it: it is there in no time."""
    full_restart: bool = False
    """Nobody lost it: all processes were started anew."""


class NodeMember(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
):
    """A node that is here, in the world or beside it."""

    node: str
    generation: int
    join_order: int
    """Which one it was to come."""
    joined_s: float = 0.0
    has_ranks: bool = False
    """It has ranks in the newest world, also when that is broken."""
    epoch: int = -1
    """The last world it had ranks in."""
    first_epoch: int = -1
    """The first of those that it was in one after the other until then."""
    spawn_count: int = 0
    """How many processes it had started when it last was ready."""
    spares: int = 0
    pending_replacements: tuple[PendingReplacement, ...] = ()
    ready: bool = False
    """Its ranks wait for a place."""
    sealed: bool = False
    """Its ranks stand at the agreed step, and may be asked to go."""
    ready_deadline_s: float | None = None
    """When its ranks are to be ready."""
    respawn_requested: bool = False
    """They were not, and were started again."""
    drain_deadline_s: float | None = None
    """It was preempted."""

    @property
    def has_stopped(self) -> bool:
        """Whether a pause need not wait for it any more."""
        return self.ready or self.sealed

    @property
    def is_draining(self) -> bool:
        return self.drain_deadline_s is not None

    @property
    def is_respawning(self) -> bool:
        """Its ranks take as long as a new process takes to start."""
        return self.respawn_requested or any(not owed.spare for owed in self.pending_replacements)


class NodeFault(msgspec.Struct, frozen=True):
    """A fault that a node was to blame for."""

    node: str
    at_s: float


class WorldState(
    msgspec.Struct,
    frozen=True,
):
    """Who is in the job. Made by :func:`elastic.world.next_world.initial_world`, changed by
    :func:`elastic.world.next_world.next_world`.
    """

    nproc: int
    """Ranks per node."""
    phase: WorldPhase = WorldPhase.FORMING
    epoch: int = -1
    """Number of the newest world; 0 for the first one, if no earlier world can have been forgotten."""
    min_next_epoch: int = 0
    """Smallest allowed number of the next world."""
    ranked_nodes: tuple[str, ...] = ()
    """The nodes of the newest world in order of rank, also those that have been lost since it broke."""
    members: dict[str, NodeMember] = {}
    """Never changed in place."""
    departed: dict[str, int] = {}
    """Nodes that are no more, and the life they ended with."""
    finished_nodes: frozenset[str] = frozenset()
    """Nodes of the newest world that have nothing left to do."""
    join_count: int = 0
    formed_s: float = 0.0
    """When it was formed; before the first, since when that is waited for."""

    target_nodes: int = 0
    """How many nodes the next world is to have, if they can be had within the timeouts."""
    max_nodes: int | None = None
    """How many it may have at the most, where somebody asked for that."""
    requested_nodes: int = 0
    """Nodes the cluster was asked for and that have not come yet."""
    after_fault: bool = False
    """What the next world is formed after: a fault, or a change that was wanted."""
    stopping: bool = False
    reason: str = ""
    """Why there will be, or is, this world; at the end, why it is over."""

    replacement_deadline_s: float | None = None
    """How long a replacement, or at the start all the nodes, are waited for."""
    pause_deadline_s: float | None = None
    """When who has not paused is stopped."""
    sealed_nodes: int = 0
    """How many nodes of this world have sealed the step at which it pauses."""
    sealed_step: SealedStep | None = None
    """What they sealed, as long as all have named the same."""
    resume_from: SealedStep | None = None
    """What the next world restores: this one has ended in order."""
    requested_step: RequestedStep | None = None
    """What the next world restores, until a world of this run has sealed a step."""
    growth_possible_since_s: float | None = None
    """Since when there could be a greater, or a better, world."""
    shrunk_s: float | None = None
    """When faults last made the world smaller."""

    failed_pauses: int = 0
    """Changes in a row that the ranks did not come to in time: the next one is tried later each time."""
    restarts: int = 0
    """Worlds that ended by a fault."""
    faults_s: tuple[float, ...] = ()
    """When, since all processes were last started anew."""
    full_restarts_s: tuple[float, ...] = ()
    spawn_attempts: int = 0
    """How often a process of one seat was started for the next world, as far as that is counted as restarts."""
    has_respawned: bool = False
    """Processes were replaced for the next world."""
    repeated_error: RepeatedError | None = None
    """The train function's error that broke the newest broken world; ``None`` if it broke otherwise."""
    node_faults: tuple[NodeFault, ...] = ()

    next_tick_s: float | None = None
    """When it next wants a tick, if nothing happens before."""

    @property
    def size(self) -> int:
        """Nodes of the newest world."""
        return len(self.ranked_nodes)

    @property
    def world_size(self) -> int:
        return len(self.ranked_nodes) * self.nproc

    @property
    def standby(self) -> tuple[str, ...]:
        """Nodes that are here and have no rank."""
        return tuple(member.node for member in self.members.values() if not member.has_ranks)


class _Event(msgspec.Struct, frozen=True, tag=True):
    pass


class NodeJoined(_Event, frozen=True):
    """A supervisor is here and warms up its ranks."""

    node: str
    generation: int
    local_ranks: int
    """Ranks it runs; a world takes only nodes that run as many as all others."""
    spawn_count: int = 0
    spares: int = 0
    """Warm processes beyond its ranks."""


class NodeReady(_Event, frozen=True):
    """All ranks of a node wait for a place, in no process group."""

    node: str
    generation: int
    spawn_count: int
    epoch: int = -1
    """The newest world this node was told of: its ranks have left it, or never entered."""
    spares: int = 0


class NodeSealed(_Event, frozen=True):
    """All ranks of a node stand at the agreed step, and what they hold is safe."""

    node: str
    generation: int
    epoch: int
    step: int = -1
    checkpoint: SealedStep | None = None
    """Where it is, where all ranks of the node have named the same."""


class StepSealed(_Event, frozen=True):
    """All ranks of a world have sealed a step in it: a restore finds that step, or a newer one."""

    epoch: int


class NodeFinished(_Event, frozen=True):
    """All ranks of a node have nothing left to do.

    Should the world break before the others have finished, those that ended are reported as lost, after that.
    """

    node: str
    generation: int
    epoch: int


class NodeLost(_Event, frozen=True):
    """A node has not been heard of for too long, or is known to be gone."""

    node: str
    generation: int
    reason: str


class NodeLeft(_Event, frozen=True):
    """A supervisor says goodbye; nobody is to blame."""

    node: str
    generation: int
    reason: str = "left"


class RankLost(_Event, frozen=True):
    """A process in a rank's seat has ended, and was not to."""

    node: str
    generation: int
    spawn_count: int
    """As many as there had been when it was noticed."""
    local_rank: int
    reason: str
    never_joined: bool = False
    """The process exited by itself and never connected to its supervisor."""


class RankFault(_Event, frozen=True):
    """A rank says that its world is broken; its process lives and comes back by itself."""

    node: str
    generation: int
    epoch: int
    local_rank: int
    reason: str
    final: bool = False
    """Another attempt would end the same way."""
    position: ErrorPosition | None = None
    """Where the train function raised the error; ``None`` for one that may follow from a lost rank."""


class HangDetected(_Event, frozen=True):
    """A step does not end."""

    epoch: int
    reason: str
    node: str = ""
    """Whose rank does not move, where that is known; its process is replaced."""
    local_rank: int = -1


class NodesPreempted(_Event, frozen=True):
    """The cluster wants these nodes back."""

    nodes: tuple[str, ...]
    deadline_s: float
    """On the clock of ``now_s``: when they are taken."""
    reason: str = "preempted"


class ResizeRequested(_Event, frozen=True):
    """A person or the script wants so many nodes at the most; ``None``: as many as the policy allows.

    A number below the least size the policy allows changes nothing.
    """

    nodes: int | None
    reason: str = "resize asked for"


class JobStopRequested(_Event, frozen=True):
    """The job is to be saved and to end, to be resumed another time."""

    reason: str
    deadline_s: float | None = None
    """On the clock of ``now_s``."""


class Tick(_Event, frozen=True):
    """Time has passed: :attr:`World.tick_s <elastic.world.world_state.WorldState.next_tick_s>` says when one is
    wanted.
    """


class EventBatch(_Event, frozen=True):
    """What came in together is decided on together: one new world where each alone would have made one."""

    events: tuple[WorldEvent, ...]


WorldEvent: TypeAlias = (
    NodeJoined
    | NodeReady
    | NodeSealed
    | StepSealed
    | NodeFinished
    | NodeLost
    | NodeLeft
    | RankLost
    | RankFault
    | HangDetected
    | NodesPreempted
    | ResizeRequested
    | JobStopRequested
    | Tick
    | EventBatch
)


class RejoinReport(
    msgspec.Struct,
    frozen=True,
):
    """All that a supervisor knows of its node and its world: what a coordinator that starts again asks for."""

    node: str
    generation: int
    local_ranks: int
    spawn_count: int
    spares: int = 0
    epoch: int = -1
    """The newest world it was told of."""
    ranked_nodes: tuple[str, ...] = ()
    """The nodes of that world, in order of rank; it is enough that one of them says so."""
    restarts: int = 0
    """As that world was formed with."""
    ready: bool = False
    """All its ranks wait for a place: they have left that world, or never entered."""
    lost_ranks: tuple[int, ...] = ()
    """Local ranks whose process has ended, and was not to."""
    finished: bool = False
    """All its ranks have nothing left to do."""


class FormationKind(enum.Enum):
    """How a world came to be, compared with the one before."""

    START = "start"
    RESTART = "restart"
    """The same nodes, after a fault that no process was lost by."""
    RESPAWN = "respawn"
    """The same nodes; processes were replaced in place."""
    REPLACE = "replace"
    """As many nodes, not the same."""
    SHRINK = "shrink"
    GROW = "grow"


class _Action(msgspec.Struct, frozen=True, tag=True):
    pass


class BreakWorld(_Action, frozen=True):
    """The world of this epoch is broken: its ranks leave the step at once and come back (``NoticeKind.RESTART``)."""

    epoch: int
    reason: str
    within_s: float
    """Seconds that its ranks have to leave. The process of a rank that takes longer is replaced."""


class PauseWorld(_Action, frozen=True):
    """The ranks of this epoch agree on a step, seal, and come back (``NoticeKind.RESIZE``), or end
    (``NoticeKind.STOP``).

    A later one of the same epoch replaces an earlier one.
    """

    epoch: int
    reason: str
    deadline_s: float
    """On the clock of ``now_s``: who has not come by then is stopped."""
    stop: bool = False


class RespawnRanks(_Action, frozen=True):
    """End what runs in these seats, if anything does, and start a new process in each."""

    node: str
    generation: int
    local_ranks: tuple[int, ...]


class PromoteSpare(_Action, frozen=True):
    """The same, with a warm spare process of this node."""

    node: str
    generation: int
    local_rank: int


class RespawnStragglers(_Action, frozen=True):
    """End and start anew those ranks of a node that do not wait for a place by now.

    A node where all do says so again.
    """

    node: str
    generation: int


class FormWorld(_Action, frozen=True):
    """A new world. A rank is its node's position times ``nproc``, plus its local rank.

    A supervisor that has no process waiting in one of the seats by then reports that rank as lost, again if it has.
    """

    epoch: int
    nodes: tuple[str, ...]
    nproc: int
    kind: FormationKind
    restarts: int
    reason: str
    resume_from: SealedStep | None = None
    """What its ranks restore, and nothing else."""
    requested_step: RequestedStep | None = None
    """The same, as the command line of this run requests it."""


class ReleaseNode(_Action, frozen=True):
    """This node is not needed, or has to go: its ranks are dismissed and its supervisor leaves."""

    node: str
    generation: int
    reason: str
    force: bool = False
    """Its processes are ended without being asked: its time is up, or it does not answer."""
    sealed_step: SealedStep | None = None
    """The step that all ranks of its world have sealed."""


class RequestNodes(_Action, frozen=True):
    """Ask the cluster for this many more nodes."""

    nodes: int
    reason: str


class StopJob(_Action, frozen=True):
    """The job ends here, to be resumed another time."""

    reason: str
    sealed_step: SealedStep | None = None
    """The step that the next run restores: the ranks sealed it before the job stopped."""


class FinishJob(_Action, frozen=True):
    """All ranks have done what there was to do: the job has succeeded."""


class FailJob(_Action, frozen=True):
    """The job cannot go on."""

    reason: str
    """The last error."""
    attempts: str
    """How often the job was tried, or why it is not tried again."""
    never_joined: bool = False
    """The script never called ``elastic.run``: no attempt would be different."""


WorldAction: TypeAlias = (
    BreakWorld
    | PauseWorld
    | RespawnRanks
    | PromoteSpare
    | RespawnStragglers
    | FormWorld
    | ReleaseNode
    | RequestNodes
    | StopJob
    | FinishJob
    | FailJob
)
