"""Messages between ranks, supervisors, coordinator and command line, and the delta encoding of node status.

Everybody tells its whole state, each time something in it changes, and is told all that is wanted of it: a message that
is lost with its connection is made up for by the next one, and who starts anew knows everything after one message of
each. The exception are :class:`NodeCommand` and :class:`RankRequest`, which are to be done once: they are numbered.
Between a supervisor and the coordinator only what has changed goes over a connection
(:mod:`elastic.control.control_messages`).

::

    rank    <── RankDesired ──  supervisor  <── NodeDesired ──  coordinator   <── Answer ──  command line
            ── RankStatus  ──>              ── NodeStatus  ──>                ── Question ──>

Both sides speak of whole messages, :class:`NodeStatus` and :class:`NodeDesired`; what goes over the wire is what is new
in them. The first report of a connection is whole, and what a node hears begins from :data:`INITIAL_DESIRED`. A world,
which names all nodes, goes over a connection once in each direction at the most: a supervisor names one that it was
told of
on the same connection by the number of the message that brought it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from elastic.control.control_plane import ControlNotice, LeaveStage, NoticeKind, RankAssignment, RankProgress
from elastic.fault_injection.fault_spec import FaultInjection
from elastic.world.world_state import ErrorPosition, RequestedStep, SealedStep, WorldPhase
from peerstore.errors import ProtocolError
from peerstore.membership.topology import PeerNode
from peerstore.message_codec import decode_message
from peerstore.shard_records import NonNegativeInt, NonNegativeIntOrMinusOne

RANK_PROTOCOL = 1
MAX_RANK_MESSAGE_BYTES = 64 << 10
MAX_NODES = 16_384
"""Of a job. A message names each of them once at the most, with 128 bytes for a name."""
MAX_NODE_MESSAGE_BYTES = 16 << 20


class RankPhase(enum.Enum):
    """Where a rank is."""

    READY = "ready"
    IN_WORLD = "inside"
    FINISHED = "finished"


class RankRequest(msgspec.Struct, frozen=True):
    """A rank asks for a change."""

    number: NonNegativeInt
    kind: NoticeKind
    reason: str
    deadline_s: float | None = None
    nodes: int | None = None
    partition_s: float | None = None
    """Not that: an injected fault is to cut this node off for so long."""


@dataclass(frozen=True)
class SupervisorEndpoint:
    """Address of a rank's supervisor, and the token that the supervisor gave to this rank."""

    socket: Path
    token: str


class RankHello(msgspec.Struct, frozen=True):
    protocol: int
    token: str
    """What the supervisor gave to the process that it started, and to no other."""


class RankStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: NonNegativeInt
    phase: RankPhase
    epoch: NonNegativeIntOrMinusOne = -1
    """The newest world this process has been in."""
    paused: NonNegativeIntOrMinusOne | None = None
    sealed: NonNegativeIntOrMinusOne | None = None
    checkpoint: SealedStep | None = None
    """Where the state is that was sealed."""
    fault: str | None = None
    final: bool = False
    """The fault is one that another attempt does not mend."""
    position: ErrorPosition | None = None
    """Where the train function raised the fault; ``None`` for one that may follow from a lost rank."""
    progress: RankProgress | None = None
    requests: tuple[RankRequest, ...] = ()
    leave_stage: LeaveStage | None = None
    """Stage of leaving, if the process knows that its world is broken."""


class ExitReason(enum.Enum):
    """Why there is no further world for who is told so."""

    DISMISSED = "dismissed"
    STOPPED = "stopped"
    FINISHED = "finished"
    JOB_FAILED = "job failed"
    """The restart budget is exhausted, or another attempt would fail in the same way."""
    NEVER_JOINED = "never joined"
    """A rank's process ended before it called ``elastic.run``, and the job had no world yet."""
    REFUSED = "refused"
    """Somebody else is here under this name, or with this token."""


