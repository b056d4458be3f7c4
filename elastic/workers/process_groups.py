"""Process groups of one epoch: initialized, aborted from any thread, destroyed.

NCCL's groups can be aborted. Gloo's cannot: ``abort``, ``shutdown`` and ``destroy_process_group`` return at once, and
the collective goes on waiting until its timeout (30 minutes). What it does notice is the end of a connection, within
milliseconds; so its connections are ended from this side. They are found by who waits for them: each of gloo's devices
has a thread named ``gloo_tcp_loop`` that sits in ``epoll_wait``, and the kernel tells on which descriptors.

The destructor of ``ProcessGroupNCCL`` joins the group's watchdog. After an error that watchdog sleeps, and Python is
free to run the destructor wherever the last reference goes: on the thread that trains. So a reaper holds one more
reference, joins the watchdogs itself, and only then drops it. A destructor that runs after that returns at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from elastic.control.control_plane import RankAssignment
from elastic.errors import PolicyError
from elastic.rendezvous.rootless_tcpstore import (
    OldKeyCleanup,
    RootlessStore,
    SocketAddress,
    epoch_prefix,
    resolve_store,
)
from peerstore.errors import PeerStoreError
from tieredckpt.nccl_environment import NcclRuleState, check_nccl_environment
from tieredckpt.tensors.device import accelerator

log = logging.getLogger(__name__)

_STORE_PATIENCE = timedelta(minutes=5)
_LONGER = 1.5
"""By how much a collective waits longer than it takes to find a hang: that may wait for one more report, and the limit
grows with the longest step."""
_MOST_S = 7 * 24 * 3600.0


def default_backend() -> str:
    """Of ``init_process_group``: gloo for the CPU, and for the devices of this process what torch has for them."""
    kind = accelerator().type
    theirs = dist.Backend.default_device_backend_map.get(kind, "gloo")
    return "gloo" if theirs == "gloo" or not dist.is_backend_available(theirs) else f"cpu:gloo,{kind}:{theirs}"


def parse_store_address(store: str) -> tuple[str, int]:
    host, colon, port = store.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise PolicyError(f"{store!r} is no HOST:PORT where a store could be")
    return host.strip("[]"), int(port)


class ProcessGroups:
    """The groups of one epoch. Everything but ``abort`` is called by the thread that trains."""

    def __init__(
        self, assignment: RankAssignment, *, backend: str | None = None, timeout: timedelta | None = None
    ) -> None:
        self._assignment = assignment
        self._backend = backend or default_backend()
        self._timeout = timeout
        self._address = parse_store_address(assignment.store)
        self._addresses: frozenset[SocketAddress] = frozenset()
        """Of the store, once this rank is on its way in."""
        self._lock = threading.Lock()
        self._open = True
        self._excepthook = sys.excepthook
        """Torch puts a new one before it in every world, and takes none away."""
        self._spread: RootlessStore | None = None
        if assignment.stores:
            self._spread = RootlessStore(
                assignment.stores, close_connections=close_store_connections, timeout=timeout or _STORE_PATIENCE
            )
        self._sweeping: OldKeyCleanup | None = None

    @property
    def epoch(self) -> int:
        return self._assignment.epoch

    def initialize(self) -> None:
        """Meet the other ranks of the epoch. Keys of other epochs are not seen: each has its own prefix."""
        place = self._assignment
        device = accelerator()
        if device.device_count():
            device.set_current(place.local_rank % device.device_count())
        if self.aborts_silently:
            disable_nccl_watchdog(os.environ)
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(epoch_prefix(place.epoch), self._store()),
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
            self._addresses = resolve_store(host, port, within_s=patience.total_seconds())
        except PeerStoreError as error:
            raise dist.DistNetworkError(f"the store of epoch {self._assignment.epoch}: {error}") from error
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)

    def _sweep(self) -> None:
        """All have met: what earlier worlds left is not needed any more. One rank for each server does it."""
        place = self._assignment
        servers = place.stores or (place.store,)
        if place.rank < len(servers) and place.epoch > 0:
            self._sweeping = OldKeyCleanup(servers[place.rank], place.epoch, close_connections=close_store_connections)

    def abort(self) -> None:
        """From any thread: whoever hangs in a collective of this epoch, or on its way in, gets an error."""
        self.abort_groups()
        self.close_connections()

    @property
    def aborts_silently(self) -> bool:
        """Whether a collective that is aborted ends without an error, with anything in its outputs. Gloo's raises."""
        return self._backend != "gloo"

    def abort_groups(self) -> None:
        """As far as their backends can: NCCL's."""
        with self._lock:
            if self._open:
                abort_groups(list(c10d._world.pg_map))

    def close_connections(self) -> None:
        """Of gloo's groups, and to the store."""
        with self._lock:
            if self._open:
                cut = close_gloo_connections() + self._cut_store()
                if cut:
                    log.info("epoch %d was aborted, %d connections cut", self._assignment.epoch, cut)

    def _cut_store(self) -> int:
        return close_store_connections(self._addresses) if self._spread is None else self._spread.abort()

    def destroy(self, *, broken: bool) -> None:
        """Forget the groups. In a broken world nobody is waited for."""
        with self._lock:
            self._open = False
        if getattr(sys.excepthook, "__name__", "") == "_distributed_excepthook":
            sys.excepthook = self._excepthook
        try:
            self._forget(broken=broken)
        finally:
            if self._sweeping is not None:
                self._sweeping.stop()
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
                abort_groups(groups)
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
                shut_down_in_background(groups)


