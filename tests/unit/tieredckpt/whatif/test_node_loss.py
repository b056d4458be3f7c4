"""The outcome of losing nodes: mirror pairs, racks, the durable tier, and silent nodes."""

import pytest

from peerstore.shard_records import VersionId
from tests.support.cluster_views import cluster_node, cluster_status, step_inventory, version_id
from tieredckpt.errors import UsageError
from tieredckpt.resolve_step import StepVerdict, Tier
from tieredckpt.step_inventory import StepStatus
from tieredckpt.whatif.node_loss import LossAnalysis
from tieredckpt.whatif.redundancy import (
    QuorumAfterLoss,
    ReadSource,
    ResumeOutlook,
    cluster_failure_domains,
    find_failure_domain,
    worst_first,
)

NOT_COVERED = lambda _group, _parts: False  # noqa: E731


def foresee(seen, said=None, covers=NOT_COVERED, **more):
    """``foresee(view)("node:n1", "rack:r2")``: the outcome of losing both at once."""
    foresight = LossAnalysis(seen, said or step_inventory(), covers, **more)
    known = cluster_failure_domains(seen)

    def lose(*names):
        outcome = foresight.outcome_without([find_failure_domain(name, known) for name in names])
        return outcome, foresight.read_sources(outcome)

    return lose


PAIRS = cluster_status(
    cluster_node("n0", "rack=r0", {6: [0, ~1], 7: [0, ~1]}, parts=4),
    cluster_node("n8", "rack=r1", {6: [1, ~0], 7: [1, ~0]}, parts=4),
    cluster_node("n16", "rack=r0", {6: [2, ~3], 7: [2, ~3]}, parts=4),
    cluster_node("n24", "rack=r1", {6: [3, ~2], 7: [3]}, parts=4),
)
"""Two mirror pairs over two racks; the last copy of step 7 (part 2 on n24) is in flight."""


@pytest.mark.parametrize(
    ("lost", "step", "gone"),
    [
        (["node:n0"], 7, []),
        (["node:n8"], 7, []),
        (["node:n24"], 7, []),
        (["node:n16"], 6, [(7, (2,), ("n16",))]),
        (["node:n0", "node:n24"], 7, []),
        (["rack:r0"], 6, [(7, (2,), ("n16",))]),
        (["rack:r1"], 7, []),
        (["node:n0", "node:n8"], None, [(7, (0, 1), ("n0", "n8")), (6, (0, 1), ("n0", "n8"))]),
        (["rack:r0", "node:n24"], None, [(7, (2, 3), ("n16", "n24")), (6, (2, 3), ("n16", "n24"))]),
    ],
)
def test_mirror_pairs(lost, step, gone):
    outcome, _ = foresee(PAIRS)(*lost)
    assert outcome.step == step
    assert outcome.step_before_loss == 7
    assert [(one.version_id.version, one.parts, one.nodes) for one in outcome.lost_steps] == gone
    assert outcome.outlook is (ResumeOutlook.NOTHING if step is None else ResumeOutlook.RESUMES)
    assert not outcome.unknown


def test_each_part_is_read_from_a_remaining_node():
    outcome, reads = foresee(PAIRS)("node:n0")
    assert reads == (ReadSource((0, 1), ("n8",)), ReadSource((2,), ("n16",)), ReadSource((3,), ("n16", "n24")))
    assert (outcome.from_memory, outcome.from_durable) == (True, False)
    assert outcome.nodes == ("n0",)


def test_the_training_between_two_saves_is_lost():
    assert foresee(PAIRS)("node:n0")[0].lost_s == 0.0
    assert foresee(PAIRS)("node:n16")[0].lost_s == 1.0
    assert foresee(PAIRS)("node:n0", "node:n8")[0].lost_s is None


def test_the_durable_tier_is_fallen_back_to():
    outcome, reads = foresee(PAIRS, step_inventory(durable=[3, 5]))("node:n0", "node:n8")
    assert outcome.step == 5
    assert reads == (ReadSource((), ()),)
    assert (outcome.from_memory, outcome.from_durable) == (False, True)
    assert [one.version_id.version for one in outcome.lost_steps] == [7, 6]


