"""Messages between ranks, supervisors, coordinator and command line, and their delta encoding.

Each message contains the sender's full state, and is sent when that state changes. So the next message makes up for a
lost one, and a restarted process knows all after one message of each peer. :class:`NodeCommand` and
:class:`RankRequest` must be carried out once, so they are numbered.

::

    rank    <── RankDesired ──  supervisor  <── NodeDesired ──  coordinator   ── ElasticJobStatus ──>    command line
            ── RankStatus  ──>              ── NodeStatus  ──>                <── CoordinatorRequest ──

Between a supervisor and the coordinator, :class:`NodeCodec` and :class:`CoordinatorCodec` send only the fields that
changed. The first :class:`NodeStatus` of a connection is full, and :class:`NodeDesired` starts from
:data:`INITIAL_DESIRED`. A world names all nodes, so it is sent at most once in each direction of a connection. A
supervisor refers to a world from the coordinator by its number: the first world on the connection is number 1.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from elastic.control.control_plane import LeaveStage, NoticeKind, RankAssignment, RankProgress
from elastic.control.epoch_state import ChangeMessage, EpochMessage
from elastic.fault_injection.fault_spec import FaultInjection
from elastic.world.world_state import ErrorPosition, ReachedStep, RequestedStep, SealedStep, WorldPhase
from peerstore.errors import ProtocolError
from peerstore.membership.topology import PeerNode
from peerstore.message_codec import decode_message
from peerstore.shard_records import NonNegativeInt, NonNegativeIntOrMinusOne
from peerstore.sizes_and_durations import show_count

RANK_PROTOCOL = 1
MAX_RANK_MESSAGE_BYTES = 64 << 10
MAX_NODES = 16_384
"""Largest number of nodes of a job. A message names each node at most once, in at most 128 bytes."""
MAX_NODE_MESSAGE_BYTES = 16 << 20
_MOST_NAMES = 8


class RankPhase(enum.Enum):
    """Phase of a rank: ready for a world, in a world, or finished."""

    READY = "ready"
    IN_WORLD = "inside"
    FINISHED = "finished"


class RankRequest(msgspec.Struct, frozen=True):
    """Change that a rank requests."""

    number: NonNegativeInt
    kind: NoticeKind
    reason: str
    deadline_s: float | None = None
    nodes: int | None = None
    partition_s: float | None = None
    """Seconds for which an injected fault disconnects this node. If set, the request is nothing else."""


@dataclass(frozen=True)
class SupervisorEndpoint:
    """Address of a rank's supervisor, and the rank's token."""

    socket: Path
    token: str


class RankHello(msgspec.Struct, frozen=True):
    protocol: int
    token: str
    """Token that the supervisor passed to this process alone."""


class RankStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: NonNegativeInt
    phase: RankPhase
    epoch: NonNegativeIntOrMinusOne = -1
    """Epoch of the newest world that this process entered, or -1."""
    paused: NonNegativeIntOrMinusOne | None = None
    sealed: NonNegativeIntOrMinusOne | None = None
    checkpoint: SealedStep | None = None
    """Step that contains the sealed state."""
    fault: str | None = None
    final: bool = False
    """Whether another attempt would end with the same fault."""
    position: ErrorPosition | None = None
    """Where the train function raised the fault; ``None`` if the fault may follow from a lost rank."""
    progress: RankProgress | None = None
    requests: tuple[RankRequest, ...] = ()
    leave_stage: LeaveStage | None = None
    """Stage of leaving the world, if the process knows that its world is broken."""


class ExitReason(enum.Enum):
    """Reason for which a rank or node enters no further world."""

    DISMISSED = "dismissed"
    STOPPED = "stopped"
    FINISHED = "finished"
    JOB_FAILED = "job failed"
    """The restart budget is exhausted, or another attempt would fail in the same way."""
    NEVER_JOINED = "never joined"
    """A rank's process exited before it called ``elastic.run``, and the job never had a world."""
    REFUSED = "refused"
    """Another node uses this name, or another process this token."""


