"""Real agents, real ranks and an operator: from the same processes to new ones, to new pods, and to an end."""

from __future__ import annotations

import pytest

from integration.hyperpod.operator import Phase
from tests.support.hyperpod_inprocess import done
from tests.support.operated_stories import operated, undisturbed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
pytest.importorskip("hyperpod_elastic_agent")

IN_PROCESS, PROCESS, JOB = "in_process_restart", "process_level_restart", "job_level_restart"


def test_each_budget_that_is_exhausted_leads_to_the_next_level_and_the_last_to_an_end(tmp_path, zygote):
    """One start may be gone through in a process, two restarts with pods that stay, and one of the whole job."""
    limits = {"numRestartBeforeFullJobRestart": 2, "maxFullJobRestarts": 1}
    with operated(tmp_path, limits=limits, environ={"STORY_BUDGET": "1"}) as job:
        job.let(2)
        first = job.until_done(1, 1)
        pods = job.state.members

        job.breaks("raise", rank=1, step=2)
        second = job.until_done(2, 2)
        assert {one.pid for one in second} == {one.pid for one in first}

        job.breaks("raise", rank=2, step=3)  # the processes have been through one start, and ask for others
        third = job.until_done(3, 3)
        assert not {one.pid for one in third} & {one.pid for one in second}
        assert job.state.members == pods

        job.breaks("raise", rank=3, step=4)  # they would go on; the operator has had enough of these pods
        fourth = job.until_done(4, 4)
        assert not {one.pod for one in fourth} & set(pods)
        assert all(one.steps == [4] for one in fourth), "new pods go on where the old ones were"

        job.breaks("nan", rank=1, step=5)  # at every attempt
        job.until(lambda: job.state.phase.over, "the job has ended")
        job.until(lambda: not job.operating._pods.places({}), "nobody runs")
        said = job.said()
    assert job.restarts() == [IN_PROCESS, PROCESS, JOB, IN_PROCESS]
    assert job.state.phase is Phase.FAILED
    failed = next(one for one in job.state.conditions if one.type == "Failed")
    assert failed.reason == "RestartLimitExceeded"
    assert failed.message.startswith("gave up after WorkerFault: more than 1 restarts of the whole job within 3600 s")
    assert "the loss of step 5 is not finite (nan), in 2 attempts" in job.state.fault.message
    assert done(said) == {key: value for key, value in undisturbed(zygote).items() if key[1] < 5}
