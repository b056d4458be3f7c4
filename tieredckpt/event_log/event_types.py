"""Event types and their fields. Types and fields are only ever added.

A line is one JSON object whose ``event`` names its kind. Readers take what they know: a kind they do not know is
counted, a field they do not know is passed over, one that is missing has its default. So a field may be added, with a
default, and a kind; nothing is ever renamed or given another meaning.
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
"""On the way from one world into the next, in this order; ``docs/how-to/reports.md`` says what each is."""


class _Event(msgspec.Struct, frozen=True, tag_field="event", omit_defaults=True):
    pass


class FileOpened(_Event, frozen=True, tag="opened"):
    """The first line of every file."""

    at: float
    pid: int
    host: str = ""
    version: int = EVENT_LOG_VERSION
    part: int = 0
    """A process that writes much goes on in a new file, and in the end gives up its oldest."""


class ProcessBegan(_Event, frozen=True, tag="began"):
    """A process takes part. The run begins with its coordinator's."""

    at: float
    job: str = ""
    who: str = "rank"
    """``coordinator`` or ``rank``. Where nobody runs the job, its first rank speaks for a coordinator as well."""
    again: bool = False
    """A coordinator that was started again: the run goes on."""
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
    """In order of rank."""
    nproc: int = 1
    how: str = "start"
    """``start``, ``restart``, ``respawn``, ``replace``, ``shrink`` or ``grow``."""
    reason: str = ""
    restarts: int = 0


class FaultEvent(_Event, frozen=True, tag="fault"):
    at: float
    """When it was noticed."""
    epoch: int
    """Of the world that it ended, or after which none had been formed yet."""
    node: str = ""
    local_rank: int = -1
    kind: str = ""
    """``process`` (it ended), ``node``, ``error`` (a rank said so), ``hang`` or ``late`` (it did not stop in time)."""
    reason: str = ""
    since: float | None = None
    """When it happened, as far as that is known: a process ended, a node was last heard of."""


class FaultInjected(_Event, frozen=True, tag="injected"):
    """A fault is about to be made on purpose."""

    at: float
    kind: str
    epoch: int = -1
    node: str = ""
    local_rank: int = -1
    rank: int = -1
    step: int = -1
    words: str = ""


class StopRequested(_Event, frozen=True, tag="notice"):
    """The ranks of a world are asked to stop at a common step."""

    at: float
    epoch: int
    want: str = "resize"
    """``resize`` or ``stop``."""
    reason: str = ""
    by: str = ""
    """Who asked: ``person``, ``rank``, ``cluster``, or ``policy``."""
    deadline_s: float | None = None


class StageEvent(_Event, frozen=True, tag="stage"):
    """A rank's way into a world. ``detect`` says, with no duration, when it knew that the world before was over."""

    epoch: int
    """The world it leads to; of ``detect``, ``abort``, ``seal`` and ``leave`` the one it leads away from."""
    rank: int
    """In that world."""
    name: str
    began: float
    seconds: float
    node: str = ""
    local_rank: int = -1


class StepEvent(_Event, frozen=True, tag="step"):
    """A step that a whole world has done; its first rank writes it."""

    epoch: int
    rank: int
    step: int
    began: float
    seconds: float
    loss: float | None = None
    """``None`` also where it was not finite."""
    tokens: int | None = None
    """Of all ranks together; as samples."""
    samples: int | None = None
    not_finite: str = ""
    """What the loss was, where it was not finite: ``nan``, ``inf`` or ``-inf``."""


class SaveEvent(_Event, frozen=True, tag="save"):
    """What a call of ``Checkpointer.save`` or ``seal`` took of the training's time."""

    rank: int
    step: int
    state: str
    began: float
    seconds: float
    """How long the training was blocked."""
    epoch: int = -1


class RestoreEvent(_Event, frozen=True, tag="restored"):
    rank: int
    step: int
    """-1: there was nothing to restore."""
    mode: str
    """``snapshot`` or ``live``; with -1 ``nothing``, or ``torn``, ``lost`` or ``damaged`` where something was saved."""
    began: float
    seconds: float
    bytes_by_tier: dict[str, int] = {}
    steps_redone: int = -1
    """Steps that had been done after it, or begun, as far as this process knows."""
    epoch: int = -1


class Protection(_Event, frozen=True, tag="protection"):
    """Up to which step the job is protected, when that changed; a world's first rank writes what its agent says."""

    at: float
    step: int
    """The newest step that has all the copies it was to have, or is durable; -1 for none."""
    since: float | None = None
    """Since when something newer has not; ``None`` while nothing has lacked that for long."""
    left_out: int = 0
    """Saves that were skipped or failed since then."""


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
    """When it was over."""
    if isinstance(event, StageEvent | StepEvent | SaveEvent | RestoreEvent):
        return event.began + event.seconds
    return event.at
