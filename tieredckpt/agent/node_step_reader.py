"""Names, pieces and shards of single steps, wherever their copies are."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Collection, Sequence

from peerstore.errors import PeerStoreError, ShardDamagedError
from peerstore.message_codec import from_msgpack
from peerstore.shard_records import ShardInfo, ShardRecord, VersionId
from peerstore.store.node_store import NodeStore
from peerstore.store.store_listener import StoreListener
from tieredckpt.agent.agent_api import (
    LAYOUT_BLOB_PREFIX,
    TABLE_BLOB_PREFIX,
    BlobPage,
    LayoutsPage,
    PieceLocations,
    ShardLocations,
    StateNames,
    StepDescription,
    StepSummary,
    TensorSliceNeed,
    describe_step,
)
from tieredckpt.agent.durable_tiers import DurableTiers
from tieredckpt.agent.peer_tier import PeerTier, unpack_named_blob
from tieredckpt.agent.step_locator import STEP_PAGE_BYTES, StepLayoutCache, StepLocator
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError, PeersLostError
from tieredckpt.format import object_keys
from tieredckpt.format.manifest import (
    Manifest,
    ShardIndex,
    ShardMeta,
    StateTable,
    checked_layout,
    decode_meta,
    decode_table,
    missing_entries,
    pack_blob,
    unpack_blob,
)
from tieredckpt.format.shard_layout import decode_layout

log = logging.getLogger(__name__)
_MAX_LOCATORS = 4


class NodeStepReader(StoreListener):
    """A :class:`~tieredckpt.agent.agent_api.StepReader` over memory, peers and the durable tier."""

    def __init__(
        self,
        store: NodeStore,
        durable: DurableTiers,
        peers: PeerTier | None,
        *,
        writer: str = "",
        page_bytes: int = STEP_PAGE_BYTES,
    ) -> None:
        self._store, self._durable, self._peers = store, durable, peers
        self._writer = writer
        self._page_bytes = page_bytes
        self._lock = threading.Lock()
        self._locators: dict[tuple[str, VersionId], StepLocator] = {}
        """Locators of the steps described last."""
        self._is_prepared = False
        """Whether the import of numpy has begun, which layouts need. A load would wait 0.1 s for it."""

    def on_shard_sealed(self, record: ShardRecord) -> None:
        """Drop the locators of older steps: the job has passed them, so no rank will load them."""
        with self._lock:
            for key in [key for key in self._locators if key[0] == record.key.job and key[1] < record.key.version_id]:
                del self._locators[key]
            starts, self._is_prepared = not self._is_prepared, True
        if starts:
            threading.Thread(
                target=importlib.import_module, args=("numpy",), name="tieredckpt-imports", daemon=True
            ).start()

    def describe(self, job: str, group: VersionId) -> StepDescription:
        return describe_step(self, job, group)

    def names(self, job: str, group: VersionId) -> StateNames:
        return from_msgpack(unpack_blob(self._locate(job, group).names()[1]), StateNames)

    def names_page(self, job: str, group: VersionId, digest: str, start: int) -> BlobPage:
        """Return a page of the packed names, from the beginning if ``digest`` is not the current digest."""
        step = self._locator(job, group) if digest else self._locate(job, group)
        named, data = step.names()
        start = start if named == digest else 0
        return BlobPage(named, len(data), data[start : start + self._page_bytes])

    def pieces(
        self, job: str, group: VersionId, rank: int, needs: Sequence[TensorSliceNeed], objects: Sequence[str]
    ) -> PieceLocations:
        return self._locator(job, group).pieces(rank, needs, objects)

    def parts(self, job: str, group: VersionId, parts: Sequence[int], *, item_sizes: bool = False) -> ShardLocations:
        return self._locator(job, group).parts(parts, item_sizes=item_sizes)

    def summary(self, job: str, group: VersionId) -> StepSummary:
        step = self._locate(job, group)
        return StepSummary(
            tuple(step.metas),
            step.durable.created_ns if step.durable else time.time_ns(),
            step.durable.writer if step.durable else self._writer,
            tuple(dict.fromkeys(meta.layout for meta in step.metas.values())),
            tuple(dict.fromkeys(meta.table for meta in step.metas.values() if meta.table)),
        )

    def layouts(self, job: str, group: VersionId, layouts: Sequence[str], tables: Sequence[str]) -> LayoutsPage:
        step = self._locator(job, group)
        room = self._page_bytes
        layouts_found, tables_found = dict[str, bytes](), dict[str, bytes]()
        known = step.durable.tables if step.durable is not None else {}
        for digest in [*layouts, *tables]:
            if room < 0:
                return LayoutsPage(layouts_found, tables_found, more=True)
            if digest in layouts:
                data = layouts_found[digest] = pack_blob(self._layouts(job, [digest], step.durable)[digest])
            else:
                table = known.get(digest) or self._table(job, digest)
                data = b"" if table is None else pack_blob(table)
                if data:
                    tables_found[digest] = data
            room -= len(data)
        return LayoutsPage(layouts_found, tables_found, more=False)

    def _locate(self, job: str, group: VersionId) -> StepLocator:
        """Locate all shards of a step again and cache the locator."""
        on_peers, sources = self._peers.holders_of_parts(job, group) if self._peers is not None else ({}, {})
        local = {record.key.part: record for record in self._store.reader.records(job, group)}
        shards: dict[int, ShardInfo | ShardRecord] = {**on_peers, **local}
        metas = [decode_meta(fact.meta) for fact in shards.values()]
        parts = next((fact.parts for fact in shards.values()), 0)
        is_complete = bool(metas) and (len(metas) >= parts or self.covers(job, metas))
        durable = self._durable.manifest(job, group, needed=not is_complete)
        if durable is None and not metas:
            raise CheckpointNotFoundError(
                f"job {job} has no step {group.version} ({object_keys.group_stem(group)}) here"
            )
        with self._lock:
            previous = self._locators.pop((job, group), None)
        step = StepLocator(
            group,
            here=local,
            elsewhere=on_peers,
            sources=sources,
            durable=durable,
            layouts=lambda digests: self._layouts(job, digests, durable),
            records=lambda wanted: self._peers.records(job, group, wanted) if self._peers is not None else {},
            table=lambda digest: self._decoded_table(job, digest, durable),
            known=StepLayoutCache() if previous is None else previous.known,
            page_bytes=self._page_bytes,
        )
        with self._lock:
            self._locators[job, group] = step
            while len(self._locators) > _MAX_LOCATORS:
                self._locators.pop(next(iter(self._locators)))
        return step

    def _locator(self, job: str, group: VersionId) -> StepLocator:
        with self._lock:
            known = self._locators.get((job, group))
        return known or self._locate(job, group)

    def _layouts(self, job: str, digests: Collection[str], durable: Manifest | None) -> dict[str, bytes]:
        """Return layouts from the manifest, this node or other nodes.

        Raise :class:`PeersLostError` if a node that may have a missing layout does not answer, or
        :class:`CheckpointDamagedError` if no node has it.
        """
        found: dict[str, bytes] = {}
        for digest in digests:
            stored = durable.layouts.get(digest) if durable is not None else None
            if stored is not None:
                found[digest] = checked_layout(digest, stored)
            elif (local := self._unpacked(job, LAYOUT_BLOB_PREFIX + digest)) is not None:
                found[digest] = local
        missing = [digest for digest in digests if digest not in found]
        if not missing:
            return found
        from_peers, all_answered = (
            self._peers.blobs(job, [LAYOUT_BLOB_PREFIX + digest for digest in missing])
            if self._peers is not None
            else ({}, True)
        )
        for digest in missing:
            layout = from_peers.get(LAYOUT_BLOB_PREFIX + digest)
            if layout is None and not all_answered:
                raise PeersLostError(f"job {job}: nodes that may have layout {digest} do not answer")
            if layout is None:
                raise CheckpointDamagedError(f"job {job}: layout {digest} is on no node, nor in a manifest")
            found[digest] = layout
        return found

    def _table(self, job: str, digest: str) -> bytes | None:
        data = self._unpacked(job, TABLE_BLOB_PREFIX + digest)
        if data is None and self._peers is not None:
            data = self._peers.blobs(job, [TABLE_BLOB_PREFIX + digest])[0].get(TABLE_BLOB_PREFIX + digest)
        return data

    def _unpacked(self, job: str, name: str) -> bytes | None:
        """Return a layout or table of this node.

        Return ``None`` if it is missing or damaged: another node may have an intact one.
        """
        try:
            packed = self._store.blobs.find(job, name)
            return None if packed is None else unpack_named_blob(name, packed)
        except (ShardDamagedError, CheckpointDamagedError) as error:
            log.error("job %s: %s of this node: %s", job, name, error)
            return None

    def _decoded_table(self, job: str, digest: str, durable: Manifest | None) -> StateTable | None:
        data = (durable.tables.get(digest) if durable is not None else None) or self._table(job, digest)
        return None if data is None else decode_table(data)

    def covers(self, job: str, metas: Sequence[ShardMeta]) -> bool:
        """Return whether these shards hold the whole state; false if a table or layout cannot be read."""
        digests = dict.fromkeys(meta.table for meta in metas if meta.table)
        try:
            table = next((found for one in digests if (found := self._decoded_table(job, one, None)) is not None), None)
            if table is None:
                return False
            layouts = self._layouts(job, {meta.layout for meta in metas}, None)
            return not missing_entries(table, map(decode_layout, layouts.values()))
        except (PeerStoreError, PeersLostError, CheckpointDamagedError):
            return False

    def describe_shard(self, record: ShardRecord) -> tuple[ShardIndex, bytes, bytes]:
        """Return a sealed shard's index, layout and table; the table is empty if the shard has none."""
        meta = decode_meta(record.meta)
        index = ShardIndex(record.key, record.parts, record.size_bytes, record.chunk_bytes, record.checksums, meta)
        job = record.key.job
        layout = self._layouts(job, [meta.layout], None)[meta.layout]
        return index, layout, (self._table(job, meta.table) or b"") if meta.table else b""
