"""``tieredckpt demo``: a killed rank, a lost node, both nodes lost; the losses stay bitwise equal."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from peerstore.sizes_and_durations import show_seconds, show_size
from tieredckpt.demo.local_s3 import LocalBucket, free_port, local_bucket
from tieredckpt.errors import UsageError

DEMO_WORLD_SIZE = 2
DEMO_PHASES = (12, 18, 24, 30)
"""Steps at which a trainer is killed, one node is lost, both nodes are lost, and training ends."""
DEMO_NODES = ("n1", "n2")
DEMO_SPARE = "n3"
DURABLE_EVERY = 5
_LIMIT_S = 90.0
_NOTHING = subprocess.DEVNULL
_MARK = ".made-by-tieredckpt-demo"


@dataclass
class PhaseResult:
    """Result of one start of the trainers."""

    events: list[list[dict[str, Any]]] = field(default_factory=list)
    """Events by rank."""
    seconds: float = 0.0
    exit_codes: tuple[int | None, ...] = ()

    def losses(self) -> dict[int, str]:
        return {e["step"]: e["loss"] for e in self.events[0] if e["event"] == "step"}

    def restore_event(self, rank: int = 0) -> dict[str, Any]:
        return next(
            (e for e in self.events[rank] if e["event"] == "restored"), {"step": -1, "tiers": {}, "seconds": 0.0}
        )

    def save_stalls_s(self) -> list[float]:
        return [e["blocked"] for events in self.events for e in events if e["event"] == "step"]


@dataclass(frozen=True)
class _Node:
    """A simulated node of the demo: a node agent with its own memory, on this machine."""

    name: str
    directory: Path
    extra: Mapping[str, str]

    @property
    def environ(self) -> dict[str, str]:
        return {
            **self.extra,
            "TIEREDCKPT_AGENT_DIRECTORY": str(self.directory),
            "TIEREDCKPT_AGENT_NODE": self.name,
            "TIEREDCKPT_AGENT_PEERS": "127.0.0.1:0",
            "TIEREDCKPT_AGENT_HTTP": "127.0.0.1:0",
            "TIEREDCKPT_AGENT_BUDGET": "1GiB",
        }


def main(*, as_json: bool = False, keep: Path | None = None) -> int:
    """Run the demo.

    Return 0 if all losses are bitwise equal. ``keep``: directory that retains the bucket's files.
    """
    console = Console(stderr=as_json, soft_wrap=True)
    keep = empty_demo_folder(keep or Path(tempfile.gettempdir()) / f"tieredckpt-demo-{os.getuid()}")
    began = time.monotonic()
    with contextlib.ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="tieredckpt-demo-")))
        arena = Path(cleanup.enter_context(_arena()))
        console.print("[bold]1.[/] a transformer trains on 2 ranks, nothing is saved: the reference")
        reference = _train(folder / "reference", DEMO_PHASES[-1], [_Node("n1", arena / "none", {})] * DEMO_WORLD_SIZE)
        bucket = cleanup.enter_context(local_bucket(keep))
        nodes = {name: _Node(name, arena / name, bucket.environ) for name in (*DEMO_NODES, DEMO_SPARE)}
        number = DEMO_PHASES[0] - 1
        console.print(
            f"[bold]2.[/] the same on two nodes, saved every step, each step copied to the other node's memory; rank 1 "
            f"gets SIGKILL in step {number}'s save"
        )
        both = [nodes[name] for name in DEMO_NODES]
        killed = _train(folder / "killed", DEMO_PHASES[1], both, durable=bucket.url, killed_in_save=DEMO_PHASES[0])
        console.print("[bold]3.[/] both ranks restart and find the last complete step in memory")
        resumed = _train(folder / "resumed", DEMO_PHASES[1], both, durable=bucket.url)
        agent = _agent_status(both[0].directory)
        console.print(
            "[bold]4.[/] n2 is lost with everything on it; on the new node n3 its rank pulls its bytes from n1's memory"
        )
        kill_demo_node(both[1].directory)
        replaced = _train(folder / "replaced", DEMO_PHASES[2], [nodes["n1"], nodes[DEMO_SPARE]], durable=bucket.url)
        console.print("[bold]5.[/] all nodes are lost; new ranks find the last step in the bucket")
        for node in nodes.values():
            kill_demo_node(node.directory)
        hydrated = _train(folder / "hydrated", DEMO_PHASES[3], both, durable=bucket.url)
        seen = _list_steps(both[0], bucket)
        phases = {"killed": killed, "resumed": resumed, "replaced": replaced, "hydrated": hydrated}
        result = _compare(reference, phases)
        summary = _summary(result, phases, agent, time.monotonic() - began)
        if as_json:
            print(json.dumps(summary | {"steps": seen}, indent=2))
        else:
            _show(console, reference, phases, summary, seen, bucket=bucket)
    return 0 if result["equal"] else 1


def empty_demo_folder(folder: Path) -> Path:
    """Create ``folder``, or empty it if an earlier demo made it.

    Raise :class:`UsageError` for other files.
    """
    folder = folder.absolute()
    if folder.exists() and not (folder / _MARK).is_file() and any(folder.iterdir()):
        raise UsageError(f"{folder} exists and was not made by the demo; name another one with --keep")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    (folder / _MARK).touch()
    return folder


@contextlib.contextmanager
def _arena() -> Iterator[str]:
    root = Path("/dev/shm")  # noqa: S108 - tmpfs
    directory = Path(tempfile.mkdtemp(prefix="tieredckpt-demo-", dir=root if os.access(root, os.W_OK) else None))
    try:
        yield str(directory)
    finally:
        for node in (*DEMO_NODES, DEMO_SPARE):
            kill_demo_node(directory / node)
        shutil.rmtree(directory, ignore_errors=True)


def _train(
    folder: Path, steps: int, nodes: Sequence[_Node], *, durable: str = "", killed_in_save: int = 0
) -> PhaseResult:
    """Start the ranks and wait until they exit. If one fails, the others are killed.

    ``killed_in_save``: number of the save that kills the last rank. 0: none.
    """
    folder.mkdir()
    began, port = time.monotonic(), free_port()
    events = [folder / f"rank{rank}.jsonl" for rank in range(DEMO_WORLD_SIZE)]
    with contextlib.ExitStack() as files:
        ranks = []
        for rank in range(DEMO_WORLD_SIZE):
            log = files.enter_context((folder / f"rank{rank}.log").open("wb"))
            command = [sys.executable, "-m", "tieredckpt.demo.training_script", "--events", str(events[rank])]
            command += ["--steps", str(steps), "--durable", durable, "--durable-every", str(DURABLE_EVERY)]
            if rank == DEMO_WORLD_SIZE - 1:
                command += ["--killed-in-save", str(killed_in_save)]
            environ_of_rank = _rank_environ(rank, port, nodes[rank].environ)
            ranks.append(subprocess.Popen(command, env=environ_of_rank, stdout=log, stderr=log, stdin=_NOTHING))  # noqa: S603 - ours
        _wait(ranks, began)
    phase = PhaseResult(
        [_events(path) for path in events], time.monotonic() - began, tuple(r.returncode for r in ranks)
    )
    if not killed_in_save and any(phase.exit_codes):
        raise RuntimeError(
            f"a rank failed: {phase.exit_codes}\n" + (folder / "rank0.log").read_text(errors="replace")[-3000:]
        )
    return phase


def _wait(ranks: Sequence[subprocess.Popen[bytes]], began: float) -> None:
    while any(rank.poll() is None for rank in ranks):
        died = any(rank.poll() not in (None, 0) for rank in ranks)
        if died or time.monotonic() - began > _LIMIT_S:
            for rank in ranks:
                rank.kill()
        time.sleep(0.02)


def _rank_environ(rank: int, port: int, extra: Mapping[str, str]) -> dict[str, str]:
    return {
        **demo_environ(),
        **extra,
        "RANK": str(rank),
        "WORLD_SIZE": str(DEMO_WORLD_SIZE),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


def demo_environ(*others: str) -> dict[str, str]:
    """Return this process's environment without the settings that a demo sets."""
    ours = ("TIEREDCKPT_", "AWS_", "PEERSTORE_", *others)
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def _events(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # truncated by the kill
            break
    return found


def kill_demo_node(arena: Path) -> None:
    """Kill a node's agent and delete its memory, as in the loss of the node."""
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((arena / "agent.lock").read_text()), signal.SIGKILL)
    shutil.rmtree(arena, ignore_errors=True)


