"""The judge finds each planted violation, and none in a correct run."""

from __future__ import annotations

import math

import msgspec
import pytest

from elastic.control.control_messages import ExitReason
from elastic.launcher import JobEnd, end_message
from tests.faults.job import resume_line
from tests.faults.judge import (
    RESUME_STEP,
    AppliedFault,
    CommandRun,
    Evidence,
    RankStep,
    RankWorld,
    ReferenceStep,
    SafeStep,
    Sealed,
    judge,
    memory_outages,
)
from tests.faults.schedule import FaultKind

BATCH, DATA = 4, 10
NODES = ("n0", "n1")
KNOWN = [
    ReferenceStep(
        f"loss-{step}", f"norm-{step}", f"rate-{step}", 100 + step, [(step * BATCH + i) % DATA for i in range(BATCH)]
    )
    for step in range(12)
]


def steps(world, first, stop, *, at=100.0, size=2, **changed):
    """Return the records of all ranks of a world for these steps, a second each."""
    return [
        RankStep(
            *world,
            rank,
            size,
            at + step,
            10 * world[1] + rank,
            step,
            *bits_of(step),
            part_of(step, rank, size),
            **changed,
        )
        for step in range(first, stop)
        for rank in range(size)
    ]


def bits_of(step):
    return KNOWN[step].loss, KNOWN[step].norm, KNOWN[step].rate


def part_of(step, rank, size):
    share = BATCH // size
    return KNOWN[step].samples[rank * share : (rank + 1) * share]


def world(key, first, *, at=100.0, size=2):
    return [RankWorld(*key, rank, size, at, 10 * key[1] + rank, NODES[rank % 2], first) for rank in range(size)]


def safe(key, step, copies=2, *, at, size=2):
    return [SafeStep(*key, rank, size, at, step, copies) for rank in range(size)]


def sealed(key, step, number, *, at, size=2, name=""):
    return [Sealed(*key, rank, size, at, step, number, name or f"name-{number}") for rank in range(size)]


def sums(*many):
    return {(one.run, one.epoch, one.step): KNOWN[one.step].sum for one in many}


def good(**changed):
    """Return the evidence of a correct run of two worlds.

    The first world does steps 0 to 5, and step 5 is acknowledged. A rank is killed. The second world begins at step 6.
    """
    done = [*steps((0, 0), 0, 6), *steps((0, 1), 6, 12, at=110.0)]
    found = Evidence(
        worlds=[*world((0, 0), 0), *world((0, 1), 6, at=112.0)],
        steps=done,
        safe=safe((0, 0), 5, at=106.0),
        sealed=[*sealed((0, 0), 5, 1000, at=106.0), *sealed((0, 1), 11, 1100, at=121.0)],
        lines=[AGAIN],
        faults=[AppliedFault(0, FaultKind.RANK_KILLED, 107.0, 107.0, "n1", step=5)],
        runs=[CommandRun(0, "", 90.0, 130.0)],
        sums=sums(*done),
        final=12,
    )
    return msgspec.structs.replace(found, **changed)


def rules(evidence):
    return {one.rule for one in judge(evidence, KNOWN, DATA)}


def changed(many, index, **fields):
    return [msgspec.structs.replace(one, **fields) if i == index else one for i, one in enumerate(many)]


def test_correct_run_has_no_violations():
    assert judge(good(), KNOWN, DATA) == []


@pytest.mark.parametrize("field", ["loss", "norm", "rate"])
def test_changed_bit_of_one_rank_is_found(field):
    assert rules(good(steps=changed(good().steps, 7, **{field: "another"}))) == {"bits"}


def test_wrong_state_is_found():
    assert rules(good(sums={**good().sums, (0, 1, 8): 5})) == {"bits"}
    assert rules(good(sums={**good().sums, (0, 1, 8): "replicas differ in ('w',)"})) == {"bits"}


