"""torchtitan's checkpoint folder: the last checkpoint, checkpoints of its own manager, and URLs."""

import warnings
from functools import partial

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: run `tox -e torchtitan`")

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.bits import assert_same_bits
from tests.support.local_nodes import wait_until
from tests.support.torchtitan_training import (
    JOB,
    OVERRIDE,
    STEPS,
    URL,
    configured,
    save_seed_checkpoint,
    saved_folders,
    train,
)
from tests.support.transformers_training import KILL, values_by_step
from tieredckpt import UsageError, enable_urls, load

pytestmark = pytest.mark.e2e
PLAIN = partial(train, imports=())
"""A training with torchtitan's own checkpoint manager."""


def run_pair(zygote, function, folder, *args):
    return zygote.run_ranks(2, function, str(folder), *args)


def test_last_checkpoint_is_torchtitans_own(agent_dir, titan_zygote, tmp_path, undisturbed_pair):
    whole = partial(train, last_save_model_only=False)
    run_pair(titan_zygote, whole, tmp_path)
    assert saved_folders(tmp_path) == {f"step-{STEPS}"}
    alone = run_pair(titan_zygote, PLAIN, tmp_path)
    state = f"state {STEPS} {undisturbed_pair[0].result}"
    assert [one.lines for one in alone] == [["loaded True", state]] * 2


def test_last_checkpoint_of_the_model_only_does_not_prevent_more_steps(agent_dir, titan_zygote, tmp_path):
    first = run_pair(titan_zygote, train, tmp_path)
    dcp_to_torch_save(tmp_path / f"checkpoint/step-{STEPS}", tmp_path / "model.pt")
    assert set(torch.load(tmp_path / "model.pt")) == {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}
    second = run_pair(titan_zygote, partial(train, steps=STEPS + 2), tmp_path)
    assert values_by_step(second[0].lines, "state")[STEPS] == first[0].result
    assert list(values_by_step(second[0].lines)) == [STEPS + 1, STEPS + 2]


def test_checkpoints_of_torchtitans_own_manager_continue_in_the_tiers(
    agent_dir, titan_zygote, tmp_path, undisturbed_pair
):
    run_pair(titan_zygote, PLAIN, tmp_path, {0: {"after 5": KILL}, 1: {"after 5": KILL}})
    assert saved_folders(tmp_path) == {"step-2", "step-4"}
    second = run_pair(titan_zygote, train, tmp_path, {0: {"after 7": KILL}, 1: {"after 7": KILL}})
    assert min(values_by_step(second[0].lines)) == 5
    third = run_pair(titan_zygote, train, tmp_path)
    assert min(values_by_step(third[0].lines)) == 7
    assert [one.result for one in third] == [one.result for one in undisturbed_pair]


def test_load_step_names_a_step_of_the_job_or_of_the_folder(agent_dir, titan_zygote, tmp_path, undisturbed_pair):
    run_pair(titan_zygote, PLAIN, tmp_path, {0: {"after 3": KILL}, 1: {"after 3": KILL}})
    run_pair(titan_zygote, train, tmp_path, {0: {"after 7": KILL}, 1: {"after 7": KILL}})
    states = values_by_step(undisturbed_pair[0].lines, "state")
    for step in (2, 4):  # 2 is in the folder, 4 in the tiers
        alone = run_pair(titan_zygote, partial(train, load_step=step, load_only=True, steps=step), tmp_path)
        assert alone[0].lines == ["loaded True", f"state {step} {states[step]}"]
    with pytest.raises(AssertionError, match="CheckpointNotFoundError"):
        titan_zygote.run(partial(train, load_step=3, load_only=True), str(tmp_path))


def test_training_begins_with_a_seed_checkpoint(agent_dir, titan_zygote, tmp_path, undisturbed_pair):
    seed = titan_zygote.run(save_seed_checkpoint, str(tmp_path)).result
    assert saved_folders(tmp_path) == {"step-0"}
    first = run_pair(titan_zygote, train, tmp_path)
    assert first[0].lines[:2] == ["loaded True", f"state 0 {seed}"]
    assert seed != values_by_step(undisturbed_pair[0].lines, "state")[0]


def test_dcp_reads_a_step_by_its_url(agent_dir, titan_zygote, tmp_path):
    run_pair(titan_zygote, train, tmp_path, {0: {"after 5": KILL}, 1: {"after 5": KILL}})
    state = {"0.weight": torch.zeros(64, 16), "train_state": {"step": 0, "ntokens_seen": 0}}
    with enable_urls(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)", UserWarning)
        dcp.load(state, checkpoint_id=f"{URL}/step-4")
    assert state["train_state"] == {"step": 4, "ntokens_seen": 4 * 64}
    assert_same_bits(state["0.weight"], load(URL, step=4)["0.weight"])


def test_folder_url_names_the_job():
    config = configured(["integration.torchtitan.tiered"], folder=URL).checkpoint
    assert (config.url, config.folder, config.interval) == (URL, "checkpoint", 2)
    config = configured([OVERRIDE.replace("}", ', "durable": "s3://bucket/a", "durable_every": 4}')]).checkpoint
    assert (config.durable, config.durable_every, config.keep_latest_k) == ("s3://bucket/a", 4, 3)


def test_override_without_a_job_says_how_to_name_one():
    with pytest.raises(UsageError, match=r"--checkpoint\.folder tiered://JOB"):
        configured(["integration.torchtitan.tiered"])


def test_durable_retention_follows_keep_latest_k(agent_dir, titan_zygote, tmp_path, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_ON_BUSY", "wait")  # no step is skipped for a newer one
    store = tmp_path / "store"
    override = OVERRIDE.replace("}", f', "durable": "file://{store}", "durable_every": 2}}')
    run_pair(titan_zygote, partial(train, imports=(override,), interval=1, keep_latest_k=2), tmp_path)
    manifests = store / JOB / "manifests"
    wait_until(lambda: {int(one.name[:12]) for one in manifests.glob("*.manifest")} == {STEPS - 2, STEPS})


@pytest.mark.parametrize("urls", [False, True])
def test_folder_url_works_without_the_override(agent_dir, titan_zygote, tmp_path, undisturbed_pair, urls):
    by_url = partial(PLAIN, urls=urls, folder=URL, last_save_model_only=False)
    first = run_pair(titan_zygote, by_url, tmp_path, {0: {"after 5": KILL}, 1: {"after 5": KILL}})
    assert values_by_step(first[0].lines)
    second = run_pair(titan_zygote, by_url, tmp_path)
    assert min(values_by_step(second[0].lines)) == 5
    assert [one.result for one in second] == [one.result for one in undisturbed_pair]
