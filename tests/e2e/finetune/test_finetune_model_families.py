"""Llama, Qwen, DeepSeek and GPT-OSS train the same on two ranks, one of which fails, and then on one."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from integration.finetune.finetune_job import read_step_log
from tests.support import tiny_models
from tests.support.agents import stop_agent
from tests.support.elastic_runs import ROOT, ElasticRun
from tests.support.families_training import finetune_job, train_alone

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
pytest.importorskip("transformers.generation")

BEFORE, TOTAL = 4, 6
SCRIPT = ROOT / "tests/support/families_training.py"
IN_A_PUSH = ("qwen2", "gpt_oss")
"""Both kinds of parallelism and of faults, full and partial tuning; the other families are nightly."""


@pytest.fixture
def place():
    """Return a job in a folder with a short path, because sockets limit the length."""
    with tempfile.TemporaryDirectory(prefix="tune-") as folder:
        for family in tiny_models.CONFIGS:
            tiny_models.config_file(Path(folder), family)
        tiny_models.tokenizer_folder(Path(folder))
        tiny_models.data_file(Path(folder))
        job = ElasticRun(Path(folder), "families")
        job.environ |= {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "ELASTIC_BATCH_CACHE_DIRECTORY": str(job.folder / "prepared"),
            "TIEREDCKPT_AGENT_DIRECTORY": str(job.folder / "agent"),
            "TIEREDCKPT_AGENT_BUDGET": "512MiB",
            "TIEREDCKPT_AGENT_LINGER_S": "1",
            "TIEREDCKPT_AGENT_JOB_TTL_S": "60",
        }
        yield job
        stop_agent(job.folder / "agent")
        job.close()


def losses(place, name, family):
    """Return each step's last loss in hexadecimal, and the number of ranks of each step."""
    found, _ = read_step_log(finetune_job(place.folder, name, family, 0).progress_file)
    steps = {one["step"]: one for one in found if "step" in one}
    return {step: one["loss"].hex() for step, one in steps.items()}, [one["ranks"] for _, one in sorted(steps.items())]


@pytest.mark.parametrize(
    "families", [IN_A_PUSH, pytest.param(tuple(tiny_models.CONFIGS), marks=pytest.mark.nightly)], ids=["few", "all"]
)
def test_every_model_family_trains_the_same_despite_faults(place, zygote, families):
    words = ("--nproc", "2", "--job", place.name, "--log-dir", str(place.folder / "logs"))
    two = place.start("run", *words, str(SCRIPT), str(place.folder), "moved", str(BEFORE), "breaks", *families)
    code = two.wait(300)
    assert code == 0, place.output()[-6000:]
    for family in families:
        assert (place.folder / "moved" / family / "broken").exists()
    environ = {name: value for name, value in place.environ.items() if name.startswith(("TIEREDCKPT_", "ELASTIC_"))}
    running = zygote.start(train_alone, str(place.folder), TOTAL, families, environ=environ | {"HF_HUB_OFFLINE": "1"})
    left = running.wait(300).result
    for family, found in left.items():
        moved, ranks = losses(place, "moved", family)
        quiet, _ = losses(place, "quiet", family)
        assert ranks == [2] * BEFORE + [1] * (TOTAL - BEFORE), family
        assert moved == quiet, family
        assert len(set(quiet.values())) == TOTAL
        assert found["same"] == [True, True], family
        written = finetune_job(place.folder, "moved", family, 0).model_folder / "tokenizer.json"
        assert json.loads(written.read_bytes()) == json.loads((place.folder / "tokenizer/tokenizer.json").read_bytes())
        assert found["type"].lower().startswith(family.replace("_", "").replace("v3", "")), family
        assert float.fromhex(quiet[0]) == pytest.approx(found["first"], rel=1e-5)