class RankDesired(
    msgspec.Struct,
    frozen=True,
):
    acknowledged: NonNegativeInt = 0
    """Number of the newest :class:`RankStatus` that the supervisor has processed."""
    assignment: RankAssignment | None = None
    epoch_state: EpochMessage = EpochMessage()
    exit: ExitReason | None = None
    reason: str = ""
    coordinator_unreachable: bool = False
    """Whether the coordinator cannot be reached, so that its orders are unknown."""
    injections: tuple[FaultInjection, ...] = ()
    """Faults to inject, including those that happened already."""
    partitions: NonNegativeInt = 0
    """Number of injected partitions of this node. Its ranks lose their connections at each one."""
    standby: tuple[PeerNode, ...] = ()
    """As in :class:`NodeDesired`."""


class RankFailure(msgspec.Struct, frozen=True):
    """Failure of a rank: an unexpected exit, or a fault that it reported."""

    local_rank: NonNegativeInt
    reason: str
    final: bool = False
    """Whether another attempt would end the same way."""
    position: ErrorPosition | None = None
    """Where the train function raised the fault; ``None`` if the fault may follow from a lost rank."""
    never_joined: bool = False
    """Whether the process exited without a signal and had never connected to its supervisor."""
    ended_at: float | None = None
    """Wall-clock time of the exit on its node, or ``None`` if unknown."""


class SizeRequest(msgspec.Struct, frozen=True):
    """Newest resize request. Supervisors store it for a coordinator that restarts."""

    number: NonNegativeInt
    reason: str
    nodes: int | None = None


class WorldSpec(msgspec.Struct, frozen=True):
    """A world: its nodes in rank order, its stores and the step to restore."""

    epoch: NonNegativeIntOrMinusOne
    ranked_nodes: tuple[str, ...]
    restarts: NonNegativeInt
    reason: str
    store: str = ""
    """Address of the store, or "" until it is known. The ranks wait for it."""
    stores: tuple[str, ...] = ()
    """Addresses of all stores if the keys are spread over several, in the same order for all ranks."""
    hang_s: float | None = None
    """Seconds without progress of any rank that count as a hang; ``None`` for no limit."""
    resume_from: SealedStep | None = None
    """The only step that the ranks may restore: the previous world sealed it before it ended in order."""
    requested_step: RequestedStep | None = None
    """The only step that the ranks may restore: the run's command line requests it.

    Set until a world of the run has sealed a step."""
    incarnation_epoch: NonNegativeInt = 0
    """Least epoch of incarnations that begin in this world, above those of all earlier worlds."""
    reached: ReachedStep | None = None
    """Newest step that any rank of an earlier world is known to have sealed."""


class WorldRecord(msgspec.Struct, frozen=True):
    """Record of a world for nodes outside it: its nodes hold the newest steps of the job."""

    epoch: NonNegativeInt
    nodes: tuple[str, ...]
    requested_step: RequestedStep | None = None
    """As in :class:`WorldSpec`."""
    incarnation_epoch: NonNegativeInt = 0
    """As in :class:`WorldSpec`."""


