"""A torch Store without a root: every key on two nodes, calls with timeouts, cleanup of old keys.

::

    key ──hash──> first holder ── decides the order and the results of add and compare_set
             └──> second holder ─ receives the same from the client; answers after the first holder is gone

The servers are ``torch.distributed.TCPStore`` and do not know each other. The clients are ``TCPStore`` objects too. The
first request for a member's keys opens the connection to it. ``docs/explanation/control-plane.md`` describes the
guarantees when members die.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from elastic.rendezvous.store_servers import KEY_COPIES, key_holders
from peerstore.errors import PeerStoreError
from peerstore.network_addresses import resolve_host, split_address

log = logging.getLogger(__name__)


_POLL_S = 0.2


@dataclass(eq=False)
class Call:
    """A call with a time limit."""

    until: float
    """Monotonic time at which the limit passes."""
    end: Callable[[], object]
    was_ended: bool = False
    """Whether ``end`` was called, perhaps just after the call returned: do not reuse its connection."""
    is_being_ended: bool = False


class CallWatchdog:
    """Time limits for the calls of a process. Its thread sleeps while no call runs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: set[Call] = set()
        self._thread: threading.Thread | None = None
        self._next_check = float("inf")
        """Monotonic time at which the thread checks the calls without a notification."""
        self._closed = False

    @contextlib.contextmanager
    def limit(self, within_s: float, end: Callable[[], object]) -> Iterator[Call]:
        """Call ``end`` if the block runs longer than ``within_s`` seconds.

        Another thread repeats the call until the block ends, because a connecting client reconnects after one call.
        After the block, ``end`` is not called.
        """
        call = Call(time.monotonic() + within_s, end)
        with self._changed:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="elastic-guard", daemon=True)
                self._thread.start()
            elif call.until < self._next_check:
                self._changed.notify_all()
        try:
            yield call
        finally:
            with self._changed:
                self._calls.discard(call)
                while call.is_being_ended:
                    self._changed.wait()

    def expire_all(self) -> None:
        """Expire the limits of all running calls now."""
        with self._changed:
            for call in self._calls:
                call.until = 0.0
            self._changed.notify_all()

    def forget(self) -> None:
        """Drop the running calls: their limits no longer apply, and the thread can stop."""
        with self._changed:
            self._calls.clear()

    def close(self) -> None:
        """Stop the thread. If calls still run, it enforces their limits until they return."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            is_busy = bool(self._calls)
        if self._thread is not None and self._thread is not threading.current_thread() and not is_busy:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed and not self._calls:
                    return
                self._next_check = min((call.until for call in self._calls), default=float("inf"))
                left_s = self._next_check - time.monotonic()
                if self._closed or left_s <= 0:
                    left_s = _POLL_S
                self._changed.wait(None if left_s == float("inf") else left_s)
                now = time.monotonic()
                late = [call for call in self._calls if call.until <= now]
            for call in late:
                self._end(call)

    def _end(self, call: Call) -> None:
        with self._changed:
            if call not in self._calls:  # it returned while another call was ended
                return
            call.is_being_ended = call.was_ended = True
        try:
            call.end()
        finally:
            with self._changed:
                call.is_being_ended = False
                self._changed.notify_all()


_CONNECT_TIMEOUT = timedelta(seconds=10)
_LAST_PROBE_S = 1.0
"""Seconds for the last test of a server that took too long to connect."""
"""Timeout of a new client, including the lookup of the server's name."""

_NOT_SENT, _MAX_TRIES = "Broken pipe", 5
"""Torch's message for a request that was not sent because its connection was closed before."""

T = TypeVar("T")
SocketAddress = tuple[str, int]
"""Numeric IP address and port of a server."""
CloseConnections = Callable[[Collection[SocketAddress]], int]
"""Closes this process's connections to these addresses and returns their number."""


