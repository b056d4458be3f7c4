"""Many nodes on a network that delays, loses and cuts messages.

Every failure names its seed; ``Network(..., seed)`` with the same calls repeats the run.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from peerstore.membership.swim import MemberState
from peerstore.membership.topology import member_list
from tests.support.example_counts import examples
from tests.support.gossip_network import GossipNetwork, peer_node, peer_nodes

pytestmark = pytest.mark.slow

ALIVE, DEAD, SUSPECT = MemberState.ALIVE, MemberState.DEAD, MemberState.SUSPECT
LOSSY = {"loss": 0.05, "doubled": 0.1, "delay_s": (0.001, 0.4)}
NOTICED_S = 25.0
"""Until a partition of some two dozen nodes is noticed on all its sides, with much to spare."""
QUIET_S = 60.0


def names(count: int) -> list[str]:
    return [one.id for one in peer_nodes(count)]


def dead_in(net: GossipNetwork, name: str) -> int:
    return sum(member.state_of(name) is DEAD for member in net.up.values())


# -- who lives --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17, pytest.param(60, marks=pytest.mark.nightly)])
def test_simultaneously_started_nodes_converge(count):
    net = GossipNetwork(peer_nodes(count), seed=count)
    assert net.run_until(net.is_agreed, within_s=20) < 10
    assert net.with_quorum() == set(names(count))
    assert len({member.alive for member in net.up.values()}) == 1


@pytest.mark.parametrize("count", [2, 3, 7, 40])
@pytest.mark.parametrize("weather", [{}, LOSSY], ids=["fair", "lossy"])
def test_a_dead_node_is_dead_for_all(count, weather):
    net = GossipNetwork(peer_nodes(count), seed=count, **weather)
    net.run_until(net.is_agreed, within_s=60)
    net.kill("n0001")
    net.run_until(lambda: dead_in(net, "n0001") == count - 1, within_s=30)
    net.run(20)
    assert dead_in(net, "n0001") == count - 1


def test_lossy_network_declares_no_node_dead():
    net = GossipNetwork(peer_nodes(30), 11, **LOSSY)
    net.run(20)

    def watch():
        for member in net.up.values():
            assert len(member.alive) == 30, f"seed {net.seed}: {member.explain_quorum()}"

    for _ in range(60):
        net.run(1)
        watch()


@pytest.mark.parametrize(
    "one_way", [pytest.param(False, marks=pytest.mark.nightly, id="both ways"), pytest.param(True, id="one way")]
)
def test_broken_path_between_two_nodes_suspects_neither(one_way):
    net = GossipNetwork(peer_nodes(30), 3)
    net.run_until(net.is_agreed, within_s=30)
    a = net.up["n0000"]
    b = next(ping.node.id for ping in a.tick(net.now))  # the one it watches
    net.cut = lambda x, y: (x, y) == ("n0000", b) or (not one_way and (y, x) == ("n0000", b))
    for _ in range(120):
        net.run(1)
        assert all(member.state_of(name) is ALIVE for member in net.up.values() for name in ("n0000", b))
    net.heal()
    net.run_until(net.is_agreed, within_s=30)


@pytest.mark.parametrize("count", [5, 8, 30])
def test_nodes_unreachable_from_one_node_stay_alive_and_keep_quorum(count):
    net = GossipNetwork(peer_nodes(count), 7)
    net.run_until(net.is_agreed, within_s=30)
    one = "n0000"
    lost = {ping.node.id for ping in net.up[one].tick(net.now)}
    lost = set(sorted(lost)[:3] if count > 5 else sorted(lost)[:2])
    net.cut = lambda a, b: (a == one and b in lost) or (b == one and a in lost)
    for _ in range(120):
        net.run(1)
        assert net.is_agreed()
        assert net.with_quorum() == set(names(count))
    net.heal()
    net.kill(one)
    net.run_until(lambda: dead_in(net, one) == count - 1, within_s=30)


@pytest.mark.parametrize(("hears", "speaks"), [(False, True), (True, False), (False, False)])
def test_node_that_cannot_send_or_receive_is_dead_and_has_no_quorum(hears, speaks):
    net = GossipNetwork(peer_nodes(9), 5)
    net.run_until(net.is_agreed, within_s=30)
    deaf = "n0004"
    net.cut = lambda a, b: (a == deaf and not speaks) or (b == deaf and not hears)
    net.run(NOTICED_S)
    assert dead_in(net, deaf) == 8
    assert net.with_quorum() == set(names(9)) - {deaf}
    net.heal()
    net.run_until(net.is_agreed, within_s=30)


def test_node_restarted_at_once_is_never_dead_and_has_its_new_address():
    net = GossipNetwork(peer_nodes(12), 8)
    net.run_until(net.is_agreed, within_s=30)
    again = peer_node("n0003", rack="elsewhere")
    net.start(again, net.roster)
    for _ in range(20):
        net.run(1)
        assert dead_in(net, "n0003") <= 1  # only itself has to find the others again
    assert all(again in member.alive for member in net.up.values())


def test_resumed_machine_declares_no_node_dead():
    net = GossipNetwork(peer_nodes(9), 4)
    net.run_until(net.is_agreed, within_s=30)
    sleeper = net.up["n0005"]
    net.suspend("n0005", 600)
    net.run(599)
    assert dead_in(net, "n0005") == 8
    net.run(2)
    assert net.alive("n0005") == set(names(9))
    assert not sleeper.has_quorum
    net.run_until(lambda: net.is_agreed() and sleeper.has_quorum, within_s=30)
    assert {dead_in(net, name) for name in net.up} == {0}


@pytest.mark.parametrize("leap_s", [3600.0, -3600.0])
def test_clock_jump_of_one_node_does_not_affect_others(leap_s):
    net = GossipNetwork(peer_nodes(9), 6)
    net.run_until(net.is_agreed, within_s=30)
    net.clock["n0002"] += leap_s
    for _ in range(30):
        net.run(1)
        assert net.is_agreed()
    assert net.with_quorum() == set(names(9))


# -- partitions -------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.data(), st.integers(0, 1 << 20), st.booleans())
@settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.too_slow])
def test_two_sides_of_a_partition_never_both_have_a_quorum(count, data, seed, lossy):
    side = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    net = GossipNetwork(peer_nodes(count), seed, **(LOSSY if lossy else {}))
    net.run(20)
    sides = [{name for name, one in zip(names(count), side, strict=True) if one == number} for number in range(3)]
    net.split(*sides)
    net.run(NOTICED_S)

    def watch():
        deciding = net.with_quorum()
        assert sum(bool(deciding & one) for one in sides) <= 1, f"seed {net.seed}: {net.describe()}"

    for _ in range(20):
        net.run(1)
        watch()
    if not lossy:
        expected = [one for one in sides if net.roster.has_quorum(one)]
        assert net.with_quorum() == (expected[0] if expected else set())
    net.loss = 0.0
    net.heal()
    net.run_until(net.is_agreed, within_s=QUIET_S)


@pytest.mark.parametrize("minority", [29, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 4, 12, 20, 30))])
def test_minority_loses_quorum_and_the_majority_continues(minority):
    net = GossipNetwork(peer_nodes(60), seed=minority)
    net.run_until(net.is_agreed, within_s=30)
    small = set(net.random.sample(names(60)[1:], minority))
    large = set(names(60)) - small
    net.split(small, large)
    net.run_until(lambda: not net.with_quorum() & small, within_s=15)
    net.run_until(lambda: net.with_quorum() == large, within_s=15)
    for _ in range(40):
        net.run(1)
        assert net.with_quorum() == large
    net.heal()
    net.run_until(lambda: net.is_agreed() and len(net.with_quorum()) == 60, within_s=30)


# -- rosters and fences -----------------------------------------------------------------------------------------------


def test_fence_reaches_all_nodes_after_a_partition():
    net = GossipNetwork(peer_nodes(30), 2, **LOSSY)
    net.run_until(net.is_agreed, within_s=60)
    small = set(names(30)[20:])
    net.split(small, set(names(30)) - small)
    net.run(20)
    net.up["n0003"].advance_fence((2, "new"))
    net.up["n0025"].advance_fence((1, "stale"))
    net.run_until(lambda: all(member.fence[0] for member in net.up.values()), within_s=20)
    assert {name for name, member in net.up.items() if member.fence == (1, "stale")} == small
    net.heal()
    net.run_until(lambda: {member.fence for member in net.up.values()} == {(2, "new")}, within_s=30)


def test_new_member_list_spreads_from_a_single_node():
    net = GossipNetwork(peer_nodes(20), 9)
    net.run_until(net.is_agreed, within_s=30)
    newcomer = peer_node("newcomer")
    net.roster = member_list(2, [*net.roster.nodes[5:], newcomer])
    net.start(newcomer, net.roster)
    net.run_until(net.is_agreed, within_s=30)
    assert {member.member_list for member in net.up.values()} == {net.roster}
    assert net.with_quorum() == {one.id for one in net.roster.nodes}
    assert "n0000 is not in member list 2" in net.up["n0000"].explain_quorum()


def test_node_without_a_member_list_gets_it_from_a_ping():
    net = GossipNetwork(peer_nodes(5), 9)
    net.kill("n0002")
    assert net.start(peer_nodes(5)[2]).member_list is None
    net.run_until(net.is_agreed, within_s=30)


# -- what it costs ----------------------------------------------------------------------------------------------------


def measure(count: int, periods: int) -> tuple[float, float]:
    """Return the messages that a node sends in a period: the mean and the busiest node's."""
    net = GossipNetwork(peer_nodes(count), 1)
    net.run(6)
    net.messages.clear()
    net.run(periods)
    sent = [net.messages[one.id] / periods for one in net.roster.nodes]
    return sum(sent) / count, max(sent)


