"""Jobs of ``elastic map`` in real processes, with functions that tests can hold and observe."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.batch_inference.work_directory import WorkDirectory
from tests.support.local_nodes import wait_until

FUNCTIONS = '''
import json, os, sys, time
from pathlib import Path

FOLDER = Path(os.environ["MAP_TEST_FOLDER"])

def log(value):
    with open(FOLDER / "calls", "a") as file:  # one small append: whole lines, from all processes
        file.write(json.dumps([os.getpid(), value]) + "\\n")

def square(value):
    log(value["id"])
    return {"id": value["id"], "square": value["id"] ** 2}

def hold(value):
    """Wait as long as the file `hold`, or that of the input, exists. The result has the process."""
    log(value["id"])
    while (FOLDER / "hold").exists() or (FOLDER / f"hold-{value['id']}").exists():
        time.sleep(0.01)
    return {"id": value["id"], "pid": os.getpid()}

def slow(value):
    time.sleep(0.01)
    return square(value)

def odd_fails(value):
    log(value["id"])
    if value["id"] % 2:
        raise ValueError(f"{value['id']} is odd")
    print("a line of the function")
    return value

def kills(values):
    for value in values:
        log(value["id"])
        if value["id"] == 5:
            os._exit(9)
    return values

def hangs(value):
    log(value["id"])
    while value["id"] == 5:
        time.sleep(0.01)
    return value

class Model:
    def __init__(self, scale):
        log("loaded")
        self.scale = scale
    def __call__(self, values):
        return [value["id"] * self.scale for value in values]

class Broken:
    def __init__(self):
        raise RuntimeError("no weights")

class Exits:
    def __init__(self):
        os._exit(1)
'''


class MapJob:
    """One job in a folder, and the processes of its nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.input, self.output = folder / "input.jsonl", folder / "output.jsonl"
        self.work = folder / "output.jsonl.work"
        self.nodes: list[subprocess.Popen[str]] = []
        (folder / "functions.py").write_text(FUNCTIONS)

    def write_input(self, count: int) -> None:
        self.input.write_text("".join(json.dumps({"id": number}) + "\n" for number in range(count)))

    def start(self, function: str, *options: str) -> subprocess.Popen[str]:
        """Start a node of the job."""
        words = [f"{self.folder / 'functions.py'}:{function}", self.input, self.output, *options]
        node = subprocess.Popen(
            [sys.executable, "-m", "elastic", "map", *map(str, words)],
            env={**os.environ, "MAP_TEST_FOLDER": str(self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.nodes.append(node)
        return node

    def run(self, function: str, *options: str) -> tuple[int, str, str]:
        """Run a node, and return its exit status and its output."""
        node = self.start(function, *options)
        out, err = node.communicate(timeout=200)
        return node.returncode, out, err

    def results(self) -> list:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def calls(self) -> list[list]:
        file = self.folder / "calls"
        # A process that is killed may have written a part of its last line.
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def wait_calls(self, count: int) -> list[list]:
        wait_until(lambda: len(self.calls()) >= count, f"{count} calls")
        return self.calls()

    def workers(self, node: subprocess.Popen[str]) -> list[int]:
        """Return the worker processes of a node."""
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return [int(pid) for pid in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()]
        return []

    def holds_chunk(self, pid: int, chunk: int) -> bool:
        """Return whether a lease of the chunk is held by this process."""
        work = WorkDirectory(self.work)
        records = [work.read_claim(chunk, number) for number in range(work.claims()[chunk] + 1)]
        return any(record.is_held and record.owner and record.owner.pid == pid for record in records)

    def close(self) -> None:
        for node in self.nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
            node.communicate()


@pytest.fixture
def map_job(tmp_path: Path) -> Iterator[MapJob]:
    job = MapJob(tmp_path)
    try:
        yield job
    finally:
        job.close()
