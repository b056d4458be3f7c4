"""The agent's Unix-socket server, and the lifetime of its process from the lock file to shutdown."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from peerstore.daemon_process import (
    ensure_private_directory,
    handle_signals,
    is_same_file,
    process_identity,
    raise_open_file_limit,
)
from peerstore.errors import UnavailableError
from peerstore.rpc import Dispatcher, Operation, encode_error
from peerstore.server.store_operations import store_operations
from peerstore.settings import AgentPaths, StoreSettings
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from peerstore.store.slot_metadata import EXPIRED_JOB_METADATA
from peerstore.transport.authentication import Welcome, encode_refusal, welcome_process
from peerstore.transport.base import MAX_MESSAGE_HEADER_BYTES
from peerstore.transport.unix import UnixChannel, UnixListener

log = logging.getLogger(__name__)

_SWEEP_S = 1.0


class AgentLock:
    """The held lock file of an agent's directory, which contains the agent's pid."""

    def __init__(self, place: AgentPaths) -> None:
        """Lock the directory; raise :class:`UnavailableError` if another agent serves it."""
        self._place = place
        self._check_lock = threading.Lock()
        self._fd = self._open_locked(os.O_CREAT)
        os.truncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())

    def _open_locked(self, flags: int) -> int:
        fd = os.open(self._place.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise UnavailableError(f"another agent already serves {self._place.directory}") from None
        return fd

    def find_loss(self) -> str:
        """Return why the directory is lost, or ""; restore a deleted lock file."""
        with self._check_lock:
            return self._find_loss()

    def _find_loss(self) -> str:
        directory = self._place.directory
        try:
            if is_same_file(self._place.lock, os.fstat(self._fd)):
                return ""
            restored = self._open_locked(os.O_CREAT | os.O_EXCL)
            os.write(restored, f"{os.getpid()}\n".encode())
        except FileNotFoundError:
            return f"{directory} was deleted"
        except (FileExistsError, UnavailableError):
            return f"another agent serves {directory}"
        except OSError as error:  # a full disk, for example: the next check may succeed
            log.warning("%s was deleted and cannot be restored: %s", self._place.lock, error)
            return ""
        log.warning("%s was deleted: the agent has restored it", self._place.lock)
        os.close(self._fd)
        self._fd = restored
        return ""

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def hold_agent_lock(place: AgentPaths) -> Iterator[AgentLock]:
    """Hold the directory's lock, so that it has one agent; the kernel releases it when this process exits."""
    ensure_private_directory(place.directory)
    with contextlib.closing(AgentLock(place)) as lock:
        yield lock


class StoreServer:
    """Server of :class:`~peerstore.client.store_api.Store` and ``more`` operations on a Unix socket."""

    def __init__(
        self,
        store: NodeStore,
        socket_path: Path,
        *,
        version: str = "",
        more: Mapping[str, Operation] | None = None,
        errors: tuple[type[Exception], ...] = (),
        max_message_bytes: int = MAX_MESSAGE_HEADER_BYTES,
        may_listen: Callable[[], bool] = lambda: True,
    ) -> None:
        """Listen; ``may_listen`` returns whether the socket's directory still belongs to this server."""
        self._may_listen = may_listen
        self._max_message_bytes = max_message_bytes
        self._store = store
        self._version = version
        self._requests = Dispatcher({**store_operations(store), **(more or {})}, version=version, errors=errors)
        self._stopping = threading.Event()
        self._listener = UnixListener(socket_path, self._serve, name="agent", describe_refusal=encode_refusal)
        self._sweeper = threading.Thread(target=self._sweep_loop, name="peerstore-sweep", daemon=True)

    def start(self) -> None:
        """Start to serve requests; may be repeated if no thread could be started."""
        self._listener.start()
        if self._sweeper.ident is None:
            self._sweeper.start()

    def close(self) -> None:
        """Stop serving; requests in progress end with their connections."""
        self._stopping.set()
        self._listener.close()
        if self._sweeper.ident is not None:
            self._sweeper.join()

    @property
    def connections(self) -> int:
        return self._listener.connections

    @property
    def rejected(self) -> int:
        """Connections that were refused or violated the protocol."""
        return self._listener.rejected

    def _sweep_loop(self) -> None:
        while not self._stopping.wait(_SWEEP_S):
            try:
                self._listener.restore(self._may_listen)
                self._store.sweep()
            except Exception:  # the next sweep may succeed
                log.exception("sweeping failed")

    def _serve(self, channel: UnixChannel) -> None:
        client = process_identity(channel.credentials[0])
        welcome = Welcome(version=self._version, arena_id=self._store.arena_id, start_id=self._store.start_id)
        job = welcome_process(channel, welcome)
        if job is None:
            return
        channel.describe_refusal = encode_error
        channel.max_header_bytes, channel.max_payload_bytes = self._max_message_bytes, 0
        if job:
            self._store.jobs.clients.client_connected(client, job)
        try:
            self._requests.serve(channel, client)
        finally:
            if job:
                self._store.client_disconnected(client, job)


_TICK_S = 1.0


@dataclass(frozen=True)
class AgentExtension:
    """Operations that an agent adds to the store."""

    operations: Mapping[str, Operation]
    errors: tuple[type[Exception], ...] = ()
    busy: Callable[[], bool] = lambda: False
    """Whether the agent has unfinished work, such as an upload."""


AgentExtender = Callable[[NodeStore], contextlib.AbstractContextManager[AgentExtension]]


@contextlib.contextmanager
def _plain(_: NodeStore) -> Iterator[AgentExtension]:
    yield AgentExtension({})


def daemonize() -> None:
    """Continue in a child process that init adopts, so that the caller does not wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        os._exit(0)


def serve_store(
    place: AgentPaths,
    settings: StoreSettings,
    *,
    version: str,
    linger_s: float | None = None,
    extend: AgentExtender = _plain,
) -> None:
    """Run the agent of ``place`` until SIGTERM or SIGINT, or until it was unused for ``linger_s`` seconds.

    With ``linger_s`` None the agent never exits for lack of use.
    """
    stop = threading.Event()
    handle_signals({signal.SIGTERM: stop.set, signal.SIGINT: stop.set})
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    open_files = raise_open_file_limit()
    with hold_agent_lock(place) as lock, contextlib.ExitStack() as cleanup:
        arena = TmpfsArena(place.directory)
        store = NodeStore(arena, settings)
        cleanup.callback(store.close)
        extras = cleanup.enter_context(extend(store))
        server = StoreServer(
            store,
            place.socket,
            version=version,
            more=extras.operations,
            errors=extras.errors,
            may_listen=lambda: not lock.find_loss(),
        )
        cleanup.callback(server.close)
        server.start()
        log.info(
            "agent %s serves %s (process %d, at most %d open files)",
            version,
            place.directory,
            os.getpid(),
            open_files,
        )
        cleanup.callback(store.table.lock.close)  # runs first: ends all waits for a slot

        def needed() -> bool:
            busy = bool(server.connections) or extras.busy()
            return linger_s is None or busy or store.jobs.clients.idle_s() <= linger_s

        loss = ""
        while not stop.wait(_TICK_S) and not loss and needed():
            loss = lock.find_loss()
        if loss:
            log.error("the agent exits: %s", loss)
            return
        log.info("agent leaves")
        if not stop.is_set():
            server.close()
            if not needed():  # no client connected meanwhile
                log.info("no process has needed this agent for %.0f s; releasing its memory", linger_s)
                arena.purge(keep=EXPIRED_JOB_METADATA)
        else:
            store.removal.drop_unused()
