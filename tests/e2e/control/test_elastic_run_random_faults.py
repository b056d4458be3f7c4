"""After random faults in random order, all remaining nodes of a job train together in one world."""

from __future__ import annotations

import contextlib
import random
import time
from collections import defaultdict

import pytest

from tests.support.elastic_runs import ElasticRun, elastic_job, kill
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.e2e

ALWAYS = (16, 33)
"""Seeds that together cover every event."""
IN_A_SOAK = sorted(set(range(64)).difference(ALWAYS))
EVENTS = 6


class RandomFaultRun:
    """One job and its seeded random faults.

    Node n0 stays, because the launcher exits with the last of its own nodes.
    """

    def __init__(self, job: ElasticRun, seed: int) -> None:
        self.job = job
        self.random = random.Random(seed)
        self.alive = {"n0", "n1", "n2"}
        self.told: list[str] = []
        policy = job.folder / "policy.yaml"  # otherwise the policy excludes a node that is killed twice
        policy.write_text("max_num_repeat_offenders_to_avoid: 0\n")
        self.run = job.run(
            *("--simulate-nodes", "3", "--nnodes", "1:3", "--nproc", "2", "--spares", str(seed % 2)),
            *("--grow-after", "0.1", "--shrink-after", "0", "--pause-timeout", "30", "--max-restarts", "1000"),
            *("--policy", str(policy)),
        )
        job.wait_world(6)

    def go_on(self) -> None:
        kinds = [self.kill_rank, self.fault, self.resize, self.kill_coordinator]
        kinds += [self.lose, self.leave] if len(self.alive) > 1 else []
        kinds += [self.come_back] if len(self.alive) < 3 else []
        self.random.choice(kinds)()
        if self.random.random() < 0.5:  # otherwise the next event happens during this one
            wait_until(lambda: self.job.is_in_phase("running"), "the job runs again")

    def some_node(self) -> str:
        return self.random.choice(sorted(self.alive - {"n0"}))

    def kill_rank(self) -> None:
        inside = self.job.rank_messages("in")
        newest = max(one["epoch"] for one in inside)
        one = self.random.choice([one for one in inside if one["epoch"] == newest])
        self.told.append(f"rank {one['rank']} of epoch {newest} is killed")
        with contextlib.suppress(ProcessLookupError):
            kill(one["pid"])

    def fault(self) -> None:
        node = self.random.choice(sorted(self.alive))
        self.told.append(f"a rank of {node} reports a fault")
        self.job.touch(f"fault-{node}")

    def resize(self) -> None:
        nodes = self.random.choice(["1", "2", "3", "max"])
        self.told.append(f"resize to {nodes}")
        self.job.run_json("resize", "--nodes", nodes)

    def kill_coordinator(self) -> None:
        self.told.append("the coordinator is killed")
        for pid in self.job.pids('"type":"coordinator"'):
            kill(pid)

    def lose(self) -> None:
        node = self.some_node()
        self.told.append(f"{node} is lost")
        self.alive.discard(node)
        for pid in self.job.pids('"type":"node"', f'"node":"{node}"'):
            kill(pid)

    def leave(self) -> None:
        node = self.some_node()
        self.told.append(f"{node} is preempted")
        self.alive.discard(node)
        wait_until(lambda: "error" not in self.job.run_json("drain", node, "--deadline", "20"), f"{node} is preempted")
        wait_until(lambda: not self.job.pids('"type":"node"', f'"node":"{node}"'), f"{node} has left")

    def come_back(self) -> None:
        node = self.random.choice(sorted({"n1", "n2"} - self.alive))
        self.told.append(f"{node} comes back")
        self.alive.add(node)
        began = time.monotonic()
        self.job.start("join", "--node", node, "--no-agent")
        wait_until(lambda: self.job.pids('"type":"node"', f'"node":"{node}"'), f"{node} is being started")

        def heard() -> bool:
            """Return whether the new process sent a heartbeat, so that the next fault cannot hit its predecessor."""
            ago_s, status = time.monotonic() - began, self.job.status()
            nodes = () if status is None else status.nodes
            return any(
                one.node == node and one.state != "disconnected" and one.last_heartbeat_s < ago_s for one in nodes
            )

        wait_until(heard, f"{node} sends heartbeats")

    def end(self) -> None:
        wait_until(
            lambda: "error" not in self.job.run_json("resize", "--nodes", "max"),
            "the coordinator accepts the resize",
        )
        for path in self.job.folder.glob("fault-*"):  # of a node that was in no world afterwards
            path.unlink(missing_ok=True)

        def all_in() -> bool:
            status = self.job.status()
            if status is None or status.phase.value != "running":
                return False
            return {node.node for node in status.nodes if node.node_rank is not None} == self.alive

        wait_until(all_in, f"{sorted(self.alive)} train together")
        self.job.finish()
        assert self.job.wait_ended(self.run) == 0


def assert_worlds_valid(job: ElasticRun) -> None:
    """Check that every world has an allowed size and each rank once, and that epochs only increase."""
    worlds, lives, targets = defaultdict(list), defaultdict(list), defaultdict(set)
    for one in job.rank_messages("in"):
        worlds[one["epoch"]].append(one)
        lives[one["pid"]].append(one["epoch"])
    for one in job.rank_messages("target"):
        targets[one["epoch"]].add(one["step"])
    for inside in worlds.values():
        ranks = [one["rank"] for one in inside]
        (size,) = {one["size"] for one in inside}
        assert len(set(ranks)) == len(ranks)
        assert set(ranks) <= set(range(size))
        assert size in (2, 4, 6)
    for epochs in lives.values():
        assert epochs == sorted(set(epochs))
    assert all(len(steps) == 1 for steps in targets.values())


def run_seed(seed: int) -> None:
    with elastic_job() as job:
        history = RandomFaultRun(job, seed)
        try:
            for _ in range(EVENTS):
                history.go_on()
            history.end()
            assert_worlds_valid(job)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {'; '.join(history.told)}: {error}\n{job.output()}") from None


@pytest.mark.parametrize("seed", ALWAYS)
def test_job_survives_a_random_history_of_faults(seed: int) -> None:
    run_seed(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", IN_A_SOAK)
def test_job_survives_many_random_histories_of_faults(seed: int) -> None:
    run_seed(seed)
