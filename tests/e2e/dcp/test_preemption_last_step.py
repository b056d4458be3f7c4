"""Ranks that receive SIGTERM at different steps save the same complete last step."""

import itertools
import os
import signal

import pytest
import torch
import torch.distributed as dist

from tieredckpt import Checkpointer

pytestmark = [pytest.mark.e2e]


class Ended(BaseException):
    """The exception that the signal handler raises once the checkpointer delivers the signal."""


def handle_signal(number, frame):
    raise Ended


def train(told, steps=40, every=100):
    """Train until the signal arrives.

    ``told`` has, for each rank, the step in which it receives SIGTERM, and whether before or after its save.
    """
    rank = dist.get_rank()
    signal.signal(signal.SIGTERM, handle_signal)
    state = {"w": torch.zeros(10), "step": 0}
    step = -1
    try:
        with Checkpointer("ended", every=every, grace_s=60) as ckpt:
            for step in range(steps):
                together = torch.ones(1)
                dist.all_reduce(together)  # like the all-reduce of a step's gradients
                state["w"] += together
                state["step"] = step
                if (step, "before") == told[rank]:
                    os.kill(os.getpid(), signal.SIGTERM)
                ckpt.save(state, step)
                if (step, "after") == told[rank]:
                    os.kill(os.getpid(), signal.SIGTERM)
    except Ended:
        return step
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return None


def restored():
    with Checkpointer("ended") as ckpt:
        state = {"w": torch.ones(10), "step": -1}
        step = ckpt.restore(state)
        return step, state["step"]


@pytest.mark.parametrize(
    "told",
    [
        pytest.param(((5, "before"), (5, "before")), marks=pytest.mark.nightly),
        ((5, "before"), (5, "after")),
        pytest.param(((5, "after"), (5, "before")), marks=pytest.mark.nightly),
        ((5, "after"), (6, "before")),
        ((5, "before"), (6, "after")),
    ],
    ids=str,
)
def test_ranks_signaled_at_different_steps_save_the_same_last_step(agent_dir, ranks, told):
    first, second = ranks.run(2, train, told)
    assert first == second
    assert first in (5, 6, 7)
    assert ranks.run(1, restored) == [(first, first)]


def test_unsignaled_rank_saves_the_last_step_too(agent_dir, ranks):
    """Only one node is preempted, and the launcher has not yet signaled the others."""
    told = ((5, "before"), None, None)
    outcome = ranks.run(3, lonely, told)
    last = outcome[0][-1]
    assert [saved for saved in outcome if saved != [0, last]] == []
    assert ranks.run(1, restored) == [(last, last)]


def lonely(told):
    """Continue the collectives after the signal until every rank has saved twice."""
    rank = dist.get_rank()
    signal.signal(signal.SIGTERM, lambda *_: None)
    state = {"w": torch.zeros(10), "step": 0}
    saved = []
    try:
        with Checkpointer("ended", every=10**9, grace_s=60) as ckpt:
            for step in itertools.count():
                ended = torch.tensor(float(len(saved) > 1))
                dist.all_reduce(ended, op=dist.ReduceOp.MIN)
                if ended:
                    break
                state["step"] = step
                if (step, "before") == told[rank]:
                    os.kill(os.getpid(), signal.SIGTERM)
                if ckpt.save(state, step).ok:
                    saved.append(step)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return saved
