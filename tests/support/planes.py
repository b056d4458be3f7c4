"""Every control plane behind one handle, for the contract suite: a job whose nodes have one rank each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Protocol

from elastic.control.plane import ControlPlane, Want
from elastic.control.testing import MemoryPlane, MemorySeat

PATIENCE_S = 60.0


class Job(Protocol):
    """What happens to the job from outside. ``seats`` are processes that have not called ``ready`` yet."""

    seats: list[Any]

    def join(self) -> ControlPlane: ...
    def resize(self, nodes: int, *, deadline_s: float | None = None) -> None: ...
    def stop(self) -> None: ...
    def lose(self, seat: Any) -> None:
        """Its process is gone, without a word."""


class MemoryJob:
    def __init__(self, size: int, spares: int) -> None:
        self.plane = MemoryPlane(size, spares=spares)
        self.seats: list[MemorySeat] = self.plane.seats

    def join(self) -> ControlPlane:
        return self.plane.join()

    def resize(self, nodes: int, *, deadline_s: float | None = None) -> None:
        self.plane.resize(nodes, deadline_s=deadline_s)

    def stop(self) -> None:
        self.plane.stop()

    def lose(self, seat: Any) -> None:
        self.plane.lose(seat)


@contextlib.contextmanager
def memory_job(size: int, spares: int = 0) -> Iterator[Job]:
    job = MemoryJob(size, spares)
    try:
        yield job
    finally:
        for seat in job.seats:
            seat.close()


def at_once(*calls: Callable[[], Any]) -> list[Future[Any]]:
    """All calls, each on a thread of its own; their futures."""
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


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(PATIENCE_S) for future in futures]


def all_ready(seats: list[Any]) -> list[Any]:
    return results(at_once(*(lambda seat=seat: seat.ready(timeout_s=PATIENCE_S) for seat in seats)))


def wants(seat: Any) -> Want | None:
    notice = seat.notice()
    return None if notice is None else notice.want
