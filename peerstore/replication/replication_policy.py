"""The next shard to replicate, takeover for dead nodes, and the known replicas of every shard. Pure.

Every copy stores the list of its shard's holders, the writer's node first. While the first holder lives and has the
shard, it alone makes the copies. When a holder dies, each remaining holder makes sure that the others have the shard.
The same happens when the first holder restarts, because it may have lost its shards. Checking a holder that has the
shard costs one message. The first remaining holder then chooses new partners.

The caller (:mod:`~peerstore.replication.mirror_strategy`) passes this node's current view in, carries out the tasks,
and reports their results.
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
    """A sealed shard on this node, with the state of its replicas."""

    key: ShardKey
    size_bytes: int
    holders: tuple[str, ...]
    """Nodes chosen to hold it, the writer's node first; this node is one of them."""
    confirmed: frozenset[str] = frozenset()
    """Other nodes that confirmed that they hold it, and have not restarted since."""
    refused: frozenset[str] = frozenset()
    """Nodes that currently have no room for it."""
    needed: bool = True
    """Whether a restore may need this version: not older than the replicated one, nor of a left branch."""


class ReplicationTask(msgspec.Struct, frozen=True):
    """Replicate ``key`` to ``target``."""

    key: ShardKey
    target: str
    holders: tuple[str, ...]
    """The holders after the task, the owner first."""


class ReplicationStatus(msgspec.Struct, frozen=True):
    """The replication state of one shard."""

    key: ShardKey
    is_owner: bool
    """Whether this node is the first of the shard's living holders."""
    copies: int
    """Number of living nodes known to hold it, including this node."""
    missing: int
    """Number of copies that are not made yet and can be made."""
    unplaceable: int
    """Number of copies that cannot be made, because no other node has room."""
    is_needed: bool = True
    """Whether a restore may need this version; the leader gets no report on others."""


def alive_holders(held: HeldShard, living: Collection[str]) -> tuple[str, ...]:
    return tuple(node for node in held.holders if node in living)


def target_holders(
    held: HeldShard, *, me: str, living: Collection[str], partners: Sequence[str], copies: int
) -> tuple[str, ...]:
    """Return the nodes to hold the shard now: living holders, then this node's partners, up to ``copies``."""
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
    """Return the nodes for replicas of the shards of ``me``.

    Nodes with ranks come first. Standby nodes are used only if there are too few nodes with ranks.
    """
    ranks = [node for node in living if node.id not in standby]
    partners = place_replicas(ranks, copies=copies, levels=levels).partners.get(me, ())
    if not standby or len(partners) >= copies - 1:
        return partners
    others = substitute_partners(me, living, partners, levels)
    more = sorted(others, key=lambda node: node in standby)  # stable: the most distant first within each group
    return (*partners, *more[: copies - 1 - len(partners)])


def substitute_partners(
    me: NodeId, living: Collection[PeerNode], partners: Collection[str], levels: Sequence[str]
) -> tuple[NodeId, ...]:
    """Return the other nodes that could store a replica, the most distant first.

    The order of equally distant nodes is specific to ``me``.
    """
    where = failure_domains(living, levels)
    others = [node for node in where.order if node != me and node not in partners]
    if me not in where.order:
        return tuple(others)
    return tuple(sorted(others, key=lambda node: (-where.levels_apart(me, node), stable_hash(me, node))))


def pending_tasks(
    shards: Iterable[HeldShard], *, me: str, living: Collection[str], partners: Sequence[str], copies: int
) -> list[ReplicationTask]:
    """Return the replication tasks, oldest version first, so that each version can become replicated."""
    found = []
    for held in shards:
        if not held.needed:
            continue
        there = alive_holders(held, living)
        whole_list = len(there) == len(held.holders)
        if there and there[0] != me and there[0] in held.confirmed and whole_list:
            continue  # the first holder has it and makes the copies
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
    """Return the replicas whose writer's node is dead and whose first living holder is ``me``."""
    return [
        fact
        for fact in facts
        if fact.holders and fact.holders[0] in dead and fact.holders[0] not in living
        if next((node for node in fact.holders if node in living), None) == me
    ]


