"""The redundancy of each step, and the report of nodes that did not answer."""

import pytest

from peerstore.shard_records import VersionId
from tests.support.cluster_views import SIZE, cluster_node, cluster_status, step_inventory, version_id
from tieredckpt.agent.agent_api import DrainStatus
from tieredckpt.format.manifest import UNKNOWN_PART_COUNT
from tieredckpt.resolve_step import Tier
from tieredckpt.step_inventory import StepStatus
from tieredckpt.whatif.redundancy import (
    UnderReplicatedParts,
    held_steps,
    newest_replicated,
    node_share,
    pending_drains,
    redundancy_by_step,
    unknown_nodes,
)


def only(seen, said=None, drains=()):
    (one,) = redundancy_by_step(seen, said or step_inventory(), drains)
    return one


def test_copies_and_domains_are_those_of_the_weakest_part():
    seen = cluster_status(
        cluster_node("n0", "rack=r0", {7: [0, ~8, ~16]}, parts=17),
        cluster_node("n8", "rack=r1", {7: [8, ~0]}, parts=17),
        cluster_node("n16", "rack=r0", {7: [16, ~0]}, parts=17),
    )
    one = only(seen)
    assert (one.copies, one.domains, one.level) == (2, 1, "rack")
    assert one.describe() == "2 copies in 1 rack"
    assert one.size_bytes == 3 * SIZE
    assert one.under_replicated[0] == UnderReplicatedParts(tuple(set(range(17)) - {0, 8, 16}), ())


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (("", ""), "2 copies in 2 nodes"),
        (("zone=a", "zone=b"), "2 copies in 2 zones"),
        (("zone=a", "zone=a"), "2 copies in 1 zone"),
        (("rack=r1,zone=a", "rack=r1,zone=b"), "2 copies in 2 racks"),
        (("rack=r1", ""), "2 copies in 2 racks"),
        (("power=x", "power=x"), "2 copies in 2 nodes"),
    ],
)
def test_domains_are_those_of_the_innermost_level(labels, words):
    seen = cluster_status(
        cluster_node("n0", labels[0], {7: [0]}, parts=1), cluster_node("n1", labels[1], {7: [~0]}, parts=1)
    )
    assert only(seen).describe() == words


def test_missing_copies_are_located_with_the_worst_first():
    seen = cluster_status(
        cluster_node("n0", "", {7: [0, 1, ~2]}, parts=6),
        cluster_node("n1", "", {7: [2, 3]}, parts=6),
        cluster_node("n2", "", {7: [5]}, parts=6),
    )
    assert only(seen).under_replicated == (
        UnderReplicatedParts((4,), ()),
        UnderReplicatedParts((0, 1), ("n0",)),
        UnderReplicatedParts((3,), ("n1",)),
        UnderReplicatedParts((5,), ("n2",)),
    )
    assert only(seen).state == "torn"
    one_node = cluster_status(cluster_node("n0", "", {7: [0]}, parts=1), member_list_version=0)
    assert only(one_node).under_replicated == (), "a job on one node lacks nothing"


def test_steps_older_than_the_replicated_one_need_no_copies():
    seen = cluster_status(
        cluster_node("n0", "", {6: [0], 7: [0], 8: [0]}, parts=1, newest_replicated=version_id(7)),
        cluster_node("n1", "", {7: [~0]}, parts=1, newest_replicated=version_id(6)),
    )
    six, seven, eight = redundancy_by_step(seen, step_inventory())
    assert [one.is_replicated for one in (six, seven, eight)] == [True, True, False]
    assert [one.under_replicated for one in (six, seven, eight)] == [(), (), (UnderReplicatedParts((0,), ("n0",)),)]
    assert newest_replicated(seen) == version_id(7)


def test_a_silent_node_adds_nothing_and_is_named():
    seen = cluster_status(
        cluster_node("n0", "", {7: [0]}), cluster_node("n1", unreachable="timed out"), cluster_node("n2", verifying=3)
    )
    assert held_steps(seen)[version_id(7)].nodes == {0: ("n0",)}
    assert set(unknown_nodes(seen)) == {"n1", "n2"}
    assert unknown_nodes(seen)["n1"] == "timed out"
    assert only(seen).describe(or_more=True) == "1+ copies in 1+ nodes"


