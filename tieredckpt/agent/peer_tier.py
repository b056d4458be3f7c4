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
    StepStatus,
)
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.format.manifest import ShardMeta, checked_layout, decode_meta, unpack_blob
from tieredckpt.memory_service_options import REGISTRY_BLOB_PREFIX
from tieredckpt.resolve_step import Tier

log = logging.getLogger(__name__)


FactsByGroup = Mapping[VersionId, Mapping[int, ShardInfo]]
"""By version and part."""


def peer_facts(nodes: Mapping[str, NodeInventory], me: str) -> FactsByGroup:
    """What nodes other than ``me`` hold."""
    found: dict[VersionId, dict[int, ShardInfo]] = defaultdict(dict)
    for node, looked in nodes.items():
        if node != me:
            for fact in looked.shards:
                found[fact.key.version_id].setdefault(fact.key.part, fact)
    return found


def memory_step_statuses(
    inventory: Iterable[ShardInfo], others: FactsByGroup, covers: Callable[[Sequence[ShardMeta]], bool]
) -> list[StepStatus]:
    """Each step of which this node or another holds something; ``covers`` says whether less than all parts will do."""
    here: dict[VersionId, dict[int, ShardInfo]] = defaultdict(dict)
    for fact in inventory:
        here[fact.key.version_id][fact.key.part] = fact
    groups = sorted(here.keys() | others.keys())
    return [_view(group, here.get(group, {}), others.get(group, {}), covers) for group in groups]


def _view(
    group: VersionId,
    here: Mapping[int, ShardInfo],
    others: Mapping[int, ShardInfo],
    covers: Callable[[Sequence[ShardMeta]], bool],
) -> StepStatus:
    facts = [*{**others, **here}.values()]
    metas = [decode_meta(fact.meta) for fact in facts]
    found: dict[int, tuple[Tier, ...]] = {}
    for part in sorted(here.keys() | others.keys()):
        near = (Tier.MEMORY,) if part in here else ()
        found[part] = (*near, Tier.PEER) if part in others else near
    return StepStatus(
        version_id=group,
        parts=facts[0].parts,
        found=found,
        base=next((meta.base for meta in metas if meta.base is not None), None),
        covered=len(facts) < facts[0].parts and covers(metas),
        size_bytes=sum(fact.size_bytes for fact in facts),
        saved_ns=max(fact.sealed_ns for fact in facts),
    )


_ASKED_AT_ONCE = 16
_STRANGERS = 32
"""Nodes that are asked for a layout although they hold no shard that goes with it."""


SHARED_BLOBS = BlobAccess(common=(LAYOUT_BLOB_PREFIX, TABLE_BLOB_PREFIX), own=(REGISTRY_BLOB_PREFIX,))
"""What agents may ask of each other beside shards. Settings, marks and notes of the drain are each agent's own."""


def unpack_named_blob(name: str, packed: bytes) -> bytes:
    """The layout or table of that name, or :class:`CheckpointDamagedError` where it is another one, or none."""
    return checked_layout(name.removeprefix(LAYOUT_BLOB_PREFIX).removeprefix(TABLE_BLOB_PREFIX), unpack_blob(packed))


def blobs_needed(fact: ShardInfo) -> tuple[str, ...]:
    """What one needs beside a shard to read it."""
    try:
        meta = decode_meta(fact.meta)
    except CheckpointDamagedError:  # a shard of somebody else's
        return ()
    return (LAYOUT_BLOB_PREFIX + meta.layout, *([TABLE_BLOB_PREFIX + meta.table] if meta.table else []))


