"""Protocol of a worker with its elastic agent: barrier, start, fault, requested restart mode.

::

      at_rcb_barrier ──> (all local ranks arrive, and the operator starts the job) ─────> job_start ──> past_rcb_barrier
             ^                                                                                               │
             └──────────────────────────── job_fault <─── trains ── job_fault (its own) ─────────────────────┘
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec

from elastic.errors import ControlDeadlineError, ControlPlaneUnavailableError
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.elastic_agent import ipc
from integration.hyperpod.elastic_agent.environment import AgentMode, agent_mode
from integration.hyperpod.elastic_agent.ipc import (
    AgentConnection,
    AgentMessage,
    DamagedFrameError,
    shared_agent_connection,
)
from integration.hyperpod.job_resource import RestartMode

log = logging.getLogger(__name__)

JOB_RESTART_COUNT_ENV = "JOB_RESTART_COUNT"
SPARE_ENV = "SPARE"
AGENT_SILENCE_LIMIT_S = 60.0
"""Seconds without a read after which an agent counts as hung while a worker waits for it."""
_POLL_S = 1.0
_SEND_TIMEOUT_S = 30.0
_MAX_TEXT = 8 << 10
"""Maximum characters of a reason or a message, which the job's status stores."""


class JobStart(msgspec.Struct, frozen=True):
    """The agent's start of the job."""

    environ: Mapping[str, str]
    """RANK, WORLD_SIZE, MASTER_ADDR and other variables of this worker."""
    data: Any = None
    """Data of all workers, and the addresses of their nodes."""

    @property
    def restart_count(self) -> int:
        """Return the number of restarts of the job."""
        return int(self.environ.get(JOB_RESTART_COUNT_ENV, "0"))

    @property
    def is_spare(self) -> bool:
        return self.environ.get(SPARE_ENV, "").lower() == "true"


_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORT_LIMIT = 1 << 16
_SHOWN = 60
_MAX_DIGITS = 9
_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT", JOB_RESTART_COUNT_ENV)


def parse_job_start(message: AgentMessage) -> JobStart:
    """Return the start in a message, or raise :class:`DamagedFrameError` if it is unusable."""
    values = message.get("worker_envs")
    environ = (
        {name: str(value) for name, value in values.items() if value is not None} if isinstance(values, dict) else {}
    )
    missing = [name for name in _REQUIRED if not environ.get(name)]
    if missing:
        raise DamagedFrameError(f"{message['type']} without {', '.join(missing)}")
    for name in _NUMBERS:
        if not environ.get(name, "0").isdecimal() or len(environ.get(name, "0")) > _MAX_DIGITS:
            raise DamagedFrameError(f"{message['type']} with {name}={environ[name][:_SHOWN]!r}, which is not a number")
    rank, size, port = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    start = JobStart(environ, message.get("aggregate_worker_data"))
    is_extra = message["type"] == ipc.MSG_RANK_INFO or start.is_spare  # spares have the ranks after the last member
    if (rank >= size and not is_extra) or not 0 < port < _PORT_LIMIT:
        raise DamagedFrameError(f"{message['type']} with rank {rank} of {size} and port {port}, which cannot be")
    return start


