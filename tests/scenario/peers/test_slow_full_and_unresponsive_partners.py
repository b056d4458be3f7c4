"""Replication with slow, silent or full partners."""

import threading
import time

from peerstore.membership.swim import MembershipSettings
from peerstore.peers.peer_messages import OfferReply
from peerstore.replication.replica_placement import place_replicas
from tests.support.local_nodes import local_nodes, wait_until
from tests.support.stores import MIB, shard_key

SIZE = 3 * MIB + 17


def partner_of(nodes, name):
    (found,) = place_replicas([node.node for node in nodes], copies=2).partners[nodes[name].node.id]
    return str(found)


def third_node(nodes, *names):
    (found,) = {node.name for node in nodes} - set(names)
    return found


def test_silent_partner_is_replaced_once_it_is_dead():
    """The partner goes silent on an open connection, while a copy waits for its answer."""
    with local_nodes("n1", "n2", "n3", copies=2) as nodes:
        n1, silent = nodes["n1"], partner_of(nodes, "n1")
        n1.write(shard_key(0), SIZE)
        nodes.wait_replicated(0)
        for other in nodes:
            if other.name != silent:
                nodes.network.stall(silent, other.name)
        n1.write(shard_key(1), SIZE)
        stand_in = third_node(nodes, "n1", silent)
        wait_until(lambda: nodes[stand_in].holds(shard_key(1)), "another node has the copy")
        nodes.wait_replicated(1, "n1", stand_in)
        n1.write(shard_key(2), SIZE)
        nodes.wait_replicated(2, "n1", stand_in)
        for other in nodes:
            if other.name != silent:
                nodes.network.heal(silent, other.name)
        wait_until(lambda: all(node.sees_alive("n1", "n2", "n3") for node in nodes), "all nodes see each other again")
        n1.write(shard_key(3), SIZE)
        nodes.wait_replicated(3)
        assert len(nodes.holders(shard_key(3))) >= 2


def test_slow_partner_delays_only_copies():
    with local_nodes("n1", "n2", copies=2) as nodes:
        n1 = nodes["n1"]
        nodes.network.delay("n1", "n2", 0.05)
        n1.write(shard_key(1), SIZE)
        n1.write(shard_key(2), SIZE)
        (waiting,) = [one for one in n1.job_peers.replicator.statuses() if one.key == shard_key(2)]
        assert (waiting.copies, waiting.missing) in ((1, 1), (2, 0))
        nodes.wait_replicated(2)
        assert nodes["n2"].has_intact_shard(shard_key(2))


def test_copy_rate_limit_blocks_no_other_work():
    """While one copy is slow, the node receives copies and serves reads."""
    with local_nodes("n1", "n2", copies=2) as nodes:
        n1, n2 = nodes["n1"], nodes["n2"]
        begun, released = threading.Event(), threading.Event()

        def copy_slowly(_size):
            begun.set()
            released.wait(60)

        n1.job_peers.rate_limiter.acquire = copy_slowly
        n1.write(shard_key(1, 0), SIZE, parts=2)
        assert begun.wait(60)
        n2.write(shard_key(1, 1), SIZE, parts=2)
        wait_until(lambda: n1.holds(shard_key(1, 1)), "n1 receives a copy")
        assert n2.read(shard_key(1, 1), sources=["n1"])[1].failed == {}
        assert n1.newest_replicated == -1
        released.set()
        nodes.wait_replicated(1)


def test_full_partner_is_replaced_by_a_node_with_space():
    with local_nodes(copies=2) as nodes:
        names = ("n1", "n2", "n3")
        full = "n2"
        for name in names:
            nodes.add(name, budget="2MiB" if name == full else "256MiB")
        nodes.join_all()
        writer = next(name for name in names if name != full and partner_of(nodes, name) == full)
        roomy = third_node(nodes, writer, full)
        nodes[writer].write(shard_key(1), SIZE)
        wait_until(lambda: nodes[roomy].holds(shard_key(1)), "the node with space has the copy")
        nodes.wait_replicated(1)
        assert nodes.holders(shard_key(1)) == {writer, roomy}
        assert nodes[roomy].shard_infos()[shard_key(1)].holders == (writer, roomy)


def test_writer_continues_with_one_copy_and_a_reason_when_all_are_full():
    with local_nodes(copies=2) as nodes:
        nodes.add("n1")
        nodes.add("n2", budget="2MiB")
        nodes.join_all()
        n1 = nodes["n1"]
        for version in range(1, 6):
            n1.write(shard_key(version), SIZE)
            nodes.wait_replicated(version)
            (status,) = [one for one in n1.job_peers.replicator.statuses() if one.key == shard_key(version)]
            assert (status.copies, status.missing, status.unplaceable) == (1, 0, 1)
            assert "does not fit: the memory budget is 2.0 MiB" in n1.job_peers.replicator.last_errors(
                shard_key(version)
            )
        assert n1.has_intact_shard(shard_key(5))
        assert nodes.holders(shard_key(5)) == {"n1"}


def test_partner_requesting_nonexistent_chunks_blocks_no_other_copy():
    with local_nodes("n1", "n2", "n3", copies=3) as nodes:
        n1, liar = nodes["n1"], nodes["n2"].node_peers.server.replica_receiver
        liar.handle_offer = lambda *_: OfferReply("0123456789abcdef", ((0, 1 << 60),))
        n1.write(shard_key(1), SIZE)
        wait_until(lambda: nodes["n3"].holds(shard_key(1)), "the honest partner has its copy")
        assert n1.newest_replicated == -1
        assert n1.job_peers.replicator.totals.errors >= 1
        assert n1.has_intact_shard(shard_key(1))


def test_black_hole_nodes_cause_no_suspicion_and_no_quorum_loss():
    """The nodes accept connections but never answer. Calls to them must not delay other pings."""
    names = [f"n{number}" for number in range(1, 8)]
    # All nodes share one process. Single pings may be late on a busy machine, but not six in a row.
    patient = MembershipSettings(heartbeat_s=0.1, suspect_after=6, dead_after_s=0.5)
    with local_nodes(*names, membership=patient) as nodes:
        first, *others = nodes

        def member_states():
            return {(node.name, other): node.job_peers.membership.state_of(other) for node in nodes for other in names}

        wait_until(lambda: {*member_states().values()} == {"alive"}, "all nodes are alive")
        for silent in others[:3]:
            nodes.network.stall(first.name, silent.name)
            nodes.network.stall(silent.name, first.name)
        seen = []

        def pinged_often():
            seen.append(member_states())
            seen.append(
                {(node.name, ""): "alive" if node.job_peers.membership.has_quorum else "no quorum" for node in nodes}
            )
            return len(seen) > 1600

        wait_until(pinged_often)
        assert {(node, state) for one in seen for node, state in one.items() if state != "alive"} == set()


def test_node_cut_off_during_a_call_closes_quickly():
    """The node closes quickly even while it considers the others alive."""
    with local_nodes("n1", "n2", membership=MembershipSettings(heartbeat_s=0.1, dead_after_s=600.0)) as nodes:
        n1 = nodes["n1"]
        n1.write(shard_key(0))
        nodes.wait_replicated(0)
        nodes.network.stall("n2", "n1")  # on an open connection, where the reply to an offer may take long
        n1.write(shard_key(1))
        wait_until(lambda: n1.job_peers.replicator.in_flight, "n1 has offered a copy")
        nodes.network.cut("n1", "n2")
        began = time.monotonic()
        n1.close()
        assert time.monotonic() - began < 20
