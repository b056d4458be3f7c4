"""Replication after node losses, rejoins and partitions."""

import contextlib
import threading

import msgspec
import pytest

from peerstore.errors import ArenaBusyError, FencedError, NoQuorumError
from peerstore.membership.swim import MembershipSettings
from peerstore.membership.topology import member_list
from tests.support.local_nodes import JOB, local_nodes, wait_until
from tests.support.stores import MIB, shard_content, shard_key, write_slot

SIZE = 3 * MIB + 17


def rack_of(name):
    return {"n1": "rack=r1", "n2": "rack=r1", "n3": "rack=r2", "n4": "rack=r2"}[name]


def save_version(nodes, version, **options):
    """Write a version, one part per node, and return its keys."""
    parts = sorted(node.name for node in nodes)
    for part, name in enumerate(parts):
        nodes[name].write(shard_key(version, part, **options), SIZE, parts=len(parts))
    return [shard_key(version, part, **options) for part in range(len(parts))]


def assert_copies(nodes, keys, *, copies):
    """Check that every shard has this many intact copies and that every node can read it."""
    for of in keys:
        wait_until(lambda of=of: len(nodes.holders(of)) >= copies, f"{of} has {copies} copies")
        for name in nodes.holders(of):
            assert nodes[name].has_intact_shard(of)
    for node in nodes:
        for of in keys:
            if not node.holds(of):
                data, pulled = node.read(of)
                assert pulled.failed == {}
                assert data == shard_content(of, SIZE)


def test_loss_of_two_of_four_nodes_keeps_two_copies():
    with local_nodes("n1", "n2", "n3", "n4", copies=3) as nodes:
        keys = save_version(nodes, 1)
        nodes.wait_replicated(1)
        nodes.network.kill_node("n2")
        nodes.lose("n2")
        nodes.lose("n3")
        for node in nodes:
            wait_until(lambda node=node: node.sees_alive("n1", "n4"), "the remaining nodes detect the loss")
        assert_copies(nodes, keys, copies=2)
        wait_until(lambda: not any(node.job_peers.replicator.has_pending for node in nodes), "no copy is pending")
        assert all(
            one.unplaceable == 1 for node in nodes for one in node.job_peers.replicator.statuses() if one.is_owner
        )


@pytest.mark.parametrize("rack", [("n1", "n2"), ("n3", "n4")])
def test_loss_of_a_rack_keeps_a_copy_of_every_shard(rack):
    """The two copies of a shard are never in one rack."""
    with local_nodes("n1", "n2", "n3", "n4", copies=2, labels=rack_of) as nodes:
        keys = save_version(nodes, 1)
        nodes.wait_replicated(1)
        for of in keys:
            assert len({rack_of(name) for name in nodes.holders(of)}) == 2
        for name in rack:
            nodes.lose(name)
        assert_copies(nodes, keys, copies=2)


@pytest.mark.parametrize("when", ["replicated", "pending"])
def test_lost_commit_leader_is_replaced(when):
    with local_nodes("n1", "n2", "n3", copies=2) as nodes:
        keys = save_version(nodes, 1)
        if when == "replicated":
            nodes.wait_replicated(1)
        nodes["n1"].job_peers.replicator.wait_until(lambda: nodes["n1"].job_peers.replicator.totals.copies > 0, 60)
        nodes.lose("n1")
        for node in nodes:
            wait_until(lambda node=node: node.sees_alive("n2", "n3"))
        assert all(nodes.holders(of) for of in keys)
        assert_copies(nodes, keys, copies=2)
        nodes.wait_replicated(1)
        nodes["n2"].write(shard_key(2, 0), SIZE)
        nodes.wait_replicated(2)


def test_node_that_rejoins_empty_before_its_death_is_detected_gets_copies():
    with local_nodes("n1", "n2", copies=2) as nodes:
        of = shard_key(1)
        nodes["n1"].write(of, SIZE)
        nodes.wait_replicated(1)
        assert nodes.holders(of) == {"n1", "n2"}
        nodes.restart("n2", empty=True)
        nodes["n2"].join(nodes.peers_config())
        wait_until(lambda: nodes["n2"].holds(of), "n2 has a copy again")
        assert_copies(nodes, [of], copies=2)


