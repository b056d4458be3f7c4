"""Control plane over sockets: connects rank processes to a coordinator double in the test."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from elastic.control.control_plane import ControlNotice, NoticeKind, RankAssignment, RankProgress
from elastic.errors import ControlPlaneUnavailableError
from elastic.testing import InMemoryControlPlane, InMemoryCoordinator
from elastic.world.world_state import ErrorPosition

_LOOK_S = 0.01


class SocketControlPlane:
    """``ControlPlane`` of one rank over a socket; notices are pushed, so ``notice`` reads memory."""

    restarts_processes = False

    def __init__(self, address: str) -> None:
        self._pipe: Connection = Client(address, "AF_UNIX")
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._sending = threading.Lock()
        self._notice: ControlNotice | None = None
        self._calls: list[Callable[[ControlNotice], None]] = []
        self._told = -1
        threading.Thread(target=self._receive, name="bridge", daemon=True).start()

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError, TypeError):
            while True:
                number, good, value = self._pipe.recv()
                if number < 0:
                    self._notice_received(value)
                elif good:
                    self._waiting.pop(number).set_result(value)
                else:
                    self._waiting.pop(number).set_exception(value)
        for future in list(self._waiting.values()):
            future.set_exception(ControlPlaneUnavailableError("the bridge is down"))

    def _notice_received(self, notice: ControlNotice | None) -> None:
        self._notice = notice
        if notice is not None and notice.kind is NoticeKind.RESTART and notice.epoch > self._told:
            self._told = notice.epoch
            for call in self._calls:
                threading.Thread(target=call, args=(notice,), name="bridge-broken", daemon=True).start()

    def _ask(self, method: str, *args: Any, **named: Any) -> Any:
        number, future = next(self._numbers), Future[Any]()
        self._waiting[number] = future
        with self._sending:
            self._pipe.send((number, method, args, named))
        return future.result()

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        assignment: RankAssignment = self._ask("wait_for_assignment", timeout_s=timeout_s)
        return assignment

    def notice(self) -> ControlNotice | None:
        return self._notice

    def agree_on_step(self, step: int, *, timeout_s: float | None = None) -> int:
        return int(self._ask("agree_on_step", step, timeout_s=timeout_s))

    def report_sealed(self, step: int, *, timeout_s: float | None = None) -> None:
        self._ask("report_sealed", step, timeout_s=timeout_s)

    def report_progress(self, progress: RankProgress) -> None:
        self._ask("report_progress", progress)

    def report_fault(self, reason: str, *, final: bool = False, position: ErrorPosition | None = None) -> None:
        self._ask("report_fault", reason, final=final)

    def request_change(
        self, want: NoticeKind, reason: str, *, deadline_s: float | None = None, nodes: int | None = None
    ) -> None:
        self._ask("request_change", want, reason, deadline_s=deadline_s, nodes=nodes)

    def on_broken(self, call: Callable[[ControlNotice], None]) -> None:
        self._calls.append(call)

    def report_finished(self) -> None:
        self._ask("report_finished")

    def close(self) -> None:
        with contextlib.suppress(OSError, ControlPlaneUnavailableError):
            self._ask("close")
            self._pipe.close()


class SocketBridge:
    """The test's side. A rank whose socket closes counts as lost."""

    def __init__(self, plane: InMemoryCoordinator, folder: str) -> None:
        self.plane = plane
        self._folder = Path(folder)
        self._ended = False
        self._threads: list[threading.Thread] = []

    def address_of(self, seat: InMemoryControlPlane) -> str:
        """Return the address to which this rank connects."""
        address = str(self._folder / f"seat-{self.plane.planes.index(seat)}")
        listener = Listener(address, "AF_UNIX")
        self._start(self._serve, seat, listener)
        return address

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self, seat: InMemoryControlPlane, listener: Listener) -> None:
        with listener, listener.accept() as pipe:
            sending = threading.Lock()
            self._start(self._push, seat, pipe, sending)
            with contextlib.suppress(EOFError, OSError):
                while True:
                    number, method, args, named = pipe.recv()
                    self._start(self._answer, seat, pipe, sending, number, method, args, named)
        seat.close()

    def _answer(
        self,
        seat: InMemoryControlPlane,
        pipe: Connection,
        sending: Any,
        number: int,
        method: str,
        args: Any,
        named: Any,
    ) -> None:
        try:
            answer = number, True, getattr(seat, method)(*args, **named)
        except Exception as error:
            answer = number, False, error
        with sending, contextlib.suppress(OSError):
            if answer[1] and method == "wait_for_assignment":
                pipe.send((-1, True, seat.notice()))  # before the new world: notices of the old world are void
            pipe.send(answer)

    def _push(self, seat: InMemoryControlPlane, pipe: Connection, sending: Any) -> None:
        said: ControlNotice | None = None
        with contextlib.suppress(OSError):
            while not self._ended and seat.is_alive:
                notice = seat.notice()
                if (notice and (notice.epoch, notice.kind)) != (said and (said.epoch, said.kind)):
                    said = notice
                    with sending:
                        pipe.send((-1, True, notice))
                time.sleep(_LOOK_S)

    def close(self) -> None:
        self._ended = True
        for seat in self.plane.planes:
            seat.close()
        for thread in self._threads:
            thread.join(200)


@contextlib.contextmanager
def socket_bridge(size: int, store: str) -> Iterator[SocketBridge]:
    with tempfile.TemporaryDirectory() as folder:
        bridge = SocketBridge(InMemoryCoordinator(size, store=store), folder)
        try:
            yield bridge
        finally:
            bridge.close()
