"""The node's answers about checkpoints: what is here, what is durable, what must not be loaded."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import msgspec

from peerstore.cluster.nodes import Node as PeerNode
from peerstore.cluster.nodes import NodeId
from peerstore.errors import PeerStoreError, RequestError, ShardNotFoundError
from peerstore.operations import Operation
from peerstore.owners import Owner, myself
from peerstore.peers.neighbourhood import Neighbourhood
from peerstore.peers.plan import TeamPlan
from peerstore.peers.team import Team
from peerstore.records import Group, ShardKey, ShardRecord
from peerstore.store import NodeStore, SealListener
from tieredckpt.agent.catalog import Catalog
from tieredckpt.agent.crashed_loads import CrashedLoads
from tieredckpt.agent.drain import Drain
from tieredckpt.agent.memory_service.names import JOB
from tieredckpt.agent.messages import (
    DAMAGED,
    DURABLE,
    LAYOUT,
    MAX_CUT_S,
    MAX_WAIT_S,
    QUARANTINE,
    TABLE,
    AskDurability,
    AskSurvey,
    Configure,
    CutOff,
    Describe,
    Join,
    Lift,
    Loading,
    LoadOver,
    Nothing,
    Observe,
    OfJob,
    Quarantine,
    Restored,
    WaitDurable,
)
from tieredckpt.agent.others import Others, cluster_of, durability_of
from tieredckpt.agent.views import Facts, memory_views
from tieredckpt.coverage import gaps
from tieredckpt.durable import names
from tieredckpt.durable.open import open_store
from tieredckpt.durable.store import ObjectNotFoundError, ObjectStore
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    DurableRefusedError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.layout import decode
from tieredckpt.manifest import Manifest, ShardIndex, ShardMeta, build_manifest, decode_meta, decode_table
from tieredckpt.node import (
    Acquaintance,
    ClusterView,
    Described,
    DrainView,
    Durability,
    NodeView,
    Passport,
    StepView,
    Survey,
)
from tieredckpt.resolve import Tier
from tieredckpt.settings import DurableSettings

log = logging.getLogger(__name__)

OpenStore = Callable[[str, DurableSettings], ObjectStore]


class _DamageNote(msgspec.Struct, frozen=True):
    key: ShardKey
    parts: int
    reason: str


class NodeService(SealListener):
    """A :class:`~tieredckpt.node.Node` over this process's own store."""

    def __init__(
        self,
        store: NodeStore,
        *,
        open_durable: OpenStore = open_store,
        writer: str = "",
        neighbourhood: Neighbourhood | None = None,
    ) -> None:
        self.store = store
        self.others = Others(neighbourhood) if neighbourhood is not None else None
        self._open = open_durable
        self._writer = writer
        self._lock = threading.Lock()
        self._catalogs: dict[str, Catalog | None] = {}
        self._crashed = CrashedLoads()
        self._settings: dict[str, DurableSettings] = {}
        self.observed: dict[str, Counter[str]] = defaultdict(Counter)
        self.drain = Drain(store, self, writer=writer)
        store.subscribe(self)
        store.subscribe(self.drain)

    # -- Node -------------------------------------------------------------------------------------------------

    def configure(self, job: str, durable: DurableSettings) -> None:
        """Remember where this job's steps become durable. A changed URL takes effect with the next step."""
        if self.durable_settings(job) != durable:
            self.store.put_blob(job, DURABLE, msgspec.msgpack.encode(durable))
            self._forget_catalog(job)
        self.drain.wake()

    def survey(self, job: str, *, fresh: bool = False, patience_s: float = 0.0) -> Survey:
        if job == JOB:  # shards of somebody else's, which are nobody's steps
            return Survey((), {})
        if self.others is not None and patience_s > 0:
            self.others.await_others(job, patience_s)
        unreachable: dict[Tier, str] = {}
        elsewhere: Facts = {}
        once_whole = [self.store.copies.once_whole(job)]
        if self.others is not None:
            # What was sealed a moment ago counts: a job that goes on at once must not find an older step, or nothing.
            elsewhere, silent, settled = self.others.facts(job)
            once_whole.append(settled)
            if silent:
                unreachable[Tier.PEER] = silent
        covers = functools.partial(self._covers, job)
        views = {view.group: view for view in memory_views(self.store.inventory(job), elsewhere, covers)}
        plain: tuple[int, ...] = ()
        self._add_damaged(job, views)
        try:
            plain = self._add_durable(job, views, fresh=fresh)
        except (TierUnavailableError, DurableRefusedError) as error:
            unreachable[Tier.DURABLE] = str(error)
        crashed = self._crashed.count(job)
        for group, view in views.items():
            reason = view.quarantined or self._quarantined_here(job, group)
            views[group] = msgspec.structs.replace(view, quarantined=reason, crashed_loads=crashed.get(group, 0))
        settings = self.durable_settings(job)
        known = settings if settings.url else None
        newest = max((group for group in once_whole if group is not None), default=None)
        return Survey(tuple(views[group] for group in sorted(views)), unreachable, plain, known, newest)

    def describe(self, job: str, group: Group) -> Described:
        here = {record.key.part: record for record in self.store.records(job, group)}
        sources = self.others.sources(job, group) if self.others is not None else {}
        missing = {part: there for part, there in sources.items() if part not in here}
        elsewhere = self.others.records(job, group, missing) if self.others is not None else {}
        in_memory = {**elsewhere, **here}
        durable = self._durable_manifest(job, group, needed=not self._whole_here(job, list(in_memory.values())))
        if durable is None and not in_memory:
            raise CheckpointNotFoundError(f"job {job} has no step {group.version} ({names.stem(group)}) here")
        shards = {shard.key.part: shard for shard in durable.shards} if durable else {}
        found: dict[int, tuple[Tier, ...]] = dict.fromkeys(shards, (Tier.DURABLE,))
        for part, record in in_memory.items():
            near = (Tier.MEMORY,) if part in here else ()
            tiers = (*near, Tier.PEER) if part in sources else near
            known = shards.get(part)
            if known is None:
                shards[part] = _index_of(record)
                found[part] = tiers
            elif known.checksums == record.checksums:
                found[part] = (*tiers, Tier.DURABLE)
            else:
                raise CheckpointDamagedError(
                    f"{record.key}: the durable copy has other checksums than the one in memory"
                )
        layouts = {} if durable is None else dict(durable.layouts)
        tables = {} if durable is None else dict(durable.tables)
        for shard in shards.values():
            if shard.meta.layout not in layouts:
                layouts[shard.meta.layout] = self._blob_of_job(job, LAYOUT + shard.meta.layout)
            if shard.meta.table and shard.meta.table not in tables:
                with contextlib.suppress(ShardNotFoundError):
                    tables[shard.meta.table] = self._blob_of_job(job, TABLE + shard.meta.table)
        created = durable.created_ns if durable else time.time_ns()
        manifest = build_manifest(list(shards.values()), layouts, tables, created_ns=created, writer=self._writer)
        return Described(manifest, found, {part: there for part, there in sources.items() if part in shards})

    def quarantine(self, job: str, group: Group, reason: str) -> None:
        """Noted here. In the durable tier the drain says so, once this node's job writes there again: whoever finds
        the damage may be somebody who only reads.
        """
        log.error("job %s step %d (%s) is quarantined: %s", job, group.version, names.stem(group), reason)
        self.store.put_blob(job, QUARANTINE + names.stem(group), reason.encode())

    def lift(self, job: str, group: Group) -> None:
        self.store.remove_blob(job, QUARANTINE + names.stem(group))
        self._crashed.forget(job, group=group)
        catalog = self.catalog(job)
        if catalog is not None:
            catalog.forget()

    def quarantined(self, job: str) -> dict[Group, str]:
        """What is noted on this node, and why."""
        stems = [name.removeprefix(QUARANTINE) for name in self.store.blobs(job) if name.startswith(QUARANTINE)]
        found = {group: self._quarantined_here(job, group) for stem in stems if (group := names.parse_stem(stem))}
        return {group: reason for group, reason in found.items() if reason}

    def loading(self, job: str, group: Group, rank: int, *, owner: Owner | None = None) -> None:
        self._crashed.begun(owner or myself(), job, group, rank)

    def restored(self, job: str, group: Group, *, owner: Owner | None = None) -> None:
        self._crashed.done(owner or myself(), job)
        self.store.copies.go_back(job, group)

    def load_over(self, job: str, *, stepped: bool, owner: Owner | None = None) -> None:
        self._crashed.over(owner or myself(), job, stepped=stepped)

    def departed(self, owner: Owner, job: str) -> None:
        self._crashed.left(owner, job)

    def dropped(self, job: str) -> None:
        self._crashed.forget(job)

    def damaged(self, key: ShardKey, record: ShardRecord, reason: str) -> None:
        """A shard is gone because it was damaged: remembered, so that nobody takes its step for one that never was."""
        note = _DamageNote(key, record.parts, reason)
        self.store.put_blob(key.job, f"{DAMAGED}{names.stem(key.group)}.{key.part}", msgspec.msgpack.encode(note))

    def sealed(self, record: ShardRecord) -> None:
        """The job got past every older step: those were fine."""
        self._crashed.forget(record.key.job, before=record.key.version)

    def drains(self, job: str) -> tuple[DrainView, ...]:
        self._tell_drain(job)
        return self.drain.views(job)

    def wait_durable(self, job: str, group: Group | None, timeout_s: float) -> DrainView | None:
        self._tell_drain(job)
        return self.drain.wait(job, group, timeout_s)

    def join(self, job: str, plan: TeamPlan) -> None:
        self._neighbourhood().join(job, plan)

    def cut_off(self, seconds: float) -> None:
        self._neighbourhood().cut_off(seconds)

    def me(self) -> PeerNode | None:
        return self.others.neighbourhood.me if self.others is not None else None

    def passport(self, job: str) -> Passport | None:
        team = self.others.team(job) if self.others is not None else None
        return Passport(team.me.id, team.credentials.secret) if team is not None else None

    def acquaintance(self, job: str) -> Acquaintance | None:
        team = self.others.team(job) if self.others is not None else None
        if team is None:
            return None
        roster = team.tending.roster
        version = roster.version if roster is not None else 0
        went_on = {node.id for node in roster.nodes} if roster is not None else set()
        silent = () if team.me.id in went_on else sorted(went_on & team.sight(fresh=True).silent.keys())
        return Acquaintance(team.credentials.secret, tuple(team.tending.living.values()), version, tuple(silent))

    def durability(self, key: ShardKey, *, copies: int = 0, domains: int = 0, timeout_s: float = 0.0) -> Durability:
        team = self.others.team(key.job) if self.others is not None else None
        if team is None:
            return Durability(1, 1, "node")

        def enough() -> bool:
            now = durability_of(team, key)
            return now.copies >= copies and now.domains >= domains

        team.protecting.wait(enough, timeout_s)
        return durability_of(team, key)

    def cluster(self, job: str) -> ClusterView:
        team = self.others.team(job) if self.others is not None else None
        if team is None:
            me = self.others.neighbourhood.name if self.others is not None else "this node"
            facts = tuple(self.store.inventory(job))
            alone = NodeView(PeerNode(NodeId(me), ""), "alive", facts, self.store.epoch(job))
            return ClusterView(job, me, (alone,))
        return cluster_of(team)

    @property
    def teams(self) -> list[Team]:
        """The jobs of this node that have other nodes."""
        return self.others.neighbourhood.teams if self.others is not None else []

    def _neighbourhood(self) -> Neighbourhood:
        if self.others is None:
            raise UsageError("this node's agent does not listen for other nodes (agent.peers is off)")
        return self.others.neighbourhood

    def observe(self, job: str, values: Mapping[str, float]) -> None:
        with self._lock:
            counter = self.observed[job]
            for name, value in values.items():
                counter[name] += value  # type: ignore[assignment]

    def close(self) -> None:
        self.drain.stop()
        with self._lock:
            opened = list(self._catalogs.values())
        for catalog in opened:
            if catalog is not None:
                catalog.store.interrupt()
        self.drain.close()
        with self._lock:
            catalogs, self._catalogs = self._catalogs, {}
        for catalog in catalogs.values():
            if catalog is not None:
                catalog.store.close()

    # -- for the drain ----------------------------------------------------------------------------------------

    def durable_settings(self, job: str) -> DurableSettings:
        with self._lock:
            kept = self._settings.get(job)
        if kept is None:
            blob = self._blob(job, DURABLE)
            kept = msgspec.msgpack.decode(blob, type=DurableSettings) if blob else DurableSettings()
            with self._lock:
                self._settings[job] = kept
        return kept

    def catalog(self, job: str) -> Catalog | None:
        """The job's durable tier, opened once; ``None`` when it has none."""
        with self._lock:
            if job in self._catalogs:
                return self._catalogs[job]
        settings = self.durable_settings(job)
        catalog = Catalog(self._open(settings.url, settings), job) if settings.url else None
        with self._lock:
            return self._catalogs.setdefault(job, catalog)

    def index_of(self, record: ShardRecord) -> tuple[ShardIndex, bytes, bytes]:
        """A sealed shard's index, layout and table."""
        index = _index_of(record)
        job = record.key.job
        layout = self.store.get_blob(job, LAYOUT + index.meta.layout)
        return index, layout, self._blob(job, TABLE + index.meta.table) or b"" if index.meta.table else b""

    # -- inside -----------------------------------------------------------------------------------------------

    def _tell_drain(self, job: str) -> None:
        """What a killed agent left is drained once it is verified; that nothing is to do would be wrong until then."""
        own = {fact.key for fact in self.store.inventory(job) if not fact.holders}
        unknown = {key.group for key in own if not self.drain.knows(job, key.group)}
        for group in sorted(unknown):
            for record in self.store.records(job, group):
                if record.key in own:
                    self.drain.sealed(record)

    def _covers(self, job: str, metas: Sequence[ShardMeta]) -> bool:
        try:
            table = next((self._blob_of_job(job, TABLE + meta.table) for meta in metas if meta.table), None)
            layouts = {meta.layout: self._blob_of_job(job, LAYOUT + meta.layout) for meta in metas}
        except PeerStoreError:  # who has it does not answer, or nobody has: it is not known to be covered
            return False
        return table is not None and not gaps(decode_table(table), [decode(layouts[meta.layout]) for meta in metas])

    def _blob_of_job(self, job: str, name: str) -> bytes:
        """A layout or table, from another node where this one has not got it."""
        data = self._blob(job, name)
        if data is None:
            if self.others is None:
                raise ShardNotFoundError(f"job {job} has no {name} here")
            data = self.others.blob(job, name)
        return data

    def _add_damaged(self, job: str, views: dict[Group, StepView]) -> None:
        """Put what was lost to damage beside what is there, until a newer step is whole."""
        whole = max((group for group, view in views.items() if view.candidate.whole), default=None)
        for name in self.store.blobs(job):
            blob = self._blob(job, name) if name.startswith(DAMAGED) else None
            if blob is None:
                continue
            note = msgspec.msgpack.decode(blob, type=_DamageNote)
            group, part = note.key.group, note.key.part
            view = views.get(group) or StepView(group, note.parts, {})
            if part in view.found or (whole is not None and whole > group):
                self.store.remove_blob(job, name)
            else:
                views[group] = msgspec.structs.replace(view, damaged={**view.damaged, part: note.reason})

    def _add_durable(self, job: str, views: dict[Group, StepView], *, fresh: bool) -> tuple[int, ...]:
        """Put what the durable tier has beside what is in memory; the answer is the plain checkpoints there."""
        catalog = self.catalog(job)
        if catalog is None:
            return ()
        listing = catalog.listing(fresh=fresh)
        for group, entry in listing.manifests.items():
            view = views.get(group)
            if view is None:
                views[group] = StepView(group, 0, {}, base=entry.base, durable=True)
            else:
                views[group] = msgspec.structs.replace(view, durable=True)
        for group in listing.quarantined & views.keys():
            views[group] = msgspec.structs.replace(views[group], quarantined="marked in the durable tier")
        return listing.plain

    def _whole_here(self, job: str, records: Sequence[ShardRecord]) -> bool:
        """Whether memory alone will do, so that a store that is away is no reason to wait or to fail."""
        if not records:
            return False
        return len(records) >= records[0].parts or self._covers(job, [decode_meta(record.meta) for record in records])

    def _durable_manifest(self, job: str, group: Group, *, needed: bool) -> Manifest | None:
        catalog = self.catalog(job)
        if catalog is None:
            return None
        try:
            if not needed and group not in catalog.listing().manifests:
                return None
            return catalog.manifest(group)
        except ObjectNotFoundError:
            return None
        except (TierUnavailableError, DurableRefusedError):
            if needed:
                raise
            return None

    def _quarantined_here(self, job: str, group: Group) -> str:
        blob = self._blob(job, QUARANTINE + names.stem(group))
        return blob.decode(errors="replace") if blob else ""

    def _blob(self, job: str, name: str) -> bytes | None:
        try:
            return self.store.get_blob(job, name)
        except ShardNotFoundError:
            return None

    def _forget_catalog(self, job: str) -> None:
        with self._lock:
            self._settings.pop(job, None)
            old = self._catalogs.pop(job, None)
        if old is not None:
            old.store.close()


