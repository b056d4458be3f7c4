"""``elastic finetune`` on two nodes turns a model and lines into a tuned model, despite a lost node."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from integration.finetune.finetune_job import read_step_log
from tests.support import tiny_models
from tests.support.elastic_runs import ElasticRun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
pytest.importorskip("transformers.generation")

STEPS = 4


@pytest.fixture
def place():
    with tempfile.TemporaryDirectory(prefix="ft-") as folder:
        tiny_models.config_file(Path(folder), "llama")
        tiny_models.tokenizer_folder(Path(folder))
        tiny_models.data_file(Path(folder))
        job = ElasticRun(Path(folder), "tuned")
        job.environ |= {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "ELASTIC_BATCH_CACHE_DIRECTORY": str(job.folder / "prepared"),
            "ELASTIC_INJECT": "step=2 rank=1 phase=backward kind=sigkill",
            "TIEREDCKPT_AGENT_BUDGET": "256MiB",
            "TIEREDCKPT_AGENT_LINGER_S": "1",
            "TIEREDCKPT_AGENT_JOB_TTL_S": "1",
        }
        yield job
        job.close()


def test_finetune_result_is_unchanged_by_a_killed_rank(place):
    brought = ("--config", "llama.json", "--tokenizer", "tokenizer", "--data", "data.jsonl", "--output", "tuned")
    wanted = ("--steps", str(STEPS), "--batch", "8", "--microbatch", "2", "--lr", "0.01")
    one = place.start("finetune", *brought, *wanted, "--nodes", "1:2", "--simulate-nodes", "2", "--json")
    assert one.wait(300) == 0, place.output()[-6000:]
    said = json.loads("{" + place.output().split("\n{", 1)[1].rsplit("\n}", 1)[0] + "}")
    assert (said["status"], said["steps"]) == (0, STEPS)
    found, _ = read_step_log(place.folder / "tuned/progress.jsonl")
    assert {one["step"] for one in found if "step" in one} == set(range(STEPS))
    assert found[-1] == {"done": STEPS, "model": said["model"]}
    assert (Path(said["model"]) / "model.safetensors").is_file()
    done = subprocess.run(
        [sys.executable, "-m", "tieredckpt", "goodput", str(place.folder / "tuned/logs/event-log"), "--json"],
        env=place.environ, cwd=place.folder, capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    account = json.loads(done.stdout)
    assert (account["steps"], account["faults"], account["ranks"]) == (STEPS, 1, 2)
    assert account["tokens"] == sum({one["step"]: one["tokens"] for one in found if "step" in one}.values())
