"""Recovery from a rank that hangs in Python, and the stacks in its log."""

from __future__ import annotations

import pytest

from tests.support.elastic_runs import elastic_job

pytestmark = pytest.mark.e2e

HANG_S = 5.0
AFTER_S = 5.0
"""Seconds from the detection of the hang to the next step, without the start of a process."""

TRAINER = """
import json, os, sys, time
START = time.time()
import torch
import torch.distributed as dist
from elastic import recoverable


def say(what, **more):
    # One write: print makes two, and a line of the log may come between them.
    line = json.dumps({"what": what, "pid": os.getpid(), "at": time.time(), **more})
    sys.stdout.write(line + "\\n")
    sys.stdout.flush()


def stuck():
    time.sleep(3600)


@recoverable
def train(world):
    say("in", epoch=world.epoch, rank=world.rank, size=world.size)
    for step in world.steps(0, 6):
        if world.epoch == 0 and world.rank == 1 and step == 3:
            stuck()
        dist.all_reduce(torch.ones(4))
        say("step", epoch=world.epoch, rank=world.rank, step=step)


say("warm", took_s=time.time() - START)
train()
"""


@pytest.fixture
def job():
    with elastic_job() as one:
        yield one


@pytest.mark.timeout(200)
def test_hung_rank_is_replaced_within_seconds(job):
    script = job.folder / "trainer.py"
    script.write_text(TRAINER)
    run = job.start(
        *("run", "-v", "--no-agent", "--job", job.name, "--log-dir", str(job.folder / "logs"), "--nnodes", "1"),
        *("--nproc", "2", "--hang-timeout", str(HANG_S), "--max-restarts", "3", str(script)),
    )
    assert run.wait(180) == 0, job.output()
    last = max(one["at"] for one in job.rank_messages("step", epoch=0))
    resumed = min(one["at"] for one in job.rank_messages("step", epoch=1))
    warm_s = max(one["took_s"] for one in job.rank_messages("warm"))
    found_s = HANG_S + 2.0
    """The detector adds at most one report interval and one poll interval of a second each."""
    start_s = warm_s + 2.0
    assert resumed - last <= found_s + AFTER_S + start_s, (resumed - last, warm_s)
    words = "\n".join(path.read_text() for path in (job.folder / "logs").glob("*/rank-1.*.log"))
    assert "in this stage for" in words
    assert ": the train function. The process exits" in words
    assert "in stuck" in words, "the stack of the thread that hangs"
    assert (
        len(
            {one["pid"] for one in job.rank_messages("in", epoch=1)}
            & {one["pid"] for one in job.rank_messages("in", epoch=0)}
        )
        == 1
    )
