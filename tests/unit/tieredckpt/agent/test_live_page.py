"""Contents of an agent's page, in which names and errors are never markup."""

from __future__ import annotations

import pytest

from peerstore.shard_records import (
    ArenaStatus,
    DamageReport,
    JobStatus,
    ShardInfo,
    ShardKey,
    StoreStatus,
    VersionId,
)
from tests.support.page_text import PageText
from tieredckpt.agent.agent_api import DrainStatus, ProtectionStatus
from tieredckpt.agent.live_page import JobOnNode, live_page

NOW_NS = 1_800_000_000_000_000_000
INCARNATION = "0123456789abcdef"
HOSTILE = "<script>alert('x')</script>\x00&\ud800"


def group(step):
    return VersionId(7, step, 0, INCARNATION)


def shard(step, part=0, *, epoch=7, parts=2, holders=(), complete=True):
    key = ShardKey("llama", step, epoch, INCARNATION, 0, part)
    return ShardInfo(key, parts, 1 << 20, b"", NOW_NS - 4_000_000_000, complete, holders)


def job(**changes):
    given = {
        "status": JobStatus("llama", 7, 2, 2, 41, None, 40),
        "replicated": group(40),
        "protection": ProtectionStatus(40),
        "shards": [shard(40), shard(41), shard(41, 1, holders=("n2", "n1")), shard(42, complete=False)],
        "uploads": [DrainStatus(group(40), "done")],
        "peers": {
            "node": "n1",
            "sees": "sees 2 of 2 nodes: n1, n2",
            "quorum": True,
            "nodes": {"n1": "alive", "n2": "alive"},
            "partners": ["n2"],
            "sending": None,
        },
    }
    return JobOnNode(**{**given, **changes})


def page_of(*jobs, damage=(), node="n1"):
    arena = ArenaStatus(64 << 20, 16 << 20, 4 << 20, 4, 1, 1, 0)
    store = StoreStatus(arena, tuple(one.status for one in jobs), tuple(damage), {}, 0)
    return PageText(live_page(node, "tieredckpt 1.2.3", store, jobs, NOW_NS))


def test_page_has_the_steps_with_their_copies_and_uploads():
    text = page_of(job()).text
    assert "25 % of the budget" in text
    assert "protected up to step 40" in text
    assert "42 not complete yet 1 own, of 2 1.0 MiB not yet - 4 s" in text
    assert "41 complete 1 own, 1 replica, of 2 2.0 MiB not yet - 4 s" in text
    assert "40 complete 1 own, of 2 1.0 MiB yes yes 4 s" in text
    assert "This node sees 2 of 2 nodes: n1, n2." in text
    assert "n2 alive holds this node's replicas" in text


@pytest.mark.parametrize(
    ("upload", "shown"),
    [
        (DrainStatus(group(40), "running", 1 << 20, 4 << 20), "25 % of 4.0 MiB"),
        (DrainStatus(group(40), "waiting"), "waits"),
        (DrainStatus(group(40), "failed", error="no such bucket"), "failed no such bucket"),
        (DrainStatus(group(40), "skipped"), "skipped"),
    ],
)
def test_upload_is_shown_with_its_progress_or_error(upload, shown):
    assert f"yes {shown} 4 s" in page_of(job(uploads=[upload])).text.replace("  ", " ")


@pytest.mark.parametrize(
    "protection",
    [ProtectionStatus(3, NOW_NS / 1e9 - 60, 2), ProtectionStatus(3, upload_problem="no such bucket")],
)
def test_unprotected_job_is_on_top_of_the_page(protection):
    page = page_of(job(), job(protection=protection))
    assert page.text.index("1 job unprotected") < page.text.index("Memory")
    assert "newer steps would be lost with this node" in page.text


def test_lower_step_after_a_rollback_is_not_replicated():
    text = page_of(job(shards=[shard(40), shard(36, epoch=8), shard(39)])).text
    assert "36 complete 1 own, of 2 1.0 MiB not yet" in text.replace("not complete yet", "complete")
    assert "40 complete 1 own, of 2 1.0 MiB yes" in text
    assert "39 complete 1 own, of 2 1.0 MiB -" in text


def test_job_without_replicas_has_no_nodes():
    text = page_of(job(peers=None, replicated=None)).text
    assert "Nodes" not in text
    assert "40 complete 1 own, of 2 1.0 MiB - yes" in text


def test_page_is_short_for_many_jobs_steps_and_nodes():
    peers = {**job().peers, "nodes": {f"n{number}": "alive" for number in range(5000)}, "partners": []}
    many = job(shards=[shard(step) for step in range(1000)], peers=peers)
    page = page_of(*[many] * 100)
    assert "and 80 more jobs" in page.text
    assert "and 4,968 more nodes" in page.text
    assert page.names.count("tr") < 20 * 50


def test_dead_node_is_listed_first():
    peers = {**job().peers, "nodes": {**{f"n{number:03}": "alive" for number in range(100)}, "zz": "dead"}}
    assert "zz dead" in page_of(job(peers=peers)).text


def test_names_and_errors_are_not_markup():
    hostile = job(
        status=JobStatus(HOSTILE, 7, 0, 2, None, 60.0, None),
        uploads=[DrainStatus(group(40), "failed", error=HOSTILE)],
        protection=ProtectionStatus(-1, upload_problem=HOSTILE),
        peers={**job().peers, "nodes": {HOSTILE: HOSTILE}, "sees": HOSTILE, "sending": HOSTILE},
    )
    page = page_of(hostile, damage=[DamageReport(HOSTILE, HOSTILE, HOSTILE, NOW_NS)], node=HOSTILE)
    assert "script" not in page.names
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count("<script>") > 5


def test_node_without_jobs_has_a_page():
    assert "No job has saved a step here" in page_of().text
