"""An injected fault reaches only the supervisor or the ranks it is meant for, and once."""

from __future__ import annotations

import pytest

from elastic.control.control_messages import InjectRequest as Asked
from elastic.control.control_messages import RankPhase, RankRequest, RankStatus
from elastic.control.control_plane import NoticeKind
from elastic.coordinator.desired_state import why_refused
from elastic.fault_injection import FaultInjection, InjectionKind, InjectionPhase
from elastic.supervisor import node_messages
from elastic.supervisor.node_state import InjectFault, PartitionNode
from tests.support.control_simulation import ControlSimulation


@pytest.fixture
def table():
    made = ControlSimulation(3, nproc=2)
    made.run_without_faults(15)
    return made


def ask(table, injection):
    assert why_refused(table.desk.snapshot(), Asked(injection)) == ""
    table.desk.handle_request(Asked(injection), table.now)
    table.run_without_faults(4)


def heard(table):
    """Return the names of the faults that the ranks of each node receive."""
    return {
        node.name: {one.name for token in node.ranks for one in hears(table, node, token).injections}
        for node in table.nodes.values()
    }


def hears(table, node, token):
    return node_messages.rank_desired(node.seats, token, table.now)


@pytest.mark.parametrize(
    "kind", [InjectionKind.SIGKILL, InjectionKind.SIGSTOP, InjectionKind.NODE, InjectionKind.PARTITION]
)
def test_immediate_fault_reaches_the_supervisor_of_its_rank(table, kind):
    ask(table, FaultInjection(kind=kind, rank=3, name="a"))
    node = table.desk.snapshot().world_spec.ranked_nodes[1]
    told = {one.name: one.injected for one in table.nodes.values() if one.injected}
    assert told == {node: [InjectFault(FaultInjection(kind=kind, node=node, local_rank=1, name="a"))]}
    assert not any(heard(table).values())


@pytest.mark.parametrize(
    "injection",
    [
        FaultInjection(kind=InjectionKind.SIGKILL, rank=3, step=30, name="a"),
        FaultInjection(kind=InjectionKind.NODE, rank=3, phase=InjectionPhase.SAVE, name="a"),
        FaultInjection(kind=InjectionKind.OOM, rank=3, name="a"),
    ],
)
def test_scheduled_fault_reaches_all_ranks(table, injection):
    ask(table, injection)
    assert not any(node.injected for node in table.nodes.values())
    assert heard(table) == {name: {"a"} for name in table.nodes}


def test_restarted_rank_receives_the_fault(table):
    ask(table, FaultInjection(kind=InjectionKind.OOM, rank=0, step=30, name="a"))
    table.lose_rank(0)
    table.run_without_faults(10)
    assert all(names == {"a"} for names in heard(table).values())


def test_partition_is_injected_once(table):
    node = table.nodes["n0"]
    token = next(iter(node.ranks))
    request = RankRequest(1, NoticeKind.RESTART, "a partition", partition_s=7.0)
    for number in (100, 101):
        node.seats.handle_rank_status(token, RankStatus(number, RankPhase.IN_WORLD, 0, requests=(request,)), table.now)
    assert [effect for effect in node.seats.take_effects() if isinstance(effect, PartitionNode)] == [PartitionNode(7.0)]
    assert {hears(table, node, token).partitions for token in node.ranks} == {1}


@pytest.mark.parametrize(
    ("injection", "why"),
    [
        (FaultInjection(kind=InjectionKind.OOM, rank=6), "rank=6: the job has 6 ranks now, 0 to 5"),
        (FaultInjection(kind=InjectionKind.OOM, node="n7"), "there is no node n7: the job has n0, n1, n2"),
        (FaultInjection(kind=InjectionKind.OOM, node="n0", local_rank=2), "local_rank=2: a node has 2 ranks here"),
    ],
)
def test_mistaken_injection_is_refused(table, injection, why):
    assert why_refused(table.desk.snapshot(), Asked(injection)) == why
    assert (
        why_refused(ControlSimulation(1).desk.snapshot(), Asked(FaultInjection(kind=InjectionKind.OOM, rank=0)))
        == "rank=0: the job has no ranks yet"
    )