def resolve_store(host: str, port: int, *, within_s: float) -> frozenset[SocketAddress]:
    """Return the addresses of a host name.

    Call it when a world forms: during an abort the name service may not respond. Raise
    :class:`~peerstore.errors.PeerUnreachableError` if the name cannot be resolved within ``within_s`` seconds.
    """
    return frozenset((str(found[4][0]), port) for found in resolve_host(host, port, within_s=within_s))


@dataclass(frozen=True)
class StoreTimeouts:
    """Timeouts of requests to one server."""

    wait_slice_s: float = 20.0
    """Seconds to wait at one holder of a key, before the wait moves to its next holder in a cycle."""
    response_timeout_s: float = 20.0
    """Seconds that a request without a wait may take, on any network and load that a job survives."""
    connect_timeout_s: float = 30.0
    """Seconds that a new connection may take, including retries."""
    retry_after_s: float = 10.0
    """Seconds for which a server that did not respond is skipped, if the key has another holder."""


class StoreServerState(enum.Enum):
    """Availability of one store server."""

    ANSWERS = "answers"
    UNRESPONSIVE = "does not answer"
    """The server may be slow, stopped or unreachable. Whether it executed the request is unknown."""
    GONE = "is gone"
    """Its address refuses connections. The server never returns at this address."""


class StoreUnreachableError(Exception):
    """The request could not be sent, or no answer arrived."""


