"""``save_directory`` and ``restore_directory`` with real agents and ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.agents import stop_agent
from tests.support.jobs import CheckpointJob, durable_settings
from tieredckpt import Checkpointer, CheckpointNotFoundError, MismatchError, UsageError
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def write(path, files):
    for name, data in files.items():
        place = Path(path) / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def tree(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}


FILES = {"model.safetensors": os.urandom(3 << 20), "sub/config.json": b"{}", "empty": b""}


def test_directory_comes_back_from_memory(agent_dir, tmp_path):
    write(tmp_path / "out", FILES)
    with Checkpointer("tiered://folder", every=10) as ckpt:
        assert ckpt.restore_directory(tmp_path / "none") == -1
        assert not (tmp_path / "none").exists()
        ckpt.save_directory(tmp_path / "out", 3).wait()
        write(tmp_path / "out", {"empty": b"changed"})
    close_sessions()
    with Checkpointer("tiered://folder") as ckpt:
        assert ckpt.restore_directory(tmp_path / "back") == 3
        assert tree(tmp_path / "back") == FILES
        assert ckpt.last_restore.bytes_by_tier.keys() == {"memory"}
        with pytest.raises(CheckpointNotFoundError):
            ckpt.restore_directory(tmp_path / "other", 2)
        with pytest.raises(UsageError, match="overwrite=True"):
            ckpt.restore_directory(tmp_path / "back")


def test_step_without_a_directory_raises_mismatch_error(agent_dir, tmp_path):
    with Checkpointer("tiered://folder") as ckpt:
        ckpt.save({"w": torch.ones(3)}, 1).wait()
        with pytest.raises(MismatchError, match="restore it with restore"):
            ckpt.restore_directory(tmp_path / "back")


def test_directory_comes_back_from_the_durable_tier(agent_dir, rclone, tmp_path):
    write(tmp_path / "out", FILES)
    job = CheckpointJob(agent_dir, durable_settings(rclone))
    with job.checkpointer() as ckpt:
        ckpt.save_directory(tmp_path / "out", 3).wait("durable")
    job.lose_memory()
    with job.checkpointer() as ckpt:
        assert ckpt.restore_directory(tmp_path / "back") == 3
        assert ckpt.last_restore.bytes_by_tier.keys() == {"durable"}
    assert tree(tmp_path / "back") == FILES


def test_damaged_step_is_skipped_for_an_older_directory(agent_dir, tmp_path):
    job = CheckpointJob(agent_dir, DurableSettings())
    for step in (1, 2):
        write(tmp_path / f"out{step}", {"a": os.urandom(1 << 20), f"only-{step}": b""})
    with job.checkpointer() as ckpt:
        for step in (1, 2):
            ckpt.save_directory(tmp_path / f"out{step}", step).wait()
    close_sessions()
    stop_agent(agent_dir, signal.SIGKILL)
    newest = max((agent_dir / "notes").glob("seal.slot.*"), key=lambda note: note.stat().st_mtime_ns)
    with (agent_dir / "slots" / newest.name.removeprefix("seal.")).open("r+b") as file:
        file.seek(1 << 18)
        byte = file.read(1)
        file.seek(1 << 18)
        file.write(bytes([byte[0] ^ 1]))
    with job.checkpointer() as ckpt:
        assert ckpt.restore_directory(tmp_path / "back") == 1
    assert tree(tmp_path / "back") == tree(tmp_path / "out1")


def test_plain_checkpoints_hold_directories_too(tmp_path, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_ENABLED", "false")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", str(tmp_path / "store"))
    write(tmp_path / "out", FILES)
    with Checkpointer("tiered://folder") as ckpt:
        ckpt.save_directory(tmp_path / "out", 3)
    with Checkpointer("tiered://folder") as ckpt:
        assert ckpt.restore_directory(tmp_path / "back") == 3
    assert tree(tmp_path / "back") == FILES


def save_own(root):
    """Save a directory per rank with one common file; the first two ranks share theirs."""
    rank = dist.get_rank()
    path = root / f"out{max(rank, 1)}"
    write(path, {f"rank{rank}.bin": bytes([rank]) * 1000})
    if rank != 1:
        write(path, {"config.json": b"{}"})
    with Checkpointer("tiered://ranks") as ckpt:
        ckpt.save_directory(path, 4).wait()


def restore_own(root):
    path = root / f"back{max(dist.get_rank(), 1)}"
    with Checkpointer("tiered://ranks") as ckpt:
        step = ckpt.restore_directory(path)
        return step, ckpt.last_restore.bytes_by_tier, tree(path)


def test_ranks_save_their_directories_as_one_step(agent_dir, ranks, tmp_path):
    ranks.run(3, save_own, tmp_path)
    expected = {f"rank{rank}.bin": bytes([rank]) * 1000 for rank in range(3)} | {"config.json": b"{}"}
    for size in (3, 2):
        for step, _, found in ranks.run(size, restore_own, tmp_path / str(size)):
            assert (step, found) == (4, expected)


def save_different(root):
    path = root / f"out{dist.get_rank()}"
    write(path, {"a": bytes([dist.get_rank()])})
    with Checkpointer("tiered://ranks") as ckpt, pytest.raises(UsageError, match="differs between rank 0 and rank 1"):
        ckpt.save_directory(path, 4)


def save_without_one(root):
    write(root / "out0", {"a": b""})
    dist.barrier()
    with Checkpointer("tiered://ranks") as ckpt, pytest.raises(UsageError, match="out1 is not a directory"):
        ckpt.save_directory(root / f"out{dist.get_rank()}", 4)


@pytest.mark.parametrize("save", [save_different, save_without_one])
def test_all_ranks_raise_for_the_directory_of_one(agent_dir, ranks, tmp_path, save):
    ranks.run(2, save, tmp_path)


def restore_where_one_is_used(root):
    path = root / f"rank{dist.get_rank()}" / "back"
    if dist.get_rank() == 1:
        write(path, {"mine": b""})
    with Checkpointer("tiered://ranks") as ckpt, pytest.raises(UsageError, match="not empty"):
        ckpt.restore_directory(path)
    dist.barrier()
    return [file.name for file in path.parent.iterdir()]


def test_refused_restore_of_one_rank_leaves_nothing_on_the_others(agent_dir, ranks, tmp_path):
    assert ranks.run(2, restore_where_one_is_used, tmp_path) == [[], ["back"]]
