"""Commands in the records of nodes; every kind of request and action has a handler."""

from __future__ import annotations

from typing import get_args

import pytest

from elastic.control.control_messages import CommandKind, CoordinatorRequest, NodeCommand, NodeStatus, WorldSpec
from elastic.coordinator import world_reconciler
from elastic.coordinator.node_commands import NodeCommands
from elastic.coordinator.node_liveness import NodeRecord
from elastic.fault_injection.fault_spec import FaultInjection, InjectionKind
from elastic.world.world_state import PromoteSpare, RespawnRanks, RespawnStragglers, WorldAction

WORLD = WorldSpec(3, ("n1", "n0"), 0, "")


def records():
    return {node: NodeRecord(NodeStatus(1, node, 1, 2), 0.0) for node in ("n0", "n1")}


def test_actions_become_numbered_commands_of_their_node():
    commands, nodes = NodeCommands(), records()
    commands.add(RespawnRanks("n0", 1, (0, 1)), nodes)
    commands.add(PromoteSpare("n0", 1, 1), nodes)
    commands.add(RespawnStragglers("n9", 1), nodes)
    commands.add(RespawnStragglers("n1", 1), nodes)
    assert nodes["n0"].commands == [
        NodeCommand(1, CommandKind.RESPAWN, (0, 1)),
        NodeCommand(2, CommandKind.PROMOTE, (1,)),
    ]
    assert nodes["n1"].commands == [NodeCommand(4, CommandKind.STRAGGLERS)]


def test_conditional_fault_is_sent_to_all_nodes():
    nodes, injection = records(), FaultInjection(kind=InjectionKind.SIGKILL, rank=3, step=5)
    NodeCommands().inject(injection, nodes, WORLD, 2)
    assert all(record.commands[0].injection == injection for record in nodes.values())


@pytest.mark.parametrize(("rank", "node", "local_rank"), [(0, "n1", 0), (3, "n0", 1)])
def test_immediate_fault_is_sent_to_the_node_of_its_rank(rank, node, local_rank):
    nodes = records()
    NodeCommands().inject(FaultInjection(kind=InjectionKind.SIGKILL, rank=rank), nodes, WORLD, 2)
    assert [name for name, record in nodes.items() if record.commands] == [node]
    (command,) = nodes[node].commands
    assert (command.injection.rank, command.injection.node, command.injection.local_rank) == (None, node, local_rank)


def test_every_request_and_every_action_has_a_handler():
    assert set(world_reconciler._REQUESTS) == set(get_args(CoordinatorRequest))
    assert set(world_reconciler._ACTIONS) == set(get_args(WorldAction))
