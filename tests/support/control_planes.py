"""Every control plane behind one protocol, for the contract suite: a job with one rank per node."""

from __future__ import annotations

import contextlib
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from elastic.control.child_processes import STACKS_SIGNAL
from elastic.control.control_messages import ResizeRequest, StopJobRequest
from elastic.control.control_plane import ControlPlane, NoticeKind
from elastic.control.coordinator_client import call_coordinator
from elastic.control.supervisor_client import SupervisorClient
from elastic.coordinator.coordinator import Coordinator
from elastic.coordinator.job_snapshot import CoordinatorSettings
from elastic.rendezvous.store_servers import ROOTLESS
from elastic.settings import supervisor_endpoint
from elastic.supervisor.supervisor import Supervisor, SupervisorSettings
from elastic.testing import InMemoryControlPlane, InMemoryCoordinator
from elastic.world.scaling_policy import ScalingPolicy

PATIENCE_S = 200.0
SECRET = b"a secret of the tests, long enough"


class ControlPlaneJob(Protocol):
    """External control of a job; ``planes`` are its ranks' control planes."""

    planes: list[Any]
    starts_anew: bool
    """Whether a fault or a resize restarts all processes."""
    ends_leftovers: bool
    """Whether the launcher ends ranks without a place in the next world, without a notice to them."""
    resize_is: NoticeKind
    """Kind of notice that a rank receives on a resize."""

    def add_rank(self) -> ControlPlane: ...
    def resize(self, nodes: int) -> None: ...
    def stop(self) -> None: ...
    def lose_rank(self, seat: Any) -> None:
        """Lose the rank's node without a notice."""


class MemoryJob:
    starts_anew, ends_leftovers, resize_is = False, False, NoticeKind.RESIZE

    def __init__(self, size: int, spares: int, grace_s: float) -> None:
        self.plane = InMemoryCoordinator(size, spares=spares)
        self._grace_s = grace_s
        self.planes: list[InMemoryControlPlane] = self.plane.planes

    def add_rank(self) -> ControlPlane:
        return self.plane.add_rank()

    def resize(self, nodes: int) -> None:
        self.plane.resize(nodes, deadline_s=self._grace_s)

    def stop(self) -> None:
        self.plane.stop()

    def lose_rank(self, seat: Any) -> None:
        self.plane.lose_rank(seat)


@contextlib.contextmanager
def memory_job(size: int, spares: int = 0, *, grace_s: float = 60.0, grow_s: float = 60.0) -> Iterator[ControlPlaneJob]:
    """Yield a job in memory; it ignores ``grow_s``, the seconds to wait for more nodes before growing."""
    job = MemoryJob(size, spares, grace_s)
    try:
        yield job
    finally:
        for seat in job.planes:
            seat.close()


class ThreadRank(SupervisorClient):
    """A rank whose process and supervisor are threads of the test."""

    def __init__(self, process: ThreadProcess, supervisor: Supervisor) -> None:
        super().__init__(supervisor_endpoint(process.environ))
        self.supervisor = supervisor


class ThreadProcess:
    """A fake :class:`~elastic.control.child_processes.ChildProcess` that a test drives."""

    def __init__(self, environ: dict[str, str], ended: Callable[[int], None]) -> None:
        self.environ = environ
        self._ended = ended
        self._status: int | None = None
        self._lock = threading.Lock()
        self.plane: ThreadRank | None = None

    @property
    def is_running(self) -> bool:
        return self._status is None

    def signal(self, number: int) -> None:
        with self._lock:
            if self._status is not None:
                return
            self._status = -number
        if self.plane is not None:
            self.plane.close()
        self._ended(-number)

    def end_with_stacks(self) -> None:
        self.signal(STACKS_SIGNAL)

    def join(self, timeout_s: float | None = None) -> bool:
        return not self.is_running


