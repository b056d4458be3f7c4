"""Process groups of one epoch: initialization, abort from any thread, destruction.

NCCL's groups can be aborted. Gloo's cannot: ``abort``, ``shutdown`` and ``destroy_process_group`` return at once, and
the collective waits until its timeout (30 minutes). Gloo does notice the end of a connection, so this module ends them.

A group's destructor waits for its threads: NCCL's watchdog, which sleeps after an error, and gloo's workers, which end
with their collectives. The training thread must not run it. If DDP's reducer is the last owner, the destructor even
keeps the interpreter's lock. A worker that waits for the lock then hangs the process. So a reaper holds the groups
until the other objects of the world are gone, and drops them last.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from elastic.control.control_plane import RankAssignment
from elastic.errors import PolicyError
from elastic.rendezvous.call_watchdog import CallWatchdog
from elastic.rendezvous.old_key_cleanup import OldKeyCleanup, epoch_prefix
from elastic.rendezvous.rootless_tcpstore import RootlessStore
from elastic.rendezvous.store_server_client import SocketAddress, resolve_store
from elastic.workers.native_connections import (
    abort_gloo_connections,
    close_store_connections,
    release_aborted_connections,
)
from peerstore.errors import PeerStoreError
from tieredckpt.nccl_environment import NcclRuleState, check_nccl_environment
from tieredckpt.tensors.device import accelerator

log = logging.getLogger(__name__)

_STORE_PATIENCE = timedelta(minutes=5)
_FIRST_TRY, _LONGEST_TRY = timedelta(seconds=2), timedelta(seconds=16)
"""Timeouts of one try to connect to the store."""
_LONGER = 1.5
"""Ratio of a collective's timeout to the time that finds a hang.

