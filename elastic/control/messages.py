"""What ranks, supervisors and the coordinator say to each other.

Everybody tells its whole state, each time something in it changes, and is told all that is wanted of it: a message that
is lost with its connection is made up for by the next one, and who starts anew knows everything after one message of
each. The exception are :class:`Command` and :class:`Request`, which are to be done once: they are numbered. Between a
supervisor and the coordinator only what has changed goes over a connection (:mod:`elastic.control.changes`).

::

    rank    <── RankHears ──  supervisor  <── NodeHears ──  coordinator   <── Answer ──  command line
            ── RankSays  ──>              ── NodeSays  ──>                ── Question ──>

"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from elastic.control.plane import Assignment, Notice, Progress, Want
from elastic.inject.plan import Injection
from elastic.world.members import Phase
from peerstore.names import Counted, Number

PROTOCOL = 1
MAX_RANK_BYTES = 64 << 10
MAX_NODES = 16_384
"""Of a job. A message names each of them once at the most, with 128 bytes for a name."""
MAX_NODE_BYTES = 16 << 20
MAX_TEXT = 2000


class Stand(enum.Enum):
    """Where a rank is."""

    READY = "ready"
    INSIDE = "inside"
    FINISHED = "finished"


class Request(msgspec.Struct, frozen=True):
    """A rank asks for a change."""

    number: Number
    want: Want
    reason: str
    deadline_s: float | None = None
    nodes: int | None = None
    cut_s: float | None = None
    """Not that: an injected fault is to cut this node off for so long."""


class RankGreeting(msgspec.Struct, frozen=True):
    protocol: int
    token: str
    """What the supervisor gave to the process that it started, and to no other."""


class RankSays(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: Number
    stand: Stand
    epoch: Counted = -1
    """The newest world this process has been in."""
    paused: Counted | None = None
    sealed: Counted | None = None
    fault: str | None = None
    final: bool = False
    """The fault is one that another attempt does not mend."""
    progress: Progress | None = None
    requests: tuple[Request, ...] = ()


class Over(enum.Enum):
    """Why there is no further world for who is told so."""

    DISMISSED = "dismissed"
    STOPPED = "stopped"
    FINISHED = "finished"
    GAVE_UP = "gave up"
    REFUSED = "refused"
    """Somebody else is here under this name, or with this token."""


class RankHears(msgspec.Struct, frozen=True):
    heard: Number = 0
    """Number of the newest :class:`RankSays` this takes into account."""
    assignment: Assignment | None = None
    notice: Notice | None = None
    target: Counted | None = None
    over: Over | None = None
    reason: str = ""
    cut_off: bool = False
    """The coordinator does not answer: what it wants is unknown."""
    injections: tuple[Injection, ...] = ()
    """Faults that somebody wants here; which of them have happened is seen elsewhere."""
    cuts: Number = 0
    """How often this node was cut off on purpose: its ranks lose their connections each time."""


class Lost(msgspec.Struct, frozen=True):
    """A rank whose process has ended and was not to, or that says that its world is broken."""

    local_rank: Number
    reason: str
    final: bool = False
    """Another attempt would end the same way."""
    at: float | None = None
    """When its process ended, by its node's clock on the wall."""


class Pausing(msgspec.Struct, frozen=True):
    """What :class:`~elastic.world.actions.Pause` says, on no particular clock."""

    epoch: Counted
    reason: str
    within_s: float
    stop: bool = False


class Wish(msgspec.Struct, frozen=True):
    """What somebody asked for last; supervisors keep it for a coordinator that starts again."""

    number: Number
    reason: str
    nodes: int | None = None


class Formed(msgspec.Struct, frozen=True):
    """A world."""

    epoch: Counted
    places: tuple[str, ...]
    restarts: Number
    reason: str
    store: str = ""
    """"" while it is not known yet: the ranks have to wait for it."""
    stores: tuple[str, ...] = ()
    """Where its keys are spread over several: all of them, in the order in which all ranks know them."""
    hang_s: float | None = None
    """The longest that no rank may get on, as far as that is known; ``None``: for ever."""


