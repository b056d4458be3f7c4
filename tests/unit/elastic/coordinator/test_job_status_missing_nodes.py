"""Job status with missing nodes: their count and the command that starts them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.coordinator.job_status import missing_nodes
from elastic.world.scaling_policy import ScalingPolicy
from tests.support.control_simulation import ControlSimulation


@pytest.mark.parametrize(("least", "start"), [(3, "The job starts with 3."), (1, "It starts without them in 60 s.")])
def test_missing_nodes_are_counted_with_the_command_that_starts_them(least, start):
    table = ControlSimulation(1, most=3)
    policy = ScalingPolicy(min_replicas=least, max_replicas=3)
    table.desk._settings = replace(table.desk._settings, policy=policy, local_nodes=1, join_command="elastic join j")
    assert missing_nodes(table.desk.snapshot()) == ""
    table.exchange_node(0)
    assert missing_nodes(table.desk.snapshot()) == (
        f"1 of 3 nodes is here, waiting for 2 more. {start} For each of the others run: elastic join j"
    )
    table.add()
    table.add()
    table.run_without_faults(10)
    assert missing_nodes(table.desk.snapshot()) == ""


def test_nodes_that_this_machine_starts_are_not_missing():
    table = ControlSimulation(2, most=3)
    table.desk._settings = replace(table.desk._settings, local_nodes=3)
    table.exchange_node(0)
    assert missing_nodes(table.desk.snapshot()) == ""
