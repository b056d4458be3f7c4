"""Settings from files, environment and calls: valid values, or one error for all wrong keys."""

import contextlib
import dataclasses
import os
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt import Checkpointer, TieredReader, TieredWriter
from tieredckpt.errors import SettingsError
from tieredckpt.settings import (
    AgentSettings,
    DurableSettings,
    MemorySettings,
    Settings,
    copy_thread_count,
    load_settings,
    override_settings,
    settings_from_mapping,
)

SECTIONS = {"agent": AgentSettings, "memory": MemorySettings, "durable": DurableSettings}
KEYS = [(name, field.name) for name, kind in SECTIONS.items() for field in dataclasses.fields(kind)]


@pytest.fixture
def config(tmp_path):
    """Settings from a file with this text, and this environment."""
    path = tmp_path / "cluster.yaml"

    def load(text, **environ):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_settings({"TIEREDCKPT_CONFIG": str(path), **environ})

    return load


def problems(tree):
    with pytest.raises(SettingsError) as info:
        settings_from_mapping(tree)
    return str(info.value)


def test_empty_environment_gives_the_defaults():
    assert load_settings({}) == Settings() == settings_from_mapping({})


def test_a_file_and_the_environment_on_top(config):
    text = "agent: {budget: 30%, slots_per_rank: 3}\nmemory: {every: 2}\ndurable: {url: s3://b/p, every: 4}\n"
    found = config(text, TIEREDCKPT_MEMORY_EVERY="4", TIEREDCKPT_DURABLE_CONCURRENCY="9")
    assert found.agent.budget == "30%"
    assert (found.agent.slots_per_rank, found.store.slots_per_part) == (3, 3)
    assert (found.memory.every, found.durable.every) == (4, 4)
    assert (found.durable.url, found.durable.concurrency) == ("s3://b/p", 9)


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_every_key_can_be_set_by_environment(section, key):
    default = getattr(getattr(Settings(), section), key)
    values = {
        bool: ("no", False),
        int: ("8", 8),
        float: ("7.5", 7.5),
        str: ("64MiB", "64MiB"),
    }
    special = {
        "directory": ("/dev/shm/x", "/dev/shm/x"),
        "http": ("off", "off"),
        "memory_service": ("127.0.0.1:9200", "127.0.0.1:9200"),
        "memory_service_copies": ("3", 3),
        "memory_service_auth": ("open", "open"),
        "nonfinite": ("save", "save"),
        "staging": ("blocking", "blocking"),
        "on_busy": ("wait", "wait"),
        "on_unreachable": ("continue", "continue"),
        "url": ("/data", "/data"),
        "compress": ("zstd", "zstd"),
        "hashed_keys": ("on", True),
        "trust_objects": ("on", True),
        "mode": ("parity", "parity"),
        "transport": ("nixl:LIBFABRIC", "nixl:LIBFABRIC"),
        "options": ("region=eu,endpoint=http://h:1/?a=b", {"region": "eu", "endpoint": "http://h:1/?a=b"}),
    }
    text, expected = special.get(key) or values[type(default)]
    environ = {f"TIEREDCKPT_{section.upper()}_{key.upper()}": text}
    if key == "every":
        environ["TIEREDCKPT_DURABLE_EVERY"] = text
    if key == "keep_every":
        environ["TIEREDCKPT_DURABLE_KEEP_LAST"] = "1"
    assert getattr(getattr(load_settings(environ), section), key) == expected != default


@pytest.mark.parametrize(("text", "enabled"), [("1", True), ("0", False), (" Yes ", True), ("off", False)])
def test_enabled(config, text, enabled):
    environ = {"TIEREDCKPT_DURABLE_URL": "/data", "TIEREDCKPT_ENABLED": text}
    assert load_settings(environ).enabled is enabled
    assert config(f"enabled: {text.strip().lower()}", TIEREDCKPT_DURABLE_URL="/data").enabled is enabled
    assert config("enabled: true", **environ).enabled is enabled


