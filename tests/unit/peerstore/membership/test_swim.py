"""One node's view of the others, call by call."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerstore.errors import RequestError
from peerstore.membership.swim import (
    BroadcastQueue,
    GossipMessage,
    MembershipSettings,
    MemberState,
    MemberUpdate,
    SwimMembership,
)
from peerstore.membership.topology import MemberList, NodeId, PeerNode, member_list
from tests.support.gossip_network import peer_node, peer_nodes

N1, N2, N3, N4, N5 = (peer_node(f"n{number}") for number in range(1, 6))
FIVE = member_list(1, [N1, N2, N3, N4, N5])
ALIVE, SUSPECT, DEAD = MemberState.ALIVE, MemberState.SUSPECT, MemberState.DEAD


def says(*rumours: MemberUpdate, roster: MemberList | None = None, fence=(0, "")) -> GossipMessage:
    return GossipMessage(rumours, roster.list_version if roster else None, fence)


def lives(one: PeerNode, number: int = 1) -> MemberUpdate:
    return MemberUpdate(one, number, ALIVE)


def view(
    me: PeerNode = N1, roster: MemberList | None = FIVE, *, sees=(), number: int = 1, **settings
) -> SwimMembership:
    member = SwimMembership(me, number, MembershipSettings(**settings), seed=1)
    if roster is not None:
        member.set_member_list(0.0, roster)
    member.receive_gossip(0.0, N2.id, says(*map(lives, sees)))
    return member


def periods(member: SwimMembership, count: int, *, start: float, answers=frozenset()) -> float:
    """Run ``count`` periods in which only ``answers`` answer, and return the time after them."""
    for _ in range(count):
        for ping in member.tick(start):
            if ping.node.id in answers:
                member.ping_acked(start, ping.node.id)
        start += 1.0
    return start


# -- meeting ---------------------------------------------------------------------------------------------------------


def test_new_roster_pings_unseen_nodes():
    member = view(sees=[N3])
    met = {ping.node.id for ping in member.ping_new_members(0.0)}
    assert met == {N2.id, N4.id, N5.id}
    assert member.ping_new_members(0.0) == ()  # they have not answered yet
    assert not {ping.node.id for ping in member.tick(0.5)} & met
    for name in met:
        member.ping_acked(0.6, name)
        member.receive_gossip(0.6, name, says(lives(peer_node(name))))
    assert member.has_quorum
    assert member.ping_new_members(0.7) == ()


def test_large_job_pings_only_its_ring_successors_at_start():
    many = peer_nodes(1000)
    member = SwimMembership(many[0], 1, MembershipSettings(ring_neighbours=4), seed=1)
    member.set_member_list(0.0, member_list(1, many))
    assert len(member.ping_new_members(0.0)) == 5


def test_unanswered_ping_is_repeated_every_period():
    member = view(roster=member_list(1, [N1, N2]))
    (ping,) = member.ping_new_members(0.0)
    member.ping_failed(0.1, ping.node.id)
    assert member.state_of(N2.id) is DEAD
    assert [ping.node.id for ping in member.tick(1.0)] == [N2.id]


# -- suspicion and death ----------------------------------------------------------------------------------------------


def test_node_is_unknown_until_a_message_names_it_alive():
    member = view()
    assert member.alive == (N1,)
    assert [member.state_of(one.id) for one in FIVE.nodes] == [ALIVE, DEAD, DEAD, DEAD, DEAD]
    member.receive_gossip(0.0, N2.id, says(lives(N2), lives(N3)))
    assert member.alive == (N1, N2, N3)


def test_silent_node_is_suspected_before_it_is_dead():
    member = view(roster=member_list(1, [N1, N2]), sees=[N2])
    seen = []
    for second in range(12):
        member.tick(float(second))
        seen.append(member.state_of(N2.id))
    # Three pings, each missed one period later; then five seconds.
    assert seen == [ALIVE] * 3 + [SUSPECT] * 5 + [DEAD] * 4
    assert member.explain_quorum() == "sees 1 of 2 nodes: n1; not n2 (dead for 3 s)"


def test_a_suspect_still_holds_copies_but_does_not_count_for_a_quorum():
    member = view(sees=[N2, N3])
    assert member.has_quorum
    member.receive_gossip(0.0, N2.id, says(MemberUpdate(N3, 1, SUSPECT)))
    assert N3 in member.alive
    assert not member.has_quorum
    assert "n3 (suspected for 0 s)" in member.explain_quorum()


def test_pings_that_fail_at_once_count_at_once_and_only_once():
    member = view(roster=member_list(1, [N1, N2]), sees=[N2])
    for second in range(3):
        (ping,) = member.tick(float(second))
        assert member.state_of(N2.id) is ALIVE
        for _ in range(3):
            member.ping_failed(float(second), ping.node.id)
    assert member.state_of(N2.id) is SUSPECT


def test_late_ping_reply_clears_the_missed_pings():
    member = view(roster=member_list(1, [N1, N2]), sees=[N2])
    for second in range(20):
        member.tick(float(second))
        if second % 2:
            member.ping_acked(float(second) + 0.5, N2.id)
    assert member.state_of(N2.id) is ALIVE


def test_queued_ping_is_not_late():
    member = view(roster=member_list(1, [N1, N2]), sees=[N2])
    for ping in member.tick(0.0):
        member.pings_queued([ping.node.id])
    for second in range(1, 10):
        assert member.tick(float(second)) == ()
    member.ping_sent(10.0, N2.id)
    member.tick(10.5)
    assert member.indirect_pings() == ()
    member.tick(11.0)
    assert member.indirect_pings() == ()  # the ping was missed, and no helper is left
    periods(member, 3, start=12.0)
    assert member.state_of(N2.id) is SUSPECT


def test_unresponsive_node_reached_through_helpers_stays_alive():
    member = view(sees=[N2, N3, N4, N5])
    for second in range(12):
        for ping in member.tick(float(second)):
            if ping.node.id != N2.id:
                member.ping_acked(float(second), ping.node.id)
        asked = member.indirect_pings()
        assert len(asked) == 2 * bool(second)
        assert {one.node for one in asked} <= {N2.id}
        assert not {one.helper.id for one in asked} & {N1.id, N2.id}
        for one in asked:
            member.indirect_ack(second + 0.5, one.node)
    assert (member.state_of(N2.id), member.has_quorum) == (ALIVE, True)
    # If the others cannot reach it either, it is suspected as before.
    periods(member, 4, start=12.0, answers={N3.id, N4.id, N5.id})
    assert member.state_of(N2.id) is SUSPECT


def test_suspected_node_refutes_by_raising_its_generation():
    accused, other = view(N2, number=7), view(N3, sees=[N1])
    other.receive_gossip(0.0, N1.id, says(MemberUpdate(N2, 7, SUSPECT)))
    accused.receive_gossip(0.0, N3.id, other.gossip_for(N2.id))
    assert accused.generation == 8
    other.receive_gossip(0.0, N2.id, accused.gossip_for(N3.id))
    assert other.state_of(N2.id) is ALIVE


def test_reachable_node_reported_dead_is_only_suspected_and_refutes_it():
    member = view(sees=[N2, N3, N4, N5])
    member.receive_gossip(1.0, N3.id, says(lives(N3)))
    member.receive_gossip(2.0, N4.id, says(MemberUpdate(N3, 1, DEAD)))
    assert (member.state_of(N3.id), N3 in member.alive) == (SUSPECT, True)
    assert MemberUpdate(N3, 1, SUSPECT) in member.gossip_for(N3.id).updates, "it is told what is said about it"
    assert MemberUpdate(N3, 1, DEAD) not in member.gossip_for(N5.id).updates, "and nobody is told that it died"
    member.receive_gossip(2.5, N3.id, says(lives(N3, 2)))
    assert member.state_of(N3.id) is ALIVE
    member.receive_gossip(2.6, N4.id, says(MemberUpdate(N3, 1, DEAD)))
    assert member.state_of(N3.id) is ALIVE


def test_ping_reply_counts_as_a_message():
    member = view(sees=[N2, N3, N4, N5])
    member.ping_acked(3.0, N3.id)
    member.receive_gossip(4.0, N4.id, says(MemberUpdate(N3, 1, DEAD)))
    assert member.state_of(N3.id) is SUSPECT


def test_death_report_of_a_silent_node_is_accepted():
    member = view(sees=[N2, N3, N4, N5])
    member.receive_gossip(1.0, N4.id, says(MemberUpdate(N3, 1, DEAD)))  # N3 never sent a message itself
    assert member.state_of(N3.id) is DEAD
    member.receive_gossip(1.0, N5.id, says(lives(N5)))
    member.receive_gossip(
        5.5, N4.id, says(MemberUpdate(N5, 1, DEAD))
    )  # it has been silent for longer than three pings take
    assert member.state_of(N5.id) is DEAD


def test_unrefuted_suspicion_becomes_death():
    member = view(sees=[N2, N3, N4, N5])
    member.receive_gossip(0.5, N3.id, says(lives(N3)))
    member.receive_gossip(1.0, N4.id, says(MemberUpdate(N3, 1, DEAD)))
    for second in range(2, 10):
        for ping in member.tick(float(second)):
            if ping.node.id != N3.id:
                member.ping_acked(float(second), ping.node.id)
        member.receive_gossip(float(second), N4.id, says(MemberUpdate(N3, 1, DEAD)))  # repeated every second
    assert member.state_of(N3.id) is DEAD


@given(st.data())
def test_node_that_answers_every_ping_is_never_dead(data):
    """Reports may repeat refuted news and call the node's current life dead."""
    member, other = view(sees=[N2, N3, N4, N5]), view(N3, number=data.draw(st.integers(1, 9)))
    for second in range(20):
        now = float(second)
        for ping in member.tick(now):
            if ping.node.id == N3.id:
                other.receive_gossip(now, N1.id, ping.gossip)
                member.ping_acked(now, N3.id)
                member.receive_gossip(now, N3.id, other.gossip_for(N1.id))
            else:
                member.ping_acked(now, ping.node.id)
        if second < 4:  # until it was met
            other.receive_gossip(now, N1.id, member.gossip_for(N3.id))
            member.receive_gossip(now, N3.id, other.gossip_for(N1.id))
        for teller in data.draw(st.lists(st.sampled_from([N2, N4, N5]), max_size=3)):
            number = data.draw(st.integers(0, other.generation))
            member.receive_gossip(
                now + 0.5, teller.id, says(MemberUpdate(N3, number, data.draw(st.sampled_from([SUSPECT, DEAD]))))
            )
            assert member.state_of(N3.id) is not DEAD
            assert N3 in member.alive


