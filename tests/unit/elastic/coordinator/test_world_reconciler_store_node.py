"""The job's store on one of its nodes: a running store is used instead of a new one."""

from __future__ import annotations

from tests.support.control_simulation import HEARTBEAT_S, ControlSimulation


def test_running_store_is_used_instead_of_a_new_one():
    table = ControlSimulation(3)
    table.run_without_faults(15)
    assert table.desk.snapshot().store_node == "n0"
    table.disconnect_node(0)
    table.lose_rank(1)
    while table.desk.snapshot().store_node == "n0":
        turn(table)
    table.heal_all()
    while table.desk.snapshot().world_spec.epoch == 0:
        turn(table)
    assert table.desk.snapshot().world_spec.store == "n0:1"
    table.run_without_faults()
    table.check_one_world()
    assert [node.seats.run_store for node in table.nodes.values()].count(True) == 1


def turn(table: ControlSimulation) -> None:
    for node in list(table.nodes.values()):
        table._exchange(node)
    table.advance(HEARTBEAT_S)
