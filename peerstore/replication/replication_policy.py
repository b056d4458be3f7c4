"""The next shard to replicate, takeover for dead nodes, and the known replicas of every shard. Pure.

Every copy carries the list of nodes that were to hold its shard, the writer's first. As long as the first one lives and
has it, the copies are its business. When one of the list dies, or the first one starts again and may have lost what it
had, everybody left on it makes sure that the others left have the shard (asking one that has it costs a message), and
the first one left looks for new partners.

The shell (:mod:`~peerstore.replication.replicator`) says what this node sees right now, does what comes out, and says
how it went.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from peerstore.commit_protocol import CommitReports, PartsReport, is_needed
from peerstore.errors import (
    ArenaBusyError,
    ArenaFullError,
    FencedError,
    LeaseLostError,
    PeerUnreachableError,
    ShardDamagedError,
    ShardPendingError,
)
from peerstore.membership.topology import NodeId, PeerNode, failure_domains, stable_hash
from peerstore.replication.replica_placement import place_replicas
from peerstore.shard_records import ResumePoint, ShardInfo, ShardKey, ShardRecord, VersionId


class HeldShard(msgspec.Struct, frozen=True):
    """A sealed shard on this node, as far as its copies go."""

    key: ShardKey
    size_bytes: int
    holders: tuple[str, ...]
    """Who was to hold it, the writer's node first; this node is one of them."""
    confirmed: frozenset[str] = frozenset()
    """Other nodes that have said they hold it, and have not started again since."""
    refused: frozenset[str] = frozenset()
    """Nodes that have no room for it, for now."""
    needed: bool = True
    """Somebody may still need this version: it is not older than the settled one, nor of a past that was left."""


class ReplicationTask(msgspec.Struct, frozen=True):
    """Have ``target`` hold ``key``."""

    key: ShardKey
    target: str
    holders: tuple[str, ...]
    """Who is to hold it from then on, the one who answers for it first."""


class ReplicationStatus(msgspec.Struct, frozen=True):
    """How well one shard is kept."""

    key: ShardKey
    is_owner: bool
    """This node answers for it: the first of its living holders."""
    copies: int
    """Living nodes that are known to hold it, this one included."""
    missing: int
    """Copies that are still to be made, and can be."""
    unplaceable: int
    """Copies that cannot be made: there is no node for them, or none with room."""


def alive_holders(held: HeldShard, living: Collection[str]) -> tuple[str, ...]:
    return tuple(node for node in held.holders if node in living)


def target_holders(
    held: HeldShard, *, me: str, living: Collection[str], partners: Sequence[str], copies: int
) -> tuple[str, ...]:
    """Who is to hold the shard, as of now: the living of its list, then this node's partners, up to ``copies``."""
    there = alive_holders(held, living)
    if me not in there:
        there = (*there, me)
    if there[0] != me:
        return there
    new = [node for node in partners if node in living and node not in there and node not in held.refused]
    return (*there, *new[: max(0, copies - len(there))])


def partners_of(
    me: NodeId, living: Collection[PeerNode], standby: Collection[NodeId], *, copies: int, levels: Sequence[str]
) -> tuple[NodeId, ...]:
    """Place replicas of the shards of ``me`` on nodes with ranks, and on standby nodes only where those are too few."""
    ranks = [node for node in living if node.id not in standby]
    partners = place_replicas(ranks, copies=copies, levels=levels).partners.get(me, ())
    if not standby or len(partners) >= copies - 1:
        return partners
    others = substitute_partners(me, living, partners, levels)
    more = sorted(others, key=lambda node: node in standby)  # stable: the furthest first among each
    return (*partners, *more[: copies - 1 - len(partners)])


def substitute_partners(
    me: NodeId, living: Collection[PeerNode], partners: Collection[str], levels: Sequence[str]
) -> tuple[NodeId, ...]:
    """Who else could take a copy: the nodes that are furthest away first, in an order that each node has its own of."""
    where = failure_domains(living, levels)
    others = [node for node in where.order if node != me and node not in partners]
    if me not in where.order:
        return tuple(others)
    return tuple(sorted(others, key=lambda node: (-where.levels_apart(me, node), stable_hash(me, node))))


def pending_tasks(
    shards: Iterable[HeldShard], *, me: str, living: Collection[str], partners: Sequence[str], copies: int
) -> list[ReplicationTask]:
    """What is to be sent, the oldest version first, so that each gets its turn to be settled."""
    found = []
    for held in shards:
        if not held.needed:
            continue
        there = alive_holders(held, living)
        whole_list = len(there) == len(held.holders)
        if there and there[0] != me and there[0] in held.confirmed and whole_list:
            continue  # its first holder has it and looks after it
        holders = target_holders(held, me=me, living=living, partners=partners, copies=copies)
        found += [
            ReplicationTask(held.key, node, holders)
            for node in holders
            if node != me and node not in held.confirmed and node not in held.refused
        ]
    return sorted(found, key=lambda task: (task.key.version_id, task.key.part, task.target))


