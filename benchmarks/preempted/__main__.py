"""Preempt the nodes of a job repeatedly, and write the ``.svg`` and ``.json`` of its records.

    python -m benchmarks.preempted --minutes 3 --out docs/figures/preemption

A job runs under ``elastic run --simulate-nodes 4``. The benchmark repeatedly preempts one to three of its nodes and
returns them later. Most preemptions have 10 s notice; then the node's processes and memory are gone. Some kill a node
without notice. At the end the benchmark stops the job and reads its records. One undisturbed rank then trains the same
steps, to compare the losses bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import facts
from benchmarks.preempted.picture import Curve, Kind, Mark, Panel, picture
from benchmarks.preempted.story import Gap, Step, by_size, gaps_of, repeated, steps_of, worlds_of
from benchmarks.preempted.trainer import BATCH, DEVICE_S, MICROBATCH, SAMPLES, SEED, TOKENS
from elastic.samples import SampleOrder, SampleSchedule
from elastic.samples.sample_audit import verify_sample_logs
from tests.support.agents import stop_agent
from tests.support.elastic_runs import ElasticRun
from tests.support.local_nodes import wait_until

NODES, NOTICE_S = 4, 10.0
TRAINER = Path(__file__).with_name("trainer.py")
NOTICE, KILLED, BACK = "preempted, 10 s notice", "killed without notice", "returned"
_KINDS = (
    Kind(NOTICE, "#b3690b", "M-5 -4H5L0 5Z"),
    Kind(KILLED, "#c22b34", "M-5 -3L-3 -5L0 -2L3 -5L5 -3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0Z"),
    Kind(BACK, "#2c7a3f", "M-5 4H5L0 -5Z"),
)
_ROUNDS = ((NOTICE, 1), (KILLED, 1), (NOTICE, 2), (NOTICE, 3), (KILLED, 1))
"""Preemptions in turn. Only one node at a time has no notice, because a shard has two copies."""
_HELD_S, _QUIET_S = 14.0, 14.0


class Cluster:
    """The simulated nodes of a job, with methods to preempt and return them."""

    def __init__(self, job: ElasticRun) -> None:
        self.job = job
        self.events: list[dict[str, Any]] = []
        self.there = {f"n{number}" for number in range(NODES)}

    def take(self, how: str, count: int, chance: random.Random) -> list[str]:
        nodes = chance.sample(sorted(self.there), count)
        self._write(how, nodes, -count)
        self.there -= set(nodes)
        if how == KILLED:
            self.job.lose_node(nodes[0])
            return nodes
        deadline = time.monotonic() + NOTICE_S
        self.job.run_json("drain", *nodes, "--deadline", f"{NOTICE_S:g}")
        while (still := self._of(nodes)) and time.monotonic() < deadline:
            time.sleep(0.1)
        self.events[-1]["processes_gone_s"] = None if still else round(time.time() - self.events[-1]["at"], 2)
        time.sleep(max(0.0, deadline - time.monotonic()))
        for node in nodes:
            self.job.lose_node(node)  # the machine is gone, even if processes still run there
        return nodes

    def give_back(self, nodes: Sequence[str]) -> None:
        self._write(BACK, nodes, len(nodes))
        for node in nodes:
            self.job.start("join", self.job.name, "--node", node)
        self.there |= set(nodes)

    def _of(self, nodes: Sequence[str]) -> list[int]:
        return [pid for node in nodes for pid in self.job.pids('"type":"node"', f'"node":"{node}"')]

    def _write(self, kind: str, nodes: Sequence[str], more: int) -> None:
        self.events.append({"at": time.time(), "kind": kind, "nodes": list(nodes), "there": len(self.there) + more})


@contextlib.contextmanager
def jobs(folder: Path, name: str) -> Iterator[ElasticRun]:
    (folder / name).mkdir()
    job = ElasticRun(folder / name, name)
    job.environ |= {"OMP_NUM_THREADS": "1", "TIEREDCKPT_AGENT_BUDGET": "256MiB"}
    (job.folder / "records").mkdir()
    try:
        yield job
    finally:
        for one in job.started:
            if one.poll() is None:
                one.kill()
                one.wait()
        for place in {path.parent for path in job.folder.rglob("agent.lock")}:
            stop_agent(place)
        job.close()


def start(job: ElasticRun, nodes: int, total: int, device_s: float) -> Any:
    size = ("--simulate-nodes", str(nodes), "--nnodes", f"1:{nodes}", "--grow-after", "1", "--shrink-after", "0")
    words = ("--job", job.name, "--log-dir", str(job.folder / "logs"), "-v", *size)
    return job.start("run", *words, str(TRAINER), str(job.folder / "records"), str(total), str(device_s))


def lines_of(job: ElasticRun) -> list[dict[str, Any]]:
    found = []
    for path in sorted((job.folder / "records").glob("*.steps.jsonl")):
        found += [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return found


def disturbed(job: ElasticRun, minutes: float, seed: int) -> list[dict[str, Any]]:
    """Run the job, preempt its nodes, stop it, and return the events."""
    running, chance = start(job, NODES, 0, DEVICE_S), random.Random(seed)
    wait_until(lambda: any(one["size"] == NODES for one in lines_of(job) if one["what"] == "step"), "all nodes train")
    cluster = Cluster(job)
    ends = time.monotonic() + 60 * minutes
    at = 0
    time.sleep(_QUIET_S)
    while time.monotonic() + NOTICE_S + _HELD_S + _QUIET_S < ends:
        how, count = _ROUNDS[at % len(_ROUNDS)]
        nodes = cluster.take(how, count, chance)
        time.sleep(_HELD_S)
        cluster.give_back(nodes)
        time.sleep(_QUIET_S)
        at += 1
    time.sleep(max(0.0, ends - time.monotonic()))
    job.run_json("stop")
    status = job.wait_ended(running)
    if status != 7:
        raise SystemExit(f"the job ended with status {status} instead of 7 (stopped)\n{job.output()[-8000:]}")
    return cluster.events


def undisturbed(job: ElasticRun, steps: int) -> list[Step]:
    """Train the same steps on one rank, without the simulated device time."""
    running = start(job, 1, steps, 0.0)
    if running.wait(600):
        raise SystemExit(f"the undisturbed run failed\n{job.output()[-8000:]}")
    return steps_of(lines_of(job), 0.0)


def summary(
    lines: list[dict[str, Any]], events: list[dict[str, Any]], quiet: list[Step], problems: list[str]
) -> dict[str, Any]:
    """Return the summary of the run; times count from the first world."""
    began = min(line["at"] for line in lines if line["what"] == "world")
    steps, worlds = steps_of(lines, began), worlds_of(lines, began)
    longest: list[Gap] = gaps_of(steps, worlds)[:14]
    again = repeated(lines)
    same = sum(one.loss == other.loss for one, other in zip(steps, quiet, strict=True))
    return {
        "what": {
            "nodes": NODES,
            "notice_s": NOTICE_S,
            "samples_a_step": BATCH,
            "tokens_a_step": TOKENS,
            "microbatch": MICROBATCH,
            "simulated_device_s_a_microbatch": DEVICE_S,
        },
        "steps": len(steps),
        "steps_in_order": [one.step for one in steps] == [*range(len(steps))],
        "steps_done_again": again,
        "losses_bit_for_bit_as_undisturbed": same,
        "samples": {"used": len(steps) * BATCH, "of": SAMPLES, "problems": problems},
        "longest_gaps": [
            gap._asdict() | {"seconds": round(gap.seconds, 2), "at_s": round(gap.at_s, 1)} for gap in longest
        ],
        "by_world_size": by_size(steps),
        "events": [{**event, "at_s": round(event["at"] - began, 2)} for event in events],
        "worlds": [world._asdict() for world in worlds],
        "raw": [[one.step, round(one.at_s, 3), one.size, one.epoch, float.fromhex(one.loss)] for one in steps],
        "raw_columns": ["step", "at_s", "ranks", "epoch", "loss"],
    }


def drawn(story: dict[str, Any]) -> str:
    steps = story["raw"]
    until_s = steps[-1][1]
    first = steps[0]
    rates, sizes = [], [(0.0, float(first[2]))]
    for one, two in itertools.pairwise(steps):
        rate = TOKENS / (two[1] - one[1])
        rates += [(one[1], rate), (two[1], rate)]
    for world in story["worlds"]:
        sizes += [(world["at_s"], sizes[-1][1]), (world["at_s"], float(world["size"]))]
    sizes.append((until_s, sizes[-1][1]))
    nodes = [(0.0, float(NODES))]
    for event in story["events"]:
        nodes += [(event["at_s"], nodes[-1][1]), (event["at_s"], float(event["there"]))]
    nodes.append((until_s, nodes[-1][1]))
    alone = MICROBATCH * TOKENS / BATCH / DEVICE_S
    marks = [Mark(one["at_s"], one["kind"], f"{', '.join(one['nodes'])} {one['kind']}") for one in story["events"]]
    panels = (
        Panel(
            "ranks (one a node)",
            (
                Curve("available nodes", "#8a97a5", nodes, dashed=True),
                Curve("in the world", "#2b5f9e", sizes),
            ),
            top=4.6,
            whole=True,
        ),
        Panel(
            "tokens per second",
            (
                Curve("limit of the simulated devices", "#8a97a5", [(x, y * alone) for x, y in sizes], dashed=True),
                Curve("from one step to the next", "#2b5f9e", rates),
            ),
        ),
        Panel(
            "loss (nats per token)", (Curve("of each step's global batch", "#2b5f9e", [(s[1], s[4]) for s in steps]),)
        ),
    )
    return picture("A job whose nodes are preempted and returned", panels, marks, _KINDS, until_s)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preempted", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="minutes to run (default: 3)")
    parser.add_argument("--seed", type=int, default=1, help="seed for the choice of nodes (default: 1)")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="PATH", help="path of the files, without .svg and .json"
    )
    parser.add_argument("--draw", action="store_true", help="draw PATH.svg from PATH.json without running a job")
    given = parser.parse_args()
    raw = given.out.with_suffix(".json")
    if not given.draw:
        raw.write_text(_compact(run(given.minutes, given.seed)))
    story = json.loads(raw.read_text())
    given.out.with_suffix(".svg").write_text(drawn(story))
    print(json.dumps({name: value for name, value in story.items() if not name.startswith("raw")}, indent=1))


def run(minutes: float, seed: int) -> dict[str, Any]:
    machine = facts()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix=f"tieredckpt-bench-{os.getpid()}-") as folder:
        with jobs(Path(folder), "preempted") as job:
            events = disturbed(job, minutes, seed)
            lines = lines_of(job)
            count = len(steps_of(lines, 0.0))
            journals = sorted((job.folder / "records").glob("*.samples.jsonl"))
            course = SampleSchedule(SampleOrder(SAMPLES, SEED), BATCH)
            problems = verify_sample_logs(journals, course, count, count * BATCH)
        with jobs(Path(folder), "quiet") as job:
            quiet = undisturbed(job, count)
    return {"machine": machine, **summary(lines, events, quiet, problems)}


def _compact(story: dict[str, Any]) -> str:
    """Return JSON with one line per value."""
    said = []
    for name, value in story.items():
        if isinstance(value, list) and value and name in ("raw", "worlds", "events", "longest_gaps"):
            inner = ",\n  ".join(json.dumps(one) for one in value)
            said.append(f" {json.dumps(name)}: [\n  {inner}\n ]")
        else:
            said.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(said) + "\n}\n"


if __name__ == "__main__":
    main()