def _agent_status(arena: Path) -> dict[str, Any]:
    address = (arena / "http").read_text()
    with urllib.request.urlopen(f"http://{address}/status", timeout=5) as answer:
        status: dict[str, Any] = json.load(answer)
    return status


def _list_steps(on: _Node, bucket: LocalBucket) -> list[dict[str, Any]]:
    """Return the steps and their tiers, as ``tieredckpt ls`` lists them."""
    from tieredckpt.agent.agent_client import NodeAgentClient
    from tieredckpt.demo.training_script import DEMO_JOB
    from tieredckpt.settings import load_settings

    os.environ.update(on.environ)
    node = NodeAgentClient(load_settings({**on.environ, "TIEREDCKPT_DURABLE_URL": bucket.url}), DEMO_JOB)
    with contextlib.closing(node):
        survey = node.list_steps(DEMO_JOB, fresh=True)
    return [
        {
            "step": view.version_id.version,
            "memory": sum(bool({"memory", "peer"} & {t.value for t in tiers}) for tiers in view.found.values()),
            "parts": view.parts or DEMO_WORLD_SIZE,
            "durable": view.durable,
        }
        for view in sorted(survey.views, key=lambda view: view.version_id.version)
    ]


def _compare(reference: PhaseResult, phases: Mapping[str, PhaseResult]) -> dict[str, Any]:
    expected = reference.losses()
    compared = different = 0
    for phase in phases.values():
        for step, loss in phase.losses().items():
            compared += 1
            different += loss != expected[step]
    last = max(phases["hydrated"].losses(), default=-1)
    return {"equal": not different and last == DEMO_PHASES[-1] - 1, "compared": compared, "different": different}


