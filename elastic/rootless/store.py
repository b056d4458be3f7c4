"""A store in which no member is special: every node has a server, every key is at two of them.

::

    key ──hash──> first holder ── decides what is added and compared, and in which order
             └──> second holder ─ is told the same by whoever asked the first one; answers when that one is gone

The servers are ``torch.distributed.TCPStore`` and know nothing of each other. Clients are too, one connection to each
member whose keys are asked for, made when the first one is. ``docs/rendezvous.md`` says what holds when members die.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from elastic.rootless.guarding import Guard
from elastic.rootless.holders import Cut, Holder, NoAnswerError, Patience, State
from elastic.rootless.placement import COPIES, holders_of

T = TypeVar("T")
Value = str | bytes

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
        cut: Cut,
        copies: int = COPIES,
        timeout: timedelta = timedelta(minutes=5),
        patience: Patience | None = None,
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._patience = patience or Patience()
        self._guard = Guard()
        self._holders = [Holder(address, cut=cut, guard=self._guard, patience=self._patience) for address in addresses]
        self._copies = copies
        self._over = ""
        """Why nothing is answered any more."""
        _open.add(self)

    # -- as torch calls it --------------------------------------------------------------------------------------------

    def set(self, key: str, value: Value) -> None:
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

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        wanted = desired.encode() if isinstance(desired, str) else desired
        found = self._at_first(
            key,
            lambda client: client.compare_set(key, expected, desired),  # type: ignore[arg-type]
            lambda found: found == wanted and expected != desired,
            lambda client: client.set(key, desired),  # type: ignore[arg-type]
        )
        return bytes(found)

    def append(self, key: str, value: Value) -> None:
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
            if holder.state is not State.GONE:
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

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        def tell(client: Any) -> None:
            client.multi_set(list(keys), list(values))

        if self._is_one and keys:
            self._everywhere(keys[0], tell)
            return
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def queue_push(self, key: str, value: Value) -> None:
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

    def cut(self) -> int:
        """From any thread: whoever waits gets an error, and nobody waits again. Returns how many connections ended."""
        self._over = self._over or "it was cut: its world is over"
        ended = sum(holder.end() for holder in self._holders)
        self._guard.hurry()
        return ended

    def close(self) -> None:
        """Idempotent. Who still waits is not kept from it: :meth:`cut` is for that."""
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

    def _placed(self, key: str) -> list[Holder]:
        return [self._holders[place] for place in holders_of(key, len(self._holders), self._copies)]

    def _living(self, key: str) -> list[Holder]:
        self._check_open()
        living = [holder for holder in self._placed(key) if holder.state is not State.GONE]
        if not living:
            where = ", ".join(holder.address for holder in self._placed(key))
            raise dist.DistNetworkError(f"what held {key!r} is gone: {where}")
        return living

    def _tried(self, holder: Holder, work: Callable[[dist.TCPStore], T], *, again: bool = True) -> tuple[T] | None:
        """What came of it, unless it did not answer."""
        try:
            return (holder.call(work, again=again),)
        except NoAnswerError:
            self._check_open()
            return None

    def _everywhere(self, key: str, work: Callable[[dist.TCPStore], object], *, again: bool = True) -> None:
        """At all holders; one is enough."""
        living = self._living(key)
        awake = [holder for holder in living if not holder.is_resting] or living
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
            except NoAnswerError as error:
                self._check_open()
                if first.state is not State.GONE:
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
        ask: Callable[[dist.TCPStore, float], T],
        within: timedelta,
        *,
        most: int | None = None,
        look_s: float | None = None,
    ) -> T:
        """The servers wait, each for a while: nobody asks again and again. A member that dies is passed over."""
        until = time.monotonic() + within.total_seconds()
        while True:
            for holder in self._in_turn(key, most):
                left_s = min(look_s or self._patience.look_s, max(0.001, until - time.monotonic()))
                try:
                    return holder.call(lambda client, s=left_s: ask(client, s), within_s=left_s)  # type: ignore[misc]
                except NoAnswerError as error:
                    self._check_open()
                    if self._is_one and holder.state is not State.ANSWERS:
                        raise dist.DistNetworkError(f"no holder of {key!r} answers: {_states([holder])}") from error
                except dist.DistStoreError:  # not there yet
                    self._check_open()
                if time.monotonic() >= until:
                    took = f"wait timeout after {within.total_seconds() * 1e3:.0f}ms, keys: {key}"
                    raise dist.DistStoreError(took)

    def _in_turn(self, key: str, most: int | None = None) -> Iterator[Holder]:
        """The first holder first, those that did not answer a moment ago only where there is no other."""
        living = self._living(key)[:most]
        awake = [holder for holder in living if not holder.is_resting]
        yield from awake or living


def _states(holders: Sequence[Holder]) -> str:
    return ", ".join(f"{holder.address} {holder.state.value}" for holder in holders)
