"""A job under a plain launcher resumes at the same step after a signal to one rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import launched
from tests.support.agents import agent_directory
from tests.support.launched import (
    restore_state,
    run_script,
    run_torchrun,
    start_ranks,
    train_polling,
    train_with_loop,
)
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[3] / "examples" / "elastic_loop.py"


@pytest.fixture
def port():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def pids(folder, count):
    """Return the processes of the ranks that are inside step 2."""
    return wait_until(lambda: len(found := [int(path.name[4:]) for path in folder.glob("pid-*")]) == count and found)


def test_torchrun_succeeds_when_one_rank_is_signaled(agent_dir, tmp_path, zygote, port):
    two = ["--nproc-per-node=2"]
    running = zygote.start(run_torchrun, launched.__file__, two, str(tmp_path), environ={"OMP_NUM_THREADS": "1"})
    os.kill(pids(tmp_path, 2)[1], signal.SIGUSR1)
    (tmp_path / "go").touch()  # without the signal the job would never end
    assert running.wait().status == 0
    ends = {path.name.rpartition("-")[0] for path in tmp_path.glob("stopped-*")}
    assert len(ends) == 1
    assert len(list(tmp_path.glob("stopped-*"))) == 2
    steps = int(ends.pop().removeprefix("stopped-"))
    for one in start_ranks(zygote, 3, port, restore_state, "looping"):
        assert one.wait().lines == [f"restored {steps - 1} memory"]


def test_polling_loops_stop_at_the_same_step_and_the_next_start_resumes(agent_dir, tmp_path, zygote, port):
    ranks = start_ranks(zygote, 2, port, train_polling, str(tmp_path))
    pids(tmp_path, 2)
    ranks[1].kill(signal.SIGTERM)
    (tmp_path / "go").touch()
    first, second = (one.wait().lines for one in ranks)
    assert first == second
    restored, left = first
    assert restored == "restored -1"
    again = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for one in start_ranks(zygote, 1, again.port, restore_state, "asking"):
        assert one.wait().lines == [f"{left.replace('left', 'restored')} memory"]


def losses(lines):
    """Return the loss of each step from the output of the example."""
    found = [line.split(" ranks: loss ") for line in lines if line.startswith("step ")]
    return {int(step.split()[1]): float(loss) for step, loss in found}


def test_example_runs_unchanged_and_resumes_bitwise(agent_dir, zygote, port):
    """Two ranks, and then one that resumes, have exactly the losses of one rank alone."""
    two = [one.wait() for one in start_ranks(zygote, 2, port, run_script, str(EXAMPLE), STEPS="6")]
    first = losses(line for one in two for line in one.lines)
    assert [*first] == [*range(6)], two
    then = losses(zygote.start(run_script, str(EXAMPLE), environ={"STEPS": "9"}).wait().lines)
    assert [*then] == [6, 7, 8]
    with agent_directory() as other:
        environ = {"STEPS": "9", "TIEREDCKPT_AGENT_DIRECTORY": str(other)}
        alone = losses(zygote.start(run_script, str(EXAMPLE), environ=environ).wait().lines)
    assert {**first, **then} == alone


@pytest.mark.parametrize(
    "kind", ["fsdp", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("ddp", "plain"))]
)
def test_loop_with_idle_ranks_trains_like_one_rank(agent_dir, zygote, port, kind):
    """Three ranks share two microbatches, so one rank is idle in every step."""
    three = [one.wait() for one in start_ranks(zygote, 3, port, train_with_loop, kind, "three")]
    assert {len(one.lines) for one in three} == {1}, three
    alone = zygote.start(train_with_loop, kind, "alone").wait()
    assert {one.lines[0] for one in three} == {alone.lines[0]}
