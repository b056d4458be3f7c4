"""Decisions on each event in each phase, and the order of the alternatives."""

from __future__ import annotations

import pytest

from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import (
    BreakWorld,
    ErrorPosition,
    EventBatch,
    FailJob,
    FinishJob,
    FormationKind,
    FormWorld,
    HangDetected,
    JobStopRequested,
    NodeFinished,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeMember,
    NodeReady,
    NodeSealed,
    NodesPreempted,
    PauseWorld,
    PromoteSpare,
    RankFault,
    RankLost,
    ReleaseNode,
    RequestedStep,
    RequestNodes,
    ResizeRequested,
    RespawnRanks,
    RespawnStragglers,
    SealedStep,
    StepSealed,
    StopJob,
    Tick,
    WorldAction,
    WorldPhase,
)
from elastic.world.world_transition import keep_node_ranks
from tests.worlds.reconciler_driver import ReconcilerDriver

FOUR = ScalingPolicy(
    min_replicas=2,
    max_replicas=4,
    scaling_timeout_s=10,
    graceful_shutdown_timeout_s=60,
    faulty_scale_down_timeout_s=30,
    restart_timeout_s=100,
)


def lost(node: str, life: int = 1) -> NodeLost:
    return NodeLost(node, life, "no heartbeat")


def rank_lost(node: str, local_rank: int = 0, births: int = 2) -> RankLost:
    return RankLost(node, 1, births, local_rank, "exit 1")


# -- the first world --------------------------------------------------------------------------------------------------


def test_world_forms_when_all_desired_nodes_are_ready():
    job = ReconcilerDriver(FOUR, "abcd")
    assert job.action_of(FormWorld) == FormWorld(0, ("a", "b", "c", "d"), 2, FormationKind.START, 0, "")
    assert (job.world.phase, job.world.world_size, job.world.next_tick_s) == (WorldPhase.RUNNING, 8, None)


def test_scaling_timeout_starts_a_smaller_job_not_below_the_minimum():
    job = ReconcilerDriver(FOUR, "a")
    assert (job.world.phase, job.world.next_tick_s) == (WorldPhase.FORMING, None)
    job.send_event(NodeJoined("b", 1, 2), at_s=5)
    job.send_event(NodeReady("b", 1, 2), at_s=7)
    assert job.world.next_tick_s == 17
    job.tick()
    assert job.action_of(FormWorld).nodes == ("a", "b")


def test_world_forms_at_once_with_the_requested_replicas():
    policy = ScalingPolicy(min_replicas=2, max_replicas=4, replicas=3)
    assert ReconcilerDriver(policy, "abc").action_of(FormWorld).nodes == ("a", "b", "c")


def test_job_fails_when_too_few_nodes_join_before_the_startup_timeout():
    job = ReconcilerDriver(ScalingPolicy(min_replicas=2, max_replicas=2, startup_timeout_s=60), "a")
    job.tick()
    assert "within 60 s, 1 of the 2 nodes needed were ready" in job.action_of(FailJob).reason


def test_a_node_with_another_number_of_ranks_is_sent_away():
    job = ReconcilerDriver(FOUR, "ab")
    assert job.send_event(NodeJoined("c", 1, 8)) == (
        ReleaseNode("c", 1, "it runs 8 ranks, all others run 2", force=True),
    )
    assert "c" not in job.world.members


def test_ranks_paused_by_a_dead_coordinator_resume():
    job = ReconcilerDriver(FOUR, "ab")
    job.tick()
    job.step_sealed("a")
    assert "last coordinator" in job.action_of(BreakWorld).reason
    job.rank_ready("a", "b")
    assert (job.action_of(FormWorld).nodes, job.action_of(FormWorld).restarts) == (("a", "b"), 0)


# -- what is tried after a loss, in this order ------------------------------------------------------------------------


def test_warm_spare_of_the_node_replaces_a_lost_rank():
    job = ReconcilerDriver(FOUR, "abcd", spares=1)
    assert job.send_event(rank_lost("b")) == (
        BreakWorld(0, "rank 0 of b was lost: exit 1", FOUR.abort_limit_s),
        PromoteSpare("b", 1, 0),
    )
    job.rank_ready("a", "c", "d")
    assert job.world.phase is WorldPhase.FORMING
    job.rank_ready("b")
    assert job.action_of(FormWorld) == FormWorld(
        1, ("a", "b", "c", "d"), 2, FormationKind.RESPAWN, 1, "rank 0 of b was lost: exit 1"
    )


def test_standby_node_replaces_a_lost_node_and_no_other_node_moves():
    job = ReconcilerDriver(FOUR, "abcd")
    job.node_joins("e")
    assert job.send_event(lost("b")) == (BreakWorld(0, "b was lost: no heartbeat", FOUR.abort_limit_s),)
    job.rank_ready("a", "c", "d")
    assert (job.action_of(FormWorld).nodes, job.action_of(FormWorld).kind) == (
        ("a", "e", "c", "d"),
        FormationKind.REPLACE,
    )


