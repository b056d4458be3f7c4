"""A worker's protocol with its elastic agent: barrier, start, fault, requested restart mode.

::

      at_rcb_barrier ──> (all local ranks are there, and the operator starts the job) ──> job_start ──> past_rcb_barrier
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
    RequestedRestart,
    shared_agent_connection,
)

log = logging.getLogger(__name__)

JOB_RESTART_COUNT_ENV = "JOB_RESTART_COUNT"
SPARE_ENV = "SPARE"
AGENT_SILENCE_LIMIT_S = 60.0
"""An agent reads at once: one that has taken nothing for so long while a worker waits for it never will."""
_POLL_S = 1.0
_SEND_TIMEOUT_S = 30.0
_TEXT = 8 << 10
"""Of a reason or a message, what is passed on: for people, and kept in the job's status."""


class JobStart(msgspec.Struct, frozen=True):
    """What the agent says when the job is to run."""

    environ: Mapping[str, str]
    """RANK, WORLD_SIZE, MASTER_ADDR and so on, as this worker is to have them."""
    data: Any = None
    """What all workers said of themselves, and the addresses of their nodes."""

    @property
    def restart_count(self) -> int:
        """How often the job was started anew."""
        return int(self.environ.get(JOB_RESTART_COUNT_ENV, "0"))

    @property
    def is_spare(self) -> bool:
        return self.environ.get(SPARE_ENV, "").lower() == "true"


_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = 1 << 16
_SHOWN = 60
_DIGITS = 9
_NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT", JOB_RESTART_COUNT_ENV)


def parse_job_start(message: AgentMessage) -> JobStart:
    """Values as the environment has them, or :class:`DamagedFrameError` where nobody could start with them."""
    said = message.get("worker_envs")
    environ = {name: str(value) for name, value in said.items() if value is not None} if isinstance(said, dict) else {}
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        raise DamagedFrameError(f"{message['type']} without {', '.join(missing)}")
    for name in _NUMBERS:
        if not environ.get(name, "0").isdecimal() or len(environ.get(name, "0")) > _DIGITS:
            raise DamagedFrameError(f"{message['type']} with {name}={environ[name][:_SHOWN]!r}, which is no number")
    rank, size, port = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    start = JobStart(environ, message.get("aggregate_worker_data"))
    behind = message["type"] == ipc.MSG_RANK_INFO or start.is_spare  # spares are numbered on
    if (rank >= size and not behind) or not 0 < port < _PORTS:
        raise DamagedFrameError(f"{message['type']} with rank {rank} of {size} and port {port}, which cannot be")
    return start


