"""Runs of Ray Train after faults, and Ray's checkpoints of their steps."""

import signal
import subprocess
import sys

import pytest
import torch

pytest.importorskip("ray", reason="ray is not installed: pip install tieredckpt[ray]")

from ray.train import Checkpoint, CheckpointConfig

from integration.ray_train import load_checkpoint
from tests.support.ray_training import STEPS, digest, events, fit, make_state
from tests.support.stores import flip_byte, pinned_file
from tieredckpt import Checkpointer
from tieredckpt.errors import CheckpointNotFoundError

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning:ray"),
]


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    result = fit(folder, name="undisturbed")
    assert result.metrics["step"] == STEPS - 1
    return {kind: set(events(folder, "undisturbed", kind)) for kind in ("loss", "saved", "end")}


def assert_equals_undisturbed(folder, name, undisturbed):
    """Compare losses, saved states and final states, bit for bit."""
    for kind, whole in undisturbed.items():
        found = set(events(folder, name, kind))
        assert {one for one in found if kind != "end" or one[1] == STEPS} == whole


@pytest.mark.parametrize(
    ("number", "rank"),
    [
        pytest.param(signal.SIGKILL, 1, id="SIGKILL-1"),
        pytest.param(signal.SIGTERM, 1, id="SIGTERM-1"),
        pytest.param(signal.SIGKILL, 0, id="SIGKILL-0", marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, 0, id="SIGTERM-0", marks=pytest.mark.nightly),
    ],
)
def test_run_with_a_killed_worker_continues_bit_equal(cluster, undisturbed, tmp_path, number, rank):
    name = f"killed-{number.name}-{rank}"
    result = fit(tmp_path, name=name, max_failures=1, fault=[rank, 3], signal=int(number))
    assert sorted(step for _, step, _ in events(tmp_path, name, "first")) == [0, 0, 3, 3]
    assert_equals_undisturbed(tmp_path, name, undisturbed)
    assert result.metrics["step"] == STEPS - 1


def test_torn_step_is_not_restored(cluster, undisturbed, tmp_path):
    fit(tmp_path, name="torn", max_failures=1, fault=[1, 3], torn=True)
    assert sorted(step for _, step, _ in events(tmp_path, "torn", "first")) == [0, 0, 3, 3]
    assert_equals_undisturbed(tmp_path, "torn", undisturbed)


@pytest.mark.parametrize("size", [1, 3])
def test_another_number_of_workers_restores_the_same_bits(cluster, tmp_path, size):
    fit(tmp_path, name=f"resized-{size}", steps=3)
    (saved,) = {value for _, step, value in events(tmp_path, f"resized-{size}", "saved") if step == 2}
    fit(tmp_path, name=f"resized-{size}", workers=size, steps=5)
    first = events(tmp_path, f"resized-{size}", "first")[2:]
    assert sorted(first) == [(rank, 3, saved) for rank in range(size)]
    ended = events(tmp_path, f"resized-{size}", "end")[2:]
    assert len(ended) == size
    assert len({value for *_, value in ended}) == 1


def test_damaged_step_is_skipped_for_an_older_one(cluster, undisturbed, tmp_path):
    fit(tmp_path, name="damaged", steps=4)
    with Checkpointer("damaged") as ckpt:
        store = ckpt.session.agent.store
        for shard in store.list_shards("damaged"):
            if shard.key.version == 3:
                pin = store.pin(shard.key)
                flip_byte(pinned_file(pin), pin.record.size_bytes // 2)
                store.unpin(pin.id)
    fit(tmp_path, name="damaged")
    assert sorted(step for _, step, _ in events(tmp_path, "damaged", "first")) == [0, 0, 3, 3]
    assert_equals_undisturbed(tmp_path, "damaged", undisturbed)


def test_rays_retention_and_best_checkpoint_apply_to_steps(cluster, tmp_path):
    best = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="score")
    result = fit(tmp_path, name="best", keep=best, steps=8, scores={"1": 2.0, "3": 1.0})
    saved = {step: value for _, step, value in events(tmp_path, "best", "saved")}
    stored = {metrics["step"]: checkpoint for checkpoint, metrics in result.best_checkpoints}
    assert {1, 3} <= set(stored) <= {1, 3, 7}
    stored[7] = result.checkpoint
    for step, checkpoint in stored.items():
        state = make_state()
        assert load_checkpoint(checkpoint, state) == step
        assert digest(state) == saved[step]
    assert {one.name for one in (tmp_path / "storage" / "best" / stored[1].path.rpartition("/")[2]).iterdir()} == {
        "tieredckpt.json"
    }
    with Checkpointer("best") as ckpt:
        steps = {one.step for one in ckpt.steps()}
    assert {1, 3, 7} <= steps
    assert not {0, 2, 4} & steps  # Ray deleted these, and report() released them


def test_deleted_checkpoint_is_named(cluster, tmp_path):
    result = fit(tmp_path, name="deleted", steps=2)
    directory = tmp_path / "storage" / "deleted" / result.checkpoint.path.rpartition("/")[2]
    (directory / "tieredckpt.json").unlink()
    directory.rmdir()
    with pytest.raises(CheckpointNotFoundError, match="Ray has deleted it"):
        load_checkpoint(result.checkpoint, make_state())


def test_exported_step_is_a_checkpoint_of_ray_without_us(cluster, tmp_path):
    result = fit(tmp_path, name="exported", steps=3)
    state = make_state()
    load_checkpoint(result.checkpoint, state)
    (tmp_path / "plain").mkdir()
    file = tmp_path / "plain" / "state.pt"
    command = [sys.executable, "-m", "tieredckpt", "export", "exported/step-2", str(file), "--format", "torch"]
    subprocess.run(command, check=True, timeout=120)
    with Checkpoint.from_directory(tmp_path / "plain").as_directory() as directory:
        loaded = torch.load(f"{directory}/state.pt", weights_only=True)
    assert set(loaded["model"]) == set(state["model"].state_dict())
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), loaded["model"][name].view(torch.uint8))
