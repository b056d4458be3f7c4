"""The state of a world as a value, the events that change it, and the actions that follow.

::

              all ready             fault                         no node to wait for, too few left
    FORMING ────────────> RUNNING ────────> FORMING <──> WAITING ──────────────────────────────────> STOPPED
       ^                   │    │                        (for a replacement)
       │     all sealed    │    │ all finished
       └──── PAUSING  <────┘    └───────────> FINISHED                     restart budget used up: JOB_FAILED
             (pausing)  ────────────────────────^

``generation`` counts the starts of a node's supervisor. Events of an earlier generation change nothing. A generation
that was declared lost or was released never returns: its supervisor starts a new one.

``spawn_count`` counts the processes that have run as ranks of a supervisor in this generation. It is ``nproc`` at the
start and grows by one with every replacement, also by a promoted spare. It distinguishes the old process of a local
rank from the new one. A supervisor replaces a rank only for an action. It does not report processes that it ended for
an action as lost.
"""

from __future__ import annotations

import enum
from collections.abc import Container
from typing import TypeAlias

import msgspec

from peerstore.shard_records import NonNegativeInt, NonNegativeIntOrMinusOne

_SAME_ERRORS = 3
"""Equal errors in a row at the same step, after which the job fails."""
_SAME_ERRORS_AT_START = 2
"""Equal errors in a row before the first step, after which the job fails."""


class WorldPhase(enum.Enum):
    FORMING = "forming"
    """No world runs; the ranks of the next one are becoming ready."""
    WAITING = "waiting"
    """Like ``FORMING``, but nodes are missing and a replacement may still join."""
    RUNNING = "running"
    PAUSING = "pausing"
    """The world still runs, but its ranks will stop at a common step."""
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self in (WorldPhase.STOPPED, WorldPhase.FINISHED, WorldPhase.FAILED)

    @property
    def is_running(self) -> bool:
        """Whether ranks are in a world."""
        return self in (WorldPhase.RUNNING, WorldPhase.PAUSING)


class SealedStep(msgspec.Struct, frozen=True):
    """A step that all ranks of a world sealed before they left it."""

    job: str
    """Name of the checkpoint job."""
    step: NonNegativeInt
    epoch: NonNegativeInt
    """Epoch of the incarnation that saved it. Equal step numbers of two epochs are different steps."""


class ReachedStep(msgspec.Struct, frozen=True):
    """A step that a rank has sealed; other ranks may have sealed an older one."""

    job: str
    """Name of the checkpoint job."""
    step: NonNegativeInt


class RequestedStep(msgspec.Struct, frozen=True):
    """The step that the first world of a run restores, in any checkpoint job."""

    step: NonNegativeInt
    epoch: NonNegativeInt | None = None
    """Epoch of the incarnation that saved it; ``None`` for the newest incarnation that saved the step."""

    def __str__(self) -> str:
        return str(self.step) if self.epoch is None else f"{self.step}@{self.epoch}"


class StepHolders(msgspec.Struct, frozen=True):
    """Nodes whose agents have, or may have, the newest step. The first world of a run waits for them."""

    newest: tuple[str, ...] = ()
    """Nodes that have the newest step of all agents that answered. One of them is enough."""
    unknown: tuple[str, ...] = ()
    """Nodes with steps in memory whose agents did not answer. Each of them may have a newer step."""

    def missing(self, ready: Container[str]) -> tuple[str, ...]:
        """Return the nodes that the world still waits for."""
        newest = () if any(node in ready for node in self.newest) else self.newest
        return *newest, *(node for node in self.unknown if node not in ready)


NO_STEP_HOLDERS = StepHolders()


class ErrorPosition(msgspec.Struct, frozen=True):
    """Position in a rank's training at which its train function raised an error."""

    step: NonNegativeIntOrMinusOne
    """Step in progress; -1 if the train function does not report steps."""
    sealed: NonNegativeIntOrMinusOne = -1
    """Newest step that the rank's process has sealed; -1 for none."""
    before_first_step: bool = False
    """Whether the rank had completed no step in this world."""

    def __str__(self) -> str:
        if self.before_first_step:
            return "before the first step"
        return "before a new step was sealed" if self.step < 0 else f"at step {self.step}"


class RepeatedError(msgspec.Struct, frozen=True):
    """An error of the train function that broke one or more worlds in a row at the same position."""

    reason: str
    position: ErrorPosition
    count: int = 1
    """Consecutive worlds that the error broke, with no new sealed step in between."""

    def next(self, reason: str, position: ErrorPosition) -> RepeatedError:
        """Return the error of the next broken world: ``count`` plus 1, or 1 for a different error."""
        at = msgspec.structs.replace(position, sealed=self.position.sealed)
        same = (reason, at) == (self.reason, self.position) and position.sealed <= self.position.sealed
        return RepeatedError(reason, self.position, self.count + 1) if same else RepeatedError(reason, position)

    @property
    def is_permanent(self) -> bool:
        """Whether another attempt would fail in the same way."""
        return self.count >= (_SAME_ERRORS_AT_START if self.position.before_first_step else _SAME_ERRORS)


