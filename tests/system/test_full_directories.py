"""Full run directories: writes there fail, and the job continues.

The directories of the job and of one node are separate in-memory file systems, so that a test can fill one alone.
"""

from __future__ import annotations

import contextlib
import errno
import os

import pytest

from elastic.fault_injection import FaultPlan
from tests.faults.job import mount, unmount
from tests.support.elastic_runs import kill
from tests.support.golden_runs import GoldenRun, assert_same_training, assert_worlds_consistent, reference_run
from tests.support.local_nodes import wait_until

pytestmark = [pytest.mark.system, pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount")]
STEPS = 100
PLACES = {"all nodes": ".", "one node": "n0"}


@pytest.fixture(scope="module")
def reference_steps(tmp_path_factory):
    return reference_run(tmp_path_factory.mktemp("quiet"), STEPS)


@pytest.fixture
def job(tmp_path):
    with contextlib.ExitStack() as undo:
        made = GoldenRun(tmp_path, "job", "ddp", FaultPlan())
        for place in PLACES.values():
            mount(directory(made, place))
            undo.callback(unmount, directory(made, place))
        undo.callback(made.close)
        yield made


def directory(job, place):
    return job.folder / "run" / job.name / place


def fill(place):
    """Fill the file system until not even one more byte fits."""
    for size in (1 << 20, 1 << 12, 1):
        with contextlib.suppress(OSError), (place / f"junk-{size}").open("wb", buffering=0) as file:
            while file.write(bytes(size)):
                pass
    with pytest.raises(OSError, match="No space left") as full:
        (place / "more").write_bytes(b"more")
    assert full.value.errno == errno.ENOSPC


def steps_of(job):
    return max((one["step"] for one in job.log_lines("step")), default=-1)


@pytest.mark.parametrize("whom", ["rank", "agent", "coordinator"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_full_directories_do_not_change_the_result(job, reference_steps, place, whom):
    run = job.start_run(2, 0, total=STEPS)
    wait_until(lambda: steps_of(job) >= 6, "it trains")
    ranks, agents = job.log_lines("world"), job.pids("tieredckpt.agent", "/n0/agent")
    fill(directory(job, place))
    kill({"rank": ranks[-1]["pid"], "agent": agents[0], "coordinator": job.coordinator_pid()}[whom])
    job.wait_finished(run, 200)
    assert_worlds_consistent(job)
    lost = {ranks[-1]["pid"]} if whom == "rank" else ()  # it may die before it logs its last step
    assert_same_training(job.committed_steps(lost), reference_steps)
