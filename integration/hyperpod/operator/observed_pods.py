"""Observed pods of a job, and the parser of an agent's reply to GET /status. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from integration.hyperpod.job_resource import RestartMode
from peerstore.message_codec import from_json


class AgentState(enum.Enum):
    """State that an agent reports, in the spelling of its replies."""

    INIT = "init"
    READY = "ready"
    RUNNING = "running"
    COMPLETED = "completed"
    FAULTED = "faulted"
    STOPPING = "stopping"
    SHUTDOWN = "shutdown"


class CheckpointProgress(msgspec.Struct, frozen=True, rename="camel"):
    """The newest checkpoint under one prefix: its location and its step."""

    progress_data: str
    progress_count: int


class AgentStatus(msgspec.Struct, frozen=True):
    """The fields of an agent's ``GET /status`` that the operator uses."""

    state: AgentState
    reason: str = ""
    message: str = ""
    restart_mode: RestartMode = RestartMode.PROCESS
    version: str | None = None
    """The ``ipVersion`` of the last ``/start`` or ``/update`` received."""
    rank: int | None = None
    spare: bool = False
    """Whether the agent considers itself a spare.

    In-process agents do before their first request, others always.
    """
    transition_times: Mapping[str, str] = {}
    """Time of the entry into each state, by the state's name in capitals."""
    progress: Mapping[str, CheckpointProgress] = {}
    worker_data: tuple[msgspec.Raw, ...] = ()
    """Data of its workers, passed on unchanged."""


class ObservedPod(msgspec.Struct, frozen=True, kw_only=True):
    """One observed pod. Its replacement has another name."""

    name: str
    group: str = ""
    """Name of its replica spec."""
    node: str = ""
    """Name of its machine. Repeated offenders are machines."""
    ip: str = ""
    """Address at which other pods reach it."""
    agent_status: AgentStatus | None = None
    """None if its agent did not answer, or has no address so far."""
    node_health_problem: str = ""
    """Value of the machine's health label; "" if schedulable."""
    terminating: bool = False
    """Whether the pod is being deleted or preempted."""


class ObservedJob(msgspec.Struct, frozen=True, kw_only=True):
    """All observations of a job at one time."""

    pods: tuple[ObservedPod, ...] = ()
    capacity: int | None = None
    """Number of admitted replicas without spares (by Kueue, or by manual scaling); None for no limit."""
    can_replace: bool = True
    """Whether pods can be recreated. If not, a restart of the whole job restarts all its processes."""


def parse_agent_status(body: bytes) -> AgentStatus:
    """Return an agent's status; raise ``msgspec.DecodeError`` if it is not valid."""
    return _agent_status(from_json(body, _StatusReply))


_MAX_PREFIXES = 64
_MAX_NUMBER = 1 << 62
_MAX_TEXT = 4000
_STATES = frozenset(state.name for state in AgentState)
"""State names that the job's status may hold. The API server stores it."""


class _ProgressReply(msgspec.Struct, rename={"data": "progressData", "count": "progressCount"}):
    count: int | str
    data: str | None = None


class _StatusReply(msgspec.Struct):
    status: str
    transitions: dict[str, str] = {}
    reason: str | None = None
    message: str | None = None
    restart_mode: str | None = msgspec.field(default=None, name="restartMode")
    worker_data: list[msgspec.Raw] | None = None
    version: str | None = msgspec.field(default=None, name="ipversion")
    progress: dict[str, _ProgressReply] | None = None
    assigned_rank: str | int | None = None
    spare: str | bool | None = None


def _agent_status(reply: _StatusReply) -> AgentStatus:
    try:
        state = AgentState(reply.status.lower())
        rank = None if reply.assigned_rank is None else _number(reply.assigned_rank)
        if len(reply.progress or {}) > _MAX_PREFIXES:
            raise ValueError(f"progress under {len(reply.progress or {})} prefixes, at most {_MAX_PREFIXES} are kept")
        progress = {
            _checked_text(prefix): CheckpointProgress(_checked_text(entry.data), _number(entry.count))
            for prefix, entry in (reply.progress or {}).items()
            if entry.data is not None
        }
    except ValueError as error:
        raise msgspec.ValidationError(f"an agent's status: {error}") from None
    return AgentStatus(
        state=state,
        reason=(reply.reason or "")[:_MAX_TEXT],
        message=(reply.message or "")[:_MAX_TEXT],
        restart_mode=_restart_mode(reply.restart_mode),
        version=None if reply.version is None else reply.version[:_MAX_TEXT],
        rank=rank,
        spare=str(reply.spare).lower() == "true",
        transition_times={state: moment[:_MAX_TEXT] for state, moment in reply.transitions.items() if state in _STATES},
        progress=progress,
        worker_data=tuple(reply.worker_data or ()),
    )


def _number(text: str | int) -> int:
    number = int(text)
    if not -1 <= number < _MAX_NUMBER:
        raise ValueError(f"{str(number)[:30]} is not a number from -1 to {_MAX_NUMBER - 1}")
    return number


def _checked_text(text: str) -> str:
    if len(text) > _MAX_TEXT:
        raise ValueError(f"a text of {len(text)} characters")
    return text


def _restart_mode(text: str | None) -> RestartMode:
    """Return the agent's mode or a worker's request. An unknown mode means a restart of the processes."""
    try:
        return RestartMode((text or "").lower())
    except ValueError:
        return RestartMode.PROCESS
