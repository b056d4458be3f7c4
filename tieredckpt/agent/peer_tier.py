"""Steps in the memory of the job's other nodes."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from peerstore import deadlines
from peerstore.errors import PeerStoreError, ShardDamagedError
from peerstore.membership.topology import PeerNode, stable_hash
from peerstore.peers.peer_inventory import JobInventory
from peerstore.peers.peer_messages import NodeInventory
from peerstore.server.job_peers import JobPeers
from peerstore.server.node_peers import NodePeers
from peerstore.settings import BlobAccess
from peerstore.shard_records import ShardInfo, ShardKey, ShardRecord, VersionId
from tieredckpt.agent.agent_api import (
    LAYOUT_BLOB_PREFIX,
    TABLE_BLOB_PREFIX,
    ClusterNode,
    ClusterStatus,
    PeerSource,
    ShardReplication,
)
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.format.manifest import ShardMeta, checked_layout, decode_meta, unpack_blob
from tieredckpt.memory_service_options import REGISTRY_BLOB_PREFIX
from tieredckpt.resolve_step import Tier
from tieredckpt.step_inventory import StepStatus

log = logging.getLogger(__name__)


FactsByGroup = Mapping[VersionId, Mapping[int, ShardInfo]]
"""Shards by version and part."""


def peer_facts(nodes: Mapping[str, NodeInventory], me: str) -> FactsByGroup:
    """Return the shards of all nodes except ``me``."""
    found: dict[VersionId, dict[int, ShardInfo]] = defaultdict(dict)
    for node, inventory in nodes.items():
        if node != me:
            for fact in inventory.shards:
                found[fact.key.version_id].setdefault(fact.key.part, fact)
    return found


def memory_step_statuses(
    inventory: Iterable[ShardInfo], others: FactsByGroup, covers: Callable[[Sequence[ShardMeta]], bool]
) -> list[StepStatus]:
    """Return the status of each step in memory.

    ``covers`` returns whether fewer than all parts hold the whole state.
    """
    here: dict[VersionId, dict[int, ShardInfo]] = defaultdict(dict)
    for fact in inventory:
        here[fact.key.version_id][fact.key.part] = fact
    groups = sorted(here.keys() | others.keys())
    return [_step_status(group, here.get(group, {}), others.get(group, {}), covers) for group in groups]


def _step_status(
    group: VersionId,
    here: Mapping[int, ShardInfo],
    others: Mapping[int, ShardInfo],
    covers: Callable[[Sequence[ShardMeta]], bool],
) -> StepStatus:
    facts = [*{**others, **here}.values()]
    metas = [decode_meta(fact.meta) for fact in facts]
    found: dict[int, tuple[Tier, ...]] = {}
    for part in sorted(here.keys() | others.keys()):
        local_tier = (Tier.MEMORY,) if part in here else ()
        found[part] = (*local_tier, Tier.PEER) if part in others else local_tier
    return StepStatus(
        version_id=group,
        parts=facts[0].parts,
        found=found,
        base=next((meta.base for meta in metas if meta.base is not None), None),
        covered=len(facts) < facts[0].parts and covers(metas),
        size_bytes=sum(fact.size_bytes for fact in facts),
        saved_ns=max(fact.sealed_ns for fact in facts),
    )


_MAX_CONCURRENT_REQUESTS = 16
_MAX_OTHER_NODES = 32
"""Most nodes to query for a layout although they list no shard that uses it."""


SHARED_BLOBS = BlobAccess(common=(LAYOUT_BLOB_PREFIX, TABLE_BLOB_PREFIX), own=(REGISTRY_BLOB_PREFIX,))
"""Blobs that agents may read from each other.

