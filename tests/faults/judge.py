"""What must hold of a job whatever happened to it, judged from what its ranks and its driver wrote down. Pure."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tests.faults.schedule import FaultKind

WHOLE = re.compile(r"resumes (?:it )?from:? step (\d+)")
FINISHED, STOPPED, JOB_FAILED = 0, 7, 8
BITS = ("loss", "norm", "rate")
AWAY_S = 60.0
"""So long after it can be had again a node's memory may still be out of reach: others have to notice it first."""


class RankWorld(msgspec.Struct, frozen=True):
    """What one rank said as it began to train in a world."""

    run: int
    epoch: int
    rank: int
    size: int
    at: float
    pid: int
    node: str
    first: int


class RankStep(msgspec.Struct, frozen=True):
    """What one rank said of one step."""

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
    """Its part of the state's checksum."""


class SafeStep(msgspec.Struct, frozen=True):
    """One rank was told that its part of a step is kept so often; 0 copies: that the step is in the durable tier."""

    run: int
    epoch: int
    rank: int
    size: int
    at: float
    step: int
    copies: int


class Sealed(msgspec.Struct, frozen=True):
    """One rank has sealed its part of a step, for this incarnation."""

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
    """What was done to the job. Times are seconds since 1970."""

    number: int
    kind: FaultKind
    at: float
    until: float
    """When what was stopped, cut or away could work again; ``at`` for what happens once."""
    node: str = ""
    words: str = ""
    run: int = 0
    step: int = -1
    """The newest one that had been done."""


class CommandRun(msgspec.Struct, frozen=True):
    """One start of the command."""

    status: int | None
    """``None``: the driver ended it."""
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
    """The checksum of the state after a step of which all ranks have spoken, by (run, epoch, step); words where their
    shares do not make one."""
    sealed: Sequence[Sealed] = ()
    lines: Sequence[str] = ()
    """The lines of the outputs and logs that name a step to continue from."""
    final: int = 0
    """So many steps were to be done."""
    left: Sequence[str] = ()
    """Processes that are there although the job has succeeded."""
    kept: Sequence[str] = ()
    """Nodes that have something in memory then."""
    hung: str = ""
    """What it had not come to in all the time it was given."""


class ReferenceStep(msgspec.Struct, frozen=True):
    """A step of the run that nothing happened to."""

    loss: str
    norm: str
    rate: str
    sum: int
    samples: list[int]


class Violation(msgspec.Struct, frozen=True):
    rule: str
    words: str


def judge(evidence: Evidence, known: Sequence[ReferenceStep], epoch_of_data: int) -> list[Violation]:
    """All that does not hold. ``epoch_of_data``: so many samples there are."""
    rules = (hangs, endings, leftovers, worlds_hold, bits, samples, acknowledged, incarnations, redone, graceful_stops)
    return [
        Violation(rule.__name__.replace("_", " "), words)
        for rule in rules
        for words in rule(evidence, known, epoch_of_data)
    ]


# -- how it ended ------------------------------------------------------------------------------------------------------