@pytest.mark.parametrize("standing", [SUSPECT, DEAD])
def test_late_refuted_update_has_no_effect(standing):
    member = view(sees=[N2])
    member.receive_gossip(0.0, N2.id, says(lives(N2, 5)))
    before = member.changes
    member.receive_gossip(0.0, N3.id, says(MemberUpdate(N2, 4, standing)))
    assert (member.state_of(N2.id), member.changes) == (ALIVE, before)


def test_ping_carries_gossip_about_its_target_first():
    everybody = peer_nodes(200)
    member = view(everybody[0], member_list(1, everybody), sees=everybody)
    accused = everybody[150]
    member.receive_gossip(0.0, N2.id, says(MemberUpdate(accused, 1, DEAD)))
    for one in everybody[1:100]:
        member.receive_gossip(
            0.0, N2.id, says(MemberUpdate(one, 2, SUSPECT))
        )  # newer news that would fill every message
    assert member.gossip_for(accused.id).updates[1] == MemberUpdate(accused, 1, DEAD)


def test_a_node_that_restarts_wins_over_its_death():
    member = view(sees=[N2])
    member.receive_gossip(0.0, N3.id, says(MemberUpdate(N2, 1, DEAD)))
    again = msgspec.structs.replace(N2, address="n2.local:7171")
    member.receive_gossip(1.0, N2.id, says(lives(again, 2)))
    assert again in member.alive


