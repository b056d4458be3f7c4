"""The agent's Unix-socket server, and the lifetime of its process from the lock file to shutdown."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from peerstore import deadlines, message_codec
from peerstore.daemon_process import (
    ProcessIdentity,
    handle_signals,
    peer_credentials,
    process_identity,
    raise_open_file_limit,
)
from peerstore.errors import AgentUnreachableError, PeerStoreError, ProtocolError, RequestError, UnavailableError
from peerstore.message_codec import AGENT_PROTOCOL_VERSION, AgentHello, AgentRequest, AgentResponse
from peerstore.server.store_api import Operation, ResultWithFile, store_operations
from peerstore.settings import AgentPaths, StoreSettings
from peerstore.shard_records import validate_job_name
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from peerstore.store.slot_metadata import EXPIRED_JOB_METADATA

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 1024
_GREETING_S = 10.0
_FRAME_S = 60.0
"""Seconds that one frame may take after its first byte."""
_PAUSE_S = 0.1
_DRAIN_READS = 64
_TRIES = 3
_SWEEP_S = 1.0
_CLOSE_GRACE_S = 5.0


def ensure_private_directory(path: Path) -> None:
    """Create ``path`` as a private directory of this user, or check that it is one.

    Raise :class:`RequestError` if another user owns it or can enter it. Created parent directories are private as well,
    because another agent may use one of them later. A private directory without access for its owner, as after ``chmod
    000``, gets mode 0700 again.
    """
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not mode & 0o077 and mode & 0o700 != 0o700:
            folder.chmod(0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RequestError(
            f"{path} must be a directory of user {os.getuid()} with mode 0700, it belongs to {found.st_uid} with "
            f"mode {stat.S_IMODE(found.st_mode):04o}: remove it or choose another directory"
        )


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


def is_same_file(path: Path, expected: os.stat_result) -> bool:
    """Return whether ``path`` is still the same file."""
    try:
        return os.path.samestat(path.lstat(), expected)
    except FileNotFoundError:
        return False


class StoreServer:
    """Server of :class:`~peerstore.server.store_api.Store` and ``more`` operations on a Unix socket."""

    def __init__(
        self,
        store: NodeStore,
        socket_path: Path,
        *,
        version: str = "",
        more: Mapping[str, Operation] | None = None,
        errors: tuple[type[Exception], ...] = (),
        frame_bytes: int = message_codec.MAX_FRAME_BYTES,
        may_listen: Callable[[], bool] = lambda: True,
    ) -> None:
        """Listen; ``may_listen`` returns whether the socket's directory still belongs to this server."""
        self._may_listen = may_listen
        self._frame_bytes = frame_bytes
        self._store = store
        self._version = version
        self._operations = {**store_operations(store), **(more or {})}
        self._errors = (PeerStoreError, *errors)
        self._path = socket_path
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._connection_closed = threading.Condition(self._lock)
        self._stopping = threading.Event()
        self.rejected = 0
        self._socket_lock = threading.Lock()
        self._listener, self._socket_file = _bind(socket_path)
        self._threads = [
            threading.Thread(target=self._accept_loop, name="peerstore-accept", daemon=True),
            threading.Thread(target=self._sweep_loop, name="peerstore-sweep", daemon=True),
        ]

    def start(self) -> None:
        """Start to serve requests; may be repeated if no thread could be started."""
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def close(self) -> None:
        """Stop serving; requests in progress end with their connections.

        The socket's file is removed first: a socket file without a listener means that the agent died.
        """
        self._stopping.set()
        with self._socket_lock:
            if is_same_file(self._path, self._socket_file):
                self._path.unlink(missing_ok=True)
        _shut_down(self._listener)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                _shut_down(connection)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        with self._connection_closed:
            self._connection_closed.wait_for(lambda: not self._connections, _CLOSE_GRACE_S)

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._connections)

    def _accept_loop(self) -> None:
        while not self._stopping.is_set():
            listener = self._listener
            try:
                connection, _ = listener.accept()
            except OSError as error:  # most likely too many open files, which is transient
                if listener is not self._listener:
                    listener.close()
                elif not self._stopping.wait(_PAUSE_S):
                    log.warning("a connection could not be accepted: %s", error)
                continue
            with self._lock:
                if len(self._connections) >= _MAX_CONNECTIONS:
                    connection.close()
                    self.rejected += 1
                    continue
                self._connections.add(connection)
            try:
                threading.Thread(target=self._serve, args=(connection,), name="peerstore-serve", daemon=True).start()
            except RuntimeError as error:
                log.warning("no thread for a connection: %s", error)
                self._forget(connection)

    def _sweep_loop(self) -> None:
        while not self._stopping.wait(_SWEEP_S):
            try:
                self._restore_socket()
                self._store.sweep()
            except Exception:  # the next sweep may succeed
                log.exception("sweeping failed")

    def _restore_socket(self) -> None:
        """Listen on a new socket if the socket's file was deleted or replaced."""
        with self._socket_lock:
            if self._stopping.is_set() or not self._may_listen() or is_same_file(self._path, self._socket_file):
                return
            try:
                before, (self._listener, self._socket_file) = self._listener, _bind(self._path)
            except OSError as error:
                log.warning("%s was deleted and cannot be made again: %s", self._path, error)
                return
            _shut_down(before)
        log.warning("%s was deleted: the agent listens on a new socket there", self._path)

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._serve_requests(connection)
        except (ProtocolError, AgentUnreachableError, OSError) as error:
            if not self._stopping.is_set():
                self.rejected += isinstance(error, ProtocolError)
                log.info("connection ended: %s", error)
        except Exception:
            log.exception("connection ended unexpectedly")
        finally:
            self._forget(connection)

    def _forget(self, connection: socket.socket) -> None:
        connection.close()
        with self._lock:
            self._connections.discard(connection)
            self._connection_closed.notify_all()

    def _serve_requests(self, connection: socket.socket) -> None:
        connection.settimeout(_GREETING_S)
        try:
            owner, job = self._admit(connection)
        except RequestError as error:
            _send_final(connection, AgentHello(AGENT_PROTOCOL_VERSION, "", self._version, refused=str(error)))
            raise
        if owner is None:
            return
        arena, started = self._store.arena_id, self._store.start_id
        message_codec.send_frame(connection, AgentHello(AGENT_PROTOCOL_VERSION, job, self._version, arena, started))
        if job:
            self._store.jobs.clients.client_connected(owner, job)
        try:
            while (request := self._receive_request(connection)) is not None:
                connection.settimeout(_FRAME_S)
                self._send(connection, *self._answer(request, owner))
        finally:
            if job:
                self._store.client_disconnected(owner, job)

    def _admit(self, connection: socket.socket) -> tuple[ProcessIdentity | None, str]:
        """Return the client process and its job, or (``None``, "") if it disconnected before the greeting."""
        owner = _client_process(connection)
        greeting = message_codec.receive_frame(
            connection, AgentHello, limit_bytes=message_codec.MAX_AGENT_HELLO_BYTES, within_s=_GREETING_S
        )
        if greeting is None:
            return None, ""
        if greeting.protocol != AGENT_PROTOCOL_VERSION:
            raise ProtocolError(f"client speaks protocol {greeting.protocol}, this is {AGENT_PROTOCOL_VERSION}")
        return owner, validate_job_name(greeting.job) if greeting.job else ""

    def _receive_request(self, connection: socket.socket) -> AgentRequest | None:
        """Return the next request, without a limit on the time until it begins."""
        connection.settimeout(None)
        try:
            return message_codec.receive_frame(
                connection, AgentRequest, limit_bytes=self._frame_bytes, within_s=_FRAME_S
            )
        except ProtocolError as error:
            connection.settimeout(_FRAME_S)
            _send_final(connection, AgentResponse(type(error).__name__, message_codec.encode_raw_message(str(error))))
            raise

    def _send(self, connection: socket.socket, response: AgentResponse, file: ResultWithFile | None) -> None:
        try:
            fd = file.fd if file is not None else None
            message_codec.send_frame(connection, response, limit_bytes=self._frame_bytes, fd=fd)
        except ProtocolError as error:  # the response is too large, and none of it was sent
            message_codec.send_frame(
                connection, AgentResponse("PeerStoreError", message_codec.encode_raw_message(str(error)))
            )
        except BaseException:
            if file is not None:
                file.undo()
            raise
        finally:
            if file is not None:
                file.close()

    def _answer(self, request: AgentRequest, owner: ProcessIdentity) -> tuple[AgentResponse, ResultWithFile | None]:
        try:
            operation = self._operations.get(request.op)
            if operation is None:
                raise RequestError(f"this agent ({self._version or 'unknown version'}) has no operation {request.op!r}")
            with deadlines.timeout_scope(request.remaining_s):
                result = operation.answer(message_codec.decode_message(request.body, operation.args), owner)
            file = result if isinstance(result, ResultWithFile) else None
            return AgentResponse("", message_codec.encode_raw_message(result if file is None else file.result)), file
        except self._errors as error:  # type: ignore[misc]  # a tuple of classes, some given by the caller
            return AgentResponse(type(error).__name__, message_codec.encode_raw_message(str(error))), None
        except (OSError, MemoryError) as error:  # the machine failed, not the requested object
            log.warning("operation %s failed: %s", request.op, error)
            message = f"{request.op}: {type(error).__name__}: {error}"
            return AgentResponse(UnavailableError.__name__, message_codec.encode_raw_message(message)), None
        except Exception as error:
            log.exception("operation %s failed", request.op)
            message = f"internal error: {type(error).__name__}: {error}"
            return AgentResponse("PeerStoreError", message_codec.encode_raw_message(message)), None


