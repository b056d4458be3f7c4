"""Jobs for P13: the same trainer, started and resized by each contender."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.jobs import LOOK_CLOSELY_S, PATIENCE_S, Job, free_port
from elastic.control.control_messages import CoordinatorRequest, ElasticJobStatus, StatusRequest
from elastic.control.control_messages import ResizeRequest as Asked
from elastic.control.coordinator_client import call_coordinator
from elastic.control.run_directory import RunDirectory, run_secret
from elastic.errors import ControlPlaneUnavailableError
from peerstore.daemon_process import process_start_time
from peerstore.sizes_and_durations import show_size

_TRAINER = "benchmarks.resize_trainer"
_NODES = 4
_PER_AGENT = 2
"""Number of ranks per torchrun agent."""
_JOB = "resize"


class Resizable(Job):
    """A job whose number of ranks can be changed."""

    way = "torchrun"

    def __init__(self, folder: Path, size_bytes: int) -> None:
        super().__init__(folder)
        self._size_bytes = size_bytes
        self.gone_at = 0.0
        """End of the last process of the old world, if its processes end; in seconds since the epoch."""

    def begin(self, ranks: int) -> None:
        raise NotImplementedError

    def resize(self, ranks: int) -> float:
        """Request another number of ranks and return the time of the request. Do not wait for the resize."""
        raise NotImplementedError

    def until_done(self, ranks: int, steps: int, *, after: float) -> None:
        """Wait until a world of ``ranks`` ranks has finished ``steps`` steps."""

        def done() -> bool:
            counts: dict[int, int] = {}
            for line in self.lines():
                if line["what"] == "stepped" and line["size"] == ranks and line["at"] > after:
                    counts[line["pid"]] = counts.get(line["pid"], 0) + 1
            return sum(count >= steps for count in counts.values()) >= ranks

        self._until(done, f"{ranks} ranks do {steps} steps")

    def _arguments(self) -> tuple[str, ...]:
        return (self.way, str(self._folder), str(self._size_bytes))

    def _until_gone(self, pids: set[int]) -> None:
        self._until(lambda: all(process_start_time(pid) < 0 for pid in pids), "old processes end", LOOK_CLOSELY_S)
        self.gone_at = time.time()


class Elastic(Resizable):
    """Four nodes of one rank each, resized by the request that ``elastic resize`` sends."""

    way = "elastic"

    def begin(self, ranks: int) -> None:
        # Two slots per shard, a copy of each on another node, and room during a resize.
        budget = show_size(4 * self._size_bytes + (256 << 20)).replace(" ", "")
        self._environ |= {
            "ELASTIC_RUN_DIRECTORY": str(self._folder / "run"),
            "TIEREDCKPT_AGENT_BUDGET": budget,
        }
        policy = ("--shrink-after", "0", "--grow-after", "0.2", "--pause-timeout", "120")
        where = ("--job", _JOB, "--log-dir", str(self._folder / "logs"))
        nodes = ("--nnodes", f"1:{_NODES}", "--simulate-nodes", str(_NODES))
        self._start("-m", "elastic", "run", "-v", *where, *nodes, *policy, "-m", _TRAINER, *self._arguments())
        self._until(lambda: self._ask(StatusRequest()) is not None, "the job has a coordinator")
        self._ask(Asked(ranks, "to begin with"))
        self._until(lambda: len(self._pids()) == _NODES, "all nodes are warm")

    def resize(self, ranks: int) -> float:
        asked = time.time()
        if self._ask(Asked(ranks, "benchmark")) is None:
            raise RuntimeError("the coordinator did not answer")
        return asked

    def _ask(self, question: CoordinatorRequest) -> ElasticJobStatus | None:
        try:
            run = RunDirectory(self._folder / "run", _JOB).read()
            return call_coordinator(run.coordinator, question, job=_JOB, secret=run_secret(run))
        except ControlPlaneUnavailableError:
            return None


class Agents(Resizable):
    """An agent of ``torchrun`` joins or leaves, and the other agents restart all their processes."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        super().__init__(folder, size_bytes)
        self._port = free_port()

    def begin(self, ranks: int) -> None:
        self._agent(host=True)
        if ranks > _PER_AGENT:
            self._until(lambda: bool(self._pids()), "the first agent has started its ranks")
            self._agent(host=False)

    def resize(self, ranks: int) -> float:
        before = self._pids()
        if ranks > _PER_AGENT:
            asked = self._agent(host=False)
        else:
            asked = time.time()
            self._started[1].terminate()
        self._until_gone(before)
        return asked

    def _agent(self, *, host: bool) -> float:
        """Start an agent and return the time it was ready to join.

        Importing torch does not count, because our warm node has imported it as well.
        """
        ready = self._folder / f"agent-{len(self._started)}"
        code = f"import pathlib, torch.distributed.run as r; pathlib.Path({str(ready)!r}).touch(); r.main()"
        conf = f"is_host={str(host).lower()},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self._port}", "--rdzv-id", _JOB)
        here = ("--rdzv-conf", conf, "--local-addr", "127.0.0.1", "--max-restarts", "3")
        nodes = ("--nnodes", "1:2", "--nproc-per-node", str(_PER_AGENT))
        self._start("-c", code, *nodes, *meeting, *here, "-m", _TRAINER, *self._arguments())
        self._until(ready.exists, "torchrun has started", LOOK_CLOSELY_S)
        return ready.stat().st_mtime


class Again(Resizable):
    """A job that is stopped and started with another number of ranks."""

    def begin(self, ranks: int) -> None:
        words = ("--standalone", "--nproc-per-node", str(ranks))
        self._start("-m", "torch.distributed.run", *words, "-m", _TRAINER, *self._arguments())

    def resize(self, ranks: int) -> float:
        before = self._pids()
        asked = time.time()
        self._started[-1].terminate()
        self._started[-1].wait(PATIENCE_S)
        self._until_gone(before)
        self.begin(ranks)
        return asked
