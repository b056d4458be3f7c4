"""The process groups of one epoch: entered together, aborted from any thread, left behind."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from elastic.control.plane import Assignment
from elastic.errors import PolicyError
from elastic.rootless.holders import Address, addresses_of
from elastic.rootless.store import RootlessStore
from elastic.rootless.sweeping import Sweep, prefix_of
from elastic.workers.cutting import cut_gloo, cut_store
from elastic.workers.group_reaper import backends_of, reap
from elastic.workers.nccl_environment import leave_errors_to_us
from peerstore.errors import PeerStoreError
from tieredckpt.device import accelerator

log = logging.getLogger(__name__)

_STORE_PATIENCE = timedelta(minutes=5)
_LONGER = 1.5
"""By how much a collective waits longer than it takes to find a hang: that may wait for one more report, and the limit
grows with the longest step."""
_MOST_S = 7 * 24 * 3600.0


def usual_backend() -> str:
    """Of ``init_process_group``: gloo for the CPU, and for the devices of this process what torch has for them."""
    kind = accelerator().type
    theirs = dist.Backend.default_device_backend_map.get(kind, "gloo")
    return "gloo" if theirs == "gloo" or not dist.is_backend_available(theirs) else f"cpu:gloo,{kind}:{theirs}"


def address_of(store: str) -> tuple[str, int]:
    host, colon, port = store.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise PolicyError(f"{store!r} is no HOST:PORT where a store could be")
    return host.strip("[]"), int(port)


class Groups:
    """The groups of one epoch. Everything but ``abort`` is called by the thread that trains."""

    def __init__(self, assignment: Assignment, *, backend: str | None = None, timeout: timedelta | None = None) -> None:
        self._assignment = assignment
        self._backend = backend or usual_backend()
        self._timeout = timeout
        self._address = address_of(assignment.store)
        self._addresses: frozenset[Address] = frozenset()
        """Of the store, once this rank is on its way in."""
        self._lock = threading.Lock()
        self._open = True
        self._excepthook = sys.excepthook
        """Torch puts a new one before it in every world, and takes none away."""
        self._spread: RootlessStore | None = None
        if assignment.stores:
            self._spread = RootlessStore(assignment.stores, cut=cut_store, timeout=timeout or _STORE_PATIENCE)
        self._sweeping: Sweep | None = None

    @property
    def epoch(self) -> int:
        return self._assignment.epoch

    def enter(self) -> None:
        """Meet the other ranks of the epoch. Keys of other epochs are not seen: each has its own prefix."""
        place = self._assignment
        device = accelerator()
        if device.count():
            device.make_current(place.local_rank % device.count())
        if self.is_silent:
            leave_errors_to_us(os.environ)
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(prefix_of(place.epoch), self._store()),
            rank=place.rank,
            world_size=place.world_size,
            timeout=self._collectives_wait(),
        )
        self._sweep()

    def _collectives_wait(self) -> timedelta | None:
        """Longer than it takes to find a hang: else the ranks that wait report errors of their own, and who does not
        answer is not to blame. ``None``: as torch has it.
        """
        hang_s = self._assignment.hang_s
        if self._timeout is not None:
            own_s = self._timeout.total_seconds()
            if hang_s is not None and own_s <= hang_s:
                log.warning(
                    "Policy(timeout=) is %g s, and a hang is found after up to %g s: until then collectives may end by "
                    "themselves, and ranks that waited are taken for the fault. Set --hang-timeout and "
                    "--first-step-timeout below it, or leave it out",
                    own_s,
                    hang_s,
                )
            return self._timeout
        if hang_s is None:
            return None
        return max(default_pg_timeout, timedelta(seconds=min(_LONGER * hang_s, _MOST_S)))

    def _store(self) -> torch.distributed.Store:
        if self._spread is not None:
            return self._spread
        host, port = self._address
        patience = self._timeout or _STORE_PATIENCE
        try:
            self._addresses = addresses_of(host, port, within_s=patience.total_seconds())
        except PeerStoreError as error:
            raise dist.DistNetworkError(f"the store of epoch {self._assignment.epoch}: {error}") from error
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)

    def _sweep(self) -> None:
        """All have met: what earlier worlds left is not needed any more. One rank for each server does it."""
        place = self._assignment
        servers = place.stores or (place.store,)
        if place.rank < len(servers) and place.epoch > 0:
            self._sweeping = Sweep(servers[place.rank], place.epoch, cut=cut_store)

    def abort(self) -> None:
        """From any thread: whoever hangs in a collective of this epoch, or on its way in, gets an error."""
        self.abort_groups()
        self.cut_connections()

    @property
    def is_silent(self) -> bool:
        """Whether a collective that is aborted ends without an error, with anything in its outputs. Gloo's raises."""
        return self._backend != "gloo"

    def abort_groups(self) -> None:
        """As far as their backends can: NCCL's."""
        with self._lock:
            if self._open:
                abort_together(list(c10d._world.pg_map))

    def cut_connections(self) -> None:
        """Of gloo's groups, and to the store."""
        with self._lock:
            if self._open:
                cut = cut_gloo() + self._cut_store()
                if cut:
                    log.info("epoch %d was aborted, %d connections cut", self._assignment.epoch, cut)

    def _cut_store(self) -> int:
        return cut_store(self._addresses) if self._spread is None else self._spread.cut()

    def leave(self, *, broken: bool) -> None:
        """Forget the groups. In a broken world nobody is waited for."""
        with self._lock:
            self._open = False
        if getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
            sys.excepthook = self._excepthook
        try:
            self._forget(broken=broken)
        finally:
            if self._sweeping is not None:
                self._sweeping.end()
            if self._spread is not None:
                self._spread.close()

    def _forget(self, *, broken: bool) -> None:
        if not dist.is_initialized():
            # It ended on the way in, after torch had counted a group, and the next one's keys are named by the count:
            # this rank and one that was not in this world would wait for each other under two names.
            c10d._world.group_count = 0
            return
        groups = list(c10d._world.pg_map)
        try:
            if broken:
                abort_together(groups)
                c10d._abort_process_group()
            else:
                dist.destroy_process_group()
                groups.clear()
        except (RuntimeError, ValueError) as error:
            log.warning("the groups of epoch %d did not end well: %s", self._assignment.epoch, error)
            if dist.is_initialized():
                c10d._abort_process_group()
        finally:
            if groups:
                reap(groups)