def shards_to_take_over(
    facts: Iterable[ShardInfo], *, me: str, living: Collection[str], dead: Collection[str]
) -> list[ShardInfo]:
    """Copies whose writer's node is dead, and of whose living holders ``me`` is the first: they are its own now."""
    return [
        fact
        for fact in facts
        if fact.holders and fact.holders[0] in dead and fact.holders[0] not in living
        if next((node for node in fact.holders if node in living), None) == me
    ]


def original_holders(me: str, said: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Who was to hold a shard that ``me`` lost, by what the others say of it; empty when ``me`` wrote it."""
    listed = next((holders for holders in said.values() if me in holders), ())
    if listed:
        return listed if listed[0] != me else ()
    owner = next((node for node, holders in said.items() if not holders), min(said, default=me))
    return (owner, me) if owner != me else ()


def should_retry_repair(record: ShardRecord, error: Exception, replicated: VersionId | None) -> bool:
    """Whether to try again to fetch a damaged shard that could not be: not what is of the past by now."""
    if isinstance(error, FencedError) and not isinstance(error, LeaseLostError):
        return False
    return replicated is None or record.key.version_id >= replicated


def replication_status(
    held: HeldShard, *, me: str, living: Collection[str], partners: Sequence[str], copies: int
) -> ReplicationStatus:
    """How well the shard is kept, as this node knows."""
    holders = target_holders(held, me=me, living=living, partners=partners, copies=copies)
    there = 1 + sum(node in held.confirmed for node in holders if node != me)
    if not held.needed:
        return ReplicationStatus(held.key, holders[0] == me, there, 0, 0)
    lacking = sum(node not in held.confirmed and node not in held.refused for node in holders if node != me)
    short = max(0, copies - there - lacking)
    return ReplicationStatus(held.key, holders[0] == me, there, lacking, short)


REPLICATION_RETRY_S = 1.0
REFUSED_RETRY_S = 20.0
RESYNC_S = 5.0
UNREACHABLE_AFTER = 3
"""Tries in a row that did not reach a node, which others say is alive, until another takes its copies."""
MAX_BUSY_S = 3.0
"""How long a node may have no room "for the moment": what it keeps it may give up only once a newer version is settled,
and that must not wait for it."""


@dataclass(frozen=True)
class ReplicationPolicy:
    """What is asked for."""

    copies: int = 2
    levels: tuple[str, ...] = ("zone", "rack")
    streams: int = 2
    parity_group_size: int = 4
    """With parity: nodes of a group that one of its nodes may be lost of, not counting that one."""
    reports_commits: bool = True
    """Whether it is told which versions have all their copies."""


@dataclass(frozen=True)
class ReplicationView:
    """The job as this node sees it right now."""

    now: float
    alive: Mapping[str, PeerNode]
    """The nodes that take part, this one included."""
    shards: Sequence[ShardInfo]
    """What is sealed here."""
    newest_replicated: VersionId | None
    epoch: int
    """The newest incarnation this node has heard of."""
    resume_point: ResumePoint | None
    """What that one went on from, as far as this node has heard."""
    generation_of: Callable[[str], int]
    """A number for each node that rises when it starts again: it may have lost what it held."""
    aborted_parts: Mapping[VersionId, Collection[int]] = field(default_factory=dict)
    """Parts that their writers on this node will never seal."""
    standby: tuple[NodeId, ...] = ()
    """Nodes without a rank: they get replicas only where the others do not suffice."""


@dataclass
class _ReplicaKnowledge:
    """What this node has learned about the copies of one shard."""

    listed: tuple[str, ...] = ()
    confirmed: dict[str, int] = field(default_factory=dict)
    """Who has said that it holds the shard, and in which of its lives."""
    refused: dict[str, float] = field(default_factory=dict)
    """Who has no room, and until when nobody asks again."""
    busy: dict[str, float] = field(default_factory=dict)
    """Who had no room for the moment, and since when."""
    obsolete_until: float = float("-inf")
    """Another node holds this version for one of the past, and may be asked again from then on."""
    why: dict[str, str] = field(default_factory=dict)
    """What kept the last copy from each node."""


class ReplicationState:
    """One job's copies as ``me`` knows them. Whoever calls sees to it that nobody else does at the same time."""

    def __init__(self, me: NodeId, protection: ReplicationPolicy) -> None:
        self._me = me
        self._protection = protection
        self._known: dict[ShardKey, _ReplicaKnowledge] = {}
        self._later: dict[str, float] = {}
        """Nodes that did not answer, and when they are tried again."""
        self._misses: dict[str, int] = {}
        """How often in a row they did not."""
        self._away: dict[str, float] = {}
        """Who did not too often, and until when nobody asks again."""
        self.reports = CommitReports(me)
        self._placed: tuple[tuple[PeerNode, ...], tuple[NodeId, ...], tuple[str, ...]] | None = None
        self._base: ResumePoint | None = None
        self._seen: tuple[ReplicationView, list[HeldShard], tuple[str, ...]] | None = None
        """What the last look came to; nothing was learned since."""

    # -- how things stand ---------------------------------------------------------------------------------------------

    def partners(self, living: Mapping[str, PeerNode], standby: tuple[NodeId, ...] = ()) -> tuple[str, ...]:
        """The nodes that hold replicas of the shards of this node."""
        nodes = tuple(living.values())
        if self._placed is None or self._placed[:2] != (nodes, standby):  # placing thousands of nodes takes a while
            partners = partners_of(
                self._me, nodes, standby, copies=self._protection.copies, levels=self._protection.levels
            )
            self._placed = nodes, standby, partners
        return self._placed[2]

    def _candidates(self, look: ReplicationView) -> tuple[str, ...]:
        """This node's partners, and then who else could take a copy that one of them cannot take."""
        partners = self.partners(look.alive, look.standby)
        refused = any(until > look.now for known in self._known.values() for until in known.refused.values())
        if not refused and not self._replaced(look):  # nobody looks at all nodes for nothing
            return partners
        return (*partners, *substitute_partners(self._me, look.alive.values(), partners, self._protection.levels))

    def _replaced(self, look: ReplicationView) -> frozenset[str]:
        """Living nodes that this one does not reach, as long as there are enough others: else it waits."""
        away = frozenset(node for node, until in self._away.items() if until > look.now)
        if not away:
            return away
        enough = len(look.alive.keys() - away - {self._me}) >= self._protection.copies - 1
        return away if enough else frozenset()

    def statuses(self, look: ReplicationView) -> list[ReplicationStatus]:
        """How well every shard here is kept."""
        shards, candidates = self._view(look)
        return [self._standing(held, look, candidates) for held in shards]

    def confirmed_holders(self, key: ShardKey, life: Callable[[str], int]) -> tuple[str, ...]:
        """Other nodes that are known to hold a shard."""
        known = self._known.get(key)
        return tuple(sorted(_still(known.confirmed, life))) if known is not None else ()

    def last_errors(self, key: ShardKey) -> str:
        """Why a shard lacks copies, as far as it is known."""
        known = self._known.get(key)
        return "; ".join(f"{node}: {why}" for node, why in known.why.items()) if known is not None else ""

    def _standing(self, held: HeldShard, look: ReplicationView, partners: Sequence[str]) -> ReplicationStatus:
        return replication_status(
            held, me=self._me, living=look.alive, partners=partners, copies=self._protection.copies
        )

    def _view(self, look: ReplicationView) -> tuple[list[HeldShard], tuple[str, ...]]:
        """What is kept here as far as its copies go, and who could take some."""
        if self._seen is None or self._seen[0] is not look:
            self._go_back(look.resume_point)
            self._seen = look, self._held(look), self._candidates(look)
        return self._seen[1:]

    def _go_back(self, base: ResumePoint | None) -> None:
        """The job went on from another version than before: what other nodes said of what they hold counts no more.

        Who had not heard of it took that version for superfluous, and may have given it up or not have mended it; now
        it is the one to be kept. Who holds it still says so again for a message.
        """
        if base != self._base:
            self._base = base
            for known in self._known.values():
                known.confirmed.clear()
                known.obsolete_until = float("-inf")

    def _held(self, look: ReplicationView) -> list[HeldShard]:
        here = {fact.key for fact in look.shards}
        self._known = {key: known for key, known in self._known.items() if key in here}
        replaced = self._replaced(look)
        return [self._one_held(fact, look, replaced) for fact in look.shards]

    def _one_held(self, fact: ShardInfo, look: ReplicationView, replaced: frozenset[str]) -> HeldShard:
        known = self._known.get(fact.key)
        if known is None:
            known = self._known[fact.key] = _ReplicaKnowledge()
        listed = fact.holders or known.listed or (self._me,)
        return HeldShard(
            fact.key,
            fact.size_bytes,
            listed if self._me in listed else (*listed, self._me),
            _still(known.confirmed, look.generation_of),
            replaced.union(node for node, until in known.refused.items() if until > look.now)
            if known.refused
            else replaced,
            needed=look.now >= known.obsolete_until
            and is_needed(
                fact.key.version_id,
                epoch=look.epoch,
                replicated=look.newest_replicated,
                whole=is_committed(fact, look.newest_replicated),
                base=look.resume_point,
            ),
        )

    # -- what to send -------------------------------------------------------------------------------------------------

    def next_task(self, look: ReplicationView) -> ReplicationTask | float:
        """The next thing to send; or for how many seconds there is nothing to do, unless something changes."""
        waiting = [node for node, until in self._later.items() if until > look.now]
        shards, candidates = self._view(look)
        tasks = pending_tasks(
            shards, me=self._me, living=look.alive, partners=candidates, copies=self._protection.copies
        )
        ready = next((task for task in tasks if task.target not in waiting), None)
        if ready is not None:
            return ready
        soon = min((self._later[node] - look.now for node in waiting), default=RESYNC_S) if tasks else RESYNC_S
        return min(soon, RESYNC_S)

    def task_done(self, task: ReplicationTask, life: int, base: ResumePoint | None) -> None:
        """The copy is there, verified. ``life`` is what the other node's was when this began, and ``base`` what it was
        told then that the job went on from.
        """
        known = self._learning(task.key)
        known.listed = task.holders
        if base == self._base:
            known.confirmed[task.target] = life
        known.busy.pop(task.target, None)
        known.why.pop(task.target, None)
        self._misses.pop(task.target, None)
        self._away.pop(task.target, None)

    def task_failed(self, task: ReplicationTask, error: Exception, now: float) -> bool:
        """The copy was not made. Whether this node should look at its own: it may be the bad one."""
        known = self._learning(task.key)
        known.why[task.target] = str(error)
        no_room = isinstance(error, ArenaBusyError) and not isinstance(error, ShardPendingError)
        busy_since = known.busy.setdefault(task.target, now) if no_room else now
        if not no_room:
            known.busy.pop(task.target, None)
        if isinstance(error, FencedError) and not isinstance(error, LeaseLostError):
            # The other node knows of a newer incarnation, or of a newer version that is safe. So will this one soon,
            # and it may also learn that the job goes on from this version.
            known.obsolete_until = now + REFUSED_RETRY_S
        elif isinstance(error, ArenaFullError | ShardDamagedError) or now - busy_since >= MAX_BUSY_S:
            known.refused[task.target] = now + REFUSED_RETRY_S
            known.busy.pop(task.target, None)
        elif isinstance(error, ArenaBusyError | LeaseLostError | PeerUnreachableError):
            self._later[task.target] = now + REPLICATION_RETRY_S
            if isinstance(error, PeerUnreachableError):
                self._misses[task.target] = self._misses.get(task.target, 0) + 1
                if self._misses[task.target] >= UNREACHABLE_AFTER:
                    self._away[task.target] = now + REFUSED_RETRY_S
        else:
            self._later[task.target] = now + 5 * REPLICATION_RETRY_S
        return isinstance(error, ShardDamagedError)

    def confirm_holder(self, key: ShardKey, node: str, life: int) -> None:
        """``node`` has been seen, in this one of its lives, to hold a shard of this node."""
        known = self._learning(key)
        known.confirmed[node] = max(life, known.confirmed.get(node, life))
        known.why.pop(node, None)

    def _learning(self, key: ShardKey) -> _ReplicaKnowledge:
        self._seen = None
        return self._known.setdefault(key, _ReplicaKnowledge())

    # -- what is to be counted ----------------------------------------------------------------------------------------

    def pending_reports(self, look: ReplicationView) -> tuple[str, list[PartsReport]]:
        """Who keeps the tally, and what it has not been told yet."""
        shards, candidates = self._view(look)
        standings = [self._standing(held, look, candidates) for held in shards if held.needed]
        parts_of = {fact.key.version_id: fact.parts for fact in look.shards}
        return self.reports.pending(
            standings,
            parts_of,
            living=look.alive,
            replicated=look.newest_replicated,
            life=look.generation_of(self._me),
            left_out=look.aborted_parts,
            standby=look.standby,
        )

    def leader_unreachable(self, sender: str, now: float) -> None:
        """The commit leader was not told: it is asked for nothing else for a while."""
        self._later.setdefault(sender, now + REPLICATION_RETRY_S)


def _still(confirmed: Mapping[str, int], life: Callable[[str], int]) -> frozenset[str]:
    return frozenset([node for node, then in confirmed.items() if life(node) == then])


def is_committed(fact: ShardInfo, replicated: VersionId | None) -> bool:
    """Whether all parts of a shard's version were sealed, as far as this node knows."""
    return fact.marked_committed or fact.key.version_id == replicated
