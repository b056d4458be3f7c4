"""Versions that somebody wants kept, or gives up: every node of the job hears of it."""

from tests.support.neighbours import neighbours, until
from tests.support.stores import MIB, key

V1 = key(1)
ALL = ("n1", "n2", "n3")


def kept_on(nodes):
    return {name for name in ALL if V1.group in nodes[name].store.kept("job")}


def write(nodes, versions):
    for version in versions:
        nodes["n1"].write(key(version), MIB)
        nodes.settle(version)


def test_what_one_node_keeps_all_keep_until_one_of_them_lets_it_go():
    with neighbours(*ALL, copies=3) as nodes:
        write(nodes, [1])
        nodes["n2"].store.keep("job", V1.group)
        until(lambda: kept_on(nodes) == {*ALL}, "all have heard that it is kept")
        write(nodes, range(2, 7))
        assert nodes.holders(V1) == {*ALL}
        nodes["n3"].store.keep("job", V1.group, kept=False)
        until(lambda: not kept_on(nodes), "all have heard that it is not kept any more")
        write(nodes, range(7, 10))
        assert nodes.holders(V1) == set()


def test_what_is_dropped_is_gone_everywhere_and_no_ping_brings_it_back():
    with neighbours(*ALL, copies=3) as nodes:
        write(nodes, [1, 2])
        group = key(2).group
        assert nodes["n3"].team.drop([group]) == {}
        nodes["n3"].store.forget("job", [group])
        assert nodes.holders(key(2)) == set()
        write(nodes, [3])  # pings were exchanged since
        assert {nodes[name].team.settled for name in ALL} == {key(3).group}
        assert nodes.holders(V1) | nodes.holders(key(3)) == {*ALL}
