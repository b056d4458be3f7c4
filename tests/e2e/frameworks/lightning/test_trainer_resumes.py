"""Lightning's Trainer in one process restores the saved bits after kills, damage, pruning and export."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="PyTorch Lightning is not installed (pip install tieredckpt[lightning])")
pytest.importorskip("torchdata", reason="torchdata is not installed: its loader resumes within an epoch")

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from integration.lightning import TieredCheckpointIO, export_lightning_checkpoint
from integration.lightning.trainer_steps import CheckpointParts, read_reference
from tests.support.bits import assert_same_bits, tensor_bytes
from tests.support.crashes import crash_environ
from tests.support.lightning_training import BATCHES, URL, TinyModule, fit
from tests.support.stores import flip_byte
from tieredckpt import Checkpointer, UsageError, load

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]
STEPS = 2 * BATCHES
EXAMPLE = Path(__file__).parents[4] / "examples/lightning_trainer.py"


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(step):
    return {step: kill}


def losses_by_step(lines):
    return {int(line.split()[1]): line.split()[2] for line in lines if line.startswith("loss")}


def assert_resumed(first, second, undisturbed, *, at):
    reference = losses_by_step(undisturbed.lines)
    assert len(reference) == STEPS
    assert losses_by_step(first.lines).items() <= reference.items()
    resumed = losses_by_step(second.lines)
    assert resumed == {step: reference[step] for step in range(min(resumed), STEPS + 1)}
    assert min(resumed) - 1 in at
    assert second.result == undisturbed.result


@pytest.mark.parametrize(
    "step", [BATCHES - 1, *(pytest.param(step, marks=pytest.mark.nightly) for step in (4, BATCHES, BATCHES + 3))]
)
def test_killed_trainer_resumes_bit_equal(agent_dir, lightning_zygote, undisturbed_run, tmp_path, step):
    first = lightning_zygote.run(partial(fit, at=partial(kill_at, step)), tmp_path)
    assert first.status == -signal.SIGKILL
    second = lightning_zygote.run(fit, tmp_path)
    assert_resumed(first, second, undisturbed_run, at=(step - 1, step))  # the seal may be late


@pytest.mark.parametrize(
    ("point", "unsealed"), [pytest.param("stage.half", 1, marks=pytest.mark.nightly), ("seal.written", 2)]
)
def test_torn_save_resumes_from_the_step_before(
    agent_dir, lightning_zygote, undisturbed_run, tmp_path, point, unsealed
):
    first = lightning_zygote.run(fit, tmp_path, environ=crash_environ(f"{point}:4"))
    assert first.status == -signal.SIGKILL
    second = lightning_zygote.run(fit, tmp_path)
    said = len(first.lines)  # a line per save, whose seal follows in the background
    assert_resumed(first, second, undisturbed_run, at=range(said - unsealed, said + 1))
    assert said > 1


def steps_in_memory():
    with Checkpointer(URL, on_sigterm="ignore") as checkpointer:
        return {info.step: info.quarantined for info in checkpointer.steps()}


def test_damaged_step_is_passed_over(agent_dir, lightning_zygote, undisturbed_run, tmp_path):
    first = lightning_zygote.run(partial(fit, epochs=1), tmp_path)
    newest = max(steps_in_memory())
    assert newest == BATCHES
    weight = tensor_bytes(load(URL)["checkpoint"]["tensors"]["state_dict.net.0.weight"])
    (slot,) = [path for path in (agent_dir / "slots").iterdir() if weight in path.read_bytes()]
    flip_byte(slot, slot.read_bytes().index(weight) + 5)
    second = lightning_zygote.run(fit, tmp_path)
    assert_resumed(first, second, undisturbed_run, at=(newest - 1,))


def best_two_and_last(folder):
    return [ModelCheckpoint(folder, monitor="val", save_top_k=2, save_last=True)]


def checkpoint_paths(trainer):
    one = trainer.checkpoint_callback
    return one.best_model_path, sorted(one.best_k_models), one.last_model_path


def test_model_checkpoint_keeps_its_best_steps_and_drops_the_others(agent_dir, lightning_zygote, tmp_path):
    how = {
        "every": None, "validates": True, "callbacks": partial(best_two_and_last, tmp_path),
        "inspect": checkpoint_paths,
    }  # fmt: skip
    for epochs, ckpt_path in ((4, URL), (6, "last")):
        ended = lightning_zygote.run(partial(fit, epochs=epochs, ckpt_path=ckpt_path, **how), tmp_path)
        best, two, last = ended.result
        assert len(losses_by_step(ended.lines)) == (4 if epochs == 4 else 2) * BATCHES
        assert best in two
        assert sorted(str(path) for path in tmp_path.glob("*.ckpt")) == sorted([*two, last])
        steps = {read_reference(path).step for path in (*two, last)}
        assert read_reference(last).step == epochs * BATCHES
        assert set(steps_in_memory()) == steps
        for path in (*two, last):
            export_lightning_checkpoint(path, tmp_path / "exported")
            saved = torch.load(tmp_path / "exported", weights_only=True)
            assert saved["global_step"] == read_reference(path).step
            assert len(saved["optimizer_states"]) == 1


def weights_and_last(folder):
    often = {"every_n_train_steps": 4, "save_top_k": -1, "monitor": None}
    return [ModelCheckpoint(folder / "weights", save_weights_only=True, **often), ModelCheckpoint(folder / "all")]


def test_weights_only_step_has_no_optimizer(agent_dir, lightning_zygote, tmp_path):
    how = {"callbacks": partial(weights_and_last, tmp_path), "epochs": 1}
    lightning_zygote.run(partial(fit, every=None, **how), tmp_path)
    (weights,), (complete,) = (list((tmp_path / name).glob("*.ckpt")) for name in ("weights", "all"))
    plugin = TieredCheckpointIO(URL)
    for path, is_full in ((weights, False), (complete, True)):
        assert ("optimizer_states" in plugin.load_checkpoint(path)) == is_full
    plugin.teardown()


def test_weights_replace_no_complete_checkpoint_of_their_step(agent_dir, lightning_zygote, tmp_path):
    """The callback saves a complete step 4 before ModelCheckpoint saves its weights."""
    lightning_zygote.run(partial(fit, epochs=1, callbacks=partial(weights_and_last, tmp_path)), tmp_path)
    (weights,) = (tmp_path / "weights").glob("*.ckpt")
    plugin = TieredCheckpointIO(URL)
    saved = plugin.load_checkpoint(weights)
    plugin.teardown()
    assert saved["global_step"] == 4
    assert len(saved["optimizer_states"]) == 1


def test_exported_file_continues_without_this_project(agent_dir, lightning_zygote, tmp_path):
    lightning_zygote.run(partial(fit, epochs=1), tmp_path)
    path = tmp_path / "exported.ckpt"
    export_lightning_checkpoint(URL, path)
    module = TinyModule.load_from_checkpoint(path)
    assert_same_bits(dict(module.state_dict()), dict(torch.load(path, weights_only=True)["state_dict"]))
    ours = lightning_zygote.run(partial(fit, every=None), tmp_path)
    theirs = lightning_zygote.run(partial(fit, strategy="lightning", every=None, ckpt_path=str(path)), tmp_path)
    assert len(theirs.lines) == BATCHES
    assert (ours.result, ours.lines) == (theirs.result, theirs.lines)


def test_example_resumes(agent_dir):
    for before, after in ((0, 60), (60, 120)):
        command = [sys.executable, "-W", "ignore", EXAMPLE, str(after)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode == 0, ended.stderr
        assert f"starting after step {before}\ntrained to step {after}: loss" in ended.stdout


def test_file_of_lightning_itself_starts_a_job(agent_dir, tmp_path):
    path = tmp_path / "plain.ckpt"
    torch.save({"global_step": 3, "state_dict": {"w": torch.ones(2)}}, path)
    assert TieredCheckpointIO(URL).load_checkpoint(path)["global_step"] == 3


def test_new_training_does_not_continue_an_old_job_unasked(agent_dir, lightning_zygote, tmp_path):
    lightning_zygote.run(partial(fit, epochs=1), tmp_path)
    with pytest.raises(AssertionError, match="behind step 6 of an earlier run"):
        lightning_zygote.run(partial(fit, epochs=1, ckpt_path=None), tmp_path)


def test_parts_of_a_checkpoint_join_to_the_same_checkpoint():
    versioned = TinyModule().state_dict()
    checkpoint = {"state_dict": versioned, "optimizer_states": [{"state": {0: {"m": torch.ones(2)}}}], "empty": {}}
    parts = CheckpointParts()
    parts.load_state_dict(CheckpointParts(checkpoint).state_dict())
    joined = parts.joined()
    assert_same_bits(joined, checkpoint)
    assert joined["state_dict"]._metadata == versioned._metadata
    with pytest.raises(UsageError, match=r"the name 'a\.b'"):
        CheckpointParts({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})
