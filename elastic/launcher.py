"""Specs, entry points and launcher of the coordinator and supervisor processes.

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
from elastic.control.run_directory import RunDirectory, newest_last_run, write_private_file
from elastic.control.running_clock import RunningClock
from elastic.errors import ControlPlaneUnavailableError, ElasticError, JobFailedError
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import NO_STEP_HOLDERS, RequestedStep, StepHolders
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
"""Exit statuses of coordinators and supervisors. Any other status is a crash."""

_POLL_S = 10.0
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
    """File to which the coordinator writes its address."""
    epoch_file: str = ""
    """File with the newest world's number, the only state that the nodes may not be able to report."""
    end_file: str = ""
    """File to which the coordinator writes the end of the job, if another process reports it."""
    heartbeat_timeout_s: float = 10.0
    reconnect_timeout_s: float = 2.0
    rejoin_timeout_s: float = 5.0
    hang: HangTimeouts = HangTimeouts()
    event_log: str = ""
    """Directory of the event log. "" means the environment's choice."""
    leadership: str = ""
    """URL of the leader record. The coordinator acts only while it is the leader. "" means no election."""
    candidate: str = ""
    """Unique name of this candidate in the leader record."""
    since_term: int = 0
    """Newest term in which this candidate's node obeyed a coordinator."""
    stands_by: bool = False
    """Whether the candidate waits while another one leads."""
    local_nodes: int = 0
    """Number of nodes that the launcher starts on this machine."""
    join_command: str = ""
    """Command line that starts another node, for messages."""
    farewell_s: float = 60.0
    """Seconds after the end of the job in which connected nodes may learn of it."""
    requested_step: RequestedStep | None = None
    """The step that the first world restores."""
    holders: StepHolders = NO_STEP_HOLDERS
    """Nodes whose agents have the newest step of an earlier run, or may have it."""
    http: tuple[str, int] | None = None
    """Host and port of the page. ``None``: no page."""
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
    """Whether this machine's coordinator reports the end of the job, so that the supervisor need not."""
    lead: CoordinatorSpec | None = None
    """Coordinator that this node starts if the job has no leader."""
    coordinator_node: str = ""
    scheduled_job: str = ""
    """Slurm job that allocated this node and the coordinator's, or ""."""
    joined_run: str = ""
    """Directory of all runs, if this node has joined a run of this machine."""
    preempted_status: int = 0
    """Exit status after SIGTERM, if the job continues without this node."""
    verbose: int = 0


def spec_command(task: CoordinatorSpec | SupervisorSpec) -> list[str]:
    return python_module_command("elastic.launcher", msgspec.json.encode(task).decode())


def child_environ(more: dict[str, str] | None = None) -> dict[str, str]:
    return {**with_import_path(os.environ), **(more or {})}


def supervisor_environ(task: SupervisorSpec) -> dict[str, str]:
    """Return the environment of the node's supervisor."""
    return child_environ(task.environ)


def main(text: str) -> int:
    """Run one coordinator or supervisor and return its exit status."""
    task: CoordinatorSpec | SupervisorSpec = from_json(text, CoordinatorSpec | SupervisorSpec)
    logging.basicConfig(level=_LEVELS[min(task.verbose, 2)], format="elastic: %(message)s", stream=sys.stderr)
    secret = read_secret(Path(task.secret_file))
    is_preempted = threading.Event()
    if isinstance(task, CoordinatorSpec):
        end = run_coordinator(task, secret)
    else:
        end = JobEnd(*run_supervisor(task, secret, is_preempted))
    if end.over not in (ExitReason.FINISHED, ExitReason.DISMISSED):
        if isinstance(task, CoordinatorSpec) and task.end_file:
            try:
                write_private_file(Path(task.end_file), msgspec.json.encode(end))
            except OSError as error:  # a full disk
                log.warning("%s (%s cannot be written: %s)", end_message(end), task.end_file, error)
        elif isinstance(task, CoordinatorSpec) or not task.has_local_coordinator or end.over is ExitReason.REFUSED:
            log.warning("%s", end_message(end))
    if isinstance(task, SupervisorSpec) and end.over is ExitReason.DISMISSED and is_preempted.is_set():
        return task.preempted_status
    return EXIT_STATUS[end.over]


