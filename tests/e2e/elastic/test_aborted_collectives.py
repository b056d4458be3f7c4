"""The garbage that an aborted collective returns never reaches the next world."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.fault_injection import FaultPlan, InjectionPhase
from tests.support import nccl_like
from tests.support.golden_runs import (
    GoldenRun,
    assert_all_injected_once,
    assert_same_training,
    assert_worlds_consistent,
    golden_run,
    state_sum,
)
from tests.support.golden_training import AHEAD, DEVICE
from tieredckpt.tensors.device import accelerator

pytestmark = pytest.mark.e2e

__all__ = ["golden_run"]

KILLED_AT = 6
"""A step that does not directly follow a saved step."""


BACKENDS = [nccl_like.NAME, *([DEVICE] if accelerator().device_count() else [])]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the steps of an undisturbed run on the same devices."""
    found: dict[str, list[dict[str, Any]]] = {}

    def learned(backend: str = "gloo") -> list[dict[str, Any]]:
        if backend not in found:
            one = GoldenRun(tmp_path_factory.mktemp("quiet"), "plain", "plain", FaultPlan(), backend=backend)
            try:
                one.wait_finished(one.start_run(spare_nodes=0, total=12), 120)
                found[backend] = one.committed_steps()
            finally:
                one.close()
        return found[backend]

    return learned


@pytest.mark.parametrize("backend", BACKENDS)
def test_rank_killed_inside_an_all_reduce_does_not_change_the_result(golden_run, undisturbed, backend) -> None:
    expected = undisturbed(DEVICE if backend == DEVICE else "gloo")
    # The survivor is in the step when its peer is killed: the peer waits for it in the first of the step's all-reduces.
    survivor = FaultPlan().at(step=KILLED_AT, phase=InjectionPhase.FORWARD, rank=0).slow(seconds=0.001)
    faults = survivor.then(step=KILLED_AT, phase=InjectionPhase.ALLREDUCE, rank=1).sigkill()
    job = golden_run("plain", faults, backend=backend)
    job.wait_finished(job.start_run(total=12), 120)
    assert_all_injected_once(job)
    assert_worlds_consistent(job)
    ended = [one for one in job.log_lines("step") if one["step"] == job.total - 1]
    assert state_sum(ended, job.total - 1) == expected[-1]["sum"], "the result differs from a run without faults"
    assert_same_training(job.committed_steps(), expected)
    assert len({one["pid"] for one in job.log_lines("world")}) == 3, "the survivor is the same process"
    begun = {one["first"] for one in job.log_lines("world") if one["epoch"] == 1}
    if backend == DEVICE:  # the host runs ahead, so queued work does not count as completed
        assert max(begun) <= KILLED_AT
    else:  # the survivor keeps the steps that it completed, saved or not
        assert begun == {KILLED_AT}


def test_work_queued_at_a_ranks_death_is_not_reported_as_completed(golden_run, undisturbed) -> None:
    """The host queues steps ahead of the hung collective and records them before the abort."""
    faults = FaultPlan().at(step=KILLED_AT, phase=InjectionPhase.ALLREDUCE, rank=1).sigkill()
    job = golden_run("plain", faults, backend=AHEAD)
    job.wait_finished(job.start_run(total=12), 120)
    assert_all_injected_once(job)
    assert_same_training(job.committed_steps(), undisturbed())
    assert all(one["first"] <= KILLED_AT for one in job.log_lines("world"))
