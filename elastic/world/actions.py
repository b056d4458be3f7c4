"""What is to be done about it: orders to the supervisors, in the order given."""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec


class How(enum.Enum):
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


class Break(_Action, frozen=True):
    """The world of this epoch is broken: its ranks leave the step at once and come back (``Want.RESTART``)."""

    epoch: int
    reason: str
    within_s: float
    """Seconds that its ranks have to leave. The process of a rank that takes longer is replaced."""


class Pause(_Action, frozen=True):
    """The ranks of this epoch agree on a step, seal, and come back (``Want.RESIZE``), or end (``Want.STOP``).

    A later one of the same epoch replaces an earlier one.
    """

    epoch: int
    reason: str
    deadline_s: float
    """On the clock of ``now_s``: who has not come by then is stopped."""
    stop: bool = False


class Respawn(_Action, frozen=True):
    """End what runs in these seats, if anything does, and start a new process in each."""

    node: str
    life: int
    local_ranks: tuple[int, ...]


class PromoteSpare(_Action, frozen=True):
    """The same, with a warm spare process of this node."""

    node: str
    life: int
    local_rank: int


class RespawnStragglers(_Action, frozen=True):
    """End and start anew those ranks of a node that do not wait for a place by now.

    A node where all do says so again.
    """

    node: str
    life: int


class Form(_Action, frozen=True):
    """A new world. A rank is its node's position times ``nproc``, plus its local rank.

    A supervisor that has no process waiting in one of the seats by then reports that rank as lost, again if it has.
    """

    epoch: int
    nodes: tuple[str, ...]
    nproc: int
    how: How
    restarts: int
    reason: str


class Release(_Action, frozen=True):
    """This node is not needed, or has to go: its ranks are dismissed and its supervisor leaves."""

    node: str
    life: int
    reason: str
    cut: bool = False
    """Its processes are ended without being asked: its time is up, or it does not answer."""


class Ask(_Action, frozen=True):
    """The job could use so many nodes more; an offer is accepted by this, too."""

    nodes: int
    reason: str


class Stop(_Action, frozen=True):
    """The job ends here, to be resumed another time."""

    reason: str


class Finish(_Action, frozen=True):
    """All ranks have done what there was to do: the job has succeeded."""


class GiveUp(_Action, frozen=True):
    """The job cannot go on; the reason says after what, and how to resume."""

    reason: str


Action: TypeAlias = (
    Break | Pause | Respawn | PromoteSpare | RespawnStragglers | Form | Release | Ask | Stop | Finish | GiveUp
)
