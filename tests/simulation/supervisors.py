"""Simulated supervisors of a large job that connect to a real coordinator process.

``python -m tests.simulation.supervisors --nodes 2000`` prints the seconds from a lost node to a decision, and the
coordinator's use of processor and memory. One process simulates all supervisors, without rank processes. Simulated
ranks complete a step per second, and are ready at once when a world breaks.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import os
import queue
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from elastic.control.control_messages import NodeCodec, NodeStatus
from elastic.control.control_plane import RankProgress
from elastic.control.coordinator_client import connect_to_coordinator
from elastic.control.epoch_state import EpochMessage
from elastic.launcher import CoordinatorSpec, child_environ, spec_command
from elastic.world.scaling_policy import ScalingPolicy
from peerstore.daemon_process import raise_open_file_limit
from peerstore.errors import PeerStoreError
from peerstore.membership.topology import validate_node_id
from peerstore.transport.framing import FRAME_MAGIC, FRAME_PREFIX, FRAME_VERSION

SECRET = b"a secret of the simulation, long enough"
HEARTBEAT_S = 1.0
_JOB = "simulated"
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Figures:
    """The measurements of one run."""

    nodes: int
    nproc: int
    join_s: float = 0.0
    """Seconds from the start until all nodes have received the first world."""
    steady_cores: float = 0.0
    """Cores that the coordinator used while the nodes only sent heartbeats."""
    busy_cores: float = 0.0
    """Cores that the coordinator used during the losses and the worlds that followed."""
    peak_bytes: int = 0
    reconnects: int = 0
    """Connections that the coordinator closed."""
    broken_s: list[float] = field(default_factory=list)
    """Seconds from a node's disconnect to each surviving node's notice of the loss."""
    formed_s: list[float] = field(default_factory=list)
    """Seconds from a node's disconnect to each surviving node's notice of the next world."""

    def __str__(self) -> str:
        return (
            f"{self.nodes} nodes x {self.nproc} ranks (simulated supervisors): "
            f"lost node decided p50 {quantile(self.broken_s, 0.5):.3f} s, p99 {quantile(self.broken_s, 0.99):.3f} s; "
            f"next world p50 {quantile(self.formed_s, 0.5):.3f} s, p99 {quantile(self.formed_s, 0.99):.3f} s; "
            f"first world in {self.join_s:.1f} s; coordinator: {self.steady_cores:.2f} cores at rest, "
            f"{self.busy_cores:.2f} during the losses, {self.peak_bytes / 2**20:.0f} MiB, "
            f"{self.reconnects} connections closed"
        )


def quantile(values: list[float], share: float) -> float:
    """Return the value that this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class SimulatedSupervisor:
    """The supervisor of one node: its status and its connection."""

    def __init__(self, number: int, nproc: int) -> None:
        self.name = f"ip-10-{number >> 16}-{number >> 8 & 255}-{number & 255}.cluster.local"
        self.status = NodeStatus(
            0, self.name, 1, nproc, spawn_count=nproc, ready=True, rank_progress=(RankProgress(-1),) * nproc
        )
        self.quiet_s = (0.1,) * nproc
        self.received = bytearray()
        self.unsent = b""
        self.sock: socket.socket | None = None
        self.end = NodeCodec()

    @property
    def epoch(self) -> int:
        return -1 if self.status.world is None else self.status.world.epoch

    @property
    def is_inside(self) -> bool:
        return self.status.world is not None and self.status.epoch_state.broken is None

    def connected(self, sock: socket.socket) -> None:
        self.sock, self.unsent, self.end = sock, b"", NodeCodec()
        self.received.clear()

    def advance_second(self) -> None:
        """Update the status once a second: silence, and one more step while in a world."""
        self.status = msgspec.structs.replace(self.status, silent_s=self.quiet_s)
        if self.is_inside:
            step = 1 + (self.status.rank_progress[0].step if self.status.rank_progress[0] is not None else -1)
            self.status = msgspec.structs.replace(
                self.status, rank_progress=(RankProgress(step, step - 1),) * self.status.local_ranks
            )

    def report(self) -> bytes:
        self.status = msgspec.structs.replace(self.status, number=self.status.number + 1)
        body = self.end.encode(self.status)
        return FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION, len(body), 0) + body

    def receive(self, body: bytes) -> bool:
        """Apply a message of the coordinator, and return whether the status has changed."""
        desired, before = self.end.decode(body), self.status
        was_broken = before.epoch_state.broken is not None
        formed = desired.world
        if formed is not None and formed is not before.world and formed.epoch > self.epoch:
            self.status = msgspec.structs.replace(self.status, world=formed, epoch_state=EpochMessage(), ready=False)
        elif desired.epoch_state.broken is not None and not was_broken and formed is before.world:
            self.status = msgspec.structs.replace(self.status, epoch_state=desired.epoch_state, ready=True)
        if desired.coordinator != before.coordinator:
            self.status = msgspec.structs.replace(self.status, coordinator=desired.coordinator)
        return before.world is not self.status.world or before.epoch_state != self.status.epoch_state


