"""The store as a process on this machine sees it: the same calls, over the node agent's socket."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from peerstore import deadlines, frames, operations
from peerstore.errors import (
    AgentUnreachableError,
    PeerRefusedError,
    PeerStoreError,
    ProtocolError,
    RequestError,
    UnavailableError,
    from_wire,
)
from peerstore.frames import PROTOCOL, Greeting, Request, Response
from peerstore.operations import patience
from peerstore.owners import peer_of, trusted_users
from peerstore.records import Group, Lease, Pin, Pinned, ShardFact, ShardKey, ShardRecord, SlotInfo, StoreStatus

_CALL_S = 60.0
_GREETING_S = 10.0
_SILENT_S = 3.0
"""After so long without a word it is looked whether the agent hangs."""
_GRACE_S = 1.0
"""Who is asked gives up in time; so long later nobody expects a word of it any more."""
_LINE_S = 0.01
_SLOWEST_BYTES_PER_S = 100e6
_ADOPTION_S = 660.0
T = TypeVar("T")

Connector = Callable[[], socket.socket]


def connect(path: Path, *, timeout_s: float = 5.0, named: bool = False) -> socket.socket:
    """A connection to the agent's socket, or :class:`AgentUnreachableError`.

    Nothing is sent to, or believed of, another user's process: :class:`PeerRefusedError` when the socket's directory is
    not to be trusted, or who listens there is somebody else (see :func:`~peerstore.owners.trusted_users`).
    """
    try:
        trusted = trusted_users(path.parent, named=named)
    except PermissionError as error:
        raise PeerRefusedError(f"the agent on {path.name} is not used: {error}") from None
    except OSError as error:
        raise AgentUnreachableError(f"no agent answers on {path}: {error}") from error
    sock = _connected(path, timeout_s)
    try:
        _, uid = peer_of(sock)
    except OSError as error:
        sock.close()
        raise AgentUnreachableError(f"who answers on {path} cannot be seen: {error}") from error
    if uid not in trusted:  # the directory was exchanged meanwhile
        sock.close()
        raise PeerRefusedError(f"a process of user {uid} listens on {path}: it is not the agent of user {os.getuid()}")
    return sock


def _connected(path: Path, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    timeout_s = max(_LINE_S, deadlines.left(timeout_s))
    sock.settimeout(timeout_s)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock.connect(str(path))
        except BlockingIOError as error:  # more wait to be accepted than the kernel keeps in line
            if time.monotonic() > deadline:
                sock.close()
                raise AgentUnreachableError(f"the agent on {path} accepts nobody for {timeout_s:.1f} s") from error
            time.sleep(_LINE_S)
        except OSError as error:
            sock.close()
            raise AgentUnreachableError(f"no agent answers on {path}: {error}") from error
        else:
            return sock


def _silent(sock: socket.socket, what: str, since: float) -> str:
    return (
        f"the agent (process {peer_of(sock)[0]}) {what}: nothing was heard of it for {time.monotonic() - since:.1f} s. "
        "It hangs, was stopped or is overwhelmed"
    )


def _brought(fd: int | None, what: str) -> int:
    if fd is None:  # this process has as many open files as it may have
        raise UnavailableError(f"the file of {what} could not be taken over: raise the limit on open files (ulimit -n)")
    return fd


class Client:
    """A :class:`~peerstore.operations.Store` behind a socket.

    Any thread may call; each call has a connection to itself. When the agent dies in the middle of a call, the
    call is repeated on a new connection (``connector`` may start a new agent) for up to ``retry_s``. After that has
    been in vain, calls are tried once until one gets through: who waits in them loses that time only once.
    """

    def __init__(
        self,
        connector: Connector,
        *,
        job: str = "",
        retry_s: float = 20.0,
        errors: Mapping[str, type[Exception]] | None = None,
        replace: Callable[[], bool] = lambda: False,
    ) -> None:
        """``replace`` is asked when the agent says nothing: it ends one that hangs, so that there can be another; where
        that is not this process's business it raises :class:`AgentUnreachableError`, and nobody waits any longer.
        """
        self._connector = connector
        self._replace = replace
        self._job = job
        self._retry_s = retry_s
        self._errors = dict(errors or {})
        self._idle: list[socket.socket] = []
        self._closed = False
        self._given_up = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._heeds_deadlines = False
        self.server_version = ""
        self.arena_id = self.started = ""
        self._give_back(self._open(time.monotonic() + deadlines.left(retry_s)))

    # -- Store ------------------------------------------------------------------------------------------------

    def epoch(self, job: str) -> int:
        return self.call("epoch", operations.EpochOf(job), int)

    def claim(self, job: str, incarnation: str, *, at_least: int = 0) -> int:
        return self.call("claim", operations.Claim(job, incarnation, at_least), int)

    def lease(self, key: ShardKey, size_bytes: int, parts: int, *, wait_s: float = 0.0) -> Lease:
        ask = operations.TakeLease(key, size_bytes, parts, wait_s)
        return self.call("lease", ask, Lease, timeout_s=patience(wait_s) + _CALL_S)

    def grow(self, lease_id: str, size_bytes: int, *, wait_s: float = 0.0) -> Lease:
        ask = operations.Grow(lease_id, size_bytes, wait_s)
        return self.call("grow", ask, Lease, timeout_s=patience(wait_s) + _CALL_S)

    def open_slot(self, slot: str) -> int:
        _, fd = self._asked("open_slot", operations.OpenSlot(slot), type(None))
        return _brought(fd, slot)

    def relabel(self, lease_id: str, key: ShardKey) -> Lease:
        return self.call("relabel", operations.Relabel(lease_id, key), Lease)

    def seal(self, lease_id: str, size_bytes: int, meta: bytes = b"", blobs: Collection[str] = ()) -> ShardRecord:
        timeout = _CALL_S + size_bytes / _SLOWEST_BYTES_PER_S
        asked = operations.Seal(lease_id, size_bytes, meta, tuple(blobs))
        return self.call("seal", asked, ShardRecord, timeout_s=timeout)

    def abandon(self, lease_id: str) -> None:
        self.call("abandon", operations.Abandon(lease_id), type(None))

    def reserve(self, job: str, part: int, size_bytes: int, *, slots: int = 0) -> list[SlotInfo]:
        return self.call("reserve", operations.Reserve(job, part, size_bytes, slots), list[SlotInfo])

    def inventory(self, job: str | None = None) -> list[ShardFact]:
        return self.call("inventory", operations.Inventory(job), list[ShardFact], timeout_s=_ADOPTION_S)

    def pin(self, key: ShardKey) -> Pin:
        pinned, fd = self._asked("pin", operations.TakePin(key), Pinned, timeout_s=_ADOPTION_S)
        if fd is None:
            self.unpin(pinned.id)
        return Pin(pinned.id, pinned.record, _brought(fd, str(key)))

    def unpin(self, pin_id: str) -> bool:
        return self.call("unpin", operations.Unpin(pin_id), bool)

    def verify(self, key: ShardKey, chunks: tuple[int, int] | None = None) -> tuple[int, ...]:
        return self.call("verify", operations.Verify(key, chunks), tuple[int, ...], timeout_s=_ADOPTION_S)

    def report(self, key: ShardKey, reason: str) -> None:
        self.call("report", operations.Report(key, reason), type(None))

    def call_whole(self, job: str, group: Group) -> None:
        self.call("mark_whole", operations.CallWhole(job, group), type(None))

    def leave_out(self, job: str, group: Group, part: int) -> None:
        self.call("leave_out", operations.LeaveOut(job, group, part), type(None))

    def newest_whole(self, job: str) -> Group | None:
        return self.call("newest_whole", operations.EpochOf(job), Group | None)

    def forget(self, job: str, groups: list[Group] | None = None) -> int:
        return self.call("forget", operations.Forget(job, groups), int)

    def keep(self, job: str, group: Group, *, kept: bool = True) -> None:
        self.call("keep", operations.Keep(job, group, kept), type(None))

    def kept(self, job: str) -> set[Group]:
        return self.call("kept", operations.EpochOf(job), set[Group])

    def put_blob(self, job: str, name: str, data: bytes) -> None:
        self.call("put_blob", operations.PutBlob(job, name, data), type(None))

    def get_blob(self, job: str, name: str) -> bytes:
        return self.call("get_blob", operations.GetBlob(job, name), bytes)

    def blobs(self, job: str) -> list[str]:
        return self.call("blobs", operations.EpochOf(job), list[str])

    def remove_blob(self, job: str, name: str) -> None:
        self.call("remove_blob", operations.GetBlob(job, name), type(None))

    def drop_aside(self, names: list[str] | None = None) -> int:
        return self.call("drop_aside", operations.DropAside(names), int)

    def status(self) -> StoreStatus:
        return self.call("status", operations.Status(), StoreStatus)

    def answers(self, *, timeout_s: float) -> None:
        """Nothing, once the agent has said anything."""
        self.call("epoch", operations.EpochOf("nobody"), int, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the connections; one in the middle of a call is closed when the call ends."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for sock in idle:
            sock.close()

    # -- any operation ----------------------------------------------------------------------------------------

    def call(
        self,
        op: str,
        body: object,
        result: type[T] | Any,
        *,
        timeout_s: float = _CALL_S,
        within_s: float | None = None,
    ) -> Any:
        """Ask the agent for ``op``; the answer as a ``result``, or the error it raised.

        ``timeout_s`` is for the answer to one try, ``within_s`` for everything, an agent that is started included.
        """
        found, fd = self._asked(op, body, result, timeout_s=timeout_s, within_s=within_s)
        if fd is not None:  # nobody asked for it
            os.close(fd)
        return found

    def _asked(
        self,
        op: str,
        body: object,
        result: type[T] | Any,
        *,
        timeout_s: float = _CALL_S,
        within_s: float | None = None,
    ) -> tuple[Any, int | None]:
        """The answer, and the open file that came with it."""
        if deadlines.over():
            raise AgentUnreachableError(f"no time was left to ask the agent {op!r}")
        with deadlines.within(within_s):
            return self._ask(op, body, result, timeout_s)

    def _ask(self, op: str, body: object, result: type[T] | Any, timeout_s: float) -> tuple[Any, int | None]:
        raw, began = frames.encode_raw(body), time.monotonic()
        deadline = began + deadlines.left(self._retry_s)
        sock = self._take(deadline)
        while True:
            try:
                left_s = deadlines.left(timeout_s)
                sock.settimeout(left_s + _GRACE_S)
                frames.send(sock, self._request(op, raw, left_s))
                self._await_answer(sock, left_s + _GRACE_S)
                response, fd = frames.receive_with_file(sock, Response)
                if response is None:
                    raise AgentUnreachableError("the agent closed the connection")
                break
            except TimeoutError as error:
                silent = _silent(sock, f"did not answer {op!r}", began)
                sock.close()
                raise AgentUnreachableError(silent) from error
            except (AgentUnreachableError, OSError) as error:
                sock.close()
                if time.monotonic() >= deadline:
                    raise AgentUnreachableError(f"the agent was lost while it was asked {op!r}: {error}") from error
                sock = self._open(deadline)
            except BaseException:
                sock.close()
                raise
        self._give_back(sock)
        try:
            if response.error:
                raise self._error(response)
            return frames.decode(response.body, result), fd
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise

    def _request(self, op: str, body: msgspec.Raw, left_s: float) -> object:
        """Agents of releases that knew no deadlines take requests without."""
        return Request(op, body, left_s) if self._heeds_deadlines else (op, body)

    def _await_answer(self, sock: socket.socket, timeout_s: float) -> None:
        """Until something comes. An agent that is at work may say nothing for long; one that hangs is replaced, where
        there is time to prove that.
        """
        until = time.monotonic() + timeout_s
        waiting = select.poll()
        waiting.register(sock, select.POLLIN)
        while not waiting.poll(1000 * min(_SILENT_S, max(0.0, until - time.monotonic()))):
            if time.monotonic() >= until:
                raise TimeoutError
            if until - time.monotonic() > _SILENT_S:
                self._replace()

    def tell(
        self, op: str, body: object, *, timeout_s: float, seek: Connector | None = None, answer: type[T] | Any = None
    ) -> Any:
        """Say something the agent may miss, on a connection that is open, or on one that ``seek`` finds: nothing is
        repeated, and no agent is started to hear it. What it answers as an ``answer``; ``None`` without one.
        """
        with self._lock:
            sock = self._idle.pop() if self._idle and self._pid == os.getpid() else None
        with contextlib.suppress(PeerStoreError, OSError), contextlib.ExitStack() as undo:
            if sock is None and seek is not None and not self._closed:
                sock = self._greet(seek(), timeout_s)
            if sock is None:
                return None
            undo.callback(sock.close)
            sock.settimeout(timeout_s)
            frames.send(sock, self._request(op, frames.encode_raw(body), timeout_s))
            response = frames.receive(sock, Response)
            if response is not None:
                undo.pop_all()
                self._give_back(sock)
                if answer is not None and not response.error:
                    return frames.decode(response.body, answer)
        return None

    def _error(self, response: Response) -> Exception:
        message = frames.decode(response.body, str)
        kind = self._errors.get(response.error)
        return kind(message) if kind is not None else from_wire(response.error, message)

    def _take(self, deadline: float) -> socket.socket:
        with self._lock:
            if self._pid != os.getpid():  # a forked child must not talk on its parent's connections
                inherited, self._idle, self._pid = self._idle, [], os.getpid()
                for sock in inherited:
                    sock.close()
            if self._idle:
                return self._idle.pop()
        return self._open(deadline)

    def _give_back(self, sock: socket.socket) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(sock)
                return
        sock.close()

    def _open(self, deadline: float) -> socket.socket:
        if self._closed:  # a new connection might have an agent started again
            raise RequestError("this client is closed: its job's checkpointer or session has ended")
        pause = 0.02
        while True:
            try:
                sock = self._greet(self._connector(), max(0.1, deadlines.left(_GREETING_S)))
                self._given_up = False
                return sock
            except (AgentUnreachableError, OSError) as error:
                in_time = deadlines.left() > _SILENT_S
                replaced = isinstance(error, TimeoutError) and in_time and self._replace()
                if not replaced and (self._given_up or time.monotonic() + pause >= deadline):
                    self._given_up = True
                    if isinstance(error, TimeoutError):
                        raise AgentUnreachableError(str(error)) from error
                    raise
                time.sleep(pause)
                pause = min(pause * 2, 1.0)

    def _greet(self, sock: socket.socket, timeout_s: float) -> socket.socket:
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            sock.settimeout(timeout_s)
            began = time.monotonic()
            try:
                frames.send(sock, Greeting(PROTOCOL, self._job))
                answer = frames.receive(sock, Greeting, limit_bytes=frames.MAX_GREETING_BYTES)
            except TimeoutError:
                raise TimeoutError(_silent(sock, "takes connections and does not greet", began)) from None
            if answer is None:
                raise AgentUnreachableError("the agent closed the connection before it greeted")
            if answer.refused and answer.protocol == PROTOCOL:
                raise RequestError(f"the agent refused this process: {answer.refused}")
            if answer.protocol != PROTOCOL:
                raise ProtocolError(
                    f"the agent speaks protocol {answer.protocol} (version {answer.server or 'unknown'}), "
                    f"this client {PROTOCOL}: use the same release for both"
                )
            self.server_version, self.arena_id, self.started = answer.server, answer.arena, answer.started
            self._heeds_deadlines = answer.heeds_deadlines
            undo.pop_all()
        return sock