def run_coordinator(task: CoordinatorSpec, secret: bytes) -> JobEnd:
    """Run a job's coordinator until the job has ended or SIGTERM arrives."""
    from elastic.coordinator.coordinator import Coordinator, can_write_epoch
    from elastic.coordinator.job_snapshot import CoordinatorSettings
    from elastic.coordinator.job_status import EVENT_LOG_NAME
    from elastic.coordinator.status_server import StatusServer
    from tieredckpt.event_log import EVENT_LOG_ENV, EventLogWriter, event_log_from_environ

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
        task.holders,
    )
    epoch_file = Path(task.epoch_file) if task.epoch_file else None
    if epoch_file is not None and not can_write_epoch(epoch_file):
        epoch_file = None
    event_log = EventLogWriter(task.event_log, name=EVENT_LOG_NAME) if task.event_log else event_log_from_environ()
    event_directory = task.event_log or os.environ.get(EVENT_LOG_ENV, "")
    coordinator = Coordinator(
        settings,
        secret,
        listen=task.listen,
        fresh=task.fresh,
        epoch_file=epoch_file,
        event_log=event_log,
        leadership=open_leader_record(task.leadership) if task.leadership else None,
        candidate=task.candidate or _candidate_name(socket.gethostname()),
        since_term=task.since_term,
        stands_by=task.stands_by,
        farewell_s=task.farewell_s,
        status_server=None if task.http is None else StatusServer(task.job, task.http, event_directory),
    )
    handle_signals({signal.SIGTERM: coordinator.request_stop, signal.SIGINT: coordinator.request_stop})
    log.info("the coordinator of job %s listens on %s", task.job, coordinator.address)
    if task.address_file and task.fresh:  # a restarted coordinator listens on its old address
        write_private_file(Path(task.address_file), coordinator.address.encode())
    over, reason = coordinator.run()
    if task.epoch_file and over is not ExitReason.REFUSED and coordinator.snapshot.outcome.exit is not None:
        with contextlib.suppress(OSError):  # the next job of that name starts with world 0
            os.truncate(task.epoch_file, 0)
    failure, step = coordinator.snapshot.outcome.failure, coordinator.last_committed_step.step
    if over is ExitReason.JOB_FAILED and failure is not None:
        return JobEnd(over, failure.reason, failure.attempts, step)
    return JobEnd(over, reason, step=step if over in (ExitReason.STOPPED, ExitReason.JOB_FAILED) else None)


class JobEnd(msgspec.Struct, frozen=True):
    """End of a job: reason, attempts, newest step."""

    over: ExitReason
    reason: str
    attempts: str = ""
    """Number of attempts of a failed job, or why it is not retried."""
    step: int | None = None
    """The newest step that all ranks reported as sealed; -1 if they reported none, ``None`` if unknown.

    The ranks of a failed job may have sealed newer ones since.
    """


_NEWEST_STEP = "the newest complete checkpoint of the job"


def end_message(end: JobEnd, resumes: str = "", command: str = "") -> str:
    """Return the last message of a job.

    ``resumes`` is the step that the agents would restore, and ``command`` resumes the job; both may be empty.
    """
    if not resumes and end.step is not None and end.step >= 0:
        resumes = f"step {end.step}" + " or a newer one" * (end.over is ExitReason.JOB_FAILED)
    if end.over is ExitReason.NEVER_JOINED:
        return end.reason
    if end.over is ExitReason.JOB_FAILED:
        lines = {
            "failed": end.reason,
            "attempts": end.attempts,
            "resumes from": resumes or _NEWEST_STEP + "; this run saved none" * (end.step == -1),
            "command": command,
        }
        return "\n".join(f"{name}: {text}" for name, text in lines.items() if text)
    why = end.reason if end.reason.startswith(end.over.value) else f"{end.over.value}: {end.reason}".removesuffix(": ")
    if not command:
        return f"{why} (resumes from {resumes})" if resumes else why
    return f"{why}; the same command resumes it{f' from {resumes}' if resumes else ''}: {command}"


def _candidate_name(where: str) -> str:
    return f"{where}-{secrets.token_hex(4)}"


