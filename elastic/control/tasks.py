"""The processes of a job beside its ranks, and how they are started: ``python -m elastic.control TASK``.

A task is JSON on the command line. Secrets are in files that only this user can read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from elastic.control.leadership import leadership_at
from elastic.control.messages import Over
from elastic.control.movement import HangLimits
from elastic.control.processes import importable, module
from elastic.control.runs import write_private
from elastic.world.policy import ScalingPolicy
from peerstore.decode import from_json
from peerstore.descriptors import raise_limit
from peerstore.signals import heed
from peerstore.transport.secret import read_secret

if TYPE_CHECKING:
    from elastic.control.supervisor import Supervisor

STATUS = {Over.FINISHED: 0, Over.DISMISSED: 0, Over.REFUSED: 6, Over.STOPPED: 7, Over.GAVE_UP: 8}
"""The exit status of these processes; any other was not meant to be."""

log = logging.getLogger(__name__)

_LOOK_S = 10.0
_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class CoordinatorTask(msgspec.Struct, frozen=True, tag="coordinator"):
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
    dead_after_s: float = 10.0
    return_s: float = 2.0
    gather_s: float = 5.0
    hang: HangLimits = HangLimits()
    ledger: str = ""
    """Where it writes down what happens; "" where the environment says so, or nowhere."""
    leadership: str = ""
    """The URL of where it is noted who leads: it begins when it does."""
    candidate: str = ""
    """This candidate's name there; no other one has it at the same time."""
    since_term: int = 0
    """A term in which its node has obeyed a coordinator."""
    stands_by: bool = False
    """It stays while another one leads."""
    verbose: int = 0


class NodeTask(msgspec.Struct, frozen=True, tag="node"):
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
    grace_s: float
    end_s: float = 10.0
    heartbeat_s: float = 1.0
    agent: bool = True
    environ: dict[str, str] = {}
    beside: bool = False
    """Its coordinator is beside it, and says itself how the job ended."""
    lead: CoordinatorTask | None = None
    """The coordinator that this node starts where nobody leads the job."""
    coordinator_node: str = ""
    scheduled_job: str = ""
    """The job of Slurm's that both nodes were given to, where that is so."""
    verbose: int = 0


def command_of(task: CoordinatorTask | NodeTask) -> list[str]:
    return module("elastic.control", msgspec.json.encode(task).decode())


def environ_for(more: dict[str, str] | None = None) -> dict[str, str]:
    return {**importable(os.environ), **(more or {})}


def environ_of(task: NodeTask) -> dict[str, str]:
    """What its supervisor is started with."""
    return environ_for(task.environ)


def main(text: str) -> int:
    """Carry out one task; its status."""
    task: CoordinatorTask | NodeTask = from_json(text, CoordinatorTask | NodeTask)
    logging.basicConfig(level=_LEVELS[min(task.verbose, 2)], format="elastic: %(message)s", stream=sys.stderr)
    secret = read_secret(Path(task.secret_file))
    over, reason = coordinate(task, secret) if isinstance(task, CoordinatorTask) else supervise(task, secret)
    if over not in (Over.FINISHED, Over.DISMISSED):
        words = reason if reason.startswith(over.value) else f"{over.value}: {reason}"
        if isinstance(task, CoordinatorTask) and task.end_file:
            try:
                write_private(Path(task.end_file), words.encode())
            except OSError as error:  # a full disk: they are said here, then
                log.warning("%s (%s cannot be written: %s)", one_line(words), task.end_file, error)
        elif isinstance(task, CoordinatorTask) or not task.beside or over is Over.REFUSED:
            log.warning("%s", one_line(words))
    return STATUS[over]


