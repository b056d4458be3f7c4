"""A file as bytes of a slot: written into a lease that grows."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from torch.distributed.checkpoint.metadata import Metadata

from peerstore.errors import ArenaBusyError, PeerStoreError, UnavailableError
from peerstore.records import Group, Lease
from tieredckpt.agent.messages import LAYOUT, TABLE
from tieredckpt.errors import (
    SaveFailedError,
    StoreBusyError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.layout import OBJECT, ItemEntry, Layout, encode
from tieredckpt.manifest import ShardMeta, StateTable, encode_meta, encode_table, pack
from tieredckpt.safe_objects import load_metadata
from tieredckpt.session import Session

METADATA = ".metadata"
PENDING = ".tmp"
_MOST_GROWTH = 1 << 30


class SlotWriter(io.RawIOBase):
    """Bytes into a leased slot, from where the file begins in its shard."""

    _fd = -1

    def __init__(
        self, closed: Callable[[SlotWriter], None], space: str, session: Session, lease: Lease, name: str
    ) -> None:
        super().__init__()
        self.name = name
        self._closed = closed
        self._space = space
        self._session = session
        self._lease = lease
        self._start = layout_of(name.removesuffix(PENDING)).header_bytes
        self._at = self._size = 0
        self._sealed = False
        self._fd = session.node.store.open_slot(lease.slot)

    @property
    def step(self) -> int:
        return self._lease.key.version

    @property
    def group(self) -> Group:
        return self._lease.key.group

    @property
    def slot_bytes(self) -> int:
        """The room there is."""
        return self._lease.size_bytes

    # -- io.RawIOBase -----------------------------------------------------------------------------------------

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"position {start + offset}")
        self._at = start + offset
        return self._at

    def write(self, data: object, /) -> int:
        with memoryview(data) as view, view.cast("B") as flat:  # type: ignore[arg-type]
            self._require(self._start + self._at + len(flat))
            done = 0
            with told(f"{self.name} of step {self.step} cannot be written"):
                while done < len(flat):
                    done += os.pwrite(self._fd, flat[done:], self._start + self._at + done)
            self._at += done
            self._size = max(self._size, self._at)
            return done

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        if self._fd >= 0:
            self._closed(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        self.close()

    def __del__(self) -> None:  # of files in general it closes them, and what was not closed is not all written
        self.let_go()

    # -- for the space ----------------------------------------------------------------------------------------

    def seal(self, final: str, table: StateTable | None) -> None:
        store = self._session.node.store
        layout, sizes = layout_of(final), (self._size,)
        total = layout.size_bytes(sizes)
        try:
            with told(f"{final} of step {self.step} was not sealed"):
                self._require(total)
                os.pwrite(self._fd, layout.header(sizes), 0)
                store.put_blob(self._space, LAYOUT + layout.digest, pack(encode(layout)))
                if table is not None:
                    store.put_blob(self._space, TABLE + table.digest, pack(encode_table(table)))
                meta = ShardMeta(
                    layout=layout.digest,
                    item_sizes=sizes,
                    table=table.digest if table else "",
                    saved_ns=time.time_ns(),
                )
                store.seal(self._lease.id, total, encode_meta(meta))
                self._sealed = True
        finally:
            self.let_go()

    def discard(self) -> None:
        """Give the slot back."""
        self.let_go()
        if not self._sealed:
            with contextlib.suppress(PeerStoreError):  # the lease would expire anyway
                self._session.node.store.abandon(self._lease.id)

    def metadata(self) -> Metadata:
        """This file, which is DCP's metadata. Who copies somebody's checkpoint to here runs nothing that is in it."""
        data = io.BytesIO(os.pread(self._fd, self._size, self._start))
        trusted = self._session.settings.memory.trust_objects
        try:
            found = pickle.load(data) if trusted else load_metadata(data)  # noqa: S301 - only where somebody asks for it
        except Exception as error:
            raise UsageError(f"{METADATA} of step {self.step} is not what DCP writes: {error}") from error
        if not isinstance(found, Metadata):
            raise UsageError(f"{METADATA} of step {self.step} is not what DCP writes, but a {type(found).__name__}")
        return found

    def let_go(self) -> None:
        """Nothing more is written; the lease ends with the connection it was given on."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _require(self, size_bytes: int) -> None:
        if size_bytes <= self._lease.size_bytes:
            return
        more = max(min(self._lease.size_bytes, _MOST_GROWTH), self._lease.size_bytes // 2)
        wanted = max(size_bytes, self._lease.size_bytes + more)
        with told(f"{self.name} of step {self.step} cannot grow"):
            wait_s = self._session.settings.memory.wait_s
            before, self._lease = self._lease, self._session.node.store.grow(self._lease.id, wanted, wait_s=wait_s)
            if self._lease.generation != before.generation:  # what was written so far has been copied
                fd = self._session.node.store.open_slot(self._lease.slot)
                self.let_go()
                self._fd = fd


def layout_of(name: str) -> Layout:
    return Layout((), (ItemEntry(name, OBJECT),), None)


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """The store's errors as this package's."""
    try:
        yield
    except TieredCheckpointError:
        raise
    except ArenaBusyError as error:
        raise StoreBusyError(f"{what}: {error}") from error
    except UnavailableError as error:
        raise TierUnavailableError(f"{what}: {error}") from error
    except (PeerStoreError, OSError) as error:
        raise SaveFailedError(f"{what}: {error}") from error
