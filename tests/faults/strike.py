"""The effect of each kind of fault on a job, its target, and its end."""

from __future__ import annotations

import errno
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic.cli.job_control import with_unique_name
from elastic.control.control_messages import InjectRequest, ResizeRequest
from elastic.fault_injection.fault_spec import FaultInjection
from elastic.fault_injection.fault_spec import InjectionKind as Injected
from peerstore.store.arena import TmpfsArena
from peerstore.store.slot_metadata import SEAL_METADATA
from tests.faults.hosts import HEAD, HostJob
from tests.faults.job import FaultJob, JobProcess
from tests.faults.judge import AppliedFault
from tests.faults.schedule import FaultKind, PlannedFault
from tests.support.fault_proxy import FaultProxy
from tests.support.faults import Hang, ReplyWithStatus
from tests.support.http_exchange import Exchange

Undo = Callable[[], object]
_LONG = 1_000_000
_CLOCK_JUMPS_S = (-3600, -30, -2, 2, 30, 3600)
_SIGNALS = {
    FaultKind.RANK_KILLED: signal.SIGKILL,
    FaultKind.RANK_STOPPED: signal.SIGSTOP,
    FaultKind.RANK_SEGFAULT: signal.SIGSEGV,
    FaultKind.SPARE_KILLED: signal.SIGKILL,
    FaultKind.SPARE_STOPPED: signal.SIGSTOP,
    FaultKind.SUPERVISOR_KILLED: signal.SIGKILL,
    FaultKind.SUPERVISOR_STOPPED: signal.SIGSTOP,
    FaultKind.COORDINATOR_KILLED: signal.SIGKILL,
    FaultKind.COORDINATOR_STOPPED: signal.SIGSTOP,
    FaultKind.AGENT_KILLED: signal.SIGKILL,
    FaultKind.AGENT_STOPPED: signal.SIGSTOP,
    FaultKind.STORE_KILLED: signal.SIGKILL,
    FaultKind.STORE_STOPPED: signal.SIGSTOP,
}
_ROLES = ("supervisor", "coordinator", "agent", "store")


class ActiveFault:
    """An applied fault, which ends when it is due or before the job ends."""

    def __init__(self, planned: PlannedFault, node: str, words: str, undo: Undo | None = None) -> None:
        self.kind, self.node, self.words, self.undo = planned.kind, node, words, undo
        self.at = time.time()
        self.due = self.at + planned.lasts_s if undo is not None else self.at
        self.ended = self.at if undo is None else math.inf

    def end(self) -> None:
        if self.undo is not None and self.ended == math.inf:
            self.undo()
            self.ended = time.time()

    def fault(self, number: int, run: int, step: int) -> AppliedFault:
        return AppliedFault(number, self.kind, self.at, min(self.ended, time.time()), self.node, self.words, run, step)


def apply_fault(job: FaultJob, planned: PlannedFault, proxy: FaultProxy | None) -> ActiveFault | None:
    """Apply a fault, or return ``None`` if it has no target."""
    kind = planned.kind
    if kind in _SIGNALS:
        return _signal(job, planned)
    if kind is FaultKind.RANK_OUT_OF_MEMORY:
        return _out_of_memory(job, planned)
    if kind is FaultKind.NODE_LOST:
        return _lose_node(job, planned)
    if kind is FaultKind.NODE_PAUSED:
        return _pause(job, planned)
    if kind is FaultKind.COORDINATOR_KILLED_TWICE:
        return _kill_coordinators(job, planned)
    if kind in (FaultKind.MEMORY_FLIPPED, FaultKind.MEMORY_TRUNCATED):
        return _damage_memory(job, planned)
    if kind is FaultKind.MEMORY_FULL:
        return _fill_memory(job, planned)
    if kind is FaultKind.CLOCK_SET:
        return _set_clock(job, planned)
    if kind is FaultKind.RESIZED:
        return _resize(job, planned)
    if kind is FaultKind.JOB_STOPPED:
        return _stop(job, planned)
    if proxy is not None and kind in _STORE:
        return _disturb_store(proxy, planned)
    return _apply_network_fault(job, planned)


def choose(many: Sequence[JobProcess], pick: float) -> JobProcess | None:
    ordered = sorted(many)
    return ordered[int(pick * len(ordered))] if ordered else None