class PeerTier:
    """The peer tier as the agent's answers use it."""

    def __init__(self, node_peers: NodePeers) -> None:
        self.node_peers = node_peers
        self._listed: dict[str, tuple[JobInventory, dict[str, list[str]]]] = {}
        """By job, what was seen last, and which nodes have shards that go with each layout and table."""

    def team(self, job: str) -> JobPeers | None:
        return self.node_peers.job_peers(job)

    def wait_for_pending_commits(self, job: str, timeout_s: float) -> None:
        """Until other nodes are not about to make a newer step whole any more."""
        team = self.team(job)
        if team is not None:
            team.wait_for_recovery(timeout_s)

    def peer_facts(self, job: str) -> tuple[FactsByGroup, str, VersionId | None]:
        """What other nodes hold right now, by version and part; who could not be asked; the newest they know whole."""
        team = self.team(job)
        if team is None:
            return {}, "", None
        sight = team.inventory(fresh=True)
        silent = "; ".join(f"{node}: {why}" for node, why in sorted(sight.unreachable.items()))
        known = (
            group for one in sight.nodes.values() for group in (one.replicated, one.last_committed) if group is not None
        )
        return peer_facts(sight.nodes, team.this_node.id), silent, max(known, default=None)

    def holders_of_parts(
        self, job: str, group: VersionId
    ) -> tuple[dict[int, ShardInfo], dict[int, tuple[PeerSource, ...]]]:
        """Each part of a version that other nodes hold, and which of them."""
        team = self.team(job)
        if team is None:
            return {}, {}
        facts: dict[int, ShardInfo] = {}
        found: dict[int, list[PeerSource]] = defaultdict(list)
        for node, looked in team.inventory().nodes.items():
            there = [fact for fact in looked.shards if fact.key.version_id == group]
            if there and node != team.this_node.id:
                source = PeerSource(node, team.membership.client_for(node).address)
                for fact in there:
                    facts.setdefault(fact.key.part, fact)
                    found[fact.key.part].append(source)
        return facts, {part: tuple(sources) for part, sources in found.items()}

    def committer_of(self, job: str, group: VersionId) -> str | None:
        """The living node that wrote the first of the parts of a version, or took it over; ``None``: none is seen."""
        team = self.team(job)
        if team is None:
            return None
        living = team.membership.alive
        own = [
            (fact.key.part, node)
            for node, looked in team.inventory().nodes.items()
            if node in living
            for fact in looked.shards
            if fact.key.version_id == group and not fact.holders
        ]
        return min(own)[1] if own else None

    def records(
        self, job: str, group: VersionId, sources: Mapping[int, tuple[PeerSource, ...]]
    ) -> dict[int, ShardRecord]:
        """The records of these parts from the nodes that hold them; a node that does not answer is left out."""
        team = self.team(job)
        if team is None or not sources:
            return {}
        wanted: dict[str, list[int]] = defaultdict(list)
        for part, there in sources.items():
            for source in there:
                wanted[source.node].append(part)

        def ask(node: str) -> list[ShardRecord]:
            try:
                return team.fetch_records(node, group, tuple(wanted[node]))
            except (PeerStoreError, OSError) as error:
                log.warning("job %s: %s did not describe step %d: %s", job, node, group.version, error)
                return []

        nodes = sorted(wanted)
        said: dict[int, dict[str, ShardRecord]] = defaultdict(dict)
        with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(nodes)), thread_name_prefix="tieredckpt-describe") as pool:
            for node, records in zip(nodes, pool.map(deadlines.inherit_deadline(ask), nodes), strict=True):
                for record in records:
                    if record.key.part in sources:
                        said[record.key.part][node] = record
        found = {}
        for part, described in said.items():
            try:
                found[part] = team.resolve_record(described)[0]
            except ShardDamagedError as error:
                log.error("job %s: step %d: %s", job, group.version, error)
        return found

    def blobs(self, job: str, names: Collection[str]) -> tuple[dict[str, bytes], bool]:
        """Layouts and tables from other nodes, several of them asked at once; and whether everybody answered.

        They are what they are called: where one is not, the next node is asked for it.
        """
        team = self.team(job)
        if team is None or not names:
            return {}, True
        found: dict[str, bytes] = {}
        silent: set[str] = set()
        untried = {name: self._who_may_have(team, name) for name in names}

        def ask(node: str, wanted: list[str]) -> dict[str, bytes]:
            try:
                return team.fetch_blobs(node, wanted)
            except (PeerStoreError, OSError) as error:
                log.warning("job %s: %s did not give %d layouts and tables: %s", job, node, len(wanted), error)
                silent.add(node)
                return {}

        with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="tieredckpt-layouts") as pool:
            while untried:
                questions: dict[str, list[str]] = defaultdict(list)
                for name, nodes in list(untried.items()):
                    node = next(nodes, None)
                    if node is None:
                        del untried[name]
                    else:
                        questions[node].append(name)
                asked = pool.map(deadlines.inherit_deadline(ask), questions.keys(), questions.values())
                for node, said in zip(questions, asked, strict=True):
                    for name, packed in said.items():
                        try:
                            found[name] = unpack_named_blob(name, packed)
                        except CheckpointDamagedError as error:
                            log.error("job %s: what %s gave as %s: %s", job, node, name, error)
                for name in found:
                    untried.pop(name, None)
        return found, not silent

    def _who_may_have(self, team: JobPeers, name: str) -> Iterator[str]:
        holders = self._holders(team, name)
        yield from holders
        # Who once described a step that needed it may have it, too; not everybody is asked for what nobody lists.
        rest = [node for node in team.membership.alive if node != team.this_node.id and node not in holders]
        yield from sorted(rest, key=lambda node: stable_hash(team.this_node.id, node))[:_STRANGERS]

    def _holders(self, team: JobPeers, name: str) -> dict[str, None]:
        """Nodes with a shard that goes with this layout or table, and so most likely with that.

        Each node has an order of its own: of what all have, not all ask the same one.
        """
        sight = team.inventory()
        seen, listed = self._listed.get(team.job, (None, {}))
        if seen is not sight:
            listed = defaultdict(list)
            for node, looked in sight.nodes.items():
                for blob in {blob for fact in looked.shards for blob in blobs_needed(fact)}:
                    if node != team.this_node.id:
                        listed[blob].append(node)
            self._listed[team.job] = sight, listed
        return dict.fromkeys(sorted(listed.get(name, ()), key=lambda node: stable_hash(team.this_node.id, node)))