class PendingReplacement(msgspec.Struct, frozen=True):
    """A local rank whose process is being replaced."""

    local_rank: int
    spawn_count: int
    """Processes that the node had started when the old process was lost."""
    spare: bool = False
    """Whether a warm spare replaces the process, so that no process start is needed."""
    full_restart: bool = False
    """Whether the process was not lost but is replaced in a restart of all processes."""


class NodeMember(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
):
    """A node of the job, with or without ranks in the world."""

    node: str
    generation: int
    join_order: int
    """Number of nodes that joined before this one."""
    joined_s: float = 0.0
    has_ranks: bool = False
    """Whether the node has ranks in the newest world, even if that world is broken."""
    epoch: int = -1
    """Newest world in which the node had ranks; -1 for none."""
    first_epoch: int = -1
    """First of the consecutive worlds up to ``epoch`` in which the node had ranks."""
    spawn_count: int = 0
    """Processes that the node had started when it was last ready."""
    spares: int = 0
    """Warm processes in addition to the ranks."""
    pending_replacements: tuple[PendingReplacement, ...] = ()
    ready: bool = False
    """Whether all its ranks wait for a world."""
    sealed: bool = False
    """Whether its ranks have sealed the common step of a pause, so that the node may leave."""
    ready_deadline_s: float | None = None
    """Time by which its ranks must be ready; ``None`` for no limit."""
    respawn_requested: bool = False
    """Whether its ranks missed that deadline and were started again."""
    drain_deadline_s: float | None = None
    """Time by which the preempted node must leave; ``None`` if it is not preempted."""

    @property
    def has_stopped(self) -> bool:
        """Whether a pause no longer needs to wait for the node."""
        return self.ready or self.sealed

    @property
    def is_draining(self) -> bool:
        return self.drain_deadline_s is not None

    @property
    def is_respawning(self) -> bool:
        """Whether at least one of its ranks needs a newly started process."""
        return self.respawn_requested or any(not replacement.spare for replacement in self.pending_replacements)


class NodeFault(msgspec.Struct, frozen=True):
    """A fault that counts against a node."""

    node: str
    at_s: float


class WorldState(
    msgspec.Struct,
    frozen=True,
):
    """Members, phase, deadlines and restart counts of a job.

    :func:`elastic.world.next_world.initial_world` returns the first one, and
    :func:`elastic.world.next_world.next_world` its successors. All times are on the clock of ``now_s``.
    """

    nproc: int
    """Ranks per node."""
    phase: WorldPhase = WorldPhase.FORMING
    epoch: int = -1
    """Number of the newest world; -1 before the first one, which is 0 or ``min_next_epoch``."""
    min_next_epoch: int = 0
    """Smallest allowed number of the next world."""
    ranked_nodes: tuple[str, ...] = ()
    """Nodes of the newest world in rank order, including nodes lost since it broke."""
    members: dict[str, NodeMember] = {}
    """Nodes of the job by name. Never changed in place."""
    departed: dict[str, int] = {}
    """Highest generation of each node that was lost, left or was released. Never changed in place."""
    finished_nodes: frozenset[str] = frozenset()
    """Nodes of the newest world whose ranks have all finished."""
    join_count: int = 0
    formed_s: float = 0.0
    """Time at which the newest world was formed; before the first, the time at which the wait began."""

    target_nodes: int = 0
    """Nodes that the next world should have, if they become ready within the timeouts."""
    max_nodes: int | None = None
    """Requested limit of nodes; ``None`` for the limit of the policy."""
    requested_nodes: int = 0
    """Nodes requested from the cluster that have not joined yet."""
    after_fault: bool = False
    """Whether the next world follows a fault, not a planned change."""
    stopping: bool = False
    """Whether the job will stop after its ranks have sealed a step."""
    reason: str = ""
    """Why the current or next world is formed; in a final phase, why the job ended."""

    replacement_deadline_s: float | None = None
    """Time until which the next world waits for a replacement, or for further nodes at the start."""
    pause_deadline_s: float | None = None
    """Time at which ranks that have not paused are stopped."""
    sealed_nodes: int = 0
    """Nodes of this world that have sealed the step at which it pauses."""
    sealed_step: SealedStep | None = None
    """The step that these nodes sealed; ``None`` if their reports differ."""
    resume_from: SealedStep | None = None
    """Step that all ranks sealed and the next world restores; ``None`` for the newest complete step."""
    requested_step: RequestedStep | None = None
    """Step that the next world restores, until a world of this run has sealed a step."""
    growth_possible_since_s: float | None = None
    """Time since which a larger or better world has been possible; ``None`` if none is."""
    shrunk_s: float | None = None
    """Time at which a fault last made the world smaller."""

    failed_pauses: int = 0
    """Consecutive pauses that missed their deadline. Each one delays the next attempt to grow."""
    restarts: int = 0
    """Restarts after faults in the whole life of the job."""
    faults_s: tuple[float, ...] = ()
    """Times of the faults within the evaluation period since the last restart of all processes."""
    full_restarts_s: tuple[float, ...] = ()
    """Times of the restarts of all processes within the evaluation period."""
    spawn_attempts: int = 0
    """Highest number of starts of one local rank for the next world that have been counted as restarts."""
    has_respawned: bool = False
    """Whether processes were replaced for the next world."""
    repeated_error: RepeatedError | None = None
    """Error of the train function that broke the newest broken world; ``None`` for any other cause."""
    node_faults: tuple[NodeFault, ...] = ()

    next_tick_s: float | None = None
    """Time at which the next :class:`Tick` is due if no event comes earlier; ``None`` for no tick."""

    @property
    def size(self) -> int:
        """Number of nodes in the newest world."""
        return len(self.ranked_nodes)

    @property
    def world_size(self) -> int:
        return len(self.ranked_nodes) * self.nproc

    @property
    def standby(self) -> tuple[str, ...]:
        """Names of the members without ranks."""
        return tuple(member.node for member in self.members.values() if not member.has_ranks)

    def with_departed(self, node: str, generation: int) -> WorldState:
        """Return the world after a node departed. A greater generation that departed earlier stays recorded."""
        departed = {**self.departed, node: max(generation, self.departed.get(node, -1))}
        return msgspec.structs.replace(self, departed=departed)


