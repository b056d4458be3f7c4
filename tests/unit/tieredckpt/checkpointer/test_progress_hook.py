"""The step that a restore is required to load, for one job or for any job."""

from __future__ import annotations

from tieredckpt.checkpointer.progress_hook import (
    ANY_JOB,
    ExpectedStep,
    check_restored_step,
    gather_expected_step,
    require_step,
)


def expected(job):
    return gather_expected_step(job, lambda text: [text])


def test_step_required_of_any_job_counts_for_the_first_restore():
    wanted = ExpectedStep(7, "elastic run --resume-from 7", is_required=True)
    with require_step(ANY_JOB, 7, None, wanted.source):
        assert expected("llama") == wanted
        check_restored_step("llama", wanted, 7)
        assert expected("llama") is None
        assert expected("other") is None


def test_step_required_of_a_job_counts_before_that_of_any_job():
    with require_step(ANY_JOB, 7, None, "the command line"), require_step("llama", 9, 17, "the ranks"):
        assert expected("llama") == ExpectedStep(9, "the ranks", is_required=True, epoch=17)
        check_restored_step("llama", expected("llama"), 9)
        assert expected("llama") == ExpectedStep(7, "the command line", is_required=True)
    assert expected("llama") is None