def shard_replication_status(team: JobPeers, key: ShardKey) -> ShardReplication:
    """How well one of this node's shards is kept by now."""
    living = team.membership.alive
    group = team.parity_replicator.members if team.uses_parity else ()
    nodes = [living[node] for node in group if node in living] or team.replicator.holders(key)
    levels = team.settings.levels
    level = next((name for name in reversed(levels) if any(dict(node.labels).get(name) for node in nodes)), "node")
    copies, domains = team.replicator.redundancy(key, level)
    standing = next((one for one in team.replicator.statuses() if one.key == key), None)
    replicated = team.newest_replicated
    return ShardReplication(
        copies=copies,
        domains=domains,
        level=level,
        missing_copies=standing.missing if standing is not None else 0,
        is_replicated=replicated is not None and key.version_id <= replicated,
        problem=team.replicator.last_errors(key),
        parity_nodes=len(group),
    )


def cluster_status_of(team: JobPeers) -> ClusterStatus:
    """All nodes of a job: who is there, and what they hold."""
    sight = team.inventory(fresh=True)
    member_list, living = team.membership.member_list, team.membership.alive
    listed: dict[str, PeerNode] = {node.id: node for node in member_list.nodes} if member_list is not None else {}
    views = []
    for name, node in sorted({**listed, **living}.items()):
        looked = sight.nodes.get(name)
        views.append(
            ClusterNode(
                node,
                team.membership.state_of(name),
                looked.shards if looked is not None else (),
                looked.epoch if looked is not None else 0,
                looked.replicated if looked is not None else None,
                sight.unreachable.get(name, ""),
                team.replicator.path_monitor.bytes_per_s.get(name, 0.0),
                looked.verifying if looked is not None else 0,
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