class _Event(msgspec.Struct, frozen=True, tag=True):
    pass


class NodeJoined(_Event, frozen=True):
    """A supervisor has joined and starts its ranks."""

    node: str
    generation: int
    local_ranks: int
    """Ranks of the node. A node whose number differs from the job's is released."""
    spawn_count: int = 0
    spares: int = 0
    """Warm processes in addition to the ranks."""


class NodeReady(_Event, frozen=True):
    """All ranks of a node wait for a world, in no process group."""

    node: str
    generation: int
    spawn_count: int
    epoch: int = -1
    """Newest world that this node knows. Its ranks have left that world or never entered it."""
    spares: int = 0


class NodeSealed(_Event, frozen=True):
    """All ranks of a node stopped at the common step, and their shards are sealed."""

    node: str
    generation: int
    epoch: int
    step: int = -1
    checkpoint: SealedStep | None = None
    """The sealed step, if all ranks of the node report the same one."""


class StepSealed(_Event, frozen=True):
    """All ranks of a world have sealed a step in it. A restore finds this step or a newer one."""

    epoch: int


class NodeFinished(_Event, frozen=True):
    """All ranks of a node have finished.

    If the world breaks before the other nodes finish, the supervisor then reports the processes that ended as lost.
    """

    node: str
    generation: int
    epoch: int


class NodeLost(_Event, frozen=True):
    """A node missed its heartbeats, or its end is known."""

    node: str
    generation: int
    reason: str


class NodeLeft(_Event, frozen=True):
    """A supervisor leaves the job. This does not count as a fault of its node."""

    node: str
    generation: int
    reason: str = "left"


class RankLost(_Event, frozen=True):
    """A rank's process ended unexpectedly."""

    node: str
    generation: int
    spawn_count: int
    """Processes that the node had started when its supervisor noticed the loss."""
    local_rank: int
    reason: str
    never_joined: bool = False
    """Whether the process exited on its own and never connected to its supervisor."""


class RankFault(_Event, frozen=True):
    """A rank reports that its world is broken. Its process is alive and leaves the world on its own."""

    node: str
    generation: int
    epoch: int
    local_rank: int
    reason: str
    final: bool = False
    """Whether another attempt would fail in the same way."""
    position: ErrorPosition | None = None
    """Where the train function raised the error; ``None`` if a lost rank may have caused it."""


class HangDetected(_Event, frozen=True):
    """A step takes longer than the hang timeout."""

    epoch: int
    reason: str
    node: str = ""
    """Node of the rank that hangs; "" if it is not known. The rank's process is replaced."""
    local_rank: int = -1


class NodesPreempted(_Event, frozen=True):
    """The cluster reclaims these nodes."""

    nodes: tuple[str, ...]
    deadline_s: float
    """Time at which the nodes are taken, on the clock of ``now_s``."""
    reason: str = "preempted"


class ResizeRequested(_Event, frozen=True):
    """A user or the script requests a limit of nodes; ``None`` for the limit of the policy.

    A number below the smallest size of the policy changes nothing.
    """

    nodes: int | None
    reason: str = "resize asked for"