def abort_together(groups: Sequence[dist.ProcessGroup]) -> None:
    """One communicator that is aborted alone may wait for kernels of another one for ever (pytorch#119797)."""
    opened = [backend for backend in map(_grouping, groups) if backend is not None][:1]
    for backend in opened:
        backend._group_start()
    try:
        for group in reversed(groups):  # NCCL does not abort what was split from an aborted communicator
            for backend in backends_of(group):
                with contextlib.suppress(RuntimeError):  # of a backend that cannot: it is cut
                    backend.abort()
    finally:
        for backend in opened:
            backend._group_end()


def _grouping(group: dist.ProcessGroup) -> Any:
    """The backend of it that has its calls grouped, as NCCL has."""
    with contextlib.suppress(RuntimeError):  # it has none for that device
        backend = group._get_backend(torch.device("cuda"))
        return backend if hasattr(backend, "_group_start") else None
    return None


class NoGroups:
    """Where the train function makes its own groups (``Policy(backend="none")``), and leaves none behind."""

    is_silent = True
    """It may be anything."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def enter(self) -> None:
        pass

    def abort_groups(self) -> None:
        pass

    def cut_connections(self) -> None:
        pass

    def leave(self, *, broken: bool) -> None:
        pass


def groups_of(assignment: Assignment, backend: str | None, timeout: timedelta | None) -> Groups | NoGroups:
    if backend == "none":
        return NoGroups(assignment.epoch)
    return Groups(assignment, backend=backend, timeout=timeout)
