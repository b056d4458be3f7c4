"""A torch Store without a root: every key on two nodes, calls with timeouts, cleanup of old keys.

::

    key ──hash──> first holder ── decides what is added and compared, and in which order
             └──> second holder ─ is told the same by whoever asked the first one; answers when that one is gone

The servers are ``torch.distributed.TCPStore`` and know nothing of each other. Clients are too, one connection to each
member whose keys are asked for, made when the first one is. The page
``docs/explanation/control-plane.md`` says what holds when members die.
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


_LOOK_S = 0.2


@dataclass(eq=False)
class Call:
    """One that is looked after."""

    until: float
    end: Callable[[], object]
    was_ended: bool = False
    """Also when it was through a moment before: what it used is not to be used again."""
    is_being_ended: bool = False


class CallWatchdog:
    """Looks after the calls of a process; its thread sleeps while there are none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._calls: set[Call] = set()
        self._thread: threading.Thread | None = None
        self._next = float("inf")
        """When the thread looks by itself."""
        self._closed = False

    @contextlib.contextmanager
    def limit(self, within_s: float, end: Callable[[], object]) -> Iterator[Call]:
        """Have ``end`` called when the block takes longer: by another thread, again and again until it is left.

        Once is not enough: a client that is being connected connects anew. After the block it is not called.
        """
        call = Call(time.monotonic() + within_s, end)
        with self._changed:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="elastic-guard", daemon=True)
                self._thread.start()
            elif call.until < self._next:
                self._changed.notify_all()
        try:
            yield call
        finally:
            with self._changed:
                self._calls.discard(call)
                while call.is_being_ended:
                    self._changed.wait()

    def expire_all(self) -> None:
        """No call may take any longer."""
        with self._changed:
            for call in self._calls:
                call.until = 0.0
            self._changed.notify_all()

    def forget(self) -> None:
        """Calls that still run are ended by nobody from now on, once this is closed."""
        with self._changed:
            self._calls.clear()

    def close(self) -> None:
        """Calls that still run are looked after until they are through."""
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
                self._next = min((call.until for call in self._calls), default=float("inf"))
                left_s = self._next - time.monotonic()
                if self._closed or left_s <= 0:
                    left_s = _LOOK_S
                self._changed.wait(None if left_s == float("inf") else left_s)
                now = time.monotonic()
                late = [call for call in self._calls if call.until <= now]
            for call in late:
                self._end(call)

    def _end(self, call: Call) -> None:
        with self._changed:
            if call not in self._calls:  # it was left while another one was ended
                return
            call.is_being_ended = call.was_ended = True
        try:
            call.end()
        finally:
            with self._changed:
                call.is_being_ended = False
                self._changed.notify_all()


_TRY = timedelta(seconds=10)
"""A client that is made asks the name service for the server's name, and gives up when that took longer than this."""

_UNSENT, _TRIES = "Broken pipe", 5
"""What torch says of a request that it could not send: its connection had been cut before."""

T = TypeVar("T")
SocketAddress = tuple[str, int]
"""Of a server, as a connection to it has it: a number, no name."""
CloseConnections = Callable[[Collection[SocketAddress]], int]
"""Ends this process's connections to these addresses; returns how many."""


def resolve_store(host: str, port: int, *, within_s: float) -> frozenset[SocketAddress]:
    """Where a name leads. To be asked on the way in: when a world is aborted there may be nobody who answers.

    :class:`~peerstore.errors.PeerUnreachableError` where nobody says.
    """
    return frozenset((str(found[4][0]), port) for found in resolve_host(host, port, within_s=within_s))


@dataclass(frozen=True)
class StoreTimeouts:
    """How long a member is waited for."""

    wait_slice_s: float = 20.0
    """A wait is at one holder of its key; so long, then at the next one, and round again."""
    response_timeout_s: float = 20.0
    """What needs no waiting takes no longer, on any network and under any load that a job survives."""
    connect_timeout_s: float = 30.0
    retry_after_s: float = 10.0
    """One that did not answer is left alone so long where there is another one to ask."""


