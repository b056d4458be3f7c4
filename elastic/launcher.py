"""Coordinator and supervisor processes: their specs, their entry points, and the launcher that keeps them alive.

A task is JSON on the command line. Secrets are in files that only this user can read.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from elastic.control.child_processes import ChildProcess, describe_exit, python_module_command, with_import_path
from elastic.control.control_messages import (
    CoordinatorRequest,
    ExitReason,
    ResizeRequest,
    StopJobRequest,
    SupervisorExited,
)
from elastic.control.coordinator_client import call_coordinator
from elastic.control.hang_detector import HangTimeouts
from elastic.control.leader_election import open_leader_record
from elastic.control.run_directory import write_private_file
from elastic.control.running_clock import RunningClock
from elastic.errors import ControlPlaneUnavailableError, ElasticError, JobFailedError
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import RequestedStep
from peerstore.daemon_process import handle_signals, raise_open_file_limit
from peerstore.message_codec import from_json
from peerstore.transport.authentication import read_secret

if TYPE_CHECKING:
    from elastic.supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

EXIT_STATUS = {
    ExitReason.FINISHED: 0,
    ExitReason.DISMISSED: 0,
    ExitReason.NEVER_JOINED: 2,
    ExitReason.REFUSED: 6,
    ExitReason.STOPPED: 7,
    ExitReason.JOB_FAILED: 8,
}
"""The exit status of these processes; any other was not meant to be."""

_LOOK_S = 10.0
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class CoordinatorSpec(msgspec.Struct, frozen=True, tag="coordinator"):
    job: str
    secret_file: str
    listen: str
    policy: ScalingPolicy
    nproc: int
    fresh: bool
    store: str = ""
    address_file: str = ""
    """Where it writes under which address it can be reached."""
    epoch_file: str = ""
    """Where it notes the newest world's number, which is all it could not always learn again."""
    end_file: str = ""
    """Where it writes how the job ended, where somebody else is to say that."""
    heartbeat_timeout_s: float = 10.0
    reconnect_timeout_s: float = 2.0
    rejoin_timeout_s: float = 5.0
    hang: HangTimeouts = HangTimeouts()
    event_log: str = ""
    """Where it writes down what happens; "" where the environment says so, or nowhere."""
    leadership: str = ""
    """The URL of where it is noted who leads: it begins when it does."""
    candidate: str = ""
    """This candidate's name there; no other one has it at the same time."""
    since_term: int = 0
    """A term in which its node has obeyed a coordinator."""
    stands_by: bool = False
    """It stays while another one leads."""
    local_nodes: int = 0
    """Nodes that its launcher starts on this machine."""
    join_command: str = ""
    """How the other nodes of the job are started, for people."""
    requested_step: RequestedStep | None = None
    """The step that the first world restores."""
    verbose: int = 0


class SupervisorSpec(msgspec.Struct, frozen=True, tag="node"):
    job: str
    secret_file: str
    node: str
    coordinator: str
    command: tuple[str, ...]
    directory: str
    logs: str
    nproc: int
    spares: int
    host: str
    sigterm_grace_s: float
    exit_timeout_s: float = 10.0
    heartbeat_s: float = 1.0
    starts_agent: bool = True
    environ: dict[str, str] = {}
    has_local_coordinator: bool = False
    """Its coordinator is beside it, and says itself how the job ended."""
    lead: CoordinatorSpec | None = None
    """The coordinator that this node starts where nobody leads the job."""
    coordinator_node: str = ""
    scheduled_job: str = ""
    """The job of Slurm's that both nodes were given to, where that is so."""
    verbose: int = 0


def spec_command(task: CoordinatorSpec | SupervisorSpec) -> list[str]:
    return python_module_command("elastic.launcher", msgspec.json.encode(task).decode())


def child_environ(more: dict[str, str] | None = None) -> dict[str, str]:
    return {**with_import_path(os.environ), **(more or {})}


def supervisor_environ(task: SupervisorSpec) -> dict[str, str]:
    """What its supervisor is started with."""
    return child_environ(task.environ)


