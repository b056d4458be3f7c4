"""``TieredStorageConfig`` from every source, and the resulting settings."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from integration.hyperpod.cluster.tiered_storage_config import (
    TIERED_STORAGE_DISABLED,
    TIERED_STORAGE_KEY,
    TieredStorageConfig,
    TieredStorageMode,
    cluster_settings_from,
    parse_tiered_storage_config,
    read_tiered_storage_config,
)
from tieredckpt.errors import SettingsError, TieredCheckpointError
from tieredckpt.settings import CLUSTER_CONFIG_ENV, load_complete_settings, load_settings

ON = TieredStorageConfig(TieredStorageMode.ENABLE, 30)
FLAG = {"Mode": "Enable", "InstanceMemoryAllocationPercentage": 30}
ANSWER = {
    "ClusterArn": "arn:aws:sagemaker:us-west-2:111122223333:cluster/abcdefghijkl",
    "ClusterName": "ml",
    "ClusterStatus": "InService",
    "CreationTime": "2026-01-02T03:04:05+00:00",
    "InstanceGroups": [{"InstanceGroupName": "workers", "CurrentCount": 4}],
    "NodeRecovery": "Automatic",
}


@pytest.mark.parametrize(
    "tree",
    [FLAG, {TIERED_STORAGE_KEY: FLAG}, {**ANSWER, TIERED_STORAGE_KEY: FLAG}],
    ids=["alone", "named", "in an answer"],
)
@pytest.mark.parametrize("write", [json.dumps, yaml.safe_dump], ids=["json", "yaml"])
def test_a_file(tmp_path, tree, write):
    path = tmp_path / "flag"
    path.write_text(write(tree))
    assert read_tiered_storage_config(path) == ON


def test_cluster_without_the_flag_has_it_disabled():
    assert parse_tiered_storage_config(ANSWER, "x") == TIERED_STORAGE_DISABLED
    assert not parse_tiered_storage_config({**ANSWER, TIERED_STORAGE_KEY: {"Mode": "Disable"}}, "x").enabled


@pytest.mark.parametrize(
    "files",
    [
        {"TieredStorageConfig": json.dumps(FLAG)},
        {"cluster.json": json.dumps({**ANSWER, TIERED_STORAGE_KEY: FLAG})},
        {"cluster.yaml": yaml.safe_dump(FLAG)},
        {"Mode": "Enable\n", "InstanceMemoryAllocationPercentage": "30\n"},
    ],
    ids=["by name", "an answer", "yaml", "a key each"],
)
def test_a_mounted_configmap(tmp_path, files):
    versioned = tmp_path / "..2026_01_02"
    versioned.mkdir()
    (tmp_path / "..data").symlink_to(versioned.name)
    for name, text in files.items():
        (versioned / name).write_text(text)
        (tmp_path / name).symlink_to(f"..data/{name}")
    assert read_tiered_storage_config(tmp_path) == ON


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        ([], "found list"),
        (None, "found NoneType"),
        ({}, "neither"),
        ({"mode": "Enable"}, "neither"),
        ({TIERED_STORAGE_KEY: None}, "Expected"),
        ({"Mode": "enable"}, "Mode"),
        ({"Mode": "Enable", "InstanceMemoryAllocationPercentage": 101}, "<= 100"),
        ({"Mode": "Enable", "InstanceMemoryAllocationPercentage": -1}, ">= 0"),
        ({"Mode": "Enable", "InstanceMemoryAllocationPercentage": 0}, "keeps nothing"),
        ({"Mode": "Enable", "InstanceMemoryAllocationPercentage": "much"}, "int"),
        ({"Mode": "Enable", "InstanceMemoryAllocationPercent": 30}, "InstanceMemoryAllocationPercent`"),
        ({"InstanceMemoryAllocationPercentage": 30}, "neither"),
    ],
)
def test_invalid_config_keys_are_refused_by_name(tree, why):
    with pytest.raises(SettingsError, match=why) as refused:
        parse_tiered_storage_config(tree, "/etc/flag")
    assert str(refused.value).startswith("/etc/flag")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"\xff\xfe", "not text"),
        (b"{", "neither JSON nor YAML"),
        (b"2024-05-99", "neither JSON nor YAML"),
        (b"[" * 5000, "neither JSON nor YAML"),
        (b"x" * (5 << 20), "longer than"),
        (b"", "found NoneType"),
    ],
    ids=["binary", "cut", "no date", "brackets", "huge", "empty"],
)
def test_a_file_of_something_else(tmp_path, text, why):
    path = tmp_path / "flag"
    path.write_bytes(text)
    with pytest.raises(SettingsError, match=why):
        read_tiered_storage_config(path)


def test_no_file_and_too_many(tmp_path):
    with pytest.raises(SettingsError, match="No such file"):
        read_tiered_storage_config(tmp_path / "absent")
    with pytest.raises(SettingsError, match="there is nothing"):
        read_tiered_storage_config(tmp_path)
    (tmp_path / "one.json").write_text(json.dumps(FLAG))
    (tmp_path / "two.json").write_text(json.dumps(FLAG))
    with pytest.raises(SettingsError, match="one\\.json, two\\.json"):
        read_tiered_storage_config(tmp_path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["Mode", "InstanceMemoryAllocationPercentage", TIERED_STORAGE_KEY, "InstanceGroups"]),
                inner,
            )
        ),
    )
)
def test_any_document_is_a_flag_or_a_settings_error(tree):
    try:
        flag = parse_tiered_storage_config(tree, "x")
    except SettingsError:
        return
    assert flag.percent is None or 0 <= flag.percent <= 100
    assert flag.percent != 0 or not flag.enabled


@pytest.fixture
def platform(tmp_path, monkeypatch):
    """The plugin by which settings reach the flag, and a configuration file."""
    info = tmp_path / "site" / "hyperpod_flag-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hyperpod-flag\nVersion: 1\n")
    points = (
        "[tieredckpt.platforms]\nhyperpod = integration.hyperpod.cluster.tiered_storage_config:cluster_settings_from\n"
    )
    (info / "entry_points.txt").write_text(points + "broken = integration.absent:settings\n")
    monkeypatch.syspath_prepend(str(info.parent))

    def write(**flag):
        path = tmp_path / "flag.json"
        path.write_text(json.dumps(flag))
        return f"hyperpod:{path}"

    return write


def test_the_share_is_the_agents_budget_beneath_file_and_environment(platform, tmp_path):
    source = platform(Mode="Enable", InstanceMemoryAllocationPercentage=30)
    assert load_settings({CLUSTER_CONFIG_ENV: source}).agent.budget == "30%"
    assert load_settings({CLUSTER_CONFIG_ENV: source, "TIEREDCKPT_AGENT_BUDGET": "2GiB"}).agent.budget == "2GiB"
    config = tmp_path / "config.yaml"
    config.write_text("agent: {budget: 40%}\npeer:\n")
    assert load_settings({CLUSTER_CONFIG_ENV: source, "TIEREDCKPT_CONFIG": str(config)}).agent.budget == "40%"
    config.write_text("agent: {slots_per_rank: 3}\n")
    both = load_settings({CLUSTER_CONFIG_ENV: source, "TIEREDCKPT_CONFIG": str(config)}).agent
    assert (both.budget, both.slots_per_rank) == ("30%", 3)


def test_enabled_without_a_share_leaves_the_agents_own():
    source = cluster_settings_from
    assert source.__module__ == "integration.hyperpod.cluster.tiered_storage_config"
    assert (
        parse_tiered_storage_config({"Mode": "Enable"}, "x")
        .describe()
        .startswith("on: as much as the agent's own settings say")
    )


def test_disabled_tiered_storage_requires_a_durable_url(platform):
    source = platform(Mode="Disable", InstanceMemoryAllocationPercentage=30)
    off = load_settings({CLUSTER_CONFIG_ENV: source, "TIEREDCKPT_DURABLE_URL": "s3://bucket/job"})
    assert not off.enabled
    with pytest.raises(SettingsError, match=r"needs durable\.url") as refused:
        load_complete_settings({CLUSTER_CONFIG_ENV: source})
    assert source in str(refused.value)
    assert load_settings({CLUSTER_CONFIG_ENV: source, "TIEREDCKPT_ENABLED": "1"}).enabled


def test_invalid_config_source_is_refused(platform):
    for source in ("/etc/flag", "slurm:/etc/flag", "hyperpod", "hyperpod:"):
        with pytest.raises(SettingsError, match=r"known are: broken:\.\.\., hyperpod:"):
            load_settings({CLUSTER_CONFIG_ENV: source})
    with pytest.raises(TieredCheckpointError, match=r"'broken'.*cannot be loaded"):
        load_settings({CLUSTER_CONFIG_ENV: "broken:x"})
    with pytest.raises(SettingsError, match="No such file"):
        load_settings({CLUSTER_CONFIG_ENV: "hyperpod:/absent"})