@pytest.mark.parametrize("user", [Checkpointer, TieredReader, partial(TieredWriter, step=1)])
def test_disabled_package_needs_a_durable_url_in_settings_or_arguments(monkeypatch, tmp_path, user):
    monkeypatch.setenv("TIEREDCKPT_ENABLED", "0")
    assert not load_settings().enabled
    with pytest.raises(SettingsError, match=r"enabled: .*durable\.url"):
        user("tiered://llama")
    made = user("tiered://llama", durable=str(tmp_path))
    assert made.settings.durable.url == str(tmp_path)
    getattr(made, "close", lambda: None)()


def test_copies_and_parity_are_exclusive():
    assert (
        load_settings(
            {"TIEREDCKPT_PEER_MODE": "parity", "TIEREDCKPT_PEER_PARITY_GROUP_SIZE": "7"}
        ).peer.parity_group_size
        == 7
    )
    with pytest.raises(SettingsError, match=r"peer\.copies: .*peer\.mode"):
        load_settings({"TIEREDCKPT_PEER_MODE": "parity", "TIEREDCKPT_PEER_COPIES": "3"})
    with pytest.raises(SettingsError, match=r"peer\.mode: "):
        load_settings({"TIEREDCKPT_PEER_MODE": "raid"})
    with pytest.raises(SettingsError, match=r"peer\.parity_group_size: 0 is below 1"):
        load_settings({"TIEREDCKPT_PEER_PARITY_GROUP_SIZE": "0"})


def test_all_settings_problems_are_reported_at_once():
    text = problems(
        {
            "agent": {"budget": "lots", "slots_per_rank": 1, "colour": "red", "http": "here"},
            "memory": {"every": 0, "wait_s": float("nan"), "on_busy": "panic"},
            "durable": {"part_size": "3 parsecs", "concurrency": "many", "keep_every": 5, "url": "bucket/x"},
            "tier": {},
            "enabled": "perhaps",
        }
    )
    for key in (
        "agent.budget: ",
        "agent.slots_per_rank: ",
        "agent.colour: ",
        "agent.http: ",
        "memory.every: ",
        "memory.wait_s: ",
        "memory.on_busy: ",
        "durable.part_size: ",
        "durable.concurrency: ",
        "durable.keep_every: ",
        "durable.url: ",
        "tier: ",
        "enabled: ",
    ):
        assert text.count(key) == 1, key


@pytest.mark.parametrize("transport", ["udp", "tcp:UCX", "nixl:", "nixl:a b", ""])
def test_unknown_transport_is_refused(transport):
    with pytest.raises(SettingsError, match=r"agent\.transport: .* is neither tcp, nixl nor nixl:BACKEND"):
        settings_from_mapping({"agent": {"transport": transport}})


def test_nixl_does_not_encrypt():
    with pytest.raises(SettingsError, match=r"agent\.transport: NIXL does not encrypt"):
        settings_from_mapping({"agent": {"transport": "nixl", "tls": "/tls"}})


def test_wrong_value_is_not_also_reported_as_a_contradiction():
    assert problems({"memory": {"every": "x"}, "durable": {"every": 3}}).count(";") == 0
    assert problems({"enabled": False, "durable": {"url": 3.5j}}).count(";") == 0


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("agent", "budget", "9" * 400),
        ("agent", "budget", "0"),
        ("agent", "budget", "101%"),
        ("agent", "budget", "64K\u0131"),  # a letter that only looks like an i when case is ignored
        ("durable", "part_size", "9" * 400),
        ("durable", "part_size", "64\u212a"),  # the kelvin sign
        ("durable", "part_size", 0),
        ("durable", "bandwidth", "-5"),
        ("agent", "http", "localhost:99999"),
        ("agent", "http", ":80"),
        ("agent", "directory", "arena"),
        ("agent", "directory", "/dev/shm/" + "x" * 100),
        ("agent", "job_ttl_s", float("nan")),
        ("memory", "wait_s", float("inf")),
        ("durable", "retry_s", 1e300),
        ("durable", "timeout_s", 0),
        ("durable", "keep_last", -1),
        ("durable", "keep_last", 1 << 5000),
        ("durable", "url", "s3://[bucket"),
        ("durable", "url", True),
        ("durable", "options", {"a": [1 << 20_000]}),
        ("durable", "options", "x"),
        ("durable", "compress", "gzip"),
        ("memory", "every", None),
        ("memory", "every", 1.5),
    ],
)
def test_a_bad_value_names_its_key(section, key, value):
    assert problems({section: {key: value}}).startswith(f"{section}.{key}: ")


