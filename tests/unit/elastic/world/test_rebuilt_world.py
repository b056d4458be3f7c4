"""A coordinator that starts again learns the world from its supervisors."""

from __future__ import annotations

import pytest

from elastic.world.next_world import next_world
from elastic.world.rebuilt_world import rebuild_world
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import (
    BreakWorld,
    FinishJob,
    FormationKind,
    FormWorld,
    NodeReady,
    RejoinReport,
    RespawnRanks,
    WorldPhase,
)
from elastic.world.world_transition import REPORT_S

POLICY = ScalingPolicy(min_replicas=1, max_replicas=4, faulty_scale_down_timeout_s=30)
ABC = ("a", "b", "c")


def report(node: str, **fields: object) -> RejoinReport:
    known: dict = {
        "generation": 1,
        "local_ranks": 2,
        "spawn_count": 2,
        "epoch": 5,
        "ranked_nodes": ABC,
        "restarts": 3,
    } | fields
    return RejoinReport(node, **known)


def from_reports(*reports: RejoinReport):
    return rebuild_world(reports, POLICY, nproc=2, now_s=1000.0)


def test_rebuilt_world_with_all_members_continues():
    world, actions = from_reports(report("c"), report("a", spawn_count=4), report("b"))
    assert actions == ()
    assert (world.phase, world.epoch, world.ranked_nodes, world.restarts) == (WorldPhase.RUNNING, 5, ABC, 3)
    assert world.members["a"].spawn_count == 4


def test_single_report_with_the_members_is_enough():
    world, actions = from_reports(report("a", ranked_nodes=()), report("b"), report("c", ranked_nodes=()))
    assert (world.phase, world.ranked_nodes, actions) == (WorldPhase.RUNNING, ABC, ())


def test_node_without_a_report_is_lost():
    world, actions = from_reports(report("a"), report("c"))
    assert actions[0] == BreakWorld(5, "the new coordinator found nobody of b in the world", POLICY.abort_limit_s)
    assert (world.phase, world.restarts, world.next_tick_s) == (
        WorldPhase.FORMING,
        4,
        1000 + POLICY.abort_limit_s + REPORT_S,
    )


def test_node_without_the_newest_world_is_in_no_world():
    world, actions = from_reports(report("a"), report("b"), report("c", epoch=4, ranked_nodes=("c", "d"), ready=True))
    assert isinstance(actions[0], BreakWorld)
    assert world.members["c"].ready


def test_ranks_that_were_lost_meanwhile_are_replaced():
    _, actions = from_reports(report("a"), report("b", lost_ranks=(1,)), report("c"))
    assert actions[:2] == (
        BreakWorld(5, "rank 1 of b was lost: reported to be lost", POLICY.abort_limit_s),
        RespawnRanks("b", 1, (1,)),
    )


def test_finished_node_is_not_awaited():
    world, actions = from_reports(report("a", finished=True), report("b"), report("c", finished=True))
    assert (world.phase, world.finished_nodes, actions) == (WorldPhase.RUNNING, {"a", "c"}, ())
    _, actions = from_reports(*(report(node, finished=True) for node in ABC))
    assert actions == (FinishJob(),)


def test_a_world_that_was_being_formed_is_formed():
    world, actions = from_reports(*(report(node, ready=True) for node in ABC))
    assert isinstance(actions[-1], FormWorld)
    assert (world.epoch, world.ranked_nodes, actions[-1].kind) == (6, ABC, FormationKind.RESTART)


def test_before_the_first_world_all_just_wait():
    world, actions = from_reports(
        report("a", epoch=-1, ranked_nodes=(), ready=True), report("b", epoch=-1, ranked_nodes=())
    )
    assert (world.phase, world.epoch, actions) == (WorldPhase.FORMING, -1, ())
    assert [member.ready for member in world.members.values()] == [True, False]


def test_rebuild_without_reports():
    world, actions = from_reports()
    assert (world.phase, world.epoch, actions) == (WorldPhase.FORMING, -1, ())


@pytest.mark.parametrize("turned", [False, True])
def test_later_generation_of_a_node_wins_in_any_order(turned):
    two = [report("b"), report("b", generation=2, epoch=-1, ranked_nodes=())]
    world, _ = from_reports(report("a"), report("c"), *(two[::-1] if turned else two))
    assert (world.members["b"].generation, world.members["b"].has_ranks) == (2, False)


def test_node_with_another_rank_count_is_excluded():
    world, _ = from_reports(
        report("a"), report("b"), report("c"), report("d", local_ranks=8, epoch=-1, ranked_nodes=())
    )
    assert "d" not in world.members


def test_node_in_an_older_world_leaves_it_first():
    world, actions = from_reports(*(report(node) for node in ABC), report("d", epoch=4, ranked_nodes=("d",)))
    assert actions == (BreakWorld(4, "it was left behind", POLICY.abort_limit_s),)
    early, _ = next_world(world, NodeReady("d", 1, 2, 3), POLICY, 1001.0)
    assert not early.members["d"].ready
    late, _ = next_world(world, NodeReady("d", 1, 2, 4), POLICY, 1001.0)
    assert late.members["d"].ready
