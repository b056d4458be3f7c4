"""How well each step is kept, and what is said of nodes that could not be asked."""

import msgspec
import pytest

from peerstore.records import Group
from tests.support.views import SIZE, group, node, survey, view
from tieredckpt.holdings import Weak, holdings, kept, newest_settled, pending, share, unknown, whole_steps
from tieredckpt.manifest import OPEN_ENDED
from tieredckpt.node import DrainView, StepView
from tieredckpt.resolve import Tier


def only(seen, said=None, drains=()):
    (one,) = kept(seen, said or survey(), drains)
    return one


def test_copies_and_domains_are_those_of_the_weakest_part():
    seen = view(
        node("n0", "rack=r0", {7: [0, ~8, ~16]}, parts=17),
        node("n8", "rack=r1", {7: [8, ~0]}, parts=17),
        node("n16", "rack=r0", {7: [16, ~0]}, parts=17),
    )
    one = only(seen)
    assert (one.copies, one.domains, one.level) == (2, 1, "rack")
    assert one.in_words() == "2 copies in 1 rack"
    assert one.size_bytes == 3 * SIZE
    assert one.weak[0] == Weak(tuple(set(range(17)) - {0, 8, 16}), ())


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (("", ""), "2 copies in 2 nodes"),
        (("zone=a", "zone=b"), "2 copies in 2 zones"),
        (("zone=a", "zone=a"), "2 copies in 1 zone"),
        (("rack=r1,zone=a", "rack=r1,zone=b"), "2 copies in 2 racks"),
        (("rack=r1", ""), "2 copies in 2 racks"),
        (("power=x", "power=x"), "2 copies in 2 nodes"),
    ],
)
def test_domains_are_those_of_the_innermost_level(labels, words):
    seen = view(node("n0", labels[0], {7: [0]}, parts=1), node("n1", labels[1], {7: [~0]}, parts=1))
    assert only(seen).in_words() == words


def test_where_copies_are_missing_is_named_the_worst_first():
    seen = view(
        node("n0", "", {7: [0, 1, ~2]}, parts=6),
        node("n1", "", {7: [2, 3]}, parts=6),
        node("n2", "", {7: [5]}, parts=6),
    )
    assert only(seen).weak == (Weak((4,), ()), Weak((0, 1), ("n0",)), Weak((3,), ("n1",)), Weak((5,), ("n2",)))
    assert only(seen).state == "torn"
    one_node = view(node("n0", "", {7: [0]}, parts=1), roster=0)
    assert only(one_node).weak == (), "a job on one node lacks nothing"


def test_what_is_older_than_the_settled_step_needs_no_copies():
    seen = view(
        node("n0", "", {6: [0], 7: [0], 8: [0]}, parts=1, settled=group(7)),
        node("n1", "", {7: [~0]}, parts=1, settled=group(6)),
    )
    six, seven, eight = kept(seen, survey())
    assert [one.settled for one in (six, seven, eight)] == [True, True, False]
    assert [one.weak for one in (six, seven, eight)] == [(), (), (Weak((0,), ("n0",)),)]
    assert newest_settled(seen) == group(7)


def test_a_silent_node_adds_nothing_and_is_named():
    seen = view(node("n0", "", {7: [0]}), node("n1", silent="timed out"), node("n2", verifying=3))
    assert holdings(seen)[group(7)].nodes == {0: ("n0",)}
    assert set(unknown(seen)) == {"n1", "n2"}
    assert unknown(seen)["n1"] == "timed out"
    assert only(seen).in_words(or_more=True) == "1+ copies in 1+ nodes"


@pytest.mark.parametrize(
    ("said", "state", "durable"),
    [
        (StepView(group(7), 2, {}), "torn", False),
        (StepView(group(7), 2, {}, covered=True), "whole", False),
        (StepView(group(7), 0, {}, durable=True), "whole", True),
        (StepView(group(7), 2, {}, durable=True, quarantined="NaN"), "quarantined", True),
        (StepView(group(7), 2, {}, damaged={1: "bit flip"}), "damaged", False),
    ],
)
def test_states(said, state, durable):
    one = only(view(node("n0", "", {7: [0]})), survey(said))
    assert (one.state, one.durable) == (state, durable)
    assert bool(one.weak) == (not said.covered) or one.weak == (Weak((0,), ("n0",)),)


def test_a_step_with_an_open_number_of_parts():
    one = only(
        view(node("n0", "", {7: [0, 5]}, parts=OPEN_ENDED)), survey(StepView(group(7), OPEN_ENDED, {}, covered=True))
    )
    assert (one.parts, one.held, one.state) == (2, 2, "whole")


def test_steps_that_are_only_durable_are_there_too():
    three, seven = kept(view(node("n0", "", {7: [0, 1]})), survey(durable=[3]))
    assert (three.group.version, three.held, three.in_words(), three.state) == (3, 0, "none", "whole")
    assert seven.held == 2


def test_attempts_at_one_step_are_apart():
    again = Group(2, 7, 0, "b")
    assert [one.group for one in kept(view(node("n0", "", {again: [0], 7: [0, 1]})), survey())] == [group(7), again]


def test_own_and_copied_bytes_are_told_apart():
    held = share(node("n0", "", {6: [0, ~1], 7: [0]}))
    assert (held.steps, held.parts, held.own_bytes, held.copied_bytes) == (2, 3, 2 * SIZE, SIZE)


def test_what_is_durable_by_now_is_not_pending():
    drains = [
        DrainView(group(step), state) for step, state in ((5, "done"), (6, "waiting"), (7, "failed"), (8, "skipped"))
    ]
    assert [one.group.version for one in pending(drains, survey())] == [6, 7]
    assert [one.group.version for one in pending(drains, survey(durable=[6]))] == [7]


def test_whole_steps_are_those_a_load_could_use():
    whole = StepView(group(6), 1, {0: (Tier.PEER,)})
    bad = msgspec.structs.replace(whole, group=group(9), quarantined="NaN")
    assert whole_steps(survey(whole, bad, StepView(group(8), 2, {0: (Tier.MEMORY,)}), durable=[3])) == [3, 6]
