"""Sections "golden" and "aborts" of ``make test-gpu``: jobs, their order, and their checks."""

from __future__ import annotations

import msgspec

from elastic.fault_injection.fault_actions import RANK_ACTIONS
from elastic.fault_injection.fault_spec import InjectionKind
from tests.gpu.golden_jobs import (
    FIRST_STEP,
    GAP,
    KINDS,
    NODE_KINDS,
    PLACES,
    Fault,
    GoldenEvents,
    GoldenJob,
    GoldenRun,
    faults_from,
    faulty_jobs,
    judged_job,
    judged_quiet,
    quiet_jobs,
    same_tree,
)
from tests.gpu.report import Check, Figure

JOB = GoldenJob(("ddp",), 2, 1, faults=faults_from("sigkill@inside exception@after", 2)).planned()
KILLED_AT, AFTER = 104.5, {"leaves": 0.5, "entered": 0.75, "restored": 1.0}


def step(number: int, rank: int, at: float, *, epoch: int = 0, how: str = "ddp", loss: str = "") -> dict:
    loss = loss or f"{how} {number} {rank}"
    line = {"what": "step", "how": how, "step": number, "rank": rank, "size": 2, "epoch": epoch, "pid": 10 + rank}
    return {**line, "loss": loss, "sum": 1000 * number + rank, "at": at}


def quiet_run(**changed) -> GoldenRun:
    events = [step(number, rank, float(number), **changed) for number in range(JOB.total) for rank in range(2)]
    return GoldenRun(GoldenJob(("ddp",), 2, totals={"ddp": JOB.total}), 5.0, "", GoldenEvents(events))


def faulty_events() -> list[dict]:
    """Rank 1 is killed in step 4, rank 0 raises in step 6."""
    events = []
    for number in range(JOB.total):
        epoch = (number >= FIRST_STEP) + (number >= FIRST_STEP + GAP)
        at = 100.0 + number + 2.0 * epoch
        events += [step(number, rank, at + rank / 4, epoch=epoch) for rank in range(2)]
    for number, fault in enumerate(JOB.faults):
        at, rank = KILLED_AT + 4.0 * number - 0.5 * number, fault.rank
        place = {"epoch": number, "rank": rank, "step": fault.step, "node": "n0"}
        events.append({"what": "fault", "name": fault.file, "kind": fault.kind, "at": at, "pid": 10 + rank, **place})
        for what, after in AFTER.items():
            epoch = number if what == "leaves" else number + 1
            events += [
                {"what": what, "at": at + after, "epoch": epoch, "rank": one, "pid": 10 + one} for one in range(2)
            ]
    return events


def judged(events: list[dict], why: str = "", quiet: GoldenRun | None = None) -> dict[str, Check]:
    ran = GoldenRun(JOB, 30.0, why, GoldenEvents(events))
    found = judged_job(ran, quiet or quiet_run(), "here")
    return {one.name.partition(": ")[2]: one for one in found if isinstance(one, Check)}


def test_golden_jobs_cover_every_fault_place_and_parallelism():
    found = {(one.how[0], fault.kind, fault.place) for one in faulty_jobs() for fault in one.faults}
    wanted = {(how, kind, place) for how in ("ddp", "fsdp", "hsdp") for kind in KINDS for place in PLACES}
    assert wanted <= found
    assert {(how, kind) for how in ("ddp", "fsdp", "hsdp") for kind in NODE_KINDS} <= {one[:2] for one in found}
    assert {one.ranks for one in faulty_jobs()} == {2, 4}
    assert {fault.nodes for one in faulty_jobs() for fault in one.faults if fault.kind == "resize"} == {0, 1}
    assert all(
        InjectionKind(kind) in RANK_ACTIONS for kind in (*KINDS, *NODE_KINDS) if kind not in ("nan", "partition")
    )


def test_golden_jobs_have_names_of_their_own_and_references():
    jobs = faulty_jobs()
    assert len({one.name for one in jobs}) == len(jobs)
    quiet = {one.ranks: one for one in quiet_jobs(jobs)}
    for one in jobs:
        assert one.how[0] in quiet[one.ranks].how
        assert one.total <= quiet[one.ranks].totals[one.how[0]]
        assert msgspec.json.decode(msgspec.json.encode(one), type=GoldenJob) == one
        assert len({fault.file for fault in one.faults}) == len(one.faults)


def test_fault_waits_for_spares_and_replacements():
    job = GoldenJob(("ddp",), 2, 2, faults=faults_from("sigkill@inside exception@after hang@before oom@after", 2))
    planned = job.planned()
    assert [one.processes for one in planned.faults] == [3, 4, 4, 5]
    assert [one.step for one in planned.faults] == [FIRST_STEP + GAP * number for number in range(4)]
    nodes = GoldenJob(("hsdp",), 4, nodes=2, spare_nodes=1, faults=faults_from("node@inside agent@after", 4)).planned()
    assert [one.processes for one in nodes.faults] == [6, 8]
    assert GoldenJob(("ddp",), 2, faults=(Fault("sigkill"),)).planned().faults[0].processes == 2


def test_equal_runs_pass_and_report_the_last_rank_of_each_stage():
    checks = judged(faulty_events())
    assert {one.outcome for one in checks.values()} == {"passed"}
    assert len(checks) == len(JOB.faults) + 1
    found = judged_job(GoldenRun(JOB, 30.0, "", GoldenEvents(faulty_events())), quiet_run(), "here")
    killed = [one for one in found if isinstance(one, Figure) and "sigkill" in one.name]
    assert [(one.name.rpartition(" ")[2], one.value) for one in killed] == [
        ("leaves", 0.5), ("entered", 0.75), ("restored", 1.0), ("step", 1.75)
    ]  # fmt: skip


