"""Tables of a cluster as text and JSON: 80 columns, trouble first, silent nodes not shown empty."""

import io

import pytest
from rich.console import Console

from tests.support.cluster_views import cluster_node, cluster_status, step_inventory, version_id
from tieredckpt.agent.agent_api import DrainStatus
from tieredckpt.cli.cluster_tables import cluster_json, durable_cell, step_warnings, steps_to_show, unreachable_lines
from tieredckpt.cli.top import (
    ClusterSample,
    TrafficCounters,
    count_missing_copies,
    count_steps_behind,
    render_sample,
    sample_json,
)
from tieredckpt.resolve_step import Tier
from tieredckpt.whatif.redundancy import redundancy_by_step

MIB = 1 << 20
BUSY = cluster_status(
    cluster_node("n0", "rack=r0,zone=a", {6: [0, ~1], 7: [0, ~1], 8: [0]}, newest_replicated=version_id(6)),
    cluster_node("n1", "rack=r1,zone=a", {6: [1, ~0], 7: [1], 8: []}),
    cluster_node("n2", "rack=r2,zone=b", state="suspect", unreachable="it does not answer"),
    sending="job/7 part 0 (epoch 1 a) to n1",
    sent_bytes=10 * MIB,
    lag_s=0.25,
    sees="sees 2 of 3 nodes: n0, n1; not n2 (suspected for 2 s)",
)


def looked(seen=BUSY, drains=(), at=10.0, **more):
    return ClusterSample(
        seen, step_inventory(**more), tuple(drains), TrafficCounters(at, 0, seen.sent_bytes, 0, {}), 10 * 10**9
    )


def text(seen, before=(), width=80, height=40):
    out = Console(file=io.StringIO(), width=width, height=height)
    out.print(render_sample(seen, before, height))
    return out.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_a_frame_fits(width):
    shown = text(looked(drains=[DrainStatus(version_id(7), "running", 3 * MIB, 4 * MIB)]), width=width)
    assert "…" not in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    assert "replicated step 6, 1 newer one not yet" in shown
    assert "75 % of 4.0 MiB" in shown
    assert "sending job/7 part 0" in shown
    assert "250 ms after its seal" in shown


def test_silent_node_differs_from_an_empty_one():
    lines = text(looked()).splitlines()
    (row,) = [line.split() for line in lines if line.startswith("n2")][:1]
    assert row == ["n2", "suspect", "b", "r2", "?", "?", "?", "?"]
    assert any(line.startswith("n2 is unavailable") and "does not answer" in line for line in lines)
    assert "1+ copies in 1+ racks" in text(looked())
    value = cluster_json(BUSY, step_inventory(), redundancy_by_step(BUSY, step_inventory()))
    assert value["nodes"][2]["holds"] is None
    assert value["nodes"][2]["unreachable"] == "it does not answer"
    assert value["nodes"][1]["holds"]["parts"] == 3
    assert not value["complete"]


def test_standby_node_is_marked():
    seen = cluster_status(cluster_node("n0"), cluster_node("n1", standby=True))
    assert "alive, standby" in text(looked(seen))
    value = cluster_json(seen, step_inventory(), redundancy_by_step(seen, step_inventory()))
    assert [one["standby"] for one in value["nodes"]] == [False, True]


def test_measured_path_speed_is_shown():
    fast = cluster_status(
        cluster_node("n0"),
        cluster_node("n1", path_bytes_per_s=1.5 * (1 << 30)),
        cluster_node("n2", path_bytes_per_s=3 * MIB),
    )
    lines = text(looked(fast)).splitlines()
    assert lines[3].split()[-1] == "PATH"
    assert [line.split()[-1] for line in lines[4:7]] == ["-", "GiB/s", "MiB/s"]
    assert "PATH" not in text(looked())


def test_nodes_in_trouble_are_always_shown():
    many = cluster_status(
        *(cluster_node(f"n{number:03}") for number in range(100)),
        cluster_node("n900", state="dead", unreachable="gone"),
    )
    shown = text(looked(many), height=24)
    assert shown.splitlines()[4].startswith("n900")
    assert "more nodes" in shown
    assert len(shown.splitlines()) <= 24


def test_rates_are_computed_between_samples():
    seen = looked()
    before = [TrafficCounters(8.0, 0, 4 * MIB, 0, {})]
    assert "copies out 3.0 MiB/s" in text(seen, before)
    assert sample_json(seen, before)["bytes_per_s"] == {"saved": 0, "sent": 3 * MIB, "received": 0, "drained": 0}
    assert sample_json(seen, [])["bytes_per_s"] is None


def test_missing_copies_are_counted_and_located():
    steps = redundancy_by_step(BUSY, step_inventory())
    assert (count_missing_copies(steps), count_steps_behind(BUSY, steps)) == (3, 1)
    notes = step_warnings(BUSY, steps)
    assert [note.partition("[/] ")[2] for note in notes] == [
        "part 0: 1+ of 2 copies, on n0",
        "part 1: on no node that answered",
        "part 0: 1+ of 2 copies, on n0",
    ]
    assert "up to 3 parts with too few copies" in text(looked())
    sure = cluster_status(cluster_node("n0", "", {7: [0]}), cluster_node("n1", "", {7: [1]}))
    assert step_warnings(sure, redundancy_by_step(sure, step_inventory()))[0].endswith("part 0: 1 of 2 copies, on n0")
    assert "2 parts with too few copies" in text(looked(sure))
    assert "up to" not in text(looked(sure))


@pytest.mark.parametrize(
    ("drain", "more", "cell"),
    [
        (None, {}, "no"),
        (None, {"unreachable": {Tier.DURABLE: "503"}}, "?"),
        (None, {"durable": [7]}, "yes"),
        (("running", 1, 4), {}, "pending 25 %"),
        (("waiting", 0, 4), {}, "pending"),
        (("failed", 0, 4), {}, "failed"),
        (("waiting", 0, 4), {"durable": [7]}, "yes"),
    ],
)
def test_durable_cell_shows_done_or_pending(drain, more, cell):
    said = step_inventory(**more)
    drains = [DrainStatus(version_id(7), *drain)] if drain else []
    (one,) = redundancy_by_step(cluster_status(cluster_node("n0", "", {7: [0, 1]})), said, drains)
    assert durable_cell(one, said) == cell


def test_old_durable_steps_are_counted_not_listed():
    steps = redundancy_by_step(
        cluster_status(cluster_node("n0", "", {7: [0, 1]})), step_inventory(durable=[1, 2, 3, 7])
    )
    shown, hidden = steps_to_show(steps)
    assert ([one.version_id.version for one in shown], hidden) == ([3, 7], 2)


def test_verifying_node_may_hold_more():
    (line,) = unreachable_lines(cluster_status(cluster_node("n0"), cluster_node("n1", verifying=2)))
    assert "n1" in line
    assert "may hold more" in line
