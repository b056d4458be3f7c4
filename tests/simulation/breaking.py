"""Rules of production, each broken on purpose, to see that the simulation finds out.

``python -m tests.simulation --break settle-half`` looks for the first schedule in which it shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from peerstore.commit_protocol import (
    CommitDecision,
    CommitReports,
    JobVersions,
    PartsReport,
    PartsTally,
    newest_committed,
)
from peerstore.errors import FencedError
from peerstore.membership.swim import SwimMembership
from peerstore.parity.parity_replicator import ParityReplicator
from peerstore.parity.parity_store import ParityStore
from peerstore.replication import replication_policy
from peerstore.replication.replica_placement import ReplicaPlacement, place_replicas
from peerstore.replication.replication_policy import HeldShard, ReplicationState
from peerstore.shard_records import ShardKey, VersionId
from peerstore.store import slot_eviction
from peerstore.store.job_table import JobTable
from tests.simulation import agent, memory, restoring, transfers
from tests.simulation.schedule import Schedule, schedule_of
from tests.simulation.world import Shape
from tieredckpt import resolve_step

_FEW_RANKS = Shape(nodes=4, copies=3, parts=2)
"""Either half of the machines may have a whole version: the job may go on in one, and the other not know of it."""
_PARITY = Shape(nodes=4, copies=1, parts=4, parity=3)


@dataclass(frozen=True)
class Broken:
    """What is put in the place of one decision, and which invariant is to notice."""

    where: Any
    name: str
    instead: Any
    noticed: str
    """Part of what the violation says."""
    kinds: tuple[str, ...] = ()
    """What happens in the schedules that look for it, in this order; empty: anything."""
    shape: Shape | None = None

    def schedule_of(self, seed: int) -> Schedule:
        return schedule_of(seed, self.kinds, self.shape)


_add, _check_fence, _complete, _plan = (
    PartsTally.add,
    JobTable.check_fence,
    CommitReports.decide,
    replication_policy.target_holders,
)
_torn, _leave_out = PartsTally.newly_aborted, JobVersions.abort_part


def _what_one_tells_is_all(tally: PartsTally, note: PartsReport) -> None:
    _add(tally, msgspec.structs.replace(note, total_parts=len(note.replicated_parts)))


def _all_may_write(jobs: JobTable, key: ShardKey) -> None:
    with contextlib.suppress(FencedError):
        _check_fence(jobs, key)


def _settle_alone(reports: CommitReports, *, quorum: bool, **known: Any) -> CommitDecision:
    return _complete(reports, quorum=True, **known)


def _left_out_is_there(tally: PartsTally, note: PartsReport) -> None:
    _add(tally, msgspec.structs.replace(note, sealed_parts=(*note.sealed_parts, *note.aborted_parts), aborted_parts=()))


def _believe_the_writer(versions: JobVersions, group: VersionId, part: int, _here: Any) -> bool:
    return _leave_out(versions, group, part, ())


def _tear_alone(jobs: JobTable, job: str, groups: Any) -> list[VersionId]:
    jobs.get_or_create(job).mark_aborted(groups)
    return []


def _what_is_on_its_way_is_torn(tally: PartsTally) -> tuple[VersionId, ...]:
    tally._torn |= {group: False for group, said in tally._said.items() if not said.whole}
    return _torn(tally)


def _what_is_whole_is_torn(tally: PartsTally) -> tuple[VersionId, ...]:
    tally._torn |= {group: False for group, said in tally._said.items() if said.whole}
    return _torn(tally)


def _no_new_partner(held: HeldShard, *, partners: Any, **known: Any) -> tuple[str, ...]:
    return _plan(held, partners=partners if len(held.holders) < 2 else (), **known)


def _as_if_without_racks(nodes: Any, copies: int, levels: tuple[str, ...]) -> ReplicaPlacement:
    return place_replicas([msgspec.structs.replace(node, labels=()) for node in nodes], copies=copies, levels=levels)


BROKEN = {
    "evict below whole": Broken(
        JobTable,
        "rollback_targets",
        lambda _, whole, mending=None: newest_committed(whole),
        "the last copy of a part of what",
    ),
    "keep all of the past": Broken(slot_eviction, "abandoned_slots", lambda *_, **__: [], "cannot go on"),
    "count what was not compared": Broken(transfers, "arrived_whole", lambda *_: True, "that has bytes nobody wrote"),
    "load what was not compared": Broken(restoring, "damaged_chunks", lambda *_: (), "was loaded with bytes"),
    "let the past write": Broken(
        JobTable,
        "check_fence",
        _all_may_write,
        "although the job belongs to",
        ("save", "restart", *["wait"] * 2, *["save"] * 3, *["wait"] * 2, *["save"] * 3),
        Shape(nodes=5, copies=3, parts=2),
    ),
    "begin without a quorum": Broken(
        SwimMembership,
        "_why_no_quorum",
        lambda _: "",
        "let an incarnation begin",
        ("save", "wait", "part", *["wait"] * 2, *["restart all"] * 2, "wait", *["save"] * 3, "wait"),
        _FEW_RANKS,
    ),
    "settle without a quorum": Broken(
        CommitReports,
        "decide",
        _settle_alone,
        "both halves of a partition settle",
        ("save", "wait", "part", *["wait"] * 2, "restart all", "wait", *["save"] * 3, "wait", *["save"] * 2, "wait"),
        Shape(nodes=3, copies=2, parts=1),
    ),
    "settle with what one tells": Broken(PartsTally, "add", _what_one_tells_is_all, "is settled, but part"),
    "count what was left out": Broken(PartsTally, "add", _left_out_is_there, "is whole without"),
    "tear what is on its way": Broken(
        PartsTally, "newly_aborted", _what_is_on_its_way_is_torn, "and nobody left a part out"
    ),
    "tear what is whole": Broken(PartsTally, "newly_aborted", _what_is_whole_is_torn, "two answers"),
    "believe who did not hear": Broken(JobVersions, "abort_part", _believe_the_writer, "for left out, and was sealed"),
    "keep what is torn": Broken(JobTable, "mark_aborted", _tear_alone, "what is torn still takes room"),
    "ignore racks": Broken(memory, "_placed", _as_if_without_racks, "in one rack"),
    "seek no new partner": Broken(
        replication_policy,
        "target_holders",
        _no_new_partner,
        "took the last copy",
        ("save", "wait", "crash", *["wait"] * 4, "crash"),
    ),
    "mend never": Broken(
        agent,
        "should_retry_repair",
        lambda *_: False,
        "its copies again",
        ("save", "wait", "part", *["corrupt"] * 2, "heal"),
    ),
    "believe who started again": Broken(SwimMembership, "generation_of", lambda *_: 1, "its copies again"),
    "believe parity's members who started again": Broken(
        ParityReplicator,
        "_holding",
        lambda sharing, key: list(sharing._holders.get(key, ())),
        "is not made again from parity",
        ("save", "wait", "crash and return"),
        _PARITY,
    ),
    "count on two parts of one node": Broken(
        ParityStore,
        "_useful",
        lambda _, kept: list(kept),
        "does not get its copies again",
        ("save", "wait", "crash and return"),
        _PARITY,
    ),
    "ask for ever": Broken(ReplicationState, "task_done", lambda *_: None, "and no end"),
    "choose what is torn": Broken(resolve_step.Candidate, "is_complete", True, "never was whole"),
    "choose alone": Broken(
        restoring,
        "elect_step",
        lambda votes: max(votes[0], default=None),
        "do not load the same step",
        ("save", "wait", "save", "noise", *["restart all", "wait", "wait"] * 3),
    ),
    "choose the oldest": Broken(resolve_step, "_order", lambda group: (-group.version,), "could be reached"),
    "choose what was left": Broken(
        resolve_step.IncarnationBranches,
        "supersede",
        lambda *_: False,
        "had left it behind",
        ("save", "wait", "part", *["save"] * 2, "wait", "restart all", "wait", *["save"] * 2, "heal", "restart all"),
        _FEW_RANKS,
    ),
    "take silence for absence": Broken(
        resolve_step.Resolution, "unreachable", property(lambda _: (), lambda *_: None), "starts from nothing"
    ),
}


@contextlib.contextmanager
def broken_rule(name: str | None) -> Iterator[None]:
    """While the block runs, this rule does not hold; ``None`` breaks none."""
    if name is None:
        yield
        return
    rule = BROKEN[name]
    kept = vars(rule.where)[rule.name]
    setattr(rule.where, rule.name, rule.instead)
    try:
        yield
    finally:
        setattr(rule.where, rule.name, kept)
