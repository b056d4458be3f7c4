"""Protection by parities, and the rebuild of lost shards from them.

::

    sealed shard ──> report its stripe to the group ──> each member reads its segment, verifies it, XORs it with those
                                                        of the other members, seals the parity and reports that
    protected when all members have done so ──> reported to the commit leader like a replicated shard

    a member dies or restarts ──> the nodes whose parities include its shards look for those shards
                              ──> the first living one rebuilds shards without a holder, from the others' shards and
                                  parities
    a member dies ──> the groups change, and all shards are protected in the new groups
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from peerstore.errors import PeerStoreError
from peerstore.membership.topology import NodeId, PeerNode
from peerstore.parity.parity_store import PARITY_RETRY_S, ParityStore, ParityTask, ShardRebuilder
from peerstore.parity.stripes import LostShard, StoredParity, assign_stripe_numbers, is_first_rebuilder, lost_shards
from peerstore.peers.peer_inventory import JobInventory
from peerstore.peers.peer_messages import ParityStatus, StripeReport
from peerstore.replication.replica_placement import parity_groups
from peerstore.replication.replication_policy import ReplicationStatus, ReplicationView
from peerstore.replication.replicator import ReplicationContext, redundancy_of_copies
from peerstore.shard_records import ShardInfo, ShardKey, ShardRecord, VersionId

log = logging.getLogger(__name__)

_RESYNC_S = 5.0
_REPEAT_REPORT_S = 20.0
"""Seconds after which a confirmed report is repeated; detects a node that lost its memory unnoticed."""
_MEMBER_WAIT_S = 2.0
"""Seconds for which a stripe waits for a member without a report, which may have no shard."""


@dataclass
class _MemberReport:
    """This node's report to one member on one version, and the member's status."""

    members: tuple[str, ...]
    parts: dict[int, int]
    life: int
    """Generation of the member: a restarted member may have lost its parities."""
    mine: int
    """Generation of this node at the time of the report."""
    at: float
    kept: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    why: str = ""
    said: int = 0
    """Number of statuses received; the response to the report may be older than the latest one."""


class ParityStrategy:
    """One job's parities, a :class:`~peerstore.replication.replicator.ReplicationStrategy`."""

    def __init__(
        self,
        shared: ReplicationContext,
        *,
        fetch_blob: Callable[[str, tuple[str, ...]], bytes],
        sight: Callable[[], JobInventory],
    ) -> None:
        self._shared = shared
        self._store = shared.store
        self._job = shared.job
        self._membership = shared.membership
        self._clock = shared.clock
        self._changed = shared.changed
        self._inventory = sight
        self._parity_store = ParityStore(shared, fetch_blob=fetch_blob, patience_s=_MEMBER_WAIT_S)
        self._rebuilder = ShardRebuilder(shared, sight)
        self._cached_members: tuple[Mapping[str, PeerNode], tuple[str, ...]] = ({}, ())
        self._numbers: dict[ShardKey, int] = {}
        self._member_reports: dict[tuple[str, VersionId], _MemberReport] = {}
        self._holders: dict[ShardKey, dict[str, int]] = defaultdict(dict)
        """Other holders of a shard that is stored here or in a parity here, with their generation."""
        self._retry_at: dict[str, float] = {}
        self._search_at: dict[ShardKey, float] = {}
        """Shards in parities here without a known holder, with the time of the next search."""

    @property
    def members(self) -> tuple[str, ...]:
        """This node's current group; empty if the node is alone."""
        return self._members(self._membership.alive)

    def partners(self, living: Mapping[str, PeerNode], _standby: tuple[NodeId, ...]) -> tuple[str, ...]:
        return self._others(self._members(living))

    def _members(self, living: Mapping[str, PeerNode]) -> tuple[str, ...]:
        if self._cached_members[0] is not living:  # grouping thousands of nodes is slow
            policy = self._shared.policy
            found = parity_groups(living.values(), policy.parity_group_size + 1, levels=policy.levels)
            mine = next((tuple(group) for group in found if self._membership.this_node.id in group), ())
            self._cached_members = living, mine
        return self._cached_members[1]

    def _others(self, members: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(member for member in members if member != self._membership.this_node.id)

    def statuses(self, look: ReplicationView) -> list[ReplicationStatus]:
        """Return the state of every shard that this node owns; a complete set of parities counts as one copy."""
        members = self._members(look.alive)
        return [self._status(fact, members, look.alive) for fact in self._owned_shards(look)]

    def _status(self, fact: ShardInfo, members: tuple[str, ...], living: Collection[str]) -> ReplicationStatus:
        key = fact.key
        more = sum(node in living for node in self.confirmed_holders(key, self._membership.generation_of))
        reports = [self._valid_report(member, key.version_id, members) for member in self._others(members)]
        kept = sum(report is not None and key.part in report.kept for report in reports)
        refused = sum(report is not None and key.part in report.refused for report in reports)
        if more:  # another full copy protects the shard
            return ReplicationStatus(key, True, 1 + more, 0, 0)
        if not reports:
            return ReplicationStatus(key, True, 1, 0, 1)
        return ReplicationStatus(key, True, 1 + (kept == len(reports)), len(reports) - kept - refused, refused)

    def _valid_report(self, member: str, group: VersionId, members: tuple[str, ...]) -> _MemberReport | None:
        """Return the member's report and status, or ``None`` if it restarted or the group changed."""
        asked = self._member_reports.get((member, group))
        holds = asked is not None and asked.members == members and asked.life == self._membership.generation_of(member)
        return asked if holds else None

    def _owned_shards(self, look: ReplicationView) -> list[ShardInfo]:
        """Return the shards that this node owns: its own, and replicas of which it is the first living holder."""
        me = self._membership.this_node.id
        found, known = [], self._store.jobs.versions(self._job)
        for fact in look.shards:
            there = [node for node in fact.holders if node in look.alive]
            if (not there or there[0] == me) and known.is_needed(fact.key.version_id):
                found.append(fact)
        return found

    def confirmed_holders(self, key: ShardKey, life: Callable[[str], int]) -> tuple[str, ...]:
        """Return the other nodes that hold the shard and have not restarted since they reported it."""
        return tuple(sorted(node for node, then in self._holders.get(key, {}).items() if life(node) <= then))

    def redundancy(
        self, key: ShardKey, holders: Collection[PeerNode], look: ReplicationView, level: str
    ) -> tuple[int, int]:
        fact = next((fact for fact in self._owned_shards(look) if fact.key == key), None)
        if fact is None:
            return redundancy_of_copies(holders, level)
        members = self._members(look.alive)
        copies = self._status(fact, members, look.alive).copies
        apart = {look.alive[member].failure_domain(level) for member in members}
        return copies, 1 if copies < 2 or len(apart) < len(members) else copies

    def last_errors(self, key: ShardKey) -> str:
        """Return the last error of the protection of a shard's version, or ""."""
        return next((a.why for (_, group), a in self._member_reports.items() if group == key.version_id and a.why), "")

    def has_pending(self, look: ReplicationView) -> bool:
        lost = self._missing(self._parity_store.stored(), look)
        return any(one.missing for one in self.statuses(look)) or any(
            one.rebuilders[0] == self._membership.this_node.id for one in lost
        )

    def leader_unreachable(self, leader: str, now: float) -> None:
        self._retry_at.setdefault(leader, now + PARITY_RETRY_S)

    @property
    def stored_parities(self) -> list[StoredParity]:
        """The sealed parities on this node."""
        return self._parity_store.stored()

    # -- messages of members ------------------------------------------------------------------------------------------

    def handle_stripe_report(self, sender: str, note: StripeReport) -> ParityStatus:
        """Record a member's report and return the state of its parities on this node."""
        if self._parity_store.record_report(sender, note):
            of = note.version_id
            with self._changed:
                for part in note.parts.values():
                    key = ShardKey(self._job, of.version, of.epoch, of.incarnation, of.attempt, part)
                    self.confirm_holder(key, sender, note.generation)
            self._shared.wake()
        return self._parity_store.status_for(sender, note.version_id, note.members)

    def handle_parity_status(self, sender: str, stake: ParityStatus) -> None:
        """Record the state of this node's shards in a member's parities."""
        with self._changed:
            asked = self._member_reports.get((sender, stake.version_id))
            if asked is not None and asked.members == stake.members:
                asked.kept, asked.refused, asked.why = set(stake.stored), set(stake.rejected), stake.why
                asked.said += 1
        self._shared.wake()

    def confirm_holder(self, key: ShardKey, node: str, life: int) -> None:
        """Record that ``node``, in its generation ``life``, holds a shard that is here or in a parity here."""
        self._holders[key][node] = max(life, self._holders[key].get(node, life))

    @property
    def protected_keys(self) -> set[ShardKey]:
        """Keys of the shards in this node's parities."""
        return {shard.key for one in self._parity_store.stored() for shard in one.shards.values()}

    def rebuild(self, shard: ShardRecord, holders: tuple[str, ...] = ()) -> bool:
        """Rebuild a shard without a holder from parities; return ``False`` if it is stored already."""
        kept = self._parity_store.stored()
        near = {member for one in kept if one.info.version_id == shard.key.version_id for member in one.members}
        nodes = {node for node in near | set(self.members) if node in self._membership.alive}
        return self._rebuilder.rebuild(shard, nodes, holders=holders)

    # -- the next piece of work ---------------------------------------------------------------------------------------

    def step(self, look: ReplicationView) -> float:
        """Rebuild a lost shard, or report stripes and make a parity; return the seconds until more may be due."""
        members = self._members(look.alive)
        kept = self._parity_store.stored()
        if self._rebuild_missing(self._missing(kept, look), look.alive):
            return 0.0
        self._report_stripes(members, look)
        due, next_task_s = self._parity_store.pending_tasks(members, kept)
        made = self._make_parity(due[0]) if due else False
        self._parity_store.prune(self._parity_store.stored() if made else kept)
        return 0.0 if due else self._wait_s(next_task_s)

    def _wait_s(self, next_task_s: float) -> float:
        """Return the seconds until the next work, unless a change wakes the thread earlier."""
        now = self._clock()
        until = [*self._retry_at.values(), *self._search_at.values()]
        return max(0.01, min([at - now for at in until if at > now] + [next_task_s, _RESYNC_S]))

    # -- lost shards --------------------------------------------------------------------------------------------------

    def _missing(self, kept: Collection[StoredParity], look: ReplicationView) -> list[LostShard]:
        """Return shards in this node's parities that are not stored here and have no known living holder."""
        if self._membership.member_list is None:  # without a member list, unknown nodes are not dead
            return []
        here = {fact.key for fact in look.shards}
        known = self._store.jobs.versions(self._job)
        wanted = [one for one in kept if known.is_needed(one.info.version_id)]
        life = self._membership.generation_of
        with self._changed:
            found = lost_shards(
                wanted,
                living=look.alive,
                held=lambda key: key in here or any(node in look.alive for node in self.confirmed_holders(key, life)),
            )
        return [one for one in found if self._membership.this_node.id in one.rebuilders]

    def _rebuild_missing(self, missing: Sequence[LostShard], living: Collection[str]) -> bool:
        """Search for missing shards and rebuild one without a holder; return whether one was rebuilt.

        A living owner has ``_MEMBER_WAIT_S`` seconds to report the shard. Then the first rebuilder searches, and
        each further one ``_RESYNC_S`` seconds later, when the shard usually exists again.
        """
        now, me = self._clock(), self._membership.this_node.id
        before = self._search_at
        self._search_at = {}
        for one in missing:
            patience_s = _MEMBER_WAIT_S if one.member in living else 0.0
            first = now + patience_s + _RESYNC_S * one.rebuilders.index(me)
            self._search_at[one.shard.key] = before.get(one.shard.key, first)
        due = [one for one in missing if self._search_at[one.shard.key] <= now]
        if not due:
            return False
        inventory = self._inventory()
        held = {fact.key for looked in inventory.nodes.values() for fact in looked.shards}
        for one in due:
            key = one.shard.key
            self._search_at[key] = self._clock() + _RESYNC_S
            with self._changed:
                owners = {one.member, *self._holders.get(key, {})}
            if any(node in living and node in inventory.unreachable for node in owners):  # the node may have the shard
                self._search_at[key] = self._clock() + PARITY_RETRY_S
            elif key not in held and is_first_rebuilder(one, me, inventory.nodes) and self._rebuild_lost(one):
                return True
        return False

    def _rebuild_lost(self, lost: LostShard) -> bool:
        key = lost.shard.key
        try:
            self.rebuild(lost.shard)
        except (PeerStoreError, OSError) as error:
            self._search_at[key] = self._clock() + PARITY_RETRY_S
            self._shared.totals.errors += 1
            log.warning("job %s: %s, lost with %s, was not rebuilt: %s", self._job, key, lost.member, error)
            return False
        with self._changed:
            self._changed.notify_all()
        return True

    # -- protection ---------------------------------------------------------------------------------------------------

    def _report_stripes(self, members: tuple[str, ...], look: ReplicationView) -> None:
        """Report the stripes of this node's shards to members that have not confirmed them."""
        facts = self._owned_shards(look)
        here = {fact.key for fact in look.shards}
        wanted = self._store.jobs.versions(self._job).is_needed
        known = {k: n for k, n in self._numbers.items() if k in here or wanted(k.version_id)}
        self._numbers = {**known, **assign_stripe_numbers(facts, known)}
        numbers: dict[VersionId, dict[int, int]] = defaultdict(dict)
        for fact in facts:
            numbers[fact.key.version_id][self._numbers[fact.key]] = fact.key.part
        with self._changed:
            self._member_reports = {
                (member, group): asked for (member, group), asked in self._member_reports.items() if group in numbers
            }
            for key in [key for key in self._holders if key not in here and not wanted(key.version_id)]:
                del self._holders[key]
        life = self._membership.generation_of(self._membership.this_node.id)
        for group in sorted(numbers):
            for member in self._others(members):
                self._send_report(member, StripeReport(group, members, numbers[group], life))

    def _send_report(self, member: str, note: StripeReport) -> None:
        now = self._clock()
        asked = self._member_reports.get((member, note.version_id))
        life = self._membership.generation_of(member)
        if asked is not None and (asked.members, asked.parts, asked.life, asked.mine) == (
            note.members,
            note.parts,
            life,
            note.generation,
        ):
            replicated = asked.kept >= set(note.parts.values())
            if now - asked.at < (_REPEAT_REPORT_S if replicated else _RESYNC_S):
                return
        if self._retry_at.get(member, 0.0) > now:
            return
        fresh = _MemberReport(note.members, note.parts, life, note.generation, now)
        statuses = fresh.said
        with self._changed:
            before = self._valid_report(member, note.version_id, note.members)
            if before is not None:
                fresh.kept, fresh.refused, fresh.why = before.kept, before.refused, before.why
            # before the call: the member may send a newer status before it responds
            self._member_reports[member, note.version_id] = fresh
        try:
            stake = self._membership.client_for(member).call("report_stripe", note, ParityStatus, timeout_s=5.0)
        except (PeerStoreError, OSError) as error:
            log.debug(
                "job %s: %s did not receive the report on version %d: %s",
                self._job,
                member,
                note.version_id.version,
                error,
            )
            self._retry_at[member] = now + PARITY_RETRY_S
            with self._changed:
                fresh.at, fresh.why = float("-inf"), f"{member}: {error}"
            return
        if fresh.said == statuses:
            self.handle_parity_status(member, stake)

    def _make_parity(self, due: ParityTask) -> bool:
        began = self._clock()
        try:
            size = self._parity_store.make(due)
        except (PeerStoreError, OSError):
            self._shared.totals.errors += 1
            return False
        self._shared.totals.record_copy(size, self._clock() - began)
        return True
