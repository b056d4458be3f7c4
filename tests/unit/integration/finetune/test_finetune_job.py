"""The job of a rank: from explicit options, then the recipe, then the defaults."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elastic.batch_scaling.lr_rules import ConstantLRRule, LinearLRRule, LRTable
from elastic.errors import PolicyError
from integration.finetune.finetune_job import (
    FinetuneJob,
    StepLogFollower,
    StepLogWriter,
    largest_microbatch,
    learning_rate_at,
    read_step_log,
    size_job,
    total_steps,
)
from integration.finetune.worker import job_from_options, read_job_file
from integration.hyperpod.recipes import read_recipe

PUBLISHED = Path(__file__).parents[3] / "golden" / "hyperpod-recipes" / "published"
LORA = str(PUBLISHED / "llmft_qwen3_8b_seq4k_gpu_sft_lora.yaml")
DATA = {"data": ("d.jsonl",)}


def test_finetune_job_has_defaults():
    job = job_from_options({**DATA, "model": "some/model"})
    assert (job.batch, job.lr, job.microbatch, job.name) == (16, 1e-5, 1, "model")
    assert job.output == str(Path("finetuned-model").absolute())
    assert job.data == (str(Path("d.jsonl").absolute()),)
    assert msgspec.json.decode(msgspec.json.encode(job), type=FinetuneJob) == job


def test_recipe_supplies_defaults():
    job = job_from_options({**DATA, "recipe": LORA, "lr": 1e-5}, sizes=(1, 2, 4), nproc=8)
    assert (
        job.lora,
        job_from_options({**DATA, "recipe": LORA}).lora,
        job_from_options({**DATA, "model": "m"}).lora,
    ) == (16, 16, 0)
    scout = job_from_options(
        {**DATA, "recipe": str(PUBLISHED / "llmft_llama4_scout_17b_16e_instruct_seq4k_gpu_sft_lora.yaml")}
    )
    assert (scout.lora, scout.lora_alpha) == (16, 32)
    assert (job.model, job.name, job.batch, job.lr) == ("Qwen/Qwen3-8B", "qwen-3-8b", None, 1e-5)
    assert job.microbatch == 4
    here = size_job(job, nodes=4, world_size=32)
    assert (here.plan.global_batch, here.plan.accumulation_steps, here.lr, here.rule) == (
        128,
        1,
        1e-5,
        ConstantLRRule(),
    )


def test_a_recipes_learning_rates_are_taken_with_its_sizes(tmp_path):
    tree = yaml.safe_load(Path(LORA).read_text())
    del tree["defaults"]
    tree["scale_config"][2]["training_config"]["training_args"]["learning_rate"] = 0.0002
    file = tmp_path / "full.yaml"
    file.write_text(yaml.safe_dump(tree))
    job = job_from_options({**DATA, "recipe": str(file)}, nproc=2)
    here = size_job(job, nodes=2, world_size=4)
    assert here.lr == 0.0004
    assert isinstance(here.rule, LRTable)
    assert here.rule.scale(128, 4).lr == 0.5
    assert job.microbatch == largest_microbatch(read_recipe(file, devices=2), None, (1, 2, 3, 4, 6, 8, 16), 2)


def test_explicit_options_override_the_recipe():
    job = job_from_options(
        {**DATA, "recipe": LORA, "lr": 1e-5, "batch": 64, "microbatch": 2, "config": "c.json", "name": "mine"}
    )
    assert (job.batch, job.microbatch, job.model, job.config, job.name) == (64, 2, "", "c.json", "mine")
    assert size_job(job, nodes=1, world_size=8).plan.accumulation_steps == 4


def test_another_batch_may_have_another_learning_rate():
    tree = FinetuneJob(name="a", data=(), output="o", lr=1e-3, batch=32, rule="linear")
    assert size_job(tree, nodes=1, world_size=2).rule == LinearLRRule(32)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "say where the data is"),
        ({**DATA, "recipe": str(PUBLISHED / "llmft_qwen3_4b_seq4k_gpu_dpo.yaml")}, "preference optimisation"),
        ({**DATA, "recipe": str(PUBLISHED / "checkpointless_llama3_70b_pretrain.yaml")}, "splits a model over 32"),
        ({**DATA, "recipe": "none.yaml"}, "No such file"),
        ({**DATA, "epochs": "many"}, "epochs"),
    ],
)
def test_impossible_finetune_job_is_refused(options, named):
    with pytest.raises(PolicyError) as caught:
        job_from_options(options)
    assert named in str(caught.value)


def test_a_world_that_leaves_ranks_idle_is_refused_by_its_limit():
    with pytest.raises(PolicyError, match="Use at most 2 ranks or a microbatch of at most 2"):
        size_job(FinetuneJob(name="a", data=(), output="o", lr=1e-3, batch=8, microbatch=4), nodes=1, world_size=4)


def test_invalid_job_file_is_refused(tmp_path):
    (tmp_path / "job.json").write_text('{"name": 3}')
    with pytest.raises(PolicyError, match=r"job\.json is not a job file"):
        read_job_file(tmp_path / "job.json")


@given(st.integers(1, 500), st.integers(1, 5), st.integers(1, 64), st.integers(0, 40))
def test_the_last_step_takes_the_last_sample(samples, epochs, batch, taken):
    job = FinetuneJob(name="a", data=(), output="o", epochs=epochs)
    total = total_steps(job, samples=samples, done=0, step=0, batch=batch)
    assert (total - 1) * batch < samples * epochs <= total * batch
    taken = min(taken, total)
    assert total_steps(job, samples=samples, done=taken * batch, step=taken, batch=batch) == total


@given(st.integers(1, 200), st.integers(0, 20), st.sampled_from(["cosine", "linear", "constant"]))
def test_learning_rate_rises_to_the_peak_and_falls_after_it(total, warmup, shape):
    rates = [learning_rate_at(step, total, peak=1.0, shape=shape, warmup=warmup, least=0.1) for step in range(total)]
    assert all(0 < rate <= 1 for rate in rates)
    up, down = rates[: warmup + 1], rates[warmup:]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert max(rates) == (1.0 if total > warmup else max(up))
    if shape == "constant":
        assert set(down) <= {1.0}


def test_incomplete_lines_are_not_read_yet(tmp_path):
    file = tmp_path / "progress.jsonl"
    assert read_step_log(file) == ([], 0)
    StepLogWriter(file, rank=1).write(step=0)
    assert not file.exists()
    StepLogWriter(file, rank=0).write(step=0, loss=0.1)
    with file.open("a") as half:
        half.write('{"step": 1')
    found, at = read_step_log(file)
    assert found == [{"step": 0, "loss": 0.1}]
    with file.open("a") as rest:
        rest.write("}\n")
    assert read_step_log(file, at)[0] == [{"step": 1}]


def test_step_log_follower_returns_every_new_line(tmp_path):
    file = tmp_path / "progress.jsonl"
    writer = StepLogWriter(file, rank=0)
    writer.write(step=0)
    heard = []
    with StepLogFollower(file, heard.append):
        writer.write(step=1)
        writer.write(step=2)
    assert heard == [{"step": 1}, {"step": 2}]
