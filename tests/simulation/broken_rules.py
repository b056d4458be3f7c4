"""Production rules, each broken on purpose to prove that the simulation detects it.

``python -m tests.simulation --break 'ignore the fence'`` prints the first schedule that fails.
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
"""Either half of the machines may hold a complete version, so the job can resume in either half."""
_PARITY = ClusterShape(nodes=4, copies=1, parts=4, parity=3)


@dataclass(frozen=True)
class BrokenRule:
    """A replacement for one decision, and the violation that must follow."""

    where: Any
    name: str
    instead: Any
    noticed: str
    """Part of the violation's message."""
    kinds: tuple[str, ...] = ()
    """Kinds of events in the schedules for this rule, in this order. Empty means any kinds."""
    shape: ClusterShape | None = None

    def schedule_of(self, seed: int) -> Schedule:
        return schedule_of(seed, self.kinds, self.shape)


_add, _check_fence, _complete, _plan = (
    PartsTally.add,
    Incarnations.check_fence,
    CommitReports.decide,
    replication_policy.target_holders,
)
_newly_aborted, _abort_part = PartsTally.newly_aborted, JobVersions.abort_part


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
    return _abort_part(versions, group, part, ())


def _abort_alone(jobs: JobTable, job: str, groups: Any) -> list[VersionId]:
    jobs.get_or_create(job).mark_aborted(groups)
    return []


def _abort_incomplete(tally: PartsTally) -> tuple[VersionId, ...]:
    tally._aborted |= {group: False for group, report in tally._reports.items() if not report.whole}
    return _newly_aborted(tally)


def _abort_complete(tally: PartsTally) -> tuple[VersionId, ...]:
    tally._aborted |= {group: False for group, report in tally._reports.items() if report.whole}
    return _newly_aborted(tally)


def _keep_old_partners(held: HeldShard, *, partners: Any, **known: Any) -> tuple[str, ...]:
    return _plan(held, partners=partners if len(held.holders) < 2 else (), **known)


def _ignore_racks(nodes: Any, copies: int, levels: tuple[str, ...]) -> ReplicaPlacement:
    return place_replicas([msgspec.structs.replace(node, labels=()) for node in nodes], copies=copies, levels=levels)


BROKEN = {
    "evict below committed": BrokenRule(
        JobTable,
        "rollback_targets",
        lambda _, whole, mending=None: newest_committed(whole),
        "the last copy of a part of the version to resume from",
    ),
    "keep abandoned versions": BrokenRule(slot_eviction, "abandoned_slots", lambda *_, **__: [], "cannot resume"),
    "accept chunks without comparing": BrokenRule(
        transfers, "is_chunk_intact", lambda *_: True, "sealed a damaged copy"
    ),
    "load without comparing": BrokenRule(simulated_restore, "damaged_chunks", lambda *_: (), "was loaded damaged"),
    "ignore the fence": BrokenRule(
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
        ("save", "wait", "partition", *["wait"] * 2, *["restart all"] * 2, "wait", *["save"] * 3, "wait"),
        _FEW_RANKS,
    ),
    "decide without a quorum": BrokenRule(
        CommitReports,
        "decide",
        _decide_without_quorum,
        "both halves of a partition report versions as replicated",
        (
            "save",
            "wait",
            "partition",
            *["wait"] * 2,
            "restart all",
            "wait",
            *["save"] * 3,
            "wait",
            *["save"] * 2,
            "wait",
        ),
        ClusterShape(nodes=3, copies=2, parts=1),
    ),
    "replicate after one report": BrokenRule(PartsTally, "add", _one_report_completes, "as replicated, but part"),
    "count aborted parts as sealed": BrokenRule(PartsTally, "add", _count_aborted_as_sealed, "as committed without"),
    "abort incomplete versions": BrokenRule(
        PartsTally, "newly_aborted", _abort_incomplete, "as aborted, but no rank skipped its part"
    ),
    "abort complete versions": BrokenRule(PartsTally, "newly_aborted", _abort_complete, "contradictory decisions"),
    "trust an abort of a sealed part": BrokenRule(
        JobVersions, "abort_part", _trust_the_writer, "was aborted although it was sealed"
    ),
    "keep aborted versions": BrokenRule(JobTable, "mark_aborted", _abort_alone, "aborted versions are not deleted"),
    "ignore racks": BrokenRule(memory, "_cached_placement", _ignore_racks, "in one rack"),
    "keep old partners": BrokenRule(
        replication_policy,
        "target_holders",
        _keep_old_partners,
        "took the last copy",
        ("save", "wait", "crash", *["wait"] * 4, "crash"),
    ),
    "never repair": BrokenRule(
        agent,
        "should_retry_repair",
        lambda *_: False,
        "lacks copies after the faults",
        ("save", "wait", "partition", *["corrupt"] * 2, "heal"),
    ),
    "trust restarted holders": BrokenRule(
        SwimMembership, "generation_of", lambda *_: 1, "lacks copies after the faults"
    ),
    "trust restarted parity members": BrokenRule(
        ParityStrategy,
        "confirmed_holders",
        lambda sharing, key, _life: tuple(sharing._holders.get(key, ())),
        "is not rebuilt from parity",
        ("save", "wait", "crash and return"),
        _PARITY,
    ),
    "count two parts of one node": BrokenRule(
        ParityStore,
        "_undisturbed",
        lambda _, kept: list(kept),
        "lacks copies after the faults",
        ("save", "wait", "crash and return"),
        _PARITY,
    ),
    "never finish a task": BrokenRule(ReplicationState, "task_done", lambda *_: None, "still not at rest"),
    "choose incomplete steps": BrokenRule(resolve_step.Candidate, "is_complete", True, "was never complete"),
    "choose without voting": BrokenRule(
        simulated_restore,
        "elect_step",
        lambda votes: max(votes[0], default=None),
        "do not all choose the same step",
        ("save", "wait", "save", "noise", *["restart all", "wait", "wait"] * 3),
    ),
    "choose the oldest": BrokenRule(resolve_step, "_order", lambda group: (-group.version,), "could be reached"),
    "choose superseded steps": BrokenRule(
        resolve_step.IncarnationBranches,
        "supersede",
        lambda *_: False,
        "superseded it",
        (
            "save",
            "wait",
            "partition",
            *["save"] * 2,
            "wait",
            "restart all",
            "wait",
            *["save"] * 2,
            "heal",
            "restart all",
        ),
        _FEW_RANKS,
    ),
    "treat silence as absence": BrokenRule(
        resolve_step.Resolution, "unreachable", property(lambda _: (), lambda *_: None), "starts without a checkpoint"
    ),
}


@contextlib.contextmanager
def break_rule(name: str | None) -> Iterator[None]:
    """Break the named rule, or none for ``None``, while the block runs."""
    if name is None:
        yield
        return
    rule = BROKEN[name]
    original = vars(rule.where)[rule.name]
    setattr(rule.where, rule.name, rule.instead)
    try:
        yield
    finally:
        setattr(rule.where, rule.name, original)
