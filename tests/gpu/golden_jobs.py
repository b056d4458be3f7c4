"""Jobs of the section "golden" and the judgment of their events. Pure; torch is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tests.gpu.report import Check, Figure

FIRST_STEP, GAP, LAST_STEPS = 4, 2, 4
"""Step of the first fault, steps between two faults, and steps after the last one."""
LETHAL = ("sigkill", "segfault", "oom", "hang", "sigstop", "hold_gil")
"""Faults that end one process. The hang detector finds the last three."""
KINDS = (*LETHAL, "exception", "nan")
"""Faults of one rank."""
NODE_KINDS = ("node", "partition", "agent")
PLACES = ("before", "inside", "after")
STAGES = ("leaves", "entered", "restored", "step")
"""Events after a fault; a stage ends with its last rank."""

Event = dict[str, Any]


class Fault(msgspec.Struct, frozen=True):
    """One fault of a run, or one resize."""

    kind: str
    place: str = "inside"
    """Where in the step: before, inside or after the backward pass."""
    rank: int = 1
    nodes: int = 0
    """Nodes after a resize; 0: all of them."""
    step: int = -1
    processes: int = 0
    """Processes that must have been warm before the fault, lost processes included."""

    @property
    def name(self) -> str:
        if self.kind == "resize":
            return "resize to one node" if self.nodes == 1 else f"resize to {self.nodes or 'all'} nodes"
        return f"{self.kind} {self.place} the backward pass"

    @property
    def file(self) -> str:
        """Name of the file whose creation claims the fault."""
        return f"{self.step}-{self.kind}"


class GoldenJob(msgspec.Struct, frozen=True):
    """One run: a parallelism, its ranks, and the faults that happen to it."""

    how: tuple[str, ...]
    """One parallelism; a run without faults has several, one after the other."""
    ranks: int
    spares: int = 0
    nodes: int = 1
    spare_nodes: int = 0
    faults: tuple[Fault, ...] = ()
    total: int = 0
    """Steps."""
    totals: dict[str, int] = {}
    """Steps of each parallelism of a run without faults."""

    @property
    def nproc(self) -> int:
        return self.ranks // self.nodes

    @property
    def resizes(self) -> bool:
        return any(one.kind == "resize" for one in self.faults)

    @property
    def name(self) -> str:
        if not self.faults:
            return f"{' and '.join(self.how)}, {self.ranks} ranks, no fault"
        on = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        spare = f"{self.spares} spares" if self.spares else "a spare node" if self.spare_nodes else "no spare"
        return f"{self.how[0]}, {self.ranks} ranks{on}, {spare}"

    def planned(self) -> GoldenJob:
        """Return the job with the step of each fault and the processes that it waits for."""
        found, lost = list[Fault](), 0
        for number, one in enumerate(self.faults):
            there = (self.nodes + self.spare_nodes) * self.nproc + min(1, self.spares)
            found.append(msgspec.structs.replace(one, step=FIRST_STEP + number * GAP, processes=there + lost))
            lost += self.nproc if one.kind == "node" else int(one.kind in LETHAL)
        total = self.total or FIRST_STEP + GAP * len(found) + LAST_STEPS
        return msgspec.structs.replace(self, faults=tuple(found), total=total)


def faults_from(text: str, ranks: int) -> tuple[Fault, ...]:
    """Return the faults that ``text`` lists as ``kind@place``, for one rank after the other."""
    pairs = [word.split("@") for word in text.split()]
    return tuple(Fault(kind, place, (1 + number) % ranks) for number, (kind, place) in enumerate(pairs))


CHAINS = {
    ("ddp", 2): """
        sigkill@inside exception@before nan@after hang@inside segfault@before exception@inside nan@inside sigkill@after
        oom@inside sigstop@after hang@before segfault@after
    """,
    ("ddp", 4): """
        sigkill@before exception@after nan@before hold_gil@inside segfault@inside oom@before sigstop@inside hang@after
        oom@after sigstop@before hold_gil@after hold_gil@before
    """,
    ("fsdp", 2): """
        sigkill@before exception@inside nan@before sigstop@inside segfault@after nan@inside exception@before
        sigkill@inside oom@after hang@before sigstop@after segfault@inside
    """,
    ("fsdp", 4): """
        sigkill@after exception@after nan@after hang@inside segfault@before oom@inside hold_gil@before hang@after
        oom@before sigstop@before hold_gil@inside hold_gil@after
    """,
    ("hsdp", 4): """
        sigkill@inside exception@inside nan@inside hang@after segfault@before nan@before exception@after sigkill@before
        oom@after sigkill@after hold_gil@inside exception@before nan@after segfault@inside oom@inside sigstop@before
        hang@inside segfault@after oom@before sigstop@inside hang@before sigstop@after hold_gil@before hold_gil@after
    """,
}
"""All faults of one rank, by parallelism and ranks; the first ones are worth the most."""
NODE_CHAINS = {
    "ddp": "node@inside partition@after agent@before node@before node@after partition@inside partition@before",
    "fsdp": "node@before partition@inside agent@after node@inside node@after partition@before partition@after",
    "hsdp": "node@after partition@before agent@inside node@inside node@before partition@after partition@inside",
}


def faulty_jobs() -> tuple[GoldenJob, ...]:
    """Return the runs with faults in the order of their worth, where the time is not enough for all."""
    resizes = (Fault("resize", nodes=1), Fault("sigkill", "before"), Fault("resize"))
    found = (
        _spared("ddp", 2),
        _spared("fsdp", 2),
        _spared("hsdp", 4),
        GoldenJob(("tree",), 4, nodes=2, faults=resizes),
        _spared("ddp", 4),
        _spared("fsdp", 4),
        *(
            GoldenJob((how,), ranks, nodes=2, spare_nodes=1, faults=faults_from(NODE_CHAINS[how], ranks))
            for how, ranks in (("hsdp", 4), ("ddp", 2), ("fsdp", 2))
        ),
        GoldenJob(("hsdp",), 4, faults=faults_from("sigkill@before", 4)),
        GoldenJob(("ddp",), 2, faults=faults_from("sigkill@inside", 2)),
        GoldenJob(("fsdp",), 2, faults=faults_from("sigkill@inside", 2)),
    )
    return tuple(one.planned() for one in found)


def _spared(how: str, ranks: int) -> GoldenJob:
    return GoldenJob((how,), ranks, 2, faults=faults_from(CHAINS[how, ranks], ranks))


def quiet_jobs(faulty: Iterable[GoldenJob]) -> tuple[GoldenJob, ...]:
    """Return the runs without faults that ``faulty`` are compared with: one for each number of ranks."""
    faulty = list(faulty)
    found = []
    tree = max((one.total for one in faulty if one.how == ("tree",)), default=FIRST_STEP)
    for ranks in sorted({one.ranks for one in faulty}, reverse=True):
        totals = {"tree": tree}
        for one in faulty:
            if one.ranks == ranks:
                totals[one.how[0]] = max(totals.get(one.how[0], 0), one.total)
        found.append(GoldenJob(tuple(sorted(totals)), ranks, totals=totals))
    return tuple(found)


class GoldenEvents:
    """The events of one run."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = sorted(events, key=lambda one: one["at"])

    def of(self, what: str, how: str = "") -> list[Event]:
        return [one for one in self.events if one["what"] == what and (not how or one["how"] == how)]

    def losses(self, how: str) -> dict[tuple[int, int], set[str]]:
        """All losses of each (step, rank)."""
        found: dict[tuple[int, int], set[str]] = {}
        for one in self.of("step", how):
            found.setdefault((one["step"], one["rank"]), set()).add(one["loss"])
        return found

    def sums(self, how: str, step: int) -> list[tuple[int, int]]:
        """Return (rank, checksum) of the parameters after ``step``, in the world that did it last."""
        there = [one for one in self.of("step", how) if one["step"] == step]
        newest = max((one["epoch"] for one in there), default=-1)
        return sorted((one["rank"], one["sum"]) for one in there if one["epoch"] == newest)

    def fault(self, fault: Fault) -> Event | None:
        return next((one for one in self.of("fault") if one["name"] == fault.file), None)

    def recovery(self, fault: Event) -> tuple[int, float] | None:
        """Return the first epoch that completed a step after the fault, and when its last rank did."""
        is_fatal = fault["kind"] != "agent"
        done: dict[int, dict[int, Event]] = {}
        for one in self.of("step"):
            if one["at"] > fault["at"] and one["epoch"] >= fault["epoch"] + is_fatal:
                done.setdefault(one["epoch"], {}).setdefault(one["rank"], one)
        for epoch, ranks in sorted(done.items()):
            if len(ranks) == next(iter(ranks.values()))["size"]:
                return epoch, max(one["at"] for one in ranks.values())
        return None

    def stages_s(self, fault: Event) -> dict[str, float]:
        """Return the seconds from the fault to the end of each stage."""
        found: dict[str, float] = {}
        recovery = self.recovery(fault)
        if recovery is None:
            return found
        epoch, stepped = recovery
        leaves = [
            one["at"]
            for one in self.of("leaves")
            if one["at"] > fault["at"] and one["epoch"] == fault["epoch"] and one["pid"] != fault["pid"]
        ]
        if leaves:
            found["leaves"] = max(leaves) - fault["at"]
        for stage in ("entered", "restored"):
            if at := [one["at"] for one in self.of(stage) if one["epoch"] == epoch and one["at"] > fault["at"]]:
                found[stage] = max(at) - fault["at"]
        return {**found, "step": stepped - fault["at"]}


