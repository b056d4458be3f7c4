"""P10: start time of a node agent, and its memory while idle."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.parameters import Scene
from benchmarks.proc import private_bytes, resident_bytes
from benchmarks.sandbox import agent_pid, end_agent, settings_for
from tieredckpt.agent.agent_client import NodeAgentClient

START, IDLE, PYTHON = "agent: start to first response", "agent: resident memory, idle", "python -c pass"


def run(rank: int, scene: Scene) -> list[dict[str, Any]]:
    settings = settings_for(scene)
    place = settings.agent_directory
    bare: list[float] = []
    started: list[float] = []
    resident: list[float] = []
    private: list[float] = []
    torch_mapped = False
    for _ in range(scene.rounds):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        bare.append(time.perf_counter() - began)
        began = time.perf_counter()
        node = NodeAgentClient(settings, "bench")
        node.store.status()
        started.append(time.perf_counter() - began)
        pid = agent_pid(place)
        resident.append(resident_bytes(pid))
        private.append(private_bytes(pid))
        torch_mapped = torch_mapped or "torch" in Path(f"/proc/{pid}/maps").read_text()
        node.close()
        end_agent(place)
    note = "torch is mapped" if torch_mapped else "torch is not mapped"
    return [
        _row(PYTHON, "limit", "s", bare, "an interpreter that does nothing"),
        _row(START, "ours", "s", started, note),
        _row(IDLE, "ours", "B", resident, "RssAnon + RssFile, without the arena"),
        _row("agent: private memory, idle", "ours", "B", private, "RssAnon"),
    ]


def _row(name: str, kind: str, unit: str, samples: list[float], note: str) -> dict[str, Any]:
    return {
        "name": name, "kind": kind, "unit": unit, "first": samples[0], "samples": samples, "equal": None,
        "compared": False, "note": note,
    }  # fmt: skip
