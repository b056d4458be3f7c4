"""``elastic demo``: faults and resizes on this machine, and a proof that every loss is bitwise equal."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from elastic.demo.scenario import (
    ELASTIC_DEMO_JOB,
    PROGRESS_S,
    DemoAct,
    DemoFailedError,
    ElasticDemo,
    losses_by_step,
    read_demo_events,
)
from elastic.settings import event_log_directory
from peerstore.sizes_and_durations import show_size
from tieredckpt.demo import demo_environ, empty_demo_folder, kill_demo_node, short_loss
from tieredckpt.demo.local_s3 import local_bucket
from tieredckpt.event_log import read_event_log
from tieredckpt.goodput import analyse
from tieredckpt.goodput.html_report import html_report

_REFERENCE_S = 600.0


def main(*, as_json: bool = False, keep: Path | None = None) -> int:
    """Run the demo with its files in ``keep``; return 0 if all losses and the final state are equal."""
    console = Console(stderr=as_json, soft_wrap=True, highlight=False)
    keep = empty_demo_folder(keep or Path(tempfile.gettempdir()) / f"elastic-demo-{os.getuid()}")
    began = time.monotonic()
    with contextlib.ExitStack() as cleanup:
        memory = Path(cleanup.enter_context(shared_memory_directory()))
        bucket = cleanup.enter_context(local_bucket(keep))
        environ = {
            **demo_environ("ELASTIC_"),
            **bucket.environ,
            "TIEREDCKPT_DURABLE_URL": bucket.url,
            "TIEREDCKPT_AGENT_BUDGET": "512MiB",
            "PYTHONWARNINGS": "ignore",
        }
        console.print("[bold]Train a transformer with FSDP2 on two simulated nodes, through faults and resizes[/]")
        console.print("This takes about two minutes on two idle cores, and longer on a busy machine.")
        story = cleanup.enter_context(contextlib.closing(ElasticDemo(keep, memory, environ, console.print)))
        story.run()
        losses = losses_by_step(story.events("step"))
        same = f"Run the same {len(losses)} steps in one undisturbed process, then restore from the bucket alone"
        console.print(f"[bold]{same}[/]")
        alone = run_reference(keep, memory, len(losses), environ, console.print)
        report = keep / "report.html"
        goodput = _report(story.logs, report)
        summary = {
            **summarize_demo(story, losses, alone, time.monotonic() - began),
            "goodput": goodput,
            "report": str(report),
        }
        if as_json:
            print(json.dumps(summary, indent=2))
        else:
            show_elastic_demo(console, story.acts, losses, summary)
            look = bucket.look.replace(" demo ", f" {ELASTIC_DEMO_JOB} ")
            verdict = "[bold green]equal bit for bit[/]" if summary["equal"] else "[bold red]NOT equal[/]"
            console.print(f"durable tier: {bucket.name}\nto list its steps: {look}")
            console.print(f"report on where the time went: [bold]{report}[/]")
            console.print(f"{summary['steps']} losses compared: {verdict}. The demo took {summary['seconds']:.0f} s.")
    return 0 if summary["equal"] else 1


@contextlib.contextmanager
def shared_memory_directory() -> Iterator[str]:
    """Yield a temporary directory on tmpfs, with a path short enough for sockets."""
    root = Path("/dev/shm")  # noqa: S108 - see above
    with tempfile.TemporaryDirectory(prefix="elastic-demo-", dir=root if os.access(root, os.W_OK) else None) as folder:
        yield folder


def run_reference(
    keep: Path, memory: Path, steps: int, environ: Mapping[str, str], print_line: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Run the steps in one process, and return its events. Print its progress with ``print_line``."""
    folder, agent = keep / "undisturbed", memory / "empty"
    folder.mkdir()
    command = [sys.executable, "-m", "elastic.demo.fsdp_trainer", str(folder), str(steps)]
    own = {"TIEREDCKPT_AGENT_DIRECTORY": str(agent), "OMP_NUM_THREADS": "1"}
    try:
        with (folder / "output").open("wb") as out:
            process = subprocess.Popen(command, env={**environ, **own}, stdout=out, stderr=out)  # noqa: S603 - ours
        began = time.monotonic()
        try:
            while _is_running(process):
                if time.monotonic() > began + _REFERENCE_S:
                    raise DemoFailedError(f"the undisturbed run took over {_REFERENCE_S:g} s; see {folder / 'output'}")
                done = sum(one["event"] == "step" for one in read_demo_events(folder))
                so_far = f"{done} of {steps} steps" if done < steps else "restoring from the bucket"
                print_line(f"[dim]{time.monotonic() - began:5.1f} s[/]    [dim]{so_far}[/]")
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            raise DemoFailedError(f"the undisturbed run failed ({process.returncode}); see {folder / 'output'}")
    finally:
        kill_demo_node(agent)
    return list(read_demo_events(folder))


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    """Wait for the process to end, at most ``PROGRESS_S`` seconds, and return whether it runs."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PROGRESS_S)
    return process.returncode is None


def _report(logs: Path, report: Path) -> float:
    """Write the report of the event log, and return the goodput."""
    read = read_event_log(event_log_directory(logs, {}))
    found = analyse(read.events, warnings=read.warnings)
    report.write_text(html_report(found), encoding="utf-8")
    return found.goodput


def summarize_demo(
    story: ElasticDemo, losses: Mapping[int, str], alone: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    expected = losses_by_step(one for one in alone if one["event"] == "step")
    (own,) = {one["sum"] for one in story.events("sum")}
    reference = next(one for one in alone if one["event"] == "sum")
    bucket = next(one for one in alone if one["event"] == "bucket")
    different = [step for step, loss in expected.items() if losses.get(step) != loss]
    done = len({(one["step"], one["epoch"]) for one in story.events("step")})
    return {
        "equal": not different and own == reference["sum"] == bucket["sum"] and bucket["step"] == len(expected) - 1,
        "steps": len(expected),
        "expected": expected,
        "found": dict(losses),
        "different": different,
        "done_twice": done - len(losses),
        "state": own,
        "undisturbed_state": reference["sum"],
        "bucket_state": bucket["sum"],
        "bucket_step": bucket["step"],
        "bucket_tiers": bucket["tiers"],
        "worlds": len({one["epoch"] for one in story.events("world")}),
        "acts": [
            {"what": act.what, "at": act.at, "first": act.first, "seconds": act.seconds, "tiers": dict(act.tiers)}
            for act in story.acts
        ],
        "seconds": seconds,
    }


def show_elastic_demo(
    console: Console, acts: list[DemoAct], losses: Mapping[int, str], summary: Mapping[str, Any]
) -> None:
    table = Table(title="what happened, and how long recovery took", header_style="bold", title_justify="left")
    for name in ("what", "ranks", "resumed at step", "after", "restored"):
        table.add_column(name, justify="right" if name in ("ranks", "resumed at step", "after") else "left")
    for act in acts:
        read = ", ".join(f"{show_size(count)} from {tier}" for tier, count in act.tiers.items() if count) or "nothing"
        table.add_row(act.what, str(act.ranks), str(act.first), f"{act.seconds:.1f} s", read)
    console.print(table)
    expected: Mapping[int, str] = summary["expected"]
    table = Table(title="loss, bit for bit", header_style="bold", title_justify="left")
    for name in ("step", "undisturbed, one process", "this job", ""):
        table.add_column(name)
    last = len(expected) - 1
    for step in sorted({0, *(act.first for act in acts), *(act.first - 1 for act in acts if act.first), last}):
        same = "[green]equal[/]" if losses.get(step) == expected[step] else "[red]different[/]"
        table.add_row(str(step), short_loss(expected[step]), short_loss(losses.get(step, "-")), same)
    console.print(table)
    console.print(f"{summary['worlds']} worlds, repeated steps: {summary['done_twice']}")
    console.print(f"checksum of parameters and optimizer state after step {last}: {summary['state']}")
    console.print(f"of the undisturbed run: {summary['undisturbed_state']}")
    console.print(f"of the state restored from the bucket: {summary['bucket_state']}")
