"""The processes of a job beside its ranks, and how they are started: ``python -m elastic.control TASK``.

A task is JSON on the command line. Secrets are in files that only this user can read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from elastic.control.messages import Over
from elastic.control.movement import HangLimits
from elastic.control.processes import importable, module
from elastic.control.runs import write_private
from elastic.world.policy import ScalingPolicy
from peerstore.decode import from_json
from peerstore.descriptors import raise_limit
from peerstore.signals import heed
from peerstore.transport.secret import read_secret

STATUS = {Over.FINISHED: 0, Over.DISMISSED: 0, Over.REFUSED: 6, Over.STOPPED: 7, Over.GAVE_UP: 8}
"""The exit status of these processes; any other was not meant to be."""

log = logging.getLogger(__name__)

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
        settings, secret, listen=task.listen, fresh=task.fresh, epoch_file=epoch_file, ledger=ledger
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


def supervise(task: NodeTask, secret: bytes) -> tuple[Over, str]:
    """Be a node's supervisor. SIGTERM: this machine is asked back. SIGINT: end now. SIGUSR1: the job has finished."""
    from elastic.control.node_agent import NodeAgent
    from elastic.control.supervisor import Supervisor, SupervisorSettings

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
    over, reason = supervisor.run()
    if task.agent:
        starting.join()
    if over is Over.FINISHED:
        agent.end()
    elif agent.stays is not None:
        log.warning("what is in memory stays in %s, for whoever resumes the job", agent.stays)
    return over, reason
