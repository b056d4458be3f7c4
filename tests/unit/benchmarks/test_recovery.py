"""The stages of P9, computed from the records of ranks, and reports of incomplete records."""

from __future__ import annotations

import pytest

from benchmarks import recovery
from benchmarks.goals import failed, judge
from benchmarks.recovery import AGAIN, FT, FT_REST, OURS, SPARE, Recovered, healed, rebuilt, usual

AT = 100.0
OLD, NEW = (1, 2, 3, 4), (1, 2, 3, 5)
"""Process 4 is killed, and 5 comes instead of it."""


def line(pid, what, after, **values):
    return {"pid": pid, "what": what, "at": AT + after, **values}


def steps(pids, step, after, **values):
    return [line(pid, "stepped", after + rank / 100, step=step, rank=rank, **values) for rank, pid in enumerate(pids)]


def looked(pids, step, after, sums="abcd"):
    return [
        line(pid, "looked", after, step=step, rank=rank, sum=sums[rank % len(sums)]) for rank, pid in enumerate(pids)
    ]


def again(pids, began, first):
    """All of them from the groups to the first step, a tenth of a second each; the last rank is the last."""
    whats = ("grouped", "entered", "built", "loaded", "fed", "stepped")
    return [
        line(pid, what, began + number / 10 + rank / 100, rank=rank, step=first - (what == "loaded"))
        for number, what in enumerate(whats)
        for rank, pid in enumerate(pids)
    ]


def total(found):
    return {name: round(seconds, 3) for name, seconds in found.stages.items()}


def test_stages_of_ranks_that_stay():
    before = [line(pid, what, -9) for pid in (*OLD, 5) for what in ("imported", "ready")] + steps(OLD, 7, -0.5)
    left = [line(pid, what, after) for pid in (1, 2, 3) for what, after in (("heard", 0.1), ("ready", 0.3))]
    assigned = [line(pid, "assigned", 0.35) for pid in NEW]
    found = rebuilt([*before, *left, *assigned, *again(NEW, 1.0, 7), *looked(NEW, 9, 3.0)], AT, 0.0)
    assert total(found) == {
        "detect": 0.1, "abort": 0.2, "imports": 0.0, "rendezvous": 0.05, "groups": 0.68, "survivors": 0.1, "model": 0.1,
        "hydrate": 0.1, "loader": 0.1, "first step": 0.1,
    }  # fmt: skip
    assert found.total_s == pytest.approx(1.53)
    assert (found.lost, found.step, found.sums, found.same) == (1, 9, ["a", "b", "c", "d"], True)


def test_a_step_takes_as_long_as_its_last_rank_needs():
    ends = {3: -9.0, 4: -7.0, 5: -6.0, 6: -4.5}
    lines = [one for step, after in ends.items() for one in steps(OLD, step, after)]
    lines += steps(OLD[:3], 7, -1.0)  # not one of all ranks
    lines += steps(OLD, 8, -0.5, together=3)
    assert usual(lines) == pytest.approx(1.5)
    assert usual(steps(OLD, 3, -9.0)) == 0.0


def test_rebuilt_times_include_the_wait_for_the_restarted_rank():
    before = [line(pid, what, -9) for pid in OLD for what in ("imported", "ready")] + steps(OLD, 7, -0.5)
    left = [line(pid, what, after) for pid in (1, 2, 3) for what, after in (("heard", 0.1), ("ready", 0.3))]
    anew = [line(5, "imported", 4.0, began=AT + 0.5), line(5, "ready", 4.1)]
    assigned = [line(pid, "assigned", 4.2) for pid in NEW]
    found = total(rebuilt([*before, *left, *anew, *assigned, *again(NEW, 5.0, 8), *looked(NEW, 9, 7.0)], AT, 0.0))
    assert (found["abort"], found["imports"], found["rendezvous"]) == (0.2, 3.7, 0.2)


def test_stages_of_a_full_restart_include_the_imports():
    new = (5, 6, 7, 8)
    before = [line(pid, "imported", -9, began=AT - 12) for pid in OLD] + steps(OLD, 7, -0.5)
    anew = [line(pid, "imported", 6.0 + rank / 10, began=AT + 2) for rank, pid in enumerate(new)]
    lines = [*before, line(1, "heard", 0.1), *anew, *again(new, 7.0, 6), *looked(new, 8, 9.0)]
    found = rebuilt(lines, AT, AT + 1.0)
    assert [total(found)[name] for name in ("detect", "abort", "rendezvous", "imports")] == [0.1, 0.9, 1.0, 4.3]
    assert found.lost == 2


def test_ranks_that_resume_from_different_steps_are_reported():
    lines = [*steps(OLD, 7, -0.5), *again(NEW, 1.0, 7), *looked(NEW[:3], 9, 3.0), *looked((5,), 8, 3.0)]
    lines += [line(5, "imported", 0.5, began=AT + 0.2)]
    lines = [one | ({"step": 3} if one["what"] == "loaded" and one["pid"] == 5 else {}) for one in lines]
    found = rebuilt(lines, AT, AT)
    assert not found.same
    assert found.step == -1


