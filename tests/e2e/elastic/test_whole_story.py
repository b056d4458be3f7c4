"""``elastic run`` with everything: 2, 4, 3, 1 and 4 ranks and one killed, of which no bit shows in what was learned."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from elastic.samples import Order
from tests.support.elastic_runs import ROOT, Job, kill
from tests.support.neighbours import until
from tests.support.whole_training import BATCH, SAMPLES, SEED

pytestmark = pytest.mark.e2e

TOTAL = 24
TRAINER = ROOT / "tests/support/whole_training.py"


class Story(Job):
    """One run of the trainer, told how far it may go."""

    def __init__(self, folder: Path, name: str, how: str) -> None:
        super().__init__(folder)
        self.name, self.how = name, how
        self.environ |= {
            "OMP_NUM_THREADS": "1",
            "TIEREDCKPT_AGENT_BUDGET": "256MiB",
            "TIEREDCKPT_AGENT_LINGER_S": "1",
            "TIEREDCKPT_AGENT_JOB_TTL_S": "1",
        }
        self.diary = folder / "diary"
        self.diary.mkdir()
        self.allow(TOTAL)

    def allow(self, steps: int) -> None:
        new = self.diary / "limit.new"
        new.write_text(str(steps))
        new.rename(self.diary / "limit")

    def begin(self, nodes: int, *options: str):
        words = ("--job", self.name, "--log-dir", str(self.folder / "logs"), "--nnodes", f"1:{nodes}")
        simulated = (
            "--simulate-nodes",
            str(nodes),
            "--shrink-after",
            "0",
            "--grow-after",
            "0.2",
            "--resize-grace",
            "60",
        )
        script = (str(TRAINER), str(self.diary), str(TOTAL), self.how)
        return self.start("run", "-v", *words, *simulated, *options, *script)

    def change(self, nodes: str) -> None:
        """Ask for another world, and wait until the ranks are told: they stop after the step they are in."""
        before = self.output().count("Pause(")
        self.ask("resize", "--nodes", nodes)
        until(lambda: self.output().count("Pause(") > before, "the ranks are to stop")

    def lines(self, what: str):
        found = []
        for path in sorted(self.diary.glob("*.jsonl")):
            lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
            found += [one for one in map(json.loads, lines) if one["what"] == what]
        return found

    def in_world(self, size: int, step: int):
        """Wait until all ranks of the newest world, of ``size`` ranks, have done ``step``; what they said of it."""

        def there():
            last = max((one["epoch"] for one in self.lines("world")), default=-1)
            done = [one for one in self.lines("step") if (one["epoch"], one["step"]) == (last, step)]
            return done if {one["size"] for one in done} == {size} and len(done) == size else []

        try:
            return sorted(until(there, f"{size} ranks do step {step}"), key=lambda one: one["rank"])
        except AssertionError as error:
            logs = "\n".join(path.read_text()[-3000:] for path in (self.folder / "logs").glob("*/*.log"))
            raise AssertionError(f"{error}\n{self.output()[-6000:]}\n{logs}") from None

    def finished(self, run) -> None:
        code = self.ended(run)
        assert code == 0, self.output()[-6000:]


@pytest.fixture
def story(tmp_path):
    made = []

    def begin(name: str, how: str) -> Story:
        (tmp_path / name).mkdir()
        made.append(Story(tmp_path / name, name, how))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def test_worlds_of_all_sizes_and_a_killed_rank_leave_no_trace(story) -> None:
    job, quiet = story("moved", "tree"), story("quiet", "tree")
    job.allow(0)
    run = job.begin(4)
    until(lambda: job.ask("resize", "--nodes", "2").get("cap") == 2, "the job has a coordinator")
    job.allow(4)
    job.in_world(2, 3)
    job.change("max")
    job.allow(8)
    job.in_world(4, 7)
    job.change("3")
    job.allow(12)
    three = job.in_world(3, 11)
    kill(three[1]["pid"])
    job.allow(16)
    job.in_world(3, 15)
    job.change("1")
    job.allow(20)
    job.in_world(1, 19)
    job.change("max")
    job.allow(TOTAL)
    job.finished(run)
    alone = quiet.begin(1)
    quiet.finished(alone)
    moved, undisturbed = committed(job), committed(quiet)
    sizes = {one["size"] for one in moved}
    assert sizes == {1, 2, 3, 4}
    for one, other in zip(moved, undisturbed, strict=True):
        assert (one["loss"], one["norm"], one["sum"]) == (other["loss"], other["norm"], other["sum"]), one["step"]
    assert_each_sample_once(moved)
    tiers = {tier for one in job.lines("world") for tier, count in one["tiers"].items() if count}
    assert tiers <= {"memory", "peer"}
    assert "peer" in tiers


def committed(job: Story):
    """What each step came to in the world that did it last: the others went back to before it."""
    worlds = defaultdict(list)
    for one in job.lines("step"):
        worlds[one["step"], one["epoch"]].append(one)
    found = []
    for step in range(TOTAL):
        last = max(epoch for at, epoch in worlds if at == step)
        ranks = sorted(worlds[step, last], key=lambda one: one["rank"])
        assert [one["rank"] for one in ranks] == [*range(ranks[0]["size"])]
        assert len({(one["loss"], one["norm"], one["sum"]) for one in ranks}) == 1
        found.append({**ranks[0], "samples": [index for one in ranks for index in one["samples"]]})
    return found


def assert_each_sample_once(steps) -> None:
    """In the order that the seed gives, over as many epochs of the data as it takes."""
    taken = [index for one in steps for index in one["samples"]]
    assert taken == [int(index) for index in Order(SAMPLES, SEED, "full").indices(0, TOTAL * BATCH)]