class GoldenRun(msgspec.Struct):
    """A job that ran."""

    job: GoldenJob
    seconds: float
    why: str
    """Why it failed, or empty."""
    events: GoldenEvents


def different_steps(found: GoldenRun, quiet: GoldenRun, steps: range) -> str:
    """Describe losses of ``steps`` that are missing or differ from the run without faults, or return ""."""
    how = found.job.how[0]
    expected = quiet.events.losses(how)
    losses = {key: one for key, one in found.events.losses(how).items() if key[0] in steps}
    if found.job.resizes:  # every rank of every world has the loss of the whole batch
        known = {step: one for (step, _), one in expected.items()}
        wrong = sorted(key for key, one in losses.items() if one != known.get(key[0]))
        missing = sorted((step, 0) for step in steps if (step, 0) not in losses)
    else:
        wrong = sorted(key for key, one in losses.items() if one != expected.get(key))
        missing = sorted(key for key in expected if key[0] in steps and key not in losses)
    problems = [f"other losses at (step, rank) {wrong[:5]}"] if wrong else []
    problems += [f"no losses at (step, rank) {missing[:5]}"] if missing else []
    return "; ".join(problems)


def judged_job(ran: GoldenRun, quiet: GoldenRun | None, where: str) -> list[Check | Figure]:
    """Compare a run with the one without a fault: a check for each fault, and one for the end."""
    job, found = ran.job, list[Check | Figure]()
    no_quiet = quiet is None or bool(quiet.why)
    total = min([one["step"] for one in ran.events.of("skipped")], default=job.total)
    for number, fault in enumerate(job.faults):
        name, event = f"{job.name}: {fault.name}", ran.events.fault(fault)
        if event is None:
            why = "the run failed before it" if ran.why else "no time left"
            found.append(Check(name, "not run", why=why))
            continue
        after = job.faults[number + 1].step if number + 1 < len(job.faults) else total
        stages = ran.events.stages_s(event)
        problems = [] if stages else [f"no step was completed after it: {ran.why or 'the world did not change'}"]
        if no_quiet or quiet is None:
            problems.append("the run without a fault failed: nothing to compare with")
        elif stages:
            last = max(one["step"] for one in ran.events.of("step"))
            problems += filter(None, [different_steps(ran, quiet, range(fault.step, min(after, total, last)))])
        seconds = round(stages.get("step", 0.0), 2)
        found.append(Check(name, "failed" if problems else "passed", seconds, "; ".join(problems)))
        found += [Figure(f"{name}: to {stage}", round(value, 3), "s", where) for stage, value in stages.items()]
    problems = [ran.why] if ran.why else []
    if no_quiet or quiet is None:
        problems.append("the run without a fault failed: nothing to compare with")
    elif not ran.why:
        problems += filter(None, [different_steps(ran, quiet, range(total))])
        sums, expected = (one.events.sums(job.how[0], total - 1) for one in (ran, quiet))
        problems += [] if sums and sums == expected else ["the final parameters differ"]
    name = f"{job.name}: every loss and the final parameters"
    found.append(Check(name, "failed" if problems else "passed", round(ran.seconds, 1), "; ".join(problems)))
    return found


