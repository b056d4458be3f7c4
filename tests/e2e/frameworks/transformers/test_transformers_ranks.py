"""The Transformers ``Trainer`` on several ranks: incomplete steps, SIGTERM to one rank, resizes."""

import signal

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install tieredckpt[transformers]")

from tests.support.agents import agent_directory
from tests.support.transformers_training import KILL, STEPS, TERM, URL, train, values_by_step
from tieredckpt import Checkpointer

pytestmark = pytest.mark.e2e
TWO = {"per_device_train_batch_size": 2}
"""Each rank's share of a step of four samples."""


def run_ranks(zygote, size, *args, environ=None):
    return zygote.run_ranks(size, train, *args, environ=environ)


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory):
    with agent_directory() as directory:
        environ = {"TIEREDCKPT_AGENT_DIRECTORY": str(directory), "TIEREDCKPT_AGENT_BUDGET": "1GiB"}
        folder = str(tmp_path_factory.mktemp("undisturbed"))
        return run_ranks(zygote, 2, folder, None, TWO, environ={0: environ, 1: environ})


def complete_steps():
    with Checkpointer(URL, on_sigterm="ignore") as ckpt:
        return {one.step: one.is_complete for one in ckpt.steps()}


def test_torn_step_is_not_used(agent_dir, zygote, tmp_path, undisturbed):
    running = zygote.start_world(2, train, str(tmp_path), {1: {"log 6": KILL}}, TWO)
    try:
        assert running[1].wait().status == -signal.SIGKILL
        with pytest.raises(AssertionError, match="RuntimeError"):  # the gradients of step 7 need both ranks
            running[0].wait()
    finally:
        for one in running:
            one.kill_if_alive()
    steps = complete_steps()
    assert steps[5]
    assert not steps[6]
    second = run_ranks(zygote, 2, str(tmp_path), None, TWO)
    assert [one.result for one in second] == [one.result for one in undisturbed]
    assert min(values_by_step(second[0].lines)) == 6


def test_sigterm_of_one_rank_ends_all_ranks_at_the_same_step(agent_dir, zygote, tmp_path, undisturbed):
    first = run_ranks(zygote, 2, str(tmp_path), {1: {"step 3": TERM}}, TWO, {"every": 100})
    assert [one.status for one in first] == [-signal.SIGTERM, -signal.SIGTERM]
    last = {max(values_by_step(one.lines, "state")) for one in first}
    assert len(last) == 1
    (step,) = last
    assert 3 <= step < STEPS
    assert complete_steps() == {step: True}
    second = run_ranks(zygote, 2, str(tmp_path), None, TWO, {"every": 100})
    assert [one.result for one in second] == [one.result for one in undisturbed]
    assert min(values_by_step(second[0].lines)) == step + 1


@pytest.mark.parametrize(("before", "after"), [pytest.param(2, 1, marks=pytest.mark.nightly), (1, 2)])
def test_another_number_of_ranks_continues_with_the_next_samples(
    agent_dir, zygote, tmp_path, undisturbed, before, after
):
    both = {0: {"step 5": KILL}, 1: {"step 5": KILL}}
    first = run_ranks(zygote, before, str(tmp_path), both, {"per_device_train_batch_size": 4 // before})
    second = run_ranks(zygote, after, str(tmp_path), None, {"per_device_train_batch_size": 4 // after})
    states = {values_by_step(one.lines, "state")[4] for one in [*first, *second]}
    assert len(states) == 1, "model, optimizer or learning rate differ after step 4"
    for step in range(5, STEPS + 1):
        assert samples_of(second, step) == samples_of(undisturbed, step)


def samples_of(ranks, step):
    return sorted(int(number) for one in ranks for number in values_by_step(one.lines, "samples")[step].split())
