"""Client of the store for local processes: connections, retries, deadlines, hung agents."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from peerstore import deadlines
from peerstore.client import store_methods as methods
from peerstore.client.store_methods import clamp_wait_s
from peerstore.errors import (
    AgentUnreachableError,
    PeerStoreError,
    PeerUnreachableError,
    ProtocolError,
    RequestError,
    UnavailableError,
)
from peerstore.message_codec import decode_message
from peerstore.rpc import Connection, ConnectionPool, Method, Response, decode_result, remaining_until
from peerstore.shard_records import (
    Lease,
    Pin,
    ShardInfo,
    ShardKey,
    ShardRecord,
    SlotInfo,
    StoreStatus,
    VersionId,
)
from peerstore.transport.authentication import greet_agent
from peerstore.transport.unix import UnixChannel

_CALL_S = 60.0
_GREETING_S = 10.0
_SILENT_S = 3.0
"""Seconds without a response after which the client checks whether the agent hangs."""
_GRACE_S = 1.0
"""Seconds that the client waits beyond a request's deadline, at which the agent itself gives up."""
_SLOWEST_BYTES_PER_S = 100e6
_ADOPTION_S = 660.0
T = TypeVar("T")
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")

AgentConnector = Callable[[], socket.socket]


def _silence_message(channel: UnixChannel, what: str, since: float) -> str:
    return (
        f"the agent (process {channel.credentials[0]}) {what}: nothing was heard of it for "
        f"{time.monotonic() - since:.1f} s. "
        "It hangs, was stopped or is overwhelmed"
    )


def _require_fd(fd: int | None, what: str) -> int:
    if fd is None:  # this process has reached its limit of open files
        raise UnavailableError(f"the file of {what} could not be taken over: raise the limit on open files (ulimit -n)")
    return fd


class ClientVersions:
    """:class:`~peerstore.client.store_api.Versions` behind a socket."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def mark_committed(self, job: str, group: VersionId) -> None:
        self._run(methods.MARK_COMMITTED, methods.MarkCommittedRequest(job, group))

    def abort_part(self, job: str, group: VersionId, part: int) -> None:
        self._run(methods.ABORT_PART, methods.AbortPartRequest(job, group, part))

    def newest_committed(self, job: str) -> VersionId | None:
        return self._run(methods.NEWEST_COMMITTED, methods.JobRequest(job))

    def delete(self, job: str, groups: list[VersionId] | None = None) -> int:
        return self._run(methods.DELETE_VERSIONS, methods.DeleteVersionsRequest(job, groups))

    def retain(self, job: str, group: VersionId, *, kept: bool = True) -> None:
        self._run(methods.RETAIN, methods.RetainVersionRequest(job, group, kept))

    def retained(self, job: str) -> set[VersionId]:
        return self._run(methods.RETAINED, methods.JobRequest(job))


class ClientBlobs:
    """:class:`~peerstore.client.store_api.Blobs` behind a socket."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def put(self, job: str, name: str, data: bytes) -> None:
        self._run(methods.PUT_BLOB, methods.PutBlobRequest(job, name, data))

    def get(self, job: str, name: str) -> bytes:
        return self._run(methods.GET_BLOB, methods.BlobRequest(job, name))

    def list_names(self, job: str) -> list[str]:
        return self._run(methods.LIST_BLOBS, methods.JobRequest(job))

    def remove(self, job: str, name: str) -> None:
        self._run(methods.REMOVE_BLOB, methods.BlobRequest(job, name))


