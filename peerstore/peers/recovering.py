"""Lost shards, made again from what the rest of their group has."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping

from peerstore.bandwidth import Bandwidth
from peerstore.cluster.nodes import NodeId
from peerstore.cluster.parity import ParityRecord
from peerstore.errors import PeerStoreError, PeerUnreachableError, RequestError, ShardNotFoundError
from peerstore.peers.looking import Sight
from peerstore.peers.messages import AskParities
from peerstore.peers.mixing import rebuild_shard
from peerstore.peers.pulling import Puller
from peerstore.peers.ranges import Ranges
from peerstore.peers.striping import kept_parity, rows_with
from peerstore.peers.tending import Tending
from peerstore.records import Group, ShardKey, ShardRecord
from peerstore.store import NodeStore

log = logging.getLogger(__name__)


class Recovering:
    """Rebuilds shards of one job onto this node."""

    def __init__(
        self,
        store: NodeStore,
        job: str,
        tending: Tending,
        *,
        pace: Bandwidth,
        streams: int,
        sight: Callable[[], Sight],
    ) -> None:
        self._store = store
        self._job = job
        self._tending = tending
        self._pace = pace
        self._puller = Puller(tending.peer, streams=streams)
        self._sight = sight

    def rebuild(
        self, shard: ShardRecord, nodes: Collection[str], *, holders: tuple[str, ...], stopped: Callable[[], bool]
    ) -> bool:
        """Have ``shard`` here again, out of parities on ``nodes``; False when it is here already."""
        began = time.monotonic()
        parities, silent = self._parities(shard.key.group, nodes)
        sources = self._sight().sources
        rows = rows_with(shard.key, [kept for kept, _ in parities.values()], held=sources.__contains__)
        if not rows and silent:
            raise PeerUnreachableError(
                f"{shard.key} is not rebuilt while {', '.join(silent)} cannot be asked for parities"
            )
        if not rows:
            raise ShardNotFoundError(f"the parities on {', '.join(sorted(nodes))} do not give {shard.key} back")
        problem: PeerStoreError | None = None
        for member, row in rows:
            try:
                made = self._rebuild(shard, member, row, parities, sources=sources, holders=holders, stopped=stopped)
            except (ShardNotFoundError, RequestError) as error:
                problem = error
                continue
            seconds = time.monotonic() - began
            members = ", ".join(row[0].stripe.members)
            log.info("job %s: %s was rebuilt from the group %s in %.2f s", self._job, shard.key, members, seconds)
            return made
        raise problem or ShardNotFoundError(f"{shard.key} cannot be rebuilt")

    def _parities(
        self, group: Group, nodes: Collection[str]
    ) -> tuple[dict[ShardKey, tuple[ParityRecord, ShardRecord]], list[str]]:
        """The parities of a version, and the nodes that could not be asked for theirs."""
        found, silent = {}, []
        for node in sorted(nodes):
            try:
                records = self._records(node, group)
            except (PeerStoreError, OSError) as error:
                log.warning("job %s: %s did not tell of its parities: %s", self._job, node, error)
                silent.append(node)
                continue
            for record in records:
                try:
                    parity = kept_parity(record).parity
                except RequestError as error:
                    log.error("job %s: %s has a parity that is none: %s", self._job, node, error)
                    continue
                if parity.keeper == node and record.key.job == self._job and record.key.group == group:
                    found[record.key] = (parity, record)
        return found, silent

    def _records(self, node: str, group: Group) -> list[ShardRecord]:
        if node == self._tending.me.id:
            return [record for record in self._store.copies.parities(self._job) if record.key.group == group]
        found: list[ShardRecord] = self._tending.peer(node).call("parities", AskParities(group), list[ShardRecord])
        return found

    def _rebuild(
        self,
        shard: ShardRecord,
        member: NodeId,
        row: tuple[ParityRecord, ...],
        parities: Mapping[ShardKey, tuple[ParityRecord, ShardRecord]],
        *,
        sources: Mapping[ShardKey, tuple[str, ...]],
        holders: tuple[str, ...],
        stopped: Callable[[], bool],
    ) -> bool:
        beside = {
            other: there
            for parity in row
            for other, there in zip(parity.stripe.members, parity.stripe.shards, strict=True)
            if there is not None and other != member
        }
        wanted = next(parity.stripe.shard(member) for parity in row)
        if wanted is None or wanted.checksums != shard.checksums:
            raise RequestError(f"{shard.key} is another shard in the parities of {', '.join(row[0].stripe.members)}")
        kept = {parity.keeper: record for parity, record in parities.values() if parity in row}
        many = len(beside) + len(kept)
        with Ranges(self._store, self._puller, self._pace, me=self._tending.me.id, sources=many) as ranges:
            shards = {
                other: ranges.reader(record, sources[record.key])
                for other, record in beside.items()
                if record.key in sources
            }
            parts = {keeper: ranges.reader(record, [keeper]) for keeper, record in kept.items()}
            return rebuild_shard(
                self._store, wanted, member, row, shards=shards, kept=parts, holders=holders, stopped=stopped
            )