class RankDesired(
    msgspec.Struct,
    frozen=True,
):
    acknowledged: NonNegativeInt = 0
    """Number of the newest :class:`RankStatus` this takes into account."""
    assignment: RankAssignment | None = None
    notice: ControlNotice | None = None
    pause_target: NonNegativeIntOrMinusOne | None = None
    exit: ExitReason | None = None
    reason: str = ""
    coordinator_unreachable: bool = False
    """The coordinator does not answer: what it wants is unknown."""
    injections: tuple[FaultInjection, ...] = ()
    """Faults that somebody wants here; which of them have happened is seen elsewhere."""
    partitions: NonNegativeInt = 0
    """How often this node was cut off on purpose: its ranks lose their connections each time."""
    standby: tuple[PeerNode, ...] = ()
    """As in :class:`NodeDesired`."""


class RankFailure(msgspec.Struct, frozen=True):
    """A rank whose process has ended and was not to, or that says that its world is broken."""

    local_rank: NonNegativeInt
    reason: str
    final: bool = False
    """Another attempt would end the same way."""
    position: ErrorPosition | None = None
    """Where the train function raised the fault; ``None`` for one that may follow from a lost rank."""
    never_joined: bool = False
    """The process exited by itself and never connected to its supervisor."""
    ended_at: float | None = None
    """When its process ended, by its node's clock on the wall."""


class PauseOrder(msgspec.Struct, frozen=True):
    """What :class:`~elastic.world.world_state.PauseWorld` says, on no particular clock."""

    epoch: NonNegativeIntOrMinusOne
    reason: str
    within_s: float
    stop: bool = False


class SizeRequest(msgspec.Struct, frozen=True):
    """What somebody asked for last; supervisors keep it for a coordinator that starts again."""

    number: NonNegativeInt
    reason: str
    nodes: int | None = None


class WorldSpec(msgspec.Struct, frozen=True):
    """A world."""

    epoch: NonNegativeIntOrMinusOne
    ranked_nodes: tuple[str, ...]
    restarts: NonNegativeInt
    reason: str
    store: str = ""
    """"" while it is not known yet: the ranks have to wait for it."""
    stores: tuple[str, ...] = ()
    """Where its keys are spread over several: all of them, in the order in which all ranks know them."""
    hang_s: float | None = None
    """The longest that no rank may get on, as far as that is known; ``None``: for ever."""
    resume_from: SealedStep | None = None
    """What its ranks restore, and nothing else: the world before it ended in order and sealed this."""
    requested_step: RequestedStep | None = None
    """What its ranks restore, and nothing else: the command line of the run requests it, and no world of the run has
    sealed a step yet."""
    incarnation_epoch: NonNegativeInt = 0
    """The least epoch of incarnations that begin in this world, above those of all worlds before it."""


