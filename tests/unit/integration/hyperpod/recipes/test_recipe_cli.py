"""``elastic recipe``: its output and its files, which AWS's own models accept."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner

from elastic.cli.common import ElasticScreen
from elastic.cli.scaling_options import load_scaling_policy
from elastic.errors import PolicyError
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.elastic_policy import policy_from_keys
from integration.hyperpod.recipes import read_recipe
from integration.hyperpod.recipes.recipe_cli import recipe_group
from tieredckpt.settings import load_settings, settings_from_mapping

ROOT = Path(__file__).parents[5]
PUBLISHED = ROOT / "tests" / "golden" / "hyperpod-recipes" / "published"
FILES = sorted(PUBLISHED.glob("*.yaml"))
LORA = PUBLISHED / "llmft_qwen3_0_dot_6b_seq4k_gpu_sft_lora.yaml"
EXCERPT = PUBLISHED.parent / "llama3_1_8b_sft_lora.yaml"
CHECKPOINTLESS = PUBLISHED / "checkpointless_llama3_70b_pretrain.yaml"


def run(*args):
    return CliRunner().invoke(
        recipe_group, [str(arg) for arg in args], standalone_mode=False, obj=ElasticScreen("elastic")
    )


def said(*args):
    result = run(*args)
    assert result.exception is None, result.exception
    return result


def job(file, *args):
    return yaml.safe_load(said("job", file, "--image", "mine:1", *args, "train.py").stdout)


def test_recipe_prints_json():
    shown = json.loads(said("show", LORA, "--json").stdout)
    assert shown["sizes"] == [1, 2, 3, 4, 6, 8, 16]
    assert (shown["elastic"], shown["nodes"], shown["training"]["method"]) == (False, 1, "lora")
    assert shown["rates_by_world"]["128"] == 0.0004
    assert shown["launch"]["elastic"][:6] == ["elastic", "run", "--nnodes", "1:16", "--nproc", "8"]
    assert json.loads(said("show", LORA, "--nodes", "1:4", "--json").stdout)["elastic"]


def test_written_files_are_read_by_their_consumers(tmp_path, monkeypatch):
    said("show", CHECKPOINTLESS, "-o", tmp_path)
    said("show", LORA, "-o", tmp_path / "elastic")
    policy = load_scaling_policy("1:16", tmp_path / "elastic" / "policy.yaml")
    assert policy == read_recipe(LORA).policy
    settings = load_settings({"TIEREDCKPT_CONFIG": str(tmp_path / "tieredckpt.yaml")})
    assert (settings.durable.every, settings.durable.keep_last, settings.peer.copies) == (20, 2, 2)


def test_a_plan_of_other_sizes_has_a_star():
    lines = [line.split() for line in said("plan", LORA, "--nodes", "4:6").stdout.splitlines()]
    assert [line[:2] for line in lines[1:]] == [["4", "32"], ["5", "*"], ["6", "48"]]
    (five,) = json.loads(said("plan", LORA, "--nodes", 5, "--json").stdout)["plans"]
    assert five["quotas"] == [{"ranks": 8, "samples": 4}, {"ranks": 32, "samples": 3}]
    assert (five["stated"], five["learning_rate"]) == (False, 0.0004)


def test_plan_difference_is_reported_by_exit_code():
    result = said("plan", LORA, "--nproc", 4)
    assert result.return_value == 1
    assert "scale_config.6" in result.stderr
    assert said("plan", LORA, "--nproc", 4, "--nodes", 2).return_value == 0


def test_each_mismatch_of_a_plan_is_named_once():
    result = said("plan", EXCERPT, "--nproc", 4)
    assert result.return_value == 1
    assert "scale_config.6: train_batch_size is 128, planned is 56" in result.stderr
    named = json.loads(said("plan", EXCERPT, "--nproc", 4, "--json").stdout)["disagreements"]
    assert named == result.stderr.splitlines()
    assert {line.split(":")[0] for line in named} == {f"scale_config.{size}" for size in (3, 4, 6, 8)}


def test_a_plan_shows_every_pass_of_a_rank():
    shown = said("plan", LORA, "--nodes", 3, "--max-microbatch", 4, "--rank", 23).stdout.splitlines()
    assert [line.split() for line in shown[-3:]] == [
        ["MICROBATCH", "FIRST", "SAMPLES"],
        ["46", "123", "3"],
        ["47", "126", "2"],
    ]
    (one,) = json.loads(said("plan", LORA, "--nodes", 3, "--max-microbatch", 4, "--rank", 23, "--json").stdout)["plans"]
    assert (one["accumulation"], one["share"]["first"], one["share"]["samples"]) == (2, 123, 5)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((LORA, "--max-microbatch", 0), "max_microbatch is 0"),
        ((LORA, "--nodes", 2, "--rank", 16), "there is no rank 16"),
        ((ROOT / "pyproject.toml",), "pyproject.toml"),
        ((ROOT / "nothing.yaml",), "No such file"),
    ],
)
def test_an_impossible_plan_is_an_error(args, named):
    assert named in str(run("plan", *args).exception)


def test_non_elastic_job_has_the_size_of_the_recipe():
    spec = job(CHECKPOINTLESS)["spec"]
    assert spec["replicaSpecs"][0]["replicas"] == 16
    assert "elasticPolicy" not in spec
    (container,) = spec["replicaSpecs"][0]["template"]["spec"]["containers"]
    assert container["command"][0] == "hyperpodrun"
    assert "--inprocess-restart" in container["command"]
    environ = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert environ["ELASTIC_BATCH_CACHE_DIRECTORY"] == "/dev/shm/pdl_cache"
    assert (
        load_settings({name: value for name, value in environ.items() if name.startswith("TIEREDCKPT_")}).durable.every
        == 20
    )


def test_an_elastic_job_reads_back_as_the_recipes_policy():
    spec = job(LORA, "--elastic", "--queue", "team-a", "--name", "tuned")["spec"]
    restart = spec["runPolicy"]["restartPolicy"]
    assert policy_from_keys(spec["elasticPolicy"], restart) == read_recipe(LORA).policy
    assert spec["replicaSpecs"][0]["maxReplicas"] == 16


def test_secret_reaches_the_pods_as_a_reference():
    (container,) = job(LORA, "--secret", "tuned-peers")["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
    (found,) = (one for one in container["env"] if one["name"] == "TIEREDCKPT_PEER_SECRET")
    assert found["valueFrom"] == {"secretKeyRef": {"name": "tuned-peers", "key": "secret"}}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_awss_own_models_take_every_job(file):
    models = pytest.importorskip("sagemaker.hyperpod.training.config.hyperpod_pytorch_job_unified_config")
    switches = [()] if file.stem.startswith("checkpointless") else [(), ("--elastic",)]
    for switch in switches:
        made = job(file, *switch)
        assert (made["apiVersion"], made["kind"]) == ("sagemaker.amazonaws.com/v1", "HyperPodPyTorchJob")
        taken = models._HyperPodPytorchJob.model_validate(made["spec"], by_name=True, by_alias=False)
        assert taken.model_dump(exclude_unset=True, by_alias=False) == made["spec"]
        assert (taken.elasticPolicy is not None) == bool(switch)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("plan", LORA, "--nodes", "4:2"), "--nodes '4:2'"),
        (("plan", LORA, "--nodes", "some"), "--nodes 'some'"),
        (("plan", LORA, "--nodes", "40"), "world_size is 320, but global_batch has 128"),
        (("show", LORA, "--nodes", "9:12"), "of 9 to 12 nodes none is a size; there are 1, 2, 3, 4, 6, 8, 16"),
        (("show", ROOT / "pyproject.toml"), "pyproject.toml"),
        (("show", CHECKPOINTLESS, "--elastic"), "has one size, 16 nodes"),
        (("job", CHECKPOINTLESS, "--image", "x", "--nodes", "8", "train.py"), "of 8 to 8 nodes none is a size"),
    ],
)
def test_impossible_recipe_options_are_refused(args, named):
    error = run(*args).exception
    assert isinstance(error, PolicyError)
    assert named in str(error)


def test_settings_are_settings():
    for file in FILES:
        tree = json.loads(said("show", file, "--json").stdout)
        settings_from_mapping(tree["settings"])
        msgspec.convert(tree["policy"], ScalingPolicy)


def test_documented_recipes_match_the_command_output():
    """Each block of docs/how-to/recipes.md that begins with a prompt."""
    text = (ROOT / "docs" / "how-to" / "recipes.md").read_text()
    blocks = re.findall(r"^```console\n\$ elastic recipe (.*?)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 3
    for command, printed in blocks:
        result = said(*shlex.split(command.replace("recipe.yaml", str(LORA))))
        shown = [line.rstrip() for line in (result.stdout + result.stderr).splitlines()]
        assert shown == [line.rstrip() for line in printed.rstrip("\n").split("\n")], command
