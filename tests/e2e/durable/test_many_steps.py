"""A new node finds the right step among thousands in the durable tier."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest

from tests.support.agents import agent_pid
from tests.support.jobs import CheckpointJob
from tieredckpt.cli import main
from tieredckpt.settings import DurableSettings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB, SMALL = "tiered://long", 16


@pytest.fixture
def job(agent_dir, tmp_path, monkeypatch):
    durable = DurableSettings(url=f"file://{tmp_path}/durable")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", durable.url)
    return CheckpointJob(agent_dir, durable, "long")


@pytest.mark.nightly
@pytest.mark.timeout(4 * 3600)
def test_ten_thousand_steps(job, capfd):
    goes_through(job, 10_000, capfd)


def test_twenty_steps(job, capfd):
    goes_through(job, 20, capfd)


def goes_through(job, steps, capfd):
    took = Took()
    with took("save them"):
        job.save(*range(steps), size=SMALL)
    took.seconds["the agent's CPU time for that"] = cpu_seconds(agent_pid(job.agent_dir))
    job.lose_memory()
    with took("restore the newest on a new node"):
        job.assert_restores(steps - 1, tiers={"durable"}, size=SMALL)
    with took("restore one of the middle"):
        job.assert_restores(steps // 2, tiers={"durable"}, size=SMALL, named=steps // 2)
    with took("tieredckpt ls"):
        assert listed(capfd) == set(range(steps))
    kept = {*range(steps - 5, steps), *range(0, steps, steps // 10)}
    with took("tieredckpt gc"):
        assert main(["gc", JOB, "--keep-last", "5", "--keep-every", str(steps // 10)]) == 0
    assert listed(capfd) == kept
    with took("restore the oldest"):
        job.assert_restores(0, tiers={"durable"}, size=SMALL, named=0)
    with capfd.disabled():
        print(f"{steps:,} durable steps, seconds: {took.seconds}")


def listed(capfd):
    capfd.readouterr()
    assert main(["ls", JOB, "--json"]) == 0
    return {step["step"] for step in json.loads(capfd.readouterr().out)["steps"]}


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return round(sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK"), 2)


class Took:
    """A timer of named phases for the nightly report."""

    def __init__(self):
        self.seconds = {}

    @contextlib.contextmanager
    def __call__(self, what):
        began = time.perf_counter()
        yield
        self.seconds[what] = round(time.perf_counter() - began, 2)