def test_steps_that_are_never_in_memory_cannot_become_durable():
    assert problems({"memory": {"every": 4}, "durable": {"every": 6}}).startswith("durable.every: 6")
    assert settings_from_mapping({"memory": {"every": 4}, "durable": {"every": 8}}).durable.every == 8


def test_unknown_prefixed_variables_are_errors_and_other_variables_ignored():
    with pytest.raises(SettingsError, match="TIEREDCKPT_MEMRY_EVERY: no such setting; did you mean TIEREDCKPT_MEMORY_"):
        load_settings({"TIEREDCKPT_MEMRY_EVERY": "1"})
    assert load_settings({"TIERED_EVERY": "x", "PATH": "/bin"}) == Settings()


def test_a_section_that_the_file_only_names_takes_the_environment(config):
    assert config("durable:\n", TIEREDCKPT_DURABLE_URL="s3://b/p").durable.url == "s3://b/p"
    assert config("durable:\n").durable == DurableSettings()


def test_option_without_a_value_is_refused():
    with pytest.raises(SettingsError, match=r"TIEREDCKPT_DURABLE_OPTIONS: 'region' has no value"):
        load_settings({"TIEREDCKPT_DURABLE_OPTIONS": "region,endpoint=x"})


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5000,
        "a: 2026-99-99",
        "a: !!float x",
        'a: !!int ""',
        "a: !!timestamp x",
        "a: " + "9" * 5000,
        "agent: !!python/object:os.system x",
        b"\xff\xfe\x00",
        b"a: \x01",
        "- agent",
        "just words",
        "? {a: b}\n: c",
        "&a [*a]",
        "agent: &a {options: *a}",
        "agent: 7",
    ],
    ids=range(15),
)
def test_invalid_configuration_files_are_refused(config, text):
    with pytest.raises(SettingsError):
        config(text)


def test_empty_config_file_is_valid_and_a_missing_one_refused(config, tmp_path):
    assert config("") == config("# nothing\n") == Settings()
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(SettingsError, match=f"TIEREDCKPT_CONFIG={path} cannot be read"):
            load_settings({"TIEREDCKPT_CONFIG": str(path)})


def test_overrides_are_checked_like_the_rest():
    base = settings_from_mapping({"durable": {"url": "s3://b", "options": {"region": "eu"}}})
    changed = override_settings(base, durable={"every": 5}, memory={"every": 5})
    assert (changed.durable.url, changed.durable.every, changed.memory.every) == ("s3://b", 5, 5)
    assert changed.durable.options == {"region": "eu"}
    with pytest.raises(SettingsError, match=r"durable\.evry: no such key"):
        override_settings(base, durable={"evry": 5})
    with pytest.raises(SettingsError, match="turbo: no such key"):
        override_settings(base, turbo={"on": 1})
    assert override_settings(base) == base


def test_settings_are_frozen():
    for part in (Settings(), AgentSettings(), MemorySettings(), DurableSettings()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, dataclasses.fields(part)[0].name, "changed")


def test_the_agents_directory_is_this_users_own_unless_named():
    assert Settings().agent_directory == Path("/dev/shm") / f"tieredckpt-{os.getuid()}"
    assert settings_from_mapping({"agent": {"directory": "/dev/shm/mine"}}).agent_directory == Path("/dev/shm/mine")


@pytest.mark.parametrize(("ranks", "configured"), [("1", 0), ("10000", 0), ("0", 0), ("two", 0), ("4", 3)])
def test_copy_threads_default_to_one_to_eight(ranks, configured):
    found = copy_thread_count(
        settings_from_mapping({"memory": {"copy_threads": configured}}), {"LOCAL_WORLD_SIZE": ranks}
    )
    assert found == configured if configured else 1 <= found <= 8


# -- any input at all ---------------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["50%", "1e9", "64MiB", "0x10", "s3://b/p", "/d", "file://", "[::1]:0", "a:b", "wait", "zstd"])
)
trees = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3))
known_trees = st.fixed_dictionaries(
    {},
    optional={
        "enabled": trees,
        **{
            name: st.fixed_dictionaries({}, optional={f.name: trees for f in dataclasses.fields(kind)}) | trees
            for name, kind in SECTIONS.items()
        },
    },
)