def test_lost_or_repeated_sample_is_found():
    assert rules(good(steps=changed(good().steps, 4, samples=[0, 0]))) == {"samples"}
    assert rules(good(steps=changed(good().steps, 4, samples=[]))) == {"samples"}
    without = [one for one in good().steps if one.step != 8]
    assert "samples" in rules(good(steps=without))


def test_rank_killed_before_recording_its_last_step_is_no_loss():
    last = [one for one in good().steps if not (one.epoch == 0 and one.step == 5 and one.rank == 1)]
    assert rules(good(steps=last)) == set()
    earlier = [one for one in good().steps if not (one.epoch == 0 and one.step == 4 and one.rank == 1)]
    assert "samples" in rules(good(steps=earlier))


def test_repeated_sample_in_a_data_epoch_is_found():
    twice = [msgspec.structs.replace(one, samples=[0, 1, 2, 3]) for one in KNOWN]
    done = [
        msgspec.structs.replace(one, samples=twice[one.step].samples[one.rank * 2 : one.rank * 2 + 2])
        for one in good().steps
    ]
    assert {one.rule for one in judge(good(steps=done), twice, DATA)} == {"samples"}


def test_resuming_before_a_safe_step_is_a_violation():
    back = good(
        worlds=[*world((0, 0), 0), *world((0, 1), 4, at=112.0)],
        steps=[*steps((0, 0), 0, 6), *steps((0, 1), 4, 12, at=110.0)],
    )
    assert rules(back) == {"acknowledged"}
    not_all = good(worlds=back.worlds, steps=back.steps, safe=safe((0, 0), 5, at=106.0)[:1])
    assert rules(not_all) == set(), "the step was not acknowledged to all ranks"


@pytest.mark.parametrize(
    ("kind", "nodes", "blamed"),
    [
        (FaultKind.NODE_LOST, ("n0",), True),
        (FaultKind.NODE_LOST, ("n0", "n0"), True),
        (FaultKind.NODE_LOST, NODES, False),
        (FaultKind.MEMORY_FLIPPED, NODES, False),
        (FaultKind.AGENT_KILLED, NODES, True),
        (FaultKind.AGENT_STOPPED, NODES, False),
        (FaultKind.RANK_KILLED, NODES, True),
        (FaultKind.SUPERVISOR_KILLED, NODES, True),
    ],
)
def test_only_faults_that_took_every_copy_excuse_an_older_step(kind, nodes, blamed):
    back = good(
        worlds=[*world((0, 0), 0), *world((0, 1), 4, at=112.0)],
        steps=[*steps((0, 0), 0, 6), *steps((0, 1), 4, 12, at=110.0)],
        faults=[AppliedFault(n, kind, 107.0 + n, 107.5 + n, node, step=5) for n, node in enumerate(nodes)],
    )
    assert rules(back) == ({"acknowledged"} if blamed else set())


def test_losses_before_or_after_excuse_nothing():
    back = good(
        worlds=[*world((0, 0), 0), *world((0, 1), 4, at=112.0)],
        steps=[*steps((0, 0), 0, 6), *steps((0, 1), 4, 12, at=110.0)],
    )
    for at in (101.0, 113.0):
        faults = [AppliedFault(n, FaultKind.NODE_LOST, at, at, node) for n, node in enumerate(NODES)]
        assert rules(msgspec.structs.replace(back, faults=faults)) == {"acknowledged"}


def test_durable_step_survives_the_loss_of_every_node():
    back = good(
        worlds=[*world((0, 0), 0), *world((0, 1), 4, at=112.0)],
        steps=[*steps((0, 0), 0, 6), *steps((0, 1), 4, 12, at=110.0)],
        safe=safe((0, 0), 5, copies=0, at=106.0)[:1],
        faults=[AppliedFault(n, FaultKind.NODE_LOST, 107.0, 107.0, node) for n, node in enumerate(NODES)],
    )
    assert rules(back) == {"acknowledged"}
    away = msgspec.structs.replace(back, faults=[AppliedFault(0, FaultKind.DURABLE_DEAD, 108.0, 120.0)])
    assert rules(away) == set()


