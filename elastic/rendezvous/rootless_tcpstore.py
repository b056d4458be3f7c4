"""A torch Store without a root: every key on two nodes, calls with timeouts.

::

    key ──hash──> first holder ── decides the order and the results of add and compare_set
             └──> second holder ─ receives the same from the client; answers after the first holder is gone

The servers are ``torch.distributed.TCPStore`` and do not know each other. The clients are ``TCPStore`` objects too. The
first request for a member's keys opens the connection to it. ``docs/explanation/control-plane.md`` describes the
guarantees when members die.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from elastic.rendezvous.call_watchdog import CallWatchdog
from elastic.rendezvous.store_server_client import (
    CloseConnections,
    StoreServerClient,
    StoreServerState,
    StoreTimeouts,
    StoreUnreachableError,
)
from elastic.rendezvous.store_servers import KEY_COPIES, key_holders

T = TypeVar("T")
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