def coordinate(task: CoordinatorTask, secret: bytes) -> tuple[Over, str]:
    """Be a job's coordinator until the job is over, or SIGTERM; see :func:`one_line`."""
    from elastic.control.coordinator import Coordinator, has_room
    from elastic.control.desk import DeskSettings
    from elastic.control.recording import WHO
    from tieredckpt.ledger import LedgerWriter, ledger_from_environ

    raise_limit()
    settings = DeskSettings(
        task.job, task.policy, task.nproc, task.store, task.dead_after_s, task.return_s, task.gather_s, task.hang
    )
    epoch_file = Path(task.epoch_file) if task.epoch_file else None
    if epoch_file is not None and not has_room(epoch_file):
        epoch_file = None
    ledger = LedgerWriter(task.ledger, name=WHO) if task.ledger else ledger_from_environ()
    coordinator = Coordinator(
        settings,
        secret,
        listen=task.listen,
        fresh=task.fresh,
        epoch_file=epoch_file,
        ledger=ledger,
        leadership=leadership_at(task.leadership) if task.leadership else None,
        candidate=task.candidate or _name_of_candidate(socket.gethostname()),
        since_term=task.since_term,
        stands_by=task.stands_by,
    )
    heed({signal.SIGTERM: coordinator.end, signal.SIGINT: coordinator.end})
    log.info("the coordinator of job %s listens on %s", task.job, coordinator.address)
    if task.address_file and task.fresh:  # one that is started again listens where the one before it did
        write_private(Path(task.address_file), coordinator.address.encode())
    over, reason = coordinator.run()
    if task.epoch_file and over is not Over.REFUSED and coordinator.desk.over is not None:
        with contextlib.suppress(OSError):  # the next job of that name begins with a world 0
            os.truncate(task.epoch_file, 0)
    if over in (Over.STOPPED, Over.GAVE_UP):
        reason = f"{reason}\n{coordinator.whole}"
    return over, reason


def one_line(words: str, resumable: str = "") -> str:
    """What :func:`coordinate` says: its second line is of steps, as ranks have said; agents may know of a newer one."""
    why, _, said = words.partition("\n")
    if not why:
        return resumable or said
    return f"{why} ({resumable or said})" if resumable or said else why


def _name_of_candidate(where: str) -> str:
    return f"{where}-{secrets.token_hex(4)}"


def _candidate(lead: CoordinatorTask, name: str) -> Callable[[int], Sequence[str]]:
    return lambda term: command_of(msgspec.structs.replace(lead, candidate=name, since_term=term))


def supervise(task: NodeTask, secret: bytes) -> tuple[Over, str]:
    """Be a node's supervisor. SIGTERM: this machine is asked back. SIGINT: end now. SIGUSR1: the job has finished."""
    from elastic.control.node_agent import NodeAgent
    from elastic.control.supervisor import Supervisor, SupervisorSettings

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
        grace_s=task.grace_s,
        end_s=task.end_s,
        heartbeat_s=task.heartbeat_s,
        environ=task.environ,
        candidate=None if task.lead is None else _candidate(task.lead, name),
        candidate_name=name,
    )
    agent = NodeAgent({**os.environ, **task.environ}, settings.directory.parent)
    supervisor = Supervisor(settings, secret, terminal=sys.stdout.buffer, cutting=agent.cut_off)
    heed(
        {
            signal.SIGTERM: lambda: supervisor.ask_back(f"node {task.node} was asked back (SIGTERM)"),
            signal.SIGINT: lambda: supervisor.kill("interrupted"),
            signal.SIGUSR1: lambda: supervisor.kill("the job has finished", Over.FINISHED),
        }
    )
    starting = threading.Thread(target=agent.start, name="elastic-agent", daemon=True)
    if task.agent:
        starting.start()
    ended = threading.Event()
    if task.coordinator_node:
        threading.Thread(
            target=_look_after_coordinator, args=(task, supervisor, ended), name="elastic-allocation", daemon=True
        ).start()
    over, reason = supervisor.run()
    ended.set()
    if task.agent:
        starting.join()
    if over is Over.FINISHED:
        agent.end()
    elif agent.stays is not None:
        log.warning("what is in memory stays in %s, for whoever resumes the job", agent.stays)
    return over, reason


def _look_after_coordinator(task: NodeTask, supervisor: Supervisor, ended: threading.Event) -> None:
    """Nobody starts a coordinator again whose machine is not the job's any more. Asked only when it is missed."""
    from elastic.schedulers.slurm_commands import nodes_left

    while not ended.wait(_LOOK_S):
        left = nodes_left(task.scheduled_job) if supervisor.alone_s > _LOOK_S else ()
        if left and task.coordinator_node not in left:
            job = f"job {task.scheduled_job}"
            supervisor.kill(f"Slurm has taken {task.coordinator_node}, the coordinator's, from {job}", Over.GAVE_UP)
            return