def test_restarted_node_with_a_slower_clock_wins():
    member = view(N2, number=5)
    other = view(N1, sees=[])
    other.receive_gossip(0.0, N3.id, says(lives(msgspec.structs.replace(N2, address="old:1"), 9)))
    member.receive_gossip(0.0, N1.id, other.gossip_for(N2.id))
    other.receive_gossip(0.0, N2.id, member.gossip_for(N1.id))
    assert N2 in other.alive


def test_bad_path_is_not_suspected_repeatedly():
    """Other nodes reach n2 and refute for it; this node does not, and learns that the path is bad."""
    member = view(roster=member_list(1, [N1, N2, N3]), sees=[N2, N3])
    accusations, number, now = 0, 1, 0.0
    for _ in range(300):
        now = periods(member, 1, start=now, answers={N3.id})
        if member.state_of(N2.id) is SUSPECT:
            accusations, number = accusations + 1, number + 1
            member.receive_gossip(now, N3.id, says(lives(N2, number)))
    assert 3 <= accusations <= 10
    now = periods(member, 1, start=now, answers={N2.id, N3.id})
    now = periods(member, 5, start=now, answers={N3.id})
    assert member.state_of(N2.id) is SUSPECT  # after one answer it waits as long as for any other node


# -- whom to ping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 5, 60, 1000])
def test_a_nodes_pings_do_not_grow_with_the_job(count):
    everybody = peer_nodes(count)
    member = view(everybody[0], member_list(1, everybody), sees=everybody)
    pinged = set()
    for second in range(50):
        pings = member.tick(float(second))
        assert len(pings) == min(count - 1, 4)
        assert len({ping.node.id for ping in pings}) == len(pings)
        for ping in pings:
            assert len(ping.gossip.updates) <= member.settings.gossip_max
            assert len(msgspec.msgpack.encode(ping.gossip)) < 6000
            pinged.add(ping.node.id)
            member.ping_acked(float(second), ping.node.id)
    assert len(pinged) >= min(count - 1, 30)  # the neighbors, and another node each time