def _bind(path: Path) -> tuple[socket.socket, os.stat_result]:
    """Return a socket at ``path`` that only this user can connect to, and its file.

    It is bound to exactly that path, which the kernel lists.
    """
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        found = path.lstat()
        listener.listen(128)
        undo.pop_all()
    return listener, found


def _shut_down(sock: socket.socket) -> None:
    """Wake the threads that wait on the socket, with retries; an unconnected socket is left alone."""
    for _ in range(_TRIES):
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno in (errno.ENOTCONN, errno.EBADF):
                return
        else:
            return


def _send_final(connection: socket.socket, message: object) -> None:
    """Send the reason for closing to a client that may not read it."""
    with contextlib.suppress(OSError):
        message_codec.send_frame(connection, message)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(_PAUSE_S)
        for _ in range(_DRAIN_READS):  # closing with unread bytes would discard the message
            if not connection.recv(1 << 16):
                return


def _client_process(connection: socket.socket) -> ProcessIdentity:
    """Return the connected process; raise :class:`ProtocolError` unless it belongs to this user or root."""
    pid, uid = peer_credentials(connection)
    if uid not in (os.getuid(), 0):
        raise ProtocolError(f"user {uid} may not use the store of user {os.getuid()}")
    return process_identity(pid)


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
        cleanup.callback(store.table.close)  # runs first: ends all waits for a slot

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