class WorldRecord(msgspec.Struct, frozen=True):
    """That there was a world, for nodes that were not in it: the newest steps of the job are with its nodes."""

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
    """The newest world that it was in."""
    newest_world: WorldRecord | None = None
    """A later world that it was not in, as a coordinator told it."""
    broken_reason: str | None = None
    """Why the world that it was in is broken; ``None`` while it is not."""
    pause: PauseOrder | None = None
    size_request: SizeRequest | None = None
    ready: bool = False
    paused: NonNegativeIntOrMinusOne | None = None
    """The greatest step its ranks said, once all have said one."""
    sealed: NonNegativeIntOrMinusOne | None = None
    checkpoint: SealedStep | None = None
    """What its ranks sealed, where all have named the same."""
    finished: bool = False
    lagging_ranks: tuple[int, ...] = ()
    """Local ranks that were asked to stop and have not said a step, or once all have: have not sealed."""
    exited_ranks: tuple[RankFailure, ...] = ()
    faulty_ranks: tuple[RankFailure, ...] = ()
    """Of ranks that live."""
    rank_progress: tuple[RankProgress | None, ...] = ()
    """Of every seat."""
    silent_s: tuple[float, ...] = ()
    """The same: since when nothing was heard of its process."""
    requests: tuple[RankRequest, ...] = ()
    drain_within_s: float | None = None
    """It was preempted, and has so long."""
    drain_reason: str = ""
    leave_reason: str = ""
    """It goes now; why."""
    coordinator: str = ""
    last_command: NonNegativeInt = 0
    """Number of the newest command of that coordinator that was carried out."""
    store: str = ""
    """Where a store that this node keeps is reached."""
    term: NonNegativeInt = 0
    """The latest term in which it has obeyed a coordinator; 0 where the coordinator is in one place for good."""
    leader: str = ""
    """Which coordinator that was."""
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
    """Which start of the coordinator says this."""
    generation: NonNegativeInt
    acknowledged: NonNegativeInt = 0
    world: WorldSpec | None = None
    """The newest world this coordinator knows; ``None``: none, or one that the node is not in."""
    newest_world: WorldRecord | None = None
    """The newest world, for a node that is not in it: to be remembered for a coordinator that starts again."""
    broken_reason: str | None = None
    broken_s: float | None = None
    """Seconds its ranks have left to leave the broken world."""
    pause: PauseOrder | None = None
    pause_target: NonNegativeIntOrMinusOne | None = None
    size_request: SizeRequest | None = None
    commands: tuple[NodeCommand, ...] = ()
    run_store: bool = False
    release_reason: str | None = None
    """Its ranks are dismissed and its supervisor ends, for this reason."""
    force: bool = False
    """They are ended without being asked."""
    drain_within_s: float | None = None
    """Somebody asked this node back: it has so long."""
    superseded: bool = False
    """It was given up for lost meanwhile: it is to begin a new life."""
    min_generation: NonNegativeInt = 0
    """Later than this one, whatever the node's clock says: it may have gone back since."""
    term: NonNegativeInt = 0
    """In which the coordinator leads; 0 where it is in one place for good."""
    exit: ExitReason | None = None
    reason: str = ""
    offer_memory: bool = False
    """Whether the node is outside the world and its agent should accept replicas of the job."""
    standby: tuple[PeerNode, ...] = ()
    """Agents of nodes outside the world that accept replicas of its steps."""
    sealed_step: SealedStep | None = None
    """The step to record for the next run; the ranks sealed it before a stop, or this node's release."""


class StatusRequest(msgspec.Struct, frozen=True, tag="status"):
    """How is the job?"""


class ResizeRequest(msgspec.Struct, frozen=True, tag="resize"):
    """So many nodes at the most; ``None``: as many as the policy allows."""

    nodes: int | None
    reason: str


class DrainRequest(msgspec.Struct, frozen=True, tag="leave"):
    """These nodes are preempted."""

    nodes: tuple[str, ...]
    deadline_s: float
    reason: str


class StopJobRequest(msgspec.Struct, frozen=True, tag="stop"):
    reason: str
    deadline_s: float | None = None


class SupervisorExited(msgspec.Struct, frozen=True, tag="gone"):
    """This node's supervisor is no more: who started it saw it end. Its connection is not coming back."""

    node: str


class InjectRequest(msgspec.Struct, frozen=True, tag="inject"):
    """Have a fault happen."""

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
    """Its place in the world."""
    state: str
    local_ranks: NonNegativeInt
    spares: NonNegativeInt
    spawn_count: NonNegativeInt
    step: int
    """The least its ranks have completed, -1 for none."""
    sealed: int
    last_heartbeat_s: float
    """Since it was last heard of."""


class ElasticJobStatus(msgspec.Struct, frozen=True):
    """How the job is, after what was asked for was taken in."""

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
    """So many nodes more could be used."""
    pause: PauseOrder | None = None
    refused: str = ""
    """Why what was asked for is not done."""


_encode = msgspec.msgpack.Encoder().encode
INITIAL_DESIRED = NodeDesired("", 0)


class WorldSpecRef(msgspec.Struct, frozen=True, tag="told"):
    """The world that the coordinator told in so many-th place on this connection, counted from 1."""

    number: NonNegativeInt


class _World(WorldSpec, frozen=True, tag="world"):
    """A world that the coordinator did not tell on this connection."""


