"""Random kills of trainer and agent at random points.

The short run always runs, the long one in ``make nightly``.
"""

import os
import random
import signal

import pytest

from peerstore.failpoints import FAILPOINTS
from tests.e2e.crash.test_trainer_killed import losses_by_step, train
from tests.support.agents import agent_directory, agent_pid, stop_agent
from tests.support.crashes import crash_environ

STEPS = 40


def test_a_few_random_kills(agent_dir, zygote):
    assert_survives(agent_dir, zygote, seed=1, kills=8)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 22))
def test_many_random_kills(agent_dir, zygote, seed):
    assert_survives(agent_dir, zygote, seed=seed, kills=30)


def assert_survives(agent_dir, zygote, *, seed, kills):
    """Check that a job with random kills ends with the losses and weights of an undisturbed run."""
    reference = reference_run(zygote)
    rng, lines = random.Random(seed), []
    for _ in range(kills):
        points = [point for point in FAILPOINTS if point.startswith(("stage.", "seal.", "load."))]
        crash = crash_environ(f"{rng.choice(points)}:{rng.randint(1, 6)}") if rng.random() < 0.5 else {}
        running = zygote.start(train, STEPS, environ=crash)
        if not crash:
            running.wait_lines(rng.randint(1, 12))
            running.kill_if_alive()
        if rng.random() < 0.3:
            pid = agent_pid(agent_dir)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        ended = running.wait()
        lines += ended.lines
        if ended.status == 0:
            break
    ended = zygote.run(train, STEPS)
    lines += ended.lines
    assert ended.result == reference.result
    assert losses_by_step(lines).items() <= losses_by_step(reference.lines).items()
    stop_agent(agent_dir)


def reference_run(zygote):
    with agent_directory() as directory:
        return zygote.run(
            train, STEPS, environ={"TIEREDCKPT_AGENT_DIRECTORY": str(directory), "TIEREDCKPT_AGENT_BUDGET": "1GiB"}
        )