def test_standby_node_is_preferred_to_a_new_process():
    job = ReconcilerDriver(FOUR, "abcd")
    job.node_joins("e")
    assert job.send_event(rank_lost("b", 1))[1:] == (RespawnRanks("b", 1, (1,)),)
    job.rank_ready("a", "c", "d")
    assert job.action_of(FormWorld).nodes == ("a", "e", "c", "d")
    job.rank_ready("b")
    assert job.world.standby == ("b",)


TWO = ScalingPolicy(max_replicas=2, scaling_timeout_s=5, restart_timeout_s=100, faulty_scale_down_timeout_s=30)


def test_node_that_knows_the_memory_tier_is_awaited():
    """Standby nodes were in no world: they would find no step and start from the beginning."""
    job = ReconcilerDriver(TWO, "ab")
    job.node_joins("c")
    job.send_event(rank_lost("a"))
    job.send_event(lost("b"))
    job.node_joins("b", life=2)
    assert job.world.phase is not WorldPhase.RUNNING
    job.rank_ready("a")
    assert job.action_of(FormWorld).nodes == ("a", "c")


def test_node_that_shared_a_world_with_it_is_awaited():
    job = ReconcilerDriver(TWO, "ab")
    job.node_joins("c")
    job.send_event(rank_lost("a"))
    job.rank_ready("b")
    assert job.action_of(FormWorld).nodes == ("c", "b")
    job.send_event(rank_lost("b"))
    job.send_event(lost("c"))
    assert job.world.phase is not WorldPhase.RUNNING
    job.node_joins("c", life=2)
    job.rank_ready("a")  # it was in the first world, with b
    assert set(job.action_of(FormWorld).nodes) == {"a", "c"}


def test_node_without_a_world_shared_with_the_newest_is_not_awaited():
    job = ReconcilerDriver(TWO, "ab")
    job.node_joins("c")
    job.send_event(lost("a"))
    job.rank_ready("b")
    job.node_joins("d")
    job.send_event(rank_lost("b"))
    job.rank_ready("c")
    assert set(job.action_of(FormWorld).nodes) == {"c", "d"}
    job.node_joins("e")
    job.send_event(lost("c"))
    job.rank_ready("d")
    assert set(job.action_of(FormWorld).nodes) == {"d", "e"}
    job.send_event(rank_lost("d"))
    job.send_event(rank_lost("e"))
    job.node_joins("f")
    job.rank_ready("b")  # its last world was the one with c
    assert job.world.phase is not WorldPhase.RUNNING
    job.rank_ready("e")
    assert "e" in job.action_of(FormWorld).nodes


def test_unready_awaited_node_gets_no_place():
    job = ReconcilerDriver(TWO, "ab")
    job.node_joins("c")
    job.node_joins("d")
    job.send_event(rank_lost("a"))
    job.rank_ready("b")
    assert job.action_of(FormWorld).nodes == ("c", "b")
    job.node_joins("e")
    job.send_event(lost("b"))
    job.send_event(lost("c"))
    assert set(job.action_of(FormWorld).nodes) == {"d", "e"}


def test_world_forms_without_the_awaited_node_after_the_timeout():
    job = ReconcilerDriver(TWO, "ab")
    job.node_joins("c")
    job.send_event(rank_lost("a"))
    job.send_event(lost("b"))
    job.node_joins("b", life=2)
    while job.world.phase is not WorldPhase.RUNNING:
        job.tick()
    assert set(job.action_of(FormWorld).nodes) == {"b", "c"}
    assert job.now_s >= TWO.restart_timeout_s
    assert "a" not in job.world.members


def test_only_node_of_a_job_is_not_replaced_by_a_standby():
    job = ReconcilerDriver(ScalingPolicy(max_replicas=1), "a")
    job.node_joins("b")
    job.send_event(rank_lost("a"))
    assert job.world.phase is not WorldPhase.RUNNING
    job.rank_ready("a")
    assert job.action_of(FormWorld).nodes == ("a",)


def test_healthy_ranks_are_awaited_although_standbys_exist():
    job = ReconcilerDriver(FOUR, "abcd")
    job.node_joins("e")
    job.send_event(RankFault("b", 1, 0, 1, "a loss that is not finite"))
    job.rank_ready("a", "b", "c")
    assert job.world.phase is WorldPhase.FORMING
    job.rank_ready("d")
    assert (job.action_of(FormWorld).nodes, job.action_of(FormWorld).kind) == (
        ("a", "b", "c", "d"),
        FormationKind.RESTART,
    )


def test_lost_rank_without_spares_is_respawned_beyond_the_timeout():
    job = ReconcilerDriver(FOUR, "abcd")
    assert job.send_event(rank_lost("b"))[1:] == (RespawnRanks("b", 1, (0,)),)
    job.rank_ready("a", "c", "d")
    job.send_event(Tick(), at_s=50)
    assert job.world.phase is WorldPhase.FORMING
    job.rank_ready("b")
    assert job.action_of(FormWorld).kind is FormationKind.RESPAWN