Settings, marks and the drain's notes are private to each agent.
"""


def unpack_named_blob(name: str, packed: bytes) -> bytes:
    """Return the unpacked layout or table with this name.

    Raise :class:`CheckpointDamagedError` if the data does not match the digest in ``name``.
    """
    return checked_layout(name.removeprefix(LAYOUT_BLOB_PREFIX).removeprefix(TABLE_BLOB_PREFIX), unpack_blob(packed))


def blobs_needed(fact: ShardInfo) -> tuple[str, ...]:
    """Return the names of the layout and table that are needed to read a shard.

    A shard of the memory service needs none.
    """
    try:
        meta = decode_meta(fact.meta)
    except CheckpointDamagedError:  # not a shard of a step
        return ()
    return (LAYOUT_BLOB_PREFIX + meta.layout, *([TABLE_BLOB_PREFIX + meta.table] if meta.table else []))


class PeerTier:
    """The peer tier: shards, layouts and tables in the memory of the job's other nodes."""

    def __init__(self, node_peers: NodePeers) -> None:
        self.node_peers = node_peers
        self._holders_by_job: dict[str, tuple[JobInventory, dict[str, list[str]]]] = {}
        """By job: the last inventory, and the nodes with shards that use each layout and table."""

    def team(self, job: str) -> JobPeers | None:
        return self.node_peers.job_peers(job)

    def wait_for_pending_commits(self, job: str, timeout_s: float) -> None:
        """Wait until no other node is about to complete a newer step, at most ``timeout_s``."""
        team = self.team(job)
        if team is not None:
            team.wait_for_recovery(timeout_s)

    def peer_facts(self, job: str) -> tuple[FactsByGroup, str, VersionId | None]:
        """Return the shards on other nodes, the problems of silent nodes, and a version.

        Problems are "" if all nodes answered. The version is the newest that another node knows as complete.
        """
        team = self.team(job)
        if team is None:
            return {}, "", None
        inventory = team.inventory(fresh=True)
        unreachable = "; ".join(f"{node}: {why}" for node, why in sorted(inventory.unreachable.items()))
        known = (
            group
            for one in inventory.nodes.values()
            for group in (one.replicated, one.last_committed)
            if group is not None
        )
        return peer_facts(inventory.nodes, team.this_node.id), unreachable, max(known, default=None)

    def holders_of_parts(
        self, job: str, group: VersionId
    ) -> tuple[dict[int, ShardInfo], dict[int, tuple[PeerSource, ...]]]:
        """Return the parts of a version that other nodes hold, and the nodes that hold each part."""
        team = self.team(job)
        if team is None:
            return {}, {}
        facts: dict[int, ShardInfo] = {}
        found: dict[int, list[PeerSource]] = defaultdict(list)
        for node, inventory in team.inventory().nodes.items():
            held = [fact for fact in inventory.shards if fact.key.version_id == group]
            if held and node != team.this_node.id:
                source = PeerSource(node, team.membership.client_for(node).address)
                for fact in held:
                    facts.setdefault(fact.key.part, fact)
                    found[fact.key.part].append(source)
        return facts, {part: tuple(sources) for part, sources in found.items()}

    def committer_of(self, job: str, group: VersionId) -> str | None:
        """Return the live node that wrote or took over the lowest part of a version.

        Return ``None`` if no node is known to have a part.
        """
        team = self.team(job)
        if team is None:
            return None
        alive = team.membership.alive
        own = [
            (fact.key.part, node)
            for node, inventory in team.inventory().nodes.items()
            if node in alive
            for fact in inventory.shards
            if fact.key.version_id == group and not fact.holders
        ]
        return min(own)[1] if own else None

    def records(
        self, job: str, group: VersionId, sources: Mapping[int, tuple[PeerSource, ...]]
    ) -> dict[int, ShardRecord]:
        """Return the records of these parts from the nodes that hold them, without nodes that do not answer."""
        team = self.team(job)
        if team is None or not sources:
            return {}
        wanted: dict[str, list[int]] = defaultdict(list)
        for part, holders in sources.items():
            for source in holders:
                wanted[source.node].append(part)

        def fetch(node: str) -> list[ShardRecord]:
            try:
                return team.fetch_records(node, group, tuple(wanted[node]))
            except (PeerStoreError, OSError) as error:
                log.warning("job %s: %s did not describe step %d: %s", job, node, group.version, error)
                return []

        nodes = sorted(wanted)
        by_part: dict[int, dict[str, ShardRecord]] = defaultdict(dict)
        with ThreadPoolExecutor(
            min(_MAX_CONCURRENT_REQUESTS, len(nodes)), thread_name_prefix="tieredckpt-describe"
        ) as pool:
            for node, records in zip(nodes, pool.map(deadlines.inherit_deadline(fetch), nodes), strict=True):
                for record in records:
                    if record.key.part in sources:
                        by_part[record.key.part][node] = record
        found = {}
        for part, described in by_part.items():
            try:
                found[part] = team.resolve_record(described)[0]
            except ShardDamagedError as error:
                log.error("job %s: step %d: %s", job, group.version, error)
        return found

    def blobs(self, job: str, names: Collection[str]) -> tuple[dict[str, bytes], bool]:
        """Return layouts and tables from other nodes, and whether all queried nodes answered.

        Nodes are queried in parallel.

        Each is checked against the digest in its name. If it does not match, the next node is queried.
        """
        team = self.team(job)
        if team is None or not names:
            return {}, True
        found: dict[str, bytes] = {}
        unreachable: set[str] = set()
        untried = {name: self._nodes_to_query(team, name) for name in names}

        def fetch(node: str, wanted: list[str]) -> dict[str, bytes]:
            try:
                return team.fetch_blobs(node, wanted)
            except (PeerStoreError, OSError) as error:
                log.warning("job %s: %s did not give %d layouts and tables: %s", job, node, len(wanted), error)
                unreachable.add(node)
                return {}

        with ThreadPoolExecutor(_MAX_CONCURRENT_REQUESTS, thread_name_prefix="tieredckpt-layouts") as pool:
            while untried:
                requests: dict[str, list[str]] = defaultdict(list)
                for name, nodes in list(untried.items()):
                    node = next(nodes, None)
                    if node is None:
                        del untried[name]
                    else:
                        requests[node].append(name)
                responses = pool.map(deadlines.inherit_deadline(fetch), requests.keys(), requests.values())
                for node, blobs in zip(requests, responses, strict=True):
                    for name, packed in blobs.items():
                        try:
                            found[name] = unpack_named_blob(name, packed)
                        except CheckpointDamagedError as error:
                            log.error("job %s: node %s returned a damaged blob %s: %s", job, node, name, error)
                for name in found:
                    untried.pop(name, None)
        return found, not unreachable

    def _nodes_to_query(self, team: JobPeers, name: str) -> Iterator[str]:
        holders = self._holders(team, name)
        yield from holders
        # A node that once described a step with this layout may also have it. The limit bounds vain requests.
        rest = [node for node in team.membership.alive if node != team.this_node.id and node not in holders]
        yield from sorted(rest, key=lambda node: stable_hash(team.this_node.id, node))[:_MAX_OTHER_NODES]

    def _holders(self, team: JobPeers, name: str) -> dict[str, None]:
        """Return the nodes with a shard that uses this layout or table, and which therefore probably have it.

        The order differs between nodes, so that they do not all query the same one.
        """
        inventory = team.inventory()
        previous, holders = self._holders_by_job.get(team.job, (None, {}))
        if previous is not inventory:
            holders = defaultdict(list)
            for node, node_inventory in inventory.nodes.items():
                for blob in {blob for fact in node_inventory.shards for blob in blobs_needed(fact)}:
                    if node != team.this_node.id:
                        holders[blob].append(node)
            self._holders_by_job[team.job] = inventory, holders
        return dict.fromkeys(sorted(holders.get(name, ()), key=lambda node: stable_hash(team.this_node.id, node)))