def main(text: str) -> int:
    """Carry out one task; its status."""
    task: CoordinatorSpec | SupervisorSpec = from_json(text, CoordinatorSpec | SupervisorSpec)
    logging.basicConfig(level=_LEVELS[min(task.verbose, 2)], format="elastic: %(message)s", stream=sys.stderr)
    secret = read_secret(Path(task.secret_file))
    end = run_coordinator(task, secret) if isinstance(task, CoordinatorSpec) else JobEnd(*run_supervisor(task, secret))
    if end.over not in (ExitReason.FINISHED, ExitReason.DISMISSED):
        if isinstance(task, CoordinatorSpec) and task.end_file:
            try:
                write_private_file(Path(task.end_file), msgspec.json.encode(end))
            except OSError as error:  # a full disk
                log.warning("%s (%s cannot be written: %s)", end_message(end), task.end_file, error)
        elif isinstance(task, CoordinatorSpec) or not task.has_local_coordinator or end.over is ExitReason.REFUSED:
            log.warning("%s", end_message(end))
    return EXIT_STATUS[end.over]


def run_coordinator(task: CoordinatorSpec, secret: bytes) -> JobEnd:
    """Be a job's coordinator until the job is over, or SIGTERM."""
    from elastic.coordinator.coordinator import Coordinator, can_write_epoch
    from elastic.coordinator.job_status import EVENT_LOG_NAME
    from elastic.coordinator.world_reconciler import CoordinatorSettings
    from tieredckpt.event_log import EventLogWriter, event_log_from_environ

    raise_open_file_limit()
    settings = CoordinatorSettings(
        task.job,
        task.policy,
        task.nproc,
        task.store,
        task.heartbeat_timeout_s,
        task.reconnect_timeout_s,
        task.rejoin_timeout_s,
        task.hang,
        task.local_nodes,
        task.join_command,
        task.requested_step,
    )
    epoch_file = Path(task.epoch_file) if task.epoch_file else None
    if epoch_file is not None and not can_write_epoch(epoch_file):
        epoch_file = None
    event_log = EventLogWriter(task.event_log, name=EVENT_LOG_NAME) if task.event_log else event_log_from_environ()
    coordinator = Coordinator(
        settings,
        secret,
        listen=task.listen,
        fresh=task.fresh,
        epoch_file=epoch_file,
        event_log=event_log,
        leadership=open_leader_record(task.leadership) if task.leadership else None,
        candidate=task.candidate or _name_of_candidate(socket.gethostname()),
        since_term=task.since_term,
        stands_by=task.stands_by,
    )
    handle_signals({signal.SIGTERM: coordinator.request_stop, signal.SIGINT: coordinator.request_stop})
    log.info("the coordinator of job %s listens on %s", task.job, coordinator.address)
    if task.address_file and task.fresh:  # one that is started again listens where the one before it did
        write_private_file(Path(task.address_file), coordinator.address.encode())
    over, reason = coordinator.run()
    if task.epoch_file and over is not ExitReason.REFUSED and coordinator.reconciler.exit is not None:
        with contextlib.suppress(OSError):  # the next job of that name begins with a world 0
            os.truncate(task.epoch_file, 0)
    failure, step = coordinator.reconciler.failure, coordinator.last_committed_step.step
    if over is ExitReason.JOB_FAILED and failure is not None:
        return JobEnd(over, failure.reason, failure.attempts, step)
    return JobEnd(over, reason, step=step if over is ExitReason.STOPPED else -1)


class JobEnd(msgspec.Struct, frozen=True):
    """How a job ended."""

    over: ExitReason
    reason: str
    attempts: str = ""
    """How often a failed job was tried, or why it is not tried again."""
    step: int = -1
    """The newest step that all ranks reported as sealed, or -1. Agents may have a newer one."""


UNKNOWN_STEP = "the newest complete checkpoint of the job; this run saved none"