class NodeStatus(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    tag="node",
):
    number: NonNegativeInt
    node: str
    generation: NonNegativeInt
    local_ranks: NonNegativeInt
    spawn_count: NonNegativeInt = 0
    spares: NonNegativeInt = 0
    world: WorldSpec | None = None
    """Newest world of this node."""
    newest_world: WorldRecord | None = None
    """Newer world without this node, as a coordinator reported it."""
    epoch_state: EpochMessage = EpochMessage()
    """Change of the node's world."""
    size_request: SizeRequest | None = None
    ready: bool = False
    paused: NonNegativeIntOrMinusOne | None = None
    """Greatest step that a local rank reported, once all have reported one."""
    sealed: NonNegativeIntOrMinusOne | None = None
    checkpoint: SealedStep | None = None
    """Sealed step of the local ranks, if all reported the same one."""
    finished: bool = False
    lagging_ranks: tuple[int, ...] = ()
    """Local ranks that delay a pause: no step reported, or not sealed after the agreement."""
    exited_ranks: tuple[RankFailure, ...] = ()
    faulty_ranks: tuple[RankFailure, ...] = ()
    """Faults that running ranks reported."""
    rank_progress: tuple[RankProgress | None, ...] = ()
    """Progress of every local rank."""
    silent_s: tuple[float, ...] = ()
    """Seconds since the last report of every local rank."""
    requests: tuple[RankRequest, ...] = ()
    drain_within_s: float | None = None
    """Seconds until this node is preempted; ``None`` if it is not."""
    drain_reason: str = ""
    leave_reason: str = ""
    """Why the node leaves the job now, or ""."""
    coordinator: str = ""
    last_command: NonNegativeInt = 0
    """Number of the newest command of that coordinator that was carried out."""
    store: str = ""
    """Address of the store that this node runs, or ""."""
    term: NonNegativeInt = 0
    """Latest term in which this node obeyed a coordinator; 0 without leader election."""
    leader: str = ""
    """Name of the coordinator of that term."""
    peer: PeerNode | None = None
    """The node's agent, if it accepts replicas although the node is outside the world."""


class CommandKind(enum.Enum):
    RESPAWN = "respawn"
    PROMOTE = "promote"
    STRAGGLERS = "stragglers"
    INJECT = "inject"


class NodeCommand(msgspec.Struct, frozen=True):
    number: NonNegativeInt
    kind: CommandKind
    local_ranks: tuple[int, ...] = ()
    injection: FaultInjection | None = None


class NodeDesired(
    msgspec.Struct,
    frozen=True,
):
    coordinator: str
    """Name of this start of the coordinator."""
    generation: NonNegativeInt
    acknowledged: NonNegativeInt = 0
    world: WorldSpec | None = None
    """Newest world; ``None`` without a world or if the node is outside it."""
    newest_world: WorldRecord | None = None
    """Newest world for a node outside it, which stores it for a coordinator that restarts."""
    epoch_state: EpochMessage = EpochMessage()
    """Change that the node's ranks must make, and the seconds that they have left."""
    size_request: SizeRequest | None = None
    commands: tuple[NodeCommand, ...] = ()
    run_store: bool = False
    release_reason: str | None = None
    """Why the node must leave the job, or ``None``. Its ranks are dismissed and its supervisor exits."""
    force: bool = False
    """Whether a released node kills its ranks at once."""
    drain_within_s: float | None = None
    """Seconds in which this node must drain; ``None`` if it need not."""
    superseded: bool = False
    """Whether the coordinator counted this generation as lost, so that the node must begin a new one."""
    min_generation: NonNegativeInt = 0
    """The new generation must be above this one, even if the node's clock was set back."""
    term: NonNegativeInt = 0
    """Term in which the coordinator leads; 0 without leader election."""
    exit: ExitReason | None = None
    reason: str = ""
    offer_memory: bool = False
    """Whether the node is outside the world and its agent should accept replicas of the job."""
    standby: tuple[PeerNode, ...] = ()
    """Agents of nodes outside the world that accept replicas of its steps."""
    sealed_step: SealedStep | None = None
    """Step to record for the next run: the ranks sealed it before a stop, or before this node's release."""


class StatusRequest(msgspec.Struct, frozen=True, tag="status"):
    """Request for the status of the job."""


class ResizeRequest(msgspec.Struct, frozen=True, tag="resize"):
    """Request to limit the job to ``nodes`` nodes; ``None`` for the limit of the policy."""

    nodes: int | None
    reason: str


