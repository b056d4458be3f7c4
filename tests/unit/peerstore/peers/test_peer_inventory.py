"""Queries of dead nodes: seldom, short and concurrent; every node is in the inventory."""

import contextlib
import threading

from peerstore.errors import PeerUnreachableError
from peerstore.membership.topology import NodeId, PeerNode, member_list
from peerstore.peers.peer_inventory import (
    DEAD_NODE_TIMEOUT_S,
    NEGATIVE_CACHE_S,
    NODE_INVENTORY_TIMEOUT_S,
    InventoryService,
)
from peerstore.peers.peer_messages import NodeInventory

EMPTY = NodeInventory((), 1, "a", None, 0)
BUSY = NodeInventory((), 1, "a", None, 3)


class Watched:
    """Nodes as seen by the membership and the network."""

    def __init__(self, *names):
        self.this_node = PeerNode(NodeId("me"), "me:1")
        self.member_list = member_list(1, [self.this_node, *(PeerNode(NodeId(name), f"{name}:1") for name in names)])
        self.dead, self.away = set(), set()
        self.asked = []
        self.now = 0.0
        self.answers = {}
        self.costs_s, self.takes_s = DEAD_NODE_TIMEOUT_S, 0.0

    def clock(self):
        return self.now

    @property
    def generations(self):
        return {}

    def state_of(self, name):
        return "dead" if name in self.dead else "alive"

    def client_for(self, name):
        return Line(self, name)

    @contextlib.contextmanager
    def looked_at(self):
        looking = InventoryService(self, lambda: EMPTY, clock=self.clock)
        try:
            yield looking
        finally:
            looking.close()

    def lose(self, *names):
        self.away |= set(names)
        self.dead |= set(names)


class Line:
    def __init__(self, watched, name):
        self.watched, self.name, self.address = watched, name, f"{name}:1"

    def call(self, op, _body, _result, *, within_s):
        assert op == "node_inventory"
        self.watched.asked.append((self.name, within_s))
        if self.name in self.watched.away:
            self.watched.now += min(within_s, self.watched.costs_s)
            raise PeerUnreachableError(f"{self.name} does not answer")
        self.watched.now += self.watched.takes_s
        return self.watched.answers[self.name].pop(0) if self.name in self.watched.answers else EMPTY


def test_dead_node_is_queried_seldom_with_a_short_timeout():
    watched = Watched("n1", "n2")
    watched.lose("n2")
    with watched.looked_at() as looking:
        for _ in range(5):
            sight = looking.get(fresh=True)
            assert set(sight.nodes) == {"me", "n1"}
            assert sight.unreachable == {"n2": "n2 does not answer"}
        assert [asked for asked in watched.asked if asked[0] == "n2"] == [("n2", DEAD_NODE_TIMEOUT_S)]
        assert [asked for asked in watched.asked if asked[0] == "n1"] == 5 * [("n1", NODE_INVENTORY_TIMEOUT_S)]
        watched.now += NEGATIVE_CACHE_S
        looking.get(fresh=True)
        assert len([asked for asked in watched.asked if asked[0] == "n2"]) == 2


def test_recovered_node_is_queried_at_once():
    watched = Watched("n1")
    watched.lose("n1")
    with watched.looked_at() as looking:
        assert set(looking.get(fresh=True).unreachable) == {"n1"}
        watched.dead.clear()
        watched.away.clear()
        assert set(looking.get(fresh=True).nodes) == {"me", "n1"}
        watched.lose("n1")
        looking.invalidate()
        assert set(looking.get(fresh=True).unreachable) == {"n1"}
        watched.dead.clear()
        looking.invalidate()  # membership has changed
        watched.dead.add("n1")
        watched.away.clear()
        assert set(looking.get(fresh=True).nodes) == {"me", "n1"}, "it came back, whatever is said of it by now"


def test_dead_node_that_answers_is_included():
    watched = Watched("n1")
    watched.dead.add("n1")
    with watched.looked_at() as looking:
        assert set(looking.get(fresh=True).nodes) == {"me", "n1"}
        assert looking.get(fresh=True).unreachable == {}


def test_refusing_node_is_queried_every_time():
    """The query costs nothing, and a restarted agent is seen before its first ping."""
    watched = Watched("n1")
    watched.lose("n1")
    watched.costs_s = 0.0
    with watched.looked_at() as looking:
        for _ in range(3):
            assert set(looking.get(fresh=True).unreachable) == {"n1"}
        assert len(watched.asked) == 3


def test_node_not_known_dead_is_queried_every_time():
    watched = Watched("n1")
    watched.away.add("n1")
    with watched.looked_at() as looking:
        for _ in range(3):
            assert set(looking.get(fresh=True).unreachable) == {"n1"}
        assert [within_s for _, within_s in watched.asked] == 3 * [NODE_INVENTORY_TIMEOUT_S]


def test_inventory_waits_for_a_verifying_node():
    watched = Watched("n1")
    watched.answers = {"n1": [BUSY, BUSY, EMPTY]}
    with watched.looked_at() as looking:
        sight = looking.get(fresh=True)
    assert sight.nodes["n1"] is EMPTY
    assert sight.unreachable == {}


def test_inventory_names_a_node_that_verifies_too_long():
    watched = Watched("n1")
    watched.answers, watched.takes_s = {"n1": [BUSY, EMPTY]}, NODE_INVENTORY_TIMEOUT_S
    with watched.looked_at() as looking:
        sight = looking.get(fresh=True)
    assert sight.nodes["n1"] is BUSY
    assert sight.unreachable == {"n1": "it still verifies 3 shards that its last agent left"}


def test_dead_nodes_are_queried_concurrently():
    """All queries wait at one barrier, which each of them must reach."""
    names = [f"n{number}" for number in range(20)]
    watched = Watched(*names)
    watched.lose(*names)
    together = threading.Barrier(len(names))

    class Waits(Line):
        def call(self, *args, **options):
            together.wait(60)
            return super().call(*args, **options)

    watched.client_for = lambda name: Waits(watched, name)
    with watched.looked_at() as looking:
        assert set(looking.get(fresh=True).unreachable) == set(names)