def _partial(name: str, whole: type[msgspec.Struct], tag: str, **others: Any) -> type[msgspec.Struct]:
    """``whole`` with every field left out where it has not changed."""
    fields = [
        (field.name, others.get(field.name, field.type) | msgspec.UnsetType, msgspec.UNSET)
        for field in msgspec.structs.fields(whole)
    ]
    return msgspec.defstruct(name, fields, frozen=True, tag=tag, forbid_unknown_fields=True, kw_only=True)


NodeStatusDelta = _partial("NodeStatusDelta", NodeStatus, "changed", world=_World | WorldSpecRef | None)
NodeDesiredDelta = _partial("NodeDesiredDelta", NodeDesired, "hears")


class NodeCodec:
    """A supervisor's end of one connection. One thread encodes and one decodes."""

    def __init__(self) -> None:
        self._said: NodeStatus | None = None
        self._heard = INITIAL_DESIRED
        self._told: tuple[int, WorldSpec | None] = (0, None)
        """The world that the coordinator told last, and its number."""

    def encode(self, status: NodeStatus) -> bytes:
        before, self._said = self._said, status
        if before is None:
            return _encode(status)
        changes = _changes(before, status)
        formed = changes.get("world")
        if formed is not None:
            number, told = self._told
            changes["world"] = WorldSpecRef(number) if formed is told else _World(*msgspec.structs.astuple(formed))
        return _encode(NodeStatusDelta(**changes))

    def decode(self, body: bytes) -> NodeDesired:
        changes = decode_message(body, NodeDesiredDelta)
        self._heard = _applied(self._heard, changes)
        if isinstance(formed := changes.world, WorldSpec):  # type: ignore[attr-defined]  # a field of NodeDesired
            self._told = self._told[0] + 1, formed
        return self._heard


class CoordinatorCodec:
    """The coordinator's end of a connection.

    ``encode_world`` encodes a world. ``intern_world`` returns the one of two equal worlds to keep, as all nodes get and
    send the same one.
    """

    def __init__(
        self,
        status: NodeStatus,
        encode_world: Callable[[WorldSpec], msgspec.Raw] = lambda formed: msgspec.Raw(_encode(formed)),
        intern_world: Callable[[WorldSpec], WorldSpec] = lambda formed: formed,
    ) -> None:
        self._packed, self._shared = encode_world, intern_world
        self._told: dict[int, WorldSpec] = {}
        """Worlds that the node may speak of by their number."""
        self._number = 0
        self._hears = INITIAL_DESIRED
        self.status = (
            status if status.world is None else msgspec.structs.replace(status, world=intern_world(status.world))
        )
        """The node's newest report."""

    def encode(self, hears: NodeDesired) -> bytes:
        changes = _changes(self._hears, hears)
        self._hears = hears
        formed = changes.get("world")
        if formed is not None:
            self._number += 1
            self._told[self._number] = formed
            changes["world"] = self._packed(formed)
        return _encode(NodeDesiredDelta(**changes))

    def decode(self, body: bytes) -> NodeStatus:
        changes = decode_message(body, NodeStatusDelta)
        self.status = _applied(self.status, changes, world=self._world(changes.world))  # type: ignore[attr-defined]
        return self.status

    def _world(self, formed: Any) -> Any:
        if isinstance(formed, _World):
            return self._shared(WorldSpec(*msgspec.structs.astuple(formed)))
        if not isinstance(formed, WorldSpecRef):
            return formed
        if formed.number not in self._told:
            raise ProtocolError(f"it speaks of world number {formed.number}, which it was not told here")
        self._told = {number: told for number, told in self._told.items() if number >= formed.number}
        return self._told[formed.number]


def _changes(before: msgspec.Struct, after: msgspec.Struct) -> dict[str, Any]:
    changes = {}
    for name in after.__struct_fields__:
        old, new = getattr(before, name), getattr(after, name)
        if new is not old and new != old:
            changes[name] = new
    return changes


def _applied(before: Any, changes: msgspec.Struct, **others: Any) -> Any:
    new = {name: value for name in changes.__struct_fields__ if (value := getattr(changes, name)) is not msgspec.UNSET}
    new.update({name: value for name, value in others.items() if name in new})
    return msgspec.structs.replace(before, **new)