class DrainRequest(msgspec.Struct, frozen=True, tag="leave"):
    """Request to drain nodes within ``deadline_s`` seconds."""

    nodes: tuple[str, ...]
    deadline_s: float
    reason: str


class StopJobRequest(msgspec.Struct, frozen=True, tag="stop"):
    reason: str
    deadline_s: float | None = None


class SupervisorExited(msgspec.Struct, frozen=True, tag="gone"):
    """Report by the launcher that a node's supervisor has exited and will not reconnect."""

    node: str


class InjectRequest(msgspec.Struct, frozen=True, tag="inject"):
    """Request to inject a fault."""

    injection: FaultInjection


CoordinatorRequest: TypeAlias = (
    StatusRequest | ResizeRequest | DrainRequest | StopJobRequest | SupervisorExited | InjectRequest
)
CoordinatorMessage: TypeAlias = (
    NodeStatus | StatusRequest | ResizeRequest | DrainRequest | StopJobRequest | SupervisorExited | InjectRequest
)


class NodeSummary(msgspec.Struct, frozen=True):
    node: str
    node_rank: int | None
    """Rank of the node in the world, or ``None`` outside it."""
    state: str
    local_ranks: NonNegativeInt
    spares: NonNegativeInt
    spawn_count: NonNegativeInt
    step: int
    """Least step that its ranks have completed, or -1."""
    sealed: int
    last_heartbeat_s: float
    """Seconds since its last message."""