class StoreServerState(enum.Enum):
    ANSWERS = "answers"
    UNRESPONSIVE = "does not answer"
    """It may be slow, stopped, or cut off: whether it did what it was asked for is unknown."""
    GONE = "is gone"
    """Its address refuses connections. It never comes back under this one."""


class StoreUnreachableError(Exception):
    """The member could not be asked, or its answer did not come."""


class StoreServerClient:
    """Any thread may call; calls that wait do not stand in the way of others, each has a connection of its own."""

    def __init__(
        self, address: str, *, close_connections: CloseConnections, guard: CallWatchdog, timeouts: StoreTimeouts
    ) -> None:
        self.address = address
        self.host, self.port = split_address(address)
        self.state = StoreServerState.ANSWERS
        self._cut, self._guard, self._patience = close_connections, guard, timeouts
        self._free: list[dist.TCPStore] = []
        self._lock = threading.Lock()
        self._closed = False
        self._mute_until = 0.0
        self._addresses: frozenset[SocketAddress] = frozenset()
        """Where it was found, once somebody was to connect."""

    @property
    def connected(self) -> bool:
        return bool(self._addresses)

    @property
    def is_backing_off(self) -> bool:
        """It did not answer a moment ago."""
        return self.state is StoreServerState.UNRESPONSIVE and time.monotonic() < self._mute_until

    def call(self, work: Callable[[dist.TCPStore], T], *, within_s: float = 0.0, again: bool = True) -> T:
        """What ``work`` returns or raises; :class:`StoreUnreachableError` where it cannot be known.

        ``within_s`` is how long the server may wait before it answers; ``again`` is whether it may be asked twice,
        where a connection breaks that had lain idle.
        """
        limit_s = within_s + self._patience.response_timeout_s
        for _ in range(_TRIES):
            client, is_fresh = self._client()
            until = time.monotonic() + limit_s
            try:
                with self._guard.limit(limit_s, self.close_connections) as call:
                    result = work(client)
            except dist.DistNetworkError as error:
                self._lost(str(error), late=time.monotonic() >= until)
                if self.state is StoreServerState.ANSWERS and _UNSENT in str(
                    error
                ):  # whoever cut it ended something else
                    continue
                if self.state is StoreServerState.ANSWERS and again and not is_fresh:
                    again = False
                    continue
                raise StoreUnreachableError(f"the connection to {self.address} broke") from error
            except dist.DistStoreError:  # the wait was in vain, and that was the answer
                self._keep(client, call)
                raise
            self._keep(client, call)
            return result
        raise StoreUnreachableError(f"each connection to {self.address} was cut as soon as it was made")

    def close_connections(self) -> int:
        """Whoever waits for an answer gets an error."""
        return self._cut(self._addresses) if self._addresses else 0

    def abort(self) -> int:
        """The same, and nobody asks again."""
        self.close()
        return self.close_connections()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._free.clear()

    def _client(self) -> tuple[dist.TCPStore, bool]:
        """A connection that nobody uses, and whether it is a new one."""
        with self._lock:
            if self._free:
                return self._free.pop(), False
        until = time.monotonic() + self._patience.connect_timeout_s
        while not self._closed and self.state is not StoreServerState.GONE:
            self._knock()
            try:
                with self._guard.limit(self._patience.connect_timeout_s, self.close_connections) as call:
                    client = self._connected()
                why = "it took too long to connect"
                if not call.was_ended:
                    self.state = StoreServerState.ANSWERS
                    if not self._closed:  # else it was not there yet when all others were cut
                        return client, True
            except dist.DistError as error:
                why = str(error)
            if not self._closed and time.monotonic() > until:
                self._is_mute(why)
                break
        raise StoreUnreachableError(f"the store on {self.address} {self.state.value}")

    def _connected(self) -> dist.TCPStore:
        return dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=_TRY)

    def _keep(self, client: dist.TCPStore, call: Call | None = None) -> None:
        """For the next one who asks, unless all connections were cut while ``call`` was through."""
        with self._lock:
            if call is not None and call.was_ended:
                self._free.clear()
            elif not self._closed:
                self._free.append(client)

    def _lost(self, why: str, *, late: bool) -> None:
        """A connection broke. Whether the server is there is seen by a new one; the idle ones are no better."""
        with self._lock:
            self._free.clear()
        if late:
            self._is_mute(why)
        elif not self._closed:
            with contextlib.suppress(StoreUnreachableError):
                self._keep(self._client()[0])

    def _knock(self) -> None:
        """A ``TCPStore`` that is made tries for long to reach a server that is gone; this sees it at once."""
        try:
            addresses = resolve_store(self.host, self.port, within_s=self._patience.connect_timeout_s)
            socket.create_connection((self.host, self.port), self._patience.connect_timeout_s).close()
            self._addresses = addresses
        except ConnectionRefusedError as error:
            if self.state is not StoreServerState.GONE:
                log.warning("the store on %s is gone: what it held is asked of the next holder", self.address)
            self.state = StoreServerState.GONE
            raise StoreUnreachableError(f"{self.address} {self.state.value}") from error
        except (OSError, PeerStoreError) as error:
            self._is_mute(str(error))
            raise StoreUnreachableError(f"{self.address} {self.state.value}") from error

    def _is_mute(self, why: str) -> None:
        log.warning("the store on %s does not answer: %s", self.address, why.splitlines()[0] if why else "no reason")
        self.state = StoreServerState.UNRESPONSIVE
        self._mute_until = time.monotonic() + self._patience.retry_after_s


