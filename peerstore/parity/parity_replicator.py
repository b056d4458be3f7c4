"""The thread that protects a job's shards by parity and rebuilds lost ones; same interface as the replicator.

::

    sealed here ──> tell the group which stripe it is in ──> each of them reads its segment, compares it, XORs it with
                                                             the other members' and seals the parity ──> told back:
    protected, when all of them have ──> counted (settling) like a shard that has its copies

    a member is gone, or starts again ──> who keeps parities with its shards in them looks for those
                                      ──> the first of the living makes what nobody has again, from the others' shards
                                          and parities
    a member is gone ──> the groups are formed anew, and everything is protected in the new ones
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from peerstore import deadlines
from peerstore.commit_protocol import CommitReports
from peerstore.errors import PeerStoreError
from peerstore.membership.topology import PeerNode
from peerstore.network_addresses import PathMonitor
from peerstore.parity.parity_store import PARITY_RETRY_S, ParityStore, ParityTask, ShardRebuilder
from peerstore.parity.stripes import LostShard, StoredParity, assign_stripe_numbers, is_first_rebuilder, lost_shards
from peerstore.peers.heartbeat_loop import SHUTDOWN_GRACE_S, HeartbeatLoop
from peerstore.peers.peer_inventory import JobInventory
from peerstore.peers.peer_messages import ParityStatus, StripeReport
from peerstore.rate_limiter import RateLimiter
from peerstore.replication.commit_tracker import CommitTracker, ReplicationTotals
from peerstore.replication.replica_placement import parity_groups
from peerstore.replication.replication_policy import ReplicationPolicy, ReplicationStatus, ReplicationTask
from peerstore.shard_records import ShardInfo, ShardKey, ShardRecord, VersionId
from peerstore.store.node_store import NodeStore

log = logging.getLogger(__name__)

_LOOK_S = 5.0
_ASK_AGAIN_S = 20.0
"""A node that lost everything and came back before anybody missed it is noticed by then."""
_PATIENCE_S = 2.0
"""How long a stripe waits for a member that has told nothing: it may have nothing to tell."""


@dataclass
class _Asked:
    """What one member of the group was told of one version, and answered."""

    members: tuple[str, ...]
    parts: dict[int, int]
    life: int
    """Rises when the member starts again: it may have lost what it kept."""
    mine: int
    """In which of its lives this node told it."""
    at: float
    kept: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    why: str = ""
    said: int = 0
    """How often it said something of itself; its answer may be older than that."""


class ParityReplicator:
    """One job's parities, beside :class:`~peerstore.replication.replicator.Replicator` and asked the same questions."""

    def __init__(
        self,
        store: NodeStore,
        job: str,
        membership: HeartbeatLoop,
        protection: ReplicationPolicy,
        *,
        pace: RateLimiter,
        blobs_of: Callable[[ShardInfo], tuple[str, ...]],
        fetch_blob: Callable[[str, tuple[str, ...]], bytes],
        sight: Callable[[], JobInventory],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._job = job
        self._membership = membership
        self.policy = protection
        self._sight = sight
        self._clock = clock
        self._changed = threading.Condition()
        self._keeping = ParityStore(
            store,
            job,
            membership,
            pace=pace,
            streams=protection.streams,
            blobs_of=blobs_of,
            fetch_blob=fetch_blob,
            patience_s=_PATIENCE_S,
            clock=clock,
        )
        self._recovering = ShardRebuilder(store, job, membership, pace=pace, streams=protection.streams, sight=sight)
        self._numbers: dict[ShardKey, int] = {}
        self._asked: dict[tuple[str, VersionId], _Asked] = {}
        self._again_s = _LOOK_S
        self._holders: dict[ShardKey, dict[str, int]] = defaultdict(dict)
        """Who holds it beside this node, and since which of its lives: what is here, or in a parity that is."""
        self._later: dict[str, float] = {}
        self._missed: dict[ShardKey, float] = {}
        """What is in parities here and nobody is known to hold, and when it is looked for."""
        self._news = True
        self._stop = threading.Event()
        self.totals = ReplicationTotals()
        self._reports = CommitReports(membership.this_node.id)
        self.commit_tracker = CommitTracker(
            store, job, membership, reports=self._reports, totals=self.totals, changed=self._changed
        )
        self.path_monitor = PathMonitor()
        """Parities are made of what is read, not sent: nothing is measured here."""
        self.in_flight: tuple[ReplicationTask, int] | None = None
        self._thread = threading.Thread(target=self._run, name="peerstore-share", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """What is on its way may come to its end, if it does that soon."""
        self._stop.set()
        self.wake()
        if self._thread.ident is not None:
            self._thread.join(deadlines.remaining_s(SHUTDOWN_GRACE_S))
            if self._thread.is_alive():
                self._membership.close_connections()
                self._thread.join()
        self.commit_tracker.close()

    def wake(self) -> None:
        """Something changed: a shard was sealed, a node came or went, somebody told something."""
        with self._changed:
            self._news = True
            self._changed.notify_all()

    # -- how things stand ---------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[str, ...]:
        """This node's group, as of now; nobody when it is alone."""
        return self._members(self._membership.alive)

    @property
    def partners(self) -> tuple[str, ...]:
        """Who keeps parities of what this node writes."""
        return tuple(member for member in self.members if member != self._membership.this_node.id)

    def _members(self, living: Mapping[str, PeerNode]) -> tuple[str, ...]:
        me = self._membership.this_node.id
        found = parity_groups(living.values(), self.policy.parity_group_size + 1, levels=self.policy.levels)
        return next((tuple(group) for group in found if me in group), ())

    def statuses(self) -> list[ReplicationStatus]:
        """How well every shard that this node answers for is kept; a sealed parity counts as one copy more."""
        living = self._membership.alive
        members = self._members(living)
        return [self._standing(fact, members, living) for fact in self._mine(living)]

    def _standing(self, fact: ShardInfo, members: tuple[str, ...], living: Collection[str]) -> ReplicationStatus:
        key = fact.key
        with self._changed:
            more = sum(node in living for node in self._holding(key))
            others = [member for member in members if member != self._membership.this_node.id]
            said = [self._stake(member, key.version_id, members) for member in others]
            kept = sum(stake is not None and key.part in stake.kept for stake in said)
            refused = sum(stake is not None and key.part in stake.refused for stake in said)
        if more:  # as good as a mirror
            return ReplicationStatus(key, True, 1 + more, 0, 0)
        if not said:
            return ReplicationStatus(key, True, 1, 0, 1)
        return ReplicationStatus(key, True, 1 + (kept == len(said)), len(said) - kept - refused, refused)

    def _stake(self, member: str, group: VersionId, members: tuple[str, ...]) -> _Asked | None:
        """What a member said that still holds."""
        asked = self._asked.get((member, group))
        holds = asked is not None and asked.members == members and asked.life == self._membership.generation_of(member)
        return asked if holds else None

    def _mine(self, living: Collection[str]) -> list[ShardInfo]:
        """The shards this node answers for: its own, and copies of which it is the first living holder."""
        me = self._membership.this_node.id
        found, known = [], self._store.jobs.versions(self._job)
        for fact in self._store.replicas.list_shards(self._job):
            there = [node for node in fact.holders if node in living]
            if (not there or there[0] == me) and known.is_needed(fact.key.version_id):
                found.append(fact)
        return found

    def holders(self, key: ShardKey) -> tuple[PeerNode, ...]:
        """The living nodes that are known to hold a shard of this node, this one first."""
        living = self._membership.alive
        with self._changed:
            there = sorted(self._holding(key))
        return (self._membership.this_node, *(living[node] for node in there if node in living))

    def _holding(self, key: ShardKey) -> list[str]:
        """Who has said that it holds the shard, and has not started again since."""
        return [
            node for node, then in self._holders.get(key, {}).items() if self._membership.generation_of(node) <= then
        ]

    def redundancy(self, key: ShardKey, level: str) -> tuple[int, int]:
        """How many copies a shard is as good as, and in how many domains: what may be lost is one less."""
        living = self._membership.alive
        members = self._members(living)
        fact = next((fact for fact in self._mine(living) if fact.key == key), None)
        if fact is None:
            return len(self.holders(key)), len({node.failure_domain(level) for node in self.holders(key)})
        copies = self._standing(fact, members, living).copies
        apart = {living[member].failure_domain(level) for member in members if member in living}
        return copies, 1 if copies < 2 or len(apart) < len(members) else copies

    def last_errors(self, key: ShardKey) -> str:
        """Why a shard is not protected, as far as it is known."""
        with self._changed:
            return next((a.why for (_, group), a in self._asked.items() if group == key.version_id and a.why), "")

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> bool:
        """Until ``ready`` says so; it is asked again after everything that changes."""
        with self._changed:
            return self._changed.wait_for(lambda: ready() or self._stop.is_set(), timeout_s) and not self._stop.is_set()

    @property
    def has_pending(self) -> bool:
        """Whether something is to be protected, or to be made again, that can be."""
        lost = self._missing(self._keeping.stored(), self._membership.alive)
        return any(one.missing for one in self.statuses()) or any(
            one.rebuilders[0] == self._membership.this_node.id for one in lost
        )

    @property
    def stored_parities(self) -> list[StoredParity]:
        """The parities on this node."""
        return self._keeping.stored()

    # -- what others say ----------------------------------------------------------------------------------------------

    def handle_stripe_report(self, sender: str, note: StripeReport) -> ParityStatus:
        """A member of the group says what it has; the answer is what it may count on."""
        if self._keeping.record_report(sender, note):
            for part in note.parts.values():
                key = ShardKey(
                    self._job,
                    note.version_id.version,
                    note.version_id.epoch,
                    note.version_id.incarnation,
                    note.version_id.attempt,
                    part,
                )
                self.confirm_holder(key, sender, note.generation)
            self.wake()
        return self._keeping.status_for(sender, note.version_id, note.members)

    def handle_parity_status(self, sender: str, stake: ParityStatus) -> None:
        """A member of the group says what it keeps."""
        with self._changed:
            asked = self._asked.get((sender, stake.version_id))
            if asked is not None and asked.members == stake.members:
                asked.kept, asked.refused, asked.why = set(stake.stored), set(stake.rejected), stake.why
                asked.said += 1
        self.wake()

    def confirm_holder(self, key: ShardKey, node: str, life: int) -> None:
        """``node`` has been seen, in this one of its lives, to hold a shard that is here or in a parity here."""
        with self._changed:
            self._holders[key][node] = max(life, self._holders[key].get(node, life))
            self._changed.notify_all()

    @property
    def protected_keys(self) -> set[ShardKey]:
        """What is in the parities on this node."""
        return {shard.key for one in self._keeping.stored() for shard in one.shards.values()}

    def rebuild(self, shard: ShardRecord, holders: tuple[str, ...] = ()) -> bool:
        """Have a shard here again that nobody has any more, out of parities; False when it is here already."""
        kept = self._keeping.stored()
        near = {member for one in kept if one.info.version_id == shard.key.version_id for member in one.members}
        nodes = {node for node in near | set(self.members) if node in self._membership.alive}
        return self._recovering.rebuild(shard, nodes, holders=holders, stopped=self._stop.is_set)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                if not self._step():
                    self._rest()
            except Exception:  # the thread must outlive any one shard
                log.exception("job %s: sharing failed", self._job)
                self._stop.wait(PARITY_RETRY_S)

    def _step(self) -> bool:
        """One piece of work; whether there may be more."""
        with self._changed:
            self._news = False
        living = self._membership.alive
        members = self._members(living)
        kept = self._keeping.stored()
        if self._rebuild_missing(self._missing(kept, living), living):
            return True
        self._report_stripes(members, living)
        due, self._again_s = self._keeping.pending_tasks(members, kept)
        made = self._make(due[0]) if due else False
        self._keeping.prune(self._keeping.stored() if made else kept)
        facts = self._mine(living)
        standings = [self._standing(fact, members, living) for fact in facts]
        self._report(facts, standings, living)
        return bool(due)

    def _report(
        self, facts: Sequence[ShardInfo], standings: Sequence[ReplicationStatus], living: Mapping[str, PeerNode]
    ) -> None:
        parts_of = {fact.key.version_id: fact.parts for fact in facts}
        known = self._store.jobs.versions(self._job)
        with self._changed:
            life = self._membership.generation_of(self._membership.this_node.id)
            sender, notes = self._reports.pending(
                *(standings, parts_of),
                living=living,
                replicated=known.replicated,
                life=life,
                left_out=known.aborted_parts,
                standby=self._membership.standby,
            )
        if self._later.get(sender, 0.0) <= self._clock() and not self.commit_tracker.report(sender, notes):
            self._later.setdefault(sender, self._clock() + PARITY_RETRY_S)

    def _rest(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._news or self._stop.is_set(), self._rest_s())

    def _rest_s(self) -> float:
        """How long there is nothing to do, unless something changes."""
        now = self._clock()
        until = [*self._later.values(), *self._missed.values()]
        return max(0.01, min([at - now for at in until if at > now] + [self._again_s, _LOOK_S]))

    # -- what was lost ------------------------------------------------------------------------------------------------

    def _missing(self, kept: Collection[StoredParity], living: Collection[str]) -> list[LostShard]:
        """What is in parities here and neither here nor known to be held by somebody who lives."""
        if self._membership.member_list is None:  # nobody is known yet: that is not to say that they are gone
            return []
        here = {fact.key for fact in self._store.replicas.list_shards(self._job)}
        known = self._store.jobs.versions(self._job)
        wanted = [one for one in kept if known.is_needed(one.info.version_id)]
        with self._changed:
            found = lost_shards(
                wanted,
                living=living,
                held=lambda key: key in here or any(node in living for node in self._holding(key)),
            )
        return [one for one in found if self._membership.this_node.id in one.rebuilders]

    def _rebuild_missing(self, missing: Sequence[LostShard], living: Collection[str]) -> bool:
        """Look for what is missing, and make one of those again that nobody has; whether one was made.

        Whose it is may say so itself, when it lives. Then the first heir looks, and each other one a while after the
        one before it: most often it is there by then.
        """
        now, me = self._clock(), self._membership.this_node.id
        before = self._missed
        self._missed = {}
        for one in missing:
            patience_s = _PATIENCE_S if one.member in living else 0.0
            first = now + patience_s + _LOOK_S * one.rebuilders.index(me)
            self._missed[one.shard.key] = before.get(one.shard.key, first)
        due = [one for one in missing if self._missed[one.shard.key] <= now]
        if not due:
            return False
        sight = self._sight()
        held = {fact.key for looked in sight.nodes.values() for fact in looked.shards}
        for one in due:
            key = one.shard.key
            self._missed[key] = self._clock() + _LOOK_S
            with self._changed:
                owners = {one.member, *self._holders.get(key, {})}
            if any(node in living and node in sight.unreachable for node in owners):  # it may have it
                self._missed[key] = self._clock() + PARITY_RETRY_S
            elif key not in held and is_first_rebuilder(one, me, sight.nodes) and self._rebuild_lost(one):
                return True
        return False

    def _rebuild_lost(self, lost: LostShard) -> bool:
        key = lost.shard.key
        try:
            self.rebuild(lost.shard)
        except (PeerStoreError, OSError) as error:
            self._missed[key] = self._clock() + PARITY_RETRY_S
            self.totals.errors += 1
            log.warning("job %s: %s, lost with %s, was not rebuilt: %s", self._job, key, lost.member, error)
            return False
        with self._changed:
            self._changed.notify_all()
        return True

    # -- what is to be protected --------------------------------------------------------------------------------------

    def _report_stripes(self, members: tuple[str, ...], living: Mapping[str, PeerNode]) -> None:
        """Say which stripes this node's shards are in, to those of the group who have not confirmed them."""
        facts = self._mine(living)
        here = {fact.key for fact in self._store.replicas.list_shards(self._job)}
        wanted = self._store.jobs.versions(self._job).is_needed
        known = {k: n for k, n in self._numbers.items() if k in here or wanted(k.version_id)}
        self._numbers = {**known, **assign_stripe_numbers(facts, known)}
        told: dict[VersionId, dict[int, int]] = defaultdict(dict)
        for fact in facts:
            told[fact.key.version_id][self._numbers[fact.key]] = fact.key.part
        with self._changed:
            self._asked = {(who, group): asked for (who, group), asked in self._asked.items() if group in told}
            for key in [key for key in self._holders if key not in here and not wanted(key.version_id)]:
                del self._holders[key]
        for group in sorted(told):
            for member in members:
                if member != self._membership.this_node.id:
                    self._send_report(
                        member,
                        StripeReport(
                            group, members, told[group], self._membership.generation_of(self._membership.this_node.id)
                        ),
                    )

    def _send_report(self, member: str, note: StripeReport) -> None:
        now = self._clock()
        asked = self._asked.get((member, note.version_id))
        life = self._membership.generation_of(member)
        if asked is not None and (asked.members, asked.parts, asked.life, asked.mine) == (
            note.members,
            note.parts,
            life,
            note.generation,
        ):
            replicated = asked.kept >= set(note.parts.values())
            if now - asked.at < (_ASK_AGAIN_S if replicated else _LOOK_S):
                return
        if self._later.get(member, 0.0) > now:
            return
        fresh = _Asked(note.members, note.parts, life, note.generation, now)
        with self._changed:
            before = self._stake(member, note.version_id, note.members)
            if before is not None:
                fresh.kept, fresh.refused, fresh.why = before.kept, before.refused, before.why
            said = fresh.said
            self._asked[member, note.version_id] = fresh  # before it is asked: it may say more before it has answered
        try:
            stake = self._membership.client_for(member).call("report_stripe", note, ParityStatus, timeout_s=5.0)
        except (PeerStoreError, OSError) as error:
            log.debug("job %s: %s was not told of version %d: %s", self._job, member, note.version_id.version, error)
            self._later[member] = now + PARITY_RETRY_S
            with self._changed:
                fresh.at, fresh.why = float("-inf"), f"{member}: {error}"
            return
        if fresh.said == said:
            self.handle_parity_status(member, stake)

    def _make(self, due: ParityTask) -> bool:
        began = self._clock()
        try:
            size = self._keeping.make(due, self._stop.is_set)
        except (PeerStoreError, OSError):
            self.totals.errors += 1
            return False
        self.totals.copies += 1
        self.totals.sent_bytes += size
        self.totals.seconds += self._clock() - began
        return True