def _signal(job: FaultJob, planned: PlannedFault) -> ActiveFault | None:
    kind, number = planned.kind, _SIGNALS[planned.kind]
    role = next((role for role in _ROLES if kind.value.startswith(role)), "rank")
    running = job.processes(role)
    if role == "rank":
        inside = job.newest_world_pids()
        running = [one for one in running if (one.pid in inside) is not kind.value.startswith("spare")]
    target = choose(running, planned.pick)
    if target is None or not target.signal(number):
        return None
    undo: Undo | None = None
    if number == signal.SIGSTOP:
        undo = _continue_or_kill(target, planned)
    elif role == "supervisor":
        undo = _return_later(job, target.node)
    return ActiveFault(planned, target.node, f"{role} {target.pid} of {target.node or 'the job'}", undo)


def _continue_or_kill(target: JobProcess, planned: PlannedFault) -> Undo:
    """Continue a stopped process, or kill it at the end of the job if it was stopped forever."""
    return lambda: target.signal(signal.SIGCONT if math.isfinite(planned.lasts_s) else signal.SIGKILL)


def _return_later(job: FaultJob, node: str) -> Undo:
    def back() -> None:
        if job.is_running and not job.processes("supervisor", node):
            job.join(node)

    return back


def _out_of_memory(job: FaultJob, planned: PlannedFault) -> ActiveFault | None:
    newest = [one for one in job.worlds if (one.run, one.epoch) == job.last_world]
    if not newest:
        return None
    rank = int(planned.pick * newest[0].size)
    if job.send_request(InjectRequest(with_unique_name(FaultInjection(kind=Injected.OOM, rank=rank)))) is None:
        return None
    return ActiveFault(planned, next((one.node for one in newest if one.rank == rank), ""), f"rank {rank}")


def _lose_node(job: FaultJob, planned: PlannedFault) -> ActiveFault | None:
    """Kill a node with its memory. It joins again later, empty."""
    if len(job.shape.names) == 1:
        return None
    target = choose(job.processes("supervisor"), planned.pick)
    if target is None:
        return None
    count = job.lose_node(target.node)
    return ActiveFault(planned, target.node, f"{target.node} with {count} processes", _return_later(job, target.node))


def _pause(job: FaultJob, planned: PlannedFault) -> ActiveFault | None:
    """Stop every process of a node, without a change to its memory."""
    target = choose(job.processes("supervisor"), planned.pick)
    if target is None:
        return None
    paused = [one for one in job.processes(node=target.node) if one.signal(signal.SIGSTOP)]
    words = f"{target.node} with {len(paused)} processes"
    return ActiveFault(planned, target.node, words, lambda: [one.signal(signal.SIGCONT) for one in paused])


def _kill_coordinators(job: FaultJob, planned: PlannedFault) -> ActiveFault | None:
    """Kill the coordinator and the process that replaces it within two seconds."""
    first = choose(job.processes("coordinator"), planned.pick)
    if first is None or not first.signal(signal.SIGKILL):
        return None
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        others = [one for one in job.processes("coordinator") if one.pid != first.pid]
        if others and others[0].signal(signal.SIGKILL):
            return ActiveFault(planned, first.node, f"coordinators {first.pid} and {others[0].pid}")
        time.sleep(0.01)
    return ActiveFault(planned, first.node, f"coordinator {first.pid}, which was not replaced within 2 s")


def _damage_memory(job: FaultJob, planned: PlannedFault) -> ActiveFault | None:
    """Damage half of the sealed slots of a node.

    The agent and the ranks are stopped meanwhile. A slot in progress gets its checksum later, which would hide damage.
    """
    agent = choose(job.processes("agent"), planned.pick)
    if agent is None:
        return None
    place = job.arena(agent.node)
    if not (place / "slots").is_dir():
        return None
    stopped = [one for one in job.processes(node=agent.node) if one.role in ("agent", "rank")]
    stopped = [one for one in stopped if one.signal(signal.SIGSTOP)]
    try:
        for one in stopped:
            _wait_stopped(one)
        sealed = sorted(name.removeprefix(SEAL_METADATA) for name in TmpfsArena(place).list_metadata(SEAL_METADATA))
        sealed = [name for name in sealed if (place / "slots" / name).is_file()]
        some = [name for number, name in enumerate(sealed) if (number + int(planned.other * 2)) % 2 == 0]
        for name in some:
            _corrupt_file(place / "slots" / name, planned)
    finally:
        for one in stopped:
            one.signal(signal.SIGCONT)
    return ActiveFault(planned, agent.node, f"{len(some)} of {len(sealed)} slots of {agent.node}") if some else None