def test_a_durable_step_is_read_from_both():
    outcome, reads = foresee(PAIRS, step_inventory(durable=[7]))("node:n0", "node:n8")
    assert outcome.step == 7
    assert reads == (ReadSource((0, 1), ()), ReadSource((2,), ("n16",)), ReadSource((3,), ("n16", "n24")))
    assert (outcome.from_memory, outcome.from_durable) == (True, True)
    assert outcome.lost_steps == ()


def test_newer_plain_checkpoint_is_used():
    lose = foresee(PAIRS, step_inventory(durable=[4], plain=(2, 6)))
    outcome, reads = lose("node:n0", "node:n8")
    assert (outcome.step, outcome.plain_step) == (6, 6)
    assert reads == (ReadSource((), ()),)
    assert [one.version_id.version for one in outcome.lost_steps] == [7]
    assert lose("node:n0")[0].plain_step is None


def test_quarantined_steps_are_not_resumed_from():
    bad = StepStatus(version_id(6), 4, {}, quarantined="loss is NaN")
    outcome, _ = foresee(PAIRS, step_inventory(bad, durable=[5]))("node:n16")
    assert outcome.step == 5
    assert outcome.resolution.verdicts[version_id(6)] is StepVerdict.QUARANTINED


def test_step_with_crashed_loads_is_used_only_as_the_last_resort():
    worn = StepStatus(version_id(7), 4, {}, crashed_loads=5)
    lose = foresee(PAIRS, step_inventory(worn), worn_after=5)
    assert lose("node:n0")[0].step == 6
    only = cluster_status(cluster_node("n0", "", {7: [0]}, parts=1), cluster_node("n1", "", {7: [~0]}, parts=1))
    assert foresee(only, step_inventory(worn), worn_after=5)("node:n0")[0].step == 7


def test_replicas_of_the_lost_parts_may_cover_the_state():
    seen = cluster_status(cluster_node("n0", "", {7: [0]}), cluster_node("n1", "", {7: [1]}))
    asked = []

    def covers(which, parts):
        asked.append((which, sorted(parts)))
        return True

    lose = foresee(seen, covers=covers)
    outcome, reads = lose("node:n0")
    assert outcome.step == 7
    assert asked == [(version_id(7), [1])], "asked only about what is not all there"
    assert reads == (ReadSource((1,), ("n1",)),)
    assert lose("node:n0", "node:n1")[0].outlook is ResumeOutlook.NOTHING


def test_abandoned_step_is_not_chosen():
    left, later = VersionId(1, 9, 0, "a"), VersionId(2, 8, 0, "b")
    seen = cluster_status(
        cluster_node("n0", "", {left: [0], later: [0]}, parts=1, bases={1: -1, 2: 7}),
        cluster_node("n1", "", {left: [~0], later: [~0]}, parts=1, bases={1: -1, 2: 7}),
    )
    outcome, _ = foresee(seen)("node:n0")
    assert outcome.resolution.chosen.version_id == later
    assert outcome.resolution.verdicts[left] is StepVerdict.SUPERSEDED


# -- what is not known ------------------------------------------------------------------------------------------------

QUIET = cluster_status(
    cluster_node("n0", "rack=r0", {6: [0, 1], 7: [0]}),
    cluster_node("n1", "rack=r1", state="suspect", unreachable="no answer within 10 s"),
)
"""The shards of n1 are unknown."""


def test_a_silent_node_counts_neither_as_holding_nor_as_not_holding():
    outcome, _ = foresee(QUIET)("node:n0")
    assert outcome.outlook is ResumeOutlook.UNKNOWN
    assert outcome.step is None
    assert outcome.unknown == {"n1": "no answer within 10 s"}
    assert outcome.uncertain_steps == (version_id(6), version_id(7))
    assert Tier.PEER in outcome.resolution.unreachable


def test_lost_unreachable_node_leaves_no_uncertainty():
    outcome, _ = foresee(QUIET)("node:n0", "node:n1")
    assert outcome.outlook is ResumeOutlook.NOTHING
    assert outcome.unknown == {}
    assert outcome.uncertain_steps == ()
    assert outcome.resolution.unreachable == ()


def test_newer_step_may_be_complete_with_an_unreachable_node():
    seen = cluster_status(*QUIET.nodes, cluster_node("n2", "rack=r2"))
    outcome, _ = foresee(seen)("node:n2")
    assert (outcome.step, outcome.outlook) == (6, ResumeOutlook.RESUMES)
    assert outcome.uncertain_steps == (version_id(7),)
    assert foresee(seen)("node:n2", "node:n1")[0].uncertain_steps == ()