def hangs(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    if evidence.hung:
        yield evidence.hung


def endings(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """Success, or words from which the next start can be told."""
    for number, run in enumerate(evidence.runs):
        if run.status is None:
            continue
        if run.status not in (FINISHED, STOPPED, JOB_FAILED):
            yield f"start {number} ended with status {run.status}: {run.words}"
        elif run.status != FINISHED:
            yield from _find_wrong_resume(evidence, number, run)
    if evidence.runs and evidence.runs[-1].status not in (FINISHED, None):
        yield f"it was not started again after {evidence.runs[-1].words}"


def _find_wrong_resume(evidence: Evidence, number: int, run: CommandRun) -> Iterator[str]:
    kept = [step for step, _, at in _safe_steps(evidence) if at < run.ended]
    found = WHOLE.search(run.words)
    if found is None:
        if kept:
            yield f"start {number} names no step to go on from, step {max(kept)} was safe: {run.words}"
        return
    firsts = {
        one.first
        for one in evidence.worlds
        if one.run == number + 1 and one.epoch == _first_epoch(evidence, number + 1)
    }
    named = int(found[1])
    if firsts and firsts != {named + 1} and not _is_disturbed(evidence, run):
        yield f"start {number} ended with {found[0]}, and the next one went on at {sorted(firsts)}"


def _is_disturbed(evidence: Evidence, run: CommandRun) -> bool:
    """Return whether memory was out of reach at about the time when a start ended."""
    return any(
        since < run.ended + AWAY_S and until > run.ended - AWAY_S
        for fault in evidence.faults
        for _, since, until in memory_outages((fault,))
    )


def _first_epoch(evidence: Evidence, run: int) -> int:
    return min((one.epoch for one in evidence.worlds if one.run == run), default=-1)


def leftovers(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """Processes, and memory whose newest step is in the durable tier; a newer one that is nowhere else has to stay."""
    yield from (f"left behind: {one}" for one in evidence.left)
    if evidence.kept and any(one.copies == 0 and one.step == evidence.final - 1 for one in evidence.safe):
        yield f"the last step is durable, and it is in memory still: {', '.join(evidence.kept)}"


# -- what was learned --------------------------------------------------------------------------------------------------


def worlds_hold(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """All ranks of a world begin with one step, each is one process, and none of them leaves a step out."""
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
            yield f"ranks of world {key} went on at different steps: {sorted(found)}"
    done = defaultdict(list)
    for step in evidence.steps:
        done[step.run, step.epoch, step.rank].append(step.step)
    reached = -1
    for key in sorted(firsts):
        first = min(firsts[key])
        if first > reached + 1:
            yield f"world {key} went on at step {first}, and nobody had come beyond {reached}"
        for place in sorted(one for one in done if one[:2] == key):
            if done[place] != [*range(first, first + len(done[place]))]:
                yield f"rank {place[2]} of world {key} began at {first} and did {_summarize_steps(done[place])}"
            reached = max(reached, *done[place])


def bits(evidence: Evidence, known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """Whatever any rank said of a step is what the undisturbed run says of it."""
    for step in evidence.steps:
        if step.step >= len(known):
            yield f"step {step.step} is beyond the undisturbed run of {len(known)} steps: nothing to compare it with"
            return
        right = known[step.step]
        for name in BITS:
            if getattr(step, name) != getattr(right, name):
                said = f"rank {step.rank} of world {step.run, step.epoch}"
                yield f"{name} of step {step.step} ({said}) is {getattr(step, name)}, not {getattr(right, name)}"
    for (run, epoch, number), found in sorted(evidence.sums.items()):
        if number < len(known) and found != known[number].sum:
            yield f"the state after step {number} (world {run, epoch}) is not the undisturbed run's: {found}"


def samples(evidence: Evidence, known: Sequence[ReferenceStep], epoch_of_data: int) -> Iterator[str]:
    """Every sample once in each epoch of the data, and none left out of the steps that count."""
    last: dict[int, tuple[int, int]] = {}
    said = defaultdict(list)
    for step in evidence.steps:
        world = step.run, step.epoch
        said[world, step.step].append(step)
        last[step.step] = max(last.get(step.step, (-1, -1)), world)
    taken: list[int] = []
    for number in range(min(evidence.final, len(known))):
        if number not in last:
            yield f"nobody did step {number}"
            return
        ranks = sorted(said[last[number], number], key=lambda one: one.rank)
        mine = [index for one in ranks for index in one.samples]
        if len(ranks) < ranks[0].size and _was_last(evidence, last[number], number):
            mine = known[number].samples if set(mine) <= set(known[number].samples) else mine
        if mine != known[number].samples:
            yield f"step {number} learned from {mine}, not from {known[number].samples}"
        taken += mine
    for first in range(0, len(taken), epoch_of_data):
        part = taken[first : first + epoch_of_data]
        if len(set(part)) != len(part):
            yield f"samples {first} to {first + len(part)} of the order have one twice"


def _was_last(evidence: Evidence, world: tuple[int, int], number: int) -> bool:
    """Whether a rank that is missing in a step's lines may have ended before it could write: nobody did more there."""
    return not any((one.run, one.epoch) == world and one.step > number for one in evidence.steps)


# -- what was safe -----------------------------------------------------------------------------------------------------


def acknowledged(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """No world goes on from before a step that was said to be safe, unless faults took every copy of it."""
    begun: dict[tuple[int, int], tuple[float, int]] = {}
    for world in evidence.worlds:
        key = world.run, world.epoch
        begun[key] = min(begun.get(key, (world.at, world.first)), (world.at, world.first))
    done = {(one.run, one.epoch, one.step): one.at for one in reversed(evidence.steps)}
    forgiven: list[tuple[float, int]] = []
    """When worlds had to go on, and at which step: later ones of the time before are gone for good."""
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
            yield f"step {step} was safe in {where} (world {world}), and world {key} went on at step {first}"
        if lost:
            forgiven.append((at, first))


def _safe_steps(evidence: Evidence) -> list[tuple[int, int, float]]:
    return [(step, copies, at) for step, copies, at, _ in _safe_in_worlds(evidence)]


def _safe_in_worlds(evidence: Evidence) -> list[tuple[int, int, float, tuple[int, int]]]:
    """Steps of which every rank's part was acknowledged: step, copies, since when, in which world."""
    found = defaultdict(list)
    for one in evidence.safe:
        found[one.run, one.epoch, one.step, one.copies].append(one)
    whole = []
    for (run, epoch, step, copies), said in found.items():
        if copies == 0 or {one.rank for one in said} == set(range(said[0].size)):
            whole.append((step, copies, max(one.at for one in said), (run, epoch)))
    return sorted(whole, key=lambda one: one[2])


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


# -- one history -------------------------------------------------------------------------------------------------------


def incarnations(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """No two incarnations share a number, and the incarnations of a later world have greater ones."""
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
    """No step that all ranks of a world sealed is done again without a line that says so."""
    sealed, newest = _sealed_in_worlds(evidence), -1
    for key in sorted({(one.run, one.epoch) for one in evidence.worlds}):
        first = min(one.first for one in evidence.worlds if (one.run, one.epoch) == key)
        if first <= newest:
            if not _is_announced(evidence, key, first, newest):
                yield f"world {key} does step {first} again, step {newest} was sealed, and no line says so"
            newest = first - 1
        newest = max(newest, sealed.get(key, -1))


def graceful_stops(evidence: Evidence, _known: Sequence[ReferenceStep], _samples: int) -> Iterator[str]:
    """The start after a graceful stop continues behind everything that the stopped one sealed."""
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
            yield f"start {number} sealed step {newest} and stopped, and the next one went on at {min(later)}"


_INCOMPLETE = "not all was saved"
_ANNOUNCED = (
    re.compile(r"resumed from step (-?\d+) .*; (\d+) steps are done again"),
    re.compile(r"resuming from step (\d+), (\d+) steps are repeated"),
    re.compile(
        r"step (\d+) was restored, which leaves complete newer steps behind: .* The job does (\d+) steps? again"
    ),
)
FROM_NOTHING = "starts from nothing"


def names_older_step(line: str) -> bool:
    """Return whether a line says that steps are done again."""
    return FROM_NOTHING in line or any(pattern.search(line) for pattern in _ANNOUNCED)


def _is_announced(evidence: Evidence, world: tuple[int, int], first: int, newest: int) -> bool:
    run, epoch = world
    if run and epoch == _first_epoch(evidence, run):
        found = WHOLE.search(evidence.runs[run - 1].words)
        if found is not None and int(found[1]) == first - 1:
            return True
    if first == 0 and any(FROM_NOTHING in line for line in evidence.lines):
        return True
    found_in = (pattern.search(line) for line in evidence.lines for pattern in _ANNOUNCED)
    said = ((int(one[1]), int(one[2])) for one in found_in if one is not None)
    return any(restored == first - 1 and restored + again >= newest for restored, again in said)


def _sealed_in_worlds(evidence: Evidence) -> dict[tuple[int, int], int]:
    """The newest step that all ranks of each world have sealed."""
    newest: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    sizes = {(one.run, one.epoch): one.size for one in evidence.sealed}
    for one in evidence.sealed:
        ranks = newest[one.run, one.epoch]
        ranks[one.rank] = max(one.step, ranks.get(one.rank, -1))
    return {key: min(ranks.values()) for key, ranks in newest.items() if len(ranks) == sizes[key]}


# -- what faults take --------------------------------------------------------------------------------------------------

_TAKES = (FaultKind.NODE_LOST, FaultKind.MEMORY_FLIPPED, FaultKind.MEMORY_TRUNCATED)
_HIDES = (FaultKind.AGENT_STOPPED, FaultKind.NODE_PAUSED, FaultKind.CUT, FaultKind.CUT_ONE_WAY, FaultKind.UNPLUGGED)
_LEAVES_ALONE = (FaultKind.SUPERVISOR_KILLED, FaultKind.SUPERVISOR_STOPPED)


def memory_outages(faults: Sequence[AppliedFault]) -> list[tuple[str, float, float]]:
    """Which node's memory could not be had, or not be used, between when and when.

    A killed agent is started again over the memory that it had, where a supervisor or a rank is there that does it.
    """
    found = []
    for fault in faults:
        if fault.kind in _TAKES:
            found.append((fault.node, fault.at, max(fault.at, fault.until)))
        elif fault.kind in _HIDES:
            found.extend((node, fault.at, fault.until + AWAY_S) for node in fault.node.split(",") if node)
        elif fault.kind is FaultKind.AGENT_KILLED:
            for other in faults:
                alone = other.kind in _LEAVES_ALONE and other.node == fault.node
                if alone and other.at <= fault.until + AWAY_S and fault.at <= other.until + AWAY_S:
                    found.append((fault.node, min(fault.at, other.at), max(fault.until, other.until) + AWAY_S))
    return found


def _summarize_steps(steps: Sequence[int]) -> str:
    jumps = [f"{one} then {other}" for one, other in itertools.pairwise(steps) if other != one + 1]
    return f"{steps[0]} to {steps[-1]} with {', '.join(jumps) or 'no jump'}"
