"""Runs of :mod:`tests.support.full_training` under ``elastic run``, with a step limit."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest

from elastic.samples import SampleOrder
from tests.support.elastic_runs import ROOT, ElasticRun
from tests.support.full_training import BATCH, SAMPLES, SEED
from tests.support.local_nodes import wait_until

TRAINER = ROOT / "tests/support/full_training.py"


class TrainingRun(ElasticRun):
    """One run of the trainer, up to a step limit that tests raise."""

    def __init__(self, folder: Path, name: str, how: str, total: int) -> None:
        super().__init__(folder, name)
        self.how, self.total = how, total
        self.environ |= {
            "OMP_NUM_THREADS": "1",
            "TIEREDCKPT_AGENT_BUDGET": "256MiB",
            "TIEREDCKPT_AGENT_LINGER_S": "1",
            "TIEREDCKPT_AGENT_JOB_TTL_S": "1",
        }
        self.diary = folder / "diary"
        self.diary.mkdir()
        self.allow_steps(total)

    def allow_steps(self, steps: int) -> None:
        new = self.diary / "limit.new"
        new.write_text(str(steps))
        new.rename(self.diary / "limit")

    def start_run(self, nodes: int, *options: str):
        words = ("--job", self.name, "--log-dir", str(self.folder / "logs"), "--nnodes", f"1:{nodes}")
        simulated = ("--simulate-nodes", str(nodes), "--shrink-after", "0", "--grow-after", "0.2")
        script = (str(TRAINER), str(self.diary), str(self.total), self.how)
        return self.start("run", "-v", *words, *simulated, "--pause-timeout", "60", *options, *script)

    def resize_and_wait(self, nodes: str) -> None:
        """Request another number of nodes and wait until the ranks are notified.

        They stop after the current step.
        """
        before = self.output().count(" at a common step within ")
        self.run_json("resize", "--nodes", nodes)
        wait_until(lambda: self.output().count(" at a common step within ") > before, "the ranks are notified")

    def wait_nodes_ready(self, nodes: int) -> None:
        """Wait until ``nodes`` nodes are in a world or about to join; fewer could run many steps alone."""

        def there() -> bool:
            status = self.status()
            if status is None or [node.state for node in status.nodes if node.state != "starting"][nodes - 1 :] == []:
                return False
            inside = [node for node in status.nodes if node.node_rank is not None]
            return status.pause is not None or len(inside) == min(nodes, status.max_nodes or nodes)

        wait_until(there, f"{nodes} nodes are here")

    def wait_stop_requested(self) -> None:
        """Wait until the ranks know that another world will form."""
        wait_until(lambda: (status := self.status()) is not None and status.pause is not None, "a pause")

    def log_lines(self, what: str):
        found = []
        for path in sorted(self.diary.glob("*.jsonl")):
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found += [one for one in map(json.loads, lines) if one["what"] == what]
        return found

    def wait_step_in_world(self, size: int, step: int):
        """Wait until all ``size`` ranks of the newest world have done ``step``; return their log lines."""

        def there():
            last = max((one["epoch"] for one in self.log_lines("world")), default=-1)
            done = [one for one in self.log_lines("step") if (one["epoch"], one["step"]) == (last, step)]
            return done if {one["size"] for one in done} == {size} and len(done) == size else []

        try:
            return sorted(wait_until(there, f"{size} ranks do step {step}"), key=lambda one: one["rank"])
        except AssertionError as error:
            logs = "\n".join(path.read_text()[-3000:] for path in (self.folder / "logs").glob("*/*.log"))
            raise AssertionError(f"{error}\n{self.output()[-6000:]}\n{logs}") from None

    def wait_finished(self, run) -> None:
        code = self.wait_ended(run)
        assert code == 0, self.output()[-6000:]


def committed_steps(job: TrainingRun):
    """Return the result of each step, taken from the last world that did it."""
    worlds = defaultdict(list)
    for one in job.log_lines("step"):
        worlds[one["step"], one["epoch"]].append(one)
    found = []
    for step in range(job.total):
        last = max(epoch for at, epoch in worlds if at == step)
        ranks = sorted(worlds[step, last], key=lambda one: one["rank"])
        assert [one["rank"] for one in ranks] == [*range(ranks[0]["size"])]
        assert len({(one["loss"], one["norm"], one["sum"]) for one in ranks}) == 1
        found.append({**ranks[0], "samples": [index for one in ranks for index in one["samples"]]})
    return found


def assert_each_sample_once(steps) -> None:
    """Assert that the steps used the samples in the order of the seed, across epochs."""
    taken = [index for one in steps for index in one["samples"]]
    assert taken == [int(index) for index in SampleOrder(SAMPLES, SEED, "full").indices(0, len(steps) * BATCH)]


def assert_same_results(moved, undisturbed) -> None:
    """Assert equal loss, gradient norm, model and optimizer after every step of ``moved``."""
    assert len(moved) <= len(undisturbed)
    for one, other in zip(moved, undisturbed, strict=False):
        assert (one["loss"], one["norm"], one["sum"]) == (other["loss"], other["norm"], other["sum"]), one["step"]


@pytest.fixture
def training_run():
    """Return a factory of runs in a folder with a short path, which sockets need."""
    made = []

    with tempfile.TemporaryDirectory(prefix="story-") as folder:

        def make_run(name: str, how: str, total: int) -> TrainingRun:
            (Path(folder) / name).mkdir()
            made.append(TrainingRun(Path(folder) / name, name, how, total))
            return made[-1]

        yield make_run
        for one in made:
            one.close()


@pytest.fixture(scope="session")
def reference_steps(tmp_path_factory):
    """Return the steps of an undisturbed run of one rank with the fixed tree."""
    folder = tmp_path_factory.mktemp("quiet")
    one = TrainingRun(folder, "quiet", "tree", 24)
    one.environ["TIEREDCKPT_AGENT_DIRECTORY"] = str(folder / "agent")  # not the user's agent
    try:
        one.wait_finished(one.start_run(1))
        return committed_steps(one)
    finally:
        one.close()
