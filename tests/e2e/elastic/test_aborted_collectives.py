"""A collective that is aborted returns with garbage, and training goes on: no bit of that is in the next world."""

from __future__ import annotations

import pytest

from elastic.inject import Faults, Phase
from tests.support import nccl_like
from tests.support.golden_runs import (
    Golden,
    assert_all_happened_once,
    assert_same_bits,
    assert_worlds_hold,
    golden,
    sum_of,
)
from tests.support.golden_training import AHEAD

pytestmark = pytest.mark.e2e

__all__ = ["golden"]

KILLED_AT = 6
"""Not a step that follows one that was saved."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    one = Golden(tmp_path_factory.mktemp("quiet"), "plain", "plain", Faults())
    try:
        one.see_through(one.begin(spare_nodes=0, total=12), 120)
        return one.committed()
    finally:
        one.close()


def test_a_rank_killed_inside_an_all_reduce_leaves_no_trace(golden, undisturbed) -> None:
    faults = Faults().at(step=KILLED_AT, phase=Phase.ALLREDUCE, rank=1).sigkill()
    job = golden("plain", faults, backend=nccl_like.NAME)
    job.see_through(job.begin(total=12), 120)
    assert_all_happened_once(job)
    assert_worlds_hold(job)
    ended = [one for one in job.lines("step") if one["step"] == job.total - 1]
    assert sum_of(ended, job.total - 1) == undisturbed[-1]["sum"], "it learned something else than without a fault"
    assert_same_bits(job.committed(), undisturbed)
    # What the survivor had completed before is not lost, saved or not, and it is the same process.
    assert {one["first"] for one in job.lines("world") if one["epoch"] == 1} == {KILLED_AT}
    assert len({one["pid"] for one in job.lines("world")}) == 3


def test_what_was_only_asked_for_when_a_rank_was_killed_is_not_taken_for_done(golden, undisturbed) -> None:
    """The host is steps ahead of the collective that hangs: it has stepped, and noted that, before it hears of it."""
    faults = Faults().at(step=KILLED_AT, phase=Phase.ALLREDUCE, rank=1).sigkill()
    job = golden("plain", faults, backend=AHEAD)
    job.see_through(job.begin(total=12), 120)
    assert_all_happened_once(job)
    assert_same_bits(job.committed(), undisturbed)
    assert all(one["first"] <= KILLED_AT for one in job.lines("world"))
