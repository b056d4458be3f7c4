"""Budgets, limits and the paths of an agent."""

import os

import pytest

from peerstore.errors import RequestError
from peerstore.settings import AgentPaths, StoreSettings, default_agent_paths, parse_budget


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30%", 300), ("100%", 1000), ("0.5%", 5), (" 64 GiB ", 64 << 30), ("1.5k", 1536), ("2GB", 2 * 10**9), ("7", 7)],
)
def test_budgets(text, expected):
    assert parse_budget(text, memory_bytes=1000) == expected


@pytest.mark.parametrize("text", ["", "much", "-1", "1e9", "0%", "100.1%", "5 %%", "1GiBs", "nan", "٣GiB"])
def test_invalid_budgets_are_refused(text):
    with pytest.raises(RequestError, match="budget"):
        parse_budget(text, memory_bytes=1000)


def test_budget_share_is_of_the_usable_memory():
    assert 0 < parse_budget("50%") <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget": "x"},
        {"budget": "0"},
        {"slots_per_part": 0},
        {"burst_slots": -1},
        {"lease_grace_s": float("inf")},
        {"job_ttl_s": float("nan")},
        {"job_ttl_s": -1.0},
    ],
)
def test_settings_that_contradict_themselves_name_the_key(wrong):
    (name,) = wrong
    with pytest.raises(RequestError, match=name):
        StoreSettings(**wrong)


def test_agent_paths_follow_the_environment(tmp_path):
    assert default_agent_paths({"PEERSTORE_DIR": str(tmp_path)}) == AgentPaths(tmp_path, explicit=True)
    assert str(default_agent_paths({}).directory).endswith(f"peerstore-{os.getuid()}")
    place = AgentPaths(tmp_path)
    assert {path.parent for path in (place.socket, place.lock, place.launch_lock, place.log)} == {tmp_path}