def test_node_pings_at_most_seven_suspects():
    everybody = peer_nodes(100)
    member = view(everybody[0], member_list(1, everybody), sees=everybody)
    member.receive_gossip(0.0, N2.id, says(*(MemberUpdate(one, 1, SUSPECT) for one in everybody[1:90])))
    assert len(member.tick(0.0)) == 7


def test_dead_node_is_pinged_occasionally_to_heal_partitions():
    member = view(sees=[N2, N3, N4])
    pinged = [ping.node.id for second in range(20) for ping in member.tick(float(second))]
    assert N5.id in pinged


# -- quorum -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("me", "roster", "sees", "quorum"),
    [
        ("a", "a", "", True),
        ("a", "ab", "", True),  # exactly half, with the lowest
        ("b", "ab", "", False),
        ("b", "ab", "a", True),
        ("a", "abc", "", False),
        ("b", "abc", "c", True),
        ("a", "abcd", "b", True),
        ("c", "abcd", "d", False),
        ("b", "abcd", "cd", True),
        ("a", "abcde", "b", False),
        ("a", "bcd", "bcd", False),  # not of the job
        ("a", "ab", "cdefg", True),  # strangers are not counted
        ("b", "ab", "cdefg", False),
    ],
)
def test_quorum(me, roster, sees, quorum):
    member = view(peer_node(me), member_list(1, map(peer_node, roster)), sees=map(peer_node, sees))
    assert member.has_quorum is quorum
    assert member.explain_quorum()


@pytest.mark.parametrize(
    ("me", "roster", "standby", "sees", "quorum"),
    [
        ("a", "ab", "b", "", True),
        ("b", "ab", "b", "", False),
        ("b", "ab", "b", "a", True),
        ("a", "abcd", "cd", "", True),  # half of those that vote, with the lowest id
        ("b", "abcd", "cd", "cd", False),
        ("b", "abcd", "a", "c", True),
    ],
)
def test_standby_nodes_have_no_vote(me, roster, standby, sees, quorum):
    listed = member_list(1, map(peer_node, roster), map(NodeId, standby))
    member = view(peer_node(me), listed, sees=map(peer_node, sees))
    assert member.has_quorum is quorum


@pytest.mark.parametrize(
    ("nodes", "standby", "problem"),
    [
        ([N1, N2], [N2.id, N2.id], "once"),
        ([N1, N2], [N3.id], "'n3' is not in the roster"),
        ([N1, N2], [N1.id, N2.id], "at least one node that is not a standby node"),
    ],
)
def test_impossible_standby_nodes_are_refused(nodes, standby, problem):
    with pytest.raises(RequestError, match=problem):
        member_list(1, nodes, standby)


