"""A node outside the world remembers the newest one for a coordinator that starts again."""

from __future__ import annotations

import msgspec

from elastic.control.control_messages import WorldRecord
from elastic.control.epoch_state import EpochState
from elastic.coordinator.desired_state import node_desired
from elastic.supervisor.node_messages import node_status
from tests.support.control_simulation import ControlSimulation


def test_newest_world_is_kept_although_a_coordinator_names_an_older_one():
    table = ControlSimulation(3)
    table.run_without_faults(15)
    table.resize(1)
    table.run_without_faults(30)
    newest = table.desk.snapshot().world_record
    outside = next(node for node in table.nodes.values() if node.name not in newest.nodes)
    assert node_status(outside.seats, table.now).newest_world == newest
    older = WorldRecord(newest.epoch - 1, (outside.name,))
    orders = msgspec.structs.replace(node_desired(table.desk.snapshot(), outside.name, table.now), newest_world=older)
    outside.seats.apply_desired(orders, table.now)
    assert node_status(outside.seats, table.now).newest_world == newest


def test_step_sealed_in_an_older_world_is_not_reported_for_the_newest():
    table = ControlSimulation(2)
    table.run_without_faults(15)
    table.seal(9, base_step=4)
    node = table.nodes["n0"]
    node.run_turn()
    assert {(one.has_sealed, one.base_step) for one in node_status(node.seats, table.now).rank_progress} == {(True, 4)}
    node.seats.world = msgspec.structs.replace(
        node.seats.world, epoch=node.seats.world.epoch + 1
    )  # its ranks do not know it yet
    node.seats.epoch_state = EpochState(node.seats.world.epoch)
    reported = node_status(node.seats, table.now).rank_progress
    assert {(one.sealed, one.has_sealed, one.base_step) for one in reported} == {(9, False, None)}
