"""``elastic run`` on a real Slurm, as in ``examples/slurm.sbatch``.

The cluster has one slurmctld and six machines, each with its own network, shared memory and name. As on Debian, each
machine resolves its own name to 127.0.1.1.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elastic.schedulers.slurm import parse_host_list
from tests.support.elastic_runs import ROOT
from tests.support.slurm import slurm_cluster
from tests.support.training_runs import TrainingRun, reference_steps, training_run

__all__ = ["reference_steps", "training_run"]

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: networks and daemons of its own"),
]
EXAMPLE = ROOT / "examples/slurm.sbatch"
TOTAL = 16


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=6) as cluster:
        yield cluster


class SlurmTraining(TrainingRun):
    """A job of :mod:`tests.support.full_training`, submitted as in the example."""

    def __init__(self, slurm, name: str, *, durable: bool = True) -> None:
        folder = slurm.directory / name
        folder.mkdir()
        super().__init__(folder, name, "tree", TOTAL)
        self.slurm = slurm
        self.own = {"TIEREDCKPT_AGENT_DIRECTORY": f"/dev/shm/{name}"}
        if durable:
            self.own["TIEREDCKPT_DURABLE_URL"] = f"file://{folder}/durable"
        self.job = ""

    def submit(self, *options: str) -> None:
        words = ("-v", "--shrink-after", "0", *options, "-m", "tests.support.full_training")
        self.job = self.slurm.submit(EXAMPLE, *words, self.diary, self.total, "tree", **self.own)

    @property
    def node_output(self) -> str:
        path = self.slurm.directory / f"slurm-{self.job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_step(self, step: int, size: int = 3, *, starts: int = 1) -> None:
        """Wait until ``size`` ranks have done a step and the job has started ``starts`` times."""

        def there() -> bool:
            worlds = [one["first"] for one in self.log_lines("world")]
            done = [one for one in self.log_lines("step") if one["step"] == step and one["size"] == size]
            return len({one["rank"] for one in done}) == size and len({*worlds}) >= starts

        self.slurm.wait_until(f"{size} ranks do step {step}", there)

    def wait_stop_announced(self, signal: str) -> None:
        """Wait until the launcher has received the signal and ordered the ranks to stop."""
        self.slurm.wait_until(f"{signal} is heard", lambda: f"{signal}: the ranks seal and end" in self.node_output)
        self.slurm.wait_until("the ranks are to stop", lambda: " at a common step within " in self.node_output)

    def assert_same_bits(self, undisturbed) -> None:
        """Check that every execution of a step has the undisturbed run's result."""
        lines = self.log_lines("step")
        assert {one["step"] for one in lines} == {*range(TOTAL)}
        for one in lines:
            other = undisturbed[one["step"]]
            assert [one[name] for name in ("loss", "norm", "sum")] == [other[name] for name in ("loss", "norm", "sum")]

    def first_steps(self) -> list[int]:
        """The first step of every start of the job."""
        return sorted({one["first"] for one in self.log_lines("world")})

    def assert_completed(self) -> None:
        shown = self.slurm.wait_state(self.job, "COMPLETED", "FAILED", "NODE_FAIL", "CANCELLED", "TIMEOUT")
        assert shown["JobState"] == "COMPLETED", self.slurm.failure_report()


@pytest.fixture
def training(slurm):
    made = []

    def make(name: str, **options: bool) -> SlurmTraining:
        made.append(SlurmTraining(slurm, name, **options))
        return made[-1]

    yield make
    for one in made:
        if one.job:
            slurm.run("scancel", "--signal=KILL", one.job, check=False)
            slurm.run("scancel", one.job, check=False)
            slurm.wait_until(
                "the job is over", lambda one=one: not slurm.run("squeue", "-h", "-j", one.job, check=False)
            )


def test_host_lists_expand_as_in_slurm(slurm):
    for text in ("n[1-3,7],gpu-[01-04]", "rack[1-2]n[01,10]", "n[9-11]", "a,b[2],c", "n[098-101]"):
        assert list(parse_host_list(text)) == slurm.run("scontrol", "show", "hostnames", text).split()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ("salloc", "-Q", "-w", "n[1-3]", "elastic", "run"),
            ("_NODELIST=n[1-3]", "srun --ntasks-per-node=1 elastic run", "--nnodes 1"),
        ),
        (("srun", "-w", "n[1-2]", "--ntasks-per-node=2", "elastic", "run"), ("_TASKS_PER_NODE=2(x2)", "--nproc 2")),
        (("srun", "-w", "n[1-2]", "elastic", "run", "--nnodes", "3"), ("--nnodes 3", "$SLURM_STEP_NODELIST=n[1-2]")),
        (("srun", "-w", "n1", "elastic", "run", "--nnodes", "2"), ("--nnodes 2", "$SLURM_STEP_NODELIST=n1")),
        (("srun", "-w", "n[1-2]", "elastic", "run", "--simulate-nodes", "2"), ("--simulate-nodes", "n[1-2]")),
    ],
)
def test_launch_that_would_wait_forever_is_refused(slurm, command, words):
    said = " ".join(slurm.run(*command, ROOT / "examples/elastic_loop.py", check=False).split())
    for word in words:
        assert word in said, said