@pytest.mark.parametrize(
    ("said", "state", "durable"),
    [
        (StepStatus(version_id(7), 2, {}), "torn", False),
        (StepStatus(version_id(7), 2, {}, covered=True), "complete", False),
        (StepStatus(version_id(7), 0, {}, durable=True), "complete", True),
        (StepStatus(version_id(7), 2, {}, durable=True, quarantined="NaN"), "quarantined", True),
        (StepStatus(version_id(7), 2, {}, damaged={1: "bit flip"}), "damaged", False),
    ],
)
def test_states(said, state, durable):
    one = only(cluster_status(cluster_node("n0", "", {7: [0]})), step_inventory(said))
    assert (one.state, one.durable) == (state, durable)
    assert bool(one.under_replicated) == (not said.covered) or one.under_replicated == (
        UnderReplicatedParts((0,), ("n0",)),
    )


def test_a_step_with_an_open_number_of_parts():
    one = only(
        cluster_status(cluster_node("n0", "", {7: [0, 5]}, parts=UNKNOWN_PART_COUNT)),
        step_inventory(StepStatus(version_id(7), UNKNOWN_PART_COUNT, {}, covered=True)),
    )
    assert (one.parts, one.parts_in_memory, one.state) == (2, 2, "complete")


def test_steps_that_are_only_durable_are_there_too():
    three, seven = redundancy_by_step(cluster_status(cluster_node("n0", "", {7: [0, 1]})), step_inventory(durable=[3]))
    assert (three.version_id.version, three.state) == (3, "complete")
    assert (three.parts_in_memory, three.describe()) == (0, "none")
    assert seven.parts_in_memory == 2


def test_attempts_at_a_step_are_separate():
    again = VersionId(2, 7, 0, "b")
    assert [
        one.version_id
        for one in redundancy_by_step(cluster_status(cluster_node("n0", "", {again: [0], 7: [0, 1]})), step_inventory())
    ] == [
        version_id(7),
        again,
    ]


def test_own_and_copied_bytes_are_separate():
    held = node_share(cluster_node("n0", "", {6: [0, ~1], 7: [0]}))
    assert (held.steps, held.parts, held.own_bytes, held.copied_bytes) == (2, 3, 2 * SIZE, SIZE)


def test_durable_step_is_not_pending():
    drains = [
        DrainStatus(version_id(step), state)
        for step, state in ((5, "done"), (6, "waiting"), (7, "failed"), (8, "skipped"))
    ]
    assert [one.version_id.version for one in pending_drains(drains, step_inventory())] == [6, 7]
    assert [one.version_id.version for one in pending_drains(drains, step_inventory(durable=[6]))] == [7]


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({}, "superseded"),
        ({"torn": (version_id(6),)}, "torn"),
        ({"once_complete": version_id(6)}, "superseded"),
        ({"unreachable": {Tier.DURABLE: "timed out"}}, "unknown"),
    ],
)
def test_steps_older_than_a_complete_one_are_superseded(more, state):
    seen = cluster_status(cluster_node("n0", "", {6: [0], 7: [0, 1], 8: [1]}))
    said = step_inventory(StepStatus(version_id(6), 2, {}), StepStatus(version_id(7), 2, {}, covered=True), **more)
    six, seven, eight = redundancy_by_step(seen, said)
    assert (six.state, seven.state) == (state, "complete")
    assert eight.state == ("unknown" if state == "unknown" else "torn"), "no newer step is complete"
    assert not six.under_replicated or state != "superseded"


def test_steps_that_are_pinned_or_to_be_uploaded_are_not_superseded():
    seen = cluster_status(cluster_node("n0", "", {5: [0], 6: [0], 7: [0, 1]}))
    said = step_inventory(StepStatus(version_id(5), 2, {}, kept=True), StepStatus(version_id(7), 2, {}, covered=True))
    five, six, _ = redundancy_by_step(seen, said, [DrainStatus(version_id(6), "failed", error="no part 1")])
    assert (five.state, six.state) == ("torn", "torn")
