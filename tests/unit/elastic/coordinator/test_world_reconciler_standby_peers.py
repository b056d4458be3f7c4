"""The ranks of a world get the list of nodes outside it that accept replicas and stay in the job."""

from __future__ import annotations

from elastic.supervisor.node_messages import rank_desired
from elastic.supervisor.node_state import OfferMemory
from peerstore.membership.topology import NodeId, PeerNode
from tests.support.control_simulation import ControlSimulation


def offer_all(table):
    """Offer the agent's memory of every node with that request; return these nodes."""
    asked = [node for node in table.nodes.values() if any(isinstance(one, OfferMemory) for one in node.injected)]
    for node in asked:
        node.seats.peer = PeerNode(NodeId(node.name), f"{node.name}:7070")
    return sorted(node.name for node in asked)


def standby_of_ranks(table):
    """Return the nodes that each rank of the world may send replicas to; all ranks know the same."""
    ranked = table.desk.snapshot().world.ranked_nodes
    known = {
        tuple(peer.id for peer in rank_desired(table.nodes[name].seats, token, table.now).standby)
        for name in ranked
        for token in table.nodes[name].ranks
    }
    (same,) = known
    return same


def world_of_one(nodes=3):
    """One node has ranks; the others were in no world."""
    table = ControlSimulation(nodes, most=1)
    table.run_without_faults(15)
    (inside,) = table.desk.snapshot().world.ranked_nodes
    outside = sorted(set(table.nodes) - {inside})
    return table, inside, outside


def test_nodes_outside_the_world_offer_their_memory_to_its_ranks():
    table, _, outside = world_of_one()
    assert standby_of_ranks(table) == ()
    assert offer_all(table) == outside
    table.run_without_faults(2)
    assert standby_of_ranks(table) == tuple(outside)


def test_standby_list_follows_joined_left_and_lost_nodes():
    table, inside, outside = world_of_one()
    epoch = table.desk.snapshot().world.epoch
    table.add()
    table.run_without_faults(5)
    joined = max(table.nodes)
    offer_all(table)
    table.run_without_faults(2)
    assert standby_of_ranks(table) == (*outside, joined)

    table.nodes[outside[0]].seats.drain(table.now + 60.0, "preempted")
    table.run_without_faults(2)
    assert standby_of_ranks(table) == (outside[1], joined)
    table.lose_node(sorted(table.nodes).index(outside[1]))
    table.run_without_faults(15)
    assert standby_of_ranks(table) == (joined,)
    assert (table.desk.snapshot().world.epoch, table.desk.snapshot().world.ranked_nodes) == (epoch, (inside,))


def test_node_with_ranks_is_not_in_the_list():
    table, inside, outside = world_of_one(2)
    offer_all(table)
    table.run_without_faults(2)
    table.lose_node(sorted(table.nodes).index(inside))
    table.run_without_faults(30)
    assert table.desk.snapshot().world.ranked_nodes == tuple(outside)
    assert standby_of_ranks(table) == ()


def test_coordinator_that_starts_again_learns_the_list():
    table, _, outside = world_of_one()
    offer_all(table)
    table.run_without_faults(2)
    table.restart_coordinator()
    table.run_without_faults(10)
    assert standby_of_ranks(table) == tuple(outside)
