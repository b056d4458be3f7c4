"""Fault injection in this rank, on request. Without a request it imports and hooks nothing."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from elastic.control.control_plane import ControlPlane
from elastic.control.run_directory import RunDirectory
from elastic.control.supervisor_client import SupervisorClient
from elastic.errors import PolicyError
from elastic.fault_injection.fault_spec import INJECT_VARIABLE, FaultInjection, parse_injections
from tieredckpt.settings import run_directory

if TYPE_CHECKING:
    from elastic.fault_injection.injector import FaultInjector, InjectionWorld

log = logging.getLogger(__name__)

_RESOLVE_S = 5.0


class RankFaults:
    """Faults to inject into this process, from its environment and later from its supervisor."""

    def __init__(self, plane: ControlPlane, environ: Mapping[str, str] = os.environ) -> None:
        self._plane = plane
        self._environ = environ
        self._lock = threading.Lock()
        self._injector: FaultInjector | None = None
        self._world: InjectionWorld | None = None
        self._hooks = ExitStack()
        self._injections: tuple[FaultInjection, ...] = ()
        if environ.get(INJECT_VARIABLE):
            if not isinstance(plane, SupervisorClient):
                raise PolicyError(
                    f"${INJECT_VARIABLE} is for ranks of `elastic run`, which keeps what has happened already"
                )
            self._injections = parse_injections(environ[INJECT_VARIABLE])
            self._arm()
        if isinstance(plane, SupervisorClient):
            plane.on_injections(self._add_injections, self._close_connections)

    def enter_world(self, world: InjectionWorld) -> None:
        """Enter ``world`` before its ranks connect."""
        self._world = world
        with self._lock:
            if self._injections:
                self._arm()
        if self._injector is not None:
            self._injector.enter_world(world)

    def leave_world(self) -> None:
        self._world = None
        if self._injector is not None:
            self._injector.leave_world()

    def close(self) -> None:
        self._hooks.close()

    def _add_injections(self, injections: tuple[FaultInjection, ...]) -> None:
        """Add injections; called by a thread of the plane.

        A rank without a world installs no hooks until it enters one.
        """
        with self._lock:
            self._injections = (*self._injections, *injections)
            world = self._world
            if world is not None:
                self._arm()
                if self._injector is not None:
                    self._injector.attach_world(world)

    def _close_connections(self) -> None:
        """Close this rank's connections to other ranks and to their store: its node is partitioned."""
        from elastic.rendezvous.store_server_client import resolve_store
        from elastic.workers.native_connections import close_gloo_connections, close_store_connections

        found = close_gloo_connections()
        if "MASTER_PORT" in os.environ:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            found += close_store_connections(resolve_store(host, port, within_s=_RESOLVE_S))
        log.warning("this node is cut off on purpose: %d connections ended", found)

    def _arm(self) -> None:
        from elastic.fault_injection.fault_actions import InjectionRecord, log_injection
        from elastic.fault_injection.injector import FaultInjector, fault_hooks

        if self._injector is None:
            plane = self._plane
            assert isinstance(plane, SupervisorClient)  # noqa: S101 - only a supervisor sends injections
            run = RunDirectory(run_directory(self._environ), self._environ["ELASTIC_JOB"])
            record, node = InjectionRecord(run.directory), self._environ["ELASTIC_NODE"]
            self._injector = FaultInjector(
                (), record, node, request_partition=plane.request_partition, on_fault=log_injection
            )
            self._hooks.enter_context(fault_hooks(self._injector))
        self._injector.add(self._injections)


@contextmanager
def rank_faults(plane: ControlPlane) -> Iterator[RankFaults]:
    """Yield the fault injection of this rank, and remove its hooks at the end."""
    arming = RankFaults(plane)
    try:
        yield arming
    finally:
        arming.close()