def test_replacement_node_is_requested_and_awaited():
    job = ReconcilerDriver(FOUR, "abcd")
    assert job.send_event(lost("b"), at_s=100)[1:] == (RequestNodes(1, "b was lost: no heartbeat"),)
    job.rank_ready("a", "c", "d")
    assert (job.world.phase, job.world.next_tick_s) == (WorldPhase.WAITING, 130)
    job.node_joins("e")
    assert job.action_of(FormWorld).nodes == ("a", "e", "c", "d")


def test_world_shrinks_after_the_scale_down_timeout():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(lost("b"), at_s=100)
    job.rank_ready("a", "c", "d")
    job.tick()
    assert (job.now_s, job.action_of(FormWorld).nodes, job.action_of(FormWorld).kind) == (
        130,
        ("a", "c", "d"),
        FormationKind.SHRINK,
    )


def test_world_shrinks_only_to_an_allowed_size_with_the_rest_on_standby():
    job = ReconcilerDriver(ScalingPolicy(min_replicas=2, max_replicas=4, replica_discrete_values=(2, 4)), "abcd")
    job.send_event(lost("b"))
    job.rank_ready("a", "c", "d")
    job.tick()
    assert (job.action_of(FormWorld).nodes, job.world.standby) == (("a", "c"), ("d",))


def test_job_stops_below_the_minimum_with_its_reason():
    job = ReconcilerDriver(FOUR, "ab")
    job.tick()
    job.send_event(lost("b"))
    job.rank_ready("a")
    job.tick()
    assert job.action_of(StopJob).reason == "b was lost: no heartbeat; 1 node is left, at least 2 are needed"
    assert (job.world.phase, job.world.next_tick_s) == (WorldPhase.STOPPED, None)
    assert job.send_event(NodeJoined("c", 1, 2)) == ()


def test_job_does_not_stop_while_a_node_is_warming_up():
    job = ReconcilerDriver(FOUR, "ab")
    job.tick()
    job.send_event(lost("b"))
    job.rank_ready("a")
    job.send_event(NodeJoined("c", 1, 2))
    job.send_event(Tick(), at_s=60)
    assert job.world.phase is WorldPhase.WAITING
    job.rank_ready("c")
    assert job.action_of(FormWorld).nodes == ("a", "c")


# -- what is one, and what is old -------------------------------------------------------------------------------------


def test_several_faults_in_one_transition_form_a_single_world():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(rank_lost("b"))
    for event in (
        rank_lost("b", 1),
        RankFault("a", 1, 0, 0, "connection reset"),
        HangDetected(0, "no step"),
        rank_lost("c"),
    ):
        assert not [action for action in job.send_event(event) if isinstance(action, (BreakWorld, FormWorld))]
    job.rank_ready("a", "b", "c", "d")
    assert (job.action_of(FormWorld).epoch, job.action_of(FormWorld).restarts) == (1, 1)


def test_simultaneous_events_form_one_world():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(EventBatch((lost("a"), rank_lost("b"), lost("c"))))
    assert job.action_of(BreakWorld).epoch == 0
    assert job.action_of(RespawnRanks).node == "b"
    assert job.action_of(RequestNodes).nodes == 2


