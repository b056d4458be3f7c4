"""Client of the store for local processes: connections, retries, deadlines, hung agents."""

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

from peerstore import deadlines, message_codec
from peerstore.daemon_process import peer_credentials, trusted_users
from peerstore.errors import (
    AgentUnreachableError,
    PeerRefusedError,
    PeerStoreError,
    ProtocolError,
    RequestError,
    UnavailableError,
    error_from_wire,
)
from peerstore.message_codec import AGENT_PROTOCOL_VERSION, AgentHello, AgentRequest, AgentResponse
from peerstore.server import store_api
from peerstore.server.store_api import clamp_wait_s
from peerstore.shard_records import (
    Lease,
    Pin,
    PinResponse,
    ShardInfo,
    ShardKey,
    ShardRecord,
    SlotInfo,
    StoreStatus,
    VersionId,
)

_CALL_S = 60.0
_GREETING_S = 10.0
_SILENT_S = 3.0
"""Seconds without a response after which the client checks whether the agent hangs."""
_GRACE_S = 1.0
"""Seconds that the client waits beyond a request's deadline, at which the agent itself gives up."""
_CONNECT_RETRY_S = 0.01
_SLOWEST_BYTES_PER_S = 100e6
_ADOPTION_S = 660.0
T = TypeVar("T")

AgentConnector = Callable[[], socket.socket]


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


def _silence_message(sock: socket.socket, what: str, since: float) -> str:
    return (
        f"the agent (process {peer_credentials(sock)[0]}) {what}: nothing was heard of it for "
        f"{time.monotonic() - since:.1f} s. "
        "It hangs, was stopped or is overwhelmed"
    )


def _require_fd(fd: int | None, what: str) -> int:
    if fd is None:  # this process has reached its limit of open files
        raise UnavailableError(f"the file of {what} could not be taken over: raise the limit on open files (ulimit -n)")
    return fd