def test_array_tasks_on_the_same_machines_stay_separate(slurm):
    """Job steps on a subset of the job's machines stay separate, too."""
    rank, folder = ROOT / "tests/e2e/control/rank.py", slurm.directory / "array"
    folder.mkdir()
    script = slurm.directory / "array.sbatch"
    quick = "elastic run --no-agent --store nowhere:1 --log-dir array/$SLURM_JOB_ID"
    script.write_text(f"#!/bin/bash\nsrun -N2 -n2 {quick} {rank} array & srun -N1 -n1 -r2 {quick} {rank} array\nwait\n")
    job = slurm.submit(
        "--array=0-1", "-w", "n[1-3]", "--ntasks-per-node=1", "--overcommit", "-o", "slurm-%j.out", script
    )

    def worlds():
        lines = [json.loads(line) for log in folder.glob("*/*/rank-*.log") for line in log.read_text().splitlines()]
        return sorted((one["node"], one["size"]) for one in lines if one["what"] == "in")

    wanted = sorted(2 * [("n1", 2), ("n2", 2), ("n3", 1)])
    slurm.wait_until("four worlds", lambda: worlds() == wanted)
    (folder / "finish").touch()
    for task in range(2):
        assert slurm.wait_state(f"{job}_{task}", "COMPLETED", "FAILED")["JobState"] == "COMPLETED", (
            slurm.failure_report()
        )


def test_three_machine_job_matches_a_single_rank(slurm, training, reference_steps):
    job = training("three", durable=False)
    job.submit()
    job.assert_completed()
    job.assert_same_bits(reference_steps)
    assert {one["size"] for one in job.log_lines("step")} == {3}
    assert job.first_steps() == [0]
    assert list(Path(slurm.environ["HOME"], ".elastic").iterdir()) == []
    for name in slurm.nodes:
        assert [one for one in slurm.processes(name) if "elastic" in one or "tieredckpt" in one] == []


def test_preempted_job_is_requeued_and_resumes_at_its_sealed_step(slurm, training, reference_steps):
    job = training("noticed")
    job.allow_steps(5)
    job.submit()
    job.wait_step(4)
    slurm.run("scancel", "--signal=USR1", job.job)
    job.wait_stop_announced("SIGUSR1")
    job.allow_steps(TOTAL)
    job.assert_completed()
    assert slurm.job_details(job.job)["Restarts"] == "1"
    assert "is back in the queue" in job.node_output
    assert len({(one["step"], one["rank"]) for one in job.log_lines("step")}) == len(job.log_lines("step")) == 3 * TOTAL
    assert len(job.first_steps()) == 2
    assert job.first_steps()[1] >= 5
    job.assert_same_bits(reference_steps)


def test_requeued_job_seals_within_kill_wait(slurm, training, reference_steps):
    """Requeue as a preemption with PreemptMode=REQUEUE does: SIGTERM, KillWait, then the queue."""
    job = training("preempted")
    job.allow_steps(5)
    job.submit()
    job.wait_step(4)
    slurm.run("scontrol", "requeue", job.job)
    job.wait_stop_announced("SIGTERM")
    job.allow_steps(TOTAL)
    job.assert_completed()
    assert len({(one["step"], one["rank"]) for one in job.log_lines("step")}) == len(job.log_lines("step")) == 3 * TOTAL
    assert len(job.first_steps()) == 2
    job.assert_same_bits(reference_steps)


def test_job_continues_without_a_lost_machine(slurm, training, reference_steps):
    job = training("smaller", durable=False)
    job.allow_steps(5)
    job.submit()
    job.wait_step(4)
    slurm.lose_node(parse_host_list(slurm.job_details(job.job)["NodeList"])[1])
    job.allow_steps(TOTAL)
    job.wait_step(TOTAL - 1, size=2)
    job.assert_completed()
    assert slurm.job_details(job.job)["Restarts"] == "0"
    job.assert_same_bits(reference_steps)


def test_job_is_requeued_without_its_lost_first_machine(slurm, training, reference_steps):
    job = training("headless")
    job.allow_steps(5)
    job.submit()
    job.wait_step(4)
    first = slurm.job_details(job.job)["BatchHost"]
    slurm.lose_node(first)
    job.allow_steps(TOTAL)
    job.assert_completed()
    shown = slurm.job_details(job.job)
    assert shown["Restarts"] == "1"
    assert first not in parse_host_list(shown["NodeList"])
    assert job.first_steps()[1] >= 4
    job.assert_same_bits(reference_steps)
