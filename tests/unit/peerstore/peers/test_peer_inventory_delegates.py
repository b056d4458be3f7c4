"""Queries of partition delegates: duplicate replies, failed delegates and direct queries."""

import contextlib
from concurrent.futures import Future

import msgspec

from peerstore.errors import UnavailableError
from peerstore.membership.topology import DelegateCandidates
from peerstore.peers.peer_inventory import DelegateClient, _DelegateRound
from peerstore.peers.peer_messages import NodeInventory, PartitionInventory

EMPTY = msgspec.Raw(msgspec.msgpack.encode(NodeInventory((), 1, "a", None, 0)))


class Tending:
    """A cluster whose delegates return scripted replies."""

    def __init__(self, says, gone=(), dead=()):
        self.says, self.is_dead, self._dead = says, set(gone).__contains__, set(dead)
        self.asked = []

    def state_of(self, node):
        return "dead" if node in self._dead else "alive"

    def client_for(self, name):
        tending = self

        class Peer:
            def call(self, _op, asked, _result, *, within_s):
                tending.asked.append(name)
                answer = tending.says.get(name)
                if answer is None:
                    raise UnavailableError(f"{name} does not answer")
                return answer(asked.nodes)

        return Peer()


def all_of(nodes):
    return PartitionInventory(dict.fromkeys(nodes, EMPTY), {})


@contextlib.contextmanager
def afar(tending):
    directly = []

    def look_at(nodes):
        directly.append(dict(nodes))
        return dict.fromkeys(nodes, "looked at directly")

    with contextlib.closing(DelegateClient(tending, look_at)) as found:
        found.directly = directly
        yield found


def done(answer):
    future = Future()
    future.set_result(answer)
    return future


def test_either_of_two_simultaneous_replies_counts():
    with afar(Tending({})) as one:
        asking = _DelegateRound(one, [DelegateCandidates((), gone=lambda _: False)])
        asking._asked = {done(all_of(["a"])): 0, done(all_of(["a", "b"])): 0}
        (answer,) = asking.answers()
    assert set(answer.nodes) in ({"a"}, {"a", "b"})
    assert asking._asked == {}


def test_single_delegate_per_partition_is_queried():
    tending = Tending({"a": all_of, "c": all_of})
    with afar(tending) as one:
        found = one.collect([("a", "b"), ("c", "d")], short_s=1.0)
    assert sorted(tending.asked) == ["a", "c"]
    assert all(isinstance(looked, NodeInventory) for looked in found.values())
    assert set(found) == {"a", "b", "c", "d"}
    assert one.directly == [{}]


def test_dead_delegates_are_skipped_and_failed_ones_replaced():
    tending = Tending({"d": all_of}, gone={"a", "c"})
    with afar(tending) as one:
        found = one.collect([("a", "b", "c", "d")], short_s=1.0)
    assert tending.asked == ["b", "d"]
    assert set(found) == {"a", "b", "c", "d"}


def test_nodes_are_queried_directly_when_all_delegates_fail():
    tending = Tending({})
    with afar(tending) as one:
        found = one.collect([("a", "b")], short_s=1.0)
    assert one.directly == [{"a": None, "b": None}]
    assert found == dict.fromkeys("ab", "looked at directly")


def test_unreached_node_is_queried_briefly_unless_known_dead():
    def some(nodes):
        return PartitionInventory(
            {"a": EMPTY, "x": EMPTY}, {"b": "it does not answer", "c": "it does not answer", "x": "?"}
        )

    tending = Tending({"a": some}, dead={"c"})
    with afar(tending) as one:
        found = one.collect([("a", "b", "c", "d")], short_s=1.0)
    assert one.directly == [{"b": 1.0, "d": 1.0}]
    assert found["c"] == "it does not answer"
    assert "x" not in found