def _wait_stopped(one: JobProcess) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            tasks = [path.read_text() for path in Path(f"/proc/{one.pid}/task").glob("*/stat")]
        except OSError:
            continue
        if all(text.rpartition(")")[2].split()[0] in "TXZ" for text in tasks):
            return
        time.sleep(0.005)


def _corrupt_file(path: Path, planned: PlannedFault) -> None:
    size = path.stat().st_size
    at = int(planned.other * size)
    if planned.kind is FaultKind.MEMORY_TRUNCATED:
        os.truncate(path, at)
        return
    with path.open("r+b", buffering=0) as file:
        for where in range(at % 4096, size, 4096):  # one bit of every page, because a shard does not fill its slot
            if not _has_page(file.fileno(), where):
                continue
            file.seek(where)
            byte = file.read(1)
            file.seek(where)
            file.write(bytes([byte[0] ^ 1]))


def _has_page(fd: int, where: int) -> bool:
    """Return whether the file has memory there. A full file system has none for a new page."""
    try:
        return os.lseek(fd, where, os.SEEK_DATA) == where
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False


def _fill_memory(job: FaultJob, planned: PlannedFault) -> ActiveFault | None:
    names = [name for name in job.shape.names if job.memory(name).is_mount()]
    if len(job.shape.names) == 1 or not names:
        return None
    node = names[int(planned.pick * len(names))]
    junk = job.memory(node) / "junk"
    try:
        with junk.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError:  # the memory is full
        pass
    return ActiveFault(planned, node, f"the memory of {node} is full", lambda: junk.unlink(missing_ok=True))


def _set_clock(job: FaultJob, planned: PlannedFault) -> ActiveFault:
    seconds = _CLOCK_JUMPS_S[int(planned.pick * len(_CLOCK_JUMPS_S))]

    def put(ahead: int) -> None:
        new = job.clock.with_suffix(".new")
        new.write_text(str(ahead))
        new.replace(job.clock)

    put(seconds)
    return ActiveFault(planned, "", f"the clock moved by {seconds} s", lambda: put(0))


def _resize(job: FaultJob, planned: PlannedFault) -> ActiveFault | None:
    nodes = 1 + int(planned.pick * job.shape.nodes)
    if job.send_request(ResizeRequest(nodes, "a random resize")) is None:
        return None
    return ActiveFault(planned, "", f"to {nodes} nodes")


def _stop(job: FaultJob, planned: PlannedFault) -> ActiveFault | None:
    return ActiveFault(planned, "", "SIGTERM to the command") if job.stop() else None


def _apply_network_fault(job: FaultJob, planned: PlannedFault) -> ActiveFault | None:
    """Cut the network between two hosts or around one host, including the coordinator's."""
    if not isinstance(job, HostJob):
        raise TypeError(f"The fault {planned.kind} needs a job on hosts.")
    hosts = sorted(job.net.hosts.values(), key=lambda host: host.name)
    one = hosts[int(planned.pick * len(hosts))]
    if planned.kind is FaultKind.UNPLUGGED:
        one.unplug()
        return ActiveFault(planned, _unreachable_nodes(one.name), f"{one.name} is off the network", one.plug)
    others = [host for host in hosts if host is not one]
    other = others[int(planned.other * len(others))]
    one_way = planned.kind is FaultKind.CUT_ONE_WAY
    job.net.cut(one, other, one_way=one_way)
    words = f"nothing from {one.name} arrives at {other.name}" if one_way else f"{one.name} and {other.name}"
    return ActiveFault(planned, _unreachable_nodes(one.name, other.name), words, lambda: job.net.heal(one, other))


def _unreachable_nodes(*names: str) -> str:
    """Return the nodes with unreachable memory: none for a cut from the head, which holds no shards."""
    return "" if HEAD in names else ",".join(names)


def _slow_network(exchange: Exchange) -> None:
    time.sleep(1.0)
    exchange.forward_unchanged()


_STORE = {
    FaultKind.DURABLE_SLOW: _slow_network,
    FaultKind.DURABLE_DEAD: Hang(),
    FaultKind.DURABLE_ERRORS: ReplyWithStatus(503, "SlowDown"),
}


def _disturb_store(proxy: FaultProxy, planned: PlannedFault) -> ActiveFault:
    for method in ("GET", "PUT", "POST", "HEAD", "DELETE"):
        proxy.add_rule(method, times=_LONG).fail(_STORE[planned.kind])
    return ActiveFault(planned, "", "every request", proxy.clear)
