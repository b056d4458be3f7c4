"""A node that returns to a job waits for the other nodes, except nodes of its own world."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch.distributed as dist

from peerstore.errors import AgentUnreachableError
from peerstore.membership.topology import PeerNode, member_list, validate_node_id
from tieredckpt.agent.agent_api import KnownPeers
from tieredckpt.session import agent_discovery
from tieredckpt.settings import Settings, settings_from_mapping

ME, OTHER = PeerNode(validate_node_id("n0"), "127.0.0.1:1"), PeerNode(validate_node_id("n1"), "127.0.0.1:2")


@dataclass
class Agent:
    """This node's agent, which has no report from the other node since its own return."""

    answers: list[tuple[str, ...]]
    asked: int = 0
    knows: tuple[PeerNode, ...] = (ME,)

    def this_node(self) -> PeerNode:
        return ME

    def known_peers(self, job: str) -> KnownPeers:
        silent = self.answers[min(self.asked, len(self.answers) - 1)]
        self.asked += 1
        return KnownPeers(b"s" * 32, self.knows, 7, silent)


@dataclass
class Registration:
    has_single_agent: bool = False
    refresh_peer_plan: object = None
    standby_nodes: tuple[PeerNode, ...] = ()
    joined: list[object] = field(default_factory=list)

    def join_peers(self, plan: object) -> None:
        self.joined.append(plan)

    @property
    def peer_plan(self):
        return self.joined[-1] if self.joined else None


@dataclass
class Session:
    agent: Agent
    job: str = "job"
    settings: Settings = field(default_factory=Settings)
    registration: Registration = field(default_factory=Registration)


