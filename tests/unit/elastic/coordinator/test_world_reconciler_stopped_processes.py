"""A stopped process neither reports nor ends: it takes no rank and delays no other process."""

from __future__ import annotations

import pytest

from tests.support.control_simulation import ControlSimulation, SimulatedRank


def rank_of(table: ControlSimulation, node: str, *, spare: bool = False) -> SimulatedRank:
    """Return the first rank of this node, or its spare."""
    found = table.nodes[node]
    processes = [one for one in found.seats.processes.values() if (one.local_rank is None) == spare]
    return found.ranks[processes[0].token]


def test_stopped_spare_is_not_promoted():
    table = ControlSimulation(1, spares=1)
    table.run_without_faults(15)
    stopped = rank_of(table, "n0", spare=True)
    stopped.is_stopped = True
    table.run_without_faults(12)
    table.lose_rank(0)
    table.run_without_faults(8)
    table.check_one_world()
    assert all(
        one.token != stopped.token or one.local_rank is None for one in table.nodes["n0"].seats.processes.values()
    )


def test_resumed_spare_counts_again():
    table = ControlSimulation(1, spares=1)
    table.run_without_faults(15)
    spare = rank_of(table, "n0", spare=True)
    spare.is_stopped = True
    table.run_without_faults(12)
    assert table.desk.snapshot().nodes["n0"].status.spares == 0
    spare.is_stopped = False
    table.run_without_faults(3)
    assert table.desk.snapshot().nodes["n0"].status.spares == 1


@pytest.mark.parametrize("spares", [0, 1])
def test_stopped_rank_of_a_broken_world_is_not_awaited(spares):
    """The other ranks may take 30 s to leave their world, and report every second meanwhile."""
    table = ControlSimulation(2, spares=spares)
    table.run_without_faults(15)
    stopped = rank_of(table, "n0")
    stopped.is_stopped = True
    table.lose_rank(1)
    table.run_without_faults(20)
    table.check_one_world()
    assert stopped.token not in table.nodes["n0"].ranks


def test_stopped_rank_of_a_healthy_world_is_left_to_the_hang_detector():
    table = ControlSimulation(2)
    table.run_without_faults(15)
    stopped = rank_of(table, "n0")
    stopped.is_stopped = True
    table.run_without_faults(20)
    assert stopped.token in table.nodes["n0"].ranks