class StoreServerClient:
    """Client of one store server. Any thread may call it; each concurrent call has its own connection."""

    def __init__(
        self, address: str, *, close_connections: CloseConnections, guard: CallWatchdog, timeouts: StoreTimeouts
    ) -> None:
        self.address = address
        self.host, self.port = split_address(address)
        self.state = StoreServerState.ANSWERS
        self._close_sockets, self._watchdog, self._timeouts = close_connections, guard, timeouts
        self._idle: list[dist.TCPStore] = []
        self._lock = threading.Lock()
        self._closed = False
        self._retry_at = 0.0
        self._addresses: frozenset[SocketAddress] = frozenset()
        """Resolved addresses; empty before the first connection."""

    @property
    def connected(self) -> bool:
        return bool(self._addresses)

    @property
    def is_backing_off(self) -> bool:
        """Whether the server did not respond within the last ``retry_after_s`` seconds."""
        return self.state is StoreServerState.UNRESPONSIVE and time.monotonic() < self._retry_at

    def call(self, work: Callable[[dist.TCPStore], T], *, within_s: float = 0.0, again: bool = True) -> T:
        """Return the result of ``work``. Raise :class:`StoreUnreachableError` if the result is unknown.

        ``within_s`` is the number of seconds that the server may wait before it answers. ``again`` allows a second
        request after an idle connection broke.
        """
        limit_s = within_s + self._timeouts.response_timeout_s
        for _ in range(_MAX_TRIES):
            client, is_fresh = self._get_client()
            until = time.monotonic() + limit_s
            try:
                with self._watchdog.limit(limit_s, self.close_connections) as call:
                    result = work(client)
            except dist.DistNetworkError as error:
                self._handle_broken(str(error), late=time.monotonic() >= until)
                if self.state is StoreServerState.ANSWERS and _NOT_SENT in str(error):
                    continue  # another call's limit closed the connection before this request was sent
                if self.state is StoreServerState.ANSWERS and again and not is_fresh:
                    again = False
                    continue
                raise StoreUnreachableError(f"the connection to {self.address} broke") from error
            except dist.DistStoreError:  # the wait timed out, and the server answered that
                self._put_back(client, call)
                raise
            self._put_back(client, call)
            return result
        raise StoreUnreachableError(f"each connection to {self.address} was cut as soon as it was made")

    def close_connections(self) -> int:
        """Close this process's connections to the server; pending requests fail. Return their number."""
        return self._close_sockets(self._addresses) if self._addresses else 0

    def abort(self) -> int:
        """Close the connections for good: pending requests fail and are not retried. Return their number."""
        self.close()
        return self.close_connections()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._idle.clear()

    def _get_client(self) -> tuple[dist.TCPStore, bool]:
        """Return an unused connection and whether it is new."""
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        until = time.monotonic() + self._timeouts.connect_timeout_s
        while not self._closed and self.state is not StoreServerState.GONE:
            self._probe(self._timeouts.connect_timeout_s)
            try:
                with self._watchdog.limit(self._timeouts.connect_timeout_s, self.close_connections) as call:
                    client = self._connected()
                reason = "it took too long to connect"
                if not call.was_ended:
                    self.state = StoreServerState.ANSWERS
                    if not self._closed:  # otherwise abort() ran before this connection existed
                        return client, True
            except dist.DistError as error:
                reason = str(error)
            if not self._closed and time.monotonic() > until:
                self._probe(_LAST_PROBE_S)  # it may have gone during a slow attempt
                self._mark_unresponsive(reason)
                break
        raise StoreUnreachableError(f"the store on {self.address} {self.state.value}")

    def _connected(self) -> dist.TCPStore:
        return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=_CONNECT_TIMEOUT)

    def _put_back(self, client: dist.TCPStore, call: Call | None = None) -> None:
        """Return a connection to the pool, unless all connections were closed during ``call``."""
        with self._lock:
            if call is not None and call.was_ended:
                self._idle.clear()
            elif not self._closed:
                self._idle.append(client)

    def _handle_broken(self, reason: str, *, late: bool) -> None:
        """Drop the idle connections after one broke, and test the server with a new connection."""
        with self._lock:
            self._idle.clear()
        if late:
            self._mark_unresponsive(reason)
        elif not self._closed:
            with contextlib.suppress(StoreUnreachableError):
                self._put_back(self._get_client()[0])

    def _probe(self, within_s: float) -> None:
        """Detect a server that is gone at once, because a new ``TCPStore`` retries for long.

        Also stores the server's addresses. Raise :class:`StoreUnreachableError` if it cannot be reached.
        """
        try:
            addresses = resolve_store(self.host, self.port, within_s=within_s)
            socket.create_connection((self.host, self.port), within_s).close()
            self._addresses = addresses
        except ConnectionRefusedError as error:
            if self.state is not StoreServerState.GONE:
                log.warning("the store on %s is gone: its keys are read from the next holder", self.address)
            self.state = StoreServerState.GONE
            raise StoreUnreachableError(f"{self.address} {self.state.value}") from error
        except (OSError, PeerStoreError) as error:
            self._mark_unresponsive(str(error))
            raise StoreUnreachableError(f"{self.address} {self.state.value}") from error

    def _mark_unresponsive(self, reason: str) -> None:
        log.warning(
            "the store on %s does not answer: %s", self.address, reason.splitlines()[0] if reason else "no reason"
        )
        self.state = StoreServerState.UNRESPONSIVE
        self._retry_at = time.monotonic() + self._timeouts.retry_after_s


StoreValue = str | bytes

_open_stores: set[RootlessStore] = set()
"""Open stores. A process group holds only the C++ half of a Python store, which does not work alone."""