def test_agent_restarted_with_its_arena_rejoins_without_retransfers():
    with local_nodes("n1", "n2", copies=2) as nodes:
        mine, other = shard_key(1, 0), shard_key(1, 1)
        nodes["n1"].write(mine, SIZE, parts=2)
        nodes["n2"].write(other, SIZE, parts=2)
        nodes.wait_replicated(1)
        sent = nodes["n1"].job_peers.replicator.totals.sent_bytes
        nodes.restart("n2")
        wait_until(lambda: nodes["n2"].shard_infos().keys() == {mine, other}, "n2 has loaded both shards")
        assert nodes["n2"].sees_alive("n1", "n2") or wait_until(lambda: nodes["n2"].sees_alive("n1", "n2"))
        assert nodes["n2"].shard_infos()[mine].holders == ("n1", "n2")
        assert nodes["n2"].shard_infos()[other].holders == ()
        wait_until(
            lambda: "n1" in {node.id for node in nodes["n2"].job_peers.replicator.holders(other)}, "n2 counts n1's copy"
        )
        wait_until(
            lambda: "n2" in {node.id for node in nodes["n1"].job_peers.replicator.holders(mine)}, "n1 counts n2's copy"
        )
        wait_until(lambda: not any(node.job_peers.replicator.has_pending for node in nodes))
        assert nodes["n2"].job_peers.replicator.totals.sent_bytes == 0
        assert nodes["n1"].job_peers.replicator.totals.sent_bytes == sent
        assert nodes["n2"].newest_replicated == 1


def test_node_that_rejoins_after_a_newer_incarnation_is_fenced():
    with local_nodes("n1", "n2", "n3", copies=2) as nodes:
        save_version(nodes, 1)
        nodes.wait_replicated(1)
        n3, past = nodes["n3"], shard_key(9, 2)
        for other in ("n1", "n2"):
            nodes.network.cut("n3", other)
        n3.write(past, SIZE, parts=3)  # a version that the others never finish
        nodes.network.kill_node("n3")
        n3.close()
        wait_until(lambda: nodes["n1"].sees_alive("n1", "n2"))
        epoch = nodes["n1"].store.claim(JOB, "b")
        assert epoch == past.epoch + 1
        newer = [shard_key(2, part, epoch=epoch, name="b") for part in range(2)]
        for node, of in zip(("n1", "n2"), newer, strict=True):
            nodes[node].write(of, SIZE, parts=2)
        nodes.wait_replicated(2, "n1", "n2")
        for other in ("n1", "n2"):
            nodes.network.heal("n3", other)
        n3.open()
        wait_until(lambda: n3.store.jobs.versions(JOB).owner == (epoch, "b"), "n3 knows the newer incarnation")
        with pytest.raises(FencedError, match="past incarnation"):
            n3.store.lease(shard_key(10, 2), SIZE, 3)
        nodes.wait_replicated(2, "n3")
        wait_until(lambda: not n3.job_peers.replicator.has_pending)
        wait_until(lambda: nodes.holders(past) == {"n3"}, "n3 has verified its shards")
        assert not nodes.holders(shard_key(2, 2))
        assert_copies(nodes, newer, copies=2)


@pytest.mark.parametrize("both", [True, False])
def test_only_the_side_with_a_quorum_begins_a_new_incarnation(both):
    with local_nodes("n1", "n2", "n3", "n4", copies=2, labels=rack_of) as nodes:
        keys = save_version(nodes, 1)
        nodes.wait_replicated(1)
        for near in ("n1", "n2"):
            for far in ("n3", "n4"):
                nodes.network.cut(near, far, both=both)
        wait_until(
            lambda: not nodes["n3"].job_peers.membership.has_quorum and not nodes["n4"].job_peers.membership.has_quorum
        )
        wait_until(lambda: nodes["n1"].sees_alive("n1", "n2") and nodes["n2"].sees_alive("n1", "n2"))
        for name in ("n3", "n4"):
            with pytest.raises(NoQuorumError, match="no quorum"):
                nodes[name].store.claim(JOB, "wrong")
        wait_until(lambda: nodes["n1"].job_peers.membership.has_quorum)
        epoch = nodes["n1"].store.claim(JOB, "b")
        newer = [shard_key(2, part, epoch=epoch, name="b") for part in range(2)]
        for node, of in zip(("n1", "n2"), newer, strict=True):
            nodes[node].write(of, SIZE, parts=2)
        nodes.wait_replicated(2, "n1", "n2")
        # The other half continues to write for the old incarnation. It completes no version, and keeps version 1.
        for version in (2, 3, 4, 5):
            for part, name in ((2, "n3"), (3, "n4")):
                with contextlib.suppress(ArenaBusyError):
                    nodes[name].write(shard_key(version, part), SIZE, parts=4)
        assert nodes["n3"].newest_replicated == nodes["n4"].newest_replicated == 1
        assert {of for of in keys if nodes["n3"].holds(of) or nodes["n4"].holds(of)} == set(keys)
        for near in ("n1", "n2"):
            for far in ("n3", "n4"):
                nodes.network.heal(near, far)
        for name in ("n3", "n4"):
            wait_until(
                lambda name=name: nodes[name].store.jobs.versions(JOB).owner == (epoch, "b"),
                f"{name} is fenced",
            )
            with pytest.raises(FencedError):
                nodes[name].store.lease(shard_key(6, 3), SIZE, 4)
        nodes.wait_replicated(2)
        assert_copies(nodes, newer, copies=2)


