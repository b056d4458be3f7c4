"""Unix sockets: messages, with open files, between processes of one machine."""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from peerstore import deadlines
from peerstore.daemon_process import is_same_file, peer_credentials, trusted_users
from peerstore.errors import AgentUnreachableError, PeerRefusedError, PeerUnreachableError, ProtocolError
from peerstore.transport.base import Payload
from peerstore.transport.connection_threads import ConnectionThreads
from peerstore.transport.framing import FramedChannel, SocketStream, close_on_error, encode_frame

log = logging.getLogger(__name__)

MESSAGE_S = 60.0
"""Seconds that one message may take after its first byte."""
_MAX_CONNECTIONS = 1024
_BACKLOG = 128
_PAUSE_S = 0.1
_CONNECT_RETRY_S = 0.01
_UNREAD_READS = 64
_UNREAD_BYTES = 1 << 16


class UnixStream(SocketStream):
    """A stream of bytes on a Unix socket, and the open files that come with them."""

    def __init__(self, sock: socket.socket, *, takes_files: bool = False) -> None:
        super().__init__(sock)
        self._takes_files = takes_files
        self._is_shut = False
        self.outgoing: int | None = None
        """Descriptor to send with the next bytes."""
        self.incoming: list[int] = []
        """Received descriptors, which the owner closes."""

    def send(self, views: list[memoryview], *, more: bool, within_s: float) -> int:
        if self.outgoing is None:
            return super().send(views, more=more, within_s=within_s)
        file = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self.outgoing]))]
        count = self._attempt(lambda: self._sock.sendmsg(views, file, socket.MSG_NOSIGNAL), select.POLLOUT, within_s)
        self.outgoing = None
        return count

    def receive(self, views: list[memoryview], *, within_s: float | None) -> int:
        if not self._takes_files:  # the kernel closes a descriptor that comes with the bytes
            return super().receive(views, within_s=within_s)
        return self._attempt(partial(self._receive_with_files, views), select.POLLIN, within_s)

    def _receive_with_files(self, views: list[memoryview]) -> int:
        room = socket.CMSG_SPACE(array.array("i").itemsize)
        count, ancillary, _, _ = self._sock.recvmsg_into(views, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                files = array.array("i")
                files.frombytes(data[: len(data) - len(data) % files.itemsize])
                self.incoming.extend(files)
        return count

    def shut(self) -> None:
        self._is_shut = True
        super().shut()

    def close(self) -> None:
        """Close the socket.

        Arrived bytes are read first, because unread ones would discard the last message to the peer.
        """
        with contextlib.suppress(OSError):
            for _ in range(_UNREAD_READS if self._is_shut else 0):
                if not self._sock.recv(_UNREAD_BYTES):
                    break
        for fd in self.incoming:
            os.close(fd)
        self.incoming.clear()
        super().close()


class UnixChannel(FramedChannel):
    """A channel to another process of this machine, identified by the kernel.

    ``takes_files``: whether messages of the other process may come with an open file.
    """

    def __init__(self, sock: socket.socket, peer: str = "", *, takes_files: bool = False) -> None:
        self._unix = UnixStream(sock, takes_files=takes_files)
        self._sock = sock
        super().__init__(self._unix, peer, MESSAGE_S)

    @property
    def credentials(self) -> tuple[int, int]:
        """The pid and user id of the other process, as of its connection."""
        return peer_credentials(self._sock)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, header: bytes, payload: Payload = (), *, fd: int | None = None) -> None:
        """Send a message; ``fd`` travels with its first byte."""
        self._unix.outgoing = fd
        try:
            super().send(header, payload)
        finally:
            self._unix.outgoing = None

    def try_send(self, header: bytes) -> bool:
        """Send a message if the socket's buffer has room for it; the channel is unusable if it does not."""
        data = encode_frame(header)
        try:
            return self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL) == len(data)
        except OSError:
            return False

    def shut(self) -> None:
        """End both directions and wake waiting threads; callable from any thread."""
        self._unix.shut()

    def take_file(self) -> int | None:
        """Return the open file that came with the last message, which the caller closes."""
        files, self._unix.incoming = self._unix.incoming, []
        for extra in files[1:]:
            os.close(extra)
        return files[0] if files else None

    def wait_readable(self, within_s: float) -> bool:
        """Return whether a message begins, or the connection ends, within this time."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return bool(poller.poll(max(0.0, within_s) * 1000))


def connect_to_agent(path: Path, *, timeout_s: float = 5.0, named: bool = False) -> socket.socket:
    """Return a connection to the agent's socket; raise :class:`AgentUnreachableError` if that fails.

    Raise :class:`PeerRefusedError` if the socket's directory is not trusted or another user's process listens (see
    :func:`~peerstore.daemon_process.trusted_users`). Nothing is sent to such a process.
    """
    try:
        trusted = trusted_users(path.parent, named=named)
    except PermissionError as error:
        raise PeerRefusedError(f"the agent on {path.name} is not used: {error}") from None
    except OSError as error:
        raise AgentUnreachableError(f"no agent answers on {path}: {error}") from error
    sock = _connect(path, timeout_s)
    try:
        _, uid = peer_credentials(sock)
    except OSError as error:
        sock.close()
        raise AgentUnreachableError(f"cannot identify the process that listens on {path}: {error}") from error
    if uid not in trusted:  # the directory was replaced meanwhile
        sock.close()
        raise PeerRefusedError(f"a process of user {uid} listens on {path}: it is not the agent of user {os.getuid()}")
    return sock


def _connect(path: Path, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    timeout_s = max(_CONNECT_RETRY_S, deadlines.remaining_s(timeout_s))
    sock.settimeout(timeout_s)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock.connect(str(path))
        except BlockingIOError as error:  # the kernel's queue of unaccepted connections is full
            if time.monotonic() > deadline:
                sock.close()
                raise AgentUnreachableError(
                    f"the agent on {path} accepted no connection for {timeout_s:.1f} s"
                ) from error
            time.sleep(_CONNECT_RETRY_S)
        except OSError as error:
            sock.close()
            raise AgentUnreachableError(f"no agent answers on {path}: {error}") from error
        else:
            return sock


class UnixListener:
    """A listener at ``path`` that only processes of this user and of root may use.

    ``serve`` runs with each accepted channel on a thread of its own; afterwards the channel is closed.
    ``describe_refusal`` returns the last message to a process of another user, or to one that violates the protocol.
    """

    def __init__(
        self,
        path: Path,
        serve: Callable[[UnixChannel], None],
        *,
        name: str,
        describe_refusal: Callable[[ProtocolError], bytes],
    ) -> None:
        self._path = path
        self._serve = serve
        self._describe_refusal = describe_refusal
        self._name = name
        self._threads = ConnectionThreads(self._serve_user, most=_MAX_CONNECTIONS)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self.rejected = 0
        """Connections that were refused or violated the protocol."""
        self._listener, self._file = _bind(path)
        self._thread = threading.Thread(target=self._accept_loop, name=f"{name}-accept", daemon=True)

    def start(self) -> None:
        """Accept connections; may be repeated if no thread could be started."""
        if self._thread.ident is None:
            self._thread.start()

    @property
    def connections(self) -> int:
        return len(self._threads)

    def restore(self, may_listen: Callable[[], bool] = lambda: True) -> None:
        """Listen on a new socket if the socket's file was deleted or replaced."""
        with self._lock:
            if self._stopping.is_set() or not may_listen() or is_same_file(self._path, self._file):
                return
            try:
                before, (self._listener, self._file) = self._listener, _bind(self._path)
            except OSError as error:
                log.warning("%s was deleted and cannot be made again: %s", self._path, error)
                return
            _shut_down(before)
        log.warning("%s was deleted: the agent listens on a new socket there", self._path)

    def close(self) -> None:
        """Remove the socket's file, then end all connections and wait for their threads.

        A socket file without a listener therefore means that its process died.
        """
        self._stopping.set()
        with self._lock, contextlib.suppress(OSError):  # the directory may have become inaccessible
            if is_same_file(self._path, self._file):
                self._path.unlink(missing_ok=True)
        _shut_down(self._listener)
        self._listener.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._threads.close()

    def _accept_loop(self) -> None:
        while not self._stopping.is_set():
            listener = self._listener
            try:
                sock, _ = listener.accept()
            except OSError as error:  # most likely too many open files, which is transient
                if listener is not self._listener:
                    listener.close()
                elif not self._stopping.wait(_PAUSE_S):
                    log.warning("a connection could not be accepted: %s", error)
                continue
            with close_on_error(sock):
                if not self._threads.serve(partial(UnixChannel, sock, self._name), self._name):
                    self.rejected += 1
                    sock.close()

    def _serve_user(self, channel: UnixChannel) -> None:
        """Serve a process of this user or of root."""
        try:
            channel.describe_refusal = self._describe_refusal
            _, uid = channel.credentials
            if uid not in (os.getuid(), 0):
                error = ProtocolError(f"user {uid} may not use the {self._name} of user {os.getuid()}")
                channel.refuse(error)
                raise error
            self._serve(channel)
        except ProtocolError:
            self.rejected += 1
            raise
        except PeerUnreachableError:
            if not self._stopping.is_set():
                raise


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
        listener.listen(_BACKLOG)
        undo.pop_all()
    return listener, found


def _shut_down(sock: socket.socket) -> None:
    """Wake the threads that wait on the socket; an unconnected socket is left alone."""
    for _ in range(3):
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno in (errno.ENOTCONN, errno.EBADF):
                return
        else:
            return
