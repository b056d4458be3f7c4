"""The command line in this process, and a job with a few steps."""

import json
from dataclasses import dataclass

import pytest

from tests.support.bits import zeros_like_state
from tests.support.jobs import CheckpointJob, state_at
from tieredckpt.cli import main
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings


@dataclass(frozen=True)
class CommandOutput:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def cli(capsys):
    """Return a function that runs one command and returns its exit code and output."""

    def run(*arguments):
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return CommandOutput(code, *capsys.readouterr())

    return run


@pytest.fixture
def durable(tmp_path):
    return DurableSettings(url=f"file://{tmp_path}/durable")


@pytest.fixture
def job(agent_dir, durable):
    """Return a job with steps 1 to 3, all durable, the last two in memory too."""
    job = CheckpointJob(agent_dir, durable, "llama")
    job.save(1, 2, 3)
    return job


@pytest.fixture
def flip_byte_of():
    """Change one bit of a file."""

    def change(path, at=5000):
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))

    return change


@pytest.fixture
def shard_of(tmp_path):
    """The durable file of a job's only shard at a step."""

    def find(step):
        (path,) = (tmp_path / "durable" / "llama" / "steps" / f"{step:012d}").rglob("*.safetensors")
        return path

    return find


@pytest.fixture
def slot_of(agent_dir):
    """Return the file of a job's only shard at a step, in the agent's memory."""

    def find(step):
        notes = [n for n in (agent_dir / "notes").glob("seal.*") if b"version" + bytes([step]) in n.read_bytes()]
        assert len(notes) == 1
        return agent_dir / "slots" / notes[0].name.removeprefix("seal.")

    return find


@pytest.fixture
def branched_job(agent_dir, durable):
    """A first run saved steps 1 to 4, and a second one continued from step 2 and saved step 3.

    Steps 3 and 4 of the first run were left behind.
    """
    job = CheckpointJob(agent_dir, durable, "branched")
    job.save(1, 2, 3, 4, keep_last=9)
    close_sessions()
    with job.checkpointer(keep_last=9) as ckpt:
        assert ckpt.restore(zeros_like_state(state_at(2)), 2) == 2
        ckpt.save(state_at(3), 3).wait()
        assert ckpt.wait("durable", timeout_s=60)
    close_sessions()
    return job