class RootlessStore(dist.Store):
    """A store with the interface of ``TCPStore``.

    Queues have no copy: only the key's first holder stores them. ``close_connections(addresses)`` closes this process's
    connections to these addresses. Call :meth:`close` at the end.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        close_connections: CloseConnections,
        copies: int = KEY_COPIES,
        timeout: timedelta = timedelta(minutes=5),
        timeouts: StoreTimeouts | None = None,
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._timeouts = timeouts or StoreTimeouts()
        self._watchdog = CallWatchdog()
        self._holders = [
            StoreServerClient(
                address, close_connections=close_connections, guard=self._watchdog, timeouts=self._timeouts
            )
            for address in addresses
        ]
        self._copies = copies
        self._closed_reason = ""
        """Why the store is closed; "" while it is open."""
        _open_stores.add(self)

    # -- torch's interface --------------------------------------------------------------------------------------------

    def set(self, key: str, value: StoreValue) -> None:
        self._at_all_holders(key, lambda client: client.set(key, value))  # type: ignore[arg-type]  # bytes are accepted, too

    def get(self, key: str) -> bytes:
        def query(client: dist.TCPStore, within_s: float) -> bytes:
            client.set_timeout(timedelta(seconds=within_s))
            return client.get(key)

        return self._wait_at_holders(key, query, self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (timeout or self._timeout).total_seconds()
        for key in keys:

            def query(client: dist.TCPStore, within_s: float, key: str = key) -> None:
                client.wait([key], timedelta(seconds=within_s))

            # A single member has all keys, so the wait needs no slices. Torch logs a warning at the end of each slice.
            within = timedelta(seconds=max(0.001, until - time.monotonic()))
            self._wait_at_holders(key, query, within, slice_s=float("inf") if self._is_single else None)

    def check(self, keys: Sequence[str]) -> bool:
        if self._is_single and keys:
            return self._exist(keys)
        return all(self._exist([key]) for key in keys)

    def add(self, key: str, value: int) -> int:
        return self._at_first_holder(key, lambda client: client.add(key, value), lambda _: value != 0)

    def compare_set(self, key: str, expected: StoreValue, desired: StoreValue) -> bytes:
        wanted = desired.encode() if isinstance(desired, str) else desired
        found = self._at_first_holder(
            key,
            lambda client: client.compare_set(key, expected, desired),  # type: ignore[arg-type]
            lambda found: found == wanted and expected != desired,
            lambda client: client.set(key, desired),  # type: ignore[arg-type]
        )
        return bytes(found)

    def append(self, key: str, value: StoreValue) -> None:
        def send(client: Any) -> None:
            client.append(key, value)

        self._at_all_holders(key, send, again=False)

    def delete_key(self, key: str) -> bool:
        return self._at_first_holder(key, lambda client: client.delete_key(key), lambda _: True)

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """Return the keys of all reachable members.

        Another holder lists the keys of a lost member.
        """
        self._check_open()
        found: set[str] = set()
        for holder in self._holders:
            if holder.state is not StoreServerState.GONE:
                answer = self._try_call(holder, lambda client: client.list_keys())
                found.update(answer[0] if answer else ())
        return sorted(found)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        def query(client: dist.TCPStore, within_s: float) -> list[bytes]:
            client.set_timeout(timedelta(seconds=within_s))
            return client.multi_get(list(keys))

        if self._is_single and keys:
            return self._wait_at_holders(keys[0], query, self._timeout)
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[StoreValue]) -> None:
        def send(client: Any) -> None:
            client.multi_set(list(keys), list(values))

        if self._is_single and keys:
            self._at_all_holders(keys[0], send)
            return
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def queue_push(self, key: str, value: StoreValue) -> None:
        self._at_first_holder(key, lambda client: client.queue_push(key, value), lambda _: False)

    def queue_pop(self, key: str, block: bool = True) -> bytes:  # noqa: FBT002 - torch's own signature
        def query(client: dist.TCPStore, within_s: float) -> bytes:
            client.set_timeout(timedelta(seconds=within_s))
            return client.queue_pop(key, block)

        if not block:
            return self._at_first_holder(key, lambda client: client.queue_pop(key, False), lambda _: False)
        return self._wait_at_holders(key, query, self._timeout, most=1)

    def queue_len(self, key: str) -> int:
        return self._at_first_holder(key, lambda client: client.queue_len(key), lambda _: False)

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """Wait until ``world_size`` callers have arrived."""
        if self.add(f"{key}/here", 1) >= world_size:
            self.set(f"{key}/all", b"1")
        self.wait([f"{key}/all"], timeout)

    def clone(self) -> RootlessStore:
        return self

    # C++ looks these two up under different names than Python.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    # -- lifetime -----------------------------------------------------------------------------------------------------

    def abort(self) -> int:
        """Fail all pending and later requests, from any thread. Return the number of closed connections."""
        self._closed_reason = self._closed_reason or "it was cut: its world is over"
        ended = sum(holder.abort() for holder in self._holders)
        self._watchdog.expire_all()
        return ended

    def close(self) -> None:
        """Close the store, without an interrupt of pending waits (see :meth:`abort`). Idempotent."""
        self._closed_reason = self._closed_reason or "it was closed"
        for holder in self._holders:
            holder.close()
        self._watchdog.close()
        _open_stores.discard(self)

    @property
    def _is_single(self) -> bool:
        """Whether one member has all keys, so that one request may name several."""
        return len(self._holders) == 1

    @property
    def _timeout(self) -> timedelta:
        """Timeout of the C++ store, which a ``PrefixStore`` may have set."""
        known: Any = super()
        return known.timeout

    def _check_open(self) -> None:
        if self._closed_reason:
            raise dist.DistNetworkError(f"the store does not answer: {self._closed_reason}")

    def _holders_of(self, key: str) -> list[StoreServerClient]:
        return [self._holders[index] for index in key_holders(key, len(self._holders), self._copies)]

    def _live_holders(self, key: str) -> list[StoreServerClient]:
        self._check_open()
        living = [holder for holder in self._holders_of(key) if holder.state is not StoreServerState.GONE]
        if not living:
            where = ", ".join(holder.address for holder in self._holders_of(key))
            raise dist.DistNetworkError(f"all stores that held {key!r} are gone: {where}")
        return living

    def _try_call(
        self, holder: StoreServerClient, work: Callable[[dist.TCPStore], T], *, again: bool = True
    ) -> tuple[T] | None:
        """Return the result in a tuple, or ``None`` if the holder cannot be reached."""
        try:
            return (holder.call(work, again=again),)
        except StoreUnreachableError:
            self._check_open()
            return None

    def _at_all_holders(self, key: str, work: Callable[[dist.TCPStore], object], *, again: bool = True) -> None:
        """Run ``work`` at all live holders. Raise an error unless one of them answers."""
        living = self._live_holders(key)
        responsive = [holder for holder in living if not holder.is_backing_off] or living
        results = [self._try_call(holder, work, again=again) for holder in responsive]
        if not any(results):
            self._live_holders(key)
            raise dist.DistNetworkError(f"no holder of {key!r} answers: {_states(living)}")

    def _at_first_holder(
        self,
        key: str,
        work: Callable[[dist.TCPStore], T],
        mirrored: Callable[[T], bool],
        mirror: Callable[[dist.TCPStore], object] | None = None,
    ) -> T:
        """Run ``work`` at the first live holder, then ``mirror`` or ``work`` at the others if ``mirrored``.

        An unresponsive first holder is not skipped: otherwise two holders could decide differently.
        """
        while True:
            first, *others = self._live_holders(key)
            try:
                result = first.call(work, again=False)
                break
            except StoreUnreachableError as error:
                self._check_open()
                if first.state is not StoreServerState.GONE:
                    raise dist.DistNetworkError(
                        f"the holder that decides about {key!r} does not answer: {first.address}"
                    ) from error
        if mirrored(result):
            for holder in others:
                self._try_call(holder, mirror or work, again=mirror is not None)
        return result

    def _exist(self, keys: Sequence[str]) -> bool:
        """Return whether any holder has the keys, because a ``set`` may have reached only one.

        All keys must have the same holders.
        """
        key = keys[0]
        answers = [self._try_call(holder, lambda client: client.check(list(keys))) for holder in self._in_order(key)]
        if not any(answers):
            self._live_holders(key)
            raise dist.DistNetworkError(f"no holder of {key!r} answers: {_states(self._live_holders(key))}")
        return any(answer[0] for answer in answers if answer is not None)

    def _wait_at_holders(
        self,
        key: str,
        query: Callable[[dist.TCPStore, float], T],
        within: timedelta,
        *,
        most: int | None = None,
        slice_s: float | None = None,
    ) -> T:
        """Return the result of ``query`` at a holder that has the key, after at most ``within``.

        Each server waits for one slice, so the client does not poll. Lost members are skipped.
        """
        until = time.monotonic() + within.total_seconds()
        while True:
            for holder in self._in_order(key, most):
                left_s = min(slice_s or self._timeouts.wait_slice_s, max(0.001, until - time.monotonic()))
                try:
                    return holder.call(lambda client, s=left_s: query(client, s), within_s=left_s)  # type: ignore[misc]
                except StoreUnreachableError as error:
                    self._check_open()
                    if self._is_single and holder.state is not StoreServerState.ANSWERS:
                        raise dist.DistNetworkError(f"no holder of {key!r} answers: {_states([holder])}") from error
                except dist.DistStoreError:  # the key does not exist yet
                    self._check_open()
                if time.monotonic() >= until:
                    message = f"wait timeout after {within.total_seconds() * 1e3:.0f}ms, keys: {key}"
                    raise dist.DistStoreError(message)

    def _in_order(self, key: str, most: int | None = None) -> Iterator[StoreServerClient]:
        """Yield the live holders in order; unresponsive holders only if no other exists."""
        living = self._live_holders(key)[:most]
        responsive = [holder for holder in living if not holder.is_backing_off]
        yield from responsive or living


def _states(holders: Sequence[StoreServerClient]) -> str:
    return ", ".join(f"{holder.address} {holder.state.value}" for holder in holders)


_EPOCH_KEY = re.compile(r"elastic/(\d+)/")
_STOP_S, _EXIT_S, _EXIT_POLL_S = 1.0, 15.0, 0.2


def epoch_prefix(epoch: int) -> str:
    """Return the prefix of all keys of an epoch."""
    return f"elastic/{epoch}"


def is_old_key(key: str, epoch: int) -> bool:
    """Return whether the key belongs to a world before ``epoch``."""
    found = _EPOCH_KEY.match(key)
    return found is not None and int(found[1]) < epoch


class OldKeyCleanup:
    """Background deletion of the keys of worlds before ``epoch`` on one server.

    Start it when all ranks of ``epoch`` have met: ranks still in an earlier world already count as lost.
    """

    def __init__(
        self, address: str, epoch: int, *, close_connections: CloseConnections, timeouts: StoreTimeouts | None = None
    ) -> None:
        self.deleted = 0
        self._watchdog = CallWatchdog()
        self._holder = StoreServerClient(
            address, close_connections=close_connections, guard=self._watchdog, timeouts=timeouts or StoreTimeouts()
        )
        self._epoch = epoch
        # A thread in torch's C++ code at the interpreter's exit aborts the process.
        atexit.register(self._end_at_exit)
        self._thread = threading.Thread(target=self._run, name="elastic-sweep", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; ``None`` means no limit. Return whether the deletion has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Stop the deletion; the cleanup of the next world deletes the remaining keys.

        A thread blocked by a stopped server continues to wait. Its connection cannot be closed without the next
        world's connections to the same server.
        """
        if not self.join(0):
            self._holder.abort()
            self._watchdog.expire_all()
            self.join(_STOP_S)
        self._watchdog.forget()
        self._watchdog.close()

    def _end_at_exit(self) -> None:
        """Close the connections repeatedly until the thread ends: no other world needs them at exit."""
        until = time.monotonic() + _EXIT_S
        while not self.join(0) and time.monotonic() < until:
            self._holder.abort()
            self.join(_EXIT_POLL_S)

    def _run(self) -> None:
        try:
            keys = self._holder.call(_all_keys)
            for key in [key for key in keys if is_old_key(key, self._epoch)]:
                self.deleted += self._holder.call(lambda client, key=key: client.delete_key(key))  # type: ignore[misc]
        except (StoreUnreachableError, dist.DistError) as error:
            log.info("old keys are still on %s: %s", self._holder.address, error)
        finally:
            self._holder.close()
            atexit.unregister(self._end_at_exit)


def _all_keys(client: dist.TCPStore) -> list[str]:
    if not hasattr(client, "list_keys"):  # older versions of torch cannot list keys, so the keys remain
        return []
    return client.list_keys()