@pytest.fixture
def store(monkeypatch):
    """A world of two ranks on two nodes; the second rank has already sent all its messages."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    store.set("tieredckpt/job/nodes/restoring/1/1", agent_discovery._text(agent_discovery._NodeHello(OTHER, None)))
    return store


@pytest.fixture
def slept(monkeypatch):
    naps: list[float] = []
    monkeypatch.setattr(agent_discovery.time, "sleep", naps.append)
    return naps


def test_node_of_the_same_world_is_not_awaited(store, slept):
    store.set("tieredckpt/job/nodes/restoring/1/here/n1", "1")
    session = Session(Agent([("n1",)]))
    agent_discovery.join_peer_agents(session, restoring=True)
    assert slept == []
    (plan,) = session.registration.joined
    assert [node.id for node in plan.member_list.nodes] == ["n0", "n1"]


def test_absent_node_is_awaited_until_it_answers(store, slept):
    session = Session(Agent([("n2",), ("n2",), ()]))
    agent_discovery.join_peer_agents(session, restoring=True)
    assert len(slept) == 2


def test_restore_continues_after_the_configured_wait(store, slept, monkeypatch, caplog):
    clock = iter(range(1000))
    monkeypatch.setattr(agent_discovery.time, "monotonic", lambda: float(next(clock)))
    session = Session(Agent([("n2",)]), settings=settings_from_mapping({"peer": {"unreachable_timeout_s": 7}}))
    agent_discovery.join_peer_agents(session, restoring=True)
    assert len(slept) == 6
    assert "without n2, which did not answer within 7 s (peer.unreachable_timeout_s)" in caplog.text


def test_node_announces_itself_before_waiting_for_others(store, slept, monkeypatch):
    monkeypatch.setattr(
        agent_discovery.time,
        "sleep",
        lambda _s: slept.append(store.check(["tieredckpt/job/nodes/restoring/1/here/n0"])),
    )
    agent_discovery.join_peer_agents(Session(Agent([("n2",), ()])), restoring=True)
    assert slept == [True]


@pytest.mark.parametrize(("rank", "warnings"), [(0, 1), (1, 0)])
def test_secret_in_the_store_is_a_warning_of_the_first_rank(monkeypatch, caplog, rank, warnings):
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    offer = agent_discovery._PeerPlanOffer(member_list(1, [ME, OTHER]), b"secret")
    agent_discovery._warn_of_open_secret.cache_clear()
    assert agent_discovery._agreed_secret(offer, Settings().peer, "job") == b"secret"
    assert len([one for one in caplog.records if "peer.secret" in one.getMessage()]) == warnings


def other_node(store, machine):
    hello = agent_discovery._NodeHello(OTHER, None, machine=machine)
    store.set("tieredckpt/job/nodes/saving/1/1", agent_discovery._text(hello))


class Eavesdropper:
    """A process that reads all keys in the store of the ranks."""

    def __init__(self, store):
        self._store, self.values = store, []

    def set(self, key, value):
        self.values.append(str(value))
        self._store.set(key, value)

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.mark.parametrize("knows", [(), (ME, OTHER)], ids=["generated", "of an earlier world"])
def test_nodes_of_one_machine_exchange_the_secret_in_a_private_file(store, monkeypatch, tmp_path, caplog, knows):
    agent_discovery._warn_of_open_secret.cache_clear()
    heard = Eavesdropper(store)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: heard)
    modes, write = [], agent_discovery._write_secret

    def written(session, secret):
        path = write(session, secret)
        modes.append(stat.S_IMODE(Path(path).stat().st_mode))
        return path

    monkeypatch.setattr(agent_discovery, "_write_secret", written)
    other_node(store, agent_discovery._machine())
    store.add("tieredckpt/job/nodes/saving/1/read", 1)  # the other rank has read it
    settings = settings_from_mapping({"agent": {"directory": str(tmp_path)}})
    session = Session(Agent([()], knows=knows), settings=settings)
    if not knows:
        monkeypatch.setattr(session.agent, "known_peers", lambda _job: None)
    agent_discovery.join_peer_agents(session)
    (plan,) = session.registration.joined
    packed = agent_discovery._text(plan.secret).strip('"')
    assert not [value for value in heard.values if packed in value]
    assert set(modes) == {0o600}
    assert list(tmp_path.iterdir()) == []  # the last reader deletes it
    assert "peer.secret" not in caplog.text


def test_nodes_of_several_machines_exchange_the_secret_in_the_store(store, tmp_path, caplog):
    agent_discovery._warn_of_open_secret.cache_clear()
    other_node(store, "another machine")
    settings = settings_from_mapping({"agent": {"directory": str(tmp_path)}})
    session = Session(Agent([()], knows=(ME, OTHER)), settings=settings)
    agent_discovery.join_peer_agents(session)
    (plan,) = session.registration.joined
    assert plan.secret == b"s" * 32
    assert list(tmp_path.iterdir()) == []
    assert caplog.text.count("peer.secret is not set") == 1


def test_nodes_of_earlier_worlds_stay_as_standby(store):
    third = PeerNode(validate_node_id("n2"), "127.0.0.1:3")
    store.set("tieredckpt/job/nodes/saving/1/1", agent_discovery._text(agent_discovery._NodeHello(OTHER, None)))
    session = Session(Agent([()], knows=(ME, OTHER, third)))
    agent_discovery.join_peer_agents(session)
    (plan,) = session.registration.joined
    assert [node.id for node in plan.member_list.nodes] == ["n0", "n1", "n2"]
    assert plan.member_list.standby == ("n2",)


def test_single_node_keeps_those_of_earlier_worlds_as_standby(store, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    session = Session(Agent([()], knows=(ME, OTHER)))
    agent_discovery.join_peer_agents(session)
    (plan,) = session.registration.joined
    assert plan.member_list.standby == ("n1",)


OUTSIDE = PeerNode(validate_node_id("n3"), "127.0.0.1:4")
LATE = PeerNode(validate_node_id("n4"), "127.0.0.1:5")
SHARED = b"a secret that all nodes share, 32"


@pytest.fixture
def configured():
    return settings_from_mapping({"peer": {"secret": SHARED.decode()}})


@pytest.fixture
def outside(store):
    """The nodes outside the world; the test changes them."""
    nodes = [OUTSIDE]
    with agent_discovery.use_standby_nodes(lambda: tuple(nodes)):
        yield nodes


def alone(monkeypatch, settings):
    """Return the session of the first rank of a world on one node that knows no other node."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    session = Session(Agent([()]), settings=settings)
    monkeypatch.setattr(session.agent, "known_peers", lambda _job: None)
    return session


