"""``make demo-hyperpod``: a job with faults under real agents, bitwise equal to an undisturbed run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from elastic.demo import run_reference, shared_memory_directory, show_elastic_demo, summarize_demo
from elastic.demo.scenario import DemoFailedError, ElasticDemo, losses_by_step
from elastic.supervisor.memory_tier import MemoryTierProcess
from integration.hyperpod.hyperpodrun import AGENT_INSTALL
from integration.hyperpod.operator.sim_loop import SIM_DIRECTORY_ENV, SimDirectory
from peerstore.optional_packages import missing_package_error
from tieredckpt.demo import demo_environ, empty_demo_folder, kill_demo_node
from tieredckpt.demo.local_s3 import local_bucket


def main(*, as_json: bool = False, keep: Path | None = None) -> int:
    """Run the demo; return 0 when all losses and the final state are bitwise equal.

    ``keep`` is the folder of its files.
    """
    if importlib.util.find_spec("hyperpod_elastic_agent") is None:
        print(missing_package_error("the demo", "hyperpod_elastic_agent", AGENT_INSTALL), file=sys.stderr)
        return 2
    console = Console(stderr=as_json, soft_wrap=True, highlight=False)
    keep = empty_demo_folder(keep or Path(tempfile.gettempdir()) / f"hyperpod-demo-{os.getuid()}")
    began = time.monotonic()
    with contextlib.ExitStack() as cleanup:
        memory = Path(cleanup.enter_context(shared_memory_directory()))
        bucket = cleanup.enter_context(local_bucket(keep))
        environ = {
            **demo_environ("ELASTIC_", "HYPERPOD_"),
            **bucket.environ,
            "TIEREDCKPT_DURABLE_URL": bucket.url,
            "TIEREDCKPT_AGENT_BUDGET": "512MiB",
            "PYTHONWARNINGS": "ignore",
        }
        console.print("[bold]a HyperPodPyTorchJob under hyperpodrun and our operator, and things happen to it[/]")
        demo = cleanup.enter_context(contextlib.closing(HyperPodDemo(keep, memory, environ, console.print)))
        demo.run()
        console.print((keep / "operator-0.log").read_text().rstrip(), markup=False)
        losses = losses_by_step(demo.events("step"))
        console.print(f"[bold]the same {len(losses)} steps on one process, undisturbed; then from the bucket alone[/]")
        reference = run_reference(keep, memory, len(losses), environ, console.print)
        summary = summarize_demo(demo, losses, reference, time.monotonic() - began)
        if as_json:
            print(json.dumps(summary, indent=2))
        else:
            show_elastic_demo(console, demo.acts, losses, summary)
            verdict = "[bold green]equal bit for bit[/]" if summary["equal"] else "[bold red]NOT equal[/]"
            console.print(f"{summary['steps']} losses compared: {verdict}, in {summary['seconds']:.0f} s")
            console.print(f"output of agents and ranks: {demo.place.folder / 'pods'}")
    return 0 if summary["equal"] else 1


HYPERPOD_DEMO_NODES = ("n0", "n1", "n2")
"""Nodes of the demo. The job uses two; the third one replaces a faulty one."""
_COMMAND = [sys.executable, "-m", "integration.hyperpod.operator"]


class HyperPodDemo(ElasticDemo):
    """Processes of the operator and its agents, and the node agents, which outlive the pods."""

    def __init__(self, folder: Path, memory: Path, environ: Mapping[str, str], told: Callable[[str], None]) -> None:
        super().__init__(folder, memory, environ, told)
        self._memory = memory
        self._environ = {**self._environ, SIM_DIRECTORY_ENV: str(folder / "sim"), "MEMORY": str(memory)}
        self._environ["EVENTS"] = str(self.lines_folder)
        self._environ["TIEREDCKPT_AGENT_PEERS"] = "127.0.0.1:0"
        resource = yaml.safe_load((Path(__file__).with_name("job.yaml")).read_text())
        self.place = SimDirectory(resource["metadata"]["name"], folder / "sim")
        self._agents = {
            node: MemoryTierProcess({**self._environ, **self._node_environ(node)}) for node in HYPERPOD_DEMO_NODES
        }

    def _node_environ(self, node: str) -> dict[str, str]:
        return {"TIEREDCKPT_AGENT_DIRECTORY": str(self._memory / node), "TIEREDCKPT_AGENT_NODE": node}

    def run(self) -> None:
        for agent in self._agents.values():
            agent.start()
        job = Path(__file__).with_name("job.yaml")
        operator = self._start(
            "run", str(job), "--spawn", str(len(HYPERPOD_DEMO_NODES)), "--every", "0.2", "--lost-after", "60"
        )
        self._act("two agents with two ranks each start", lambda _: None, ranks=4)
        self._act("a rank gets SIGKILL; its agent tells the operator", self._kill_rank, ranks=4)
        self._act("a node is said to be bad, and its memory is gone", self._lose, ranks=4)
        self._act("one replica is admitted", lambda _: self._run_operator_command("scale", "1"), ranks=2)
        self._act("and as many as the job allows", lambda _: self._run_operator_command("scale", "max"), ranks=4)
        self._finish(operator)

    def _lose(self, inside: list[dict[str, Any]]) -> None:
        node = inside[-1]["node"]
        kill_demo_node(self._memory / node)
        self._run_operator_command("fault", node)

    def _run_operator_command(self, *words: str) -> None:
        done = subprocess.run(  # noqa: S603 - ours
            [*_COMMAND, *words], env=self._environ, capture_output=True, text=True, check=False, timeout=self.limit_s
        )
        if done.returncode:
            raise DemoFailedError(f"hyperpod-operator-sim {' '.join(words)}: {done.stderr.strip()}")

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"operator-{len(self._started)}.log").open("wb") as out:
            process = subprocess.Popen(  # noqa: S603 - ours
                [*_COMMAND, *words], env=self._environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self._started.append(process)
        return process

    def close(self) -> None:
        """Stop all processes."""
        for process in self._started:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.limit_s)
                process.kill()
                process.wait()
        for node, agent in self._agents.items():
            agent.close()
            kill_demo_node(self._memory / node)