class SupervisedJob:
    """A coordinator and its supervisors on threads of this process, connected by real sockets."""

    starts_anew, ends_leftovers, resize_is = False, False, NoticeKind.RESIZE

    def __init__(
        self, size: int, spares: int, stack: contextlib.ExitStack, *, grace_s: float, grow_s: float, store: str
    ) -> None:
        self._stack = stack
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        policy = ScalingPolicy(
            min_replicas=1,
            max_replicas=size + spares + 2,
            replicas=size,
            scaling_timeout_s=grow_s,
            graceful_shutdown_timeout_s=grace_s,
            faulty_scale_down_timeout_s=0.0,
        )
        settings = CoordinatorSettings("job", policy, 1, store=store, reconnect_timeout_s=0.2)
        self.coordinator = Coordinator(settings, SECRET, farewell_s=1.0)
        self._run(self.coordinator.run, self.coordinator.request_stop)
        assert self._ask(ResizeRequest(size, "initial size")).max_nodes == size
        self.planes = [self._node(number) for number in range(size + spares)]

    def _run(self, run: Callable[[], Any], end: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self._stack.callback(thread.join, PATIENCE_S)
        self._stack.callback(end)

    def _node(self, number: int) -> Any:
        """Start a node with one rank. Starting a replacement rank kills the node's supervisor instead."""
        name = f"n{number}"
        came: queue.SimpleQueue[ThreadProcess] = queue.SimpleQueue()

        def spawn(command: Any, *, environ: Any, on_line: Any, on_exit: Any, name: str) -> ThreadProcess:
            process = ThreadProcess(environ, on_exit)
            if name == "store":
                on_line(f"store {settings.node}:1\n".encode())
                return process
            if started.is_set():
                supervisor.kill("its rank is gone")
            started.set()
            came.put(process)
            return process

        started = threading.Event()
        settings = SupervisorSettings(
            job="job",
            node=name,
            coordinator=self.coordinator.address,
            command=("rank",),
            directory=self._folder / name,
            logs=self._folder / name / "logs",
            heartbeat_s=0.1,
        )
        supervisor = Supervisor(settings, SECRET, spawn=spawn)
        self._run(supervisor.run, lambda: supervisor.kill("the test is over"))
        process = came.get(timeout=PATIENCE_S)
        process.plane = ThreadRank(process, supervisor)
        return process.plane

    def _ask(self, question: Any) -> Any:
        return call_coordinator(self.coordinator.address, question, job="job", secret=SECRET)

    def add_rank(self) -> ControlPlane:
        self.planes.append(self._node(len(self.planes)))
        return self.planes[-1]

    def resize(self, nodes: int) -> None:
        self._ask(ResizeRequest(nodes, "resized"))

    def stop(self) -> None:
        self._ask(StopJobRequest("stopped"))

    def lose_rank(self, seat: Any) -> None:
        seat.supervisor.kill("lost")


@contextlib.contextmanager
def supervised_job(
    size: int, spares: int = 0, *, grace_s: float = 60.0, grow_s: float = 60.0, store: str = "nowhere:1"
) -> Iterator[ControlPlaneJob]:
    with contextlib.ExitStack() as stack:
        yield SupervisedJob(size, spares, stack, grace_s=grace_s, grow_s=grow_s, store=store)


def rootless_job(size: int, spares: int = 0, **options: float) -> contextlib.AbstractContextManager[ControlPlaneJob]:
    """Yield a supervised job with a store on every node."""
    return supervised_job(size, spares, store=ROOTLESS, **options)  # type: ignore[arg-type]


def start_all(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """Start each call on its own thread and return the futures."""
    return [_start(call) for call in calls]


def _start(call: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def wait_results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(PATIENCE_S) for future in futures]


def wait_all_assigned(seats: list[Any]) -> list[Any]:
    return wait_results(
        start_all(*(lambda seat=seat: seat.wait_for_assignment(timeout_s=PATIENCE_S) for seat in seats))
    )


def wanted_notice(seat: Any) -> NoticeKind | None:
    notice = seat.notice()
    return None if notice is None else notice.kind