class NodeSays(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="node"):
    number: Number
    node: str
    life: Number
    seats: Number
    births: Number = 0
    spares: Number = 0
    formed: Formed | None = None
    """The newest world it was told of."""
    broken: str | None = None
    """Why that world is broken; ``None`` while it is not."""
    pausing: Pausing | None = None
    wish: Wish | None = None
    ready: bool = False
    paused: Counted | None = None
    """The greatest step its ranks said, once all have said one."""
    sealed: Counted | None = None
    finished: bool = False
    behind: tuple[int, ...] = ()
    """Local ranks that were asked to stop and have not said a step, or once all have: have not sealed."""
    lost: tuple[Lost, ...] = ()
    faults: tuple[Lost, ...] = ()
    """Of ranks that live."""
    steps: tuple[Progress | None, ...] = ()
    """Of every seat."""
    quiet_s: tuple[float, ...] = ()
    """The same: since when nothing was heard of its process."""
    requests: tuple[Request, ...] = ()
    leaving_s: float | None = None
    """It was asked back, and has so long."""
    leaving: str = ""
    goodbye: str = ""
    """It goes now; why."""
    coordinator: str = ""
    done: Number = 0
    """Number of the newest command of that coordinator that was carried out."""
    store: str = ""
    """Where a store that this node keeps is reached."""
    term: Number = 0
    """The latest term in which it has obeyed a coordinator; 0 where the coordinator is in one place for good."""
    leader: str = ""
    """Which coordinator that was."""


class Do(enum.Enum):
    RESPAWN = "respawn"
    PROMOTE = "promote"
    STRAGGLERS = "stragglers"
    INJECT = "inject"


class Command(msgspec.Struct, frozen=True):
    number: Number
    do: Do
    local_ranks: tuple[int, ...] = ()
    injection: Injection | None = None


class NodeHears(msgspec.Struct, frozen=True):
    coordinator: str
    """Which start of the coordinator says this."""
    life: Number
    heard: Number = 0
    formed: Formed | None = None
    """The newest world this coordinator knows; ``None``: none, or one that the node is not in."""
    broken: str | None = None
    broken_s: float | None = None
    """Seconds its ranks have left to leave the broken world."""
    pausing: Pausing | None = None
    target: Counted | None = None
    wish: Wish | None = None
    commands: tuple[Command, ...] = ()
    keep_store: bool = False
    release: str | None = None
    """Its ranks are dismissed and its supervisor ends, for this reason."""
    cut: bool = False
    """They are ended without being asked."""
    leave_s: float | None = None
    """Somebody asked this node back: it has so long."""
    life_over: bool = False
    """It was given up for lost meanwhile: it is to begin a new life."""
    above: Number = 0
    """Later than this one, whatever the node's clock says: it may have gone back since."""
    term: Number = 0
    """In which the coordinator leads; 0 where it is in one place for good."""
    over: Over | None = None
    reason: str = ""


class Status(msgspec.Struct, frozen=True, tag="status"):
    """How is the job?"""


class Resize(msgspec.Struct, frozen=True, tag="resize"):
    """So many nodes at the most; ``None``: as many as the policy allows."""

    nodes: int | None
    reason: str


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """These nodes are asked back."""

    nodes: tuple[str, ...]
    deadline_s: float
    reason: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    reason: str
    deadline_s: float | None = None


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """This node's supervisor is no more: who started it saw it end. Its connection is not coming back."""

    node: str


class Inject(msgspec.Struct, frozen=True, tag="inject"):
    """Have a fault happen."""

    injection: Injection


Question: TypeAlias = Status | Resize | Leave | Stop | Gone | Inject
Said: TypeAlias = NodeSays | Status | Resize | Leave | Stop | Gone | Inject


class NodeStatus(msgspec.Struct, frozen=True):
    node: str
    rank: int | None
    """Its place in the world."""
    state: str
    seats: Number
    spares: Number
    births: Number
    step: int
    """The least its ranks have completed, -1 for none."""
    sealed: int
    heard_s: float
    """Since it was last heard of."""


class Answer(msgspec.Struct, frozen=True):
    """How the job is, after what was asked for was taken in."""

    job: str
    phase: Phase
    epoch: Counted
    nodes: tuple[NodeStatus, ...]
    nproc: int
    goal: int
    cap: int | None
    restarts: Number
    reason: str
    step: int
    sealed: int
    store: str
    wanted: int = 0
    """So many nodes more could be used."""
    pausing: Pausing | None = None
    refused: str = ""
    """Why what was asked for is not done."""