def end_message(end: JobEnd, resumes: str = "", command: str = "") -> str:
    """Return the last message of a job.

    ``resumes`` is the step that the agents would restore, and ``command`` resumes the job; both may be empty.
    """
    resumes = resumes or (f"step {end.step}" if end.step >= 0 else "")
    if end.over is ExitReason.NEVER_JOINED:
        return end.reason
    if end.over is ExitReason.JOB_FAILED:
        lines = {
            "failed": end.reason,
            "attempts": end.attempts,
            "resumes from": resumes or UNKNOWN_STEP,
            "command": command,
        }
        return "\n".join(f"{name}: {text}" for name, text in lines.items() if text)
    why = end.reason if end.reason.startswith(end.over.value) else f"{end.over.value}: {end.reason}".removesuffix(": ")
    if not command:
        return f"{why} (resumes from {resumes})" if resumes else why
    return f"{why}; the same command resumes it{f' from {resumes}' if resumes else ''}: {command}"


def _name_of_candidate(where: str) -> str:
    return f"{where}-{secrets.token_hex(4)}"


def _candidate(lead: CoordinatorSpec, name: str) -> Callable[[int], Sequence[str]]:
    return lambda term: spec_command(msgspec.structs.replace(lead, candidate=name, since_term=term))


def run_supervisor(task: SupervisorSpec, secret: bytes) -> tuple[ExitReason, str]:
    """Be a node's supervisor. SIGTERM: this machine is preempted. SIGINT: end now. SIGUSR1: the job has finished."""
    from elastic.supervisor.memory_tier import MemoryTierProcess, record_stop
    from elastic.supervisor.supervisor import Supervisor, SupervisorSettings

    name = _name_of_candidate(task.node)
    settings = SupervisorSettings(
        job=task.job,
        node=task.node,
        coordinator=task.coordinator,
        command=task.command,
        directory=Path(task.directory),
        logs=Path(task.logs),
        nproc=task.nproc,
        spares=task.spares,
        host=task.host,
        grace_s=task.sigterm_grace_s,
        exit_timeout_s=task.exit_timeout_s,
        heartbeat_s=task.heartbeat_s,
        environ=task.environ,
        candidate=None if task.lead is None else _candidate(task.lead, name),
        candidate_name=name,
    )
    ended = threading.Event()
    agent = MemoryTierProcess({**os.environ, **task.environ}, settings.directory.parent, stop=ended)
    supervisor = Supervisor(
        settings, secret, terminal=sys.stdout.buffer, partition_agent=agent.partition, offer_memory=agent.offer_memory
    )
    handle_signals(
        {
            signal.SIGTERM: lambda: supervisor.drain(f"node {task.node} was preempted (SIGTERM)"),
            signal.SIGINT: lambda: supervisor.kill("interrupted"),
            signal.SIGUSR1: lambda: supervisor.kill("the job has finished", ExitReason.FINISHED),
        }
    )
    starting = threading.Thread(target=agent.start, args=(supervisor.leave,), name="elastic-agent", daemon=True)
    if task.starts_agent:
        starting.start()
    if task.coordinator_node:
        threading.Thread(
            target=_look_after_coordinator, args=(task, supervisor, ended), name="elastic-allocation", daemon=True
        ).start()
    over, reason = supervisor.run()
    if supervisor.state.sealed_step is not None:
        record_stop({**os.environ, **task.environ}, supervisor.state.sealed_step)
    ended.set()
    if task.starts_agent:
        starting.join()
    if over is ExitReason.FINISHED:
        agent.shut_down()
    elif agent.kept_directory is not None:
        log.warning("the checkpoints stay in memory in %s for the next run of the job", agent.kept_directory)
    return over, reason


def _look_after_coordinator(task: SupervisorSpec, supervisor: Supervisor, ended: threading.Event) -> None:
    """Nobody starts a coordinator again whose machine is not the job's any more. Asked only when it is missed."""
    from elastic.schedulers.slurm import remaining_nodes

    while not ended.wait(_LOOK_S):
        left = remaining_nodes(task.scheduled_job) if supervisor.alone_s > _LOOK_S else ()
        if left and task.coordinator_node not in left:
            job = f"job {task.scheduled_job}"
            supervisor.kill(
                f"Slurm has taken {task.coordinator_node}, the coordinator's, from {job}", ExitReason.JOB_FAILED
            )
            return