@pytest.mark.parametrize(
    "event",
    [
        rank_lost("b"),
        RankFault("b", 1, 0, 0, "late"),
        HangDetected(0, "late"),
        NodeReady("b", 1, 2, 0),
        NodeReady("b", 1, 3, 0),
        NodeJoined("b", 1, 2),
        NodeLost("b", 0, "an earlier life"),
        NodeFinished("b", 1, 0),
        NodeLost("x", 1, "never seen"),
        NodesPreempted(("x",), 1000.0),
        ResizeRequested(1),
        Tick(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_of_an_older_world_change_nothing(event):
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(rank_lost("b"))
    job.rank_ready("a", "b", "c", "d")
    assert job.world.epoch == 1
    assert job.send_event(event) == ()
    assert (job.world.phase, job.world.epoch) == (WorldPhase.RUNNING, 1)


def test_a_node_is_not_ready_before_its_lost_process_has_been_replaced():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(rank_lost("b"))
    job.rank_ready("a", "c", "d")
    job.rank_ready("b", births=2)
    assert job.world.phase is WorldPhase.FORMING
    job.rank_ready("b", births=3)
    assert job.world.phase is WorldPhase.RUNNING


def test_lost_generation_cannot_rejoin_and_the_next_one_can():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(lost("b"))
    job.send_event(NodeJoined("b", 1, 2))
    assert "b" not in job.world.members
    job.send_event(NodeJoined("b", 2, 2))
    assert job.world.members["b"].generation == 2


def test_a_supervisor_that_began_again_has_lost_its_ranks():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(NodeJoined("b", 2, 2))
    assert job.action_of(BreakWorld).reason == "b was lost: its supervisor began again"
    job.rank_ready("a", "c", "d", "b")
    assert job.action_of(FormWorld).nodes == ("a", "b", "c", "d")


def test_ranks_that_leave_unprompted_break_the_world():
    job = ReconcilerDriver(FOUR, "abcd")
    job.rank_ready("c")
    assert "without a reported fault" in job.action_of(BreakWorld).reason


def test_a_process_that_was_replaced_unasked_breaks_the_world():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(RankFault("a", 1, 0, 0, "x"))
    job.rank_ready("a", "b", "c", "d")
    job.send_event(NodeReady("c", 1, 3, 0))
    assert "were replaced" in job.action_of(BreakWorld).reason


# -- hangs, and ranks that do not come --------------------------------------------------------------------------------


def test_hanging_process_is_replaced():
    job = ReconcilerDriver(FOUR, "abcd")
    assert job.send_event(HangDetected(0, "no step for 300 s", "c", 1)) == (
        BreakWorld(0, "rank 1 of c hangs: no step for 300 s", FOUR.leave_hang_s),
        RespawnRanks("c", 1, (1,)),
    )
    assert job.send_event(RankLost("c", 1, 2, 1, "killed")) == ()


def test_ranks_missing_after_a_hang_are_respawned_and_then_dropped():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(HangDetected(0, "no step for 300 s"), at_s=10)
    job.rank_ready("a", "b", "d")
    job.send_event(Tick(), at_s=15)
    assert job.actions == ()
    job.send_event(Tick(), at_s=16)
    assert job.actions == (RespawnStragglers("c", 1),)
    job.send_event(Tick(), at_s=116)
    why = "its ranks did not come, nor others in their place within 100 s"
    assert job.action_of(ReleaseNode) == ReleaseNode("c", 1, why, force=True)
    job.send_event(Tick(), at_s=200)
    assert job.action_of(FormWorld).nodes == ("a", "b", "d")


def test_leave_timeout_replaces_a_rank_after_a_fault():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(RankFault("a", 1, 0, 0, "x"), at_s=10)
    job.rank_ready("a", "b", "d")
    assert job.send_event(Tick(), at_s=21) == ()
    assert job.send_event(Tick(), at_s=22) == (RespawnStragglers("c", 1),)


def test_standby_node_with_repeatedly_failing_processes_is_released():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(NodeJoined("e", 1, 2))
    for births in (2, 3):
        assert job.send_event(rank_lost("e", births=births)) == (RespawnRanks("e", 1, (0,)),)
    assert "3 times before it was ready" in job.send_event(rank_lost("e", births=4))[0].reason
    assert job.world.restarts == 0


# -- more nodes -------------------------------------------------------------------------------------------------------


def test_world_grows_after_the_scaling_timeout():
    job = ReconcilerDriver(FOUR, "ab")
    job.tick()
    began_s = job.now_s
    for number, node in enumerate("cde"):
        job.send_event(NodeJoined(node, 1, 2), at_s=began_s + 50 + number)
        job.rank_ready(node)
    assert (job.world.phase, job.world.next_tick_s) == (WorldPhase.RUNNING, began_s + 60)
    job.tick()
    assert job.action_of(PauseWorld) == PauseWorld(0, "4 nodes are available", job.now_s + 60)
    job.step_sealed("a", "b")
    job.rank_ready("a", "b")
    assert (job.action_of(FormWorld).nodes, job.action_of(FormWorld).kind) == (("a", "b", "c", "d"), FormationKind.GROW)
    assert job.world.restarts == 0


def test_world_does_not_grow_during_the_snooze_after_a_fault():
    policy = ScalingPolicy(
        min_replicas=1, max_replicas=2, scaling_timeout_s=5, faulty_scale_down_timeout_s=10, scale_up_snooze_s=300
    )
    job = ReconcilerDriver(policy, "ab")
    job.send_event(lost("b"), at_s=100)
    job.rank_ready("a")
    job.tick()
    assert job.now_s == 110
    job.send_event(NodeJoined("b", 2, 2), at_s=120)
    job.rank_ready("b")
    assert job.world.next_tick_s == 410
    job.tick()
    assert job.action_of(PauseWorld).stop is False


def test_ranks_that_miss_the_pause_are_killed_and_the_change_continues():
    job = ReconcilerDriver(FOUR, "abc")
    job.tick()
    job.node_joins("d")
    job.tick()
    job.rank_ready("a", "b")
    job.tick()
    assert job.action_of(BreakWorld).reason == "4 nodes are available, and the ranks of c did not stop in time"
    assert job.action_of(RespawnStragglers).node == "c"
    assert (job.action_of(FormWorld).nodes, job.world.restarts) == (("a", "b", "d"), 1)
    job.rank_ready("c")
    assert job.world.standby == ("c",)


def test_a_change_that_failed_is_tried_again_later_each_time():
    job = ReconcilerDriver(FOUR, "abc")
    job.tick()
    waits_s = []
    for _ in range(3):
        job.send_event(NodeJoined("d", job.world.departed.get("d", 0) + 1, 2))
        job.rank_ready("d")
        since_s = job.now_s
        job.tick()
        waits_s.append(job.now_s - since_s)
        assert job.action_of(PauseWorld)
        job.send_event(NodeLeft("d", job.world.members["d"].generation))
        job.tick()
        job.rank_ready("a", "b", "c")
    assert waits_s == [10, 10 + 60, 10 + 180]


def test_a_fault_ends_a_pause():
    job = ReconcilerDriver(FOUR, "abc")
    job.tick()
    job.node_joins("d")
    job.tick()
    job.rank_ready("a")
    job.send_event(rank_lost("b"))
    assert job.action_of(BreakWorld).epoch == 0
    job.rank_ready("c")
    assert (job.action_of(FormWorld).nodes, job.world.epoch) == (("a", "d", "c"), 1)


# -- fewer nodes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("deadline_s", "until_s"), [(1000.0, 60.0), (20.0, 20.0)])
def test_preempted_node_is_released_after_all_sealed(deadline_s, until_s):
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(NodesPreempted(("b",), deadline_s))
    assert job.action_of(PauseWorld) == PauseWorld(0, "b preempted", until_s)
    job.step_sealed("a", "b")
    assert job.actions == ()
    job.rank_ready("a", "c", "d")
    assert job.action_of(ReleaseNode) == ReleaseNode("b", 1, "preempted")
    assert (job.action_of(FormWorld).nodes, job.world.restarts) == (("a", "c", "d"), 0)


def test_preempted_node_is_replaced_by_a_standby():
    job = ReconcilerDriver(FOUR, "abcd")
    job.node_joins("e")
    job.send_event(NodesPreempted(("b",), 100.0))
    job.step_sealed("b")
    job.rank_ready("a", "c", "d")
    assert (job.action_of(FormWorld).nodes, job.action_of(FormWorld).kind) == (
        ("a", "e", "c", "d"),
        FormationKind.REPLACE,
    )


def test_preempted_node_that_misses_its_deadline_is_released_by_force():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(NodesPreempted(("b",), 20.0))
    job.step_sealed("a", "c", "d")
    job.rank_ready("a", "c", "d")
    job.tick()
    assert job.now_s == 20
    assert job.action_of(ReleaseNode) == ReleaseNode("b", 1, "preempted, and its deadline has passed", force=True)
    assert job.action_of(FormWorld).nodes == ("a", "c", "d")


def test_a_deadline_nearer_than_the_first_shortens_the_pause():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(NodesPreempted(("b",), 50.0))
    job.send_event(NodesPreempted(("c",), 30.0))
    assert job.action_of(PauseWorld).deadline_s == 30
    job.send_event(NodesPreempted(("c",), 40.0))
    assert job.actions == ()


def test_preempted_standby_is_released_at_once():
    job = ReconcilerDriver(FOUR, "abcd")
    job.node_joins("e")
    assert job.send_event(NodesPreempted(("e",), 100.0)) == (ReleaseNode("e", 1, "preempted"),)


def test_preemption_below_the_minimum_requests_nodes_and_seals_in_time():
    job = ReconcilerDriver(FOUR, "ab")
    job.tick()
    job.send_event(NodesPreempted(("b",), 500.0), at_s=20)
    assert job.actions == (RequestNodes(1, "b preempted, too few are left"),)
    job.tick()
    assert job.action_of(PauseWorld) == PauseWorld(
        0, "b preempted: 1 node is left, at least 2 are needed", 500, stop=True
    )
    job.step_sealed("a", "b")
    assert job.action_of(StopJob).reason == "b preempted: 1 node is left, at least 2 are needed"
    assert job.now_s == 440


def test_preempted_job_continues_when_a_replacement_joins_in_time():
    job = ReconcilerDriver(FOUR, "ab")
    job.tick()
    job.send_event(NodesPreempted(("b",), 500.0))
    job.node_joins("c")
    assert job.action_of(PauseWorld).stop is False
    job.step_sealed("b")
    job.rank_ready("a")
    assert job.action_of(FormWorld).nodes == ("a", "c")


def test_a_person_may_want_fewer_and_more_again():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(ResizeRequested(3))
    assert job.action_of(PauseWorld).reason == "at most 3 nodes are wanted"
    job.rank_ready("a", "b", "c", "d")
    assert (job.action_of(FormWorld).nodes, job.world.standby) == (("a", "b", "c"), ("d",))
    job.send_event(ResizeRequested(None))  # at once: the job does not collect nodes first
    assert job.action_of(PauseWorld).reason == "4 nodes are available"
    job.rank_ready("a", "b", "c")
    assert job.action_of(FormWorld).nodes == ("a", "b", "c", "d")


def test_with_no_time_for_a_graceful_shutdown_the_world_just_ends():
    job = ReconcilerDriver(ScalingPolicy(min_replicas=1, max_replicas=2, graceful_shutdown_timeout_s=0), "ab")
    job.send_event(NodesPreempted(("b",), 100.0))
    assert job.action_of(BreakWorld).reason == "b preempted"
    job.rank_ready("a")
    assert (job.action_of(FormWorld).nodes, job.world.restarts) == (("a",), 0)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_stop_request_seals_all_ranks_first():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(JobStopRequested("maintenance", 25.0))
    assert job.action_of(PauseWorld) == PauseWorld(0, "maintenance", 25.0, stop=True)
    job.step_sealed("a", "b", "c")
    job.send_event(NodeFinished("d", 1, 0))
    assert job.action_of(StopJob) == StopJob("maintenance")


def test_stop_request_with_a_lost_rank_stops_and_reports_unsaved_state():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(JobStopRequested("maintenance"))
    job.send_event(rank_lost("b"))
    assert job.action_of(StopJob).reason == "maintenance; not all was saved: rank 0 of b was lost: exit 1"


def test_rank_that_ends_after_sealing_for_a_stop_is_not_lost():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(JobStopRequested("maintenance"))
    job.step_sealed("b")
    assert job.send_event(rank_lost("b")) == ()
    assert job.send_event(NodeLeft("b", 1)) == ()
    job.step_sealed("a", "c", "d")
    assert job.action_of(StopJob)


def test_stop_request_without_a_world_stops_at_once():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(lost("a"))
    assert job.send_event(JobStopRequested("maintenance")) == (StopJob("maintenance"),)


def test_pause_becomes_a_stop():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(NodesPreempted(("b",), 50.0))
    job.send_event(JobStopRequested("maintenance"))
    assert job.action_of(PauseWorld) == PauseWorld(0, "maintenance", 50.0, stop=True)


def test_job_finishes_when_all_nodes_report_it_and_later_exits_are_ignored():
    job = ReconcilerDriver(FOUR, "abcd")
    for node in "abc":
        job.send_event(NodeFinished(node, 1, 0))
    assert job.send_event(rank_lost("a")) == ()
    assert job.send_event(NodeLeft("b", 1)) == ()
    assert job.send_event(NodeFinished("d", 1, 0)) == (FinishJob(),)
    assert job.world.phase is WorldPhase.FINISHED


def test_job_that_finishes_at_the_pause_step_is_finished():
    job = ReconcilerDriver(FOUR, "abcd")
    job.send_event(NodesPreempted(("b",), 100.0))
    assert job.action_of(PauseWorld)
    for node in "abc":
        assert job.send_event(NodeFinished(node, 1, 0)) == ()
    assert job.send_event(NodeFinished("d", 1, 0)) == (FinishJob(),)
    assert job.world.phase is WorldPhase.FINISHED


# -- too often --------------------------------------------------------------------------------------------------------


def test_restart_limit_escalates_to_full_restarts_and_then_fails_the_job():
    policy = ScalingPolicy(num_restart_before_full_job_restart=1, max_full_job_restarts=1)
    job = ReconcilerDriver(policy, "a")
    seen = []
    while not job.world.phase.is_over:
        job.send_event(RankFault("a", 1, job.world.epoch, 0, "a loss that is not finite"))
        seen.append(type(job.actions[-1]))
        if not job.world.phase.is_over:
            job.rank_ready("a")
    assert seen == [BreakWorld, RespawnRanks, BreakWorld, FailJob]
    assert job.action_of(FailJob) == FailJob(
        "rank 0 of a reported a fault: a loss that is not finite",
        "4 faults; at most 1 restart of all processes allowed within 3600 s (max_full_job_restarts, eval_period_s)",
    )


def test_old_faults_do_not_count():
    job = ReconcilerDriver(
        ScalingPolicy(num_restart_before_full_job_restart=1, max_full_job_restarts=0, eval_period_s=100), "a"
    )
    for at_s in (100, 250, 400):
        job.send_event(RankFault("a", 1, job.world.epoch, 0, "x"), at_s=at_s)
        job.rank_ready("a")
    assert (job.world.phase, job.world.restarts) == (WorldPhase.RUNNING, 3)


def test_total_restarts_of_a_job_are_limited():
    job = ReconcilerDriver(ScalingPolicy(job_max_retry_count=1), "a")
    job.send_event(RankFault("a", 1, 0, 0, "x"))
    job.rank_ready("a")
    job.send_event(RankFault("a", 1, 1, 0, "y"))
    assert job.action_of(FailJob) == FailJob(
        "rank 0 of a reported a fault: y", "2 faults; at most 1 restart allowed (job_max_retry_count)"
    )


def own_error(
    job: ReconcilerDriver, reason: str, *, node: str = "a", step: int = 2, sealed: int = -1, first: bool = False
) -> tuple[WorldAction, ...]:
    position = ErrorPosition(step, sealed, before_first_step=first)
    return job.send_event(RankFault(node, 1, job.world.epoch, 0, reason, position=position))


BAD = "ValueError: bad (train.py:3 in train)"


def test_same_error_before_the_first_step_twice_in_a_row_fails_the_job():
    job = ReconcilerDriver(TWO, "ab")
    own_error(job, BAD, first=True)
    own_error(job, BAD, first=True, node="b")  # of the same world
    assert job.world.phase is WorldPhase.FORMING
    job.rank_ready("a", "b")
    own_error(job, BAD, first=True, node="b")
    assert job.action_of(FailJob) == FailJob(
        f"rank 0 of b reported a fault: {BAD}", "2 in a row failed in the same way before the first step"
    )
    assert job.world.restarts == 2


def test_same_error_at_the_same_step_three_times_in_a_row_fails_the_job():
    job = ReconcilerDriver(TWO, "ab")
    for node in "ab":
        own_error(job, BAD, node=node)
        own_error(job, BAD, node="a")  # of the same world
        assert job.world.phase is WorldPhase.FORMING
        job.rank_ready("a", "b")
    own_error(job, BAD)
    assert job.action_of(FailJob) == FailJob(
        f"rank 0 of a reported a fault: {BAD}", "3 in a row failed in the same way at step 2"
    )
    assert job.world.restarts == 3


def test_error_at_a_step_that_every_world_restores_to_fails_the_job():
    job = ReconcilerDriver(TWO, "ab")
    own_error(job, BAD, step=7, sealed=6)
    job.rank_ready("a", "b")
    own_error(job, BAD, step=7, sealed=6, first=True)
    assert job.world.phase is WorldPhase.FORMING
    job.rank_ready("a", "b")
    own_error(job, BAD, step=7, sealed=6, first=True)
    assert job.world.phase is WorldPhase.FAILED


BETWEEN = {
    "another error": lambda job: own_error(job, "y"),
    "another step": lambda job: own_error(job, BAD, step=3),
    "an error that may follow from a lost rank": lambda job: job.send_event(RankFault("a", 1, job.world.epoch, 0, BAD)),
    "a lost rank": lambda job: job.send_event(rank_lost("a")),
    "a hang": lambda job: job.send_event(HangDetected(job.world.epoch, "x")),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_same_error_is_retried_after_something_else(between, first):
    job = ReconcilerDriver(TWO, "ab")
    for _ in range(1 if first else 2):
        own_error(job, BAD, first=first)
        job.rank_ready("a", "b")
    between(job)
    job.rank_ready("a", "b")
    own_error(job, BAD, first=first)
    assert job.world.phase is WorldPhase.FORMING


def test_same_error_is_retried_after_a_step_was_sealed():
    job = ReconcilerDriver(TWO, "ab")
    for sealed in range(10):
        own_error(job, BAD, sealed=sealed)
        assert job.world.phase is WorldPhase.FORMING
        job.rank_ready("a", "b")


def test_process_that_never_joins_fails_the_job_before_the_first_world():
    job = ReconcilerDriver(ScalingPolicy())
    job.send_event(NodeJoined("a", 1, 2))
    job.send_event(RankLost("a", 1, 2, 0, "p.py exited", never_joined=True))
    assert job.actions == (FailJob("p.py exited", "not retried", never_joined=True),)
    assert (job.world.phase, job.world.restarts) == (WorldPhase.FAILED, 0)


def test_process_that_never_joins_is_replaced_after_the_first_world():
    job = ReconcilerDriver(ScalingPolicy(), "a")
    job.send_event(rank_lost("a"))
    job.send_event(RankLost("a", 1, 3, 0, "p.py exited", never_joined=True))
    assert job.action_of(RespawnRanks).local_ranks == (0,)


def test_script_that_fails_before_it_is_ready_is_not_restarted_forever():
    policy = ScalingPolicy(num_restart_before_full_job_restart=1, max_full_job_restarts=1, eval_period_s=1)
    job = ReconcilerDriver(policy)
    job.send_event(NodeJoined("a", 1, 2))
    births = 2
    while not job.world.phase.is_over:
        actions = job.send_event(RankLost("a", 1, births, 0, "ImportError"), at_s=job.now_s + 60)
        births += sum(len(action.local_ranks) for action in actions if isinstance(action, RespawnRanks))
    assert job.world.restarts == 4
    assert "ImportError" in job.action_of(FailJob).reason


def test_a_repeated_offender_has_no_rank_while_another_can_be_had():
    job = ReconcilerDriver(ScalingPolicy(min_replicas=2, max_replicas=2, scaling_timeout_s=5), "ab")
    for epoch in (0, 1):
        job.send_event(RankFault("a", 1, epoch, 0, "ECC error"))
        job.rank_ready("a", "b")
    assert job.world.ranked_nodes == ("a", "b")
    job.node_joins("c")
    job.tick()
    assert job.action_of(PauseWorld).reason == "an offender is replaced"
    job.rank_ready("a", "b")
    assert job.action_of(FormWorld).nodes == ("c", "b")
    job.send_event(lost("b"))
    job.rank_ready("c")
    assert job.action_of(FormWorld).nodes == ("c", "a")


# -- who has which rank -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("places", "chosen", "nodes"),
    [
        ("", "abc", "abc"),
        ("abcd", "abcd", "abcd"),
        ("abcd", "acd", "acd"),
        ("abcd", "acde", "aecd"),
        ("abcd", "adef", "aefd"),
        ("abcd", "abcdef", "abcdef"),
        ("abcd", "be", "eb"),
        ("abcd", "xyz", "xyz"),
    ],
)
def test_staying_nodes_keep_their_rank_and_new_nodes_fill_the_first_free(places, chosen, nodes):
    members = [NodeMember(node, 1, number, has_ranks=node in places) for number, node in enumerate(chosen)]
    assert keep_node_ranks(members, tuple(places)) == tuple(nodes)


def test_repeat_offender_is_not_readmitted_before_its_faults_expire():
    job = ReconcilerDriver(
        ScalingPolicy(max_replicas=2, scaling_timeout_s=5, eval_period_s=100, repeat_offender_faults=1), "a"
    )
    job.tick()
    job.send_event(RankFault("a", 1, 0, 0, "ECC error"))
    job.rank_ready("a")
    job.node_joins("b")
    job.tick()
    job.rank_ready("a")
    assert (job.action_of(FormWorld).nodes, job.action_of(FormWorld).kind) == (("b",), FormationKind.REPLACE)
    job.tick()
    job.tick()
    assert job.now_s == 110
    job.rank_ready("b")
    assert job.action_of(FormWorld).nodes == ("b", "a")


@pytest.mark.parametrize("changing", [False, True])
def test_stop_request_past_its_deadline_stops_at_once(changing):
    job = ReconcilerDriver(FOUR, "abcd")
    if changing:
        job.send_event(NodesPreempted(("b",), 500.0))
    job.send_event(JobStopRequested("maintenance", -5.0), at_s=10)
    assert job.action_of(PauseWorld).deadline_s == 10
    assert "not all was saved" in job.action_of(StopJob).reason


def test_final_fault_fails_the_job_without_blaming_the_node():
    job = ReconcilerDriver(FOUR, "abcd")
    actions = job.send_event(RankFault("c", 1, 0, 1, "the loss of step 7 is not finite, for the 3rd time", final=True))
    assert [type(one) for one in actions] == [BreakWorld, FailJob]
    assert actions[1] == FailJob(
        "rank 1 of c reported a fault: the loss of step 7 is not finite, for the 3rd time",
        "not retried: another attempt would fail the same way",
    )
    assert job.world.node_faults == ()
    assert job.send_event(RankFault("c", 1, 0, 1, "again", final=True)) == ()


def formed(job: ReconcilerDriver) -> list[RequestedStep | None]:
    return [action.requested_step for action in job.actions if isinstance(action, FormWorld)]


WANTED = RequestedStep(7, 17)
LOST_WORLDS = {
    "a fault after the first step": RankFault("a", 1, 0, 0, "x"),
    "a fault before the first step": RankFault(
        "a", 1, 0, 0, "the store did not answer", position=ErrorPosition(-1, before_first_step=True)
    ),
    "a lost node": lost("a"),
    "a lost process": rank_lost("a"),
    "a hang": HangDetected(0, "x", "a", 1),
    "a supervisor that started again": NodeJoined("a", 2, 2),
}


@pytest.mark.parametrize("event", LOST_WORLDS.values(), ids=LOST_WORLDS)
def test_requested_step_is_restored_again_until_a_step_is_sealed(event):
    job = ReconcilerDriver(FOUR, "abcd", requested_step=WANTED)
    assert formed(job) == [WANTED]
    job.send_event(event)
    job.rank_ready(*job.world.members)
    while job.world.phase is not WorldPhase.RUNNING:
        job.tick()
    assert (job.world.epoch, formed(job)) == (1, [WANTED])
    job.send_event(StepSealed(1))
    job.send_event(RankFault("b", 1, 1, 0, "y"))
    job.rank_ready(*job.world.members)
    assert formed(job) == [None]


def test_step_sealed_in_an_older_world_does_not_replace_the_requested_one():
    job = ReconcilerDriver(FOUR, "abcd", requested_step=WANTED)
    job.send_event(RankFault("a", 1, 0, 0, "x"))
    job.rank_ready(*"abcd")
    job.send_event(StepSealed(0))
    assert job.world.requested_step == WANTED


def test_pause_without_a_sealed_step_keeps_the_requested_one():
    job = ReconcilerDriver(FOUR, "abcd", requested_step=WANTED)
    job.send_event(ResizeRequested(2))
    job.rank_ready(*"abcd")
    assert (job.world.epoch, formed(job)) == (1, [WANTED])


def test_pause_with_a_sealed_step_replaces_the_requested_one():
    job = ReconcilerDriver(FOUR, "abcd", requested_step=WANTED)
    job.send_event(ResizeRequested(2))
    sealed = SealedStep("job", 9, 18)
    for node in "abcd":
        job.send_event(NodeSealed(node, 1, 0, 9, sealed))
    job.rank_ready(*"abcd")
    (form,) = (action for action in job.actions if isinstance(action, FormWorld))
    assert (form.resume_from, form.requested_step) == (sealed, None)
