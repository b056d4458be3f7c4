"""A rank that does not leave a broken world is ended with its stacks and stage, and replaced."""

from __future__ import annotations

import re

import pytest

from tests.support.elastic_runs import elastic_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]

TRAINER = """
import ctypes, json, os, pathlib, sys, threading, time
import torch
import torch.distributed as dist
from elastic import recoverable

FOLDER, HOW = pathlib.Path(sys.argv[1]), sys.argv[2]


def say(what, **more):
    # One write: print makes two, and a line of the log may come between them.
    line = json.dumps({"what": what, "pid": os.getpid(), "at": time.time(), **more})
    sys.stdout.write(line + "\\n")
    sys.stdout.flush()


def stuck():
    (FOLDER / "stuck").touch()
    if HOW == "join":
        thread = threading.Thread(target=threading.Event().wait, daemon=True)
        thread.start()
        thread.join()
    elif HOW in ("native", "hang"):
        ctypes.PyDLL(None).pause()
    else:
        time.sleep(3600)


@recoverable
def train(world):
    say("in", epoch=world.epoch, rank=world.rank, size=world.size)
    for step in world.steps(0, 5):
        if world.epoch == 0 and step == 2 and world.rank == 1:
            if HOW == "cleanup":
                world.add_cleanup(stuck)
                (FOLDER / "added").touch()
            else:
                stuck()
        if world.epoch == 0 and step == 2 and world.rank == 2 and HOW != "hang":
            while not (FOLDER / ("added" if HOW == "cleanup" else "stuck")).exists():
                time.sleep(0.01)
            raise ZeroDivisionError("the fault")
        dist.all_reduce(torch.ones(4))
        say("step", epoch=world.epoch, rank=world.rank, step=step)


say("warm")
train()
"""


@pytest.fixture
def job():
    with elastic_job() as one:
        yield one


def run(job, how, *options):
    script = job.folder / "trainer.py"
    script.write_text(TRAINER)
    done = job.start(
        *("run", "-v", "--no-agent", "--job", job.name, "--log-dir", str(job.folder / "logs"), "--nnodes", "1"),
        *("--nproc", "3", "--spares", "1", "--max-restarts", "3", *options),
        *(str(script), str(job.folder), how),
    )
    assert done.wait(180) == 0, job.output()
    before, after = job.rank_messages("in", epoch=0), job.rank_messages("in", epoch=1)
    assert len(after) == 3, job.output()
    new = {one["pid"] for one in after} - {one["pid"] for one in before}
    (replacement,) = (one for one in after if one["pid"] in new)
    assert replacement["rank"] == 1
    (spare,) = (one for one in job.rank_messages("warm") if one["pid"] in new)
    assert spare["at"] < min(one["at"] for one in job.rank_messages("step", epoch=1))
    return job.output()


STAGES = {
    "sleep": "stage: the train function",
    "join": "stage: the train function",
    "cleanup": "stage: the callbacks of world.add_cleanup",
    "native": r"(no stage reported|stage: the train function)",
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.nightly if how in ("sleep", "join") else ()) for how in STAGES]
)
def test_rank_that_does_not_leave_is_ended_with_its_stacks(job, how):
    output = run(job, how, "--abort-timeout", "3")
    assert re.search(rf"rank 1 did not leave world 0 within 3 s \({STAGES[how]}; trainer.py:\d+ in stuck\)", output), (
        output
    )
    assert "in stuck" in logs_of(job)


def test_rank_that_hangs_in_native_code_leaves_its_stacks(job):
    output = run(job, "hang", "--hang-timeout", "3")
    assert re.search(r"trainer.py:\d+ in stuck", output), output
    assert "in stuck" in logs_of(job)


def logs_of(job):
    return "\n".join(path.read_text() for path in (job.folder / "logs").glob("*/rank-1.*.log"))