def _summary(
    result: Mapping[str, Any], phases: Mapping[str, PhaseResult], agent: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    counters, drain = agent["store"]["counters"], agent["drain"]["totals"]
    copies = next(iter(agent["peers"].values()))["totals"]
    resumed, hydrated = phases["resumed"].restore_event(), phases["hydrated"].restore_event()
    replaced = phases["replaced"].restore_event(rank=DEMO_WORLD_SIZE - 1)
    blocked = phases["resumed"].save_stalls_s()
    return {
        **result,
        "killed_in_step": DEMO_PHASES[0] - 1,
        "resumed_from": resumed["step"],
        "resumed_tiers": resumed["tiers"],
        "replaced_from": replaced["step"],
        "replaced_tiers": replaced["tiers"],
        "hydrated_from": hydrated["step"],
        "hydrated_tiers": hydrated["tiers"],
        "first_save_s": blocked[0],
        "save_blocked_s": statistics.median(blocked[1:]),
        "seal_s": counters.get("seal_seconds", 0) / max(1, counters.get("sealed", 1)),
        "shard_bytes": int(counters.get("sealed_bytes", 0) / max(1, counters.get("sealed", 1))),
        "drain_s": drain["seconds"] / max(1, drain["steps"]),
        "drained_steps": drain["steps"],
        "copy_s": copies["seconds"] / max(1, copies["copies"]),
        "restore_memory_s": resumed["seconds"],
        "restore_peer_s": replaced["seconds"],
        "restore_durable_s": hydrated["seconds"],
        "seconds": seconds,
    }


def short_loss(loss: str) -> str:
    """Return a hexadecimal loss such as ``0x1.4f23aa0000000p+0`` without its trailing zeros."""
    digits, _, exponent = loss.partition("p")
    return f"{digits.rstrip('0')}p{exponent}"


def _show(
    console: Console,
    reference: PhaseResult,
    phases: Mapping[str, PhaseResult],
    summary: Mapping[str, Any],
    seen: Sequence[Mapping[str, Any]],
    *,
    bucket: LocalBucket,
) -> None:
    table = Table(title="loss, bit for bit", header_style="bold", title_justify="left")
    for name in ("step", "undisturbed", "with kills", "", "computed by"):
        table.add_column(name)
    expected = reference.losses()
    found = {step: (loss, name) for name, phase in phases.items() for step, loss in phase.losses().items()}
    names = {
        "killed": "the first ranks",
        "resumed": "restarted from memory",
        "replaced": "with a new node, from the other one's memory",
        "hydrated": "restarted from the bucket",
    }
    edges = [step for phase in DEMO_PHASES[:-1] for step in (phase - 1, phase)]
    for step in (0, DEMO_PHASES[0] - 2, *edges, DEMO_PHASES[-1] - 1):
        loss, name = found[step]
        same = "[green]equal[/]" if loss == expected[step] else "[red]different[/]"
        table.add_row(str(step), short_loss(expected[step]), short_loss(loss), same, names[name])
    console.print(table)

    where = Table(title="what is where at the end", header_style="bold", title_justify="left")
    for name in ("step", "memory of n1 and n2", "bucket"):
        where.add_column(name)
    for row in seen:
        memory = f"{row['memory']} of {row['parts']} shards" if row["memory"] else "-"
        where.add_row(str(row["step"]), memory, "complete" if row["durable"] else "-")
    console.print(where)

    times = Table(title="how long each stage took (2 nodes on this machine)", header_style="bold", title_justify="left")
    times.add_column("stage")
    times.add_column("time", justify="right")
    shard = show_size(summary["shard_bytes"])
    for stage, seconds in (
        ("first save: plan, take a slot, copy, seal", summary["first_save_s"]),
        (f"every later save: what training waits for ({shard} a rank)", summary["save_blocked_s"]),
        ("checksum and seal, in the agent", summary["seal_s"]),
        ("copy to the other node's memory, verified there, in the agents", summary["copy_s"]),
        ("one step to the bucket, in the agent", summary["drain_s"]),
        ("restore from memory", summary["restore_memory_s"]),
        ("restore of a new node, from another node's memory", summary["restore_peer_s"]),
        ("restore from the bucket", summary["restore_durable_s"]),
    ):
        times.add_row(stage, show_seconds(seconds))
    console.print(times)

    memory, peer, durable = (
        sum(n for tier, n in summary[k].items() if tier in tiers)
        for k, tiers in (
            ("resumed_tiers", ("memory",)),
            ("replaced_tiers", ("peer", "memory")),
            ("hydrated_tiers", ("durable",)),
        )
    )
    console.print(
        f"killed in step {summary['killed_in_step']}'s save: resumed after step {summary['resumed_from']} "
        f"({show_size(memory)} a rank from memory, nothing from the bucket)"
    )
    console.print(
        f"n2 lost after step {DEMO_PHASES[1] - 1}: resumed after step {summary['replaced_from']} "
        f"({show_size(peer)} for n3 from n1's memory, nothing from the bucket)"
    )
    console.print(
        f"all nodes lost after step {DEMO_PHASES[2] - 1}: resumed after step {summary['hydrated_from']}, the last "
        f"durable one ({show_size(durable)} a rank from the bucket)"
    )
    console.print(f"durable tier: {bucket.name}")
    console.print(f"to list its contents: {bucket.look}")
    verdict = "[bold green]equal bit for bit[/]" if summary["equal"] else "[bold red]NOT equal[/]"
    console.print(f"{summary['compared']} losses compared: {verdict}, in {summary['seconds']:.0f} s")