StoreValue = str | bytes

_open: set[RootlessStore] = set()
"""Process groups keep only the C++ half of a store that is written in Python; alone it answers nothing."""


class RootlessStore(dist.Store):
    """The same as ``TCPStore`` to who uses it, but for queues: they are at a key's first holder alone.

    ``cut(addresses)`` is how this process's connections to some addresses are ended. To be closed.
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
        self._patience = timeouts or StoreTimeouts()
        self._guard = CallWatchdog()
        self._holders = [
            StoreServerClient(address, close_connections=close_connections, guard=self._guard, timeouts=self._patience)
            for address in addresses
        ]
        self._copies = copies
        self._over = ""
        """Why nothing is answered any more."""
        _open.add(self)

    # -- as torch calls it --------------------------------------------------------------------------------------------

    def set(self, key: str, value: StoreValue) -> None:
        self._everywhere(key, lambda client: client.set(key, value))  # type: ignore[arg-type]  # bytes are taken, too

    def get(self, key: str) -> bytes:
        def ask(client: dist.TCPStore, within_s: float) -> bytes:
            client.set_timeout(timedelta(seconds=within_s))
            return client.get(key)

        return self._when_there(key, ask, self._timeout)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        until = time.monotonic() + (timeout or self._timeout).total_seconds()
        for key in keys:

            def ask(client: dist.TCPStore, within_s: float, key: str = key) -> None:
                client.wait([key], timedelta(seconds=within_s))

            # Where one member has all keys there is no other one to ask, and torch warns of each wait that ends.
            within = timedelta(seconds=max(0.001, until - time.monotonic()))
            self._when_there(key, ask, within, look_s=float("inf") if self._is_one else None)

    def check(self, keys: Sequence[str]) -> bool:
        if self._is_one and keys:
            return self._are_there(keys)
        return all(self._are_there([key]) for key in keys)

    def add(self, key: str, value: int) -> int:
        return self._at_first(key, lambda client: client.add(key, value), lambda _: value != 0)

    def compare_set(self, key: str, expected: StoreValue, desired: StoreValue) -> bytes:
        wanted = desired.encode() if isinstance(desired, str) else desired
        found = self._at_first(
            key,
            lambda client: client.compare_set(key, expected, desired),  # type: ignore[arg-type]
            lambda found: found == wanted and expected != desired,
            lambda client: client.set(key, desired),  # type: ignore[arg-type]
        )
        return bytes(found)

    def append(self, key: str, value: StoreValue) -> None:
        def tell(client: Any) -> None:
            client.append(key, value)

        self._everywhere(key, tell, again=False)

    def delete_key(self, key: str) -> bool:
        return self._at_first(key, lambda client: client.delete_key(key), lambda _: True)

    def num_keys(self) -> int:
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """Of all members that can be asked: what one that is gone held is listed by the other holders."""
        self._check_open()
        found: set[str] = set()
        for holder in self._holders:
            if holder.state is not StoreServerState.GONE:
                answer = self._tried(holder, lambda client: client.list_keys())
                found.update(answer[0] if answer else ())
        return sorted(found)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        def ask(client: dist.TCPStore, within_s: float) -> list[bytes]:
            client.set_timeout(timedelta(seconds=within_s))
            return client.multi_get(list(keys))

        if self._is_one and keys:
            return self._when_there(keys[0], ask, self._timeout)
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[StoreValue]) -> None:
        def tell(client: Any) -> None:
            client.multi_set(list(keys), list(values))

        if self._is_one and keys:
            self._everywhere(keys[0], tell)
            return
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def queue_push(self, key: str, value: StoreValue) -> None:
        self._at_first(key, lambda client: client.queue_push(key, value), lambda _: False)

    def queue_pop(self, key: str, block: bool = True) -> bytes:  # noqa: FBT002 - torch's own signature
        def ask(client: dist.TCPStore, within_s: float) -> bytes:
            client.set_timeout(timedelta(seconds=within_s))
            return client.queue_pop(key, block)

        if not block:
            return self._at_first(key, lambda client: client.queue_pop(key, False), lambda _: False)
        return self._when_there(key, ask, self._timeout, most=1)

    def queue_len(self, key: str) -> int:
        return self._at_first(key, lambda client: client.queue_len(key), lambda _: False)

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        """All but the last one wait at the key's holders."""
        if self.add(f"{key}/here", 1) >= world_size:
            self.set(f"{key}/all", b"1")
        self.wait([f"{key}/all"], timeout)

    def clone(self) -> RootlessStore:
        return self

    # C++ looks these two up under other names than Python does.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    # -- for who runs the job -----------------------------------------------------------------------------------------

    def abort(self) -> int:
        """From any thread: whoever waits gets an error, and nobody waits again. Returns how many connections ended."""
        self._over = self._over or "it was cut: its world is over"
        ended = sum(holder.abort() for holder in self._holders)
        self._guard.expire_all()
        return ended

    def close(self) -> None:
        """Idempotent. Who still waits is not kept from it: :meth:`abort` is for that."""
        self._over = self._over or "it was closed"
        for holder in self._holders:
            holder.close()
        self._guard.close()
        _open.discard(self)

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _is_one(self) -> bool:
        """Whether one member has all keys: then one request may name several."""
        return len(self._holders) == 1

    @property
    def _timeout(self) -> timedelta:
        """As ``set_timeout`` left it, also one that came through a prefix in C++."""
        known: Any = super()
        return known.timeout

    def _check_open(self) -> None:
        if self._over:
            raise dist.DistNetworkError(f"the store does not answer: {self._over}")

    def _placed(self, key: str) -> list[StoreServerClient]:
        return [self._holders[place] for place in key_holders(key, len(self._holders), self._copies)]

    def _living(self, key: str) -> list[StoreServerClient]:
        self._check_open()
        living = [holder for holder in self._placed(key) if holder.state is not StoreServerState.GONE]
        if not living:
            where = ", ".join(holder.address for holder in self._placed(key))
            raise dist.DistNetworkError(f"what held {key!r} is gone: {where}")
        return living

    def _tried(
        self, holder: StoreServerClient, work: Callable[[dist.TCPStore], T], *, again: bool = True
    ) -> tuple[T] | None:
        """What came of it, unless it did not answer."""
        try:
            return (holder.call(work, again=again),)
        except StoreUnreachableError:
            self._check_open()
            return None

    def _everywhere(self, key: str, work: Callable[[dist.TCPStore], object], *, again: bool = True) -> None:
        """At all holders; one is enough."""
        living = self._living(key)
        awake = [holder for holder in living if not holder.is_backing_off] or living
        took = [self._tried(holder, work, again=again) for holder in awake]
        if not any(took):
            self._living(key)
            raise dist.DistNetworkError(f"no holder of {key!r} answers: {_states(living)}")

    def _at_first(
        self,
        key: str,
        work: Callable[[dist.TCPStore], T],
        mirrored: Callable[[T], bool],
        mirror: Callable[[dist.TCPStore], object] | None = None,
    ) -> T:
        """One holder decides, as long as it lives: one that is mute is not passed over, or there would be two."""
        while True:
            first, *others = self._living(key)
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
                self._tried(holder, mirror or work, again=mirror is not None)
        return result

    def _are_there(self, keys: Sequence[str]) -> bool:
        """Whether any holder has them: a ``set`` may have reached only one. They are held by the same ones."""
        key = keys[0]
        answers = [self._tried(holder, lambda client: client.check(list(keys))) for holder in self._in_turn(key)]
        if not any(answers):
            self._living(key)
            raise dist.DistNetworkError(f"no holder of {key!r} answers: {_states(self._living(key))}")
        return any(answer[0] for answer in answers if answer is not None)

    def _when_there(
        self,
        key: str,
        query: Callable[[dist.TCPStore, float], T],
        within: timedelta,
        *,
        most: int | None = None,
        look_s: float | None = None,
    ) -> T:
        """The servers wait, each for a while: nobody asks again and again. A member that dies is passed over."""
        until = time.monotonic() + within.total_seconds()
        while True:
            for holder in self._in_turn(key, most):
                left_s = min(look_s or self._patience.wait_slice_s, max(0.001, until - time.monotonic()))
                try:
                    return holder.call(lambda client, s=left_s: query(client, s), within_s=left_s)  # type: ignore[misc]
                except StoreUnreachableError as error:
                    self._check_open()
                    if self._is_one and holder.state is not StoreServerState.ANSWERS:
                        raise dist.DistNetworkError(f"no holder of {key!r} answers: {_states([holder])}") from error
                except dist.DistStoreError:  # not there yet
                    self._check_open()
                if time.monotonic() >= until:
                    took = f"wait timeout after {within.total_seconds() * 1e3:.0f}ms, keys: {key}"
                    raise dist.DistStoreError(took)

    def _in_turn(self, key: str, most: int | None = None) -> Iterator[StoreServerClient]:
        """The first holder first, those that did not answer a moment ago only where there is no other."""
        living = self._living(key)[:most]
        awake = [holder for holder in living if not holder.is_backing_off]
        yield from awake or living


