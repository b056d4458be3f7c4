"""Retained and deleted versions on all nodes of a job."""

from concurrent.futures import ThreadPoolExecutor

from tests.support.local_nodes import local_nodes, wait_until
from tests.support.stores import MIB, shard_key

V1 = shard_key(1)
ALL = ("n1", "n2", "n3")


def nodes_retaining(nodes):
    return {name for name in ALL if V1.version_id in nodes[name].store.versions.retained("job")}


def write_everywhere(nodes, versions):
    for version in versions:
        nodes["n1"].write(shard_key(version), MIB)
        nodes.wait_replicated(version)


def test_retained_version_is_kept_everywhere_until_released():
    with local_nodes(*ALL, copies=3) as nodes:
        write_everywhere(nodes, [1])
        nodes["n2"].store.versions.retain("job", V1.version_id)
        wait_until(lambda: nodes_retaining(nodes) == {*ALL}, "all nodes retain the version")
        write_everywhere(nodes, range(2, 7))
        assert nodes.holders(V1) == {*ALL}
        nodes["n3"].store.versions.retain("job", V1.version_id, kept=False)
        wait_until(lambda: not nodes_retaining(nodes), "all nodes have released the version")
        write_everywhere(nodes, range(7, 10))
        assert nodes.holders(V1) == set()


def test_deleted_version_is_gone_everywhere_and_stays_gone():
    with local_nodes(*ALL, copies=3) as nodes:
        write_everywhere(nodes, [1, 2])
        group = shard_key(2).version_id
        assert nodes["n3"].job_peers.broadcast_delete([group]) == {}
        nodes["n3"].store.versions.delete("job", [group])
        assert nodes.holders(shard_key(2)) == set()
        write_everywhere(nodes, [3])  # pings were exchanged since
        assert {nodes[name].job_peers.newest_replicated for name in ALL} == {shard_key(3).version_id}
        assert nodes.holders(V1) | nodes.holders(shard_key(3)) == {*ALL}


def test_superseded_replicas_are_deleted_unless_retained():
    """The owner names a version that has not reached every node."""
    with local_nodes(*ALL, copies=3) as nodes:
        writer, retaining, other = ALL
        write_everywhere(nodes, [1])
        nodes[retaining].store.versions.retain("job", V1.version_id)
        wait_until(lambda: nodes_retaining(nodes) == {*ALL}, "all nodes retain the version")
        write_everywhere(nodes, [2, 3])
        before = {fact.key for fact in nodes[writer].store.list_shards("job")}
        assert len(before) > 1
        later = shard_key(4).version_id
        assert nodes[writer].job_peers.broadcast_delete([later], superseded=True) == {}
        for name in (retaining, other):
            assert {fact.key.version_id for fact in nodes[name].store.list_shards("job")} == {V1.version_id}
        assert nodes[other].job_peers.broadcast_delete([later], superseded=True) == {}
        assert {fact.key for fact in nodes[writer].store.list_shards("job")} == before, "the writer keeps its shards"


def test_answering_nodes_delete_a_version_while_others_are_silent():
    names = [f"n{number}" for number in range(1, 10)]
    silent, last = names[1:7], names[8]
    with local_nodes(*names, copies=2) as nodes, ThreadPoolExecutor(1) as executor:
        nodes[last].write(shard_key(1), MIB)
        nodes.wait_replicated(1)
        for one in silent:
            for other in names:
                if other != one:
                    nodes.network.stall(one, other)
        deletion = executor.submit(nodes["n1"].job_peers.broadcast_delete, [shard_key(1).version_id])
        wait_until(lambda: not nodes[last].holds(shard_key(1)), "the node has deleted the version", timeout_s=20)
        assert set(deletion.result()) == set(silent), "the request must go to all nodes, also those without the version"
