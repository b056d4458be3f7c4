"""Event types and their fields. Types and fields are only ever added.

A line is one JSON object; its field ``event`` names its kind. Readers count unknown kinds, ignore unknown fields, and
use the default of a missing field. So kinds, and fields with defaults, may be added. Nothing is ever renamed or changed
in meaning.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

EVENT_LOG_VERSION = 1

STAGE_DETECT, STAGE_ABORT, STAGE_LAUNCH, STAGE_RENDEZVOUS = "detect", "abort", "launch", "rendezvous"
STAGE_GROUPS, STAGE_HYDRATE, STAGE_LOADER, STAGE_FIRST_STEP = "groups", "hydrate", "loader", "first_step"
STAGE_SEAL, STAGE_LEAVE = "seal", "leave"
STAGES = (
    STAGE_DETECT,
    STAGE_SEAL,
    STAGE_ABORT,
    STAGE_LEAVE,
    STAGE_LAUNCH,
    STAGE_RENDEZVOUS,
    STAGE_GROUPS,
    STAGE_HYDRATE,
    STAGE_LOADER,
    STAGE_FIRST_STEP,
)
"""Stages of a transition between worlds, in this order. ``docs/how-to/reports.md`` defines each."""


class _Event(msgspec.Struct, frozen=True, tag_field="event", omit_defaults=True):
    pass


class FileOpened(_Event, frozen=True, tag="opened"):
    """The first line of every file."""

    at: float
    pid: int
    host: str = ""
    version: int = EVENT_LOG_VERSION
    part: int = 0
    """Number of the file.
    A process that writes much continues in a new file, and finally deletes its oldest."""


class ProcessBegan(_Event, frozen=True, tag="began"):
    """A process has started. The run begins with the coordinator's event."""

    at: float
    job: str = ""
    who: str = "rank"
    """``coordinator`` or ``rank``. In a job without a coordinator, the first rank writes both."""
    again: bool = False
    """Whether a coordinator was restarted: the run continues."""
    node: str = ""
    local_rank: int = -1


class ProcessEnded(_Event, frozen=True, tag="ended"):
    at: float
    job: str = ""
    who: str = "rank"
    how: str = ""
    """``finished``, ``stopped``, ``job failed``, ``dismissed`` or ``failed``."""
    words: str = ""
    node: str = ""
    local_rank: int = -1


class WorldFormed(_Event, frozen=True, tag="world"):
    at: float
    epoch: int
    ranks: int
    nodes: tuple[str, ...] = ()
    """Nodes in order of rank."""
    nproc: int = 1
    how: str = "start"
    """``start``, ``restart``, ``respawn``, ``replace``, ``shrink`` or ``grow``."""
    reason: str = ""
    restarts: int = 0


class FaultEvent(_Event, frozen=True, tag="fault"):
    at: float
    """Time of detection."""
    epoch: int
    """World that it ended, or the last world before it."""
    node: str = ""
    local_rank: int = -1
    kind: str = ""
    """``process`` (it ended), ``node``, ``error``, ``hang`` or ``late`` (no stop in time)."""
    reason: str = ""
    since: float | None = None
    """Time of the fault, if known: the end of a process, or the last sign of life of a node."""


class FaultInjected(_Event, frozen=True, tag="injected"):
    """A fault is about to be injected."""

    at: float
    kind: str
    epoch: int = -1
    node: str = ""
    local_rank: int = -1
    rank: int = -1
    step: int = -1
    words: str = ""


class StopRequested(_Event, frozen=True, tag="notice"):
    """The ranks of a world are requested to stop at a common step."""

    at: float
    epoch: int
    want: str = "resize"
    """``resize`` or ``stop``."""
    reason: str = ""
    by: str = ""
    """Origin of the request: ``person``, ``rank``, ``cluster`` or ``policy``."""
    deadline_s: float | None = None


class StageEvent(_Event, frozen=True, tag="stage"):
    """A stage of one rank in a transition.

    ``detect`` has no duration: the rank learned of the fault at that time.
    """

    epoch: int
    """World that the rank enters.
    For ``detect``, ``abort``, ``seal`` and ``leave``: the world that it leaves."""
    rank: int
    """Rank in that world."""
    name: str
    began: float
    seconds: float
    node: str = ""
    local_rank: int = -1


class StepEvent(_Event, frozen=True, tag="step"):
    """A step that a whole world has executed. The world's first rank writes it."""

    epoch: int
    rank: int
    step: int
    began: float
    seconds: float
    loss: float | None = None
    """Loss of the step. ``None``: not reported, or not finite."""
    tokens: int | None = None
    """Tokens of all ranks. The same holds for ``samples``."""
    samples: int | None = None
    not_finite: str = ""
    """The loss, if it was not finite: ``nan``, ``inf`` or ``-inf``."""


class SaveEvent(_Event, frozen=True, tag="save"):
    """The time for which a call of ``Checkpointer.save`` or ``seal`` blocked training."""

    rank: int
    step: int
    state: str
    began: float
    seconds: float
    """Seconds for which training was blocked."""
    epoch: int = -1


class RestoreEvent(_Event, frozen=True, tag="restored"):
    rank: int
    step: int
    """Restored step. -1: none."""
    mode: str
    """``snapshot`` or ``live``. Without a step: ``nothing``, ``torn``, ``lost`` or ``damaged``."""
    began: float
    seconds: float
    bytes_by_tier: dict[str, int] = {}
    steps_redone: int = -1
    """Steps that were completed after the restored one, as far as this process knows. -1: unknown."""
    epoch: int = -1


class Protection(_Event, frozen=True, tag="protection"):
    """A change of the newest protected step. A world's first rank writes the report of its agent."""

    at: float
    step: int
    """Newest step that has all its required copies or is durable. -1: none."""
    since: float | None = None
    """Time since which a newer step is unprotected. ``None``: no newer step has been unprotected for long."""
    left_out: int = 0
    """Saves that were skipped or failed since that time."""


LogEvent: TypeAlias = (
    FileOpened
    | ProcessBegan
    | ProcessEnded
    | WorldFormed
    | FaultEvent
    | FaultInjected
    | StopRequested
    | StageEvent
    | StepEvent
    | SaveEvent
    | RestoreEvent
    | Protection
)


def event_time(event: LogEvent) -> float:
    """Return the time at which ``event`` was over, in seconds since 1970."""
    if isinstance(event, StageEvent | StepEvent | SaveEvent | RestoreEvent):
        return event.began + event.seconds
    return event.at
