"""A node that a job went on without waits for the others; not for one that is in its own world and meets it here."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch.distributed as dist

from peerstore.membership.topology import PeerNode, member_list, validate_node_id
from tieredckpt.agent.agent_api import KnownPeers
from tieredckpt.session import agent_discovery
from tieredckpt.settings import Settings

ME, OTHER = PeerNode(validate_node_id("n0"), "127.0.0.1:1"), PeerNode(validate_node_id("n1"), "127.0.0.1:2")


@dataclass
class Agent:
    """This node's, which has not heard of the other one since it came back."""

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
class Session:
    agent: Agent
    job: str = "job"
    settings: Settings = field(default_factory=Settings)
    has_single_agent: bool = False
    refresh_peer_plan: object = None
    joined: list[object] = field(default_factory=list)

    def join_peers(self, plan: object) -> None:
        self.joined.append(plan)


@pytest.fixture
def store(monkeypatch):
    """Of two ranks on two nodes, of which the second has said all that it has to."""
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
    (plan,) = session.joined
    assert [node.id for node in plan.member_list.nodes] == ["n0", "n1"]


def test_absent_node_is_awaited_until_it_answers(store, slept):
    session = Session(Agent([("n2",), ("n2",), ()]))
    agent_discovery.join_peer_agents(session, restoring=True)
    assert len(slept) == 2


def test_node_announces_itself_before_waiting_for_others(store, slept, monkeypatch):
    monkeypatch.setattr(
        agent_discovery.time,
        "sleep",
        lambda _s: slept.append(store.check(["tieredckpt/job/nodes/restoring/1/here/n0"])),
    )
    agent_discovery.join_peer_agents(Session(Agent([("n2",), ()])), restoring=True)
    assert slept == [True]


@pytest.mark.parametrize(
    ("rank", "addresses", "warnings"),
    [
        (0, ("127.0.0.1:1", "127.0.0.1:2"), 0),
        (0, ("10.0.0.1:1", "10.0.0.1:2"), 0),
        (0, ("10.0.0.1:1", "10.0.0.2:1"), 1),
        (1, ("10.0.0.1:1", "10.0.0.2:1"), 0),
    ],
    ids=["loopback", "one host", "two hosts", "another rank"],
)
def test_open_secret_is_a_warning_of_the_first_rank_on_several_machines(monkeypatch, caplog, rank, addresses, warnings):
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    nodes = [PeerNode(validate_node_id(f"n{at}"), address) for at, address in enumerate(addresses)]
    offer = agent_discovery._PeerPlanOffer(member_list(1, nodes), b"secret")
    agent_discovery._warn_of_open_secret.cache_clear()
    assert agent_discovery._agreed(offer, Settings().peer, "job") == b"secret"
    assert len([one for one in caplog.records if "peer.secret" in one.getMessage()]) == warnings


def test_nodes_of_earlier_worlds_stay_as_standby(store):
    third = PeerNode(validate_node_id("n2"), "127.0.0.1:3")
    store.set("tieredckpt/job/nodes/saving/1/1", agent_discovery._text(agent_discovery._NodeHello(OTHER, None)))
    session = Session(Agent([()], knows=(ME, OTHER, third)))
    agent_discovery.join_peer_agents(session)
    (plan,) = session.joined
    assert [node.id for node in plan.member_list.nodes] == ["n0", "n1", "n2"]
    assert plan.member_list.standby == ("n2",)


def test_single_node_keeps_those_of_earlier_worlds_as_standby(store, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    session = Session(Agent([()], knows=(ME, OTHER)))
    agent_discovery.join_peer_agents(session)
    (plan,) = session.joined
    assert plan.member_list.standby == ("n1",)