class AgentWorker:
    """One process as a worker of the agent. Any thread may call any method."""

    def __init__(self, connection: AgentConnection) -> None:
        self._connection = connection
        self._channel = connection.open_channel(ipc.RESTART_MESSAGES)
        self._changed = threading.Condition()
        self._start: JobStart | None = None
        """Received start, neither begun nor revoked by a fault."""
        self._begun: JobStart | None = None
        """Start of the current world. The agent repeats it to each other client of the connection."""
        self._known: JobStart | None = None
        """Newest rank assignment of this worker."""
        self._waiting = False
        self._faults = 0
        self._lost = ""
        self._calls: list[Callable[[str], None]] = []
        self._thread = threading.Thread(target=self._listen, name="hyperpod-worker", daemon=True)
        self._thread.start()

    @property
    def fault_count(self) -> int:
        """Number of faults that the agent has reported."""
        return self._faults

    @property
    def lost_reason(self) -> str:
        """Reason why the agent is lost; "" while it is connected."""
        return self._lost

    def add_fault_callback(self, call: Callable[[str], None]) -> None:
        """Call ``call`` with the reason of every fault, in the worker's own thread."""
        with self._changed:
            self._calls.append(call)

    def wait_for_rank_info(self, *, timeout_s: float | None = None) -> JobStart:
        """Return this worker's rank information, and wait until it is known.

        An operator that assigns ranks only with the start requires the worker at the barrier, so the worker enters it.
        """
        with self._changed:
            if self._known is None:
                self._enter_barrier()
            self._wait(lambda: self._known is not None, timeout_s, "the agent gave no rank")
            assert self._known is not None  # noqa: S101 - what was waited for
            return self._known

    def wait_at_barrier(self, *, timeout_s: float | None = None) -> tuple[JobStart, int]:
        """Wait until the job starts. Return the start and the fault count at that time.

        A later fault concerns this start.
        """
        with self._changed:
            if self._start is None:
                self._enter_barrier()
            self._wait(lambda: self._start is not None, timeout_s, "the agent did not start the job")
            start, self._start, self._waiting = self._start, None, False
            self._begun = start
            assert start is not None  # noqa: S101 - what was waited for
            faults = self._faults
            self._channel.send(ipc.MSG_PAST_BARRIER)
        return start, faults

    def report_fault(self, rank: int, mode: RestartMode, reason: str, message: str = "") -> None:
        """Send a fault. After the return it reaches the agent even if this process exits."""
        fields = {
            "rank": rank,
            "restart_mode": mode.value,
            "reason": reason[:_MAX_TEXT],
            "message": message[:_MAX_TEXT],
        }
        self._channel.send(ipc.MSG_JOB_FAULT, **fields)
        self._channel.flush(_SEND_TIMEOUT_S)

    def set_health_labels(self, labels: Mapping[str, str]) -> None:
        """Send labels that describe this rank's health to the operator."""
        self._channel.send(ipc.MSG_RANK_LABELS, labels=dict(labels))

    def close(self) -> None:
        self._connection.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _enter_barrier(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._channel.send(ipc.MSG_AT_BARRIER)

    def _wait(self, is_done: Callable[[], bool], timeout_s: float | None, problem: str) -> None:
        """Wait until ``happened()``.

        If the agent no longer reads, raise an error, because a visible failure is better than an endless wait.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        unread, since = 0, time.monotonic()
        while not is_done():
            if self._lost:
                raise ControlPlaneUnavailableError(self._lost)
            now, before, unread = time.monotonic(), unread, self._connection.unread_bytes
            if not unread or unread < before:
                since = now
            elif now - since >= AGENT_SILENCE_LIMIT_S:
                raise ControlPlaneUnavailableError(
                    f"the elastic agent has not read for {AGENT_SILENCE_LIMIT_S:g} s what this process has said"
                )
            if until is not None and now >= until:
                raise ControlDeadlineError(f"{problem} within {timeout_s:g} s")
            self._changed.wait(_POLL_S if until is None else min(_POLL_S, until - now))

    def _listen(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if message["type"] == ipc.MSG_JOB_FAULT:
                    self._handle_fault(
                        f"the agent asks for another start (after number {message.get('restart_count')})"
                    )
                else:
                    self._receive_start(message)
        except Exception as error:  # noqa: BLE001 - top of a thread; waiting callers receive it
            with self._changed:
                self._lost = str(error) or type(error).__name__
                self._changed.notify_all()
        self._notify(self._lost)

    def _receive_start(self, message: AgentMessage) -> None:
        start = parse_job_start(message)
        with self._changed:
            if message["type"] == ipc.MSG_JOB_START and start != self._begun:
                self._start = start
            self._known = start
            self._changed.notify_all()

    def _handle_fault(self, reason: str) -> None:
        with self._changed:
            revoked, self._start, self._begun = self._start, None, None
            self._faults += 1
            if self._waiting and revoked is not None:  # otherwise the agent still counts it as waiting
                self._channel.send(ipc.MSG_AT_BARRIER)
            self._changed.notify_all()
        self._notify(reason)

    def _notify(self, reason: str) -> None:
        for call in tuple(self._calls):
            call(reason)


_workers: list[AgentWorker] = []
_creating = threading.Lock()


def this_agent_worker(environ: Mapping[str, str] = os.environ) -> AgentWorker:
    """Return the worker of this process, and create it on the first call.

    The agent accepts one connection of each process.
    """
    with _creating:
        if not _workers or _workers[0].lost_reason:
            _workers[:] = [AgentWorker(shared_agent_connection(environ))]
        return _workers[0]


def wait_rank(environ: MutableMapping[str, str] = os.environ, *, timeout_s: float | None = None) -> None:
    """Wait until this process has a rank, and store the rank's variables in ``environ``.

    Call it before any code that reads them. Return immediately if the launcher has already set them. An in-process
    agent has not: its variables belong to an earlier start or to none. A child process of the script has no rank.
    """
    if multiprocessing.parent_process() is None and agent_mode(environ) is AgentMode.IN_PROCESS:
        environ.update(this_agent_worker(environ).wait_for_rank_info(timeout_s=timeout_s).environ)


REPEAT_OFFENDER_LABEL = "elastic-repeat-offender"


def choose_restart_mode(
    policy: ScalingPolicy, starts: Sequence[float], now: float, *, final: bool = False
) -> RestartMode:
    """Return the restart to request. ``starts`` are the times of this process's in-process restarts.

    Times use the clock of ``now``. After too many restarts within the period, request new processes. A ``final`` fault
    would repeat in any process; the operator limits restarts of the whole job.
    """
    if final:
        return RestartMode.JOB
    limit = policy.num_restart_before_full_job_restart
    recent = [time_s for time_s in starts if now - time_s < policy.eval_period_s]
    if limit is not None and len(recent) >= limit:
        return RestartMode.PROCESS
    return RestartMode.IN_PROCESS


def repeat_offender_labels(policy: ScalingPolicy, faults: Sequence[float], now: float) -> Mapping[str, str]:
    """Return a label if this rank failed too often in the period, so that its node is examined.

    ``faults`` are the times of faults that this rank itself caused. Empty if there were too few.
    """
    recent = [time_s for time_s in faults if now - time_s < policy.eval_period_s]
    if len(recent) < policy.repeat_offender_faults:
        return {}
    return {REPEAT_OFFENDER_LABEL: str(len(recent))}
