"""The rules of a correct job under faults, checked against the records of its ranks and its driver."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tests.faults.schedule import FaultKind

RESUME_STEP = re.compile(r"resumes (?:it )?from:? step (\d+)( or a newer one)?")
FINISHED, STOPPED, JOB_FAILED = 0, 7, 8
BITS = ("loss", "norm", "rate")
AWAY_S = 60.0
"""Seconds after the end of a fault until other nodes must be able to read a node's memory again."""


class RankWorld(msgspec.Struct, frozen=True):
    """The record of one rank that begins to train in a world."""

    run: int
    epoch: int
    rank: int
    size: int
    at: float
    pid: int
    node: str
    first: int


class RankStep(msgspec.Struct, frozen=True):
    """The record of one rank for one step."""

    run: int
    epoch: int
    rank: int
    size: int
    at: float
    pid: int
    step: int
    loss: str
    norm: str
    rate: str
    samples: list[int]
    share: Any = None
    """The rank's part of the state's checksum."""


class SafeStep(msgspec.Struct, frozen=True):
    """The acknowledgment to one rank that its part of a step is replicated, or that the step is durable."""

    run: int
    epoch: int
    rank: int
    size: int
    at: float
    step: int
    copies: int
    """Number of copies in memory; 0 if the step is in the durable tier."""


class Sealed(msgspec.Struct, frozen=True):
    """The record of one rank that has sealed its part of a step, with its incarnation."""

    run: int
    epoch: int
    rank: int
    size: int
    at: float
    step: int
    number: int
    """The epoch of the incarnation."""
    name: str


class AppliedFault(msgspec.Struct, frozen=True):
    """A fault that was applied to the job, with its times in seconds since 1970."""

    number: int
    kind: FaultKind
    at: float
    until: float
    """When a stop, a cut or an outage ended; ``at`` for a fault without duration."""
    node: str = ""
    words: str = ""
    run: int = 0
    step: int = -1
    """The newest step of the job before the fault."""


class CommandRun(msgspec.Struct, frozen=True):
    """One start of the command."""

    status: int | None
    """Exit status, or ``None`` if the driver ended the command."""
    words: str
    began: float
    ended: float


class Evidence(msgspec.Struct, frozen=True):
    worlds: Sequence[RankWorld]
    steps: Sequence[RankStep]
    safe: Sequence[SafeStep]
    faults: Sequence[AppliedFault]
    runs: Sequence[CommandRun]
    sums: Mapping[tuple[int, int, int], int | str]
    """Checksums by (run, epoch, step) for steps that all ranks recorded; a message if replicas differ."""
    sealed: Sequence[Sealed] = ()
    lines: Sequence[str] = ()
    """Lines of the outputs and logs that report repeated steps."""
    final: int = 0
    """Number of steps that the job had to complete."""
    left: Sequence[str] = ()
    """Processes that remain after the job has succeeded."""
    kept: Sequence[str] = ()
    """Nodes that still have slots in memory after the job has succeeded."""
    hung: str = ""
    """The goal that the job did not reach in time; empty if it did not hang."""


class ReferenceStep(msgspec.Struct, frozen=True):
    """A step of the undisturbed run."""

    loss: str
    norm: str
    rate: str
    sum: int
    samples: list[int]


class Violation(msgspec.Struct, frozen=True):
    rule: str
    words: str


def judge(evidence: Evidence, known: Sequence[ReferenceStep], epoch_of_data: int) -> list[Violation]:
    """Return all violations of the rules. A data epoch has ``epoch_of_data`` samples."""
    rules = (hangs, endings, leftovers, worlds_hold, bits, samples, acknowledged, incarnations, redone, graceful_stops)
    return [
        Violation(rule.__name__.replace("_", " "), words)
        for rule in rules
        for words in rule(evidence, known, epoch_of_data)
    ]


# -- end of the job ----------------------------------------------------------------------------------------------------