Detection may take longer: the judge may wait for one more report, and the limit
grows with the longest step."""
_MOST_S = 7 * 24 * 3600.0


def default_backend() -> str:
    """Return the backend for ``init_process_group``.

    It is gloo for the CPU, and torch's default for this process's devices.
    """
    kind = accelerator().type
    device_backend = dist.Backend.default_device_backend_map.get(kind, "gloo")
    return (
        "gloo"
        if device_backend == "gloo" or not dist.is_backend_available(device_backend)
        else f"cpu:gloo,{kind}:{device_backend}"
    )


def parse_store_address(store: str) -> tuple[str, int]:
    host, colon, port = store.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise PolicyError(f"{store!r} is not the HOST:PORT of a store")
    return host.strip("[]"), int(port)


class ProcessGroups:
    """Process groups of one epoch. The training thread calls every method except ``abort``."""

    def __init__(
        self, assignment: RankAssignment, *, backend: str | None = None, timeout: timedelta | None = None
    ) -> None:
        self._assignment = assignment
        self._backend = backend or default_backend()
        self._timeout = timeout
        self._address = parse_store_address(assignment.store)
        self._addresses: frozenset[SocketAddress] = frozenset()
        """Addresses of the store, once this rank joins the world."""
        self._lock = threading.Lock()
        self._open = True
        self._excepthook = sys.excepthook
        """Hook before this world: torch installs a new one in every world, and removes none."""
        self._replicated_store: RootlessStore | None = None
        if assignment.stores:
            self._replicated_store = RootlessStore(
                assignment.stores, close_connections=close_store_connections, timeout=timeout or _STORE_PATIENCE
            )
        self._sweeping: OldKeyCleanup | None = None
        self._watchdog = CallWatchdog()
        self._aborted = False

    @property
    def epoch(self) -> int:
        return self._assignment.epoch

    def initialize(self) -> None:
        """Initialize the groups with the other ranks of the epoch.

        Each epoch has its own key prefix in the store.
        """
        assignment = self._assignment
        device = accelerator()
        if device.device_count():
            device.set_current(assignment.local_rank % device.device_count())
        if self.aborts_silently:
            disable_nccl_watchdog(os.environ)
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(epoch_prefix(assignment.epoch), self._store()),
            rank=assignment.rank,
            world_size=assignment.world_size,
            timeout=self._collective_timeout(),
        )
        release_aborted_connections()
        self._clean_old_keys()

    def _collective_timeout(self) -> timedelta | None:
        """Return the timeout of collectives; ``None`` for torch's default.

        It is longer than the time that finds a hang.

        With a shorter timeout, the waiting ranks would report errors of their own and hide the rank that hangs.
        """
        hang_s = self._assignment.hang_s
        if self._timeout is not None:
            timeout_s = self._timeout.total_seconds()
            if hang_s is not None and timeout_s <= hang_s:
                log.warning(
                    "Policy(timeout=) is %g s, and hang detection takes up to %g s. A collective may time out first, "
                    "so that a waiting rank counts as the faulty one. Set --hang-timeout and --first-step-timeout "
                    "below it, or leave it out",
                    timeout_s,
                    hang_s,
                )
            return self._timeout
        if hang_s is None:
            return None
        return max(default_pg_timeout, timedelta(seconds=min(_LONGER * hang_s, _MOST_S)))

    def _store(self) -> torch.distributed.Store:
        if self._replicated_store is not None:
            return self._replicated_store
        host, port = self._address
        timeout = self._timeout or _STORE_PATIENCE
        try:
            self._addresses = resolve_store(host, port, within_s=timeout.total_seconds())
        except PeerStoreError as error:
            raise dist.DistNetworkError(f"the store of world {self._assignment.epoch}: {error}") from error
        return self._connect_store(host, port, timeout)

    def _connect_store(self, host: str, port: int, timeout: timedelta) -> torch.distributed.Store:
        """Return a connection to the store; try until the timeout or :meth:`abort`.

        A try at an address where nothing listens ends at its own timeout only, and one at a silent store never ends
        by itself.
        """
        until = time.monotonic() + timeout.total_seconds()
        attempt_timeout = _FIRST_TRY
        while True:
            attempt_timeout = min(attempt_timeout, timeout)
            try:
                with self._watchdog.limit(until - time.monotonic(), self._close_store):
                    if self._aborted:
                        raise dist.DistNetworkError(f"world {self._assignment.epoch} was aborted")
                    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=attempt_timeout)
                    store.set_timeout(timeout)
                    return store
            except dist.DistError:
                if self._aborted or time.monotonic() > until:
                    raise
                attempt_timeout = min(2 * attempt_timeout, _LONGEST_TRY)

    def _clean_old_keys(self) -> None:
        """Delete the keys of earlier worlds, on one rank per store server.

        All ranks have joined and no longer need them.
        """
        assignment = self._assignment
        servers = assignment.stores or (assignment.store,)
        if assignment.rank < len(servers) and assignment.epoch > 0:
            self._sweeping = OldKeyCleanup(
                servers[assignment.rank], assignment.epoch, close_connections=close_store_connections
            )

    def abort(self) -> None:
        """Abort collectives and initialization of this epoch, from any thread.

        Every thread that waits there raises.
        """
        self.abort_groups()
        self.close_connections()

    @property
    def aborts_silently(self) -> bool:
        """Whether an aborted collective ends without an error, with undefined outputs. Gloo's raises."""
        return self._backend != "gloo"

    def abort_groups(self) -> None:
        """Abort the groups of backends that support it: NCCL's."""
        with self._lock:
            if self._open:
                abort_groups(list(c10d._world.pg_map))

    def close_connections(self) -> None:
        """Close the connections of gloo's groups and to the store."""
        self._aborted = True
        self._watchdog.expire_all()
        with self._lock:
            if self._open:
                closed = abort_gloo_connections() + self._close_store()
                if closed:
                    log.info("world %d was aborted, %d connections cut", self._assignment.epoch, closed)

    def _close_store(self) -> int:
        return (
            close_store_connections(self._addresses)
            if self._replicated_store is None
            else self._replicated_store.abort()
        )

    def destroy(self, *, broken: bool, collect: Callable[[], object] = gc.collect) -> None:
        """Destroy the groups. In a broken world, do not wait for other ranks.

        ``collect`` deletes the objects that own groups too, such as models. It runs before the groups are dropped.
        """
        with self._lock:
            self._open = False
        self._watchdog.close()
        if getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
            sys.excepthook = self._excepthook
        reaper = GroupReaper(list(c10d._world.pg_map), shut_down=broken)
        try:
            self._destroy_groups(broken=broken)
        finally:
            reaper.start()
            if self._sweeping is not None:
                self._sweeping.stop()
            if self._replicated_store is not None:
                self._replicated_store.close()
            try:
                collect()
            finally:
                reaper.drop_groups()

    def _destroy_groups(self, *, broken: bool) -> None:
        if not dist.is_initialized():
            # The initialization failed after torch had counted a group, and that count names the next group's keys. A
            # rank that was not in this world would use another name, and the two would wait for each other.
            c10d._world.group_count = 0
            return
        try:
            if broken:
                abort_groups(list(c10d._world.pg_map))
                c10d._abort_process_group()
            else:
                dist.destroy_process_group()
        except (RuntimeError, ValueError) as error:
            log.warning("the groups of world %d did not end well: %s", self._assignment.epoch, error)
            if dist.is_initialized():
                c10d._abort_process_group()


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort ``groups`` together.

    A communicator that is aborted alone may wait for another one's kernels forever (pytorch#119797).
    """
    grouped = [backend for backend in map(_groupable_backend, groups) if backend is not None][:1]
    for backend in grouped:
        backend._group_start()
    try:
        for group in reversed(groups):  # NCCL does not abort communicators that were split from an aborted one
            for backend in backends_of(group):
                with contextlib.suppress(RuntimeError):  # not supported: its connections are closed instead
                    backend.abort()
    finally:
        for backend in grouped:
            backend._group_end()


def _groupable_backend(group: dist.ProcessGroup) -> Any:
    """Return the backend of ``group`` that can group its calls, such as NCCL; ``None`` if it has none."""
    with contextlib.suppress(RuntimeError):  # no backend for that device
        backend = group._get_backend(torch.device("cuda"))
        return backend if hasattr(backend, "_group_start") else None
    return None


class UserProcessGroups:
    """Groups that the train function creates and destroys itself (``RecoveryPolicy(backend="none")``)."""

    aborts_silently = True
    """The backend is unknown, so assume the unsafe case."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def initialize(self) -> None:
        pass

    def abort_groups(self) -> None:
        pass

    def close_connections(self) -> None:
        pass

    def destroy(self, *, broken: bool, collect: Callable[[], object] = gc.collect) -> None:
        collect()


