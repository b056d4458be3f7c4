"""Non-finite losses: the effect of each policy, attempt by attempt, and a limit on retries."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from elastic.errors import JobFailedError, NonFiniteLossError, PolicyError
from elastic.testing import InMemoryCoordinator
from elastic.workers.train_loop import RecoveryPolicy, RunOutcome, run
from elastic.workers.world_handle import NonFiniteGuard
from tests.support.control_planes import PATIENCE_S, start_all, wait_results

NAN = float("nan")


def failed(losses, step, loss=NAN):
    with pytest.raises(NonFiniteLossError) as caught:
        losses.check(step, loss)
    return caught.value


@pytest.mark.parametrize("loss", [0.0, 3, -1e30, torch.tensor(2.0), torch.zeros(3), torch.ones(1, requires_grad=True)])
def test_finite_loss_is_used(loss):
    assert NonFiniteGuard("fault", 1, 0).check(7, loss)


@pytest.mark.parametrize("loss", [NAN, math.inf, torch.tensor(-math.inf), torch.tensor([1.0, NAN])])
def test_repeated_nonfinite_loss_fails_the_job(loss):
    losses = NonFiniteGuard("fault", 2, 0)
    first, second = failed(losses, 7, loss), failed(losses, 7, loss)
    assert (first.final, second.final) == (False, True)
    assert "step 7" in str(first)
    assert "2 attempts" in str(second)
    assert not failed(losses, 8, loss).final  # attempts are counted for each step


def test_ignored_nonfinite_loss_has_no_effect():
    assert NonFiniteGuard("ignore", 1, 0).check(7, NAN)


def test_no_step_is_skipped_when_ranks_cannot_agree():
    losses = NonFiniteGuard("skip", 2, 5)
    assert [failed(losses, 7).final for _ in range(3)] == [False, False, True]


def test_nonfinite_error_survives_pickling():
    error = pickle.loads(pickle.dumps(NonFiniteLossError("nan", final=True)))
    assert (str(error), error.final) == ("nan", True)


@pytest.mark.parametrize("how", [("explode", 1, 1), ("fault", 0, 1), ("skip", 1, -1)])
def test_invalid_policy_is_refused(how):
    with pytest.raises(PolicyError, match="nonfinite"):
        NonFiniteGuard(*how)


def test_permanent_nonfinite_loss_fails_and_a_transient_one_costs_a_step():
    plane = InMemoryCoordinator(2)

    def train(world):
        for step in world.steps(0, 20):
            bad = step == 9 or (step == 3 and world.epoch == 0)
            if bad and world.rank == 0:  # in a collective that another rank does not join
                assert world._gate.wait_broken(PATIENCE_S)
            else:
                world.check_finite(NAN if bad else 1.0)

    policy = RecoveryPolicy(backend="none", peer_loss_wait_s=0.0)
    ends = start_all(*(lambda s=seat: run(train, plane=s, policy=policy) for seat in plane.planes))
    for end in ends:
        with pytest.raises(JobFailedError, match="step 9 is not finite"):
            wait_results([end])
    assert plane.restarts == 3
    assert [len(seat.faults) for seat in plane.planes] == [0, 3]


def test_ignored_the_training_ends_as_if_nothing_was():
    plane = InMemoryCoordinator(1)
    policy = RecoveryPolicy(backend="none", nonfinite="ignore")
    ended = run(
        lambda world: [world.check_finite(NAN) for _ in world.steps(0, 3)], plane=plane.planes[0], policy=policy
    )
    assert (ended.outcome, ended.value, plane.restarts) == (RunOutcome.FINISHED, [True] * 3, 0)
