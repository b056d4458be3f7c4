"""A rank's loop and the injector: nothing is imported or hooked for it until there is something to inject."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from elastic.control import settings as names
from elastic.control.plane import ControlPlane
from elastic.control.runs import RunPlace
from elastic.control.supervised import SupervisorPlane
from elastic.errors import PolicyError
from elastic.inject.plan import Injection
from elastic.inject.reading import INJECT, plan_of

if TYPE_CHECKING:
    from elastic.inject.injector import Injector, InWorld

log = logging.getLogger(__name__)

_NAME_S = 5.0


class Arming:
    """What is to be injected into this process, from its environment and, later, from its supervisor."""

    def __init__(self, plane: ControlPlane, environ: Mapping[str, str] = os.environ) -> None:
        self._plane = plane
        self._environ = environ
        self._lock = threading.Lock()
        self._injector: Injector | None = None
        self._world: InWorld | None = None
        self._hooks = ExitStack()
        self._given: tuple[Injection, ...] = ()
        if environ.get(INJECT):
            if not isinstance(plane, SupervisorPlane):
                raise PolicyError(f"${INJECT} is for ranks of `elastic run`, which keeps what has happened already")
            self._given = plan_of(environ[INJECT])
            self._arm()
        if isinstance(plane, SupervisorPlane):
            plane.on_injections(self._more, self._cut)

    def enter(self, world: InWorld) -> None:
        """Before the ranks of a world meet."""
        self._world = world
        with self._lock:
            if self._given:
                self._arm()
        if self._injector is not None:
            self._injector.enter(world)

    def leave(self) -> None:
        self._world = None
        if self._injector is not None:
            self._injector.leave()

    def close(self) -> None:
        self._hooks.close()

    def _more(self, given: tuple[Injection, ...]) -> None:
        """In a thread of the plane; a rank that has not begun hooks nothing yet, but hears of it when it does."""
        with self._lock:
            self._given = (*self._given, *given)
            world = self._world
            if world is not None:
                self._arm()
                if self._injector is not None:
                    self._injector.resume(world)

    def _cut(self) -> None:
        """The node is cut off: this rank's connections to other ranks and to their store end."""
        from elastic.rootless.holders import addresses_of
        from elastic.workers.cutting import cut_gloo, cut_store

        found = cut_gloo()
        if "MASTER_PORT" in os.environ:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            found += cut_store(addresses_of(host, port, within_s=_NAME_S))
        log.warning("this node is cut off on purpose: %d connections ended", found)

    def _arm(self) -> None:
        from elastic.inject.hooks import hooked
        from elastic.inject.injector import Injector
        from elastic.inject.record import Record
        from elastic.inject.telling import tell

        if self._injector is None:
            plane = self._plane
            assert isinstance(plane, SupervisorPlane)  # noqa: S101 - only such a one is given anything
            run = RunPlace(names.run_directory(self._environ), self._environ["ELASTIC_JOB"])
            record, node = Record(run.directory), self._environ["ELASTIC_NODE"]
            self._injector = Injector((), record, node, cut=plane.cut_off, tell=tell)
            self._hooks.enter_context(hooked(self._injector))
        self._injector.add(self._given)


@contextmanager
def armed(plane: ControlPlane) -> Iterator[Arming]:
    """What a rank's loop tells of the worlds that it enters."""
    arming = Arming(plane)
    try:
        yield arming
    finally:
        arming.close()