def abort_groups(groups: Sequence[dist.ProcessGroup]) -> None:
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


class UserProcessGroups:
    """Where the train function makes its own groups (``RecoveryPolicy(backend="none")``), and leaves none behind."""

    aborts_silently = True
    """It may be anything."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def initialize(self) -> None:
        pass

    def abort_groups(self) -> None:
        pass

    def close_connections(self) -> None:
        pass

    def destroy(self, *, broken: bool) -> None:
        pass


def process_groups_for(
    assignment: RankAssignment, backend: str | None, timeout: timedelta | None
) -> ProcessGroups | UserProcessGroups:
    if backend == "none":
        return UserProcessGroups(assignment.epoch)
    return ProcessGroups(assignment, backend=backend, timeout=timeout)


_TASKS = Path("/proc/self/task")
_LOOP = "gloo_tcp_loop"
_TRIES = 50
_WATCHED = re.compile(r"^tfd:\s*(\d+).*\bino:([0-9a-f]+)", re.MULTILINE)


def close_gloo_connections() -> int:
    """End every connection that gloo has; returns how many. Whoever waits for one gets an error, here and elsewhere."""
    watched = [each for poll in _polls() for each in _watched(poll)]
    return sum(_cut(number, lambda one, inode=inode: _inode(one) == inode) for number, inode in watched)  # type: ignore[misc]


def close_store_connections(addresses: Collection[SocketAddress]) -> int:
    """End this process's connections to a store at these addresses: its client waits without looking up."""
    numbers = [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]
    return sum(_cut(number, lambda one: _remote(one) in addresses) for number in numbers)


def _polls() -> Iterator[int]:
    """The epoll descriptors of gloo's loops."""
    loops = _tasks()
    if not loops:
        yield from _polls_of_unnamed()
    for task in loops:
        for _ in range(_TRIES):  # a loop that is just handling something waits again in a moment
            if (number := _poll_of(task)) is not None:
                yield number
                break
            time.sleep(0.001)
        else:
            log.warning("a loop of gloo's was always busy; a collective that hangs there goes on until its timeout")


def _polls_of_unnamed() -> Iterator[int]:
    """Epoll descriptors of native threads without a name of their own.

    Before torch 2.13 gloo's loops are among them: they inherit the name of the Python thread that made the group.
    """
    python = {str(thread.native_id) for thread in threading.enumerate()}
    names = {task: _read(task / "comm").strip() for task in _listed()}
    inherited = {name for task, name in names.items() if task.name in python}
    unseen = [task for task, name in names.items() if name in inherited and task.name not in python]
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(0.001)
        busy = []
        for task in unseen:
            number = _poll_of(task)
            if number is None:
                busy.append(task)  # a loop at work, or a thread of another library
            else:
                yield number
        unseen = busy
        if not unseen:
            return


