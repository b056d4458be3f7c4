"""Jobs for P9: four ranks on two simulated nodes, started as their documentation recommends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from pathlib import Path

from benchmarks.diary import Line
from benchmarks.jobs import LOOK_CLOSELY_S, Job, free_port
from benchmarks.recovery_trainer import Task
from benchmarks.sandbox import agent_pid
from peerstore.daemon_process import process_start_time
from peerstore.sizes_and_durations import show_size

RANKS, NODES = 4, 2
PER_NODE = RANKS // NODES
_TRAINER = ("-m", "benchmarks.recovery_trainer")
_BEFORE = 6
"""Number of steps that every rank finishes and saves before the fault."""
RANK, NODE, ERROR = "a rank is killed", "a node is lost", "a rank raises"


class Disturbed(Job):
    """A job with a fault in one rank or node."""

    way = ""
    options: tuple[str, ...] = ()

    def __init__(self, folder: Path, task: Task) -> None:
        super().__init__(folder)
        self.task = dataclasses.replace(task, way=self.way, folder=str(folder), options=self.options)
        self.lost: set[int] = set()
        """Processes that the fault kills."""
        self.gone_at = 0.0
        """End of the last process that ended as a consequence, if any; in seconds since the epoch."""

    def begin(self) -> None:
        raise NotImplementedError

    def until_going(self) -> None:
        """Wait until all ranks have trained together for some steps."""

        def going() -> bool:
            counts: dict[int, int] = {}
            for line in self.lines():
                if line["what"] == "stepped" and line.get("together", RANKS) == RANKS:
                    counts[line["pid"]] = counts.get(line["pid"], 0) + 1
            return sum(count >= _BEFORE for count in counts.values()) >= RANKS

        self._until(going, f"{RANKS} ranks train")

    def disturb(self, fault: str) -> float:
        """Inject the fault and return its time."""
        if fault == ERROR:
            (self._folder / "raise").touch()
            self._until(lambda: self._find("fault") is not None, "a rank raises", LOOK_CLOSELY_S)
            return float(self._find("fault")["at"])
        last = self._last_rank()
        self.lost = self._on_node(last) if fault == NODE else {last["pid"]}
        at = time.time()
        for pid in self.lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if fault == NODE:
            self.replace_node()
        return at

    def until_back(self, after: float) -> None:
        """Wait until all ranks have trained together again and have recorded their state."""
        old = {line["pid"] for line in self.lines() if line["at"] <= after}

        def back() -> bool:
            still = {pid for pid in old if process_start_time(pid) >= 0}
            self.gone_at = time.time() if still != old else self.gone_at
            old.intersection_update(still)
            looked = {line["pid"] for line in self.lines() if line["what"] == "looked" and line["at"] > after}
            return len(looked) >= RANKS

        self._until(back, f"{RANKS} ranks train again", LOOK_CLOSELY_S)

    def reference(self, steps: set[int]) -> dict[int, list[str]]:
        """Start the job and return the checksums of all ranks after these steps, without a fault."""
        self.task = dataclasses.replace(self.task, compared=tuple(sorted(steps)))
        self.begin()

        def found() -> dict[int, list[str]]:
            by_step = {step: [line["sum"] for line in self.lines() if looked(line, step)] for step in steps}
            return by_step if all(len(sums) == RANKS for sums in by_step.values()) else {}

        self._until(lambda: bool(found()), "an undisturbed run is over")
        return {step: sorted(sums) for step, sums in found().items()}

    def replace_node(self) -> None:
        """Start a replacement for the lost node, if the job needs one."""

    def _last_rank(self) -> Line:
        return [line for line in self.lines() if line["what"] == "stepped" and line["rank"] == RANKS - 1][-1]

    def _on_node(self, rank: Line) -> set[int]:
        """Return all processes of a node: its launcher and its ranks."""
        raise NotImplementedError

    def _find(self, what: str) -> Line | None:
        return next((line for line in self.lines() if line["what"] == what), None)


class Elastic(Disturbed):
    """``elastic run`` without a spare: it restarts a lost process, and a new node replaces a lost one."""

    way = "elastic"
    nodes = NODES
    more: tuple[str, ...] = ()

    def begin(self) -> None:
        # Two slots per shard, a copy of each on another node, and one more slot during a rebuild.
        budget = show_size(4 * self.task.size_bytes + (256 << 20)).replace(" ", "")
        self._environ |= {"ELASTIC_RUN_DIRECTORY": str(self._folder / "run"), "TIEREDCKPT_AGENT_BUDGET": budget}
        nodes = ("--nnodes", str(NODES), "--simulate-nodes", str(self.nodes), "--nproc", str(PER_NODE))
        # The world must not shrink, because the other contenders keep its size.
        where = ("--job", "recovery", "--log-dir", str(self._folder / "logs"), "-v", "--shrink-after", "120")
        self._start("-m", "elastic", "run", *where, *nodes, *self.more, *_TRAINER, self.task.words())

    def until_going(self) -> None:
        ready = PER_NODE * self.nodes if not self.more else (PER_NODE + 1) * NODES
        self._until(lambda: sum(line["what"] == "ready" for line in self.lines()) >= ready, "all are warm")
        super().until_going()

    def replace_node(self) -> None:
        self._start("-m", "elastic", "join", "recovery", "-v")

    def _on_node(self, rank: Line) -> set[int]:
        """Include the node's agent, so that its memory is lost too."""
        mine = [line for line in self.lines() if line["what"] == "imported"]
        node = next(line["node"] for line in mine if line["pid"] == rank["pid"])
        ranks = {line["pid"] for line in mine if line["node"] == node and process_start_time(line["pid"]) >= 0}
        agents = {agent_pid(lock.parent) for lock in (self._folder / "run").glob(f"*/{node}/agent/agent.lock")} - {0}
        return {_parent(rank["pid"]), *agents, *ranks}