def test_standby_nodes_are_explained():
    listed = member_list(1, [N1, N2, N3], [N3.id])
    assert view(roster=listed, sees=[N3]).explain_quorum() == (
        "sees 2 of 3 nodes: n1, n3 (standby); not n2 (never seen)"
    )


def test_lost_standby_nodes_cost_no_quorum():
    everybody = peer_nodes(9)
    member = view(everybody[0], member_list(1, everybody, [one.id for one in everybody[1:]]), sees=everybody)
    for second in range(30):
        periods(member, 1, start=float(second))
        assert member.has_quorum, member.explain_quorum()


def test_standby_of_a_newer_list_with_the_same_nodes_is_adopted():
    member = view(roster=member_list(1, [N1, N2]))
    assert member.set_member_list(1.0, member_list(2, [N1, N2], [N2.id]))
    assert member.member_list.standby == (N2.id,)
    member.receive_gossip(2.0, N2.id, says(roster=member_list(3, [N1, N2], [N2.id])))
    assert (member.member_list.version, member.member_list.standby) == (3, (N2.id,))
    member.receive_gossip(2.0, N2.id, says(roster=member_list(4, [N1, N2])))
    assert member.member_list.version == 3
    assert member.newer_list_holder == N2.id


def test_quorum_is_computed_once_between_changes(monkeypatch):
    """The leader of thousands of nodes checks the quorum with each of their reports."""
    counted, count = [], MemberList.has_quorum
    monkeypatch.setattr(MemberList, "has_quorum", lambda roster, seen: counted.append(seen) or count(roster, seen))
    member = view(sees=[N2, N3])
    assert all(member.has_quorum for _ in range(100))
    assert len(counted) == 1
    member.receive_gossip(0.0, N4.id, says(MemberUpdate(N3, 1, SUSPECT)))
    assert not any(member.has_quorum for _ in range(100))
    assert len(counted) == 2


def test_no_member_list_means_no_quorum_and_no_pings():
    member = view(roster=None, sees=[N2])
    assert (member.has_quorum, member.alive, member.tick(0.0), member.state_of(N1.id)) == (False, (), (), None)
    assert member.explain_quorum() == "nobody has said yet which nodes belong to the job"


def test_quorum_is_explained():
    member = view(sees=[N3])
    member.receive_gossip(0.0, N3.id, says(MemberUpdate(N4, 1, DEAD)))
    member.tick(1.0)
    assert member.explain_quorum() == (
        "sees 2 of 5 nodes: n1, n3; not n2 (never seen), n4 (dead for 1 s), n5 (never seen); that is no quorum"
    )
    many = peer_nodes(100)
    assert len(view(many[0], member_list(1, many), sees=many[:50]).explain_quorum()) < 400


def test_node_cut_off_from_a_thousand_loses_quorum_within_seconds():
    """It cannot query all nodes in time; a few random ones show that its beliefs are old."""
    everybody = peer_nodes(1000)
    member = view(everybody[0], member_list(1, everybody), sees=everybody)
    now = periods(member, 20, start=0.0, answers={one.id for one in everybody})
    assert member.has_quorum
    periods(member, 5, start=now)
    assert len(member.alive) == 1000
    assert not member.has_quorum
    assert "it pinged did not answer" in member.explain_quorum()


# -- clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leap_s", [3600.0, -3600.0, 6.0])
def test_clock_jump_declares_no_node_dead(leap_s):
    member = view(sees=[N2, N3, N4, N5])
    now = periods(member, 3, start=0.0)  # now two of three pings of each node are missing
    member.receive_gossip(now, N2.id, says(MemberUpdate(N5, 1, SUSPECT)))
    now += leap_s
    member.tick(now)
    assert [member.state_of(one.id) for one in FIVE.nodes] == [ALIVE, ALIVE, ALIVE, ALIVE, SUSPECT]
    periods(member, 3, start=now + 1, answers={N2.id, N3.id, N4.id})
    assert member.state_of(N5.id) is SUSPECT  # it gets its five seconds again
    periods(member, 3, start=now + 4, answers={N2.id, N3.id, N4.id})
    assert [member.state_of(one.id) for one in FIVE.nodes] == [ALIVE, ALIVE, ALIVE, ALIVE, DEAD]