def test_minority_of_a_partition_evicts_nothing_even_with_all_parts():
    """The job runs on the isolated node, which holds all parts of each version."""
    with local_nodes("n1", "n2", "n3", copies=2) as nodes:
        n1 = nodes["n1"]
        n1.write(shard_key(1), SIZE)
        nodes.wait_replicated(1)
        for other in ("n2", "n3"):
            nodes.network.cut("n1", other)
        wait_until(lambda: not n1.job_peers.membership.has_quorum and n1.sees_alive("n1"), "n1 has no quorum")
        wait_until(lambda: nodes["n2"].sees_alive("n2", "n3") and nodes["n3"].sees_alive("n2", "n3"))
        epoch = nodes["n2"].store.claim(JOB, "b")
        for version in (2, 3):
            nodes["n2"].write(shard_key(version, epoch=epoch, name="b"), SIZE)
            nodes.wait_replicated(version, "n2", "n3")
        for version in (2, 3):  # the node has two slots for a writer, and one more
            n1.write(shard_key(version), SIZE)
        wait_until(lambda: not n1.job_peers.replicator.has_pending)
        with pytest.raises(ArenaBusyError, match="not complete yet"):
            n1.store.lease(shard_key(4), SIZE, 1)
        assert n1.newest_replicated == 1
        assert n1.has_intact_shard(shard_key(1))
        for other in ("n2", "n3"):
            nodes.network.heal("n1", other)
        wait_until(lambda: n1.store.jobs.versions(JOB).owner == (epoch, "b"), "n1 is fenced")
        nodes.wait_replicated(3)
        assert_copies(nodes, [shard_key(3, epoch=epoch, name="b")], copies=2)


def test_node_left_alone_continues_with_one_copy_and_reports_it():
    with local_nodes("n1", "n2", copies=2) as nodes:
        nodes["n1"].write(shard_key(1), SIZE)
        nodes.wait_replicated(1)
        nodes.lose("n2")
        n1 = nodes["n1"]
        wait_until(lambda: n1.sees_alive("n1"))
        for version in range(2, 8):
            lease_within(n1, shard_key(version))
            nodes.wait_replicated(version)
        (newest,) = [one for one in n1.job_peers.replicator.statuses() if one.key == shard_key(7)]
        assert (newest.copies, newest.missing, newest.unplaceable) == (1, 0, 1)
        assert n1.has_intact_shard(shard_key(7))


def lease_within(node, of):
    """Write a shard as soon as a slot is free."""
    lease = node.store.lease(of, SIZE, 1, wait_s=60)
    write_slot(lease, shard_content(of, SIZE))
    node.store.seal(lease.id, SIZE)


def test_replicated_version_is_kept_while_newer_copies_are_pending():
    """The partner refuses copies for a while. The writer fills its own slots and then waits."""
    with local_nodes("n1", "n2", copies=2) as nodes:
        n1, receiving = nodes["n1"], nodes["n2"].node_peers.server.replica_receiver
        n1.write(shard_key(1), SIZE)
        nodes.wait_replicated(1)
        offer, receiving.handle_offer = receiving.handle_offer, raise_busy
        for version in (2, 3):  # two slots for a writer, and one more
            n1.write(shard_key(version), SIZE)
        with pytest.raises(ArenaBusyError, match="with its copies"):
            n1.write(shard_key(4), SIZE)
        assert n1.has_intact_shard(shard_key(1))
        assert n1.newest_replicated == 1
        assert nodes["n2"].holds(shard_key(1))
        wait_until(
            lambda: "every slot is in use" in n1.job_peers.replicator.last_errors(shard_key(2)),
            "n1 has recorded the reason",
        )
        receiving.handle_offer = offer
        lease_within(n1, shard_key(4))
        nodes.wait_replicated(4)
        assert_copies(nodes, [shard_key(4)], copies=2)