def _states(holders: Sequence[StoreServerClient]) -> str:
    return ", ".join(f"{holder.address} {holder.state.value}" for holder in holders)


_KEY = re.compile(r"elastic/(\d+)/")
_END_S, _EXIT_S, _SWEEPING_LOOK_S = 1.0, 15.0, 0.2


def epoch_prefix(epoch: int) -> str:
    """What all keys of an epoch begin with."""
    return f"elastic/{epoch}"


def is_old_key(key: str, epoch: int) -> bool:
    """Whether the key is of a world before this one."""
    found = _KEY.match(key)
    return found is not None and int(found[1]) < epoch


class OldKeyCleanup:
    """Deletes what is of worlds before ``epoch`` from one server, beside everything else.

    To be made when all ranks of ``epoch`` have met: whoever still is in an earlier world has been given up by then.
    """

    def __init__(
        self, address: str, epoch: int, *, close_connections: CloseConnections, timeouts: StoreTimeouts | None = None
    ) -> None:
        self.deleted = 0
        self._guard = CallWatchdog()
        self._holder = StoreServerClient(
            address, close_connections=close_connections, guard=self._guard, timeouts=timeouts or StoreTimeouts()
        )
        self._epoch = epoch
        # A thread that is in torch's C++ when the interpreter ends aborts the process.
        atexit.register(self._end_at_exit)
        self._thread = threading.Thread(target=self._run, name="elastic-sweep", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Whether it is through."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """What it has not done by now is done after the next meeting.

        Where it hangs in a server that is stopped it is left there: the next world has connections to the same server,
        and only all of them can be cut.
        """
        if not self.join(0):
            self._holder.abort()
            self._guard.expire_all()
            self.join(_END_S)
        self._guard.forget()
        self._guard.close()

    def _end_at_exit(self) -> None:
        """There is no other world any more."""
        until = time.monotonic() + _EXIT_S
        while not self.join(0) and time.monotonic() < until:
            self._holder.abort()
            self.join(_SWEEPING_LOOK_S)

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
    if not hasattr(client, "list_keys"):  # of an older torch: they stay
        return []
    return client.list_keys()