def test_a_node_that_still_verifies_may_hold_more():
    seen = cluster_status(cluster_node("n0", "", {7: [0, 1]}), cluster_node("n1", "", {}, verifying=2))
    outcome, _ = foresee(seen)("node:n0")
    assert outcome.outlook is ResumeOutlook.UNKNOWN
    assert "2 shards" in outcome.unknown["n1"]


def test_unreachable_store_differs_from_an_empty_one():
    away = step_inventory(unreachable={Tier.DURABLE: "503"})
    outcome, _ = foresee(PAIRS, away)("rack:r0", "rack:r1")
    assert outcome.outlook is ResumeOutlook.UNKNOWN
    assert outcome.unknown == {"durable tier": "503"}
    assert foresee(PAIRS)("rack:r0", "rack:r1")[0].outlook is ResumeOutlook.NOTHING


# -- quorum -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "quorum"),
    [
        (["node:n24"], QuorumAfterLoss(True, 3, 4)),
        (["rack:r1"], QuorumAfterLoss(True, 2, 4)),  # half of them, with the lowest name
        (["rack:r0"], QuorumAfterLoss(False, 2, 4)),
        (["rack:r0", "node:n24"], QuorumAfterLoss(False, 1, 4)),
    ],
)
def test_quorum(lost, quorum):
    assert foresee(PAIRS)(*lost)[0].quorum == quorum


def test_suspected_node_does_not_count_for_quorum():
    assert foresee(cluster_status(*QUIET.nodes, cluster_node("n2")))("node:n2")[0].quorum == QuorumAfterLoss(
        False, 1, 3
    )


def test_single_node_job_has_no_quorum():
    assert (
        foresee(cluster_status(cluster_node("n0", "", {7: [0]}, parts=1), member_list_version=0))("node:n0")[0].quorum
        is None
    )


def test_quorum_consequences_are_explained():
    assert "a new run may begin" in QuorumAfterLoss(True, 2, 3).explain()
    assert "before the list of the job's nodes" in QuorumAfterLoss(False, 1, 3).explain()


# -- names and order --------------------------------------------------------------------------------------------------


def test_domains_are_nested():
    seen = cluster_status(
        cluster_node("n0", "rack=r1,zone=a"),
        cluster_node("n1", "rack=r1,zone=b"),
        cluster_node("n2", "rack=r2,zone=b,power=x"),
    )
    assert [str(one) for one in cluster_failure_domains(seen)] == [
        *("node:n0", "node:n1", "node:n2"),
        *("rack:a/r1", "rack:b/r1", "rack:r2"),
        *("zone:a", "zone:b"),
        "power:x",
    ]
    assert find_failure_domain("zone:b", cluster_failure_domains(seen)).nodes == ("n1", "n2")
    assert find_failure_domain("rack:b/r1", cluster_failure_domains(seen)).nodes == ("n1",)
    with pytest.raises(UsageError, match="more than one, say which: rack:a/r1, rack:b/r1"):
        find_failure_domain("rack:r1", cluster_failure_domains(seen))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("n0", "node: n0, n8, n16, n24; rack: r0, r1"),
        ("node:n9", "no such node; there is node: n0, n8, n16, n24"),
        ("rack:r9", "no such rack; there is rack: r0, r1"),
        ("zone:a", "no node has a zone; there is node: .*; rack: r0, r1"),
        ("", "say what it is"),
    ],
)
def test_unknown_name_error_lists_the_known_ones(name, said):
    with pytest.raises(UsageError, match=said):
        find_failure_domain(name, cluster_failure_domains(PAIRS))


def test_worst_outcome_is_listed_first():
    lose = foresee(PAIRS, step_inventory(durable=[]))
    outcomes = [lose(*names)[0] for names in (["node:n0"], ["node:n16"], ["node:n0", "node:n8"], ["rack:r1"])]
    assert [[str(one) for one in outcome.lost] for outcome in worst_first(outcomes)] == [
        ["node:n0", "node:n8"],
        ["node:n16"],
        ["node:n0"],
        ["rack:r1"],
    ]
