"""The Transformers ``Trainer`` with tiers, killed and restarted, continues bit for bit."""

import signal
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install tieredckpt[transformers]")


from tests.support.agents import agent_directory
from tests.support.local_nodes import wait_until
from tests.support.stores import flip_byte, pinned_file
from tests.support.transformers_training import (
    KILL,
    STEPS,
    TERM,
    URL,
    describe_export,
    lora_trainer,
    newest_folder,
    run_example,
    train,
    values_by_step,
)
from tieredckpt import Checkpointer, TieredReader

pytestmark = pytest.mark.e2e
EPOCHS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "logging_steps": 3,
    "eval_strategy": "epoch",
}
"""Four steps per epoch, with log entries that span saves and the end of an epoch."""


@pytest.fixture(scope="module")
def in_fresh_tiers(zygote, tmp_path_factory):
    """Run a training once per set of options, with a separate agent, for all tests to compare with."""
    done = {}

    def run(*options):
        if repr(options) not in done:
            with agent_directory() as directory:
                environ = {"TIEREDCKPT_AGENT_DIRECTORY": str(directory), "TIEREDCKPT_AGENT_BUDGET": "1GiB"}
                folder = str(tmp_path_factory.mktemp("undisturbed"))
                done[repr(options)] = zygote.run(train, folder, None, *options, environ=environ)
        return done[repr(options)]

    return run


@pytest.mark.parametrize(
    ("arguments", "killed"),
    [(EPOCHS, 5), *(pytest.param(*each, marks=pytest.mark.nightly) for each in (({}, 6), (EPOCHS, 6)))],
)
def test_killed_trainer_continues_bit_equal(agent_dir, zygote, tmp_path, in_fresh_tiers, arguments, killed):
    undisturbed = in_fresh_tiers(arguments)
    first = zygote.run(train, str(tmp_path), {0: {f"step {killed}": KILL}}, arguments)
    assert first.status == -signal.SIGKILL
    second = zygote.run(train, str(tmp_path), None, arguments)
    assert second.result == undisturbed.result
    for kind in ("loss", "eval", "samples"):
        expected = values_by_step(undisturbed.lines, kind)
        assert values_by_step(first.lines, kind).items() <= expected.items()
        assert values_by_step(second.lines, kind) == {at: one for at, one in expected.items() if at >= killed}
    assert expected, "no samples were recorded"


def test_finished_run_trains_no_step(agent_dir, zygote, tmp_path):
    finished = zygote.run(train, str(tmp_path), None, {"max_steps": 4}, {"every": 3})
    again = zygote.run(train, str(tmp_path), None, {"max_steps": 4}, {"every": 3})
    assert again.result == finished.result
    assert again.result["step"] == 4
    assert not values_by_step(again.lines)


def test_trainer_refuses_another_global_batch(agent_dir, zygote, tmp_path):
    zygote.run(train, str(tmp_path), None, {"max_steps": 2})
    with pytest.raises(AssertionError, match="saved with 4 samples in a step and this run has 2"):
        zygote.run(train, str(tmp_path), None, {"per_device_train_batch_size": 2})


def test_damaged_step_is_noticed_and_the_one_before_is_used(agent_dir, zygote, tmp_path, in_fresh_tiers):
    undisturbed = in_fresh_tiers()
    zygote.run(train, str(tmp_path), {0: {"step 6": KILL}})
    flip_byte_of_step(5)
    second = zygote.run(train, str(tmp_path))
    assert second.result == undisturbed.result
    assert min(values_by_step(second.lines)) == 5, "the run did not resume from step 4"


