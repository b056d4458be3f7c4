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
from peerstore.parity.parity_store import ParityStore
from peerstore.parity.parity_strategy import ParityStrategy
from peerstore.replication import replication_policy
from peerstore.replication.replica_placement import ReplicaPlacement, place_replicas
from peerstore.replication.replication_policy import HeldShard, ReplicationState
from peerstore.shard_records import ShardKey, VersionId
from peerstore.store import slot_eviction
from peerstore.store.incarnations import Incarnations
from peerstore.store.job_table import JobTable
from tests.simulation import agent, memory, simulated_restore, transfers
from tests.simulation.schedule import Schedule, schedule_of
from tests.simulation.world import ClusterShape
from tieredckpt import resolve_step

_FEW_RANKS = ClusterShape(nodes=4, copies=3, parts=2)
"""Either half of the machines may have a whole version: the job may go on in one, and the other not know of it."""
_PARITY = ClusterShape(nodes=4, copies=1, parts=4, parity=3)


@dataclass(frozen=True)
class BrokenRule:
    """What is put in the place of one decision, and which invariant is to notice."""

    where: Any
    name: str
    instead: Any
    noticed: str
    """Part of what the violation says."""
    kinds: tuple[str, ...] = ()
    """What happens in the schedules that look for it, in this order; empty: anything."""
    shape: ClusterShape | None = None

    def schedule_of(self, seed: int) -> Schedule:
        return schedule_of(seed, self.kinds, self.shape)


_add, _check_fence, _complete, _plan = (
    PartsTally.add,
    Incarnations.check_fence,
    CommitReports.decide,
    replication_policy.target_holders,
)
_torn, _leave_out = PartsTally.newly_aborted, JobVersions.abort_part


def _one_report_completes(tally: PartsTally, note: PartsReport) -> None:
    _add(tally, msgspec.structs.replace(note, total_parts=len(note.replicated_parts)))


def _ignore_fence(incarnations: Incarnations, key: ShardKey) -> None:
    with contextlib.suppress(FencedError):
        _check_fence(incarnations, key)


def _decide_without_quorum(reports: CommitReports, *, quorum: bool, **known: Any) -> CommitDecision:
    return _complete(reports, quorum=True, **known)


def _count_aborted_as_sealed(tally: PartsTally, note: PartsReport) -> None:
    _add(tally, msgspec.structs.replace(note, sealed_parts=(*note.sealed_parts, *note.aborted_parts), aborted_parts=()))


def _trust_the_writer(versions: JobVersions, group: VersionId, part: int, _here: Any) -> bool:
    return _leave_out(versions, group, part, ())


def _abort_alone(jobs: JobTable, job: str, groups: Any) -> list[VersionId]:
    jobs.get_or_create(job).mark_aborted(groups)
    return []


def _abort_incomplete(tally: PartsTally) -> tuple[VersionId, ...]:
    tally._aborted |= {group: False for group, said in tally._reports.items() if not said.whole}
    return _torn(tally)


def _abort_complete(tally: PartsTally) -> tuple[VersionId, ...]:
    tally._aborted |= {group: False for group, said in tally._reports.items() if said.whole}
    return _torn(tally)


def _keep_old_partners(held: HeldShard, *, partners: Any, **known: Any) -> tuple[str, ...]:
    return _plan(held, partners=partners if len(held.holders) < 2 else (), **known)


def _ignore_racks(nodes: Any, copies: int, levels: tuple[str, ...]) -> ReplicaPlacement:
    return place_replicas([msgspec.structs.replace(node, labels=()) for node in nodes], copies=copies, levels=levels)