class Client:
    """A :class:`~peerstore.client.store_api.Store` behind a socket.

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
        self._pool: ConnectionPool[UnixChannel] = ConnectionPool(self._connect, self._greet, "the agent")
        self._unreachable = False
        self.versions, self.blobs = ClientVersions(self.run), ClientBlobs(self.run)
        self.server_version = ""
        self.arena_id = self.start_id = ""
        self._pool.put(self._open(time.monotonic() + deadlines.remaining_s(retry_s)))

    # -- Store ------------------------------------------------------------------------------------------------

    def epoch(self, job: str) -> int:
        return self.run(methods.EPOCH, methods.JobRequest(job))

    def claim(self, job: str, incarnation: str, *, at_least: int = 0) -> int:
        return self.run(methods.CLAIM, methods.ClaimRequest(job, incarnation, at_least))

    def lease(self, key: ShardKey, size_bytes: int, parts: int, *, wait_s: float = 0.0) -> Lease:
        ask = methods.LeaseRequest(key, size_bytes, parts, wait_s)
        return self.run(methods.LEASE, ask, timeout_s=clamp_wait_s(wait_s) + _CALL_S)

    def grow(self, lease_id: str, size_bytes: int, *, wait_s: float = 0.0) -> Lease:
        ask = methods.GrowRequest(lease_id, size_bytes, wait_s)
        return self.run(methods.GROW, ask, timeout_s=clamp_wait_s(wait_s) + _CALL_S)

    def open_slot(self, slot: str) -> int:
        _, fd = self._call(methods.OPEN_SLOT.name, methods.OpenSlotRequest(slot), methods.OPEN_SLOT.result)
        return _require_fd(fd, slot)

    def relabel(self, lease_id: str, key: ShardKey) -> Lease:
        return self.run(methods.RELABEL, methods.RelabelRequest(lease_id, key))

    def seal(self, lease_id: str, size_bytes: int, meta: bytes = b"", blobs: Collection[str] = ()) -> ShardRecord:
        timeout = _CALL_S + size_bytes / _SLOWEST_BYTES_PER_S
        asked = methods.SealRequest(lease_id, size_bytes, meta, tuple(blobs))
        return self.run(methods.SEAL, asked, timeout_s=timeout)

    def release(self, lease_id: str) -> None:
        self.run(methods.RELEASE, methods.ReleaseLeaseRequest(lease_id))

    def reserve(self, job: str, part: int, size_bytes: int, *, slots: int = 0) -> list[SlotInfo]:
        return self.run(methods.RESERVE, methods.ReserveRequest(job, part, size_bytes, slots))

    def list_shards(self, job: str | None = None) -> list[ShardInfo]:
        return self.run(methods.LIST_SHARDS, methods.ListShardsRequest(job), timeout_s=_ADOPTION_S)

    def pin(self, key: ShardKey) -> Pin:
        pinned, fd = self._call(methods.PIN.name, methods.PinRequest(key), methods.PIN.result, timeout_s=_ADOPTION_S)
        if fd is None:
            self.unpin(pinned.id)
        return Pin(pinned.id, pinned.record, _require_fd(fd, str(key)))

    def unpin(self, pin_id: str) -> bool:
        return self.run(methods.UNPIN, methods.UnpinRequest(pin_id))

    def verify(self, key: ShardKey, chunks: tuple[int, int] | None = None) -> tuple[int, ...]:
        return self.run(methods.VERIFY, methods.VerifyRequest(key, chunks), timeout_s=_ADOPTION_S)

    def report_damage(self, key: ShardKey, reason: str) -> None:
        self.run(methods.REPORT_DAMAGE, methods.ReportDamageRequest(key, reason))

    def drop_unrecognized(self, names: list[str] | None = None) -> int:
        return self.run(methods.DROP_UNRECOGNIZED, methods.DropUnrecognizedRequest(names))

    def status(self) -> StoreStatus:
        return self.run(methods.STATUS, methods.StoreStatusRequest())

    def ping(self, *, timeout_s: float) -> None:
        """Return after any response of the agent."""
        self.run(methods.EPOCH, methods.JobRequest("nobody"), timeout_s=timeout_s)

    def close(self) -> None:
        """Close the connections; one in the middle of a call is closed when the call ends."""
        self._pool.close(busy=False)

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

    def run(
        self,
        method: Method[RequestT, ResultT],
        request: RequestT,
        *,
        timeout_s: float = _CALL_S,
        within_s: float | None = None,
    ) -> ResultT:
        """Run an operation of the agent, as :meth:`call` does."""
        result: ResultT = self.call(method.name, request, method.result, timeout_s=timeout_s, within_s=within_s)
        return result

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
        began = time.monotonic()
        deadline = began + deadlines.remaining_s(self._retry_s)
        line = self._pool.take() or self._open(deadline)
        while True:
            try:
                left_s = deadlines.remaining_s(timeout_s)
                line.send(op, body, remaining_s=left_s)
                self._await_answer(line.channel, left_s + _GRACE_S)
                response = decode_message(line.receive(op, timeout_s=_CALL_S).header, Response)
                fd = line.channel.take_file()
                break
            except TimeoutError as error:
                silent = _silence_message(line.channel, f"did not answer {op!r}", began)
                self._pool.drop(line)
                raise AgentUnreachableError(silent) from error
            except PeerUnreachableError as error:
                self._pool.drop(line)
                if time.monotonic() >= deadline:
                    raise AgentUnreachableError(f"the agent was lost during {op!r}: {error}") from error
                line = self._open(deadline)
            except BaseException:
                self._pool.drop(line)
                raise
        self._pool.put(line)
        try:
            return decode_result(response, result, self._errors), fd
        except BaseException:
            if fd is not None:
                os.close(fd)
            raise

    def _await_answer(self, channel: UnixChannel, timeout_s: float) -> None:
        """Wait until data arrives; raise :class:`TimeoutError` after ``timeout_s`` seconds.

        A working agent may be silent for long. A hung one is replaced, if enough time remains to prove that it hangs.
        """
        until = time.monotonic() + timeout_s
        while not channel.wait_readable(min(_SILENT_S, until - time.monotonic())):
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
        until = time.monotonic() + timeout_s
        line = self._pool.take()
        try:
            if line is None:
                if seek is None or self._pool.closed:
                    return None
                line = Connection(UnixChannel(seek(), "the agent", takes_files=True))
                self._greet(line, until)
            found = line.call(op, body, Any if answer is None else answer, timeout_s=timeout_s, until=until)
        except (PeerUnreachableError, ProtocolError, OSError):
            if line is not None:
                self._pool.drop(line)
            return None
        except PeerStoreError:  # the response is an error
            if line is not None:
                self._pool.put(line)
            return None
        self._pool.put(line)
        return None if answer is None else found

    def _open(self, deadline: float) -> Connection[UnixChannel]:
        pause = 0.02
        while True:
            if self._pool.closed:  # a new connection could launch an agent
                raise RequestError("this client is closed: its job's checkpointer or session has ended")
            try:
                line = self._pool.open()
                self._unreachable = False
                return line
            except (AgentUnreachableError, PeerUnreachableError, OSError) as error:
                in_time = deadlines.remaining_s() > _SILENT_S
                replaced = isinstance(error, TimeoutError) and in_time and self._replace()
                if not replaced and (self._unreachable or time.monotonic() + pause >= deadline):
                    self._unreachable = True
                    if isinstance(error, (TimeoutError, PeerUnreachableError)):
                        raise AgentUnreachableError(str(error)) from error
                    raise
                time.sleep(pause)
                pause = min(pause * 2, 1.0)

    def _connect(self, _until: float | None) -> UnixChannel:
        return UnixChannel(self._connector(), "the agent", takes_files=True)

    def _greet(self, line: Connection[UnixChannel], until: float | None) -> None:
        within_s, left_s = max(0.1, deadlines.remaining_s(_GREETING_S)), remaining_until(until)
        within_s = within_s if left_s is None else min(within_s, left_s)
        began = time.monotonic()
        try:
            welcome = greet_agent(line.channel, self._job, within_s=within_s)
        except PeerUnreachableError as error:
            if time.monotonic() - began < within_s:
                raise AgentUnreachableError("the agent closed the connection before it greeted") from error
            raise TimeoutError(_silence_message(line.channel, "takes connections and does not greet", began)) from None
        self.server_version, self.arena_id, self.start_id = welcome.version, welcome.arena_id, welcome.start_id