def test_other_loss_fails_its_fault_and_the_run():
    events = faulty_events()
    events.append(step(FIRST_STEP + 1, 1, 150.0, epoch=1, loss="other"))
    checks = judged(events)
    assert checks["sigkill inside the backward pass"].why == "other losses at (step, rank) [(5, 1)]"
    assert checks["exception after the backward pass"].outcome == "passed"
    assert checks["every loss and the final parameters"].outcome == "failed"


def test_missing_loss_and_other_parameters_fail():
    missing = [one for one in faulty_events() if not (one["what"] == "step" and (one["step"], one["rank"]) == (7, 0))]
    checks = judged(missing)
    assert checks["exception after the backward pass"].why == "no losses at (step, rank) [(7, 0)]"
    events = faulty_events()
    next(one for one in events if one["what"] == "step" and one["step"] == JOB.total - 1)["sum"] = 5
    assert judged(events)["every loss and the final parameters"].why == "the final parameters differ"


def test_run_that_hangs_fails_at_its_fault_and_later_faults_are_not_run():
    events = [one for one in faulty_events() if one["at"] <= KILLED_AT]
    checks = judged(events, "not finished in 60 s")
    assert checks["sigkill inside the backward pass"].outcome == "failed"
    assert checks["sigkill inside the backward pass"].why == "no step was completed after it: not finished in 60 s"
    later = checks["exception after the backward pass"]
    assert (later.outcome, later.why) == ("not run", "the run failed before it")
    assert checks["every loss and the final parameters"].outcome == "failed"


def test_run_that_ends_early_is_compared_up_to_its_end():
    late = JOB.faults[1]
    events = [one for one in faulty_events() if one.get("name") != late.file and one.get("step", 0) < late.step]
    assert judged(events)["every loss and the final parameters"].outcome == "failed"
    events.append({"what": "skipped", "name": late.file, "step": late.step, "at": 110.0, "pid": 10})
    checks = judged(events)
    later = checks["exception after the backward pass"]
    assert (later.outcome, later.why) == ("not run", "no time left")
    assert checks["every loss and the final parameters"].outcome == "passed"


def test_failed_reference_proves_nothing():
    quiet = msgspec.structs.replace(quiet_run(), why="exit code 1")
    assert all(one.outcome == "failed" for one in judged(faulty_events(), quiet=quiet).values())
    (check,) = judged_quiet(quiet)
    assert (check.outcome, check.why) == ("failed", "exit code 1")
    assert judged_quiet(quiet_run())[0].outcome == "passed"


def test_resized_run_is_compared_by_step():
    job = GoldenJob(("tree",), 2, nodes=2, faults=(Fault("resize", nodes=1),)).planned()
    quiet = quiet_run(how="tree", loss="same")
    events = [step(number, 0, float(number), how="tree", loss="same") for number in range(JOB.total)]
    ran = GoldenRun(job, 9.0, "", GoldenEvents(events))
    last = judged_job(ran, quiet, "here")[-1]
    assert last.why == "the final parameters differ", "one rank of two"
    events[3]["loss"] = "other"
    assert "other losses at (step, rank) [(3, 0)]" in judged_job(ran, quiet, "here")[-1].why


def test_fixed_tree_has_the_same_losses_at_every_size():
    one, other = (quiet_run(how="tree", loss="same") for _ in range(2))
    for run in (one, other):
        run.job = msgspec.structs.replace(run.job, how=("tree",))
    assert [check.outcome for check in same_tree([one, other])] == ["passed"]
    other.events.events[0]["loss"] = other.events.events[1]["loss"] = "other"
    assert same_tree([one, other])[0].why == "other losses at steps [0]"
    assert same_tree([one]) == []


def abort_lines(epochs: int, *, grows: int = 0) -> list[dict]:
    lines = []
    for epoch in range(epochs + 1):
        lines.append({"epoch": epoch, "begins": "initialize"})
        sizes = {"descriptors": 20, "threads": 5, "rss": (100 << 20) + grows * epoch, "device": 0}
        lines.append({"epoch": epoch, "stages": {"abort": 0.5}, "sizes": sizes, "took_s": [1.0] if epoch else []})
    return lines


def abort_checks(lines: list[list[dict]], why: str = "") -> list[tuple[str, str, str]]:
    from tests.gpu.aborts import judged as judged_aborts

    found = judged_aborts("nccl", 100, lines, why, "here")
    return [(one.name.partition(" ")[0], one.outcome, one.why) for one in found if isinstance(one, Check)]


def test_aborts_report_100_only_when_100_ran():
    assert abort_checks([abort_lines(100)] * 2) == [("100", "passed", "")]
    assert abort_checks([abort_lines(41), abort_lines(40)]) == [
        ("40", "passed", ""), ("100", "not run", "the time was enough for 40")
    ]  # fmt: skip
    (check,) = abort_checks([abort_lines(7)] * 2)
    assert check == ("100", "not run", "the time was enough for 7, and 25 show whether memory grows")


def test_aborts_fail_where_memory_grows_or_a_rank_hangs():
    (check,) = abort_checks([abort_lines(100, grows=2 << 20), abort_lines(100)])
    assert check[1] == "failed"
    assert "rss grew by" in check[2]
    hung = [*abort_lines(30), {"epoch": 31, "begins": "first all-reduce"}]
    (check,) = abort_checks([hung, abort_lines(30)], "rank 0 did not end in 60 s")
    assert check[2] == "rank 0 did not end in 60 s; rank 0 was in 'first all-reduce' of epoch 31"
