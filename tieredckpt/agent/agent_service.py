"""NodeAgentService: answers about steps here, on peers and in the durable tier, and quarantine."""

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
from peerstore.store.node_store import NodeStore, StoreListener
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

_KEPT_MAPS = 4
_SAY_S = 60.0


class _DamageNote(msgspec.Struct, frozen=True):
    key: ShardKey
    parts: int
    reason: str


class _CheckedSettings(msgspec.Struct, frozen=True):
    """The durable tier that a process has named, before a save has used it."""

    durable: DurableSettings
    owner: ProcessIdentity


@dataclasses.dataclass(eq=False)
class _OpenCatalog:
    """A durable tier, and how many use it now."""

    settings: DurableSettings
    catalog: DurableCatalog | None
    users: int = 0

    def close(self) -> None:
        if self.catalog is not None:
            self.catalog.store.close()


class NodeAgentService(StoreListener):
    """A :class:`~tieredckpt.agent.agent_api.NodeAgentAPI` over this process's own store."""

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
        self._maps: dict[tuple[str, VersionId], StepLocator] = {}
        """The steps that were described last."""
        self.peers = PeerTier(node_peers) if node_peers is not None else None
        self._open = open_durable
        self._writer = writer
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        """Of what is opened at a URL, and of which URL that is; before the other lock."""
        self._catalogs: dict[str, _OpenCatalog] = {}
        self._checked_catalogs: dict[str, _OpenCatalog] = {}
        """Durable tiers that a process named and no save has used yet."""
        self._checking = threading.Lock()
        """Held while those are replaced."""
        self._opened: list[_OpenCatalog] = []
        """Those, and what is still used of what was opened with settings that do not count any more."""
        self._crashed = CrashedLoads()
        self._settings: dict[str, DurableSettings] = {}
        self.cluster_settings: ClusterSettingsWatcher | None = None
        """Where the agent follows what the cluster says."""
        self.trainer_metrics: dict[str, Counter[str]] = defaultdict(Counter)
        self._left_out: dict[str, tuple[int, int, float]] = {}
        """By job: the newest protected step, how many saves were left out since, and when the first one was."""
        self._said: dict[str, tuple[bool, float]] = {}
        """By job: whether it was said last that it is unprotected, and when."""
        self._telling = ThreadPoolExecutor(1, thread_name_prefix="tieredckpt-tell")
        self.drain = Drain(store, self, writer=writer)
        store.subscribe(self)
        store.subscribe(self.drain)

    # -- Node -------------------------------------------------------------------------------------------------

    def configure(
        self,
        job: str,
        durable: DurableSettings,
        *,
        check: DurableCheck = "none",
        owner: ProcessIdentity | None = None,
    ) -> None:
        """Remember where this job's steps become durable. A changed URL takes effect with the next step."""
        if check == "none":
            self._remember(job, durable)
            return
        known = self.durable_settings(job)
        if durable.url:
            check_durable(self._open, job, durable, writes=check == "write")
        if durable.url and (known.url, known.options) == (durable.url, durable.options):
            self._remember(job, durable)
        else:
            self._set_checked(job, durable, owner or current_process())

    def _remember(self, job: str, durable: DurableSettings) -> None:
        data = msgspec.msgpack.encode(durable)
        if (
            self._blob(job, DURABLE_SETTINGS_BLOB) != data
        ):  # what is kept counts, not what this agent remembers: the job may be new
            self.store.put_blob(job, DURABLE_SETTINGS_BLOB, data)
        before = self.durable_settings(job)
        with self._checking:
            if self._blob(job, CHECKED_SETTINGS_BLOB) is not None:
                self.store.remove_blob(job, CHECKED_SETTINGS_BLOB)
        if before != durable:
            self._forget_catalog(job)
        if (before.url, before.options) != (durable.url, durable.options):
            self.drain.destination_changed(job)
        self.drain.retry_now()

    def list_steps(self, job: str, *, fresh: bool = False, patience_s: float = 0.0) -> StepInventory:
        if job == MEMORY_SERVICE_JOB:  # shards of somebody else's, which are nobody's steps
            return StepInventory((), {})
        unreachable: dict[Tier, str] = {}
        elsewhere: FactsByGroup = {}
        known_here = self.store.jobs.versions(job)
        torn = tuple(sorted(known_here.aborted))
        once_whole = [known_here.last_committed()]
        if self.peers is not None:
            try:
                if patience_s > 0:
                    self.peers.wait_for_pending_commits(job, patience_s)
                # What was sealed a moment ago counts: a job that goes on at once must not find an older step.
                elsewhere, silent, whole = self.peers.peer_facts(job)
            except UnavailableError as error:
                silent, whole = str(error), None
            once_whole.append(whole)
            if silent:
                unreachable[Tier.PEER] = silent
        covers = functools.partial(self._covers, job)
        views = {view.version_id: view for view in memory_step_statuses(self.store.list_shards(job), elsewhere, covers)}
        plain: tuple[int, ...] = ()
        self._add_damaged(job, views)
        try:
            plain = self._add_durable(job, views, fresh=fresh)
        except (TierUnavailableError, DurableRefusedError, UsageError) as error:
            unreachable[Tier.DURABLE] = str(error)
        for group, count in self._crashed.count(job).items():
            if group in views:
                views[group] = msgspec.structs.replace(views[group], crashed_loads=count)
        for group, reason in self.quarantine_reasons(job).items():
            if group in views and not views[group].quarantined:
                views[group] = msgspec.structs.replace(views[group], quarantined=reason)
        for group in self.store.retained(job) & views.keys():
            views[group] = msgspec.structs.replace(views[group], kept=True)
        settings = self._settings_for_reading(job)
        known = settings if settings.url else None
        newest = max((group for group in once_whole if group is not None), default=None)
        found = tuple(views[group] for group in sorted(views))
        forgotten = self.store.jobs.clients.expired_job(job)
        if forgotten is not None and any(one.candidate.is_complete and one.saved_ns > forgotten.at_ns for one in found):
            forgotten = None  # the job has begun again since
        return StepInventory(
            found, unreachable, plain, known, newest, forgotten, torn, self.store.table.unrecognized(job=job)
        )

    def describe_step(self, job: str, group: VersionId) -> StepDescription:
        return describe_step(self, job, group)

    def step_names(self, job: str, group: VersionId) -> StateNames:
        return from_msgpack(unpack_blob(self._look(job, group).names()[1]), StateNames)

    def step_names_page(self, job: str, group: VersionId, digest: str, start: int) -> BlobPage:
        """A page of :meth:`object_keys`, packed; from the beginning when ``digest`` is not what it is by now."""
        step = self._map(job, group) if digest else self._look(job, group)
        named, data = step.names()
        start = start if named == digest else 0
        return BlobPage(named, len(data), data[start : start + self._page_bytes])

    def step_pieces(
        self, job: str, group: VersionId, rank: int, needs: Sequence[TensorSliceNeed], objects: Sequence[str]
    ) -> PieceLocations:
        return self._map(job, group).pieces(rank, needs, objects)

    def step_parts(
        self, job: str, group: VersionId, parts: Sequence[int], *, item_sizes: bool = False
    ) -> ShardLocations:
        return self._map(job, group).parts(parts, item_sizes=item_sizes)

    def step_summary(self, job: str, group: VersionId) -> StepSummary:
        step = self._look(job, group)
        return StepSummary(
            tuple(step.metas),
            step.durable.created_ns if step.durable else time.time_ns(),
            step.durable.writer if step.durable else self._writer,
            tuple(dict.fromkeys(meta.layout for meta in step.metas.values())),
            tuple(dict.fromkeys(meta.table for meta in step.metas.values() if meta.table)),
        )

    def step_layouts(self, job: str, group: VersionId, layouts: Sequence[str], tables: Sequence[str]) -> LayoutsPage:
        step = self._map(job, group)
        room = self._page_bytes
        found, beside = dict[str, bytes](), dict[str, bytes]()
        known = step.durable.tables if step.durable is not None else {}
        for digest in [*layouts, *tables]:
            if room < 0:
                return LayoutsPage(found, beside, more=True)
            if digest in layouts:
                data = found[digest] = pack_blob(self._layouts(job, [digest], step.durable)[digest])
            else:
                table = known.get(digest) or self._table(job, digest)
                data = b"" if table is None else pack_blob(table)
                if data:
                    beside[digest] = data
            room -= len(data)
        return LayoutsPage(found, beside, more=False)

    def _look(self, job: str, group: VersionId) -> StepLocator:
        """Where everything of a step is by now."""
        facts, sources = self.peers.holders_of_parts(job, group) if self.peers is not None else ({}, {})
        here = {record.key.part: record for record in self.store.reader.records(job, group)}
        seen: dict[int, ShardInfo | ShardRecord] = {**facts, **here}
        metas = [decode_meta(fact.meta) for fact in seen.values()]
        in_all = next((fact.parts for fact in seen.values()), 0)
        whole = bool(metas) and (len(metas) >= in_all or self._covers(job, metas))
        durable = self._durable_manifest(job, group, needed=not whole)
        if durable is None and not metas:
            raise CheckpointNotFoundError(
                f"job {job} has no step {group.version} ({object_keys.group_stem(group)}) here"
            )
        with self._lock:
            before = self._maps.pop((job, group), None)
        step = StepLocator(
            group,
            here=here,
            elsewhere=facts,
            sources=sources,
            durable=durable,
            layouts=lambda digests: self._layouts(job, digests, durable),
            records=lambda wanted: self.peers.records(job, group, wanted) if self.peers is not None else {},
            table=lambda digest: self._decoded_table(job, digest, durable),
            known=StepLayoutCache() if before is None else before.known,
            page_bytes=self._page_bytes,
        )
        with self._lock:
            self._maps[job, group] = step
            while len(self._maps) > _KEPT_MAPS:
                self._maps.pop(next(iter(self._maps)))
        return step

    def _map(self, job: str, group: VersionId) -> StepLocator:
        with self._lock:
            known = self._maps.get((job, group))
        return known or self._look(job, group)

    def _layouts(self, job: str, digests: Collection[str], durable: Manifest | None) -> dict[str, bytes]:
        """Layouts, wherever they are; raises where one is nowhere."""
        found: dict[str, bytes] = {}
        for digest in digests:
            stored = durable.layouts.get(digest) if durable is not None else None
            if stored is not None:
                found[digest] = checked_layout(digest, stored)
            elif (kept := self._unpacked(job, LAYOUT_BLOB_PREFIX + digest)) is not None:
                found[digest] = kept
        lacking = [digest for digest in digests if digest not in found]
        if not lacking:
            return found
        said, everybody = (
            self.peers.blobs(job, [LAYOUT_BLOB_PREFIX + digest for digest in lacking])
            if self.peers is not None
            else ({}, True)
        )
        for digest in lacking:
            layout = said.get(LAYOUT_BLOB_PREFIX + digest)
            if layout is None and not everybody:
                raise PeersLostError(f"job {job}: nodes that may have layout {digest} do not answer")
            if layout is None:
                raise CheckpointDamagedError(f"job {job}: layout {digest} is on no node, nor in a manifest")
            found[digest] = layout
        return found

    def _table(self, job: str, digest: str) -> bytes | None:
        kept = self._unpacked(job, TABLE_BLOB_PREFIX + digest)
        if kept is None and self.peers is not None:
            kept = self.peers.blobs(job, [TABLE_BLOB_PREFIX + digest])[0].get(TABLE_BLOB_PREFIX + digest)
        return kept

    def _unpacked(self, job: str, name: str) -> bytes | None:
        """A layout or table of this node; ``None`` where it is damaged, too: another node's may be good."""
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
        """Noted here. In the durable tier the drain says so, once this node's job writes there again: whoever finds
        the damage may be somebody who only reads.
        """
        log.error("job %s step %d (%s) is quarantined: %s", job, group.version, object_keys.group_stem(group), reason)
        self.store.put_blob(job, QUARANTINE_BLOB_PREFIX + object_keys.group_stem(group), reason.encode())

    def unquarantine(self, job: str, group: VersionId) -> None:
        self.store.remove_blob(job, QUARANTINE_BLOB_PREFIX + object_keys.group_stem(group))
        self._crashed.forget(job, group=group)
        with self._catalog_for_reading(job) as catalog:
            if catalog is not None:
                catalog.invalidate()

    def quarantine_reasons(self, job: str) -> dict[VersionId, str]:
        """What is noted on this node, and why."""
        stems = [
            name.removeprefix(QUARANTINE_BLOB_PREFIX)
            for name in self.store.list_blobs(job)
            if name.startswith(QUARANTINE_BLOB_PREFIX)
        ]
        found = {
            group: self._quarantined_here(job, group) for stem in stems if (group := object_keys.parse_group_stem(stem))
        }
        return {group: reason for group, reason in found.items() if reason}

    def drop_steps(self, job: str, groups: Sequence[VersionId], *, durable: bool = True) -> None:
        survey = self.list_steps(job, fresh=True)
        stay = set() if durable else {view.version_id for view in survey.views if view.durable}
        gone = [group for group in groups if group not in stay]
        require_no_revival(job, [view.candidate for view in survey.views], gone)
        log.info("job %s: steps %s are dropped, as somebody asked", job, sorted(group.version for group in groups))
        self.drain.cancel_steps(job, groups)
        silent: dict[str, str] = {}
        team = self.peers.team(job) if self.peers is not None else None
        if team is not None:
            silent |= team.broadcast_delete(groups)
        self.store.delete_versions(job, list(groups))
        for name in self.store.list_blobs(job):
            if name.startswith(DAMAGED_BLOB_PREFIX) and any(
                name.startswith(DAMAGED_BLOB_PREFIX + object_keys.group_stem(group)) for group in groups
            ):
                self.store.remove_blob(job, name)
        try:
            with self._catalog_for_reading(job) as catalog:
                if catalog is not None and durable:
                    catalog.listing(fresh=True)  # what other nodes have made durable goes, too
                    for group in groups:
                        delete_step(catalog, job, group)
        except (TierUnavailableError, DurableRefusedError) as error:
            silent["the durable tier"] = str(error)
        if silent:
            said = "; ".join(f"{who}: {why}" for who, why in sorted(silent.items()))
            raise TierUnavailableError(
                f"job {job}: what was to be dropped may still be where nobody could be told: {said}"
            )

    def report_load_started(
        self, job: str, group: VersionId, rank: int, *, owner: ProcessIdentity | None = None
    ) -> None:
        self._crashed.load_started(owner or current_process(), job, group, rank)

    def report_restored(
        self, job: str, group: VersionId, *, goes_on: bool, owner: ProcessIdentity | None = None
    ) -> None:
        self._crashed.load_done(owner or current_process(), job)
        self.store.mark_committed(job, group)  # what was loaded is
        if goes_on:
            self.store.jobs.incarnations.resume_from(job, group)

    def report_load_ended(self, job: str, *, stepped: bool, owner: ProcessIdentity | None = None) -> None:
        self._crashed.load_ended(owner or current_process(), job, stepped=stepped)

    def on_client_left(self, owner: ProcessIdentity, job: str) -> None:
        self._crashed.process_left(owner, job)

    def on_job_expired(self, job: str) -> None:
        self._crashed.forget(job)

    def on_shard_damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        """A shard is gone because it was damaged: remembered, so that nobody takes its step for one that never was."""
        note = _DamageNote(key, record.parts, reason)
        self.store.put_blob(
            key.job,
            f"{DAMAGED_BLOB_PREFIX}{object_keys.group_stem(key.version_id)}.{key.part}",
            msgspec.msgpack.encode(note),
        )

    def on_shard_sealed(self, record: ShardRecord) -> None:
        """The job got past every older step: those were fine, and nobody asks for their pieces now."""
        self._crashed.forget(record.key.job, before=record.key.version)
        with self._lock:
            for key in [key for key in self._maps if key[0] == record.key.job and key[1] < record.key.version_id]:
                del self._maps[key]

    def drain_status(self, job: str) -> tuple[DrainStatus, ...]:
        self._tell_drain(job)
        return self.drain.status(job)

    def wait_durable(self, job: str, group: VersionId | None, timeout_s: float) -> DrainStatus | None:
        self._tell_drain(job)
        return self.drain.wait(job, group, timeout_s)

    def join_peers(self, job: str, plan: JobPeersConfig) -> None:
        self._node_peers().join(job, plan)

    def isolate(self, seconds: float) -> None:
        self._node_peers().partition(seconds)

    def accept_standby(self, secret: bytes) -> PeerNode | None:
        """Let nodes that prove ``secret`` store replicas here; return this node, or ``None`` without a port."""
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
        silent = () if self._is_current(team, ranks) else sorted(ranks & team.inventory(fresh=True).unreachable.keys())
        return KnownPeers(team.credentials.secret, tuple(team.membership.alive.values()), version, tuple(silent))

    def _is_current(self, team: JobPeers, ranks: Collection[str]) -> bool:
        """Whether this node has a rank, or all shards of the newest step that is known to be replicated."""
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
        """Up to which step this node knows the job to be safe, and since when not; waits for nobody."""
        team = self.peers.team(job) if self.peers is not None else None
        safe = -1
        # The only copy is lost with its node, also where no other node is left that could hold one.
        if team is not None and team.settings.requires_replication and len(team.membership.alive) > 1:
            safe = team.newest_replicated.version if team.newest_replicated is not None else -1
        safe = max([safe, *(view.version_id.version for view in self.drain.status(job) if view.state == "done")])
        epoch = self.store.epoch(job)
        own = [fact for fact in self.store.replicas.list_shards(job) if not fact.holders and fact.key.epoch == epoch]
        newer = [fact.sealed_ns / 1e9 for fact in own if fact.key.version > safe]
        now = time.time()
        with self._lock:
            at, missed, first = self._left_out.get(job, (safe, 0, 0.0))
            if at != safe:
                missed, first = 0, 0.0
            self._left_out[job] = safe, missed, first
        found = protection_status(safe, newer, (missed, first), now=now)
        return msgspec.structs.replace(found, upload_problem=self.drain.problem(job))

    def _say_protection(self, job: str) -> ProtectionStatus:
        """One line when it changes, and no more than one a minute."""
        found, now = self.protection(job), time.monotonic()
        with self._lock:
            was, said_at = self._said.get(job, (False, -math.inf))
            is_bad = found.unprotected_since is not None
            if is_bad == was or now - said_at < _SAY_S:
                return found
            self._said[job] = is_bad, now
        log.log(logging.WARNING if is_bad else logging.INFO, "job %s: %s", job, describe_protection(found))
        return found

    @property
    def teams(self) -> list[JobPeers]:
        """The jobs of this node that have other nodes."""
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
            self.protection(job)  # what was left out before the newest protected step does not count any more
            with self._lock:
                at, before, first = self._left_out[job]
                self._left_out[job] = at, before + missed, first or time.time()
        return self._say_protection(job)

    def close(self) -> None:
        self.drain.stop()
        with self._opening:
            for one in self._opened:
                if one.catalog is not None:
                    one.catalog.store.interrupt()
        self.drain.close()
        self._telling.shutdown(cancel_futures=True)
        with self._opening:
            opened, self._opened, self._catalogs, self._checked_catalogs = self._opened, [], {}, {}
        for one in opened:
            one.close()

    # -- for the drain ----------------------------------------------------------------------------------------

    def durable_settings(self, job: str) -> DurableSettings:
        with self._lock:
            kept = self._settings.get(job)
            if kept is None:
                blob = self._blob(job, DURABLE_SETTINGS_BLOB)
                kept = from_msgpack(blob, DurableSettings) if blob else DurableSettings()
                self._settings[job] = kept
            return kept

    def catalog(self, job: str) -> contextlib.AbstractContextManager[DurableCatalog | None]:
        """The job's durable tier, opened once; ``None`` when it has none. While it is used it stays open, also where
        other settings come.
        """
        return self._catalog(job, self._catalogs, self.durable_settings)

    @contextlib.contextmanager
    def _catalog(
        self, job: str, catalogs: dict[str, _OpenCatalog], settings_of: Callable[[str], DurableSettings]
    ) -> Iterator[DurableCatalog | None]:
        with self._opening:
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
            with self._opening:
                opened.users -= 1
            self._close_unused()

    def is_committer(self, job: str, group: VersionId) -> bool:
        if self.peers is None:
            return True
        return self.peers.committer_of(job, group) in (None, self.peers.node_peers.node_id)

    def announce_not_durable(self, job: str, group: VersionId, why: str) -> None:
        with contextlib.suppress(RuntimeError):  # this agent ends
            self._telling.submit(self._tell_not_durable, job, group, why)

    def _tell_not_durable(self, job: str, group: VersionId, why: str) -> None:
        team = self.peers.team(job) if self.peers is not None else None
        silent = team.broadcast_not_durable(group, why) if team is not None else {}
        if silent:
            said = "; ".join(f"{node}: {problem}" for node, problem in sorted(silent.items()))
            log.warning("job %s: not all nodes have heard that step %d is not durable: %s", job, group.version, said)

    def describe_shard(self, record: ShardRecord) -> tuple[ShardIndex, bytes, bytes]:
        """A sealed shard's index, layout and table."""
        meta = decode_meta(record.meta)
        index = ShardIndex(record.key, record.parts, record.size_bytes, record.chunk_bytes, record.checksums, meta)
        job = record.key.job
        layout = self._layouts(job, [meta.layout], None)[meta.layout]
        return index, layout, (self._table(job, meta.table) or b"") if meta.table else b""

    # -- a durable tier that no save has used yet -------------------------------------------------------------

    def _set_checked(self, job: str, durable: DurableSettings, owner: ProcessIdentity) -> None:
        """Have reads of ``job`` use ``durable`` while ``owner`` runs; without a URL, no longer."""
        with self._checking:
            kept = [one for one in self._checked(job) if one.owner != owner]
            if durable.url:
                kept.append(_CheckedSettings(durable, owner))
            if kept:
                self.store.put_blob(job, CHECKED_SETTINGS_BLOB, msgspec.msgpack.encode(kept))
            elif self._blob(job, CHECKED_SETTINGS_BLOB) is not None:
                self.store.remove_blob(job, CHECKED_SETTINGS_BLOB)

    def _checked(self, job: str) -> list[_CheckedSettings]:
        blob = self._blob(job, CHECKED_SETTINGS_BLOB)
        if blob is None:
            return []
        return [one for one in from_msgpack(blob, list[_CheckedSettings]) if one.owner.is_alive]

    def _settings_for_reading(self, job: str) -> DurableSettings:
        """Return the settings that a running process named last, or those that the job's saves use."""
        checked = self._checked(job)
        return checked[-1].durable if checked else self.durable_settings(job)

    def _catalog_for_reading(self, job: str) -> contextlib.AbstractContextManager[DurableCatalog | None]:
        checked = self._checked(job)
        if not checked:
            return self.catalog(job)
        return self._catalog(job, self._checked_catalogs, lambda _: checked[-1].durable)

    # -- inside -----------------------------------------------------------------------------------------------

    def _tell_drain(self, job: str) -> None:
        """What a killed agent left is drained once it is verified; that nothing is to do would be wrong until then."""
        own = {fact.key for fact in self.store.list_shards(job) if not fact.holders}
        unknown = {key.version_id for key in own if not self.drain.is_tracking(job, key.version_id)}
        for group in sorted(unknown):
            for record in self.store.reader.records(job, group):
                if record.key in own:
                    self.drain.on_shard_sealed(record)

    def _covers(self, job: str, metas: Sequence[ShardMeta]) -> bool:
        digests = dict.fromkeys(meta.table for meta in metas if meta.table)
        try:
            table = next((found for one in digests if (found := self._decoded_table(job, one, None)) is not None), None)
            if table is None:
                return False
            layouts = self._layouts(job, {meta.layout for meta in metas}, None)
            return not missing_entries(table, map(decode_layout, layouts.values()))
        except (PeerStoreError, PeersLostError, CheckpointDamagedError):
            return False  # who has it does not answer, or nobody has: it is not known to be covered

    def _add_damaged(self, job: str, views: dict[VersionId, StepStatus]) -> None:
        """Put what was lost to damage beside what is there, until a newer step is whole."""
        whole = max((group for group, view in views.items() if view.candidate.is_complete), default=None)
        for name in self.store.list_blobs(job):
            blob = self._blob(job, name) if name.startswith(DAMAGED_BLOB_PREFIX) else None
            if blob is None:
                continue
            note = from_msgpack(blob, _DamageNote)
            group, part = note.key.version_id, note.key.part
            view = views.get(group) or StepStatus(group, note.parts, {})
            if part in view.found or (whole is not None and whole > group):
                self.store.remove_blob(job, name)
            else:
                views[group] = msgspec.structs.replace(view, damaged={**view.damaged, part: note.reason})

    def _add_durable(self, job: str, views: dict[VersionId, StepStatus], *, fresh: bool) -> tuple[int, ...]:
        """Put what the durable tier has beside what is in memory; the answer is the plain checkpoints there."""

        def listed() -> CatalogListing | None:
            with self._catalog_for_reading(job) as catalog:
                return None if catalog is None else catalog.listing(fresh=fresh)

        listing = deadlines.run_within_deadline(listed, functools.partial(self._late, job))
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
            return deadlines.run_within_deadline(read, functools.partial(self._late, job))
        except ObjectNotFoundError:
            return None
        except (TierUnavailableError, DurableRefusedError):
            if needed:
                raise
            return None

    def _late(self, job: str) -> TierUnavailableError:
        return TierUnavailableError(
            f"{self._settings_for_reading(job).url} has not answered in the time that was given"
        )

    def _quarantined_here(self, job: str, group: VersionId) -> str:
        blob = self._blob(job, QUARANTINE_BLOB_PREFIX + object_keys.group_stem(group))
        return blob.decode(errors="replace") if blob else ""

    def _blob(self, job: str, name: str) -> bytes | None:
        try:
            return self.store.get_blob(job, name)
        except ShardNotFoundError:
            return None

    def _forget_catalog(self, job: str) -> None:
        with self._opening:
            with self._lock:
                self._settings.pop(job, None)
            self._catalogs.pop(job, None)
            checked = self._checked_catalogs.pop(job, None)
            if checked is not None and checked.settings == self.durable_settings(job):
                self._catalogs[job] = checked
        self._close_unused()

    def _close_unused(self) -> None:
        """Of what other settings have taken the place of."""
        with self._opening:
            current = [*self._catalogs.values(), *self._checked_catalogs.values()]
            unused = [one for one in self._opened if not one.users and one not in current]
            self._opened = [one for one in self._opened if one not in unused]
        for one in unused:
            one.close()
