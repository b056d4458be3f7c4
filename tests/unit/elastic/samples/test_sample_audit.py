import json

import numpy as np
import pytest

from elastic.samples.sample_audit import SampleAudit, SampleLog, sample_sum, verify_sample_logs
from elastic.samples.sample_schedule import SampleOrder, SampleSchedule
from tests.support.batch_shares import position_after

COURSE = SampleSchedule(SampleOrder(10, 3), 4)
DROPPING = SampleSchedule(SampleOrder(10, 3), 4, "drop")


def batch(step, course=COURSE):
    """Return the epochs and indices of a step."""
    stretch = course.batch_at(position_after(course, step).cursor)
    order = course.order
    return order.epochs(stretch.first, stretch.size), order.indices(stretch.first, stretch.size)


def full(steps, course=COURSE):
    ledger = SampleAudit()
    for step in range(steps):
        ledger.record(step, *batch(step, course))
    return ledger


@pytest.mark.parametrize(
    "course", [COURSE, DROPPING, SampleSchedule(SampleOrder(10, 3), 4, "short"), SampleSchedule(SampleOrder(3, 3), 8)]
)
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
def test_a_job_without_faults_is_in_order(course, steps):
    assert full(steps, course).verify(course, position_after(course, steps).cursor) == []


def test_a_sum_is_of_a_set():
    one = np.array([5, 2**40, 7])
    assert sample_sum(one) == sample_sum(one[::-1]) == sample_sum(one[:1]).combined(sample_sum(one[1:]))
    assert sample_sum(one) != sample_sum(np.array([5, 2**40, 8]))
    assert sample_sum(np.array([1, 4])) != sample_sum(np.array([2, 3]))


def test_ranks_add_up():
    ranks = SampleAudit(), SampleAudit(), SampleAudit()
    for step in range(5):
        epochs, indices = batch(step)
        for number, ledger in enumerate(ranks):
            ledger.record(step, epochs[number::3], indices[number::3])
    total = SampleAudit()
    for ledger in ranks:
        total.merge(SampleAudit.from_state(json.loads(json.dumps(ledger.state()))))
    assert total.verify(COURSE, position_after(COURSE, 5).cursor) == []
    total.merge(ranks[1])
    assert total.verify(COURSE, position_after(COURSE, 5).cursor) == [
        "epoch 0: samples used are 13 of 10",
        "epoch 1: samples used are 12 of 10",
    ]


def test_a_gap_a_repeat_and_a_wrong_sample_are_seen():
    cursor = position_after(COURSE, 2).cursor
    assert full(1).verify(COURSE, cursor) == ["epoch 0: samples used are 4 of 8"]
    assert full(3).verify(COURSE, cursor) == ["epoch 0: samples used are 10 of 8", "epoch 1: samples used are 2 of 0"]
    wrong = full(2)
    epochs, indices = batch(1)
    wrong.record(1, epochs, np.roll(np.append(indices[:-1], indices[0]), 1))
    assert wrong.verify(COURSE, cursor) == ["epoch 0: samples used are 8, but not the right ones"]


def test_audit_drops_rewound_steps_and_replaces_repeated_ones():
    ledger = full(7)
    ledger.rewind(3)
    assert ledger.verify(COURSE, position_after(COURSE, 3).cursor) == []
    ledger.record(2, *batch(2))
    ledger.record(3, *batch(3))
    assert ledger.verify(COURSE, position_after(COURSE, 4).cursor) == []


def test_a_restored_audit_rewinds():
    ledger = full(7)
    again = SampleAudit.from_state(ledger.state())
    assert again.state() == ledger.state()
    again.rewind(5)
    assert again.verify(COURSE, position_after(COURSE, 5).cursor) == []


@pytest.fixture
def journals(tmp_path):
    """Two ranks, one killed in step 2; another world repeats steps 1 and 2 and continues."""
    paths = [tmp_path / name for name in ("0.jsonl", "1.jsonl", "2.jsonl")]
    first, killed, new = (SampleLog(path) for path in paths)
    for step in range(3):
        epochs, indices = batch(step)
        first.record(1, step, epochs[:2], indices[:2])
        if step < 2:
            killed.record(1, step, epochs[2:], indices[2:])
    for step in range(1, 5):
        epochs, indices = batch(step)
        first.record(2, step, epochs[:1], indices[:1])
        new.record(2, step, epochs[1:], indices[1:])
    for journal in (first, killed, new):
        journal.close()
    return paths


def test_journals_of_a_job_with_a_fault_are_in_order(journals):
    for steps in range(6):
        assert verify_sample_logs(journals, COURSE, steps, position_after(COURSE, steps).cursor) == []


def test_sample_logs_report_repeated_missing_and_early_samples(journals):
    cursor = position_after(COURSE, 5).cursor
    with SampleLog(journals[0]) as journal:
        epochs, indices = batch(0)
        journal.record(2, 4, epochs[:1], indices[:1])
    assert verify_sample_logs(journals, COURSE, 5, cursor) == [
        f"sample {indices[0]} of epoch 0 was used 2 times, at steps [0, 4]"
    ]
    assert verify_sample_logs(journals[:2], COURSE, 5, cursor)[0].endswith("was never used")
    undue = verify_sample_logs(journals, COURSE, 4, position_after(COURSE, 3).cursor)
    assert len(undue) == 4
    assert all("was used at step 3, and is not due yet" in words for words in undue)


def test_incomplete_line_is_ignored(journals):
    with journals[1].open("ab") as file:
        file.write(b'{"world": 9, "step": 0, "epo')
    assert verify_sample_logs(journals, COURSE, 5, position_after(COURSE, 5).cursor) == []
