"""An agent is replaced by one of another release while it holds steps, and by the older one again.

No release is published yet: what stands for one is a revision of this repository, where its history is at hand.
"""

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support.agents import agent_directory, agent_pid, end_agent

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(600)]

HERE = Path(__file__).parents[3]
UNVERSIONED = "89fef85"
"""Its notes name no format, and it deletes what it does not know: there is a way from it, and none back."""
VERSIONED = ("8d9f525", "2b70cbf")
"""The first whose notes do, and one whose slots are descriptors."""
JOB = """
import sys
import torch
from tieredckpt import Checkpointer

def state(step):
    generator = torch.Generator().manual_seed(step)
    w = torch.randn(300_000, generator=generator)
    return {"w": w, "b": {"half": torch.randn(33, generator=generator).bfloat16()}}

what, step = sys.argv[1], int(sys.argv[2])
with Checkpointer("tiered://upgraded", on_sigterm="ignore") as ckpt:
    if what == "save":
        ckpt.save(state(step), step).wait()
    else:
        found = {"w": torch.zeros(300_000), "b": {"half": torch.zeros(33).bfloat16()}}
        assert ckpt.restore(found) == step
        wanted = state(step)
        assert found["w"].view(torch.int32).equal(wanted["w"].view(torch.int32))
        assert found["b"]["half"].view(torch.int16).equal(wanted["b"]["half"].view(torch.int16))
"""
LOOK = """
import os, sys
from pathlib import Path
from peerstore.server.store_client import Client, connect_to_agent
status = Client(lambda: connect_to_agent(Path(sys.argv[1]))).status()
print(len(status.damages), len(status.aside))
"""


class Node:
    """Its agents are killed and come back as whatever release starts a process there next."""

    def __init__(self, directory):
        self.directory = directory

    def run(self, release, script, *args):
        environ = {
            **os.environ,
            "PYTHONPATH": str(release),
            "TIEREDCKPT_AGENT_DIRECTORY": str(self.directory),
            "TIEREDCKPT_AGENT_BUDGET": "1GiB",
            "TIEREDCKPT_AGENT_EMBEDDED": "true",
        }
        command = [sys.executable, "-c", script, *map(str, args)]
        ended = subprocess.run(command, env=environ, cwd=release, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-4000:]
        pid = agent_pid(self.directory)
        assert pid is not None
        assert self.release_of(pid) == str(release), "another release's agent answered"
        return ended.stdout

    @staticmethod
    def release_of(pid):
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        path = next(one for one in environ if one.startswith(b"PYTHONPATH=")).decode().partition("=")[2]
        return path.partition(os.pathsep)[0]

    def save(self, release, step):
        self.run(release, JOB, "save", step)

    def restore(self, release, step):
        self.run(release, JOB, "restore", step)

    def told(self, release):
        """How many damages there were, and how many slots are set aside."""
        damages, aside = self.run(release, LOOK, self.directory / "agent.sock").split()
        return int(damages), int(aside)

    def kill(self):
        end_agent(self.directory, signal.SIGKILL)


@pytest.fixture
def node():
    with agent_directory() as directory:
        yield Node(directory)


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    def checked_out(revision):
        folder = tmp_path_factory.mktemp(f"at-{revision}")
        if shutil.which("git") is None:
            pytest.skip("there is no git to look into the history with")
        found = subprocess.run(["git", "-C", str(HERE), "archive", revision], capture_output=True, check=False)
        if found.returncode:
            pytest.skip(f"revision {revision} is not in this checkout's history")
        with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
            archive.extractall(folder, filter="data")
        return folder

    return checked_out


@pytest.mark.parametrize("revision", [UNVERSIONED, *VERSIONED])
def test_an_upgraded_agent_has_the_steps_of_the_one_before_it(node, release, revision):
    old = release(revision)
    node.save(old, 1)
    node.save(old, 2)
    node.kill()
    node.restore(HERE, 2)
    assert node.told(HERE) == (0, 0)
    node.save(HERE, 3)
    node.kill()
    node.restore(HERE, 3)


@pytest.mark.parametrize("revision", VERSIONED)
def test_an_agent_that_is_rolled_back_deletes_nothing_and_the_next_upgrade_finds_it(node, release, revision):
    old = release(revision)
    node.save(old, 1)
    node.kill()
    node.restore(HERE, 1)
    node.save(HERE, 2)
    node.kill()
    node.restore(old, 2)
    assert node.told(old) == (0, 0)
    node.save(old, 3)
    node.kill()
    node.restore(HERE, 3)
    assert node.told(HERE) == (0, 0)