class ReplacementWait(msgspec.Struct, frozen=True):
    """Wait of a job without a world for replacements of the nodes that it lost."""

    lost_nodes: tuple[str, ...]
    """Nodes of the last world that are no longer in the job."""
    within_s: float
    """Seconds until the job continues without a replacement, or stops."""
    remaining_nodes: int
    """Number of nodes with which the job then continues; 0 if they are too few, so that it stops."""

    def __str__(self) -> str:
        more = len(self.lost_nodes) - _MOST_NAMES
        names = ", ".join(self.lost_nodes[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
        what = f"a replacement of {names}" if names else "another node"
        nodes = show_count(self.remaining_nodes, "node")
        then = f"continues with {nodes}" if self.remaining_nodes else "stops"
        return f"waits {self.within_s:.0f} s for {what}, then {then}"


class ElasticJobStatus(msgspec.Struct, frozen=True):
    """Status of the job after a request was applied."""

    job: str
    phase: WorldPhase
    epoch: NonNegativeIntOrMinusOne
    nodes: tuple[NodeSummary, ...]
    nproc: int
    target_nodes: int
    max_nodes: int | None
    restarts: NonNegativeInt
    reason: str
    step: int
    sealed: int
    store: str
    requested_nodes: int = 0
    """Number of further nodes that the job could use."""
    pause: ChangeMessage | None = None
    refused: str = ""
    """Why the request was refused, or ""."""
    replacement_wait: ReplacementWait | None = None
    """The wait for replacements of lost nodes; ``None`` if the job does not wait for any."""


_encode = msgspec.msgpack.Encoder().encode
INITIAL_DESIRED = NodeDesired("", 0)


class WorldSpecRef(msgspec.Struct, frozen=True, tag="told"):
    """Reference to a world that the coordinator sent on this connection, numbered from 1."""

    number: NonNegativeInt


class _World(WorldSpec, frozen=True, tag="world"):
    """World that the coordinator did not send on this connection."""


def _delta_struct(name: str, whole: type[msgspec.Struct], tag: str, **others: Any) -> type[msgspec.Struct]:
    """Return a variant of ``whole`` in which every field may be unset, for unchanged values."""
    fields = [
        (field.name, others.get(field.name, field.type) | msgspec.UnsetType, msgspec.UNSET)
        for field in msgspec.structs.fields(whole)
    ]
    return msgspec.defstruct(name, fields, frozen=True, tag=tag, forbid_unknown_fields=True, kw_only=True)


NodeStatusDelta = _delta_struct("NodeStatusDelta", NodeStatus, "changed", world=_World | WorldSpecRef | None)
NodeDesiredDelta = _delta_struct("NodeDesiredDelta", NodeDesired, "hears")


class NodeCodec:
    """A supervisor's end of one connection. One thread may encode and another one decode."""

    def __init__(self) -> None:
        self._last_status: NodeStatus | None = None
        self._desired = INITIAL_DESIRED
        self._received_world: tuple[int, WorldSpec | None] = (0, None)
        """Number of the worlds received so far, and the newest of them."""

    def encode(self, status: NodeStatus) -> bytes:
        before, self._last_status = self._last_status, status
        if before is None:
            return _encode(status)
        changes = _changes(before, status)
        world = changes.get("world")
        if world is not None:
            number, received = self._received_world
            changes["world"] = WorldSpecRef(number) if world is received else _World(*msgspec.structs.astuple(world))
        return _encode(NodeStatusDelta(**changes))

    def decode(self, body: bytes) -> NodeDesired:
        changes = decode_message(body, NodeDesiredDelta)
        self._desired = _apply_changes(self._desired, changes)
        if isinstance(world := changes.world, WorldSpec):  # type: ignore[attr-defined]  # a field of NodeDesired
            self._received_world = self._received_world[0] + 1, world
        return self._desired


class CoordinatorCodec:
    """The coordinator's end of one connection.

    All nodes send and receive the same world: ``encode_world`` may cache its encoding, and ``intern_world`` may return
    one object for all equal worlds.
    """

    def __init__(
        self,
        status: NodeStatus,
        encode_world: Callable[[WorldSpec], msgspec.Raw] = lambda world: msgspec.Raw(_encode(world)),
        intern_world: Callable[[WorldSpec], WorldSpec] = lambda world: world,
    ) -> None:
        self._encode_world, self._intern_world = encode_world, intern_world
        self._sent_worlds: dict[int, WorldSpec] = {}
        """Worlds that the node may refer to, by number."""
        self._sent_count = 0
        self._desired = INITIAL_DESIRED
        self.status = (
            status if status.world is None else msgspec.structs.replace(status, world=intern_world(status.world))
        )
        """The node's newest report."""

    def encode(self, desired: NodeDesired) -> bytes:
        changes = _changes(self._desired, desired)
        self._desired = desired
        world = changes.get("world")
        if world is not None:
            self._sent_count += 1
            self._sent_worlds[self._sent_count] = world
            changes["world"] = self._encode_world(world)
        return _encode(NodeDesiredDelta(**changes))

    def decode(self, body: bytes) -> NodeStatus:
        changes = decode_message(body, NodeStatusDelta)
        self.status = _apply_changes(self.status, changes, world=self._resolve_world(changes.world))  # type: ignore[attr-defined]
        return self.status

    def _resolve_world(self, world: Any) -> Any:
        if isinstance(world, _World):
            return self._intern_world(WorldSpec(*msgspec.structs.astuple(world)))
        if not isinstance(world, WorldSpecRef):
            return world
        if world.number not in self._sent_worlds:
            raise ProtocolError(f"it refers to world number {world.number}, which was not sent on this connection")
        self._sent_worlds = {number: sent for number, sent in self._sent_worlds.items() if number >= world.number}
        return self._sent_worlds[world.number]


def _changes(before: msgspec.Struct, after: msgspec.Struct) -> dict[str, Any]:
    changes = {}
    for name in after.__struct_fields__:
        old, new = getattr(before, name), getattr(after, name)
        if new is not old and new != old:
            changes[name] = new
    return changes


def _apply_changes(before: Any, changes: msgspec.Struct, **others: Any) -> Any:
    new = {name: value for name in changes.__struct_fields__ if (value := getattr(changes, name)) is not msgspec.UNSET}
    new.update({name: value for name, value in others.items() if name in new})
    return msgspec.structs.replace(before, **new)
