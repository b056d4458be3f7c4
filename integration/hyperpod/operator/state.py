"""What an operator has to remember of a job between two looks at it. It fits into a status field as JSON.

CREATED -> FORMING -> ARRANGED -> STARTING -> RUNNING -> SUCCEEDED
              ^           a fault |               | a fault, another size, suspended
              +------------- STOPPING <-----------+
                                 +--> SUSPENDED         FAILED from anywhere
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from integration.hyperpod.operator.seen import Progress, RestartMode


class Phase(enum.Enum):
    FORMING = "Forming"
    """Waiting for enough agents that are ready, or (in-process) about to be."""
    ARRANGED = "Arranged"
    """Ranks are given out; in-process agents get them and gather at their barrier."""
    STARTING = "Starting"
    RUNNING = "Running"
    STOPPING = "Stopping"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def over(self) -> bool:
        return self in {Phase.SUCCEEDED, Phase.FAILED}


class Cause(enum.Enum):
    """Why a world is stopped, or formed."""

    BEGIN = "Begin"
    FAULT = "Fault"
    SCALE = "Scale"
    SUSPEND = "Suspend"


class Fault(msgspec.Struct, frozen=True):
    """What is being remediated."""

    reason: str
    message: str
    pods: tuple[str, ...]
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    at_s: float
    mode: RestartMode = RestartMode.PROCESS


class Offence(msgspec.Struct, frozen=True):
    node: str
    at_s: float


class Condition(msgspec.Struct, frozen=True):
    """As Kubernetes has them; the time is in seconds."""

    type: str
    status: bool
    reason: str
    message: str
    at_s: float


class Scaling(msgspec.Struct, frozen=True):
    """What the elastic part of the status says."""

    target: int = 0
    updated_s: float | None = None
    scaled_s: float | None = None
    after_fault: bool = False
    failures: int = 0
    """Changes of size in a row that ended in a fault before the job ran again."""


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    phase: Phase = Phase.FORMING
    cause: Cause = Cause.BEGIN
    since_s: float = 0.0
    """When this phase began."""
    created_s: float | None = None
    admitted_s: float | None = None
    """Since when it has been allowed to run without a break; nothing while it waits in a queue."""
    started_s: float | None = None
    """When the job ran for the first time."""
    ended_s: float | None = None

    epoch: int = 0
    """Worlds so far. An agent hears ``epoch - 1`` as its count of faults: no two worlds have the same."""
    version: str = ""
    """The ``ipVersion`` of this world."""
    members: tuple[str, ...] = ()
    """Pods by rank."""
    spares: tuple[str, ...] = ()
    """Pods that have a rank behind the last one, and wait."""
    seats: tuple[str, ...] = ()
    """Who had which rank in the last world: as few as possible get another one."""
    master_addr: str = ""
    master_port: str = ""

    target: int = 0
    """So many members are waited for until ``deadline_s``; then as many as there are."""
    deadline_s: float | None = None
    grow_since_s: float | None = None
    """Since when more could have a rank than have one."""
    snooze_until_s: float = 0.0
    scaling: Scaling = Scaling()

    mode: RestartMode = RestartMode.PROCESS
    """How the world is stopped."""
    graceful: bool = False
    told_again: tuple[str, ...] = ()
    """Pods that did not stop in time and were told so in harder words."""
    fault: Fault | None = None
    last_fault: Fault | None = None

    restarts: int = 0
    """After faults, in the whole life of the job."""
    period: int = 0
    period_restarts: int = 0
    """In this evaluation period since the last restart of the whole job."""
    period_full_restarts: int = 0
    offences: tuple[Offence, ...] = ()

    unexplained_since_s: float | None = None
    """Since when agents are faulted that only saw another one's end, or say nothing."""
    silent_since_s: Mapping[str, float] = {}
    """Pods that do not answer."""
    stale_since_s: Mapping[str, float] = {}
    """Pods that run what an earlier ``/start`` said."""
    replaced: tuple[str, ...] = ()
    """Pods that are to go; they count no more."""
    progress: Mapping[str, Progress] = {}
    conditions: tuple[Condition, ...] = ()