def _poll_of(task: Path) -> int | None:
    """The epoll descriptor that the thread waits on."""
    call = _read(task / "syscall").split()
    return number if len(call) > 1 and call[0] != "-1" and _is_poll(number := int(call[1], 16)) else None


def _listed() -> list[Path]:
    with contextlib.suppress(OSError):
        return list(_TASKS.iterdir())
    return []


def _tasks() -> list[Path]:
    return [task for task in _listed() if _read(task / "comm").strip() == _LOOP]


def _is_poll(number: int) -> bool:
    """Whatever else a loop calls has another number first, or none."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/self/fd/{number}").readlink()) == "anon_inode:[eventpoll]"
    return False


def _watched(poll: int) -> list[tuple[int, int]]:
    """The descriptors, and the inodes of their sockets: a number may be somebody else's a moment later."""
    return [
        (int(number), int(inode, 16)) for number, inode in _WATCHED.findall(_read(Path(f"/proc/self/fdinfo/{poll}")))
    ]


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):  # the thread or the descriptor has gone meanwhile
        return path.read_text()
    return ""


def _cut(number: int, is_meant: Callable[[socket.socket], bool]) -> bool:
    with contextlib.suppress(OSError), _borrowed(number) as one:
        if is_meant(one) and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            one.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _inode(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


def _remote(one: socket.socket) -> SocketAddress | None:
    if one.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    name = one.getpeername()
    return name[0].removeprefix("::ffff:"), name[1]


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """Somebody else's descriptor as a socket; closing this one leaves the other open."""
    if not stat.S_ISSOCK(os.fstat(number).st_mode):
        raise OSError(f"descriptor {number} is no socket")
    with socket.socket(fileno=os.dup(number)) as one:
        yield one


_USUAL_S = 0.25
"""Seconds within which the threads of an aborted group end, unless a watchdog sleeps."""


def backends_of(group: dist.ProcessGroup) -> list[Any]:
    """Return the backends of ``group``, each of them once."""
    found: list[Any] = []  # torch's types do not declare abort and shutdown
    for device in group._device_types:
        with contextlib.suppress(RuntimeError):  # torch makes some of them on first use
            backend = group._get_backend(device)
            if backend not in found:
                found.append(backend)
    return found


def shut_down_in_background(groups: list[dist.ProcessGroup]) -> threading.Thread:
    """Move aborted ``groups`` out of the list to a new thread, which shuts them down and drops them.

    Wait as long as that takes in the usual case, so that the next world finds no threads of this one.
    """
    owned = list(groups)
    groups.clear()
    reaper = threading.Thread(target=_shut_down, args=(owned,), name="elastic-reaper", daemon=True)
    reaper.start()
    del owned
    reaper.join(_USUAL_S)
    if reaper.is_alive():
        log.info("threads of the broken world's groups still run; a reaper waits for them")
    return reaper


def _shut_down(owned: list[dist.ProcessGroup]) -> None:
    while owned:
        backends = backends_of(owned.pop())
        while backends:
            try:
                backends.pop().shutdown()
            except RuntimeError as error:
                log.warning("a group of a broken world did not shut down: %s", error)


def disable_nccl_watchdog(environ: MutableMapping[str, str]) -> None:
    """Before the first group: set what is not set; :class:`PolicyError` where something contradicts it."""
    found = check_nccl_environment(environ)
    wrong = [one for one in found if one.state is NcclRuleState.CONTRADICTED]
    if wrong:
        said = "; ".join(f"{one}: {one.why}" for one in wrong)
        raise PolicyError(
            f"{said}. Unset {' and '.join(one.name for one in wrong)}; without recovery in the process use torchrun"
        )
    for one in found:
        if one.state is NcclRuleState.UNSET:
            environ[one.name] = one.value