@pytest.mark.parametrize("end", ["n1", "n2", "n3"])
def test_bad_path_delays_no_version(end):
    """The third node reaches both ends of the path, so both stay alive and it receives the copies."""
    with local_nodes("n1", "n2", "n3", copies=2) as nodes:
        (partner,) = nodes[end].job_peers.replicator.partners
        nodes.network.cut(end, partner)
        for near, far in (end, partner), (partner, end):  # TCP would close the connections only after half a minute
            for line in list(nodes[near].job_peers.membership.client_for(far)._pool._idle):
                line.close()
        keys = [shard_key(1, part) for part in range(3)]
        for node, of in zip(nodes, keys, strict=True):
            node.write(of, SIZE, parts=3)
        nodes.wait_replicated(1)
        for of in keys:
            assert len(nodes.holders(of)) >= 2
            assert all(nodes[name].has_intact_shard(of) for name in nodes.holders(of))
        for node in nodes:
            assert node.job_peers.membership.state_of(end) != "dead"
            assert node.job_peers.membership.state_of(partner) != "dead"


def raise_busy(*_):
    raise ArenaBusyError("every slot is in use")


def test_restarted_agent_does_not_treat_unmet_nodes_as_dead():
    """The agent neither takes over their shards nor reports a version as replicated."""
    patient = MembershipSettings(heartbeat_s=0.1, ping_timeout_s=100.0)
    with local_nodes("n1", "n2", copies=2, membership=patient) as nodes:
        mine, other = shard_key(1, 0), shard_key(1, 1)
        nodes["n1"].write(mine, SIZE, parts=2)
        nodes["n2"].write(other, SIZE, parts=2)
        nodes.wait_replicated(1)
        nodes.network.cut("n1", "n2")
        nodes["n1"].write(shard_key(2), SIZE)
        n1 = nodes.restart("n1")
        wait_until(lambda: n1.shard_infos().keys() == {mine, other, shard_key(2)}, "n1 has loaded its shards")
        n1.job_peers._changed()  # as after every change of the membership
        n1.job_peers.replicator._report_to_leader()
        assert n1.job_peers.taken_over == 0
        assert n1.shard_infos()[other].holders == ("n2", "n1")
        assert n1.newest_replicated == 1
        nodes.network.heal("n1", "n2")
        nodes.wait_replicated(2)
        assert nodes.holders(shard_key(2)) == {"n1", "n2"}
        assert n1.job_peers.taken_over == 0


def test_isolated_node_catches_up_after_healing():
    with local_nodes("n1", "n2", "n3") as nodes:
        save_version(nodes, 1)
        nodes.wait_replicated(1)
        nodes["n1"].node_peers.partition(3600.0)
        wait_until(lambda: not nodes["n1"].job_peers.membership.has_quorum, "n1 has no quorum")
        wait_until(lambda: nodes["n2"].sees_alive("n2", "n3"), "n2 has removed n1")
        keys = save_version(nodes, 2)
        wait_until(lambda: nodes["n3"].holds(keys[1]), "the other nodes continue")
        assert [node.newest_replicated for node in nodes] == [1, 1, 1]
        nodes["n1"].node_peers.partition(0.0)
        nodes.wait_replicated(2)
        assert_copies(nodes, keys, copies=2)


def test_reconnected_nodes_commit_without_waiting_for_the_next_period():
    """The heartbeat period is longer than the test, so nodes must report as soon as they meet."""
    slow = MembershipSettings(heartbeat_s=3600.0)
    with local_nodes("n1", "n2", membership=slow) as nodes:
        config = nodes.peers_config()
        alone = msgspec.structs.replace(config, member_list=member_list(config.member_list.version, [nodes["n1"].node]))
        for node in nodes:
            node.join(alone)
        assert nodes["n1"].sees_alive("n1")
        nodes.join_all()
        nodes["n1"].write(shard_key(1, 0), parts=2)
        nodes["n2"].write(shard_key(1, 1), parts=2)
        nodes.wait_replicated(1)


def test_node_pinged_during_a_member_list_change_joins():
    """The reply to the earlier ping belongs to an old member list, and the next heartbeat is an hour away."""
    slow = MembershipSettings(heartbeat_s=3600.0)
    with local_nodes("n1", "n2", membership=slow) as nodes:
        membership = nodes["n1"].job_peers.membership
        ping_acked, acked, resumed = membership._ping_acked, threading.Event(), threading.Event()

        def signal_and_wait(node, answer):
            ping_acked(node, answer)
            acked.set()
            assert resumed.wait(60)

        membership._ping_acked = signal_and_wait
        try:
            membership.run_period()
            assert acked.wait(60)
            alone = member_list(nodes.peers_config().member_list.version, [nodes["n1"].node])
            for node in nodes:
                node.join(msgspec.structs.replace(nodes.peers_config(), member_list=alone))
            nodes.join_all()
        finally:
            membership._ping_acked = ping_acked
            resumed.set()
        nodes["n1"].write(shard_key(1, 0), parts=2)
        nodes["n2"].write(shard_key(1, 1), parts=2)
        nodes.wait_replicated(1)