def test_resumed_node_has_no_quorum_until_pings_succeed():
    member = view(sees=[N2, N3, N4, N5])
    now = periods(member, 3, start=0.0, answers={one.id for one in FIVE.nodes})
    assert member.has_quorum
    now = periods(member, 1, start=now + 3600)
    assert not member.has_quorum
    assert "its clock leapt" in member.explain_quorum()
    awake, asleep = member, view(sees=[N2, N3, N4, N5])
    periods(awake, 7, start=now, answers={one.id for one in FIVE.nodes})
    assert awake.has_quorum
    periods(asleep, 1, start=0.0)
    for second in range(10):  # it is cut off: at no time does it trust its beliefs of an hour ago
        periods(asleep, 1, start=3600.0 + second)
        assert not asleep.has_quorum


def test_slightly_unordered_times_are_not_a_clock_leap():
    member = view(sees=[N2, N3])
    member.tick(1.0)
    member.receive_gossip(0.99, N2.id, says(lives(N4)))
    assert member.has_quorum


# -- rosters and the fence --------------------------------------------------------------------------------------------


def test_member_list_decides_membership():
    member = view(sees=[N2, N3, N4])
    assert member.set_member_list(1.0, member_list(2, [N1, N2, N5]))
    assert (member.alive, member.state_of(N3.id)) == ((N1, N2), None)
    member.receive_gossip(1.0, N3.id, says(lives(N3, 9), lives(N4, 9)))
    assert member.alive == (N1, N2)
    assert {ping.node.id for ping in member.tick(2.0)} == {N2.id, N5.id}


def test_lower_list_version_never_replaces_a_higher_one():
    member = view(roster=member_list(5, [N1, N2]))
    before = member.changes
    for version in (0, 4, 5):
        assert not member.set_member_list(1.0, member_list(version, [N1, N2]))
    assert not member.set_member_list(1.0, member_list(4, [N1, N2, N3]))
    assert (member.member_list.version, len(member.member_list.nodes), member.changes) == (5, 2, before)


def test_conflicting_lists_of_one_version_converge():
    small, one, other = member_list(3, [N1, N2]), member_list(3, [N1, N2, N3]), member_list(3, [N1, N2, N4])
    chosen = max(one.list_version, other.list_version)
    for order in ([small, one, other], [other, one, small], [one, small, other]):
        member = view(roster=None)
        for roster in order:
            member.set_member_list(0.0, roster)
        assert member.member_list.list_version == chosen


def test_newer_list_elsewhere_suspends_quorum_until_received():
    member, newer = view(sees=[N2, N3]), member_list(2, [N1, N2, N3])
    member.receive_gossip(1.0, N3.id, says(lives(N3), roster=newer))
    assert (member.newer_list_holder, member.has_quorum) == (N3.id, False)
    assert "n3 has member list 2, this is 1" in member.explain_quorum()
    member.set_member_list(1.0, newer)
    assert (member.newer_list_holder, member.has_quorum) == (None, True)


def test_unavailable_newer_list_is_abandoned():
    member = view(sees=[N2, N3])
    member.receive_gossip(1.0, N3.id, says(roster=member_list(2, [N1, N2, N3])))
    periods(member, 7, start=1.0, answers={N2.id, N3.id})
    assert (member.newer_list_holder, member.has_quorum) == (None, True)


def test_a_higher_version_of_the_same_nodes_is_simply_taken():
    member = view(sees=[N2, N3])
    member.receive_gossip(1.0, N3.id, says(roster=member_list(9, FIVE.nodes)))
    assert (member.newer_list_holder, member.member_list.version) == (None, 9)


def test_member_list_supplies_attributes_missing_in_gossip():
    listed = PeerNode(NodeId("n2"), "10.0.0.2:7070", (("rack", "r2"),), 5)
    member = view(roster=member_list(1, [N1, listed]))
    member.receive_gossip(0.0, N2.id, says(lives(PeerNode(NodeId("n2"), "", (), 0))))
    assert member.alive[1] == listed
    member.receive_gossip(0.0, N2.id, says(lives(N2, 2)))
    assert member.alive[1] == PeerNode(NodeId("n2"), N2.address, (("rack", "r2"),), N2.memory_bytes)