class Warm(Elastic):
    """``elastic run`` with a warm spare process on every node."""

    more = ("--spares", "1")


class WarmNode(Elastic):
    """``elastic run`` with a spare node that waits with everything imported."""

    nodes = NODES + 1

    def replace_node(self) -> None:
        pass


class Torchrun(Disturbed):
    """``torchrun`` with an agent on each node and a monitor interval of a tenth of the default.

    The number of nodes is fixed, so a rendezvous ends without a last call once all nodes have joined. A silent node
    counts as lost after 3 s instead of 15 s.
    """

    way = "torchrun"

    def __init__(self, folder: Path, task: Task) -> None:
        super().__init__(folder, task)
        self._port = free_port()

    def begin(self) -> None:
        for number in range(NODES):
            self._agent(host=number == 0)
            if number == 0:
                time.sleep(0.5)  # the second agent needs the first one's store and retries only after 1 s

    def replace_node(self) -> None:
        self._agent(host=False)

    def _agent(self, *, host: bool) -> None:
        conf = f"is_host={str(host).lower()},keep_alive_interval=1,keep_alive_max_attempt=3"
        meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{self._port}", "--rdzv-id", "recovery")
        here = ("--rdzv-conf", conf, "--local-addr", "127.0.0.1")
        kept = ("--max-restarts", "3", "--monitor-interval", "0.01")
        ranks = ("--nnodes", str(NODES), "--nproc-per-node", str(PER_NODE))
        self._start("-m", "torch.distributed.run", *ranks, *meeting, *here, *kept, *_TRAINER, self.task.words())

    def _on_node(self, rank: Line) -> set[int]:
        agent = _parent(rank["pid"])
        return {agent, *(pid for pid in self._pids() if _parent(pid) == agent)}


class Undisturbed(Torchrun):
    way = "undisturbed"


class Torchft(Disturbed):
    """torchft: a lighthouse, and a ``torchrun`` per replica group that restarts its ranks.

    Each rank is a replica group, as torchft's README recommends for DDP (HSDP is not compared). The lighthouse has the
    README's options. It drops a replica after 1 s without a heartbeat (default: 5 s).
    """

    way = "torchft"
    options = ("http", "all")

    def begin(self) -> None:
        port = free_port()
        self._environ |= {"TORCHFT_LIGHTHOUSE": f"http://localhost:{port}", "RUST_BACKTRACE": "1"}
        least = str(RANKS if "all" in self.options else 1)
        words = ("--min_replicas", least, "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")
        lighthouse = self._folder / "lighthouse.py"
        lighthouse.write_text("from torchft._torchft import lighthouse_main\nlighthouse_main()\n")
        self._start(str(lighthouse), *words, "--heartbeat_timeout_ms", "1000", "--bind", f"[::]:{port}")
        for number in range(RANKS):
            self._replicas(number)

    def _replicas(self, number: int) -> None:
        self._environ |= {"REPLICA_GROUP_ID": str(number), "NUM_REPLICA_GROUPS": str(RANKS)}
        port = ("--master_addr=127.0.0.1", f"--master_port={free_port()}")
        ranks = ("--nnodes=1", "--nproc_per_node=1", "--max_restarts=10")
        kept = ("--monitor-interval", "0.01")
        self._start("-m", "torch.distributed.run", *port, *ranks, *kept, *_TRAINER, self.task.words())

    def replace_node(self) -> None:
        for number in range(PER_NODE, RANKS):
            self._replicas(number)

    def _on_node(self, rank: Line) -> set[int]:
        there = {line["pid"] for line in self.lines() if line.get("rank", -1) >= PER_NODE}
        ranks = {pid for pid in there if process_start_time(pid) >= 0}
        return ranks | {_parent(pid) for pid in ranks}


class GoesOn(Torchft):
    """torchft without a minimum: survivors continue without the lost rank's share of each step."""

    options = ()


def looked(line: Line, step: int) -> bool:
    return line["what"] == "looked" and line["step"] == step


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