def original_holders(me: str, said: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the reported holders of a shard that ``me`` lost; empty if ``me`` wrote it."""
    listed = next((holders for holders in said.values() if me in holders), ())
    if listed:
        return listed if listed[0] != me else ()
    owner = next((node for node, holders in said.items() if not holders), min(said, default=me))
    return (owner, me) if owner != me else ()


def should_retry_repair(record: ShardRecord, error: Exception, replicated: VersionId | None) -> bool:
    """Return whether to retry the repair of a damaged shard: not if its version is superseded."""
    if isinstance(error, FencedError) and not isinstance(error, LeaseLostError):
        return False
    return replicated is None or record.key.version_id >= replicated


def replication_status(
    held: HeldShard, *, me: str, living: Collection[str], partners: Sequence[str], copies: int
) -> ReplicationStatus:
    """Return the replication state of the shard, as this node knows it."""
    holders = target_holders(held, me=me, living=living, partners=partners, copies=copies)
    there = 1 + sum(node in held.confirmed for node in holders if node != me)
    if not held.needed:
        return ReplicationStatus(held.key, holders[0] == me, there, 0, 0, is_needed=False)
    lacking = sum(node not in held.confirmed and node not in held.refused for node in holders if node != me)
    short = max(0, copies - there - lacking)
    return ReplicationStatus(held.key, holders[0] == me, there, lacking, short)


REPLICATION_RETRY_S = 1.0
REFUSED_RETRY_S = 20.0
RESYNC_S = 5.0
UNREACHABLE_AFTER = 3
"""Consecutive failed attempts to reach a living node after which another node gets its replicas."""
MAX_BUSY_S = 3.0
"""Seconds for which a node may report that it temporarily has no room.

A node can evict old versions only after a newer version is replicated, so that must not wait for this node.
"""


@dataclass(frozen=True)
class ReplicationPolicy:
    """How many replicas a job needs, and where."""

    copies: int = 2
    levels: tuple[str, ...] = ("zone", "rack")
    streams: int = 2
    parity_group_size: int = 4
    """With parity: number of nodes in a group besides the one that may be lost."""
    reports_commits: bool = True
    """Whether this node reports replicated parts to the commit leader."""


@dataclass(frozen=True)
class ReplicationView:
    """The job as this node sees it at one moment."""

    now: float
    alive: Mapping[str, PeerNode]
    """The live nodes of the job, including this node."""
    shards: Sequence[ShardInfo]
    """The sealed shards on this node."""
    newest_replicated: VersionId | None
    epoch: int
    """The newest epoch that this node knows."""
    resume_point: ResumePoint | None
    """The version that the newest incarnation resumed from, as far as this node knows."""
    generation_of: Callable[[str], int]
    """Returns a node's generation, which rises when it restarts and may have lost its shards."""
    aborted_parts: Mapping[VersionId, Collection[int]] = field(default_factory=dict)
    """Parts that their writers on this node will never seal."""
    standby: tuple[NodeId, ...] = ()
    """Nodes without a rank: they get replicas only if the other nodes do not suffice."""


@dataclass
class _ReplicaKnowledge:
    """This node's knowledge about the replicas of one shard."""

    listed: tuple[str, ...] = ()
    confirmed: dict[str, int] = field(default_factory=dict)
    """Nodes that confirmed that they hold the shard, with their generation at that time."""
    refused: dict[str, float] = field(default_factory=dict)
    """Nodes without room, with the time until which they are not tried."""
    busy: dict[str, float] = field(default_factory=dict)
    """Nodes that temporarily have no room, with the time of the first refusal."""
    obsolete_until: float = float("-inf")
    """Time until which the shard is not sent, because another node refused its version as obsolete."""
    why: dict[str, str] = field(default_factory=dict)
    """The last error of each node."""


class ReplicationState:
    """One job's replicas as ``me`` knows them. Not thread-safe: the caller holds a lock."""

    def __init__(self, me: NodeId, protection: ReplicationPolicy) -> None:
        self._me = me
        self._protection = protection
        self._known: dict[ShardKey, _ReplicaKnowledge] = {}
        self._retry_at: dict[str, float] = {}
        """Nodes to which a transfer failed, with the time of the next attempt."""
        self._failed_attempts: dict[str, int] = {}
        """Number of consecutive failed attempts to reach each node."""
        self._unreachable_until: dict[str, float] = {}
        """Nodes that were unreachable too often, with the time until which they are not tried."""
        self._cached_partners: tuple[tuple[PeerNode, ...], tuple[NodeId, ...], tuple[str, ...]] | None = None
        self._base: ResumePoint | None = None
        self._cached_view: tuple[ReplicationView, list[HeldShard], tuple[str, ...]] | None = None
        """The result for the last view; ``None`` after new information."""

    def partners(self, living: Mapping[str, PeerNode], standby: tuple[NodeId, ...] = ()) -> tuple[str, ...]:
        """The nodes that hold replicas of the shards of this node."""
        nodes = tuple(living.values())
        if self._cached_partners is None or self._cached_partners[:2] != (
            nodes,
            standby,
        ):  # placing thousands of nodes is slow
            partners = partners_of(
                self._me, nodes, standby, copies=self._protection.copies, levels=self._protection.levels
            )
            self._cached_partners = nodes, standby, partners
        return self._cached_partners[2]

    def _candidates(self, look: ReplicationView) -> tuple[str, ...]:
        """Return this node's partners, and then substitutes if a partner refuses replicas or is unreachable."""
        partners = self.partners(look.alive, look.standby)
        refused = any(until > look.now for known in self._known.values() for until in known.refused.values())
        if not refused and not self._unreachable_nodes(look):  # substitutes cost a look at all nodes
            return partners
        return (*partners, *substitute_partners(self._me, look.alive.values(), partners, self._protection.levels))

    def _unreachable_nodes(self, look: ReplicationView) -> frozenset[str]:
        """Return living nodes that this node cannot reach; empty if too few other nodes remain."""
        away = frozenset(node for node, until in self._unreachable_until.items() if until > look.now)
        if not away:
            return away
        enough = len(look.alive.keys() - away - {self._me}) >= self._protection.copies - 1
        return away if enough else frozenset()

    def statuses(self, look: ReplicationView) -> list[ReplicationStatus]:
        """Return the replication state of every shard on this node."""
        shards, candidates = self._view(look)
        return [self._status(held, look, candidates) for held in shards]

    def confirmed_holders(self, key: ShardKey, life: Callable[[str], int]) -> tuple[str, ...]:
        """Return the other nodes that are known to hold a shard."""
        known = self._known.get(key)
        return tuple(sorted(_confirmed_now(known.confirmed, life))) if known is not None else ()

    def last_errors(self, key: ShardKey) -> str:
        """Return the last errors of a shard's replication, or ""."""
        known = self._known.get(key)
        return "; ".join(f"{node}: {why}" for node, why in known.why.items()) if known is not None else ""

    def _status(self, held: HeldShard, look: ReplicationView, partners: Sequence[str]) -> ReplicationStatus:
        return replication_status(
            held, me=self._me, living=look.alive, partners=partners, copies=self._protection.copies
        )

    def _view(self, look: ReplicationView) -> tuple[list[HeldShard], tuple[str, ...]]:
        """Return the shards on this node and the nodes that can store replicas."""
        if self._cached_view is None or self._cached_view[0] is not look:
            self._set_resume_point(look.resume_point)
            self._cached_view = look, self._held(look), self._candidates(look)
        return self._cached_view[1:]

    def _set_resume_point(self, base: ResumePoint | None) -> None:
        """Forget all confirmations if the job resumed from another version than before.

        Until a node knew the resumed version, it may have evicted it as superseded, or not have repaired it. A node
        that still holds it confirms that again at the cost of one message.
        """
        if base != self._base:
            self._base = base
            for known in self._known.values():
                known.confirmed.clear()
                known.obsolete_until = float("-inf")

    def _held(self, look: ReplicationView) -> list[HeldShard]:
        here = {fact.key for fact in look.shards}
        self._known = {key: known for key, known in self._known.items() if key in here}
        replaced = self._unreachable_nodes(look)
        return [self._held_shard(fact, look, replaced) for fact in look.shards]

    def _held_shard(self, fact: ShardInfo, look: ReplicationView, replaced: frozenset[str]) -> HeldShard:
        known = self._known.get(fact.key)
        if known is None:
            known = self._known[fact.key] = _ReplicaKnowledge()
        listed = fact.holders or known.listed or (self._me,)
        return HeldShard(
            fact.key,
            fact.size_bytes,
            listed if self._me in listed else (*listed, self._me),
            _confirmed_now(known.confirmed, look.generation_of),
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

    # -- tasks --------------------------------------------------------------------------------------------------------

    def next_task(self, look: ReplicationView) -> ReplicationTask | None:
        """Return the next task to carry out now."""
        return next((task for task in self._tasks(look) if self._retry_at.get(task.target, look.now) <= look.now), None)

    def retry_s(self, look: ReplicationView) -> float:
        """Return the seconds until the next look for a task."""
        waiting = [until - look.now for until in self._retry_at.values() if until > look.now]
        return min([*waiting, RESYNC_S]) if self._tasks(look) else RESYNC_S

    def _tasks(self, look: ReplicationView) -> list[ReplicationTask]:
        shards, candidates = self._view(look)
        return pending_tasks(
            shards, me=self._me, living=look.alive, partners=candidates, copies=self._protection.copies
        )

    def task_done(self, task: ReplicationTask, life: int, base: ResumePoint | None) -> None:
        """Record that the copy is verified on the target.

        ``life`` is the target's generation when the task began, and ``base`` the resume point that was sent to it.
        """
        known = self._update_knowledge(task.key)
        known.listed = task.holders
        if base == self._base:
            known.confirmed[task.target] = life
        known.busy.pop(task.target, None)
        known.why.pop(task.target, None)
        self._failed_attempts.pop(task.target, None)
        self._unreachable_until.pop(task.target, None)

    def task_failed(self, task: ReplicationTask, error: Exception, now: float) -> bool:
        """Record the error; return whether this node should verify its own copy, which may be damaged."""
        known = self._update_knowledge(task.key)
        known.why[task.target] = str(error)
        no_room = isinstance(error, ArenaBusyError) and not isinstance(error, ShardPendingError)
        busy_since = known.busy.setdefault(task.target, now) if no_room else now
        if not no_room:
            known.busy.pop(task.target, None)
        if isinstance(error, FencedError) and not isinstance(error, LeaseLostError):
            # The other node knows a newer incarnation or a newer replicated version. This node will learn it soon,
            # and may also learn that the job resumed from this version.
            known.obsolete_until = now + REFUSED_RETRY_S
        elif isinstance(error, ArenaFullError | ShardDamagedError) or now - busy_since >= MAX_BUSY_S:
            known.refused[task.target] = now + REFUSED_RETRY_S
            known.busy.pop(task.target, None)
        elif isinstance(error, ArenaBusyError | LeaseLostError | PeerUnreachableError):
            self._retry_at[task.target] = now + REPLICATION_RETRY_S
            if isinstance(error, PeerUnreachableError):
                self._failed_attempts[task.target] = self._failed_attempts.get(task.target, 0) + 1
                if self._failed_attempts[task.target] >= UNREACHABLE_AFTER:
                    self._unreachable_until[task.target] = now + REFUSED_RETRY_S
        else:
            self._retry_at[task.target] = now + 5 * REPLICATION_RETRY_S
        return isinstance(error, ShardDamagedError)

    def confirm_holder(self, key: ShardKey, node: str, life: int) -> None:
        """Record that ``node`` holds a shard, in its generation ``life``."""
        known = self._update_knowledge(key)
        known.confirmed[node] = max(life, known.confirmed.get(node, life))
        known.why.pop(node, None)

    def _update_knowledge(self, key: ShardKey) -> _ReplicaKnowledge:
        """Return the shard's entry for a change, and drop the cached view."""
        self._cached_view = None
        return self._known.setdefault(key, _ReplicaKnowledge())

    def leader_unreachable(self, sender: str, now: float) -> None:
        """Delay other transfers to the commit leader after a report to it failed."""
        self._retry_at.setdefault(sender, now + REPLICATION_RETRY_S)


def pending_reports(
    reports: CommitReports, statuses: Iterable[ReplicationStatus], look: ReplicationView, *, me: str
) -> tuple[str, list[PartsReport]]:
    """Return the commit leader and the reports that it has not received."""
    return reports.pending(
        [one for one in statuses if one.is_needed],
        {fact.key.version_id: fact.parts for fact in look.shards},
        living=look.alive,
        replicated=look.newest_replicated,
        life=look.generation_of(me),
        left_out=look.aborted_parts,
        standby=look.standby,
    )


def _confirmed_now(confirmed: Mapping[str, int], life: Callable[[str], int]) -> frozenset[str]:
    return frozenset([node for node, then in confirmed.items() if life(node) == then])


def is_committed(fact: ShardInfo, replicated: VersionId | None) -> bool:
    """Return whether all parts of the shard's version are sealed, as far as this node knows."""
    return fact.marked_committed or fact.key.version_id == replicated
