"""Discovery through the job's own ``torch.distributed`` store, which is handed over; torch is not imported here."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import msgspec

from peerstore.cluster.nodes import Node
from peerstore.cluster.roster import Roster, roster_of
from peerstore.decode import from_msgpack
from peerstore.errors import ProtocolError, RequestError, UnavailableError


class KeyValueStore(Protocol):
    """What is used of a ``torch.distributed`` store."""

    def set(self, key: str, value: Any, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...


class StoreDiscovery:
    """The job's own ``torch.distributed`` store: each of ``count`` nodes puts itself there, and reads the others.

    ``index`` is this node's place among them (its group rank), ``round`` the job's epoch: nodes of another round are
    not looked at, and it is the roster's version. Without ``me`` it only reads.
    """

    def __init__(
        self,
        store: KeyValueStore,
        *,
        index: int,
        count: int,
        round: int,  # noqa: A002
        me: Node | None,
        timeout_s: float = 60.0,
        prefix: str = "peerstore",
    ) -> None:
        if count < 1 or not 0 <= index < count or round < 0:
            raise RequestError(f"index={index}, count={count}, round={round}: the index is one of 0 to count - 1")
        self._store, self._me, self._timeout_s = store, me, timeout_s
        self._round = round
        self._own = f"{prefix}/{round}/{index}"
        self._keys = [f"{prefix}/{round}/{one}" for one in range(count)]
        self._roster: Roster | None = None

    def roster(self) -> Roster:
        if self._roster is None:
            try:
                # A connection of its own where torch gives one: who waits on a store keeps its other users waiting.
                clone = getattr(self._store, "clone", None)
                store = clone() if clone is not None else self._store
                if self._me is not None:
                    store.set(self._own, msgspec.msgpack.encode(self._me))
                self._await(store)
                told = self._read(store)
            except (RuntimeError, OSError) as error:  # torch's own errors are RuntimeErrors
                raise UnavailableError(f"the job's store could not be asked: {error}") from error
            self._roster = roster_of(self._round, map(_from_store, self._keys, told))
        return self._roster

    def _await(self, store: KeyValueStore) -> None:
        try:
            store.wait(self._keys, timedelta(seconds=self._timeout_s))
        except (RuntimeError, OSError) as error:
            missing = [str(index) for index, key in enumerate(self._keys) if not store.check([key])]
            if not missing:
                return
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise UnavailableError(
                f"{len(missing)} of {len(self._keys)} nodes are not in the job's store after {self._timeout_s:g} s "
                f"(round {self._round}): number {shown}"
            ) from error

    def _read(self, store: KeyValueStore) -> Sequence[bytes]:
        many = getattr(store, "multi_get", None)
        if many is not None and store.has_extended_api():  # type: ignore[attr-defined]
            return many(self._keys)
        return [store.get(key) for key in self._keys]


def _from_store(key: str, told: bytes) -> Node:
    try:
        return from_msgpack(told, Node)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"what the job's store has under {key!r} is not a node: {error}") from error