def process_groups_for(
    assignment: RankAssignment, backend: str | None, timeout: timedelta | None
) -> ProcessGroups | UserProcessGroups:
    if backend == "none":
        return UserProcessGroups(assignment.epoch)
    return ProcessGroups(assignment, backend=backend, timeout=timeout)


_USUAL_S = 0.25
"""Seconds within which the threads of an aborted group end, unless a watchdog sleeps."""


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of ``group``, each of them once."""
    found: list[Any] = []  # torch's types do not declare abort and shutdown
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):  # torch creates some of them on first use
            backend = group._get_backend(device)
            if backend not in found:
                found.append(backend)
    return found


class GroupReaper:
    """A thread that shuts down the groups of a world that was left, and owns them last."""

    def __init__(self, groups: list[dist.ProcessGroup], *, shut_down: bool) -> None:
        self._owned, self._shut_down = groups, shut_down
        self._unused = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic-reaper", daemon=True)

    def start(self) -> None:
        if self._owned:
            self._thread.start()

    def drop_groups(self) -> None:
        """Let the thread drop the groups, because no other object needs them.

        Wait up to ``_USUAL_S`` seconds for it, so that the next world usually finds no threads of this one.
        """
        self._unused.set()
        if self._thread.ident is not None:
            self._thread.join(_USUAL_S)
            if self._thread.is_alive():
                log.info("threads of the broken world's groups still run; a reaper waits for them")

    def _run(self) -> None:
        if self._shut_down:
            _shut_down(self._owned)
        self._unused.wait()
        self._owned.clear()  # this destructor releases the interpreter's lock


def _shut_down(groups: Sequence[dist.ProcessGroup]) -> None:
    for group in groups:
        for backend in backends_of(group):
            try:
                backend.shutdown()
            except RuntimeError as error:
                log.warning("a group of a broken world did not shut down: %s", error)


def disable_nccl_watchdog(environ: MutableMapping[str, str]) -> None:
    """Set the environment that disables NCCL's watchdog. Call it before the first group.

    Raises :class:`PolicyError` for a variable that contradicts it.
    """
    found = check_nccl_environment(environ)
    wrong = [one for one in found if one.state is NcclRuleState.CONTRADICTED]
    if wrong:
        reasons = "; ".join(f"{one}: {one.why}" for one in wrong)
        raise PolicyError(
            f"{reasons}. Unset {' and '.join(one.name for one in wrong)}; without recovery in the process use torchrun"
        )
    for one in found:
        if one.state is NcclRuleState.UNSET:
            environ[one.name] = one.value