def flip_byte_of_step(step):
    with Checkpointer(URL, on_sigterm="ignore") as ckpt:
        store = ckpt.session.agent.store
        (found,) = [one for one in store.list_shards("trainer") if one.key.version == step]
        pin = store.pin(found.key)
        flip_byte(pinned_file(pin), pin.record.size_bytes // 2)
        store.unpin(pin.id)


def test_tiers_and_folders_each_keep_their_number_of_steps(agent_dir, zygote, tmp_path):
    durable = tmp_path / "durable"
    options = {"durable": f"file://{durable}", "durable_every": 2, "keep_last": 2}
    arguments = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "save_only_model": True}
    zygote.run(train, str(tmp_path / "folders"), None, arguments, options)
    assert [one.name for one in (tmp_path / "folders").glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]
    with Checkpointer(URL, on_sigterm="ignore", **options) as ckpt:
        assert ckpt.wait("durable")

        def kept():
            return [one.step for one in ckpt.steps() if "durable" in one.tiers]

        wait_until(lambda: len(kept()) == 2, "two durable steps are left (an upload may be skipped)")
        assert kept()[-1] == STEPS


def test_export_is_read_by_from_pretrained(agent_dir, zygote, tmp_path, in_fresh_tiers):
    arguments = {"save_strategy": "steps", "save_steps": 4, "save_only_model": True}
    undisturbed = in_fresh_tiers(arguments)
    zygote.run(train, str(tmp_path), {0: {"step 6": KILL}}, arguments)
    second = zygote.run(train, str(tmp_path), None, arguments)
    assert second.result == undisturbed.result
    folder = newest_folder(tmp_path)
    assert folder.name == f"checkpoint-{STEPS}"
    assert zygote.run(describe_export, str(folder)).result == second.result["tensors"]


def test_sigterm_saves_the_step_and_ends_the_process(agent_dir, zygote, tmp_path, in_fresh_tiers):
    first = zygote.run(train, str(tmp_path), {0: {"step 5": TERM}}, None, {"every": 4})
    assert first.status == -signal.SIGTERM
    second = zygote.run(train, str(tmp_path), None, None, {"every": 4})
    assert second.result == in_fresh_tiers().result
    assert min(values_by_step(second.lines)) == 6


def test_jit_checkpoint_is_turned_off(agent_dir, zygote, tmp_path):
    ended = zygote.run(train, str(tmp_path), {0: {"step 3": TERM}}, {"enable_jit_checkpoint": True})
    assert ended.status == -signal.SIGTERM
    assert not list(tmp_path.glob("checkpoint-*"))
    (callbacks,) = [line for line in ended.lines if line.startswith("callbacks")]
    assert "JIT" not in callbacks


def test_adapters_are_saved_without_the_frozen_model(agent_dir, zygote, tmp_path, in_fresh_tiers):
    pytest.importorskip("peft", reason="peft is not installed")
    undisturbed = in_fresh_tiers(None, None, lora_trainer)
    zygote.run(train, str(tmp_path), {0: {"step 6": KILL}}, None, None, lora_trainer)
    names = TieredReader(URL).read_metadata().state_dict_metadata
    assert [name for name in names if name.startswith("model.")]
    assert all("lora_" in name for name in names if name.startswith("model."))
    second = zygote.run(train, str(tmp_path), None, None, None, lora_trainer)
    assert second.result == undisturbed.result
    assert min(values_by_step(second.lines)) == 6


def test_sft_trainer_continues_bit_equal(agent_dir, zygote, tmp_path, in_fresh_tiers):
    pytest.importorskip("trl", reason="trl is not installed")
    from tests.support.trl_training import sft_trainer

    undisturbed = in_fresh_tiers(None, None, sft_trainer)
    zygote.run(train, str(tmp_path), {0: {"step 6": KILL}}, None, None, sft_trainer)
    second = zygote.run(train, str(tmp_path), None, None, None, sft_trainer)
    for ended in (undisturbed, second):
        for entry in ended.result["history"]:
            del entry["num_tokens"]  # TRL counts from zero in each call of train
    assert second.result == undisturbed.result
    assert min(values_by_step(second.lines)) == 6


def test_example_finishes_and_resumes(agent_dir, zygote, tmp_path):
    example = Path(__file__).parents[4] / "examples/transformers_trainer.py"
    assert zygote.run(run_example, str(example), str(tmp_path)).result == 40
    assert newest_folder(tmp_path / "example-trainer").name == "checkpoint-40"
    with Checkpointer("tiered://example-trainer", on_sigterm="ignore") as ckpt:
        assert max(one.step for one in ckpt.steps()) == 40
    assert zygote.run(run_example, str(example), str(tmp_path)).result == 40
