"""The conclusions of ``doctor``, as a table."""

import dataclasses

import pytest

from tieredckpt.cli.findings import (
    CheckStatus,
    MemoryMeasurements,
    check_clock_skew,
    check_memory,
    loss_survivals,
    survivals_by_job,
)
from tieredckpt.settings import DurableSettings, settings_from_mapping

GIB = 1 << 30
NODE = MemoryMeasurements(
    budget=10 * GIB, total=64 * GIB, limit=None, file_system="tmpfs", size=32 * GIB, free=32 * GIB
)


@pytest.mark.parametrize(
    ("changes", "place", "budget"),
    [
        ({}, "good", "good"),
        ({"file_system": "ext4"}, "bad", "good"),
        ({"free": 9 * GIB}, "bad", "good"),
        ({"free": 9 * GIB, "arena": 2 * GIB}, "good", "good"),
        ({"budget": 60 * GIB, "free": 64 * GIB}, "good", "note"),
        ({"budget": 65 * GIB, "free": 99 * GIB}, "good", "bad"),
        ({"limit": 8 * GIB}, "good", "bad"),
        ({"limit": 12 * GIB}, "good", "note"),
        ({"limit": 128 * GIB}, "good", "good"),
        ({"size": 64 << 20, "free": 64 << 20}, "bad", "good"),
    ],
)
def test_memory(changes, place, budget):
    found = {one.subject: one for one in check_memory(dataclasses.replace(NODE, **changes), "/dev/shm/x")}
    assert (found["shared memory"].status, found["memory budget"].status) == (place, budget)
    assert all(one.hint for one in found.values() if one.status is CheckStatus.FAILED)


@pytest.mark.parametrize(
    ("skew", "signed", "verdict"),
    [(0, True, "good"), (-59, True, "good"), (100, True, "note"), (-1000, True, "bad"), (1000, False, "note")],
)
def test_clocks(skew, signed, verdict):
    assert check_clock_skew(skew, signed=signed).status == verdict


def left(tree):
    return {row.loss: row.survives for row in loss_survivals(settings_from_mapping(tree))}


def test_lost_node_leaves_no_step_without_a_durable_tier():
    assert left({})["this node or its memory"] == "nothing: there is no durable tier"
    assert "the store" not in left({})


def test_unreplicated_setup_falls_back_to_the_last_uploaded_step():
    rows = left({"durable": {"url": "s3://b/x", "every": 50}, "memory": {"every": 5}})
    assert "one step in 50 is uploaded" in rows["this node or its memory"]
    assert "s3://b/x" in rows["all nodes of the job"]
    assert "one step in 5 is sealed" in rows["the agent, killed"]
    assert rows["the store and this node"] == "nothing"


NONE, FREQUENT, RARE = DurableSettings(), DurableSettings("/a", every=5), DurableSettings("/b", every=50)
NODE_LOST = "this node or its memory"


def left_of_jobs(tree, tiers, broken=()):
    rows = survivals_by_job(settings_from_mapping(tree), tiers, broken)
    return {(row.loss, row.jobs): row.survives for row in rows}


def test_each_job_is_promised_only_its_own_durable_tier():
    rows = left_of_jobs({}, {"c": NONE, "a": FREQUENT, "b": NONE, "d": RARE}, broken={"/b"})
    assert rows[NODE_LOST, "a"] == "the newest durable step (one step in 5 is uploaded) in /a"
    assert rows[NODE_LOST, "b, c"] == "nothing: there is no durable tier"
    assert rows[NODE_LOST, "d"].startswith("nothing as it is now: /b does not work")
    assert [jobs for loss, jobs in rows if loss == "the agent, killed"] == [""]
    assert [jobs for loss, jobs in rows if loss == "the store"] == ["a", "d"]


def test_jobs_with_one_durable_tier_are_not_named():
    rows = left_of_jobs({}, {"a": FREQUENT, "b": FREQUENT})
    assert {jobs for _, jobs in rows} == {""}
    assert "in /a" in rows[NODE_LOST, ""]


def test_other_durable_tier_of_the_settings_is_promised_to_new_jobs():
    rows = left_of_jobs({"durable": {"url": "/new"}}, {"a": FREQUENT})
    assert "in /a" in rows[NODE_LOST, "a"]
    assert "in /new" in rows[NODE_LOST, "new jobs with these settings"]


def test_settings_speak_for_an_agent_without_jobs():
    assert left_of_jobs({}, {})[NODE_LOST, ""] == "nothing: there is no durable tier"
    assert "in /new" in left_of_jobs({"durable": {"url": "/new"}}, {})[NODE_LOST, ""]


def test_switched_off_only_the_store_counts():
    rows = left({"enabled": False, "durable": {"url": "/data"}})
    assert rows == {"anything but the store": "plain checkpoints in /data, every step", "the store": "nothing"}


@pytest.mark.parametrize(("seconds", "text"), [(86400, "24 h"), (3600, "1 h"), (90, "1 min"), (5400, "1 h 30 min")])
def test_time_in_memory_is_in_human_units(seconds, text):
    rows = loss_survivals(settings_from_mapping({"agent": {"job_ttl_s": seconds}}))
    assert rows[0].survives.endswith(f"for {text} after the last process exited")


def test_clock_skew_is_in_human_units():
    assert "differ by 2 h 5 min" in check_clock_skew(-7500.0, signed=True).message
    assert "differ by 20 s" in check_clock_skew(20.0, signed=True).message