def test_the_fence_only_rises():
    member = view()
    assert member.advance_fence((3, "b"))
    member.receive_gossip(0.0, N2.id, says(fence=(3, "a")))
    member.receive_gossip(0.0, N2.id, says(fence=(2, "z")))
    assert member.fence == (3, "b")
    assert not member.advance_fence((3, "b"))
    member.receive_gossip(0.0, NodeId("stranger"), says(fence=(3, "c")))
    assert member.gossip_for(N2.id).fence == (3, "c")


def test_every_change_is_counted_and_nothing_else():
    member = view()
    for happens, counts in [
        (lambda: member.receive_gossip(0.0, N2.id, says(lives(N2))), True),
        (lambda: member.receive_gossip(0.0, N2.id, says(lives(N2))), False),
        (
            lambda: member.receive_gossip(0.0, N2.id, says(lives(N2, 2))),
            True,
        ),  # it restarted, or refuted an update that never reached us
        (lambda: member.receive_gossip(0.0, N2.id, says(MemberUpdate(N2, 2, SUSPECT))), True),
        (lambda: member.advance_fence((1, "a")), True),
        (lambda: member.set_member_list(0.0, member_list(2, [N1, N2])), True),
    ]:
        before = member.changes
        happens()
        assert (member.changes > before) is counts


# -- messages ---------------------------------------------------------------------------------------------------------


def test_newest_and_least_sent_updates_go_first():
    names = [NodeId(f"n{number}") for number in range(10)]
    news = BroadcastQueue(names)
    for name in names[:4]:
        news.add(name)
    assert news.pick(3, leave_out=()) == [names[3], names[2], names[1]]
    news.add(names[9])
    assert news.pick(2, leave_out=()) == [names[9], names[0]]
    assert names[9] not in news.pick(10, leave_out=(names[9],))
    told = [name for _ in range(200) for name in news.pick(1, leave_out=())]
    assert set(told[-10:]) == set(names)  # the changes were sent often enough; now all names in turn
    assert sorted(news.pick(50, leave_out=())) == names


@pytest.mark.parametrize(
    "bad",
    [
        [[], None, [-1, ""]],
        [[], None, [1 << 63, ""]],
        [[[{"id": "n1", "address": "a"}, -1, "alive"]], None, [0, ""]],
        [[[{"id": "n1", "address": "a"}, 1 << 62, "alive"]], None, [0, ""]],
        [[[{"id": "n1"}, 1, "alive"]], None, [0, ""]],
        [[[{"id": "n1", "address": "a"}, 1, "undead"]], None, [0, ""]],
    ],
)
def test_gossip_that_could_not_be_is_refused(bad):
    fine = [[[{"id": "n1", "address": "a"}, 1, "alive"]], [1, 1, "d"], [0, ""]]
    msgspec.msgpack.decode(msgspec.msgpack.encode(fine), type=GossipMessage)
    with pytest.raises(msgspec.DecodeError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=GossipMessage)


def test_a_roster_from_a_peer_is_checked_like_any_other():
    def decode(*listed):
        return msgspec.msgpack.decode(msgspec.msgpack.encode({"version": 1, "nodes": listed}), type=MemberList)

    one, two = {"id": "n1", "address": "a:1"}, {"id": "n2", "address": "a:2"}
    assert decode(one, two).nodes[1].id == "n2"
    for listed in [(), (two, one), (one, one), ({"id": "../x", "address": ""},)]:
        with pytest.raises((RequestError, msgspec.DecodeError)):
            decode(*listed)


@pytest.mark.parametrize(
    "setting",
    [
        {"heartbeat_s": 0},
        {"heartbeat_s": float("nan")},
        {"ping_timeout_s": -1},
        {"dead_after_s": float("inf")},
        {"suspect_after": 0},
        {"ring_neighbours": 0},
        {"gossip_max": 3},
    ],
)
def test_settings_that_cannot_work_are_refused(setting):
    with pytest.raises(RequestError, match=next(iter(setting))):
        MembershipSettings(**setting)