def test_agent_killed_with_its_supervisor_is_gone():
    killed = AppliedFault(0, FaultKind.AGENT_KILLED, 107.0, 107.0, "n0")
    assert memory_outages([killed]) == []
    assert memory_outages([killed, AppliedFault(1, FaultKind.SUPERVISOR_KILLED, 107.5, 109.0, "n1")]) == []
    ((node, since, until),) = memory_outages([killed, AppliedFault(1, FaultKind.SUPERVISOR_KILLED, 107.5, 109.0, "n0")])
    assert (node, since) == ("n0", 107.0)
    assert until > 109.0


def test_partitioned_hosts_are_both_unreachable():
    cut = AppliedFault(0, FaultKind.CUT, 107.0, 109.0, "n0,n1")
    assert {node for node, _, _ in memory_outages([cut])} == {"n0", "n1"}
    assert memory_outages([msgspec.structs.replace(cut, node="")]) == [], "from the coordinator's host"


def test_two_incarnations_of_one_number_are_found():
    shared = [*good().sealed, *sealed((0, 1), 11, 1100, at=121.0, name="another")]
    assert rules(good(sealed=shared)) == {"incarnations"}


@pytest.mark.parametrize("number", [999, 1000])
def test_later_world_with_an_old_number_is_found(number):
    later = sealed((0, 1), 11, number, at=121.0)
    assert "incarnations" in rules(good(sealed=[*sealed((0, 0), 5, 1000, at=106.0), *later]))


AGAIN = "faults: resumed from step 3 (checkpoint: 4 KiB from memory); 2 steps are done again"
BEHIND = (
    "faults: step 3 was restored, which leaves complete newer steps behind: step 5 of epoch 1000 (step 5: the durable "
    "tier). The job does 2 steps again. To keep step 5: tieredckpt pin faults 5@1000"
)


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], True),
        ([AGAIN], False),
        ([BEHIND], False),
        (["faults: 2 more, which was not restored; resuming from step 3, 2 steps are repeated"], False),
        ([AGAIN.replace("step 3", "step 2")], True),
        ([AGAIN.replace("2 steps are", "1 step is")], True),
        (["faults starts from nothing, and no complete step is lost"], True),
    ],
    ids=["no line", "after a fault", "branch", "expected step", "another step", "too few steps", "from nothing"],
)
def test_repeated_step_without_a_log_line_is_found(lines, found):
    back = good(
        worlds=[*world((0, 0), 0), *world((0, 1), 4, at=112.0)],
        steps=[*steps((0, 0), 0, 6), *steps((0, 1), 4, 12, at=110.0)],
        safe=[],
        lines=lines,
    )
    assert rules(back) == ({"redone"} if found else set())
    not_all = good(worlds=back.worlds, steps=back.steps, safe=[], lines=lines, sealed=back.sealed[1:])
    assert rules(not_all) == set(), "one rank had not sealed the step"


def test_sealed_step_is_named_once_for_all_later_worlds():
    third = [*world((0, 0), 0), *world((0, 1), 4, at=112.0), *world((0, 2), 4, at=116.0)]
    done = [*steps((0, 0), 0, 6), *steps((0, 2), 4, 12, at=114.0)]
    found = good(worlds=third, steps=done, safe=[], lines=[AGAIN], sealed=good().sealed[:2], sums={})
    assert rules(found) == set()