def _candidate(lead: CoordinatorSpec, name: str) -> Callable[[int], Sequence[str]]:
    return lambda term: spec_command(msgspec.structs.replace(lead, candidate=name, since_term=term))


def run_supervisor(task: SupervisorSpec, secret: bytes, is_preempted: threading.Event) -> tuple[ExitReason, str]:
    """Run a node's supervisor until the job or the node's part in it has ended.

    SIGTERM means that the machine is preempted, SIGINT kills the ranks, and SIGUSR1 means that the job has finished.
    ``is_preempted`` is set on SIGTERM.
    """
    from elastic.supervisor.memory_tier import MemoryTierProcess, record_stop
    from elastic.supervisor.supervisor import Supervisor, SupervisorSettings

    name = _candidate_name(task.node)
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

    def preempt() -> None:
        is_preempted.set()
        supervisor.drain(f"node {task.node} was preempted (SIGTERM)")

    handle_signals(
        {
            signal.SIGTERM: preempt,
            signal.SIGINT: lambda: supervisor.kill("interrupted"),
            signal.SIGUSR1: lambda: supervisor.kill("the job has finished", ExitReason.FINISHED),
        }
    )
    starting = threading.Thread(target=agent.start, args=(supervisor.leave,), name="elastic-agent", daemon=True)
    if task.starts_agent:
        starting.start()
    if task.coordinator_node:
        threading.Thread(
            target=_watch_allocation, args=(task, supervisor, ended), name="elastic-allocation", daemon=True
        ).start()
    if task.joined_run:
        threading.Thread(
            target=_watch_joined_run, args=(task, secret, supervisor, ended), name="elastic-run", daemon=True
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
        log.warning("the checkpoints remain in %s for the next run of the job", agent.kept_directory)
    return over, reason


def _watch_allocation(task: SupervisorSpec, supervisor: Supervisor, ended: threading.Event) -> None:
    """End the job when Slurm has taken the coordinator's machine.

    No other node would restart the coordinator. Slurm is queried only while the coordinator does not answer.
    """
    from elastic.schedulers.slurm import remaining_nodes

    while not ended.wait(_POLL_S):
        left = remaining_nodes(task.scheduled_job) if supervisor.alone_s > _POLL_S else ()
        if left and task.coordinator_node not in left:
            job = f"job {task.scheduled_job}"
            supervisor.kill(
                f"Slurm has taken {task.coordinator_node}, the coordinator's, from {job}", ExitReason.JOB_FAILED
            )
            return


def _watch_joined_run(task: SupervisorSpec, secret: bytes, supervisor: Supervisor, ended: threading.Event) -> None:
    """End this node's part once the run that it joined has ended, or another run of the job has begun.

    Such a run cannot tell the node that it has ended if its coordinator was lost.
    """
    place, joined_at = RunDirectory(Path(task.joined_run), task.job), time.time()
    while not ended.wait(_JOINED_POLL_S):
        if supervisor.alone_s < _JOINED_POLL_S or place.is_run(task.coordinator, secret):
            continue
        last = newest_last_run(place.root, task.job)
        finished = last is not None and last.ended_at > joined_at and last.how == ExitReason.FINISHED.value
        how = f" ({last.how})" if last is not None and last.ended_at > joined_at else ""
        over = ExitReason.FINISHED if finished else ExitReason.JOB_FAILED
        supervisor.kill(f"the run that this node joined has ended{how}", over)
        return


_JOINED_POLL_S = 2.0
_START_S = 30.0
_RESTARTS = 5
_WITHIN_S = 60.0
_RETRY_S = 0.2
_REPORT_S = 5.0
"""Seconds to report an ended supervisor. After that the coordinator has missed its heartbeats."""
_DISCONNECTED_S = 5.0
"""Seconds after a node's exit timeout. A node that still runs then has missed the end of the job."""
INTERRUPTED = 130


class JobLauncher:
    """Parent of the coordinator and the supervisors on this machine. Runs on the main thread.

    ``coordinator`` is ``None`` if the job's coordinator runs on another machine.
    """

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
        """``notices``: every machine of the job receives each signal, and SIGUSR1 announces the job's end."""
        self._nodes = nodes
        self._coordinator = coordinator
        self._secret = secret
        self._grace_s = grace_s
        self._notices = notices
        self.noticed = False
        """Whether SIGUSR1 has announced the end of the job."""
        self._on_address = on_address
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, ChildProcess] = {}
        self._statuses: dict[str, int] = {}
        self.killed_nodes: set[str] = set()
        """Nodes whose supervisor crashed or was killed."""
        self._coordinator_process: ChildProcess | None = None
        self._coordinator_status: int | None = None
        """Exit status of the coordinator, ``None`` while it runs."""
        self._due_at: float | None = None
        """Monotonic time by which the supervisors end without another signal, ``None`` while the job runs."""
        self._has_signaled_end = False
        self._restarts: collections.deque[float] = collections.deque()
        self._memory_files: list[int] = []
        """Memory files for the coordinators. A directory may become full or unreadable during the job."""
        self._address = nodes[0].coordinator if nodes else ""
        self._interrupts = 0
        self._requests: list[threading.Thread] = []
        self._ending = threading.Event()

    def run(self) -> int:
        """Run until the job, or these nodes' part in it, has ended, and return the exit status."""
        before = {number: signal.signal(number, self._queue_signal) for number in _SIGNALS}
        try:
            if self._coordinator is not None:
                note = self._memory_file("elastic-epoch")  # a restarted coordinator reads the newest world's number
                secret = self._memory_file("elastic-secret", self._secret)
                self._coordinator = msgspec.structs.replace(self._coordinator, epoch_file=note, secret_file=secret)
                self._start_coordinator(self._coordinator)
                self._address = self._wait_address(self._coordinator)
            self._on_address(self._address)
            for task in self._nodes:
                self._start(msgspec.structs.replace(task, coordinator=self._address))
            while not self._is_done():
                self._handle_next()
            return self._exit_status()
        finally:
            self._kill_all()
            for descriptor in self._memory_files:
                os.close(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _memory_file(self, name: str, content: bytes = b"") -> str:
        """Return the path of a private memory file that exists as long as this process."""
        self._memory_files.append(os.memfd_create(name, os.MFD_CLOEXEC))
        os.fchmod(self._memory_files[-1], 0o600)
        os.write(self._memory_files[-1], content)
        return f"/proc/{os.getpid()}/fd/{self._memory_files[-1]}"

    # -- processes ----------------------------------------------------------------------------------------------------

    def _start(self, task: SupervisorSpec) -> None:
        self._running[task.node] = ChildProcess(
            spec_command(task),
            environ=child_environ(task.environ),
            on_line=None,
            on_exit=lambda status: self._inbox.put(partial(self._on_node_exit, task.node, status)),
            name=task.node,
        )

    def _start_coordinator(self, task: CoordinatorSpec) -> None:
        self._coordinator_process = ChildProcess(
            spec_command(task),
            environ=child_environ(),
            on_line=None,
            on_exit=lambda status: self._inbox.put(partial(self._on_coordinator_exit, status)),
            name="coordinator",
        )

    def _wait_address(self, task: CoordinatorSpec) -> str:
        clock = RunningClock(1.0)
        path, deadline = Path(task.address_file), clock() + _START_S
        while not path.exists():
            if self._coordinator_status is not None or clock() > deadline or self._interrupts:
                raise ControlPlaneUnavailableError(f"the coordinator did not start on {task.listen}")
            self._handle_next()
        return path.read_text()

    def _on_node_exit(self, node: str, status: int) -> None:
        del self._running[node]
        self._statuses[node] = status
        if status not in (*EXIT_STATUS.values(), *(task.preempted_status for task in self._nodes)):
            self.killed_nodes.add(node)
            log.warning("the supervisor of node %s is gone: %s", node, describe_exit(status))
            self._request(SupervisorExited(node), _REPORT_S)

    def _on_coordinator_exit(self, status: int) -> None:
        """Restart the coordinator on its old address.

        Ranks continue meanwhile, and nodes report the job's state to the new coordinator.
        """
        self._coordinator_process = None
        if status in EXIT_STATUS.values() or self._coordinator is None or not self._address or self._ending.is_set():
            self._coordinator_status = status
            self._due_at = time.monotonic() + self._exit_timeout_s
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
        self._start_coordinator(msgspec.structs.replace(self._coordinator, fresh=False, listen=f"{host}:{port}"))

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _handle_next(self) -> None:
        try:
            happened = self._inbox.get(timeout=_RETRY_S)
        except queue.Empty:
            self._end_late_supervisors()
            return
        happened()

    def _end_late_supervisors(self) -> None:
        """End the supervisors that run long after the end of the job, or of this machine's part in it.

        A supervisor without a connection has missed the end, and reacts to a signal. A stopped one is killed.
        """
        if self._due_at is None or time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + self._exit_timeout_s
        for node, running in self._running.items():
            if self._has_signaled_end:
                log.warning("the supervisor of node %s does not exit, and is killed", node)
                running.signal(signal.SIGKILL)
            else:
                running.signal(signal.SIGUSR1 if self._coordinator_status == 0 else signal.SIGINT)
        self._has_signaled_end = True

    @property
    def _exit_timeout_s(self) -> float:
        return max((task.exit_timeout_s for task in self._nodes), default=0.0) + _DISCONNECTED_S

    def _is_done(self) -> bool:
        if self._coordinator is None:
            return not self._running
        return self._coordinator_status is not None and not self._running

    def _exit_status(self) -> int:
        if self._interrupts > 1:
            return INTERRUPTED
        if self._coordinator_status is not None:
            return self._coordinator_status
        bad = [status for status in self._statuses.values() if status]
        return bad[0] if bad and bad[0] > 0 else int(bool(bad))

    def _kill_all(self) -> None:
        self._ending.set()
        for running in [
            *self._running.values(),
            *([self._coordinator_process] if self._coordinator_process is not None else []),
        ]:
            running.signal(signal.SIGKILL)
            running.join()
        for thread in self._requests:
            thread.join()

    # -- signals ------------------------------------------------------------------------------------------------------

    def _queue_signal(self, number: int, _frame: Any) -> None:
        self._inbox.put(partial(self._handle_signal, signal.Signals(number)))

    def _handle_signal(self, number: signal.Signals) -> None:
        if number is signal.SIGUSR1 and not self._notices:
            self._request(ResizeRequest(None, "SIGUSR1"), 1.0)
            return
        self.noticed |= number is signal.SIGUSR1
        self._interrupts += number is signal.SIGINT
        if self._coordinator is None and self._due_at is None:
            self._due_at = time.monotonic() + self._grace_s + self._exit_timeout_s
        if self._interrupts > 1:
            self._print("ended at once")
            self._ending.set()
            for running in self._running.values():
                running.signal(signal.SIGKILL)
            if self._coordinator_process is not None:
                self._coordinator_process.signal(signal.SIGKILL)
        elif self._coordinator is None and not self._notices:
            for running in self._running.values():
                running.signal(signal.SIGTERM)
        else:
            self._print(f"{number.name}: the ranks seal and end within {self._grace_s:g} s")
            self._request(
                StopJobRequest(number.name, self._grace_s), self._grace_s, partial(self._fail_stop, number.name)
            )

    def _fail_stop(self, name: str) -> None:
        """End the job at once if the coordinator runs: only it can agree with all ranks on a last step."""
        if self._coordinator is not None and self._coordinator_status is None:
            raise JobFailedError(f"the coordinator did not answer {name}, so the ranks end without a common last step")

    def _request(
        self, question: CoordinatorRequest, within_s: float, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        """Send a request in a thread, with retries while the coordinator restarts."""

        def run() -> None:
            deadline = time.monotonic() + within_s
            while not self._ending.is_set():
                try:
                    call_coordinator(self._address, question, job=self._nodes[0].job, secret=self._secret)
                    return
                except ElasticError as error:
                    if time.monotonic() > deadline:
                        log.warning("the coordinator did not receive %s: %s", question, error)
                        self._inbox.put(on_failure)
                        return
                self._ending.wait(_RETRY_S)

        thread = threading.Thread(target=run, name="elastic-ask", daemon=True)
        self._requests.append(thread)
        thread.start()

    def _print(self, text: str) -> None:
        print(f"elastic: {text}", file=sys.stderr, flush=True)


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