class Client:
    """A :class:`~peerstore.server.store_api.Store` behind a socket.

    Thread-safe; each call uses its own connection. When the agent dies during a call, the client repeats the call on a
    new connection for up to ``retry_s`` seconds. ``connector`` may launch a new agent. If the call still fails, later
    calls are tried once until one succeeds, so callers lose that time only once.
    """

    def __init__(
        self,
        connector: AgentConnector,
        *,
        job: str = "",
        retry_s: float = 20.0,
        errors: Mapping[str, type[Exception]] | None = None,
        replace: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect to the agent.

        ``replace`` is called when the agent does not respond: it kills a hung agent, so that another one can start. If
        this process must not do that, ``replace`` raises :class:`AgentUnreachableError`, which ends the call.
        """
        self._connector = connector
        self._replace = replace
        self._job = job
        self._retry_s = retry_s
        self._errors = dict(errors or {})
        self._idle: list[socket.socket] = []
        self._closed = False
        self._unreachable = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self.server_version = ""
        self.arena_id = self.start_id = ""
        self._return_connection(self._open(time.monotonic() + deadlines.remaining_s(retry_s)))

    # -- Store ------------------------------------------------------------------------------------------------

    def epoch(self, job: str) -> int:
        return self.call("epoch", store_api.JobRequest(job), int)

    def claim(self, job: str, incarnation: str, *, at_least: int = 0) -> int:
        return self.call("claim", store_api.ClaimRequest(job, incarnation, at_least), int)

    def lease(self, key: ShardKey, size_bytes: int, parts: int, *, wait_s: float = 0.0) -> Lease:
        ask = store_api.LeaseRequest(key, size_bytes, parts, wait_s)
        return self.call("lease", ask, Lease, timeout_s=clamp_wait_s(wait_s) + _CALL_S)

    def grow(self, lease_id: str, size_bytes: int, *, wait_s: float = 0.0) -> Lease:
        ask = store_api.GrowRequest(lease_id, size_bytes, wait_s)
        return self.call("grow", ask, Lease, timeout_s=clamp_wait_s(wait_s) + _CALL_S)

    def open_slot(self, slot: str) -> int:
        _, fd = self._call("open_slot", store_api.OpenSlotRequest(slot), type(None))
        return _require_fd(fd, slot)

    def relabel(self, lease_id: str, key: ShardKey) -> Lease:
        return self.call("relabel", store_api.RelabelRequest(lease_id, key), Lease)

    def seal(self, lease_id: str, size_bytes: int, meta: bytes = b"", blobs: Collection[str] = ()) -> ShardRecord:
        timeout = _CALL_S + size_bytes / _SLOWEST_BYTES_PER_S
        asked = store_api.SealRequest(lease_id, size_bytes, meta, tuple(blobs))
        return self.call("seal", asked, ShardRecord, timeout_s=timeout)

    def release(self, lease_id: str) -> None:
        self.call("release", store_api.ReleaseLeaseRequest(lease_id), type(None))

    def reserve(self, job: str, part: int, size_bytes: int, *, slots: int = 0) -> list[SlotInfo]:
        return self.call("reserve", store_api.ReserveRequest(job, part, size_bytes, slots), list[SlotInfo])

    def list_shards(self, job: str | None = None) -> list[ShardInfo]:
        return self.call("list_shards", store_api.ListShardsRequest(job), list[ShardInfo], timeout_s=_ADOPTION_S)

    def pin(self, key: ShardKey) -> Pin:
        pinned, fd = self._call("pin", store_api.PinRequest(key), PinResponse, timeout_s=_ADOPTION_S)
        if fd is None:
            self.unpin(pinned.id)
        return Pin(pinned.id, pinned.record, _require_fd(fd, str(key)))

    def unpin(self, pin_id: str) -> bool:
        return self.call("unpin", store_api.UnpinRequest(pin_id), bool)

    def verify(self, key: ShardKey, chunks: tuple[int, int] | None = None) -> tuple[int, ...]:
        return self.call("verify", store_api.VerifyRequest(key, chunks), tuple[int, ...], timeout_s=_ADOPTION_S)

    def report_damage(self, key: ShardKey, reason: str) -> None:
        self.call("report_damage", store_api.ReportDamageRequest(key, reason), type(None))

    def mark_committed(self, job: str, group: VersionId) -> None:
        self.call("mark_committed", store_api.MarkCommittedRequest(job, group), type(None))

    def abort_part(self, job: str, group: VersionId, part: int) -> None:
        self.call("abort_part", store_api.AbortPartRequest(job, group, part), type(None))

    def newest_committed(self, job: str) -> VersionId | None:
        return self.call("newest_committed", store_api.JobRequest(job), VersionId | None)

    def delete_versions(self, job: str, groups: list[VersionId] | None = None) -> int:
        return self.call("delete_versions", store_api.DeleteVersionsRequest(job, groups), int)

    def retain(self, job: str, group: VersionId, *, kept: bool = True) -> None:
        self.call("retain", store_api.RetainVersionRequest(job, group, kept), type(None))

    def retained(self, job: str) -> set[VersionId]:
        return self.call("retained", store_api.JobRequest(job), set[VersionId])

    def put_blob(self, job: str, name: str, data: bytes) -> None:
        self.call("put_blob", store_api.PutBlobRequest(job, name, data), type(None))

    def get_blob(self, job: str, name: str) -> bytes:
        return self.call("get_blob", store_api.BlobRequest(job, name), bytes)

    def list_blobs(self, job: str) -> list[str]:
        return self.call("list_blobs", store_api.JobRequest(job), list[str])

    def remove_blob(self, job: str, name: str) -> None:
        self.call("remove_blob", store_api.BlobRequest(job, name), type(None))

    def drop_unrecognized(self, names: list[str] | None = None) -> int:
        return self.call("drop_unrecognized", store_api.DropUnrecognizedRequest(names), int)

    def status(self) -> StoreStatus:
        return self.call("status", store_api.StoreStatusRequest(), StoreStatus)

    def ping(self, *, timeout_s: float) -> None:
        """Return after any response of the agent."""
        self.call("epoch", store_api.JobRequest("nobody"), int, timeout_s=timeout_s)

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
        """Send ``op`` to the agent; return its response as ``result``, or raise the agent's error.

        ``timeout_s`` limits one attempt, ``within_s`` the whole call, including the launch of an agent.
        """
        found, fd = self._call(op, body, result, timeout_s=timeout_s, within_s=within_s)
        if fd is not None:  # unexpected for this operation
            os.close(fd)
        return found

    def _call(
        self,
        op: str,
        body: object,
        result: type[T] | Any,
        *,
        timeout_s: float = _CALL_S,
        within_s: float | None = None,
    ) -> tuple[Any, int | None]:
        """Return the response, and the open file that came with it."""
        if deadlines.expired():
            raise AgentUnreachableError(f"no time was left to ask the agent {op!r}")
        with deadlines.timeout_scope(within_s):
            return self._send_request(op, body, result, timeout_s)

    def _send_request(self, op: str, body: object, result: type[T] | Any, timeout_s: float) -> tuple[Any, int | None]:
        raw, began = message_codec.encode_raw_message(body), time.monotonic()
        deadline = began + deadlines.remaining_s(self._retry_s)
        sock = self._take_connection(deadline)
        while True:
            try:
                left_s = deadlines.remaining_s(timeout_s)
                sock.settimeout(left_s + _GRACE_S)
                message_codec.send_frame(sock, AgentRequest(op, raw, left_s))
                self._await_answer(sock, left_s + _GRACE_S)
                response, fd = message_codec.receive_frame_with_fd(sock, AgentResponse)
                if response is None:
                    raise AgentUnreachableError("the agent closed the connection")
                break
            except TimeoutError as error:
                silent = _silence_message(sock, f"did not answer {op!r}", began)
                sock.close()
                raise AgentUnreachableError(silent) from error
            except (AgentUnreachableError, OSError) as error:
                sock.close()
                if time.monotonic() >= deadline:
                    raise AgentUnreachableError(f"the agent was lost during {op!r}: {error}") from error
                sock = self._open(deadline)
            except BaseException:
                sock.close()
                raise
        self._return_connection(sock)
        try:
            if response.error:
                raise self._error(response)
            return message_codec.decode_message(response.body, result), fd
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise

    def _await_answer(self, sock: socket.socket, timeout_s: float) -> None:
        """Wait until data arrives; raise :class:`TimeoutError` after ``timeout_s`` seconds.

        A working agent may be silent for long. A hung one is replaced, if enough time remains to prove that it hangs.
        """
        until = time.monotonic() + timeout_s
        waiting = select.poll()
        waiting.register(sock, select.POLLIN)
        while not waiting.poll(1000 * min(_SILENT_S, max(0.0, until - time.monotonic()))):
            if time.monotonic() >= until:
                raise TimeoutError
            if until - time.monotonic() > _SILENT_S:
                self._replace()

    def notify(
        self,
        op: str,
        body: object,
        *,
        timeout_s: float,
        seek: AgentConnector | None = None,
        answer: type[T] | Any = None,
    ) -> Any:
        """Send a request that may be lost, on an open connection or on one that ``seek`` returns.

        Nothing is retried, and no agent is launched. Return the response as ``answer``, or ``None`` without a response.
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
            message_codec.send_frame(sock, AgentRequest(op, message_codec.encode_raw_message(body), timeout_s))
            response = message_codec.receive_frame(sock, AgentResponse)
            if response is not None:
                undo.pop_all()
                self._return_connection(sock)
                if answer is not None and not response.error:
                    return message_codec.decode_message(response.body, answer)
        return None

    def _error(self, response: AgentResponse) -> Exception:
        message = message_codec.decode_message(response.body, str)
        kind = self._errors.get(response.error)
        return kind(message) if kind is not None else error_from_wire(response.error, message)

    def _take_connection(self, deadline: float) -> socket.socket:
        with self._lock:
            if self._pid != os.getpid():  # a forked child must not use its parent's connections
                inherited, self._idle, self._pid = self._idle, [], os.getpid()
                for sock in inherited:
                    sock.close()
            if self._idle:
                return self._idle.pop()
        return self._open(deadline)

    def _return_connection(self, sock: socket.socket) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(sock)
                return
        sock.close()

    def _open(self, deadline: float) -> socket.socket:
        if self._closed:  # a new connection could launch an agent
            raise RequestError("this client is closed: its job's checkpointer or session has ended")
        pause = 0.02
        while True:
            try:
                sock = self._greet(self._connector(), max(0.1, deadlines.remaining_s(_GREETING_S)))
                self._unreachable = False
                return sock
            except (AgentUnreachableError, OSError) as error:
                in_time = deadlines.remaining_s() > _SILENT_S
                replaced = isinstance(error, TimeoutError) and in_time and self._replace()
                if not replaced and (self._unreachable or time.monotonic() + pause >= deadline):
                    self._unreachable = True
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
                message_codec.send_frame(sock, AgentHello(AGENT_PROTOCOL_VERSION, self._job))
                answer = message_codec.receive_frame(sock, AgentHello, limit_bytes=message_codec.MAX_AGENT_HELLO_BYTES)
            except TimeoutError:
                raise TimeoutError(_silence_message(sock, "takes connections and does not greet", began)) from None
            if answer is None:
                raise AgentUnreachableError("the agent closed the connection before it greeted")
            if answer.refused and answer.protocol == AGENT_PROTOCOL_VERSION:
                raise RequestError(f"the agent refused this process: {answer.refused}")
            if answer.protocol != AGENT_PROTOCOL_VERSION:
                raise ProtocolError(
                    f"the agent speaks protocol {answer.protocol} (version {answer.server or 'unknown'}), "
                    f"this client {AGENT_PROTOCOL_VERSION}: use the same release for both"
                )
            self.server_version, self.arena_id, self.start_id = answer.server, answer.arena, answer.start_id
            undo.pop_all()
        return sock
