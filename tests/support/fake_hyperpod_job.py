"""A HyperPod job in this process, over real sockets: one rank per node, simulated agents and operator.

The tests in ``tests/e2e/hyperpod`` use real agents and processes; this fake keeps the contract suite fast.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic.control.control_plane import ControlPlane, NoticeKind
from integration.hyperpod.elastic_agent import ipc
from integration.hyperpod.elastic_agent.in_process_mode import InProcessControlPlane
from integration.hyperpod.elastic_agent.ipc import AgentConnection, AgentMessage
from integration.hyperpod.elastic_agent.worker_client import AgentWorker
from tests.support import hyperpod_socket
from tests.support.hyperpod_socket import AgentListener
from tests.support.ports import free_port


@dataclass
class FakeNode:
    plane: InProcessControlPlane
    line: hyperpod_socket.WorkerConnection
    at_barrier: bool = False
    heard: list[AgentMessage] = field(default_factory=list)


class FakeHyperPodJob:
    """An operator that wants ``size`` nodes and restarts the job after any fault."""

    starts_anew, ends_leftovers, resize_is = False, True, NoticeKind.RESIZE

    def __init__(self, size: int, spares: int, stack: contextlib.ExitStack, grace_s: float = 60.0) -> None:
        self._size = size
        self._stack = stack
        self._grace_s = grace_s
        self._lock = threading.RLock()
        self._runs = False
        self._counted = 0
        self.nodes: list[FakeNode] = []
        self.listener: AgentListener = stack.enter_context(hyperpod_socket.agent_listener())
        self.planes = [self._node() for _ in range(size + spares)]

    def _node(self) -> InProcessControlPlane:
        environ = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        connection = AgentConnection(self.listener.path, 0)
        plane = InProcessControlPlane(AgentWorker(connection), environ=environ)
        node = FakeNode(plane, self.listener.accept())
        self.nodes.append(node)
        thread = threading.Thread(target=self._receive_messages, args=(node,), daemon=True)
        thread.start()

        def end() -> None:
            plane.close()
            connection.close()
            thread.join()

        self._stack.callback(end)
        return plane

    # -- Job ----------------------------------------------------------------------------------------------------------

    def add_rank(self) -> ControlPlane:
        self.planes.append(self._node())
        return self.planes[-1]

    def resize(self, nodes: int) -> None:
        with self._lock:
            self._size = nodes
        self._any_inside().request_change(NoticeKind.RESIZE, "resized", deadline_s=self._grace_s)

    def stop(self) -> None:
        self._any_inside().request_change(NoticeKind.STOP, "stopped")

    def lose_rank(self, seat: InProcessControlPlane) -> None:
        node = next(one for one in self.nodes if one.plane is seat)
        node.line.close()

    # -- simulated agents and operator --------------------------------------------------------------------------------

    def fault(self) -> None:
        """Send the fault to all nodes of a running job; they leave and return to the barrier."""
        with self._lock:
            if self._runs:
                self._runs = False
                count, self._counted = self._counted, self._counted + 1
                for node in self.nodes:
                    self._send(node, ipc.MSG_JOB_FAULT, restart_count=count)
            self._start_when_ready()

    def _any_inside(self) -> InProcessControlPlane:
        return next(node.plane for node in self.nodes if node.plane._inside)

    def _receive_messages(self, node: FakeNode) -> None:
        with contextlib.suppress(OSError):
            while (message := node.line.receive()) is not None:
                with self._lock:
                    node.heard.append(message)
                    if message["type"] == ipc.MSG_AT_BARRIER:
                        node.at_barrier = True
                        self._start_when_ready()
                    elif message["type"] == ipc.MSG_JOB_FAULT:
                        self.fault()
        with self._lock:
            self.nodes.remove(node)
            node.line.close()
            self.fault()

    def _start_when_ready(self) -> None:
        chosen = self.nodes[: self._size]
        if self._runs or not chosen or not all(node.at_barrier for node in chosen):
            return
        if self._counted == 0 and len(chosen) < self._size:
            return
        self._runs = True
        port = free_port()
        for rank, node in enumerate(chosen):
            node.at_barrier = False
            self._send(node, ipc.MSG_JOB_START, worker_envs=worker_environ(rank, len(chosen), port, self._counted))

    def _send(self, node: FakeNode, kind: str, **fields: object) -> None:
        with contextlib.suppress(OSError):
            node.line.send(kind, **fields)


def worker_environ(rank: int, size: int, port: int, count: int, *, spare: bool = False) -> dict[str, str]:
    """Return the environment that an agent sends to its node's only worker."""
    numbers = {
        "RANK": rank,
        "GROUP_RANK": rank,
        "ROLE_RANK": rank,
        "WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "MASTER_PORT": port,
        "JOB_RESTART_COUNT": count,
        "TORCHELASTIC_RESTART_COUNT": count,
    }
    return {"MASTER_ADDR": "127.0.0.1", "SPARE": str(spare)} | {name: str(value) for name, value in numbers.items()}


@contextlib.contextmanager
def hyperpod_agent_job(
    size: int, spares: int = 0, *, grace_s: float = 60.0, grow_s: float = 60.0
) -> Iterator[FakeHyperPodJob]:
    with contextlib.ExitStack() as stack:
        yield FakeHyperPodJob(size, spares, stack, grace_s)