def test_nodes_outside_the_world_are_standby(outside, monkeypatch, configured):
    session = alone(monkeypatch, configured)
    assert agent_discovery.join_peer_agents(session)
    (plan,) = session.registration.joined
    assert (plan.secret, plan.member_list.standby) == (SHARED, ("n3",))
    assert plan.member_list.nodes == (ME, OUTSIDE)


def test_nodes_outside_a_world_of_several_nodes_are_standby(outside, store, configured, monkeypatch):
    other_node(store, "another machine")
    session = Session(Agent([()]), settings=configured)
    monkeypatch.setattr(session.agent, "known_peers", lambda _job: None)
    agent_discovery.join_peer_agents(session)
    (plan,) = session.registration.joined
    assert plan.member_list.nodes == (ME, OTHER, OUTSIDE)
    assert plan.member_list.standby == ("n3",)


def test_ranks_of_one_node_use_the_list_of_the_first_one(outside, monkeypatch, configured):
    first = alone(monkeypatch, configured)
    agent_discovery.join_peer_agents(first)
    outside.append(LATE)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    second = alone(monkeypatch, configured)
    agent_discovery.join_peer_agents(second)
    assert second.registration.joined == first.registration.joined


@pytest.mark.parametrize("peer", [{}, {"secret": SHARED.decode(), "copies": 1}], ids=["no secret", "one copy"])
def test_nodes_outside_the_world_are_left_out_without_a_use_or_a_secret(outside, monkeypatch, peer):
    session = alone(monkeypatch, settings_from_mapping({"peer": peer}))
    assert not agent_discovery.join_peer_agents(session)
    assert session.registration.joined == []
    outside.append(LATE)
    assert not agent_discovery.join_standby_nodes(session)
    assert session.registration.joined == []


def test_nodes_that_join_during_the_world_are_added(outside, monkeypatch, configured):
    outside.clear()
    session = alone(monkeypatch, configured)
    assert not agent_discovery.join_peer_agents(session)
    assert not agent_discovery.join_standby_nodes(session)
    outside.append(OUTSIDE)
    assert agent_discovery.join_standby_nodes(session)
    assert not agent_discovery.join_standby_nodes(session)  # nothing new
    outside.append(LATE)
    assert agent_discovery.join_standby_nodes(session)
    one, two = session.registration.joined
    assert (one.member_list.nodes, one.member_list.standby) == ((ME, OUTSIDE), ("n3",))
    assert (two.member_list.nodes, two.member_list.standby) == ((ME, OUTSIDE, LATE), ("n3", "n4"))
    assert two.member_list.version > one.member_list.version
    outside.pop()
    assert agent_discovery.join_standby_nodes(session)
    assert len(session.registration.joined) == 2  # the dead node gets no replicas


def test_later_ranks_leave_new_nodes_to_the_first_one(outside, monkeypatch, configured):
    session = alone(monkeypatch, configured)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert agent_discovery.join_standby_nodes(session)
    assert session.registration.joined == []


def test_new_nodes_are_added_at_the_next_save_if_the_agent_fails(outside, monkeypatch, configured, caplog):
    session = alone(monkeypatch, configured)
    agent_discovery.join_peer_agents(session)
    outside.append(LATE)
    join = session.registration.join_peers

    def fail(_plan):
        raise AgentUnreachableError("no agent")

    monkeypatch.setattr(session.registration, "join_peers", fail)
    agent_discovery.join_standby_nodes(session)
    assert "nodes outside the world get no replicas yet: no agent" in caplog.text
    monkeypatch.setattr(session.registration, "join_peers", join)
    agent_discovery.join_standby_nodes(session)
    assert session.registration.joined[-1].member_list.standby == ("n3", "n4")
