"""What happens in the demo: a HyperPodPyTorchJob on three nodes by name, under real agents, and what is done to it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from elastic.control.node_agent import NodeAgent
from elastic.demo.story import DemoFailedError, Story
from integration.hyperpod.operator.sim_place import DIRECTORY, SimPlace
from tieredckpt.demo import lose_node

NODES = ("n0", "n1", "n2")
"""The job has two of them; the third one is there for when one is bad."""
_COMMAND = [sys.executable, "-m", "integration.hyperpod.operator"]


class HyperPodStory(Story):
    """The operator's processes and its agents', and the node agents, which nobody ends with a pod."""

    def __init__(self, folder: Path, memory: Path, environ: Mapping[str, str], told: Callable[[str], None]) -> None:
        super().__init__(folder, memory, environ, told)
        self._memory = memory
        self._environ = {**self._environ, DIRECTORY: str(folder / "sim"), "MEMORY": str(memory)}
        self._environ["EVENTS"] = str(self.lines_folder)
        self._environ["TIEREDCKPT_AGENT_PEERS"] = "127.0.0.1:0"
        resource = yaml.safe_load((Path(__file__).with_name("job.yaml")).read_text())
        self.place = SimPlace(resource["metadata"]["name"], folder / "sim")
        self._agents = {node: NodeAgent({**self._environ, **self._of(node)}) for node in NODES}

    def _of(self, node: str) -> dict[str, str]:
        return {"TIEREDCKPT_AGENT_DIRECTORY": str(self._memory / node), "TIEREDCKPT_AGENT_NODE": node}

    def play(self) -> None:
        for agent in self._agents.values():
            agent.start()
        job = Path(__file__).with_name("job.yaml")
        operator = self._start("run", str(job), "--spawn", str(len(NODES)), "--every", "0.2", "--lost-after", "60")
        self._act("two agents with two ranks each start", lambda _: None, ranks=4)
        self._act("a rank gets SIGKILL; its agent tells the operator", self._kill_rank, ranks=4)
        self._act("a node is said to be bad, and its memory is gone", self._lose, ranks=4)
        self._act("one replica is admitted", lambda _: self._say("scale", "1"), ranks=2)
        self._act("and as many as the job allows", lambda _: self._say("scale", "max"), ranks=4)
        self._finish(operator)

    def _lose(self, inside: list[dict[str, Any]]) -> None:
        node = inside[-1]["node"]
        lose_node(self._memory / node)
        self._say("fault", node)

    def _say(self, *words: str) -> None:
        done = subprocess.run(  # noqa: S603 - ours
            [*_COMMAND, *words], env=self._environ, capture_output=True, text=True, check=False, timeout=self.limit_s
        )
        if done.returncode:
            raise DemoFailedError(f"hyperpod-operator-sim {' '.join(words)}: {done.stderr.strip()}")

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"operator-{len(self._started)}.log").open("wb") as out:
            one = subprocess.Popen(  # noqa: S603 - ours
                [*_COMMAND, *words], env=self._environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self._started.append(one)
        return one

    def close(self) -> None:
        """Nothing of it runs on."""
        for one in self._started:
            if one.poll() is None:
                one.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.wait(self.limit_s)
                one.kill()
                one.wait()
        for node, agent in self._agents.items():
            agent.close()
            lose_node(self._memory / node)