class SupervisorCrowd:
    """All nodes of a job in one loop over their sockets.

    A node reconnects when the coordinator closes its connection.
    """

    def __init__(self, address: str, count: int, nproc: int) -> None:
        self._address = address
        self.nodes = [SimulatedSupervisor(number, nproc) for number in range(count)]
        self.reconnects = 0
        self._selector = selectors.DefaultSelector()
        self._beats: list[tuple[float, int]] = []
        self._arrived: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        self._ended = False
        # All nodes connect from one address, of which a listener accepts only a few unauthenticated connections.
        self._pool = ThreadPoolExecutor(8)
        for number in range(count):
            self._pool.submit(self._connect, number)

    def _connect(self, number: int) -> None:
        """Connect one node, on a thread of the pool."""
        while not self._ended:
            try:
                channel = connect_to_coordinator(
                    self._address, job=_JOB, me=validate_node_id(self.nodes[number].name), secret=SECRET
                )
            except PeerStoreError:
                time.sleep(0.05)
                continue
            theirs = channel._stream._sock  # type: ignore[attr-defined]
            self._arrived.put((number, theirs.dup()))
            channel._stream.close()  # type: ignore[attr-defined]
            return

    def _accept_connections(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                number, sock = self._arrived.get_nowait()
                sock.setblocking(False)
                node = self.nodes[number]
                node.connected(sock)
                self._selector.register(sock, selectors.EVENT_READ, node)
                self._send_report(node)
                heapq.heappush(self._beats, (time.monotonic() + HEARTBEAT_S, number))

    def _reconnect(self, node: SimulatedSupervisor) -> None:
        self.reconnects += 1
        self.lose(node)
        self._pool.submit(self._connect, self.nodes.index(node))

    def lose(self, node: SimulatedSupervisor) -> None:
        assert node.sock is not None
        self._selector.unregister(node.sock)
        node.sock.close()
        node.sock = None

    def close(self) -> None:
        self._ended = True
        self._pool.shutdown(cancel_futures=True)
        self._accept_connections()
        for node in self.nodes:
            if node.sock is not None:
                node.sock.close()
        self._selector.close()

    def run_turn(self, until: float) -> list[SimulatedSupervisor]:
        """Send due reports, read messages, and return the nodes whose status has changed."""
        self._accept_connections()
        now = time.monotonic()
        while self._beats and self._beats[0][0] <= now:
            due, number = heapq.heappop(self._beats)
            node = self.nodes[number]
            if node.sock is not None:
                node.advance_second()
                self._send_report(node)
                heapq.heappush(self._beats, (max(now, due + HEARTBEAT_S), number))
        wait_s = max(0.0, min(until, self._beats[0][0] if self._beats else until) - now)
        return list(self._ready(wait_s))

    def _ready(self, wait_s: float) -> Iterator[SimulatedSupervisor]:
        for key, events in self._selector.select(wait_s):
            node: SimulatedSupervisor = key.data
            if node.sock is None:
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(node)
            if events & selectors.EVENT_READ and self._read(node):
                self._send_report(node)
                yield node

    def _read(self, node: SimulatedSupervisor) -> bool:
        assert node.sock is not None
        data = b""
        with contextlib.suppress(OSError):
            data = node.sock.recv(1 << 18)
        if not data:
            self._reconnect(node)
            return False
        node.received += data
        changed = False
        while len(node.received) >= FRAME_PREFIX.size:
            _, _, size, _ = FRAME_PREFIX.unpack_from(node.received)
            if len(node.received) < FRAME_PREFIX.size + size:
                break
            body = bytes(node.received[FRAME_PREFIX.size : FRAME_PREFIX.size + size])
            del node.received[: FRAME_PREFIX.size + size]
            changed |= node.receive(body)
        return changed

    def _send_report(self, node: SimulatedSupervisor) -> None:
        node.unsent += node.report()
        self._flush(node)

    def _flush(self, node: SimulatedSupervisor) -> None:
        assert node.sock is not None
        with contextlib.suppress(OSError):
            node.unsent = node.unsent[node.sock.send(node.unsent) :]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if node.unsent else 0)
        self._selector.modify(node.sock, events, node)