def _index_of(record: ShardRecord) -> ShardIndex:
    return ShardIndex(
        record.key, record.parts, record.size_bytes, record.chunk_bytes, record.checksums, decode_meta(record.meta)
    )


# -- over the socket ----------------------------------------------------------------------------------------------


def node_operations(node: NodeService) -> dict[str, Operation]:
    """The operations a checkpoint's agent answers beyond those of a store."""
    none = type(None)

    def configure(args: Configure, _: object) -> None:
        if args.durable.url.startswith("memory:"):
            raise UsageError("a memory:// durable tier would end with the agent: it is for tests in one process")
        node.configure(args.job, args.durable)

    def survey(args: AskSurvey, _: object) -> Survey:
        patience_s = min(max(args.patience_s, 0.0), MAX_WAIT_S)
        return node.survey(args.job, fresh=args.fresh, patience_s=patience_s)

    def wait(args: WaitDurable, _: object) -> DrainView | None:
        return node.wait_durable(args.job, args.group, min(max(args.timeout_s, 0.0), MAX_WAIT_S))

    def durability(args: AskDurability, _: object) -> Durability:
        timeout_s = min(max(args.timeout_s, 0.0), MAX_WAIT_S)
        return node.durability(args.key, copies=args.copies, domains=args.domains, timeout_s=timeout_s)

    def observe(args: Observe, _: object) -> None:
        if len(args.values) > 100:
            raise RequestError("too many metrics at once")
        node.observe(args.job, args.values)

    return {
        "configure": Operation(Configure, none, configure),
        "survey": Operation(AskSurvey, Survey, survey),
        "describe": Operation(Describe, Described, lambda a, _: node.describe(a.job, a.group)),
        "quarantine": Operation(Quarantine, none, lambda a, _: node.quarantine(a.job, a.group, a.reason)),
        "lift": Operation(Lift, none, lambda a, _: node.lift(a.job, a.group)),
        "loading": Operation(Loading, none, lambda a, who: node.loading(a.job, a.group, a.rank, owner=who)),
        "restored": Operation(Restored, none, lambda a, who: node.restored(a.job, a.group, owner=who)),
        "load_over": Operation(LoadOver, none, lambda a, who: node.load_over(a.job, stepped=a.stepped, owner=who)),
        "join": Operation(Join, none, lambda a, _: node.join(a.job, a.plan)),
        "cut_off": Operation(CutOff, none, lambda a, _: node.cut_off(min(max(a.seconds, 0.0), MAX_CUT_S))),
        "me": Operation(Nothing, PeerNode | None, lambda *_: node.me()),
        "acquaintance": Operation(OfJob, Acquaintance | None, lambda a, _: node.acquaintance(a.job)),
        "passport": Operation(OfJob, Passport | None, lambda a, _: node.passport(a.job)),
        "durability": Operation(AskDurability, Durability, durability),
        "cluster": Operation(OfJob, ClusterView, lambda a, _: node.cluster(a.job)),
        "drains": Operation(OfJob, tuple[DrainView, ...], lambda a, _: node.drains(a.job)),
        "wait_durable": Operation(WaitDurable, DrainView | None, wait),
        "observe": Operation(Observe, none, observe),
    }
