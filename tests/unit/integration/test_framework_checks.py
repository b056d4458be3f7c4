"""Findings of ``tieredckpt doctor --framework`` from versions, variables and configuration files."""

from importlib import metadata

import pytest

from integration.framework_checks import (
    accelerate_config_file,
    check_framework,
    check_versions,
    required_versions,
    sharding_engine,
)
from tieredckpt.cli.findings import CheckStatus
from tieredckpt.settings import settings_from_mapping

SETTINGS = settings_from_mapping({})


def statuses(found):
    return {one.subject: one.status for one in found}


def test_versions_come_from_the_requirements_of_the_extra():
    requirements = [
        "torch>=2.7.1",
        'ray[train]>=2.60; extra == "ray"',
        "transformers>=5; extra == 'transformers'",
        'accelerate>=1.1; extra == "transformers"',
        'accelerate>=1.1; extra == "accelerate"',
    ]
    assert required_versions(requirements, "ray") == {"ray": "2.60"}
    assert required_versions(requirements, "transformers") == {"transformers": "5", "accelerate": "1.1"}
    assert required_versions(requirements, "torch") == {}


def test_every_framework_has_an_extra_with_requirements():
    names = {point.name for point in metadata.entry_points(group="tieredckpt.framework_checks")}
    assert names == {"accelerate", "lightning", "megatron", "nvrx", "ray", "torchft", "torchtitan", "transformers"}
    assert all(required_versions(metadata.requires("tieredckpt"), name) for name in names)


@pytest.mark.parametrize(
    ("version", "status"),
    [
        ("2.6.6", CheckStatus.PASSED),
        ("2.6", CheckStatus.PASSED),
        ("2.10.0+cpu", CheckStatus.PASSED),
        ("3.0.0rc1", CheckStatus.PASSED),
        ("2.5.9", CheckStatus.FAILED),
        ("1.9", CheckStatus.FAILED),
    ],
)
def test_version_is_compared_by_its_numbers(monkeypatch, version, status):
    monkeypatch.setattr(metadata, "version", lambda _: version)
    (found,) = check_versions("lightning")
    assert (found.status, version in found.message) == (status, True)


def test_missing_package_is_a_failure_with_the_command(monkeypatch):
    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    (found,) = check_versions("lightning")
    assert (found.message, found.hint) == ("lightning is not installed", "pip install 'tieredckpt[lightning]'")


@pytest.mark.parametrize(
    ("environ", "config", "engine"),
    [
        ({}, {}, ""),
        ({}, {"distributed_type": "MULTI_GPU"}, ""),
        ({}, {"distributed_type": "DEEPSPEED"}, "DeepSpeed"),
        ({}, {"distributed_type": "FSDP"}, "FSDP1"),
        ({}, {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}, "FSDP2"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, {"distributed_type": "DEEPSPEED"}, "FSDP2"),
        ({"ACCELERATE_USE_FSDP": "true"}, {}, "FSDP1"),
        ({"ACCELERATE_USE_FSDP": "false"}, {}, ""),
        ({"ACCELERATE_USE_DEEPSPEED": "1"}, {"distributed_type": "FSDP"}, "DeepSpeed"),
    ],
)
def test_sharding_is_that_of_the_launcher(environ, config, engine):
    assert sharding_engine(environ, config) == engine


def test_configuration_of_accelerate_is_in_the_users_cache():
    assert accelerate_config_file({"HF_HOME": "/hf"}).as_posix() == "/hf/accelerate/default_config.yaml"
    found = accelerate_config_file({"XDG_CACHE_HOME": "/cache"})
    assert found.as_posix() == "/cache/huggingface/accelerate/default_config.yaml"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, ""),
        ("", ""),
        ("distributed_type: DEEPSPEED", "is configured for DeepSpeed"),
        ("- a list", "cannot be read: it is a list, not keys and values"),
        ("distributed_type: [", "cannot be read: line 1"),
    ],
)
def test_configuration_of_accelerate_may_be_absent_or_broken(tmp_path, text, said):
    environ = {"HF_HOME": str(tmp_path)}
    file = accelerate_config_file(environ)
    file.parent.mkdir()
    if text is not None:
        file.write_text(text)
    found = [one for one in check_framework("accelerate", SETTINGS, environ) if one.subject == "sharding"]
    assert [said in one.message and one.status is CheckStatus.WARNING for one in found] == ([True] if said else [])


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, True),
        ({"ACCELERATE_USE_FSDP": "true"}, True),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, False),
    ],
)
def test_sharding_that_the_trainer_refuses_is_a_failure(tmp_path, variables, refused):
    environ = {"HF_HOME": str(tmp_path), **variables}
    found = statuses(check_framework("transformers", SETTINGS, environ))
    assert found.get("sharding") is (CheckStatus.FAILED if refused else None)
    assert statuses(check_framework("accelerate", SETTINGS, environ))["sharding"] is CheckStatus.WARNING


def test_slurm_is_a_warning_for_lightning_in_batch_jobs_only():
    assert "Slurm" not in statuses(check_framework("lightning", SETTINGS, {}))
    assert "Slurm" not in statuses(
        check_framework("lightning", SETTINGS, {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "bash"})
    )
    assert statuses(check_framework("lightning", SETTINGS, {"SLURM_JOB_ID": "7"}))["Slurm"] is CheckStatus.WARNING


def test_ray_without_its_second_version_is_a_failure():
    assert "Ray Train" not in statuses(check_framework("ray", SETTINGS, {"RAY_TRAIN_V2_ENABLED": "1"}))
    assert statuses(check_framework("ray", SETTINGS, {"RAY_TRAIN_V2_ENABLED": "0"}))["Ray Train"] is CheckStatus.FAILED


def test_torchft_needs_peers_and_their_secret():
    secret = settings_from_mapping({"peer": {"secret": "s" * 32}})
    off = settings_from_mapping({"agent": {"peers": "off"}})
    assert "peers" not in statuses(check_framework("torchft", secret, {}))
    assert statuses(check_framework("torchft", SETTINGS, {}))["peers"] is CheckStatus.WARNING
    assert statuses(check_framework("torchft", off, {}))["peers"] is CheckStatus.FAILED


@pytest.mark.parametrize("name", ["megatron", "nvrx"])
@pytest.mark.parametrize(
    "changes", [{"agent": {"peers": "off"}}, {"peer": {"copies": 1}}, {"peer": {"discovery": "off"}}]
)
def test_framework_without_copies_is_a_warning(name, changes):
    assert "copies" not in statuses(check_framework(name, SETTINGS, {}))
    found = statuses(check_framework(name, settings_from_mapping(changes), {}))
    assert found["copies"] is CheckStatus.WARNING


def test_torchtitan_without_the_extended_module_is_a_failure(tmp_path, monkeypatch):
    package = tmp_path / "torchtitan"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = (one for one in check_framework("torchtitan", SETTINGS, {}) if "checkpointer" in one.message)
    assert found.status is CheckStatus.FAILED
    (package / "components" / "checkpointer").mkdir(parents=True)
    assert not [one for one in check_framework("torchtitan", SETTINGS, {}) if "checkpointer" in one.message]
