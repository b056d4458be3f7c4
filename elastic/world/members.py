"""A world as values: who is here, who has which rank, and what is being waited for. It can go over a wire.

::

              all ready             fault                         nobody to wait for, and too few
    FORMING ────────────> RUNNING ────────> FORMING <──> WAITING ──────────────────────────────────> STOPPED
       ^                   │    │                        (for a replacement)
       │     all sealed    │    │ all finished
       └──── CHANGING <────┘    └───────────> FINISHED                     restart budget used up: GAVE_UP
             (pausing)  ────────────────────────^

"""

from __future__ import annotations

import enum

import msgspec


class Phase(enum.Enum):
    FORMING = "forming"
    """There is no world; the ranks of the next one are on their way."""
    WAITING = "waiting"
    """The same, but nodes are missing: a replacement may come in time."""
    RUNNING = "running"
    CHANGING = "changing"
    """The ranks were asked to stop at a step; the world still runs."""
    STOPPED = "stopped"
    FINISHED = "finished"
    GAVE_UP = "gave up"

    @property
    def over(self) -> bool:
        return self in (Phase.STOPPED, Phase.FINISHED, Phase.GAVE_UP)

    @property
    def alive(self) -> bool:
        """Ranks are in a world."""
        return self in (Phase.RUNNING, Phase.CHANGING)


class Owed(msgspec.Struct, frozen=True):
    """A seat whose process is being replaced."""

    local_rank: int
    births: int
    """How many processes the node had started when the old one was lost."""
    spare: bool = False
    """A warm spare takes it: it is there in no time."""
    whole: bool = False
    """Nobody lost it: all processes were started anew."""


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node that is here, in the world or beside it."""

    node: str
    life: int
    joined: int
    """Which one it was to come."""
    joined_s: float = 0.0
    placed: bool = False
    """It has ranks in the newest world, also when that is broken."""
    epoch: int = -1
    """The last world it had ranks in."""
    since: int = -1
    """The first of those that it was in one after the other until then."""
    births: int = 0
    """How many processes it had started when it last was ready."""
    spares: int = 0
    owed: tuple[Owed, ...] = ()
    ready: bool = False
    """Its ranks wait for a place."""
    sealed: bool = False
    """Its ranks stand at the agreed step, and may be asked to go."""
    due_s: float | None = None
    """When its ranks are to be ready."""
    prodded: bool = False
    """They were not, and were started again."""
    leave_by_s: float | None = None
    """It was asked back."""

    @property
    def is_in(self) -> bool:
        """Whether a pause need not wait for it any more."""
        return self.ready or self.sealed

    @property
    def leaving(self) -> bool:
        return self.leave_by_s is not None

    @property
    def mending(self) -> bool:
        """Its ranks take as long as a new process takes to start."""
        return self.prodded or any(not owed.spare for owed in self.owed)


class Offence(msgspec.Struct, frozen=True):
    """A fault that a node was to blame for."""

    node: str
    at_s: float


class World(msgspec.Struct, frozen=True):
    """Who is in the job. Made by :func:`elastic.world.decide.begun`, changed by :func:`elastic.world.decide.decide`."""

    nproc: int
    """Ranks per node."""
    phase: Phase = Phase.FORMING
    epoch: int = -1
    """Of the newest world; the first has 0."""
    places: tuple[str, ...] = ()
    """The nodes of the newest world in order of rank, also those that have been lost since it broke."""
    members: dict[str, Member] = {}
    """Never changed in place."""
    gone: dict[str, int] = {}
    """Nodes that are no more, and the life they ended with."""
    done: frozenset[str] = frozenset()
    """Nodes of the newest world that have nothing left to do."""
    joins: int = 0
    began_s: float = 0.0
    """When it was formed; before the first, since when that is waited for."""

    goal: int = 0
    """How many nodes the next world is to have, if they can be had within the timeouts."""
    cap: int | None = None
    """How many it may have at the most, where somebody asked for that."""
    asked: int = 0
    """Nodes the cluster was asked for and that have not come yet."""
    faulty: bool = False
    """What the next world is formed after: a fault, or a change that was wanted."""
    stopping: bool = False
    reason: str = ""
    """Why there will be, or is, this world; at the end, why it is over."""

    wait_until_s: float | None = None
    """How long a replacement, or at the start all the nodes, are waited for."""
    pause_until_s: float | None = None
    """When who has not paused is stopped."""
    more_since_s: float | None = None
    """Since when there could be a greater, or a better, world."""
    shrunk_s: float | None = None
    """When faults last made the world smaller."""

    failed: int = 0
    """Changes in a row that the ranks did not come to in time: the next one is tried later each time."""
    restarts: int = 0
    """Worlds that ended by a fault."""
    faults_s: tuple[float, ...] = ()
    """When, since all processes were last started anew."""
    full_restarts_s: tuple[float, ...] = ()
    tries: int = 0
    """How often a process of one seat was started for the next world, as far as that is counted as restarts."""
    respawned: bool = False
    """Processes were replaced for the next world."""
    offences: tuple[Offence, ...] = ()
    marked: frozenset[str] = frozenset()
    """Offenders that somebody outside has named."""

    tick_s: float | None = None
    """When it next wants a tick, if nothing happens before."""

    @property
    def size(self) -> int:
        """Nodes of the newest world."""
        return len(self.places)

    @property
    def world_size(self) -> int:
        return len(self.places) * self.nproc

    @property
    def standby(self) -> tuple[str, ...]:
        """Nodes that are here and have no rank."""
        return tuple(member.node for member in self.members.values() if not member.placed)
