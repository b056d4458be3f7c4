"""Job status while the job waits for a replacement of a lost node."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from elastic.control.control_messages import ReplacementWait
from elastic.coordinator.job_status import elastic_job_status
from elastic.world.world_state import WorldPhase
from tests.support.control_simulation import HEARTBEAT_S, ControlSimulation


def status_of(table: ControlSimulation):
    return elastic_job_status(table.desk.snapshot(), table.now)


def waiting(table: ControlSimulation):
    """Run until the job waits for a replacement, and return its status."""
    for _ in range(100):
        table.run_without_faults(1)
        if (status := status_of(table)).phase is WorldPhase.WAITING:
            return status
    raise AssertionError(f"the job did not wait: {status}")


@pytest.mark.parametrize(("least", "remaining"), [(1, 2), (3, 0)])
def test_lost_node_is_named_with_the_seconds_left(least, remaining):
    table = ControlSimulation(3, most=3)
    policy = msgspec.structs.replace(table.policy, min_replicas=least)
    table.desk._settings = replace(table.desk._settings, policy=policy)
    table.run_without_faults(20)
    assert status_of(table).replacement_wait is None
    table.lose_node(1)
    status = waiting(table)
    wait = status.replacement_wait
    assert (wait.lost_nodes, wait.remaining_nodes) == (("n1",), remaining)
    assert 0 < wait.within_s <= table.policy.faulty_scale_down_timeout_s
    assert status.reason.startswith("n1 was lost")
    table.run_without_faults(1)
    assert status_of(table).replacement_wait.within_s == pytest.approx(wait.within_s - HEARTBEAT_S)
    table.run_without_faults(100)
    assert status_of(table).replacement_wait is None


def test_wait_is_described_with_the_nodes_that_remain():
    assert str(ReplacementWait(("n1",), 24.4, 1)) == ("waits 24 s for a replacement of n1, then continues with 1 node")
    assert str(ReplacementWait(("n1", "n4"), 3.0, 0)) == "waits 3 s for a replacement of n1, n4, then stops"
    many = tuple(f"n{number}" for number in range(1, 1012))
    assert str(ReplacementWait(many, 3.0, 12)) == (
        "waits 3 s for a replacement of n1, n2, n3, n4, n5, n6, n7, n8 and 1,003 more, then continues with 12 nodes"
    )
    assert str(ReplacementWait((), 3.0, 2)) == "waits 3 s for another node, then continues with 2 nodes"