_START_S = 30.0
_RESTARTS = 5
_WITHIN_S = 60.0
_AGAIN_S = 0.2
_HEARD_S = 5.0
"""After that it is known without being told."""
_UNHEARD_S = 5.0
"""Beyond what a node may take to end: who is still there then was cut off when the job was over."""
INTERRUPTED = 130


class JobLauncher:
    """``coordinator`` is ``None`` for nodes of a job whose coordinator is elsewhere. Runs on the main thread."""

    def __init__(
        self,
        nodes: list[SupervisorSpec],
        coordinator: CoordinatorSpec | None,
        secret: bytes,
        *,
        grace_s: float,
        notices: bool = False,
        on_address: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``notices``: a signal comes to all machines of the job and means the job, SIGUSR1 too: it is to end soon."""
        self._nodes = nodes
        self._coordinator = coordinator
        self._secret = secret
        self._grace_s = grace_s
        self._notices = notices
        self.noticed = False
        """Whether SIGUSR1 was such a notice."""
        self._told_address = on_address
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, ChildProcess] = {}
        self._statuses: dict[str, int] = {}
        self.killed_nodes: set[str] = set()
        """Nodes whose supervisor did not end by itself."""
        self._leader: ChildProcess | None = None
        self._status: int | None = None
        """How the coordinator ended."""
        self._over_at: float | None = None
        self._restarts: collections.deque[float] = collections.deque()
        self._kept: list[int] = []
        """Files in memory for the coordinators: in no directory, which may be full or forbidden meanwhile."""
        self._address = nodes[0].coordinator if nodes else ""
        self._interrupts = 0
        self._asking: list[threading.Thread] = []
        self._ending = threading.Event()

    def run(self) -> int:
        """Until the job (or these nodes' part in it) is over; the exit status."""
        before = {number: signal.signal(number, self._signalled) for number in _SIGNALS}
        try:
            if self._coordinator is not None:
                note = self._keep("elastic-epoch")  # where one leaves the newest world's number to the next
                secret = self._keep("elastic-secret", self._secret)
                self._coordinator = msgspec.structs.replace(self._coordinator, epoch_file=note, secret_file=secret)
                self._lead(self._coordinator)
                self._address = self._wait_address(self._coordinator)
            self._told_address(self._address)
            for task in self._nodes:
                self._start(msgspec.structs.replace(task, coordinator=self._address))
            while not self._is_done():
                self._turn()
            return self._verdict()
        finally:
            self._end_all()
            for descriptor in self._kept:
                os.close(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _keep(self, name: str, content: bytes = b"") -> str:
        """A file of this user's alone that is there as long as this process."""
        self._kept.append(os.memfd_create(name, os.MFD_CLOEXEC))
        os.fchmod(self._kept[-1], 0o600)
        os.write(self._kept[-1], content)
        return f"/proc/{os.getpid()}/fd/{self._kept[-1]}"

    # -- processes ----------------------------------------------------------------------------------------------------

    def _start(self, task: SupervisorSpec) -> None:
        self._running[task.node] = ChildProcess(
            spec_command(task),
            environ=child_environ(task.environ),
            on_line=None,
            on_exit=lambda status: self._inbox.put(partial(self._node_ended, task.node, status)),
            name=task.node,
        )

    def _lead(self, task: CoordinatorSpec) -> None:
        self._leader = ChildProcess(
            spec_command(task),
            environ=child_environ(),
            on_line=None,
            on_exit=lambda status: self._inbox.put(partial(self._leader_ended, status)),
            name="coordinator",
        )

    def _wait_address(self, task: CoordinatorSpec) -> str:
        clock = RunningClock(1.0)
        path, deadline = Path(task.address_file), clock() + _START_S
        while not path.exists():
            if self._status is not None or clock() > deadline or self._interrupts:
                raise ControlPlaneUnavailableError(f"the coordinator did not start on {task.listen}")
            self._turn()
        return path.read_text()

    def _node_ended(self, node: str, status: int) -> None:
        del self._running[node]
        self._statuses[node] = status
        if status not in EXIT_STATUS.values():
            self.killed_nodes.add(node)
            log.warning("the supervisor of node %s is gone: %s", node, describe_exit(status))
            self._ask(SupervisorExited(node), _HEARD_S)

    def _leader_ended(self, status: int) -> None:
        """The ranks do not notice: it is started again, where it was, and learns the job from the nodes."""
        self._leader = None
        if status in EXIT_STATUS.values() or self._coordinator is None or not self._address or self._ending.is_set():
            self._status, self._over_at = status, time.monotonic()
            return
        now = time.monotonic()
        self._restarts.append(now)
        while self._restarts and now - self._restarts[0] > _WITHIN_S:
            self._restarts.popleft()
        if len(self._restarts) > _RESTARTS:
            raise JobFailedError(
                f"the coordinator ended {_RESTARTS + 1} times within {_WITHIN_S:g} s: {describe_exit(status)}"
            )
        log.warning("the coordinator is gone (%s) and is started again", describe_exit(status))
        host = self._coordinator.listen.rpartition(":")[0]
        port = self._address.rpartition(":")[2]
        self._lead(msgspec.structs.replace(self._coordinator, fresh=False, listen=f"{host}:{port}"))

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        try:
            happened = self._inbox.get(timeout=_AGAIN_S)
        except queue.Empty:
            self._tell_unheard()
            return
        happened()

    def _tell_unheard(self) -> None:
        """Nodes that were cut off when the coordinator ended for good would wait for it much longer."""
        longest_s = max((task.exit_timeout_s for task in self._nodes), default=0.0)
        if self._over_at is None or time.monotonic() - self._over_at < longest_s + _UNHEARD_S:
            return
        self._over_at = None
        for running in self._running.values():
            running.signal(signal.SIGINT if self._status else signal.SIGUSR1)

    def _is_done(self) -> bool:
        if self._coordinator is None:
            return not self._running
        return self._status is not None and not self._running

    def _verdict(self) -> int:
        if self._interrupts > 1:
            return INTERRUPTED
        if self._status is not None:
            return self._status
        bad = [status for status in self._statuses.values() if status]
        return bad[0] if bad and bad[0] > 0 else int(bool(bad))

    def _end_all(self) -> None:
        self._ending.set()
        for running in [*self._running.values(), *([self._leader] if self._leader is not None else [])]:
            running.signal(signal.SIGKILL)
            running.join()
        for thread in self._asking:
            thread.join()

    # -- signals ------------------------------------------------------------------------------------------------------

    def _signalled(self, number: int, _frame: Any) -> None:
        self._inbox.put(partial(self._heed, signal.Signals(number)))

    def _heed(self, number: signal.Signals) -> None:
        if number is signal.SIGUSR1 and not self._notices:
            self._ask(ResizeRequest(None, "SIGUSR1"), 1.0)
            return
        self.noticed |= number is signal.SIGUSR1
        self._interrupts += number is signal.SIGINT
        if self._interrupts > 1:
            self._say("ended at once")
            self._ending.set()
            for running in self._running.values():
                running.signal(signal.SIGKILL)
            if self._leader is not None:
                self._leader.signal(signal.SIGKILL)
        elif self._coordinator is None and not self._notices:
            for running in self._running.values():
                running.signal(signal.SIGTERM)
        else:
            self._say(f"{number.name}: the ranks seal and end within {self._grace_s:g} s")
            self._ask(StopJobRequest(number.name, self._grace_s), self._grace_s)

    def _ask(self, question: CoordinatorRequest, within_s: float) -> None:
        """Again and again, while the coordinator is being started."""

        def run() -> None:
            deadline = time.monotonic() + within_s
            while not self._ending.is_set():
                try:
                    call_coordinator(self._address, question, job=self._nodes[0].job, secret=self._secret)
                    return
                except ElasticError as error:
                    if time.monotonic() > deadline:
                        log.warning("%s was not heard: %s", question, error)
                        return
                self._ending.wait(_AGAIN_S)

        thread = threading.Thread(target=run, name="elastic-ask", daemon=True)
        self._asking.append(thread)
        thread.start()

    def _say(self, text: str) -> None:
        print(f"elastic: {text}", file=sys.stderr, flush=True)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