@given(known_trees | st.dictionaries(scalars, trees, max_size=3))
def test_a_tree_gives_settings_or_a_settings_error(tree):
    with contextlib.suppress(SettingsError):
        found = settings_from_mapping(tree)
        assert override_settings(found) == found


names = st.sampled_from([f"TIEREDCKPT_{s}_{k}".upper() for s, k in KEYS] + ["TIEREDCKPT_ENABLED", "TIEREDCKPT_", "X"])


@given(st.dictionaries(names, st.text(max_size=20) | st.sampled_from(["1", "50%", "=", "a=b,,c=d"]), max_size=4))
def test_an_environment_gives_settings_or_a_settings_error(environ):
    with contextlib.suppress(SettingsError):
        load_settings(environ)


files = (
    st.binary(max_size=60)
    | trees.map(lambda tree: yaml.dump(tree).encode())
    | st.text("&*!{}[]:- \n'0a", max_size=40).map(str.encode)
)


@given(files)
def test_a_file_gives_settings_or_a_settings_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(data)
    with contextlib.suppress(SettingsError):
        load_settings({"TIEREDCKPT_CONFIG": str(path)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("agent: {budget: [1\n", "line 2, column 1: expected ',' or ']', but got '<stream end>'"),
        ("agent: a: b\n", "line 1, column 9: mapping values are not allowed here"),
        ("agent:\n  directory: a\0b\n", "line 2, column 15: the character '\\x00' is not allowed"),
        ("agent: !!python/name:os.system\n", "line 1, column 8: could not determine a constructor"),
        ("since: 2024-05-99\n", "day is out of range for month"),
        ("[" * 5000, "recursion"),
    ],
)
def test_yaml_errors_name_line_and_column(tmp_path, text, said):
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings({"TIEREDCKPT_CONFIG": str(file)})
    assert f"TIEREDCKPT_CONFIG={file} is not YAML: " in str(caught.value)
    assert said in str(caught.value)
    assert "unicode string" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("TIEREDCKPT_DURABLE_ULR", "did you mean TIEREDCKPT_DURABLE_URL?"),
        ("TIEREDCKPT_DURABEL_URL", "did you mean TIEREDCKPT_DURABLE_URL?"),
        ("TIEREDCKPT_DURABLEURL", "did you mean TIEREDCKPT_DURABLE_URL?"),
        ("TIEREDCKPT_CONFG", "did you mean TIEREDCKPT_CONFIG?"),
        ("TIEREDCKPT_XYZZY", "known are TIEREDCKPT_AGENT_..., TIEREDCKPT_MEMORY_..."),
        ("TIEREDCKPT_MEMORY_XYZZY", "known are TIEREDCKPT_MEMORY_EVERY"),
    ],
)
def test_misspelled_variable_gets_one_short_suggestion(name, hint):
    with pytest.raises(SettingsError) as caught:
        load_settings({name: "1"})
    said = str(caught.value)
    assert said.startswith(f"{name}: no such setting; {hint}")
    assert len(said) < 600


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("durable: {ulr: /x}", "durable.ulr: no such key; did you mean durable.url?"),
        ("durabel: {url: /x}", "durabel: no such key; did you mean durable?"),
        ("agent: {on_busy: wait}", "agent.on_busy: no such key; known are directory, "),
    ],
)
def test_misspelled_key_gets_a_suggestion(config, text, hint):
    with pytest.raises(SettingsError) as caught:
        config(text)
    assert str(caught.value).startswith(hint)


def test_misspelled_prefix_is_warned_of_once(caplog):
    for _ in range(2):
        load_settings({"TIERDCKPT_DURABLE_URL": "/x", "TIERED_EVERY": "x", "TERM": "x", "TIEREDCKPT_CLUSTER": ""})
    said = [record.getMessage() for record in caplog.records]
    assert said == ["$TIERDCKPT_DURABLE_URL is ignored: did you mean $TIEREDCKPT_DURABLE_URL?"]
