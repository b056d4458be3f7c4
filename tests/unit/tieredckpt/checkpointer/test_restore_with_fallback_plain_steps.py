"""A restore falls back past damaged plain checkpoints, newest first, and reads each once."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.jobs import state_at
from tieredckpt import CheckpointDamagedError, Checkpointer, TieredReader
from tieredckpt.dcp import plain_checkpoints
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", f"file://{tmp_path}/bucket")
    return tmp_path / "bucket" / "job"


@pytest.fixture
def reads(monkeypatch):
    """The plain steps whose metadata was read."""
    found = []
    load = plain_checkpoints.load_dcp_metadata

    def noted(file):
        found.append(int(file.name.split("step-")[1].split("/")[0]))
        return load(file)

    monkeypatch.setattr(plain_checkpoints, "load_dcp_metadata", noted)
    return found


def save_ours(*steps):
    with memory_node(), Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
        for step in steps:
            assert ckpt.save(state_at(step), step).wait("durable")


def save_plain(bucket, *steps):
    for step in steps:
        dcp.save(state_at(step), checkpoint_id=str(bucket / f"step-{step}"), no_dist=True)


def damage_metadata(bucket, *steps):
    for step in steps:
        (bucket / f"step-{step}").mkdir(parents=True, exist_ok=True)
        (bucket / f"step-{step}" / ".metadata").write_bytes(pickle.dumps({"no": "metadata"}))


def damage_data(bucket, step):
    for file in (bucket / f"step-{step}").glob("*.distcp"):
        file.write_bytes(b"\0" * file.stat().st_size)


def damage_ours(bucket, step, pattern):
    for file in bucket.glob(pattern.format(f"{step:012d}")):
        file.write_bytes(b"\0" * file.stat().st_size)


MANIFEST, SHARDS = "manifests/{}*.manifest", "steps/{}/**/*.safetensors"


def restored(step, named=None):
    with memory_node(), Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
        found = zeros_like_state(state_at(max(step, 0)))
        assert ckpt.restore(found, named) == step
        assert_same_bits(state_at(step), found)
        return ckpt.last_restore


def test_restore_falls_back_past_damaged_plain_steps_to_ours(bucket, reads):
    save_ours(5)
    damage_metadata(bucket, *range(990, 1000))
    report = restored(5)
    assert reads == [*reversed(range(990, 1000))]
    assert "step 999" in report.refused[0]


def test_restore_falls_back_through_ours_and_plain_steps_newest_first(bucket, reads):
    save_ours(2, 8)
    save_plain(bucket, 4, 6)
    damage_metadata(bucket, 9)
    damage_ours(bucket, 8, MANIFEST)
    damage_metadata(bucket, 6)
    restored(4)
    assert reads == [9, 6, 4]
    damage_data(bucket, 4)
    restored(2)


def test_restore_takes_a_plain_step_before_an_older_one_of_ours(bucket, reads):
    save_ours(2, 8)
    save_plain(bucket, 4)
    damage_ours(bucket, 8, SHARDS)
    restored(4)
    assert reads == [4]


def test_reason_of_a_fallback_is_logged_once(bucket, caplog):
    save_ours(2, 8)
    damage_ours(bucket, 8, SHARDS)
    restored(2)
    found = [one for one in caplog.records if one.levelname == "ERROR" and "agent" not in one.name]
    errors = [record.getMessage() for record in found]
    assert sum("are not what was saved" in text for text in errors) == 1
    assert errors[-1] == "restore of job: trying the next older step"


@pytest.mark.parametrize("harm", ["zeros", "gone", "short"])
def test_restore_falls_back_past_damaged_plain_data(bucket, harm):
    save_ours(5)
    save_plain(bucket, 7)
    for file in (bucket / "step-7").glob("*.distcp"):
        if harm == "gone":
            file.unlink()
        else:
            file.write_bytes(b"\0" * file.stat().st_size if harm == "zeros" else b"")
    restored(5)


def test_restore_names_every_step_when_all_are_damaged(bucket, reads):
    damage_metadata(bucket, 7, 9)
    with memory_node(), Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
        with pytest.raises(CheckpointDamagedError, match=r"(?s)step 9.*step 7"):
            ckpt.restore({"w": torch.zeros(3)})
        assert reads == [9, 7]
        assert ckpt.restore({"w": torch.zeros(3)}, on_lost="start_fresh") == -1


def test_restore_of_a_named_step_does_not_fall_back(bucket, reads):
    save_ours(5)
    damage_metadata(bucket, 9)
    with (
        memory_node(),
        Checkpointer("tiered://job", on_sigterm="ignore") as ckpt,
        pytest.raises(CheckpointDamagedError, match="step-9"),
    ):
        ckpt.restore(zeros_like_state(state_at(5)), 9)
    assert reads == [9]


def test_reader_falls_back_past_damaged_plain_metadata(bucket, reads):
    save_ours(5)
    damage_metadata(bucket, 7, 9)
    with memory_node():
        found = zeros_like_state(state_at(5))
        dcp.load(found, storage_reader=TieredReader("tiered://job"), no_dist=True)
    assert_same_bits(state_at(5), found)
    assert reads == [9, 7]


def test_restore_while_switched_off_falls_back_to_older_plain_steps(bucket, reads, monkeypatch):
    save_plain(bucket, 4)
    damage_metadata(bucket, 7, 9)
    monkeypatch.setenv("TIEREDCKPT_ENABLED", "0")
    with Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
        found = zeros_like_state(state_at(4))
        assert ckpt.restore(found) == 4
    assert_same_bits(state_at(4), found)
    assert reads == [9, 7, 4]
