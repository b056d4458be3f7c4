"""A node outside the world remembers the newest one for a coordinator that starts again."""

from __future__ import annotations

import msgspec

from elastic.control.control_messages import WorldRecord
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
