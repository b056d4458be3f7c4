"""A machine too small for the arena's tmpfs or the durable tier's disk gets a clear error."""

import errno
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.agents import stop_agent
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.jobs import CheckpointJob, state_at
from tieredckpt import Checkpointer, SaveFailedError
from tieredckpt.checkpointer.checkpointer import SaveState
from tieredckpt.errors import SettingsError
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def mounted(tmp_path):
    """Return a function that mounts a tmpfs of a given size until its agent has ended."""
    places = []

    def mount(size):
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"mounting needs root and its capabilities: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    close_sessions()
    for place in places:
        stop_agent(place / "agent")
        subprocess.run(["umount", str(place)], check=True)


def fill(path):
    """Take all free space, even if another process takes some meanwhile."""
    size = 0
    with path.open("wb") as file:
        while blocks := (free := os.statvfs(path.parent)).f_bavail:
            try:
                os.posix_fallocate(file.fileno(), size, blocks * free.f_frsize)
            except OSError as error:
                if error.errno != errno.ENOSPC:  # otherwise another process took some blocks
                    raise
            else:
                size += blocks * free.f_frsize
    return path


def test_budget_above_the_tmpfs_size_is_reported(agent_dir, mounted, monkeypatch):
    place = mounted("16m")
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(place / "agent"))
    with Checkpointer("tiered://loop", on_sigterm="ignore") as ckpt:
        assert ckpt.save(state_at(0), 0).wait() is SaveState.SEALED
        large = ckpt.save({"w": torch.zeros(8 << 20)}, 1)
        assert isinstance(large.error, SaveFailedError)
        assert "Enlarge it" in str(large.error)
        assert str(place) in str(large.error)
        assert ckpt.restore(zeros_like_state(state_at(0))) == 0


def test_job_survives_a_tmpfs_filled_by_others(agent_dir, mounted, monkeypatch):
    place = mounted("16m")
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(place / "agent"))
    with Checkpointer("tiered://loop", on_sigterm="ignore") as ckpt:
        ckpt.save(state_at(0), 0).wait()
        other = fill(place / "other")
        for step in range(1, 5):
            saved = ckpt.save(state_at(step), step)
            assert saved.ok or "Enlarge it" in str(saved.error)
            ckpt.wait()
        newest = ckpt.restore(zeros_like_state(state_at(0)))
        found = zeros_like_state(state_at(0))
        assert ckpt.restore(found) == newest
        assert_same_bits(state_at(newest), found)
        other.unlink()
        assert ckpt.save(state_at(9), 9).wait() is SaveState.SEALED


def test_full_disk_keeps_durable_steps_and_recovers(agent_dir, mounted):
    disk = mounted("8m")
    durable = DurableSettings(url=f"file://{disk}/durable", retry_s=0.2)
    job = CheckpointJob(agent_dir, durable)
    job.save(0)
    other = fill(disk / "other")
    with job.checkpointer() as ckpt:
        for step in range(1, 4):
            assert ckpt.save(state_at(step), step).wait() is SaveState.SEALED
        assert not ckpt.wait("durable", timeout_s=1)
        problem = " ".join(view.error for view in ckpt.session.agent.drain_status(job.name))
        assert "No space left" in problem
        assert ckpt.restore(zeros_like_state(state_at(0))) == 3
        other.unlink()
        ckpt.session.agent.configure(job.name, durable)  # the configuration makes the agent retry at once
        assert ckpt.save(state_at(4), 4).wait("durable", timeout_s=60) is SaveState.DURABLE
    assert not list(Path(disk).rglob("*.staged"))
    job.lose_memory()
    job.assert_restores(4, tiers={"durable"})
    job.assert_restores(0, tiers={"durable"}, named=0)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("TIEREDCKPT_AGENT_BUDGET", "0", "agent.budget"),
        ("TIEREDCKPT_AGENT_DIRECTORY", "relative/place", "agent.directory"),
        ("TIEREDCKPT_AGENT_HTTP", "nowhere", "agent.http"),
        ("TIEREDCKPT_MEMRY_EVERY", "1", "TIEREDCKPT_MEMRY_EVERY"),
        ("TIEREDCKPT_DURABLE_URL", "bucket", "durable.url"),
    ],
)
def test_invalid_settings_are_refused_before_an_agent_starts(agent_dir, monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=said):
        Checkpointer("tiered://loop")
    assert not agent_dir.exists()