class JobStopRequested(_Event, frozen=True):
    """A request to save a step and stop the job. A later run can resume it."""

    reason: str
    deadline_s: float | None = None
    """Time to stop by, on the clock of ``now_s``; ``None`` for the policy's timeout."""


class Tick(_Event, frozen=True):
    """Time has passed.

    :attr:`WorldState.next_tick_s <elastic.world.world_state.WorldState.next_tick_s>` is the time of the next tick.
    """


class EventBatch(_Event, frozen=True):
    """Events that arrived together. They cause at most one new world; separately, each could cause one."""

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
    """The state of a node and its world as its supervisor knows it, for a restarted coordinator."""

    node: str
    generation: int
    local_ranks: int
    spawn_count: int
    spares: int = 0
    epoch: int = -1
    """Newest world that the supervisor knows; -1 for none."""
    ranked_nodes: tuple[str, ...] = ()
    """Nodes of that world in rank order. One report with them is enough."""
    restarts: int = 0
    """Restarts of the job when that world was formed."""
    ready: bool = False
    """Whether all its ranks wait for a world: they have left that world or never entered it."""
    lost_ranks: tuple[int, ...] = ()
    """Local ranks whose process ended unexpectedly."""
    finished: bool = False
    """Whether all its ranks have finished."""


class FormationKind(enum.Enum):
    """The difference between a world and the previous one."""

    START = "start"
    RESTART = "restart"
    """The same nodes, after a fault without a lost process."""
    RESPAWN = "respawn"
    """The same nodes; processes were replaced in place."""
    REPLACE = "replace"
    """The same number of nodes, but not the same nodes."""
    SHRINK = "shrink"
    GROW = "grow"


class _Action(msgspec.Struct, frozen=True, tag=True):
    pass


class BreakWorld(_Action, frozen=True):
    """The world of this epoch is broken: its ranks abort the step (``NoticeKind.RESTART``)."""

    epoch: int
    reason: str
    within_s: float
    """Seconds that the ranks have to leave. A process that takes longer is replaced."""


class PauseWorld(_Action, frozen=True):
    """The ranks of this epoch agree on a step and seal it.

    Then they wait for the next world (``NoticeKind.RESIZE``) or end (``NoticeKind.STOP``).
    A later pause of the same epoch replaces an earlier one.
    """

    epoch: int
    reason: str
    deadline_s: float
    """Time at which ranks that have not paused are stopped, on the clock of ``now_s``."""
    stop: bool = False


class RespawnRanks(_Action, frozen=True):
    """A new process for each of these local ranks; a process that still runs there is ended."""

    node: str
    generation: int
    local_ranks: tuple[int, ...]


class PromoteSpare(_Action, frozen=True):
    """A warm spare process of this node for this local rank; a process that still runs there is ended."""

    node: str
    generation: int
    local_rank: int


class RespawnStragglers(_Action, frozen=True):
    """New processes for the ranks of a node that are not waiting for a world yet.

    If all its ranks are waiting, the node reports again that it is ready.
    """

    node: str
    generation: int


class FormWorld(_Action, frozen=True):
    """A new world. A rank's number is its node's position times ``nproc``, plus its local rank.

    A supervisor without a waiting process for one of its local ranks reports that rank as lost, even if it already has.
    """

    epoch: int
    nodes: tuple[str, ...]
    nproc: int
    kind: FormationKind
    restarts: int
    reason: str
    resume_from: SealedStep | None = None
    """The only step that its ranks may restore; ``None`` for the newest complete step."""
    requested_step: RequestedStep | None = None
    """The step to restore that the command line of this run requests; ``None`` for none."""


class ReleaseNode(_Action, frozen=True):
    """The node is not needed or must leave: its ranks end and its supervisor exits."""

    node: str
    generation: int
    reason: str
    force: bool = False
    """Whether its processes are killed: its deadline has passed or it does not respond."""
    sealed_step: SealedStep | None = None
    """The step that all ranks of its world have sealed; ``None`` for none."""


class RequestNodes(_Action, frozen=True):
    """A request to the cluster for this many more nodes."""

    nodes: int
    reason: str


class StopJob(_Action, frozen=True):
    """The job stops; a later run can resume it."""

    reason: str
    sealed_step: SealedStep | None = None
    """Step that all ranks sealed and the next run restores; ``None`` for no such step."""


class FinishJob(_Action, frozen=True):
    """All ranks have finished: the job has succeeded."""


class FailJob(_Action, frozen=True):
    """The job has failed and cannot continue."""

    reason: str
    """The last error."""
    attempts: str
    """Number of attempts, or why the job is not retried."""
    never_joined: bool = False
    """Whether the script never called ``elastic.run``, so that a retry cannot help."""


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
