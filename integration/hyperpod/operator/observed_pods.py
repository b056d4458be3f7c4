"""A job's observed pods, and each agent's answer to GET /status. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from peerstore.message_codec import from_json


class AgentState(enum.Enum):
    """What an agent says it is; in the spelling of its answers."""

    INIT = "init"
    READY = "ready"
    RUNNING = "running"
    COMPLETED = "completed"
    FAULTED = "faulted"
    STOPPING = "stopping"
    SHUTDOWN = "shutdown"


class AgentRestartMode(enum.Enum):
    """How much is started anew after a fault, least first; in the spelling of ``/stop`` and ``/status``."""

    IN_PROCESS = "in_process_restart"
    PROCESS = "process_level_restart"
    JOB = "job_level_restart"

    @property
    def severity(self) -> int:
        return list(AgentRestartMode).index(self)

    def at_least(self, other: AgentRestartMode) -> AgentRestartMode:
        return max(self, other, key=lambda mode: mode.severity)


class CheckpointProgress(msgspec.Struct, frozen=True, rename="camel"):
    """The newest checkpoint under one prefix: where it is, and of which step."""

    progress_data: str
    progress_count: int


class AgentStatus(msgspec.Struct, frozen=True):
    """What ``GET /status`` said, as far as the operator acts on it."""

    state: AgentState
    reason: str = ""
    message: str = ""
    restart_mode: AgentRestartMode = AgentRestartMode.PROCESS
    version: str | None = None
    """The ``ipVersion`` of the last ``/start`` or ``/update`` that arrived."""
    rank: int | None = None
    spare: bool = False
    """It takes itself for one: in-process agents do before they are told anything, others always."""
    transition_times: Mapping[str, str] = {}
    """When it came into each state, by the state's name in capitals."""
    progress: Mapping[str, CheckpointProgress] = {}
    worker_data: tuple[msgspec.Raw, ...] = ()
    """What its workers told it, to be passed on as it is."""


class ObservedPod(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
):
    """One pod. Whoever takes its place later has another name."""

    name: str
    group: str = ""
    """The replica spec it belongs to."""
    node: str = ""
    """The machine it is on; repeated offenders are machines."""
    ip: str = ""
    """Where other pods reach it."""
    agent_status: AgentStatus | None = None
    """Nothing when its agent was asked and did not answer, or has no address yet."""
    node_health_problem: str = ""
    """What its machine's health label says, where that is anything but schedulable."""
    terminating: bool = False
    """Somebody has asked for the machine back: a pod that is being deleted, or preempted."""


class ObservedJob(msgspec.Struct, frozen=True, kw_only=True):
    """All that is seen of a job at one time."""

    pods: tuple[ObservedPod, ...] = ()
    capacity: int | None = None
    """So many replicas, spares not counted, are admitted (Kueue, or a person who scales by hand)."""
    can_replace: bool = True
    """Whether pods can be made anew. Where not, a restart of the whole job is one of all its processes."""


def parse_agent_status(body: bytes) -> AgentStatus:
    """What an agent said; raises ``msgspec.DecodeError`` for what no agent says."""
    return _agent_status(from_json(body, _Status))


_MAX_PREFIXES = 64
_MOST_NUMBER = 1 << 62
_MOST_TEXT = 4000
_STATES = frozenset(state.name for state in AgentState)
"""They go into the job's status, which the API server keeps."""


class _Data(msgspec.Struct, rename={"data": "progressData", "count": "progressCount"}):
    count: int | str
    data: str | None = None


class _Status(msgspec.Struct):
    status: str
    transitions: dict[str, str] = {}
    reason: str | None = None
    message: str | None = None
    restart_mode: str | None = msgspec.field(default=None, name="restartMode")
    worker_data: list[msgspec.Raw] | None = None
    version: str | None = msgspec.field(default=None, name="ipversion")
    progress: dict[str, _Data] | None = None
    assigned_rank: str | int | None = None
    spare: str | bool | None = None


def _agent_status(said: _Status) -> AgentStatus:
    try:
        state = AgentState(said.status.lower())
        rank = None if said.assigned_rank is None else _number(said.assigned_rank)
        if len(said.progress or {}) > _MAX_PREFIXES:
            raise ValueError(f"progress under {len(said.progress or {})} prefixes, at most {_MAX_PREFIXES} are kept")
        progress = {
            _short(prefix): CheckpointProgress(_short(one.data), _number(one.count))
            for prefix, one in (said.progress or {}).items()
            if one.data is not None
        }
    except ValueError as wrong:
        raise msgspec.ValidationError(f"an agent's status: {wrong}") from None
    return AgentStatus(
        state=state,
        reason=(said.reason or "")[:_MOST_TEXT],
        message=(said.message or "")[:_MOST_TEXT],
        restart_mode=_mode(said.restart_mode),
        version=None if said.version is None else said.version[:_MOST_TEXT],
        rank=rank,
        spare=str(said.spare).lower() == "true",
        transition_times={state: moment[:_MOST_TEXT] for state, moment in said.transitions.items() if state in _STATES},
        progress=progress,
        worker_data=tuple(said.worker_data or ()),
    )


def _number(said: str | int) -> int:
    number = int(said)
    if not -1 <= number < _MOST_NUMBER:
        raise ValueError(f"{str(number)[:30]} is no number that is counted to here")
    return number


def _short(text: str) -> str:
    if len(text) > _MOST_TEXT:
        raise ValueError(f"a text of {len(text)} characters")
    return text


def _mode(said: str | None) -> AgentRestartMode:
    """Its own, or what a worker asked for. A mode nobody knows here is served by new processes."""
    try:
        return AgentRestartMode((said or "").lower())
    except ValueError:
        return AgentRestartMode.PROCESS
