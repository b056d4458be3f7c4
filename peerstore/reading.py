"""What is here, and holding on to it while somebody reads."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from peerstore import checksum
from peerstore.errors import RequestError, ShardDamagedError, ShardNotFoundError, ShardUnreadableError
from peerstore.jobs import Jobs
from peerstore.owners import Owner
from peerstore.records import Group, Pin, ShardFact, ShardKey, ShardRecord
from peerstore.shelf import Shelf, Slot


@contextlib.contextmanager
def unreadable(key: ShardKey) -> Iterator[None]:
    """What goes wrong inside is no damage of ``key``: :class:`ShardUnreadableError`."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:  # the last: no thread could be started
        what = str(error) or type(error).__name__
        raise ShardUnreadableError(f"{key} is kept and cannot be read for now: {what}") from error


@dataclass(frozen=True)
class _PinOf:
    slot: str
    owner: Owner


class Reading:
    """Inventory, pins and verification of the store. The shelf's lock is taken here."""

    def __init__(self, shelf: Shelf, jobs: Jobs, pool: Executor, await_adoption: Callable[[str | None], None]) -> None:
        self._shelf = shelf
        self._jobs = jobs
        self._pool = pool
        self._await_adoption = await_adoption
        self._pins: dict[str, _PinOf] = {}

    @property
    def pins(self) -> int:
        return len(self._pins)

    def inventory(self, job: str | None) -> list[ShardFact]:
        with self._shelf.lock:
            self._await_adoption(job)
            return [
                ShardFact(
                    record.key,
                    record.parts,
                    record.size_bytes,
                    record.meta,
                    record.sealed_ns,
                    record.key.group in self._jobs.of(record.key.job).marks,
                    slot.holders,
                )
                for slot, record in self._shelf.offered(job)
            ]

    def records(self, job: str, group: Group) -> list[ShardRecord]:
        with self._shelf.lock:
            self._await_adoption(job)
            return [record for _, record in self._shelf.offered(job) if record.key.group == group]

    def pin(self, key: ShardKey, owner: Owner) -> Pin:
        with self._shelf.lock:
            self._await_adoption(key.job)
            slot, record = self._shelf.sealed(key)
            fd = self._opened(slot, record)
            return Pin(self._used(slot, owner), record, fd)

    def _opened(self, slot: Slot, record: ShardRecord) -> int:
        """A shard's file, which has every byte that counts; :class:`ShardDamagedError` when it is gone or shorter."""
        with unreadable(record.key):
            try:
                fd = self._shelf.arena.open(slot.name)
            except FileNotFoundError as error:
                raise ShardDamagedError(f"the file of {record.key} was removed by somebody else") from error
            try:
                size_bytes = os.fstat(fd).st_size
                if size_bytes < record.size_bytes:
                    raise ShardDamagedError(
                        f"the file of {record.key} was truncated by somebody else: {size_bytes} bytes of "
                        f"{record.size_bytes} are left"
                    )
            except BaseException:
                os.close(fd)
                raise
            return fd

    def _used(self, slot: Slot, owner: Owner) -> str:
        pin = f"pin-{secrets.token_hex(8)}"
        self._pins[pin] = _PinOf(slot.name, owner)
        slot.users.add(pin)
        return pin

    def pin_as_it_is(self, key: ShardKey, owner: Owner) -> tuple[str, ShardRecord, str]:
        """For whoever looks for damage itself: a pin's id, the record, and where the file is to be, if it is there."""
        with self._shelf.lock:
            self._await_adoption(key.job)
            slot, record = self._shelf.sealed(key)
            return self._used(slot, owner), record, self._shelf.arena.path(slot.name)

    def unpin(self, pin_id: str) -> bool:
        with self._shelf.lock:
            pin = self._pins.pop(pin_id, None)
            slot = self._shelf.slots.get(pin.slot) if pin is not None else None
            if slot is None or pin_id not in slot.users:
                return False
            self._shelf.release(slot, pin_id)
            return True

    def hold(self, key: ShardKey, name: str) -> ShardRecord:
        with self._shelf.lock:
            slot, record = self._shelf.sealed(key)
            slot.users.add(f"hold-{name}")
            return record

    def unhold(self, key: ShardKey, name: str) -> None:
        with self._shelf.lock:
            for slot in list(self._shelf.slots.values()):
                if slot.record is not None and slot.record.key == key and f"hold-{name}" in slot.users:
                    self._shelf.release(slot, f"hold-{name}")

    def path_of(self, key: ShardKey) -> str:
        with self._shelf.lock:
            for slot in self._shelf.slots.values():
                if slot.record is not None and slot.record.key == key:
                    return self._shelf.arena.path(slot.name)
            raise ShardNotFoundError(f"{key} is not on this node")

    def damaged_chunks(self, record: ShardRecord, path: str, chunks: tuple[int, int] | None) -> tuple[int, ...]:
        """Hash a shard's bytes again: the chunks that are not what was sealed, all of them when the file is gone.

        :class:`ShardUnreadableError` when they cannot be read: out of descriptors or memory, an I/O error. Such a shard
        may be whole, so that it is kept.
        """
        count = checksum.chunk_count(record.size_bytes, record.chunk_bytes)
        first, stop = chunks or (0, count)
        if not 0 <= first <= stop <= count:
            raise RequestError(f"chunks {first}..{stop} of a shard with {count}")
        asked = range(first, stop)
        with unreadable(record.key):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return tuple(range(max(count, 1)))
            try:
                return checksum.file_mismatches(
                    fd,
                    record.size_bytes,
                    record.checksums,
                    chunks=asked,
                    chunk_bytes=record.chunk_bytes,
                    pool=self._pool,
                )
            finally:
                os.close(fd)

    def sweep(self, grace_s: float) -> None:
        """Let go of pins whose readers went away."""
        for pin_id, pin in list(self._pins.items()):
            if self._jobs.gone_for(pin.owner) > grace_s:
                slot = self._shelf.slots.get(pin.slot)
                if slot is not None and pin.owner.alive:
                    slot.reusable = False  # it may still read
                self.unpin(pin_id)