def hangs(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    if evidence.hung:
        yield evidence.hung


def endings(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """Check that the job succeeds or names the step to resume from."""
    for number, run in enumerate(evidence.runs):
        if run.status is None:
            continue
        if run.status not in (FINISHED, STOPPED, JOB_FAILED):
            yield f"start {number} ended with status {run.status}: {run.words}"
        elif run.status != FINISHED:
            yield from _find_wrong_resume(evidence, number, run)
    if evidence.runs and evidence.runs[-1].status not in (FINISHED, None):
        yield f"the job was not restarted after: {evidence.runs[-1].words}"


def _find_wrong_resume(evidence: Evidence, number: int, run: CommandRun) -> Iterator[str]:
    acknowledged_steps = [step for step, _, at in _safe_steps(evidence) if at < run.ended]
    found = RESUME_STEP.search(run.words)
    if found is None:
        if acknowledged_steps:
            newest = max(acknowledged_steps)
            yield f"start {number} names no step to resume from, although step {newest} was acknowledged: {run.words}"
        return
    firsts = {
        one.first
        for one in evidence.worlds
        if one.run == number + 1 and one.epoch == _first_epoch(evidence, number + 1)
    }
    named = int(found[1])
    is_as_named = len(firsts) == 1 and min(firsts) > named if found[2] else firsts == {named + 1}
    if firsts and not is_as_named and not _is_disturbed(evidence, run):
        yield f"start {number} ended with '{found[0]}', but the next one began at step {sorted(firsts)}"


def _is_disturbed(evidence: Evidence, run: CommandRun) -> bool:
    """Return whether the memory of a node was unavailable around the end of a run."""
    return any(
        since < run.ended + AWAY_S and until > run.ended - AWAY_S
        for fault in evidence.faults
        for _, since, until in memory_outages((fault,))
    )


def _first_epoch(evidence: Evidence, run: int) -> int:
    return min((one.epoch for one in evidence.worlds if one.run == run), default=-1)


def leftovers(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """Check that no process remains, and no shard either if the last step is durable."""
    yield from (f"not ended: {one}" for one in evidence.left)
    if evidence.kept and any(one.copies == 0 and one.step == evidence.final - 1 for one in evidence.safe):
        yield f"the last step is durable, but shards remain in memory: {', '.join(evidence.kept)}"


# -- training results --------------------------------------------------------------------------------------------------


def worlds_hold(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """Check that the ranks of a world begin at one step, are one process each, and skip no step."""
    places: dict[tuple[int, int, int], RankWorld] = {}
    for world in evidence.worlds:
        place = world.run, world.epoch, world.rank
        if places.setdefault(place, world).pid != world.pid:
            yield f"world {place[:2]} has two processes of rank {world.rank}"
    firsts = defaultdict(set)
    for world in evidence.worlds:
        firsts[world.run, world.epoch].add(world.first)
    for key, found in sorted(firsts.items()):
        if len(found) > 1:
            yield f"the ranks of world {key} began at different steps: {sorted(found)}"
    done = defaultdict(list)
    for step in evidence.steps:
        done[step.run, step.epoch, step.rank].append(step.step)
    reached = -1
    for key in sorted(firsts):
        first = min(firsts[key])
        if first > reached + 1:
            yield f"world {key} began at step {first}, but the newest step of any rank was {reached}"
        for place in sorted(one for one in done if one[:2] == key):
            if done[place] != [*range(first, first + len(done[place]))]:
                yield f"rank {place[2]} of world {key} began at {first} and did {_summarize_steps(done[place])}"
            reached = max(reached, *done[place])


def bits(evidence: Evidence, known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """Check that every rank's results of every step equal those of the undisturbed run."""
    for step in evidence.steps:
        if step.step >= len(known):
            yield f"step {step.step} cannot be compared: the undisturbed run has {len(known)} steps"
            return
        expected = known[step.step]
        for name in BITS:
            if getattr(step, name) != getattr(expected, name):
                rank = f"rank {step.rank} of world {step.run, step.epoch}"
                yield f"{name} of step {step.step} ({rank}) is {getattr(step, name)}, not {getattr(expected, name)}"
    for (run, epoch, number), found in sorted(evidence.sums.items()):
        if number < len(known) and found != known[number].sum:
            yield f"the state after step {number} (world {run, epoch}) differs from the undisturbed run: {found}"


def samples(evidence: Evidence, known: Sequence[ReferenceStep], epoch_of_data: int) -> Iterator[str]:
    """Check that the final run of each step reads the right samples, each once per data epoch."""
    last: dict[int, tuple[int, int]] = {}
    records = defaultdict(list)
    for step in evidence.steps:
        world = step.run, step.epoch
        records[world, step.step].append(step)
        last[step.step] = max(last.get(step.step, (-1, -1)), world)
    taken: list[int] = []
    for number in range(min(evidence.final, len(known))):
        if number not in last:
            yield f"no rank did step {number}"
            return
        ranks = sorted(records[last[number], number], key=lambda one: one.rank)
        mine = [index for one in ranks for index in one.samples]
        if len(ranks) < ranks[0].size and _was_last(evidence, last[number], number):
            mine = known[number].samples if set(mine) <= set(known[number].samples) else mine
        if mine != known[number].samples:
            yield f"step {number} learned from {mine}, not from {known[number].samples}"
        taken += mine
    for first in range(0, len(taken), epoch_of_data):
        part = taken[first : first + epoch_of_data]
        if len(set(part)) != len(part):
            yield f"samples {first} to {first + len(part)} of the order include a sample twice"


def _was_last(evidence: Evidence, world: tuple[int, int], number: int) -> bool:
    """Return whether a step is a world's last, whose record a killed rank may not have written."""
    return not any((one.run, one.epoch) == world and one.step > number for one in evidence.steps)


# -- acknowledged steps ------------------------------------------------------------------------------------------------


def acknowledged(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """Check that worlds resume behind every acknowledged step, unless faults destroyed all its copies."""
    begun: dict[tuple[int, int], tuple[float, int]] = {}
    for world in evidence.worlds:
        key = world.run, world.epoch
        begun[key] = min(begun.get(key, (world.at, world.first)), (world.at, world.first))
    done = {(one.run, one.epoch, one.step): one.at for one in reversed(evidence.steps)}
    forgiven: list[tuple[float, int]] = []
    """Time and first step of worlds that had to repeat steps. Later steps of earlier worlds are excused."""
    for key, (at, first) in sorted(begun.items()):
        lost = False
        for step, copies, since, world in _safe_in_worlds(evidence):
            if world >= key or since > at or step < first:
                continue
            if any(since <= when and step >= began for when, began in forgiven):
                continue
            sealed = done.get((*world, step), since)
            if _all_taken(evidence, copies, sealed, at):
                lost = True
                continue
            where = f"{copies} copies" if copies else "the durable tier"
            yield f"step {step} was acknowledged in {where} (world {world}), but world {key} began at step {first}"
        if lost:
            forgiven.append((at, first))


def _safe_steps(evidence: Evidence) -> list[tuple[int, int, float]]:
    return [(step, copies, at) for step, copies, at, _ in _safe_in_worlds(evidence)]


def _safe_in_worlds(evidence: Evidence) -> list[tuple[int, int, float, tuple[int, int]]]:
    """Return step, copies, time and world of every step that is durable or acknowledged to all ranks."""
    found = defaultdict(list)
    for one in evidence.safe:
        found[one.run, one.epoch, one.step, one.copies].append(one)
    complete = []
    for (run, epoch, step, copies), records in found.items():
        if copies == 0 or {one.rank for one in records} == set(range(records[0].size)):
            complete.append((step, copies, max(one.at for one in records), (run, epoch)))
    return sorted(complete, key=lambda one: one[2])


def _all_taken(evidence: Evidence, copies: int, since: float, until: float) -> bool:
    if copies == 0:
        return any(
            fault.kind in (FaultKind.DURABLE_DEAD, FaultKind.DURABLE_ERRORS, FaultKind.DURABLE_SLOW)
            and fault.at < until
            and fault.until + AWAY_S > until
            for fault in evidence.faults
        )
    nodes = {node for node, first, last in memory_outages(evidence.faults) if first <= until and last >= since}
    return len(nodes) >= copies


# -- incarnations and repeated steps -----------------------------------------------------------------------------------


def incarnations(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """Check that incarnations have different numbers, and greater ones in later worlds."""
    names: dict[int, str] = {}
    worlds: dict[tuple[int, int], set[int]] = defaultdict(set)
    for one in evidence.sealed:
        if names.setdefault(one.number, one.name) != one.name:
            yield f"incarnations {names[one.number]} and {one.name} share number {one.number}"
        worlds[one.run, one.epoch].add(one.number)
    for (before, older), (after, newer) in itertools.pairwise(sorted(worlds.items())):
        if min(newer) <= max(older):
            yield f"world {after} writes for number {min(newer)}, and world {before} for {max(older)}"


def redone(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """Check that a log line announces every repetition of a step that all ranks sealed."""
    sealed, newest = _sealed_in_worlds(evidence), -1
    for key in sorted({(one.run, one.epoch) for one in evidence.worlds}):
        first = min(one.first for one in evidence.worlds if (one.run, one.epoch) == key)
        if first <= newest:
            if not _is_announced(evidence, key, first, newest):
                yield f"world {key} repeats step {first} although step {newest} was sealed, and no line reports it"
            newest = first - 1
        newest = max(newest, sealed.get(key, -1))


def graceful_stops(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """Check that the run after a graceful stop resumes after the newest sealed step."""
    sealed = _sealed_in_worlds(evidence)
    for number, run in enumerate(evidence.runs):
        if run.status != STOPPED or _INCOMPLETE in run.words or _is_disturbed(evidence, run):
            continue
        last = max((one.epoch for one in evidence.worlds if one.run == number), default=-1)
        newest = sealed.get((number, last), -1)
        later = [
            one.first
            for one in evidence.worlds
            if (one.run, one.epoch) == (number + 1, _first_epoch(evidence, number + 1))
        ]
        if later and min(later) <= newest:
            yield f"start {number} sealed step {newest} and stopped, but the next one began at step {min(later)}"


_INCOMPLETE = "not all was saved"
_ANNOUNCED = (
    re.compile(r"resumed from step (-?\d+) .*; (\d+) steps? (?:is|are) done again"),
    re.compile(r"resuming from step (\d+), (\d+) steps? (?:is|are) repeated"),
    re.compile(
        r"step (\d+) was restored, which leaves complete newer steps behind: .* The job does (\d+) steps? again"
    ),
)
FROM_NOTHING = "starts from nothing"


def names_older_step(line: str) -> bool:
    """Return whether a line reports repeated steps."""
    return FROM_NOTHING in line or any(pattern.search(line) for pattern in _ANNOUNCED)


def _is_announced(evidence: Evidence, world: tuple[int, int], first: int, newest: int) -> bool:
    run, epoch = world
    if run and epoch == _first_epoch(evidence, run):
        found = RESUME_STEP.search(evidence.runs[run - 1].words)
        if found is not None and int(found[1]) == first - 1:
            return True
    if first == 0 and any(FROM_NOTHING in line for line in evidence.lines):
        return True
    found_in = (pattern.search(line) for line in evidence.lines for pattern in _ANNOUNCED)
    reported = ((int(one[1]), int(one[2])) for one in found_in if one is not None)
    return any(restored == first - 1 and restored + again >= newest for restored, again in reported)


def _sealed_in_worlds(evidence: Evidence) -> dict[tuple[int, int], int]:
    """Return the newest step of each world that all its ranks have sealed."""
    newest: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    sizes = {(one.run, one.epoch): one.size for one in evidence.sealed}
    for one in evidence.sealed:
        ranks = newest[one.run, one.epoch]
        ranks[one.rank] = max(one.step, ranks.get(one.rank, -1))
    return {key: min(ranks.values()) for key, ranks in newest.items() if len(ranks) == sizes[key]}


# -- effects of faults -------------------------------------------------------------------------------------------------

_DESTROYS = (FaultKind.NODE_LOST, FaultKind.MEMORY_FLIPPED, FaultKind.MEMORY_TRUNCATED)
_HIDES = (FaultKind.AGENT_STOPPED, FaultKind.NODE_PAUSED, FaultKind.CUT, FaultKind.CUT_ONE_WAY, FaultKind.UNPLUGGED)
_STOPS_SUPERVISION = (FaultKind.SUPERVISOR_KILLED, FaultKind.SUPERVISOR_STOPPED)


def memory_outages(faults: Sequence[AppliedFault]) -> list[tuple[str, float, float]]:
    """Return node, start and end of each time in which a node's memory was lost or unavailable.

    A supervisor or a rank restarts a killed agent over its memory, so only an agent without a supervisor counts.
    """
    found = []
    for fault in faults:
        if fault.kind in _DESTROYS:
            found.append((fault.node, fault.at, max(fault.at, fault.until)))
        elif fault.kind in _HIDES:
            found.extend((node, fault.at, fault.until + AWAY_S) for node in fault.node.split(",") if node)
        elif fault.kind is FaultKind.AGENT_KILLED:
            for other in faults:
                alone = other.kind in _STOPS_SUPERVISION and other.node == fault.node
                if alone and other.at <= fault.until + AWAY_S and fault.at <= other.until + AWAY_S:
                    found.append((fault.node, min(fault.at, other.at), max(fault.until, other.until) + AWAY_S))
    return found


def _summarize_steps(steps: Sequence[int]) -> str:
    jumps = [f"{one} then {other}" for one, other in itertools.pairwise(steps) if other != one + 1]
    return f"{steps[0]} to {steps[-1]} with {', '.join(jumps) or 'no jump'}"