def test_messages_of_a_node_do_not_grow_with_the_job():
    for count in (10, 100):
        mean, most = measure(count, 5)
        assert 7.5 <= mean <= 8.5  # four pings, and four answers to others
        assert most <= 14


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_messages_of_each_of_a_thousand_nodes_are_as_many_as_of_ten():
    mean, most = measure(1000, 3)
    assert 7.5 <= mean <= 8.5
    assert most <= 16


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_four_hundred_nodes_notice_deaths_and_partitions_and_agree_again():
    net = GossipNetwork(peer_nodes(400), 1)
    net.run_until(net.is_agreed, within_s=40)
    net.kill("n0200")
    net.run_until(lambda: dead_in(net, "n0200") == 399, within_s=40)
    small = set(net.random.sample(names(400), 40))
    net.split(small, set(names(400)) - small)
    net.run_until(lambda: not net.with_quorum() & small, within_s=30)
    net.heal()
    net.run_until(net.is_agreed, within_s=120)


# -- random lives -----------------------------------------------------------------------------------------------------


class Lives(RuleBasedStateMachine):
    """Random faults hit up to 60 nodes; after the faults end, all nodes agree."""

    largest = 12

    @initialize(data=st.data(), seed=st.integers(0, 1 << 30), lossy=st.booleans())
    def begin(self, data, seed, lossy):
        count = data.draw(st.integers(1, self.largest))
        self.net = GossipNetwork(peer_nodes(count), seed, **(LOSSY if lossy else {}))
        self.random = random.Random(seed)
        self.fences, self.epoch, self.sides, self.since = {}, 0, None, 0.0
        note(f"seed {seed}")

    def some(self, of):
        return [name for name in sorted(of) if self.random.random() < 0.5]

    @rule(seconds=st.sampled_from([0.3, 1, 3, 8, 20]))
    def time_passes(self, seconds):
        self.net.run(seconds)

    @rule()
    @precondition(lambda self: len(self.net.up) > 1)
    def somebody_dies(self):
        self.net.kill(self.random.choice(sorted(self.net.up)))

    @rule()
    def somebody_starts_or_restarts(self):
        again = self.random.choice(self.net.roster.nodes)
        self.net.start(again, self.net.roster if self.random.random() < 0.8 else None)

    @rule()
    def the_network_splits(self):
        mine = set(self.some(self.net.lives))
        self.sides, self.since = (mine, set(self.net.lives) - mine), self.net.now
        self.net.split(*self.sides)

    @rule()
    def some_paths_break_one_way(self):
        broken = {(a, b) for a in self.some(self.net.lives) for b in self.some(self.net.lives)}
        self.sides, self.net.cut = None, lambda a, b: (a, b) in broken

    @rule()
    def the_network_heals(self):
        self.sides = None
        self.net.heal()

    @rule(seconds=st.sampled_from([2, 10, 1000]))
    @precondition(lambda self: len(self.net.up) > 1)
    def somebody_sleeps(self, seconds):
        self.net.suspend(self.random.choice(sorted(self.net.up)), seconds)

    @rule(leap_s=st.sampled_from([-1000.0, -2.0, 4.0, 1000.0]))
    def a_clock_jumps(self, leap_s):
        self.net.clock[self.random.choice(sorted(self.net.lives))] += leap_s

    @rule()
    def somebody_claims_the_job(self):
        self.epoch += 1
        self.net.up[self.random.choice(sorted(self.net.up))].advance_fence((self.epoch, "x"))

    @invariant()
    def fences_only_rise(self):
        for member in self.net.up.values() if hasattr(self, "net") else ():
            _, before = self.fences.get(id(member), (member, (0, "")))
            assert member.fence >= before, f"seed {self.net.seed}"
            self.fences[id(member)] = member, member.fence  # kept, so that no other object gets its id

    @invariant()
    def never_two_sides_with_a_quorum(self):
        if hasattr(self, "net") and self.sides and self.net.now - self.since > NOTICED_S:
            deciding = self.net.with_quorum()
            assert not all(deciding & side for side in self.sides), f"seed {self.net.seed}: {self.net.describe()}"

    def teardown(self):
        if not hasattr(self, "net") or not self.net.up:
            return
        self.net.heal()
        self.net.loss = 0.0
        for name in sorted(set(self.net.lives) - set(self.net.up))[:3]:
            self.net.start(next(one for one in self.net.roster.nodes if one.id == name), self.net.roster)
        told = [member for member in self.net.up.values() if member.member_list]
        if told:
            self.net.run(20)
            self.net.run_until(self.net.is_agreed, within_s=QUIET_S)
            assert len({member.alive for member in self.net.up.values()}) == 1
            assert len({member.fence for member in self.net.up.values()}) == 1


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=examples(60), stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class ManyLives(Lives):
    largest = 60


@pytest.mark.nightly
@pytest.mark.timeout(3600)
class TestManyLives(ManyLives.TestCase):
    settings = settings(
        max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
