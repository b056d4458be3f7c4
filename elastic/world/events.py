"""What can happen to a world. Every event may come late, twice or out of order: each says which life it is about.

``life`` counts the starts of a node's supervisor: what is said of an earlier life changes nothing, and a life that was
declared lost or was released never comes back; its supervisor begins a new one.

``births`` counts the processes that a supervisor has put into ranks' seats in this life, spares that were promoted
included: ``nproc`` from the start on, one more with every replacement. It tells an old process from the new one in the
same seat. A supervisor replaces a rank only when it is told to, and what it ends by order it does not report as lost.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class _Event(msgspec.Struct, frozen=True, tag=True):
    pass


class NodeJoined(_Event, frozen=True):
    """A supervisor is here and warms up its ranks."""

    node: str
    life: int
    seats: int
    """Ranks it runs; a world takes only nodes that run as many as all others."""
    births: int = 0
    spares: int = 0
    """Warm processes beyond its ranks."""


class NodeReady(_Event, frozen=True):
    """All ranks of a node wait for a place, in no process group."""

    node: str
    life: int
    births: int
    epoch: int = -1
    """The newest world this node was told of: its ranks have left it, or never entered."""
    spares: int = 0


class NodeSealed(_Event, frozen=True):
    """All ranks of a node stand at the agreed step, and what they hold is safe."""

    node: str
    life: int
    epoch: int
    step: int = -1


class NodeFinished(_Event, frozen=True):
    """All ranks of a node have nothing left to do.

    Should the world break before the others have finished, those that ended are reported as lost, after that.
    """

    node: str
    life: int
    epoch: int


class NodeLost(_Event, frozen=True):
    """A node has not been heard of for too long, or is known to be gone."""

    node: str
    life: int
    reason: str


class NodeLeft(_Event, frozen=True):
    """A supervisor says goodbye; nobody is to blame."""

    node: str
    life: int
    reason: str = "left"


class RankLost(_Event, frozen=True):
    """A process in a rank's seat has ended, and was not to."""

    node: str
    life: int
    births: int
    """As many as there had been when it was noticed."""
    local_rank: int
    reason: str


class RankFault(_Event, frozen=True):
    """A rank says that its world is broken; its process lives and comes back by itself."""

    node: str
    life: int
    epoch: int
    local_rank: int
    reason: str
    final: bool = False
    """Another attempt would end the same way."""


class Hang(_Event, frozen=True):
    """A step does not end."""

    epoch: int
    reason: str
    node: str = ""
    """Whose rank does not move, where that is known; its process is replaced."""
    local_rank: int = -1


class Offender(_Event, frozen=True):
    """Somebody outside (a health check) says that this node had better be avoided."""

    node: str
    reason: str


class CapacityOffered(_Event, frozen=True):
    """The cluster has nodes to give. They come, as :class:`NodeJoined`, when they are accepted."""

    nodes: int


class CapacityAskedBack(_Event, frozen=True):
    """The cluster wants these nodes back."""

    nodes: tuple[str, ...]
    deadline_s: float
    """On the clock of ``now_s``: when they are taken."""
    reason: str = "asked back"


class ResizeAsked(_Event, frozen=True):
    """A person or the script wants so many nodes at the most; ``None``: as many as the policy allows.

    A number below the least size the policy allows changes nothing.
    """

    nodes: int | None
    reason: str = "resize asked for"


class StopAsked(_Event, frozen=True):
    """The job is to be saved and to end, to be resumed another time."""

    reason: str
    deadline_s: float | None = None
    """On the clock of ``now_s``."""


class Tick(_Event, frozen=True):
    """Time has passed: :attr:`World.tick_s <elastic.world.members.World.tick_s>` says when one is wanted."""


class Several(_Event, frozen=True):
    """What came in together is decided on together: one new world where each alone would have made one."""

    events: tuple[Event, ...]


Event: TypeAlias = (
    NodeJoined
    | NodeReady
    | NodeSealed
    | NodeFinished
    | NodeLost
    | NodeLeft
    | RankLost
    | RankFault
    | Hang
    | Offender
    | CapacityOffered
    | CapacityAskedBack
    | ResizeAsked
    | StopAsked
    | Tick
    | Several
)


class NodeReport(msgspec.Struct, frozen=True):
    """All that a supervisor knows of its node and its world: what a coordinator that starts again asks for."""

    node: str
    life: int
    seats: int
    births: int
    spares: int = 0
    epoch: int = -1
    """The newest world it was told of."""
    places: tuple[str, ...] = ()
    """The nodes of that world, in order of rank; it is enough that one of them says so."""
    restarts: int = 0
    """As that world was formed with."""
    ready: bool = False
    """All its ranks wait for a place: they have left that world, or never entered."""
    lost: tuple[int, ...] = ()
    """Local ranks whose process has ended, and was not to."""
    finished: bool = False
    """All its ranks have nothing left to do."""
