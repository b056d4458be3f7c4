"""NodeAgentService: steps in memory, on peers and in the durable tier, and quarantine."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from peerstore import deadlines
from peerstore.daemon_process import ProcessIdentity, current_process
from peerstore.errors import UnavailableError
from peerstore.membership.topology import NodeId, PeerNode
from peerstore.server.job_peers import JobPeers
from peerstore.server.node_peers import NodePeers
from peerstore.settings import JobPeersConfig
from peerstore.shard_records import ShardKey, VersionId
from peerstore.store.node_store import NodeStore
from tieredckpt.agent.agent_api import (
    ClusterNode,
    ClusterStatus,
    DrainStatus,
    DurableCheck,
    KnownPeers,
    ProtectionStatus,
    ReaderCredentials,
    ShardReplication,
)
from tieredckpt.agent.cluster_settings import ClusterSettingsWatcher
from tieredckpt.agent.drain import Drain
from tieredckpt.agent.durable_catalog import delete_step
from tieredckpt.agent.durable_check import StoreOpener
from tieredckpt.agent.durable_tiers import DurableTiers
from tieredckpt.agent.job_health import CrashedLoads, TrainerHealth
from tieredckpt.agent.node_step_reader import NodeStepReader
from tieredckpt.agent.peer_tier import (
    FactsByGroup,
    PeerTier,
    cluster_status_of,
    memory_step_statuses,
    shard_replication_status,
)
from tieredckpt.agent.retention import require_no_revival
from tieredckpt.agent.step_locator import STEP_PAGE_BYTES
from tieredckpt.agent.step_marks import StepMarks
from tieredckpt.durable.plain_objects import PlainSteps
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import (
    DurableRefusedError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.memory_service_options import MEMORY_SERVICE_JOB
from tieredckpt.resolve_step import Tier
from tieredckpt.settings import DurableSettings
from tieredckpt.step_inventory import StepInventory, StepStatus

log = logging.getLogger(__name__)

_MAX_LOCATORS = 4
_LOG_S = 60.0


class NodeAgentService:
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
        self.store, self.writer = store, writer
        self.peers = PeerTier(node_peers) if node_peers is not None else None
        self.durable = DurableTiers(store.blobs, open_durable)
        self.steps = NodeStepReader(store, self.durable, self.peers, writer=writer, page_bytes=page_bytes)
        self.marks = StepMarks(store.blobs)
        self.trainers = TrainerHealth()
        self._crashed = CrashedLoads()
        self.cluster_settings: ClusterSettingsWatcher | None = None
        """Watcher of the cluster's settings; ``None`` if the agent does not follow them."""
        self._notifier = ThreadPoolExecutor(1, thread_name_prefix="tieredckpt-tell")
        self.drain = Drain(store, self, writer=writer)
        for listener in (self.marks, self._crashed, self.steps, self.drain):
            store.subscribe(listener)

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
        known = self.durable.settings(job)
        if durable.url:
            self.durable.check(job, durable, writes=check == "write")
        if durable.url and (known.url, known.options) == (durable.url, durable.options):
            self._store_settings(job, durable)
        else:
            self.durable.set_checked(job, durable, owner or current_process())

    def _store_settings(self, job: str, durable: DurableSettings) -> None:
        if self.durable.store_settings(job, durable):
            self.drain.destination_changed(job)
        self.drain.retry_now()

    def check_durable(self, job: str) -> None:
        durable = self.durable.settings(job)
        if durable.url:
            self.durable.check(job, durable, writes=True)

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
        covers = functools.partial(self.steps.covers, job)
        views = {view.version_id: view for view in memory_step_statuses(self.store.list_shards(job), on_peers, covers)}
        plain = PlainSteps()
        self.marks.add_damaged(job, views)
        try:
            plain = self._add_durable(job, views, fresh=fresh)
        except (TierUnavailableError, DurableRefusedError, UsageError) as error:
            unreachable[Tier.DURABLE] = str(error)
        for group, count in self._crashed.count(job).items():
            if group in views:
                views[group] = msgspec.structs.replace(views[group], crashed_loads=count)
        for group, reason in self.marks.quarantine_reasons(job).items():
            if group in views and not views[group].quarantined:
                views[group] = msgspec.structs.replace(views[group], quarantined=reason)
        for group in self.store.versions.retained(job) & views.keys():
            views[group] = msgspec.structs.replace(views[group], kept=True)
        settings = self.durable.settings_for_reading(job)
        known = settings if settings.url else None
        newest = max((group for group in once_complete if group is not None), default=None)
        inventory = tuple(views[group] for group in sorted(views))
        expired = self.store.jobs.clients.expired_job(job)
        if expired is not None and any(one.candidate.is_complete and one.saved_ns > expired.at_ns for one in inventory):
            expired = None  # the job has saved a complete step since
        return StepInventory(
            inventory,
            unreachable,
            plain.complete,
            known,
            newest,
            expired,
            aborted,
            self.store.table.unrecognized.find(job=job),
            plain.incomplete,
        )

    def quarantine(self, job: str, group: VersionId, reason: str) -> None:
        self.marks.quarantine(job, group, reason)

    def unquarantine(self, job: str, group: VersionId) -> None:
        self.marks.lift_quarantine(job, group)
        self._crashed.forget(job, group=group)
        with self.durable.catalog_for_reading(job) as catalog:
            if catalog is not None:
                catalog.invalidate()

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
        self.marks.forget_damage(job, groups)
        try:
            with self.durable.catalog_for_reading(job) as catalog:
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
        status = self.trainers.protection(job, protected, newer)
        return msgspec.structs.replace(status, upload_problem=self.drain.problem(job))

    def add_metrics(self, job: str, values: Mapping[str, float]) -> ProtectionStatus:
        missed = int(values.get("skipped", 0) + values.get("failed", 0))
        if missed:
            self.protection(job)  # resets the count if a newer step is protected
        self.trainers.add_metrics(job, values, missed)
        status = self.protection(job)
        self.trainers.log_protection(job, status)
        return status

    @property
    def teams(self) -> list[JobPeers]:
        """Peers of each job that has other nodes."""
        return self.peers.node_peers.all_job_peers if self.peers is not None else []

    def _node_peers(self) -> NodePeers:
        if self.peers is None:
            raise UsageError("this node's agent does not listen for other nodes (agent.peers is off)")
        return self.peers.node_peers

    def close(self) -> None:
        self.drain.stop()
        self.durable.interrupt()
        self.drain.close()
        self._notifier.shutdown(cancel_futures=True)
        self.durable.close()

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

    def _queue_recovered_shards(self, job: str) -> None:
        """Queue a killed agent's shards for the drain. Before they are verified it does not list them."""
        own = {fact.key for fact in self.store.list_shards(job) if not fact.holders}
        untracked = {key.version_id for key in own if not self.drain.is_tracking(job, key.version_id)}
        for group in sorted(untracked):
            for record in self.store.reader.records(job, group):
                if record.key in own:
                    self.drain.on_shard_sealed(record)

    def _add_durable(self, job: str, views: dict[VersionId, StepStatus], *, fresh: bool) -> PlainSteps:
        """Add the durable tier's steps to ``views``; return the steps of plain checkpoints there."""
        listing = self.durable.listing(job, fresh=fresh)
        if listing is None:
            return PlainSteps()
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
        return listing.plain