def judged_quiet(ran: GoldenRun) -> list[Check | Figure]:
    """Check that a run without faults has all of its losses."""
    job = ran.job
    problems = [ran.why] if ran.why else []
    for how in job.how:
        losses = ran.events.losses(how)
        whole = len(losses) == job.totals[how] * job.ranks and all(len(one) == 1 for one in losses.values())
        problems += [] if whole or ran.why else [f"{how} has {len(losses)} losses"]
    return [Check(job.name, "failed" if problems else "passed", round(ran.seconds, 1), "; ".join(problems))]


def same_tree(quiet: Sequence[GoldenRun]) -> list[Check | Figure]:
    """Compare the losses of the fixed tree at different numbers of ranks."""
    whole = [one for one in quiet if "tree" in one.job.how and not one.why]
    if len(whole) < 2:
        return []
    name = f"tree, {' and '.join(str(one.job.ranks) for one in whole)} ranks, no fault: the same losses"
    by_step = [{step: loss for (step, _), loss in one.events.losses("tree").items()} for one in whole]
    steps = set.intersection(*map(set, by_step))
    wrong = sorted(step for step in steps if any(one[step] != by_step[0][step] for one in by_step))
    return [Check(name, "failed" if wrong else "passed", why=f"other losses at steps {wrong[:5]}" if wrong else "")]