@contextlib.contextmanager
def coordinator(nodes: int, nproc: int) -> Iterator[tuple[str, int]]:
    """Start a coordinator process as ``elastic run`` does, and yield its address and process ID."""
    policy = ScalingPolicy(
        min_replicas=1,
        max_replicas=nodes,
        scaling_timeout_s=3600.0,
        faulty_scale_down_timeout_s=0.0,
        num_restart_before_full_job_restart=None,
        max_num_repeat_offenders_to_avoid=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "secret").write_bytes(SECRET)
        (place / "secret").chmod(0o600)
        task = CoordinatorSpec(
            job=_JOB,
            secret_file=str(place / "secret"),
            listen="127.0.0.1:0",
            policy=policy,
            nproc=nproc,
            fresh=True,
            store="127.0.0.1:1",
            address_file=str(place / "address"),
            epoch_file=str(place / "epoch"),
            heartbeat_timeout_s=60.0,
            reconnect_timeout_s=0.0,
        )
        process = subprocess.Popen(spec_command(task), env=child_environ(), stdin=subprocess.DEVNULL)
        try:
            while not (place / "address").exists() or not (place / "address").read_text():
                if process.poll() is not None:
                    raise RuntimeError(f"the coordinator ended with {process.returncode}")
                time.sleep(0.01)
            yield (place / "address").read_text(), process.pid
        finally:
            process.terminate()
            process.wait()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def peak_bytes(pid: int) -> int:
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def measure(nodes: int, *, nproc: int = 8, losses: int = 5, rest_s: float = 10.0, patience_s: float = 120.0) -> Figures:
    """Measure a world of ``nodes`` nodes that loses nodes, with one spare node for each loss."""
    figures = Figures(nodes, nproc)
    with (
        coordinator(nodes, nproc) as (address, pid),
        contextlib.closing(SupervisorCrowd(address, nodes + losses, nproc)) as crowd,
    ):
        began = time.monotonic()
        _run_until(crowd, lambda: sum(node.is_inside for node in crowd.nodes) == nodes, patience_s)
        figures.join_s = time.monotonic() - began
        _run_for(crowd, 2.0)
        used, since = cpu_s(pid), time.monotonic()
        _run_for(crowd, rest_s)
        figures.steady_cores = (cpu_s(pid) - used) / (time.monotonic() - since)
        used, since = cpu_s(pid), time.monotonic()
        for number in range(losses):
            inside = [node for node in crowd.nodes if node.sock is not None and node.is_inside]
            _lose_node(crowd, inside[(number * 7919) % len(inside)], inside, figures, patience_s)
            _run_for(crowd, 1.0)
        figures.busy_cores = (cpu_s(pid) - used) / (time.monotonic() - since)
        figures.peak_bytes, figures.reconnects = peak_bytes(pid), crowd.reconnects
    return figures


def _lose_node(
    crowd: SupervisorCrowd,
    lost: SimulatedSupervisor,
    inside: list[SimulatedSupervisor],
    figures: Figures,
    patience_s: float,
) -> None:
    epoch, began = lost.epoch, time.monotonic()
    unbroken = {node.name for node in inside if node is not lost}
    unformed = set(unbroken)
    crowd.lose(lost)
    while unformed:
        if time.monotonic() - began > patience_s:
            raise RuntimeError(
                f"{len(unbroken)} nodes did not receive the loss, and {len(unformed)} did not receive the next world, "
                f"within {patience_s:g} s."
            )
        for node in crowd.run_turn(time.monotonic() + 0.1):
            took_s = time.monotonic() - began
            if node.name in unbroken and (not node.is_inside or node.epoch > epoch):
                unbroken.discard(node.name)
                figures.broken_s.append(took_s)
            if node.name in unformed and node.epoch > epoch:
                unformed.discard(node.name)
                figures.formed_s.append(took_s)


def _run_until(crowd: SupervisorCrowd, happened, patience_s: float) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + patience_s
    while not happened():
        if time.monotonic() > until:
            raise RuntimeError(
                f"Some nodes were not in the first world within {patience_s:g} s. The coordinator closed "
                f"{crowd.reconnects} connections."
            )
        for _ in crowd.run_turn(time.monotonic() + 0.1):
            pass


def _run_for(crowd: SupervisorCrowd, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in crowd.run_turn(until):
            pass


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100])
    parser.add_argument("--nproc", type=int, default=8)
    parser.add_argument("--losses", type=int, default=5)
    parser.add_argument("--rest", type=float, default=10.0)
    parser.add_argument("--patience", type=float, default=120.0)
    given = parser.parse_args(words)
    raise_open_file_limit()
    for nodes in given.nodes:
        print(measure(nodes, nproc=given.nproc, losses=given.losses, rest_s=given.rest, patience_s=given.patience))
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