class AgentWorker:
    """One process; every method may be called by any thread."""

    def __init__(self, connection: AgentConnection) -> None:
        self._connection = connection
        self._channel = connection.open_channel(ipc.RESTART_MESSAGES)
        self._changed = threading.Condition()
        self._start: JobStart | None = None
        """Heard, and neither begun nor overtaken by a fault."""
        self._begun: JobStart | None = None
        """The one that this worker is in. The agent says it again to every other user of the connection."""
        self._known: JobStart | None = None
        """The newest place that this worker was told of."""
        self._waiting = False
        self._faults = 0
        self._lost = ""
        self._calls: list[Callable[[str], None]] = []
        self._thread = threading.Thread(target=self._listen, name="hyperpod-worker", daemon=True)
        self._thread.start()

    @property
    def fault_count(self) -> int:
        """How many times the agent has said that the job is to be left."""
        return self._faults

    @property
    def lost_reason(self) -> str:
        """Why the agent is not there any more; "" while it is."""
        return self._lost

    def add_fault_callback(self, call: Callable[[str], None]) -> None:
        """Have ``call`` run with the reason, in the worker's own thread, whenever the job is to be left."""
        with self._changed:
            self._calls.append(call)

    # -- what it is told ----------------------------------------------------------------------------------------------

    def wait_for_rank_info(self, *, timeout_s: float | None = None) -> JobStart:
        """This worker's place as far as it is known; before anybody knows it, this waits.

        An operator that says nothing of ranks before the start says it with the start: so the worker counts as being at
        the barrier while it waits.
        """
        with self._changed:
            if self._known is None:
                self._arrive()
            self._wait(lambda: self._known is not None, timeout_s, "the agent gave no rank")
            assert self._known is not None  # noqa: S101 - what was waited for
            return self._known

    def wait_at_barrier(self, *, timeout_s: float | None = None) -> tuple[JobStart, int]:
        """Until the job starts: with what, and how many faults there had been. One that comes later is about it."""
        with self._changed:
            if self._start is None:
                self._arrive()
            self._wait(lambda: self._start is not None, timeout_s, "the agent did not start the job")
            start, self._start, self._waiting = self._start, None, False
            self._begun = start
            assert start is not None  # noqa: S101 - what was waited for
            faults = self._faults
            self._channel.send(ipc.MSG_PAST_BARRIER)
        return start, faults

    # -- what it says -------------------------------------------------------------------------------------------------

    def report_fault(self, rank: int, mode: RequestedRestart, reason: str, message: str = "") -> None:
        """Returns when it is on its way: it is heard even when this process ends now."""
        said = {"rank": rank, "restart_mode": mode.value, "reason": reason[:_TEXT], "message": message[:_TEXT]}
        self._channel.send(ipc.MSG_JOB_FAULT, **said)
        self._channel.flush(_SEND_TIMEOUT_S)

    def set_health_labels(self, labels: Mapping[str, str]) -> None:
        """What the operator is to know of this rank's health."""
        self._channel.send(ipc.MSG_RANK_LABELS, labels=dict(labels))

    def close(self) -> None:
        self._connection.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- with the lock held -------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        if not self._waiting:
            self._waiting = True
            self._channel.send(ipc.MSG_AT_BARRIER)

    def _wait(self, happened: Callable[[], bool], timeout_s: float | None, what: str) -> None:
        """Who is not heard any more ends with an error: that is seen, while who waits would wait for ever."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        unread, since = 0, time.monotonic()
        while not happened():
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
                raise ControlDeadlineError(f"{what} within {timeout_s:g} s")
            self._changed.wait(_POLL_S if until is None else min(_POLL_S, until - now))

    # -- the worker's own thread --------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if message["type"] == ipc.MSG_JOB_FAULT:
                    self._left(f"the agent asks for another start (after number {message.get('restart_count')})")
                else:
                    self._placed(message)
        except Exception as error:  # noqa: BLE001 - the top of a thread; whoever waits is told
            with self._changed:
                self._lost = str(error) or type(error).__name__
                self._changed.notify_all()
        self._tell(self._lost)

    def _placed(self, message: AgentMessage) -> None:
        start = parse_job_start(message)
        with self._changed:
            if message["type"] == ipc.MSG_JOB_START and start != self._begun:
                self._start = start
            self._known = start
            self._changed.notify_all()

    def _left(self, reason: str) -> None:
        with self._changed:
            overtaken, self._start, self._begun = self._start, None, None
            self._faults += 1
            if self._waiting and overtaken is not None:  # else the agent still counts it as being there
                self._channel.send(ipc.MSG_AT_BARRIER)
            self._changed.notify_all()
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        for call in tuple(self._calls):
            call(reason)


_workers: list[AgentWorker] = []
_creating = threading.Lock()


def this_agent_worker(environ: Mapping[str, str] = os.environ) -> AgentWorker:
    """This process's, made when it is first asked for: the agent wants one connection of each."""
    with _creating:
        if not _workers or _workers[0].lost_reason:
            _workers[:] = [AgentWorker(shared_agent_connection(environ))]
        return _workers[0]


def wait_rank(environ: MutableMapping[str, str] = os.environ, *, timeout_s: float | None = None) -> None:
    """The environment first: until this process has a rank, which then stands in ``environ`` with what belongs to it.

    For scripts that read it before they do anything else. Returns at once where whoever started this process has put it
    there. An agent that restarts in process has not: what it puts there is of an earlier start, or of none. A process
    that the script itself has started, and that runs these lines again, is no rank.
    """
    if multiprocessing.parent_process() is None and agent_mode(environ) is AgentMode.IN_PROCESS:
        environ.update(this_agent_worker(environ).wait_for_rank_info(timeout_s=timeout_s).environ)


REPEAT_OFFENDER_LABEL = "elastic-repeat-offender"


def choose_restart_mode(
    policy: ScalingPolicy, starts: Sequence[float], now: float, *, final: bool = False
) -> RequestedRestart:
    """``starts``: when this process was started anew without being ended, by any clock that ``now`` is read from.

    Processes that have been through that too often are not trusted with another world: new ones are asked for. A fault
    that is ``final`` comes again in any process; how often the whole job may be tried is up to the operator.
    """
    if final:
        return RequestedRestart.JOB
    limit = policy.num_restart_before_full_job_restart
    lately = [at for at in starts if now - at < policy.eval_period_s]
    if limit is not None and len(lately) >= limit:
        return RequestedRestart.PROCESS
    return RequestedRestart.IN_PROCESS


def repeat_offender_labels(policy: ScalingPolicy, faults: Sequence[float], now: float) -> Mapping[str, str]:
    """``faults``: when this rank, and no other one, was at fault. Too often in the period: its node is to be looked at.

    Empty while there is nothing to say.
    """
    lately = [at for at in faults if now - at < policy.eval_period_s]
    if len(lately) < policy.repeat_offender_faults:
        return {}
    return {REPEAT_OFFENDER_LABEL: str(len(lately))}