@pytest.mark.parametrize(
    ("words", "first", "expected"),
    [
        ("stopped by a person (resumes from step 5)", 6, set()),
        ("stopped by a person (resumes from step 3)", 4, {"graceful stops"}),
        ("stopped; not all was saved: a rank was lost (resumes from step 3)", 4, set()),
    ],
    ids=["all kept", "one lost", "not graceful"],
)
def test_graceful_stop_that_loses_a_sealed_step_is_found(words, first, expected):
    stopped = good(
        runs=[CommandRun(7, words, 90.0, 108.0), CommandRun(0, "", 109.0, 130.0)],
        worlds=[*world((0, 0), 0), *world((1, 0), first, at=112.0)],
        steps=[*steps((0, 0), 0, 6), *steps((1, 0), first, 12, at=110.0)],
        safe=[],
        faults=[],
        sealed=sealed((0, 0), 5, 1000, at=106.0),
        sums={},
    )
    assert rules(stopped) == expected
    lost = [AppliedFault(0, FaultKind.NODE_LOST, 107.0, 107.0, "n0")]
    assert "graceful stops" not in rules(msgspec.structs.replace(stopped, faults=lost))


def test_ranks_that_do_not_resume_together_are_found():
    different = changed(good().worlds, 3, first=5)
    assert "worlds hold" in rules(good(worlds=different))
    two = [*good().worlds, msgspec.structs.replace(good().worlds[3], pid=99)]
    assert rules(good(worlds=two)) == {"worlds hold"}
    ahead = good(
        worlds=[*world((0, 0), 0), *world((0, 1), 7, at=112.0)], steps=[*steps((0, 0), 0, 6), *steps((0, 1), 7, 12)]
    )
    assert {"worlds hold", "samples"} <= rules(ahead)


def test_run_must_end_with_success_or_a_true_message():
    last = "failed: a fault\nresumes from: {}\ncommand: elastic run"
    runs = [CommandRun(8, last.format("step 5"), 90.0, 111.0), CommandRun(0, "", 111.5, 130.0)]
    again = good(
        runs=runs,
        worlds=[*world((0, 0), 0), *world((1, 0), 6, at=112.0)],
        steps=[*steps((0, 0), 0, 6), *steps((1, 0), 6, 12, at=110.0)],
        sums={},
    )
    assert rules(again) == set()
    newer = " or a newer one"
    for words, found in (
        ("step 4", True), ("step 6", True), ("nothing", True), (f"step 4{newer}", False), (f"step 6{newer}", True)
    ):  # fmt: skip
        wrong = msgspec.structs.replace(
            again, runs=[msgspec.structs.replace(runs[0], words=last.format(words)), runs[1]]
        )
        assert rules(wrong) == ({"endings"} if found else set())
    assert rules(good(runs=[CommandRun(1, "a traceback", 90.0, 130.0)])) == {"endings"}
    assert rules(msgspec.structs.replace(again, runs=runs[:1])) >= {"endings"}


def test_hangs_and_leftovers_are_found():
    assert rules(good(hung="the job did not reach step 9 within 300 s")) == {"hangs"}
    assert rules(good(left=["process 7"])) == {"leftovers"}
    assert rules(good(kept=["3 slots of n0"])) == set(), "the shards have no other copy"
    durable = [*good().safe, *safe((0, 1), 11, copies=0, at=129.0)[:1]]
    assert rules(good(kept=["3 slots of n0"], safe=durable)) == {"leftovers"}


def test_excused_time_is_finite():
    assert memory_outages([AppliedFault(0, FaultKind.AGENT_STOPPED, 1.0, 2.0, "n0")])[0][2] < math.inf


@pytest.mark.parametrize("over", [ExitReason.JOB_FAILED, ExitReason.STOPPED])
@pytest.mark.parametrize("command", ["", "elastic run train.py"])
def test_resume_line_is_found_in_every_last_message(over, command):
    output = f"started\n{end_message(JobEnd(over, 'rank 0 was lost', '2 faults', 7), command=command)}\nended\n"
    found = RESUME_STEP.search(resume_line(output))
    assert found is not None
    assert found[1] == "7"


def test_output_without_a_step_gives_its_last_line():
    assert resume_line("started\nended\n\n") == "ended"
    assert resume_line("") == ""