def test_survivors_continue_and_the_new_rank_is_healed():
    before = [line(pid, "imported", -9, began=AT - 12) for pid in OLD] + steps(OLD, 7, -0.5, together=4)
    rest = [line(1, "refused", 0.2, step=8), *steps(OLD[:3], 8, 1.5, together=3)]
    anew = [line(5, "imported", 4.0, began=AT + 0.5), line(5, "built", 4.1), line(5, "fed", 4.2)]
    healing = [
        *(line(pid, what, 4.3) for pid in NEW for what in ("grouped", "entered")),
        line(5, "loaded", 4.6),
        *steps(NEW, 9, 5.0, together=4),
    ]
    found = healed([*before, *rest, *anew, *healing, *looked(NEW, 11, 6.0)], AT, AT)
    assert found.early_s == pytest.approx(1.5)
    assert found.total_s == pytest.approx(5.03)
    assert (found.lost, found.step, found.trouble) == (0, 11, "")
    assert total(found)["imports"] == 3.5


def test_table_note_names_the_error_of_ended_survivors():
    before = [line(pid, "imported", -9, began=AT - 12) for pid in OLD] + steps(OLD, 7, -0.5, together=4)
    new = (5, 6, 7, 8)
    died = [line(1, "heard", 0.1, error="AssertionError: ")]
    anew = [line(pid, "imported", 4.0, began=AT + 1) for pid in new]
    found = healed([*before, *died, *anew, *steps(new, 0, 5.0, together=4), *looked(new, 2, 6.0)], AT, AT)
    assert found.lost == 8
    assert "AssertionError" in found.trouble
    (row, *_) = recovery._rows(FT, [found], [])
    assert "Steps lost: 8" in row["note"]
    assert "In 1 of 1 rounds surviving ranks ended too (AssertionError: )" in row["note"]


def one(seconds, same=True, usual_s=0.0):
    stages = dict.fromkeys(recovery._ORDER, 0.0) | {"detect": seconds}
    return Recovered(stages, 1, 9, ["a"], usual_s, same=same)


def test_target_verdicts_and_differing_rows_are_reported():
    rows = [
        *recovery._rows(SPARE, [one(1.0)], []),
        *recovery._rows(OURS, [one(4.0)], []),
        *recovery._rows(AGAIN, [one(16.0, same=False)], []),
        *recovery._rows(FT_REST, [], ["Timed out after 120 s waiting until 4 ranks train again.\nand much more"]),
    ]
    group = {"subject": "P9", "title": "64 MiB, DDP, a rank is killed", "state": "", "rows": rows}
    assert [(verdict.value, verdict.met) for verdict in judge([group])] == [(16.0, True), (4.0, False)]
    assert failed(group) == [AGAIN]
    assert rows[-1]["note"] == "did not recover: Timed out after 120 s waiting until 4 ranks train again."


def test_step_slowdown_by_a_fault_is_judged():
    found = {SPARE: [one(2.0, usual_s=1.0), one(3.0, usual_s=1.0)], AGAIN: [one(16.0, usual_s=1.0)] * 2}
    rows = [row for name in found for row in recovery._rows(name, found[name], [])] + recovery._by_stage(found)
    group = {"subject": "P9", "title": "64 MiB, DDP, a rank is killed", "state": "", "rows": rows}
    assert [verdict.value for verdict in judge([group])] == [(16 / 2 + 16 / 3) / 2, (15 + 7.5) / 2]
    assert rows[-1]["name"] == f"undisturbed step: {AGAIN}"


def test_stages_are_compared_and_failed_rounds_are_reported():
    rows = recovery._by_stage({SPARE: [one(1.0), one(2.0)], AGAIN: [one(16.0)], FT: []})
    assert [row["name"] for row in rows[:4]] == [
        f"{stage}: {name}" for stage in ("detect", "abort") for name in (SPARE, AGAIN)
    ]
    assert rows[0]["samples"] == [1.0, 2.0]
    rows += [
        *recovery._rows(SPARE, [one(1.0), one(2.0)], []),
        *recovery._rows(AGAIN, [one(30.0)], ["Timed out after 120 s waiting until x."]),
    ]
    group = {"subject": "P9", "title": "64 MiB, DDP, a rank is killed", "state": "", "rows": rows}
    assert [verdict.value for verdict in judge([group])] == [20.0]
    assert "Did not recover in 1 more rounds" in rows[-1]["note"]


def test_rows_without_a_gpu_are_marked_skipped(monkeypatch):
    monkeypatch.setattr(recovery.torch.cuda, "is_available", lambda: False)
    rows = recovery.run(0, None, fault=recovery.RANK, model="DDP", device="cuda")
    assert {(row["name"], row["note"]) for row in rows} == {
        (name, "skipped: no GPU") for name in (SPARE, OURS, AGAIN, FT, FT_REST)
    }
