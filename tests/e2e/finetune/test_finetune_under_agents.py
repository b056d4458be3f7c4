"""The finetune worker under AWS's real elastic agent, in both modes, with the same losses and model."""

from __future__ import annotations

import pytest

from integration.finetune.finetune_job import read_step_log
from tests.support import tiny_models
from tests.support.agents import agent_directory
from tests.support.hyperpod_agents import running_agents, start_pods, wait_for_states

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(900)]
pytest.importorskip("transformers.generation")
pytest.importorskip("hyperpod_elastic_agent")

STEPS = 3


def trained(folder, inprocess):
    output = folder / f"out-{inprocess}"
    words = ["--config", folder / "llama.json", "--tokenizer", folder / "tokenizer", "--data", folder / "data.jsonl"]
    wanted = ["--steps", STEPS, "--batch", 8, "--microbatch", 2, "--lr", 0.01, "--output", output]
    with agent_directory() as directory:
        environ = {
            "HF_HUB_OFFLINE": "1",
            "ELASTIC_BATCH_CACHE_DIRECTORY": str(folder / f"prepared-{inprocess}"),
            "TIEREDCKPT_AGENT_DIRECTORY": str(directory),
            "TIEREDCKPT_AGENT_BUDGET": "256MiB",
        }
        script = ["-m", "integration.finetune.worker", *words, *wanted]
        pods_folder = folder / f"pods-{inprocess}"
        with running_agents(1, script, folder=pods_folder, nproc=2, inprocess=inprocess, environ=environ) as pods:
            start_pods(pods)
            try:
                wait_for_states(pods, "completed", timeout_s=300)
            except AssertionError as late:
                raise AssertionError(f"{late}\n{pods[0].rank_output()[-4000:]}") from None
    assert (output / "model" / "model.safetensors").is_file()
    found, _ = read_step_log(output / "progress.jsonl")
    return {one["step"]: (one["loss"].hex(), one["ranks"]) for one in found if "step" in one}


def test_finetune_runs_under_real_agents_in_both_modes(tmp_path):
    tiny_models.config_file(tmp_path, "llama")
    tiny_models.tokenizer_folder(tmp_path)
    tiny_models.data_file(tmp_path)
    one, other = trained(tmp_path, False), trained(tmp_path, True)
    assert one == other
    assert [ranks for _, ranks in one.values()] == [2] * STEPS