def shard_replication_status(team: JobPeers, key: ShardKey) -> ShardReplication:
    """Return the current redundancy of one of this node's shards."""
    alive = team.membership.alive
    group = team.parity.members if team.uses_parity else ()
    nodes = [alive[node] for node in group if node in alive] or team.replicator.holders(key)
    levels = team.settings.levels
    level = next((name for name in reversed(levels) if any(dict(node.labels).get(name) for node in nodes)), "node")
    copies, domains = team.replicator.redundancy(key, level)
    status = next((one for one in team.replicator.statuses() if one.key == key), None)
    replicated = team.newest_replicated
    return ShardReplication(
        copies=copies,
        domains=domains,
        level=level,
        missing_copies=status.missing if status is not None else 0,
        is_replicated=replicated is not None and key.version_id <= replicated,
        problem=team.replicator.last_errors(key),
        parity_nodes=len(group),
    )


def cluster_status_of(team: JobPeers) -> ClusterStatus:
    """Return the nodes of a job, their states and their shards."""
    inventory = team.inventory(fresh=True)
    member_list, alive = team.membership.member_list, team.membership.alive
    listed: dict[str, PeerNode] = {node.id: node for node in member_list.nodes} if member_list is not None else {}
    views = []
    for name, node in sorted({**listed, **alive}.items()):
        held = inventory.nodes.get(name)
        views.append(
            ClusterNode(
                node,
                team.membership.state_of(name),
                held.shards if held is not None else (),
                held.epoch if held is not None else 0,
                held.replicated if held is not None else None,
                inventory.unreachable.get(name, ""),
                team.replicator.path_monitor.bytes_per_s.get(name, 0.0),
                held.verifying if held is not None else 0,
                member_list is not None and name in member_list.standby,
            )
        )
    sending = team.replicator.in_flight
    return ClusterStatus(
        job=team.job,
        this_node=team.this_node.id,
        nodes=tuple(views),
        member_list_version=member_list.version if member_list is not None else 0,
        quorum=team.membership.has_quorum,
        sees=team.membership.explain_quorum(),
        copies=team.settings.copies,
        mode=team.settings.mode,
        levels=team.settings.levels,
        partners=team.replicator.partners,
        sending=f"{sending[0].key} to {sending[0].target}" if sending is not None else "",
        sent_bytes=team.replicator.totals.sent_bytes,
        lag_s=team.replicator.totals.lag_s,
    )
