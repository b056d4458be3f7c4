"""The newest world: breakage, the step of a pause, and the place of the store."""

from __future__ import annotations

import msgspec

from elastic.control.control_messages import NodeStatus, WorldSpec
from elastic.control.control_plane import NoticeKind, RankProgress
from elastic.control.epoch_state import ChangeMessage, EpochChange, EpochMessage, EpochState
from elastic.coordinator.formed_world import FormedWorld, StorePlacement
from elastic.coordinator.node_liveness import NodeLiveness
from elastic.rendezvous.store_servers import ROOTLESS
from elastic.world.world_state import (
    NodeMember,
    PauseWorld,
    ReachedStep,
    RequestedStep,
    StepSealed,
    WorldPhase,
    WorldState,
)

WORLD = WorldSpec(3, ("n0", "n1"), 0, "", incarnation_epoch=9)


def status(node, **fields):
    return NodeStatus(1, node, 1, 1, world=WORLD, **fields)


def liveness(*reports):
    nodes = NodeLiveness(10.0, 2.0)
    for report in reports:
        nodes.record(report, 0.0)
    return nodes


def formed(*reports):
    world = FormedWorld()
    world.form(WORLD, reports)
    return world


def test_only_the_newest_world_breaks():
    world = formed()
    world.break_up(2, "lost", 5.0)
    assert not world.epoch_state.is_broken
    world.pause(PauseWorld(3, "resized", 20.0))
    world.break_up(3, "lost", 5.0)
    assert world.epoch_state == EpochState(3, broken=EpochChange(NoticeKind.RESTART, "lost", 5.0))
    world.form(WorldSpec(4, ("n0",), 0, ""), ())
    assert world.epoch_state == EpochState(4)


def test_reached_step_of_a_lost_node_remains_for_the_next_world():
    def sealed(world, *steps, here=True):
        ranks = tuple(RankProgress(1, step, has_sealed=here, job="job") for step in steps)
        return NodeStatus(1, "n1", 1, len(steps), world=world, rank_progress=ranks)

    world = FormedWorld()
    assert world.reached is None
    world.form(WORLD, [sealed(WORLD, 7, 9)])
    world.progress.forget("n1")
    assert world.reached == ReachedStep("job", 9)
    later = msgspec.structs.replace(WORLD, epoch=4, reached=world.reached)
    world.form(later, [sealed(later, 30, here=False)])  # of an earlier world
    assert world.reached == ReachedStep("job", 9)
    world.progress.update(sealed(later, 5))  # this world has restored an older step
    assert world.reached == ReachedStep("job", 5)


def test_requested_step_is_forgotten_once_every_rank_has_sealed():
    requested = RequestedStep(7, 1)
    world, spec = FormedWorld(), WorldSpec(3, ("n0",), 0, "", requested_step=requested)
    state = WorldState(nproc=1, requested_step=requested)
    assert world.sealed_events(state) == []
    world.form(spec, [NodeStatus(1, "n0", 1, 1, world=spec, rank_progress=(RankProgress(9, 8, has_sealed=True),))])
    assert world.sealed_events(state) == [StepSealed(3)]
    assert world.record.requested_step == requested
    assert world.forget_requested_step()
    assert (world.spec.requested_step, world.record.requested_step) == (None, None)
    assert not world.forget_requested_step()


def test_pause_target_is_the_greatest_step_once_all_nodes_reported_one():
    world = formed(status("n0", paused=4), status("n1"))
    assert not world.agree_on_target()
    world.pause(PauseWorld(3, "resized", 20.0))
    assert not world.agree_on_target()
    world.progress.update(status("n1", paused=6))
    assert world.agree_on_target()
    assert world.epoch_state.target == 6
    assert not world.agree_on_target()


def test_lagging_ranks_are_lost_after_the_deadline_of_a_pause():
    world, nodes = formed(), liveness(status("n0"), status("n1", lagging_ranks=(0,)))
    assert world.late_ranks(nodes, 30.0) == []
    world.pause(PauseWorld(3, "resized", 20.0))
    assert world.late_ranks(nodes, 19.9) == []
    assert [(lost.node, lost.local_rank) for lost in world.late_ranks(nodes, 20.0)] == [("n1", 0)]


def test_pause_that_some_ranks_received_is_resumed_for_all():
    newest, world = formed(), WorldState(nproc=1, epoch=3, phase=WorldPhase.RUNNING, next_tick_s=50.0)
    assert newest.resume_pause([], world, 10.0) is world
    changes = [ChangeMessage(NoticeKind.RESIZE, "resized", 5.0), ChangeMessage(NoticeKind.STOP, "stopped", 8.0)]
    reports = [status(f"n{place}", epoch_state=EpochMessage(3, pause=one)) for place, one in enumerate(changes)]
    resumed = newest.resume_pause([*reports, status("n2")], world, 10.0)
    assert newest.epoch_state.pause == EpochChange(NoticeKind.STOP, "stopped", 18.0)
    assert (resumed.phase, resumed.stopping, resumed.next_tick_s) == (WorldPhase.PAUSING, True, 18.0)


def members(*names):
    nodes = {name: NodeMember(name, 1, place) for place, name in enumerate(names)}
    return WorldState(nproc=1, epoch=3, members=nodes)


def test_store_stays_on_its_node_until_another_one_runs_it():
    placement, world = StorePlacement(""), members("n0", "n1")
    nodes = liveness(status("n0"), status("n1"))
    assert placement.place(nodes, world, ("n1",), 0.0)
    assert placement.node == "n1"
    assert not placement.place(nodes, world, ("n0",), 0.0)
    nodes.record(status("n0", store="n0:1"), 0.0)
    assert placement.place(nodes, world, ("n1",), 0.0)
    assert placement.with_stores(WORLD, nodes.records).store == "n0:1"
    nodes.disconnect("n0", 1, 0.0)
    assert placement.with_stores(WORLD, nodes.records).store == ""


def test_store_moves_from_a_silent_node():
    placement, world = StorePlacement(""), members("n0", "n1")
    nodes = liveness(status("n0", store="n0:1"), status("n1"))
    placement.place(nodes, world, (), 0.0)
    nodes.disconnect("n0", 1, 0.0)
    assert not placement.place(nodes, world, (), 2.0)
    assert placement.place(nodes, world, (), 2.5)
    assert placement.node == "n1"


def test_fixed_address_and_rootless_stores_are_on_no_chosen_node():
    nodes, world = liveness(status("n0", store="n0:1"), status("n1")), members("n0", "n1")
    fixed, rootless = StorePlacement("host:1"), StorePlacement(ROOTLESS)
    assert not fixed.place(nodes, world, (), 0.0)
    assert fixed.with_stores(WORLD, nodes.records).store == "host:1"
    assert not rootless.place(nodes, world, (), 0.0)
    assert rootless.with_stores(WORLD, nodes.records) == WORLD  # the store of n1 is unknown
    nodes.record(status("n1", store="n1:1"), 0.0)
    assert rootless.with_stores(WORLD, nodes.records).stores == ("n0:1", "n1:1")
