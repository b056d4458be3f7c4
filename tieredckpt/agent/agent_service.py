"""NodeAgentService: steps in memory, on peers and in the durable tier, and quarantine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from peerstore import deadlines
from peerstore.daemon_process import ProcessIdentity, current_process
from peerstore.errors import PeerStoreError, ShardDamagedError, ShardNotFoundError, UnavailableError
from peerstore.membership.topology import NodeId, PeerNode
from peerstore.message_codec import from_msgpack
from peerstore.server.job_peers import JobPeers
from peerstore.server.node_peers import NodePeers
from peerstore.settings import JobPeersConfig
from peerstore.shard_records import ShardInfo, ShardKey, ShardRecord, VersionId
from peerstore.store.node_store import NodeStore
from peerstore.store.store_listener import StoreListener
from tieredckpt.agent.agent_api import (
    CHECKED_SETTINGS_BLOB,
    DAMAGED_BLOB_PREFIX,
    DURABLE_SETTINGS_BLOB,
    LAYOUT_BLOB_PREFIX,
    QUARANTINE_BLOB_PREFIX,
    TABLE_BLOB_PREFIX,
    BlobPage,
    ClusterNode,
    ClusterStatus,
    DrainStatus,
    DurableCheck,
    KnownPeers,
    LayoutsPage,
    PieceLocations,
    ProtectionStatus,
    ReaderCredentials,
    ShardLocations,
    ShardReplication,
    StateNames,
    StepDescription,
    StepInventory,
    StepStatus,
    StepSummary,
    TensorSliceNeed,
    describe_step,
)
from tieredckpt.agent.cluster_settings import ClusterSettingsWatcher
from tieredckpt.agent.drain import Drain
from tieredckpt.agent.durable_catalog import CatalogListing, DurableCatalog, delete_step
from tieredckpt.agent.durable_check import StoreOpener, check_durable
from tieredckpt.agent.job_health import CrashedLoads, describe_protection, protection_status
from tieredckpt.agent.peer_tier import (
    FactsByGroup,
    PeerTier,
    cluster_status_of,
    memory_step_statuses,
    shard_replication_status,
    unpack_named_blob,
)
from tieredckpt.agent.retention import require_no_revival
from tieredckpt.agent.step_locator import STEP_PAGE_BYTES, StepLayoutCache, StepLocator
from tieredckpt.durable.object_store import ObjectNotFoundError
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    DurableRefusedError,
    PeersLostError,
    TierUnavailableError,
    UsageError,
)
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
from tieredckpt.memory_service_options import MEMORY_SERVICE_JOB
from tieredckpt.resolve_step import Tier
from tieredckpt.settings import DurableSettings

log = logging.getLogger(__name__)

_MAX_LOCATORS = 4
_LOG_S = 60.0


class _DamageNote(msgspec.Struct, frozen=True):
    key: ShardKey
    parts: int
    reason: str


class _CheckedSettings(msgspec.Struct, frozen=True):
    """Durable settings that a process has checked and no save has used yet."""

    durable: DurableSettings
    owner: ProcessIdentity


@dataclasses.dataclass(eq=False)
class _OpenCatalog:
    """An open durable tier and the number of its current users."""

    settings: DurableSettings
    catalog: DurableCatalog | None
    users: int = 0

    def close(self) -> None:
        if self.catalog is not None:
            self.catalog.store.close()


class NodeAgentService(StoreListener):
    """A :class:`~tieredckpt.agent.agent_api.NodeAgentAPI` over the store of this process."""

    def __init__(
        self,
        store: NodeStore,
        *,
        open_durable: StoreOpener = open_store,
        writer: str = "",
        node_peers: NodePeers | None = None,
        page_bytes: int = STEP_PAGE_BYTES,
    ) -> None:
        self.store = store
        self._page_bytes = page_bytes
        self._locators: dict[tuple[str, VersionId], StepLocator] = {}
        """Locators of the steps described last."""
        self.peers = PeerTier(node_peers) if node_peers is not None else None
        self._open = open_durable
        self._writer = writer
        self._lock = threading.Lock()
        self._catalogs_lock = threading.Lock()
        """Guards the open catalogs and their settings. Taken before ``_lock``."""
        self._catalogs: dict[str, _OpenCatalog] = {}
        self._checked_catalogs: dict[str, _OpenCatalog] = {}
        """Durable tiers by job that a process has checked and no save has used yet."""
        self._checked_lock = threading.Lock()
        """Held while a job's checked settings are replaced."""
        self._opened: list[_OpenCatalog] = []
        """All open catalogs, including replaced ones that are still in use."""
        self._crashed = CrashedLoads()
        self._settings: dict[str, DurableSettings] = {}
        self.cluster_settings: ClusterSettingsWatcher | None = None
        """Watcher of the cluster's settings; ``None`` if the agent does not follow them."""
        self.trainer_metrics: dict[str, Counter[str]] = defaultdict(Counter)
        self._missed_saves: dict[str, tuple[int, int, float]] = {}
        """By job: newest protected step, number of saves missed since, and the Unix time of the first of them."""
        self._logged_protection: dict[str, tuple[bool, float]] = {}
        """By job: whether the last log line reported it as unprotected, and the monotonic time of that line."""
        self._notifier = ThreadPoolExecutor(1, thread_name_prefix="tieredckpt-tell")
        self.drain = Drain(store, self, writer=writer)
        store.subscribe(self)
        store.subscribe(self.drain)

    def configure(
        self,
        job: str,
        durable: DurableSettings,
        *,
        check: DurableCheck = "none",
        owner: ProcessIdentity | None = None,
    ) -> None:
        """Store the job's durable settings. A changed URL takes effect with the next step."""
        if check == "none":
            self._store_settings(job, durable)
            return
        known = self.durable_settings(job)
        if durable.url:
            check_durable(self._open, job, durable, writes=check == "write")
        if durable.url and (known.url, known.options) == (durable.url, durable.options):
            self._store_settings(job, durable)
        else:
            self._set_checked(job, durable, owner or current_process())

    def check_durable(self, job: str) -> None:
        durable = self.durable_settings(job)
        if durable.url:
            check_durable(self._open, job, durable, writes=True)

    def _store_settings(self, job: str, durable: DurableSettings) -> None:
        data = msgspec.msgpack.encode(durable)
        if (
            self._blob(job, DURABLE_SETTINGS_BLOB) != data
        ):  # compare the stored blob: the cached settings may be those of an expired job
            self.store.blobs.put(job, DURABLE_SETTINGS_BLOB, data)
        previous = self.durable_settings(job)
        with self._checked_lock:
            if self._blob(job, CHECKED_SETTINGS_BLOB) is not None:
                self.store.blobs.remove(job, CHECKED_SETTINGS_BLOB)
        if previous != durable:
            self._forget_catalog(job)
        if (previous.url, previous.options) != (durable.url, durable.options):
            self.drain.destination_changed(job)
        self.drain.retry_now()

    def list_steps(self, job: str, *, fresh: bool = False, patience_s: float = 0.0) -> StepInventory:
        if job == MEMORY_SERVICE_JOB:  # shards of the memory service are not steps
            return StepInventory((), {})
        unreachable: dict[Tier, str] = {}
        on_peers: FactsByGroup = {}
        versions = self.store.jobs.versions(job)
        aborted = tuple(sorted(versions.aborted))
        once_complete = [versions.last_committed()]
        if self.peers is not None:
            try:
                if patience_s > 0:
                    self.peers.wait_for_pending_commits(job, patience_s)
                # Query the peers again: a job that resumes at once must find a step sealed a moment ago.
                on_peers, unreachable_peers, newest_on_peers = self.peers.peer_facts(job)
            except UnavailableError as error:
                unreachable_peers, newest_on_peers = str(error), None
            once_complete.append(newest_on_peers)
            if unreachable_peers:
                unreachable[Tier.PEER] = unreachable_peers
        covers = functools.partial(self._covers, job)
        views = {view.version_id: view for view in memory_step_statuses(self.store.list_shards(job), on_peers, covers)}
        plain_steps: tuple[int, ...] = ()
        self._add_damaged(job, views)
        try:
            plain_steps = self._add_durable(job, views, fresh=fresh)
        except (TierUnavailableError, DurableRefusedError, UsageError) as error:
            unreachable[Tier.DURABLE] = str(error)
        for group, count in self._crashed.count(job).items():
            if group in views:
                views[group] = msgspec.structs.replace(views[group], crashed_loads=count)
        for group, reason in self.quarantine_reasons(job).items():
            if group in views and not views[group].quarantined:
                views[group] = msgspec.structs.replace(views[group], quarantined=reason)
        for group in self.store.versions.retained(job) & views.keys():
            views[group] = msgspec.structs.replace(views[group], kept=True)
        settings = self._settings_for_reading(job)
        known = settings if settings.url else None
        newest = max((group for group in once_complete if group is not None), default=None)
        inventory = tuple(views[group] for group in sorted(views))
        expired = self.store.jobs.clients.expired_job(job)
        if expired is not None and any(one.candidate.is_complete and one.saved_ns > expired.at_ns for one in inventory):
            expired = None  # the job has saved a complete step since
        return StepInventory(
            inventory,
            unreachable,
            plain_steps,
            known,
            newest,
            expired,
            aborted,
            self.store.table.unrecognized.find(job=job),
        )

    def describe_step(self, job: str, group: VersionId) -> StepDescription:
        return describe_step(self, job, group)

    def step_names(self, job: str, group: VersionId) -> StateNames:
        return from_msgpack(unpack_blob(self._locate(job, group).names()[1]), StateNames)

    def step_names_page(self, job: str, group: VersionId, digest: str, start: int) -> BlobPage:
        """Return a page of the packed names, from the beginning if ``digest`` is not the current digest."""
        step = self._locator(job, group) if digest else self._locate(job, group)
        named, data = step.names()
        start = start if named == digest else 0
        return BlobPage(named, len(data), data[start : start + self._page_bytes])

    def step_pieces(
        self, job: str, group: VersionId, rank: int, needs: Sequence[TensorSliceNeed], objects: Sequence[str]
    ) -> PieceLocations:
        return self._locator(job, group).pieces(rank, needs, objects)

    def step_parts(
        self, job: str, group: VersionId, parts: Sequence[int], *, item_sizes: bool = False
    ) -> ShardLocations:
        return self._locator(job, group).parts(parts, item_sizes=item_sizes)

    def step_summary(self, job: str, group: VersionId) -> StepSummary:
        step = self._locate(job, group)
        return StepSummary(
            tuple(step.metas),
            step.durable.created_ns if step.durable else time.time_ns(),
            step.durable.writer if step.durable else self._writer,
            tuple(dict.fromkeys(meta.layout for meta in step.metas.values())),
            tuple(dict.fromkeys(meta.table for meta in step.metas.values() if meta.table)),
        )

    def step_layouts(self, job: str, group: VersionId, layouts: Sequence[str], tables: Sequence[str]) -> LayoutsPage:
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
        on_peers, sources = self.peers.holders_of_parts(job, group) if self.peers is not None else ({}, {})
        local = {record.key.part: record for record in self.store.reader.records(job, group)}
        shards: dict[int, ShardInfo | ShardRecord] = {**on_peers, **local}
        metas = [decode_meta(fact.meta) for fact in shards.values()]
        parts = next((fact.parts for fact in shards.values()), 0)
        is_complete = bool(metas) and (len(metas) >= parts or self._covers(job, metas))
        durable = self._durable_manifest(job, group, needed=not is_complete)
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
            records=lambda wanted: self.peers.records(job, group, wanted) if self.peers is not None else {},
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
            self.peers.blobs(job, [LAYOUT_BLOB_PREFIX + digest for digest in missing])
            if self.peers is not None
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
        if data is None and self.peers is not None:
            data = self.peers.blobs(job, [TABLE_BLOB_PREFIX + digest])[0].get(TABLE_BLOB_PREFIX + digest)
        return data

    def _unpacked(self, job: str, name: str) -> bytes | None:
        """Return a layout or table of this node.

        Return ``None`` if it is missing or damaged: another node may have an intact one.
        """
        try:
            packed = self._blob(job, name)
            return None if packed is None else unpack_named_blob(name, packed)
        except (ShardDamagedError, CheckpointDamagedError) as error:
            log.error("job %s: %s of this node: %s", job, name, error)
            return None

    def _decoded_table(self, job: str, digest: str, durable: Manifest | None) -> StateTable | None:
        data = (durable.tables.get(digest) if durable is not None else None) or self._table(job, digest)
        return None if data is None else decode_table(data)

    def quarantine(self, job: str, group: VersionId, reason: str) -> None:
        """Mark the step on this node.

        The drain marks it in the durable tier after its next upload, because the process that found the damage may only
        read that tier.
        """
        log.error("job %s step %d (%s) is quarantined: %s", job, group.version, object_keys.group_stem(group), reason)
        self.store.blobs.put(job, QUARANTINE_BLOB_PREFIX + object_keys.group_stem(group), reason.encode())

    def unquarantine(self, job: str, group: VersionId) -> None:
        self.store.blobs.remove(job, QUARANTINE_BLOB_PREFIX + object_keys.group_stem(group))
        self._crashed.forget(job, group=group)
        with self._catalog_for_reading(job) as catalog:
            if catalog is not None:
                catalog.invalidate()

    def quarantine_reasons(self, job: str) -> dict[VersionId, str]:
        """Return the steps marked on this node, with the reasons."""
        stems = [
            name.removeprefix(QUARANTINE_BLOB_PREFIX)
            for name in self.store.blobs.list_names(job)
            if name.startswith(QUARANTINE_BLOB_PREFIX)
        ]
        found = {
            group: self._quarantined_here(job, group) for stem in stems if (group := object_keys.parse_group_stem(stem))
        }
        return {group: reason for group, reason in found.items() if reason}

    def drop_steps(
        self, job: str, groups: Sequence[VersionId], *, durable: bool = True, superseded: bool = False
    ) -> None:
        survey = self.list_steps(job, fresh=True)
        retained = set() if durable else {view.version_id for view in survey.views if view.durable}
        dropped = [group for group in groups if group not in retained]
        require_no_revival(job, [view.candidate for view in survey.views], dropped)
        log.info("job %s: dropping steps %s on a client's request", job, sorted(group.version for group in groups))
        self.drain.cancel_steps(job, groups)
        unreachable: dict[str, str] = {}
        team = self.peers.team(job) if self.peers is not None else None
        if team is not None:
            unreachable |= team.broadcast_delete(groups, superseded=superseded)
        self.store.versions.delete(job, list(groups))
        for name in self.store.blobs.list_names(job):
            if name.startswith(DAMAGED_BLOB_PREFIX) and any(
                name.startswith(DAMAGED_BLOB_PREFIX + object_keys.group_stem(group)) for group in groups
            ):
                self.store.blobs.remove(job, name)
        try:
            with self._catalog_for_reading(job) as catalog:
                if catalog is not None and durable:
                    catalog.listing(fresh=True)  # includes steps that other nodes made durable
                    for group in groups:
                        delete_step(catalog, job, group)
        except (TierUnavailableError, DurableRefusedError) as error:
            unreachable["the durable tier"] = str(error)
        if unreachable:
            problems = "; ".join(f"{node}: {problem}" for node, problem in sorted(unreachable.items()))
            raise TierUnavailableError(f"job {job}: dropped steps may remain where the deletion failed: {problems}")

    def report_load_started(
        self, job: str, group: VersionId, rank: int, *, owner: ProcessIdentity | None = None
    ) -> None:
        self._crashed.load_started(owner or current_process(), job, group, rank)

    def report_restored(
        self, job: str, group: VersionId, *, goes_on: bool, owner: ProcessIdentity | None = None
    ) -> None:
        self._crashed.load_done(owner or current_process(), job)
        self.store.versions.mark_committed(job, group)  # a step that loads is complete
        if goes_on:
            self.store.jobs.incarnations.resume_from(job, group)

    def report_load_ended(self, job: str, *, stepped: bool, owner: ProcessIdentity | None = None) -> None:
        self._crashed.load_ended(owner or current_process(), job, stepped=stepped)

    def on_client_left(self, owner: ProcessIdentity, job: str) -> None:
        self._crashed.process_left(owner, job)

    def on_job_expired(self, job: str) -> None:
        self._crashed.forget(job)

    def on_shard_damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        """Record the damage, so that the step is listed as damaged and not as one that never existed."""
        note = _DamageNote(key, record.parts, reason)
        self.store.blobs.put(
            key.job,
            f"{DAMAGED_BLOB_PREFIX}{object_keys.group_stem(key.version_id)}.{key.part}",
            msgspec.msgpack.encode(note),
        )

    def on_shard_sealed(self, record: ShardRecord) -> None:
        """Drop crash counts and locators of older steps: the job has passed them, so no rank will load them."""
        self._crashed.forget(record.key.job, before=record.key.version)
        with self._lock:
            for key in [key for key in self._locators if key[0] == record.key.job and key[1] < record.key.version_id]:
                del self._locators[key]

    def drain_status(self, job: str) -> tuple[DrainStatus, ...]:
        self._queue_recovered_shards(job)
        return self.drain.status(job)

    def wait_durable(
        self, job: str, group: VersionId | None, timeout_s: float, *, before: int | None = None
    ) -> DrainStatus | None:
        self._queue_recovered_shards(job)
        return self.drain.wait(job, group, timeout_s, before=before)

    def join_peers(self, job: str, plan: JobPeersConfig) -> None:
        self._node_peers().join(job, plan)

    def isolate(self, seconds: float) -> None:
        self._node_peers().partition(seconds)

    def accept_standby(self, secret: bytes) -> PeerNode | None:
        """Accept replicas from nodes with ``secret``; return this node, or ``None`` if it does not listen."""
        return self.peers.node_peers.accept_standby(secret) if self.peers is not None else None

    def this_node(self) -> PeerNode | None:
        return self.peers.node_peers.this_node if self.peers is not None else None

    def peer_credentials(self, job: str) -> ReaderCredentials | None:
        team = self.peers.team(job) if self.peers is not None else None
        return ReaderCredentials(team.this_node.id, team.credentials.secret) if team is not None else None

    def known_peers(self, job: str) -> KnownPeers | None:
        team = self.peers.team(job) if self.peers is not None else None
        if team is None:
            return None
        roster = team.membership.member_list
        version = roster.version if roster is not None else 0
        ranks = {node.id for node in roster.nodes} - set(roster.standby) if roster is not None else set()
        unreachable = (
            () if self._is_current(team, ranks) else sorted(ranks & team.inventory(fresh=True).unreachable.keys())
        )
        return KnownPeers(team.credentials.secret, tuple(team.membership.alive.values()), version, tuple(unreachable))

    def _is_current(self, team: JobPeers, ranks: Collection[str]) -> bool:
        """Return whether this node has a rank, or all shards of the newest replicated step that it knows."""
        if team.this_node.id in ranks:
            return True
        newest = team.newest_replicated
        here = [fact for fact in self.store.list_shards(team.job) if fact.key.version_id == newest]
        return bool(here) and len({fact.key.part for fact in here}) == here[0].parts

    def replication_status(
        self, key: ShardKey, *, copies: int = 0, domains: int = 0, timeout_s: float = 0.0
    ) -> ShardReplication:
        team = self.peers.team(key.job) if self.peers is not None else None
        if team is None:
            return ShardReplication(1, 1, "node")

        def enough() -> bool:
            now = shard_replication_status(team, key)
            return now.copies >= copies and now.domains >= domains

        team.replicator.wait_until(enough, deadlines.remaining_s(timeout_s))
        return shard_replication_status(team, key)

    def cluster_status(self, job: str) -> ClusterStatus:
        team = self.peers.team(job) if self.peers is not None else None
        if team is None:
            me = self.peers.node_peers.node_id if self.peers is not None else "this node"
            facts = tuple(self.store.list_shards(job))
            alone = ClusterNode(PeerNode(NodeId(me), ""), "alive", facts, self.store.epoch(job))
            return ClusterStatus(job, me, (alone,), protected=self.protection(job))
        return msgspec.structs.replace(cluster_status_of(team), protected=self.protection(job))

    def protection(self, job: str) -> ProtectionStatus:
        """Return the job's protection as this node knows it, without waiting for other nodes."""
        team = self.peers.team(job) if self.peers is not None else None
        protected = -1
        # Without another live node nothing counts as replicated: the only copy is lost with this node.
        if team is not None and team.settings.requires_replication and len(team.membership.alive) > 1:
            protected = team.newest_replicated.version if team.newest_replicated is not None else -1
        protected = max(
            [protected, *(view.version_id.version for view in self.drain.status(job) if view.state == "done")]
        )
        epoch = self.store.epoch(job)
        own = [fact for fact in self.store.replicas.list_shards(job) if not fact.holders and fact.key.epoch == epoch]
        newer = [fact.sealed_ns / 1e9 for fact in own if fact.key.version > protected]
        now = time.time()
        with self._lock:
            counted_from, missed_saves, first = self._missed_saves.get(job, (protected, 0, 0.0))
            if counted_from != protected:
                missed_saves, first = 0, 0.0
            self._missed_saves[job] = protected, missed_saves, first
        status = protection_status(protected, newer, (missed_saves, first), now=now)
        return msgspec.structs.replace(status, upload_problem=self.drain.problem(job))

    def _log_protection(self, job: str) -> ProtectionStatus:
        """Return the job's protection and log its changes, at most one line a minute."""
        status, now = self.protection(job), time.monotonic()
        with self._lock:
            was_bad, logged_at = self._logged_protection.get(job, (False, -math.inf))
            is_bad = status.unprotected_since is not None
            if is_bad == was_bad or now - logged_at < _LOG_S:
                return status
            self._logged_protection[job] = is_bad, now
        log.log(logging.WARNING if is_bad else logging.INFO, "job %s: %s", job, describe_protection(status))
        return status

    @property
    def teams(self) -> list[JobPeers]:
        """Peers of each job that has other nodes."""
        return self.peers.node_peers.all_job_peers if self.peers is not None else []

    def _node_peers(self) -> NodePeers:
        if self.peers is None:
            raise UsageError("this node's agent does not listen for other nodes (agent.peers is off)")
        return self.peers.node_peers

    def add_metrics(self, job: str, values: Mapping[str, float]) -> ProtectionStatus:
        with self._lock:
            counter = self.trainer_metrics[job]
            for name, value in values.items():
                counter[name] += value  # type: ignore[assignment]
        missed = int(values.get("skipped", 0) + values.get("failed", 0))
        if missed:
            self.protection(job)  # resets the count if a newer step is protected
            with self._lock:
                protected, earlier, first = self._missed_saves[job]
                self._missed_saves[job] = protected, earlier + missed, first or time.time()
        return self._log_protection(job)

    def close(self) -> None:
        self.drain.stop()
        with self._catalogs_lock:
            for one in self._opened:
                if one.catalog is not None:
                    one.catalog.store.interrupt()
        self.drain.close()
        self._notifier.shutdown(cancel_futures=True)
        with self._catalogs_lock:
            opened, self._opened, self._catalogs, self._checked_catalogs = self._opened, [], {}, {}
        for one in opened:
            one.close()

    def durable_settings(self, job: str) -> DurableSettings:
        with self._lock:
            settings = self._settings.get(job)
            if settings is None:
                blob = self._blob(job, DURABLE_SETTINGS_BLOB)
                settings = from_msgpack(blob, DurableSettings) if blob else DurableSettings()
                self._settings[job] = settings
            return settings

    def catalog(self, job: str) -> contextlib.AbstractContextManager[DurableCatalog | None]:
        """Return a context with the job's durable tier, or ``None`` if it has none.

        The tier is opened once and stays open while in use, even if the settings change.
        """
        return self._catalog(job, self._catalogs, self.durable_settings)

    @contextlib.contextmanager
    def _catalog(
        self, job: str, catalogs: dict[str, _OpenCatalog], settings_of: Callable[[str], DurableSettings]
    ) -> Iterator[DurableCatalog | None]:
        with self._catalogs_lock:
            settings = settings_of(job)
            opened = catalogs.get(job)
            if opened is None or opened.settings != settings:
                catalog = DurableCatalog(self._open(settings.url, settings), job) if settings.url else None
                opened = catalogs[job] = _OpenCatalog(settings, catalog)
                self._opened.append(opened)
            opened.users += 1
        try:
            yield opened.catalog
        finally:
            with self._catalogs_lock:
                opened.users -= 1
            self._close_unused()

    def is_committer(self, job: str, group: VersionId) -> bool:
        if self.peers is None:
            return True
        return self.peers.committer_of(job, group) in (None, self.peers.node_peers.node_id)

    def announce_not_durable(self, job: str, group: VersionId, why: str) -> None:
        with contextlib.suppress(RuntimeError):  # the agent is shutting down
            self._notifier.submit(self._broadcast_not_durable, job, group, why)

    def _broadcast_not_durable(self, job: str, group: VersionId, why: str) -> None:
        team = self.peers.team(job) if self.peers is not None else None
        unreachable = team.broadcast_not_durable(group, why) if team is not None else {}
        if unreachable:
            problems = "; ".join(f"{node}: {problem}" for node, problem in sorted(unreachable.items()))
            log.warning(
                "job %s: some nodes did not receive the report that step %d is not durable: %s",
                job,
                group.version,
                problems,
            )

    def describe_shard(self, record: ShardRecord) -> tuple[ShardIndex, bytes, bytes]:
        """Return a sealed shard's index, layout and table; the table is empty if the shard has none."""
        meta = decode_meta(record.meta)
        index = ShardIndex(record.key, record.parts, record.size_bytes, record.chunk_bytes, record.checksums, meta)
        job = record.key.job
        layout = self._layouts(job, [meta.layout], None)[meta.layout]
        return index, layout, (self._table(job, meta.table) or b"") if meta.table else b""

    def _set_checked(self, job: str, durable: DurableSettings, owner: ProcessIdentity) -> None:
        """Read ``job`` from the tier ``durable`` while ``owner`` runs. Settings without a URL end this."""
        with self._checked_lock:
            settings = [one for one in self._checked(job) if one.owner != owner]
            if durable.url:
                settings.append(_CheckedSettings(durable, owner))
            if settings:
                self.store.blobs.put(job, CHECKED_SETTINGS_BLOB, msgspec.msgpack.encode(settings))
            elif self._blob(job, CHECKED_SETTINGS_BLOB) is not None:
                self.store.blobs.remove(job, CHECKED_SETTINGS_BLOB)

    def _checked(self, job: str) -> list[_CheckedSettings]:
        blob = self._blob(job, CHECKED_SETTINGS_BLOB)
        if blob is None:
            return []
        return [one for one in from_msgpack(blob, list[_CheckedSettings]) if one.owner.is_alive]

    def _settings_for_reading(self, job: str) -> DurableSettings:
        """Return the settings that a running process checked last, or those of the job's saves."""
        checked = self._checked(job)
        return checked[-1].durable if checked else self.durable_settings(job)

    def _catalog_for_reading(self, job: str) -> contextlib.AbstractContextManager[DurableCatalog | None]:
        checked = self._checked(job)
        if not checked:
            return self.catalog(job)
        return self._catalog(job, self._checked_catalogs, lambda _: checked[-1].durable)

    def _queue_recovered_shards(self, job: str) -> None:
        """Queue a killed agent's shards for the drain. Before they are verified it does not list them."""
        own = {fact.key for fact in self.store.list_shards(job) if not fact.holders}
        untracked = {key.version_id for key in own if not self.drain.is_tracking(job, key.version_id)}
        for group in sorted(untracked):
            for record in self.store.reader.records(job, group):
                if record.key in own:
                    self.drain.on_shard_sealed(record)

    def _covers(self, job: str, metas: Sequence[ShardMeta]) -> bool:
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

    def _add_damaged(self, job: str, views: dict[VersionId, StepStatus]) -> None:
        """Add damaged parts to ``views``; delete notes of parts that exist again or precede a complete step."""
        newest_complete = max((group for group, view in views.items() if view.candidate.is_complete), default=None)
        for name in self.store.blobs.list_names(job):
            blob = self._blob(job, name) if name.startswith(DAMAGED_BLOB_PREFIX) else None
            if blob is None:
                continue
            note = from_msgpack(blob, _DamageNote)
            group, part = note.key.version_id, note.key.part
            view = views.get(group) or StepStatus(group, note.parts, {})
            if part in view.found or (newest_complete is not None and newest_complete > group):
                self.store.blobs.remove(job, name)
            else:
                views[group] = msgspec.structs.replace(view, damaged={**view.damaged, part: note.reason})

    def _add_durable(self, job: str, views: dict[VersionId, StepStatus], *, fresh: bool) -> tuple[int, ...]:
        """Add the durable tier's steps to ``views``; return the steps of plain checkpoints there."""

        def listed() -> CatalogListing | None:
            with self._catalog_for_reading(job) as catalog:
                return None if catalog is None else catalog.listing(fresh=fresh)

        listing = deadlines.run_within_deadline(listed, functools.partial(self._timeout_error, job))
        if listing is None:
            return ()
        for group, entry in listing.manifests.items():
            view = views.get(group)
            if view is None:
                views[group] = StepStatus(group, 0, {}, base=entry.base, durable=True)
            else:
                views[group] = msgspec.structs.replace(view, durable=True)
        for group in listing.kept & views.keys():
            views[group] = msgspec.structs.replace(views[group], kept=True)
        for group in listing.quarantined & views.keys():
            views[group] = msgspec.structs.replace(views[group], quarantined="marked in the durable tier")
        return listing.plain_steps

    def _durable_manifest(self, job: str, group: VersionId, *, needed: bool) -> Manifest | None:
        def read() -> Manifest | None:
            with self._catalog_for_reading(job) as catalog:
                if catalog is None or not (needed or group in catalog.listing().manifests):
                    return None
                return catalog.manifest(group)

        try:
            return deadlines.run_within_deadline(read, functools.partial(self._timeout_error, job))
        except ObjectNotFoundError:
            return None
        except (TierUnavailableError, DurableRefusedError):
            if needed:
                raise
            return None

    def _timeout_error(self, job: str) -> TierUnavailableError:
        return TierUnavailableError(
            f"{self._settings_for_reading(job).url} has not answered in the time that was given"
        )

    def _quarantined_here(self, job: str, group: VersionId) -> str:
        blob = self._blob(job, QUARANTINE_BLOB_PREFIX + object_keys.group_stem(group))
        return blob.decode(errors="replace") if blob else ""

    def _blob(self, job: str, name: str) -> bytes | None:
        try:
            return self.store.blobs.get(job, name)
        except ShardNotFoundError:
            return None

    def _forget_catalog(self, job: str) -> None:
        with self._catalogs_lock:
            with self._lock:
                self._settings.pop(job, None)
            self._catalogs.pop(job, None)
            checked = self._checked_catalogs.pop(job, None)
            if checked is not None and checked.settings == self.durable_settings(job):
                self._catalogs[job] = checked
        self._close_unused()

    def _close_unused(self) -> None:
        """Close replaced catalogs that have no users."""
        with self._catalogs_lock:
            current = [*self._catalogs.values(), *self._checked_catalogs.values()]
            unused = [one for one in self._opened if not one.users and one not in current]
            self._opened = [one for one in self._opened if one not in unused]
        for one in unused:
            one.close()