BROKEN = {
    "evict below whole": BrokenRule(
        JobTable,
        "rollback_targets",
        lambda _, whole, mending=None: newest_committed(whole),
        "the last copy of a part of what",
    ),
    "keep all of the past": BrokenRule(slot_eviction, "abandoned_slots", lambda *_, **__: [], "cannot go on"),
    "count what was not compared": BrokenRule(
        transfers, "is_chunk_intact", lambda *_: True, "that has bytes nobody wrote"
    ),
    "load what was not compared": BrokenRule(
        simulated_restore, "damaged_chunks", lambda *_: (), "was loaded with bytes"
    ),
    "let the past write": BrokenRule(
        Incarnations,
        "check_fence",
        _ignore_fence,
        "although the job belongs to",
        ("save", "restart", *["wait"] * 2, *["save"] * 3, *["wait"] * 2, *["save"] * 3),
        ClusterShape(nodes=5, copies=3, parts=2),
    ),
    "begin without a quorum": BrokenRule(
        SwimMembership,
        "_why_no_quorum",
        lambda _: "",
        "let an incarnation begin",
        ("save", "wait", "part", *["wait"] * 2, *["restart all"] * 2, "wait", *["save"] * 3, "wait"),
        _FEW_RANKS,
    ),
    "settle without a quorum": BrokenRule(
        CommitReports,
        "decide",
        _decide_without_quorum,
        "both halves of a partition settle",
        ("save", "wait", "part", *["wait"] * 2, "restart all", "wait", *["save"] * 3, "wait", *["save"] * 2, "wait"),
        ClusterShape(nodes=3, copies=2, parts=1),
    ),
    "settle with what one tells": BrokenRule(PartsTally, "add", _one_report_completes, "is settled, but part"),
    "count what was left out": BrokenRule(PartsTally, "add", _count_aborted_as_sealed, "is whole without"),
    "tear what is on its way": BrokenRule(PartsTally, "newly_aborted", _abort_incomplete, "and nobody left a part out"),
    "tear what is whole": BrokenRule(PartsTally, "newly_aborted", _abort_complete, "two answers"),
    "believe who did not hear": BrokenRule(
        JobVersions, "abort_part", _trust_the_writer, "for left out, and was sealed"
    ),
    "keep what is torn": BrokenRule(JobTable, "mark_aborted", _abort_alone, "what is torn still takes room"),
    "ignore racks": BrokenRule(memory, "_cached_placement", _ignore_racks, "in one rack"),
    "seek no new partner": BrokenRule(
        replication_policy,
        "target_holders",
        _keep_old_partners,
        "took the last copy",
        ("save", "wait", "crash", *["wait"] * 4, "crash"),
    ),
    "mend never": BrokenRule(
        agent,
        "should_retry_repair",
        lambda *_: False,
        "its copies again",
        ("save", "wait", "part", *["corrupt"] * 2, "heal"),
    ),
    "believe who started again": BrokenRule(SwimMembership, "generation_of", lambda *_: 1, "its copies again"),
    "believe parity's members who started again": BrokenRule(
        ParityStrategy,
        "confirmed_holders",
        lambda sharing, key, _life: tuple(sharing._holders.get(key, ())),
        "is not made again from parity",
        ("save", "wait", "crash and return"),
        _PARITY,
    ),
    "count on two parts of one node": BrokenRule(
        ParityStore,
        "_undisturbed",
        lambda _, kept: list(kept),
        "does not get its copies again",
        ("save", "wait", "crash and return"),
        _PARITY,
    ),
    "ask for ever": BrokenRule(ReplicationState, "task_done", lambda *_: None, "and no end"),
    "choose what is torn": BrokenRule(resolve_step.Candidate, "is_complete", True, "was never complete"),
    "choose alone": BrokenRule(
        simulated_restore,
        "elect_step",
        lambda votes: max(votes[0], default=None),
        "do not load the same step",
        ("save", "wait", "save", "noise", *["restart all", "wait", "wait"] * 3),
    ),
    "choose the oldest": BrokenRule(resolve_step, "_order", lambda group: (-group.version,), "could be reached"),
    "choose what was left": BrokenRule(
        resolve_step.IncarnationBranches,
        "supersede",
        lambda *_: False,
        "had left it behind",
        ("save", "wait", "part", *["save"] * 2, "wait", "restart all", "wait", *["save"] * 2, "heal", "restart all"),
        _FEW_RANKS,
    ),
    "take silence for absence": BrokenRule(
        resolve_step.Resolution, "unreachable", property(lambda _: (), lambda *_: None), "starts from nothing"
    ),
}


@contextlib.contextmanager
def break_rule(name: str | None) -> Iterator[None]:
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
