"""A step below a durable URL, shard by shard; it is there when its manifest is, and that comes last."""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import xxhash

from elastic.reshard.cutting import Cut, Slice
from elastic.reshard.forms import Advance, Source, windows
from elastic.reshard.stored import StoredSource
from peerstore.checksum import file_checksums
from peerstore.records import CHUNK_BYTES, Group, ShardKey
from tieredckpt.agent.catalog import Catalog, manifest_from
from tieredckpt.agent.compress import compressed
from tieredckpt.agent.drain import delete_step
from tieredckpt.durable import names
from tieredckpt.durable.store import ObjectStore
from tieredckpt.errors import TieredCheckpointError, UsageError
from tieredckpt.export.source import StepSource, raw_bytes
from tieredckpt.layout import OBJECT, ItemEntry, Layout, TensorEntry, encode, lay_out
from tieredckpt.location import Location
from tieredckpt.manifest import (
    Manifest,
    ShardIndex,
    ShardMeta,
    StateTable,
    TableTensor,
    encode_shard_file,
    encode_table,
)
from tieredckpt.node import Described
from tieredckpt.resolve import Tier
from tieredckpt.settings import DurableSettings

_WRITER = "elastic reshard"
File = tuple[ShardIndex, bytes, bytes]


class DurableTarget:
    """A step of a job in an object store; ``force`` replaces what is there of that step."""

    def __init__(self, store: ObjectStore, settings: DurableSettings, location: Location, *, force: bool) -> None:
        if location.step is None:
            raise UsageError(f"which step of {location.job} is this? The source does not say: name it, .../step-N")
        step = self.step = location.step
        self._job = location.job
        self._store = store
        self._settings = settings
        self._catalog = Catalog(store, location.job)
        self.name = f"{store.url}/{location.job}/step-{step}"
        listing = self._catalog.listing(fresh=True)
        self._old = sorted(group for group in listing.manifests if group.version == step)
        if step in listing.plain:
            raise UsageError(f"{self.name} is a plain DCP checkpoint: choose another job's name")
        if self._old and not force:
            raise UsageError(f"{self.name} exists; --force replaces it")
        epoch = 1 + max((group.epoch for group in listing.manifests), default=0)
        self._sent: list[str] = []
        """Objects that are there, or on their way."""
        self._group = Group(epoch, step, 0, f"reshard-{secrets.token_hex(6)}")

    @contextmanager
    def written(self, source: Source, cut: Cut, advance: Advance) -> Iterator[Source]:
        """What was written, to be looked at before it counts: the manifest is written when the block ends well."""
        try:
            files = [self._shard(part, source, cut, advance) for part in range(len(cut.parts))]
            manifest = manifest_from(files, created_ns=time.time_ns(), writer=_WRITER)
            found: dict[int, tuple[Tier, ...]] = {shard.key.part: (Tier.DURABLE,) for shard in manifest.shards}
            step = StepSource(Described(manifest, found), None, lambda: self._store)
            with contextlib.closing(StoredSource(self.name, step)) as written:
                yield written
        except BaseException:
            self._discard()
            raise
        self._commit(manifest)

    def _commit(self, manifest: Manifest) -> None:
        self._catalog.commit(manifest, None)
        for group in self._old:
            delete_step(self._catalog, self._job, group)

    def _discard(self) -> None:
        with contextlib.suppress(TieredCheckpointError, OSError):  # nobody reads what no manifest names
            self._store.delete(self._sent)

    def _shard(self, part: int, source: Source, cut: Cut, advance: Advance) -> File:
        """One shard: written to a file beside, sent, and described."""
        objects = source.objects if part == cut.objects else ()
        items = [source.object_bytes(name) for name in objects]
        layout = _layout(source, cut.parts[part], objects)
        table = _table(source) if part == cut.objects else None
        key = ShardKey(self._job, self.step, self._group.epoch, self._group.incarnation, 0, part)
        meta = ShardMeta(
            layout.digest,
            tuple(map(len, items)),
            table=table.digest if table else "",
            durable=True,
            saved_ns=time.time_ns(),
        )
        size = layout.size_bytes(meta.item_sizes)
        with tempfile.NamedTemporaryFile(prefix="elastic-reshard-", suffix=".safetensors") as file:
            file.write(layout.header(meta.item_sizes))
            for entry in layout.tensors:
                for window in windows(entry.box, entry.shape, entry.itemsize):
                    data = raw_bytes(source.read(entry.fqn, window))
                    file.write(data)
                    advance(len(data))
            for item in items:
                file.write(item)
            file.flush()
            with ThreadPoolExecutor(2) as pool:
                sums = file_checksums(file.fileno(), size, pool=pool)
            index = ShardIndex(key, len(cut.parts), size, CHUNK_BYTES, sums, meta)
            index = self._send(Path(file.name), index)
        found = index, encode(layout), encode_table(table) if table else b""
        self._sent.append(names.index(key))
        self._store.put(names.index(key), encode_shard_file(*found))
        return found

    def _send(self, path: Path, index: ShardIndex) -> ShardIndex:
        with compressed(path, index, wanted=self._settings.compress == "zstd") as (packed, frames):
            name = names.shard(index.key, spread=self._settings.spread, compressed=frames is not None)
            size = index.size_bytes if frames is None else sum(frames)
            self._sent.append(name)
            self._store.upload(
                name, packed, size, journal=_NoJournal(), identity=xxhash.xxh3_128_hexdigest(index.checksums)
            )
        encoded = "raw" if frames is None else "zstd"
        return msgspec.structs.replace(index, object=name, encoding=encoded, frames=tuple(frames or ()))


class _NoJournal:
    """An interrupted command begins anew."""

    def get(self, name: str) -> bytes | None:
        return None

    def put(self, name: str, data: bytes) -> None:
        pass

    def remove(self, name: str) -> None:
        pass


def _layout(source: Source, pieces: Sequence[Slice], objects: Sequence[str]) -> Layout:
    entries = [_entry(source, piece) for piece in pieces]
    return lay_out(entries, [ItemEntry(name, OBJECT) for name in objects], source.paths)


def _entry(source: Source, piece: Slice) -> TensorEntry:
    form = source.tensors[piece.name]
    return TensorEntry(
        fqn=piece.name,
        dtype=form.dtype,
        shape=form.shape,
        box=piece.box,
        itemsize=form.itemsize,
        sharded=piece.box.sizes != form.shape,
        requires_grad=form.requires_grad,
    )


def _table(source: Source) -> StateTable:
    tensors = tuple(TableTensor(name, form.dtype, form.shape) for name, form in source.tensors.items())
    return StateTable(tensors, source.objects)
