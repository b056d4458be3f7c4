import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerstore.shard_records import VersionId
from tieredckpt.resolve_step import (
    Candidate,
    IncarnationBranches,
    LeftBehind,
    StepVerdict,
    Tier,
    elect_step,
    newer_steps,
    resolve_step,
)

MEMORY, DURABLE = (Tier.MEMORY,), (Tier.DURABLE,)


def step(number, epoch=1, parts=2, found=(0, 1), where=MEMORY, base=None, covered=False, incarnation="a"):
    return Candidate(VersionId(epoch, number, 0, incarnation), parts, dict.fromkeys(found, where), base, covered)


def chosen(candidates, **kwargs):
    found = resolve_step(candidates, **kwargs).chosen
    return None if found is None else (found.version_id.version, found.version_id.epoch)


def lost(number, parts=2, found=(0,)):
    return Candidate(VersionId(1, number, 0, "a"), parts, dict.fromkeys(found, MEMORY), damaged={1: "a flipped bit"})


@pytest.mark.parametrize(
    ("candidates", "quarantined", "is_damaged"),
    [
        ([], [], False),
        ([step(3, found=(0,))], [], False),
        ([lost(3)], [], True),
        ([lost(3, found=())], [], True),
        ([step(3)], [VersionId(1, 3, 0, "a")], True),
    ],
    ids=["nothing", "torn", "a part was damaged", "all parts were damaged", "quarantined"],
)
def test_damaged_is_not_absent(candidates, quarantined, is_damaged):
    found = resolve_step(candidates, quarantined=quarantined)
    assert found.chosen is None
    assert found.damaged is is_damaged
    assert found.lost == ()


def test_incomplete_step_is_lost_if_it_was_once_complete():
    torn = Candidate(VersionId(1, 7, 0, "a"), 12, {3: MEMORY}, saved_ns=10**18)
    never = resolve_step([torn, step(6, found=(1,))])
    assert (never.lost, never.verdicts[torn.version_id]) == ((), StepVerdict.TORN)
    known = resolve_step([torn, step(6, found=(1,))], once_complete=torn.version_id)
    assert known.lost == (torn.version_id,)
    assert "step 7 (epoch 1): was complete once, saved 2001-09-09 01:46:40Z, missing parts" in known.explain()
    assert "parts 0, 1, 2, 4, 5, 6, 7, 8 and 3 more of 12; step 6" in known.explain()
    gone = resolve_step([], once_complete=torn.version_id)
    assert "step 7 (epoch 1): was complete once, missing all parts" in gone.explain()
    assert resolve_step([], step=3, once_complete=torn.version_id).lost == ()
    older = resolve_step([torn, step(6)], once_complete=torn.version_id)
    assert older.chosen is not None
    assert older.lost == (torn.version_id,)


def test_step_in_an_unreachable_tier_is_neither_incomplete_nor_lost():
    cut = step(7, found=(0,))
    found = resolve_step([cut], once_complete=cut.version_id, unreachable={Tier.PEER: "n2 does not answer"})
    assert (found.chosen, found.lost, found.torn, found.verdicts[cut.version_id]) == (None, (), (), StepVerdict.UNKNOWN)
    assert "step 7 (epoch 1): not complete in the tiers that answered, not found so far: part 1 of 2" in found.explain()
    assert resolve_step([], once_complete=cut.version_id, unreachable=[Tier.PEER]).lost == ()
    given_up = resolve_step([cut], torn=[cut.version_id], unreachable=[Tier.PEER])
    assert given_up.verdicts[cut.version_id] is StepVerdict.TORN, "a rank aborted its part: no node can have it"


def test_incomplete_steps_are_newer_than_any_complete_step():
    cut, newer = step(7, found=(0,)), step(3, epoch=2, found=(1,), incarnation="b")
    assert resolve_step([cut, newer]).torn == (cut.version_id, newer.version_id)
    assert resolve_step([cut, newer], once_complete=cut.version_id).torn == (newer.version_id,)
    assert resolve_step([cut, newer], once_complete=newer.version_id).torn == ()
    assert resolve_step([cut, newer], step=7).torn == (cut.version_id,)
    assert resolve_step([cut, newer], step=7, once_complete=newer.version_id).torn == (), (
        "it may have been given up for that one"
    )
    assert resolve_step([step(6), cut]).torn == (cut.version_id,)
    assert resolve_step([step(8), cut]).torn == ()
    assert resolve_step([], torn=[cut.version_id]).torn == (cut.version_id,)
    assert resolve_step([], step=3, torn=[cut.version_id]).torn == ()
    said = resolve_step([], torn=[cut.version_id]).explain()
    assert "step 7 (epoch 1): not complete, a rank aborted its part" in said


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        ((4,), "there is step 4"),
        ((4, 5), "there are steps 4, 5"),
        (range(5, 50, 5), "there are steps 10, 15, 20, 25, 30, 35, 40, 45 and 1 older step"),
        (range(1, 11), "there are steps 3, 4, 5, 6, 7, 8, 9, 10 and 2 older steps"),
    ],
)
def test_steps_other_than_an_absent_one_are_listed(saved, text):
    assert resolve_step([step(number) for number in saved], step=77).explain() == text


def test_a_step_with_a_damaged_part_is_passed_over_by_name():
    found = resolve_step([step(2), lost(3)])
    assert found.chosen is not None
    assert found.chosen.version_id.version == 2
    assert "step 3 (epoch 1): damaged" in found.explain()


CASES = {
    "nothing anywhere": ([], {}, None),
    "the only whole step": ([step(0)], {}, (0, 1)),
    "step 0 is a step": ([step(0), step(1, found=(0,))], {}, (0, 1)),
    "a torn newer step is not loaded": ([step(10), step(11, found=(1,))], {}, (10, 1)),
    "a durable step newer than memory wins": ([step(10), step(20, where=DURABLE)], {}, (20, 1)),
    "a memory step newer than durable wins": ([step(30), step(20, where=DURABLE)], {}, (30, 1)),
    "parts from different tiers make a whole": (
        [Candidate(VersionId(1, 5, 0, "a"), 2, {0: MEMORY, 1: DURABLE})],
        {},
        (5, 1),
    ),
    "covered without all parts is whole": ([step(7, found=(1,), covered=True)], {}, (7, 1)),
    "a quarantined step is passed over": ([step(1), step(2)], {"quarantined": [VersionId(1, 2, 0, "a")]}, (1, 1)),
    "one that ends who loads it is passed over": ([step(1), step(2)], {"reluctant": [VersionId(1, 2, 0, "a")]}, (1, 1)),
    "unless there is no other": ([step(1), step(2)], {"reluctant": [VersionId(1, s, 0, "a") for s in (1, 2)]}, (2, 1)),
    "the step asked for": ([step(1), step(2)], {"step": 1}, (1, 1)),
    "the step asked for is not there": ([step(1), step(2)], {"step": 3}, None),
    "of two attempts at a step the later incarnation": ([step(4, epoch=2, incarnation="b"), step(4)], {}, (4, 2)),
    "a rollback hides what came after it": (
        [step(12), step(11, epoch=2, base=10, incarnation="b")],
        {},
        (11, 2),
    ),
    "a torn rollback hides nothing": (
        [step(12), step(11, epoch=2, base=10, found=(0,), incarnation="b")],
        {},
        (12, 1),
    ),
    "a quarantined rollback hides nothing": (
        [step(12), step(11, epoch=2, base=10, incarnation="b")],
        {"quarantined": [VersionId(2, 11, 0, "b")]},
        (12, 1),
    ),
    "an incarnation that says nothing hides nothing": ([step(12), step(3, epoch=2, incarnation="b")], {}, (12, 1)),
    "one that began from nothing hides all before it": (
        [step(12), step(3, epoch=2, base=-1, incarnation="b")],
        {},
        (3, 2),
    ),
    "a hidden step can still be named": (
        [step(12), step(11, epoch=2, base=10, incarnation="b")],
        {"step": 12},
        (12, 1),
    ),
    "a zombie of the past does not win": (
        [step(103), step(101, epoch=2, base=100, incarnation="b"), step(100)],
        {},
        (101, 2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_resolution(name):
    candidates, arguments, expected = CASES[name]
    assert chosen(candidates, **arguments) == expected
    assert chosen(list(reversed(candidates)), **arguments) == expected


def test_an_unreachable_tier_is_named_not_taken_for_empty():
    found = resolve_step([], unreachable=[Tier.DURABLE])
    assert found.chosen is None
    assert found.unreachable == (Tier.DURABLE,)
    assert "durable tier: unavailable" in found.explain()


def test_every_candidate_gets_a_verdict():
    candidates = [step(1), step(2), step(3, found=(0,)), step(2, epoch=3, base=1, incarnation="c")]
    found = resolve_step(candidates, quarantined=[VersionId(1, 1, 0, "a")])
    assert found.verdicts == {
        VersionId(1, 1, 0, "a"): StepVerdict.QUARANTINED,
        VersionId(1, 2, 0, "a"): StepVerdict.SUPERSEDED,
        VersionId(1, 3, 0, "a"): StepVerdict.TORN,
        VersionId(3, 2, 0, "c"): StepVerdict.CHOSEN,
    }


def test_avoided_step_is_the_last_alternative():
    found = resolve_step([step(1), step(3), step(2)], reluctant=[VersionId(1, 3, 0, "a")])
    assert [c.version_id.version for c in found.alternatives] == [1, 3]
    assert found.verdicts[VersionId(1, 3, 0, "a")] is StepVerdict.AVOIDED
    assert not found.lost


def test_ranks_prefer_a_step_without_reluctance():
    old, new = VersionId(1, 2, 0, "a"), VersionId(1, 3, 0, "a")
    assert elect_step([[new, old], [old, new]], reluctant=[new]) == old
    assert elect_step([[new], [old, new]], reluctant=[new]) == new
    assert elect_step([[new, old], [new, old]]) == new


def test_alternatives_come_best_first():
    found = resolve_step([step(1), step(3), step(2)])
    assert [c.version_id.version for c in found.alternatives] == [2, 1]


candidates = st.lists(
    st.builds(
        lambda n, e, p, f, b: Candidate(VersionId(e, n, 0, f"i{e}"), p, dict.fromkeys(f, MEMORY), b),
        st.integers(0, 6),
        st.integers(1, 3),
        st.integers(1, 3),
        st.sets(st.integers(0, 2), max_size=3),
        st.none() | st.integers(-1, 6),
    ),
    max_size=8,
    unique_by=lambda c: c.version_id,
)


@given(candidates)
def test_only_complete_steps_are_chosen_and_every_rejection_has_a_reason(found):
    result = resolve_step(found)
    assert set(result.verdicts) == {c.version_id for c in found}
    if result.chosen is None:
        assert not any(c.is_complete for c in found)
    else:
        assert result.chosen.is_complete
        better = [c for c in found if c.is_complete and c.version_id.version > result.chosen.version_id.version]
        assert all(result.verdicts[c.version_id] is StepVerdict.SUPERSEDED for c in better)


@given(candidates)
def test_a_branch_that_began_from_nothing_cannot_hide_every_step(found):
    result = resolve_step(found)
    assert (result.chosen is None) == (not any(c.is_complete for c in found))


# -- what stands in the way: torn, quarantined, unreachable --------------------------------------------------------

OBSTACLES = {
    "absent is absent": ([], {}, None, ()),
    "absent in memory and the durable tier away is unknown": (
        [],
        {"unreachable": [Tier.DURABLE]},
        None,
        (Tier.DURABLE,),
    ),
    "memory serves while the durable tier is away": (
        [step(3)],
        {"unreachable": [Tier.DURABLE]},
        (3, 1),
        (Tier.DURABLE,),
    ),
    "torn in memory and the rest away is not whole": (
        [step(3, found=(0,))],
        {"unreachable": [Tier.DURABLE]},
        None,
        (Tier.DURABLE,),
    ),
    "damaged everywhere is not absent, but nothing to choose": (
        [step(3)],
        {"quarantined": [VersionId(1, 3, 0, "a")]},
        None,
        (),
    ),
    "three parts in three tiers": (
        [Candidate(VersionId(1, 5, 0, "a"), 3, {0: MEMORY, 1: (Tier.PEER,), 2: DURABLE})],
        {},
        (5, 1),
        (),
    ),
    "a part in several tiers counts once": (
        [Candidate(VersionId(1, 5, 0, "a"), 2, {0: (Tier.MEMORY, Tier.DURABLE)})],
        {},
        None,
        (),
    ),
    "two halves of different attempts make no whole": (
        [step(5, found=(0,)), step(5, found=(1,), epoch=2, incarnation="b")],
        {},
        None,
        (),
    ),
    "the attempt that is whole wins over a later torn one": (
        [step(5), step(5, found=(1,), epoch=2, incarnation="b")],
        {},
        (5, 1),
        (),
    ),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_obstacles(name):
    candidates, arguments, expected, unreachable = OBSTACLES[name]
    assert chosen(candidates, **arguments) == expected
    found = resolve_step(candidates, **arguments)
    assert found.unreachable == unreachable
    assert found.explain()


def test_nearest_tiers_of_a_step_are_reported():
    mixed = Candidate(
        VersionId(1, 5, 0, "a"), 3, {0: (Tier.MEMORY, Tier.DURABLE), 1: DURABLE, 2: (Tier.PEER, Tier.DURABLE)}
    )
    assert mixed.tiers == (Tier.MEMORY, Tier.PEER, Tier.DURABLE)
    assert step(5, where=(Tier.MEMORY, Tier.DURABLE)).tiers == MEMORY


def test_an_explanation_names_every_candidate_newest_first():
    found = resolve_step([step(1), step(3, found=(0,)), step(2)], unreachable=[Tier.DURABLE])
    assert found.explain().split("; ") == [
        "step 3 (epoch 1): not complete in the tiers that answered, not found so far: part 1 of 2",
        "step 2 (epoch 1): chosen",
        "step 1 (epoch 1): older than the chosen one",
        "durable tier: unavailable",
    ]
    assert resolve_step([]).explain() == "nothing is saved in any tier"


def one_by_one(candidates, quarantined):
    """Return the steps left to the job by comparing every pair of candidates."""
    return {
        one.version_id
        for one in candidates
        if one.is_complete
        and one.version_id not in quarantined
        and any(
            later.is_complete
            and later.version_id not in quarantined
            and later.base_step is not None
            and later.version_id.epoch > one.version_id.epoch
            and later.base_step < one.version_id.version
            for later in candidates
        )
    }


@given(
    st.lists(
        st.builds(
            step,
            st.integers(0, 9),
            st.integers(1, 4),
            st.just(2),
            st.sampled_from([(0,), (0, 1)]),
            st.just(MEMORY),
            st.none() | st.integers(-1, 9),
        ),
        max_size=12,
        unique_by=lambda one: one.version_id,
    ),
    st.data(),
)
def test_superseded_steps_match_pairwise_comparison(candidates, data):
    groups = [one.version_id for one in candidates]
    quarantined = data.draw(st.sets(st.sampled_from(groups), max_size=3)) if groups else set()
    verdicts = resolve_step(candidates, quarantined=quarantined).verdicts
    left = {group for group, verdict in verdicts.items() if verdict is StepVerdict.SUPERSEDED}
    assert left == one_by_one(candidates, quarantined)


class Counted(Candidate):
    """An object that counts how often it is read."""

    looks = 0

    @property
    def is_complete(self):
        Counted.looks += 1
        return True


def test_ten_thousand_steps_are_resolved_in_linear_time():
    steps = [
        Counted(VersionId(1 + n // 100, n, 0, f"i{n // 100}"), 0, {}, base_step=n - n % 100 - 1) for n in range(10_000)
    ]
    Counted.looks = 0
    found = resolve_step(steps)
    assert found.chosen is steps[-1]
    assert len(found.alternatives) == 9_999
    assert Counted.looks <= 4 * len(steps)


@st.composite
def histories(draw):
    """Draw runs of a job: each continues from an existing step or none, and saves later steps.

    Return the steps, and the steps in the past of the newest run.
    """
    saved, current, past = [], [], {}
    for epoch in range(1, draw(st.integers(1, 5)) + 1):
        base = draw(st.sampled_from([None, *(one.version_id for one in saved)]))
        current = [] if base is None else [*past[base]]
        for number in range(draw(st.integers(1, 4))):
            first = -1 if base is None else base.version
            one = step(first + 1 + number, epoch=epoch, base=first, incarnation=f"i{epoch}")
            saved.append(one)
            current.append(one.version_id)
            past[one.version_id] = tuple(current)
    return saved, set(current)


@given(histories())
def test_steps_of_the_newest_run_and_its_past_are_not_left_behind_by_it(history):
    saved, current = history
    branches = IncarnationBranches(saved)
    newest = max(saved, key=lambda one: one.version_id.epoch)
    found = {one.version_id: branches.left_behind_by(one.version_id) for one in saved}
    for group, left in found.items():
        if group.epoch == newest.version_id.epoch:
            assert left is None
        if left is None:
            assert group.epoch == newest.version_id.epoch or group.version <= newest.base_step
        else:
            assert group not in current or left.epoch < newest.version_id.epoch
            assert left.epoch > group.epoch
            assert left.base_step < group.version
            assert any(one.version_id.epoch == left.epoch and one.base_step == left.base_step for one in saved)
    chosen = resolve_step(saved).chosen
    assert chosen is not None
    assert found[chosen.version_id] is None
    assert chosen.version_id in current


@given(candidates)
def test_left_behind_steps_are_those_that_a_load_does_not_choose(found):
    branches = IncarnationBranches(found)
    for group, verdict in resolve_step(found).verdicts.items():
        if verdict is StepVerdict.SUPERSEDED:
            assert branches.left_behind_by(group) is not None
        elif verdict in (StepVerdict.CHOSEN, StepVerdict.OLDER):
            assert branches.left_behind_by(group) is None


def test_left_behind_step_names_the_run_and_its_base():
    branches = IncarnationBranches(
        [step(4), step(3, epoch=2, base=2, incarnation="b"), step(9, epoch=3, base=3, incarnation="c")]
    )
    assert branches.left_behind_by(VersionId(1, 2, 0, "a")) is None
    assert branches.left_behind_by(VersionId(1, 3, 0, "a")) == LeftBehind(2, 2)
    assert str(branches.left_behind_by(VersionId(1, 4, 0, "a"))) == "left behind: epoch 2 continued from step 2"
    assert str(branches.left_behind_by(VersionId(2, 4, 0, "b"))) == "left behind: epoch 3 continued from step 3"
    assert str(LeftBehind(2, -1)) == "left behind: epoch 2 began without a checkpoint"


@given(histories())
def test_newer_steps_of_a_chosen_one_are_of_other_branches(history):
    saved, current = history
    chosen = resolve_step(saved).chosen
    assert chosen is not None
    newer = [one.version_id for one in newer_steps([*saved, step(99, epoch=9, found=(0,))], chosen.version_id)]
    assert current.isdisjoint(newer)
    assert sorted(newer) == sorted(
        one.version_id for one in saved if one.version_id.version > chosen.version_id.version
    )
    assert [group.version for group in newer] == sorted(group.version for group in newer)


def test_step_of_a_named_epoch_is_chosen_or_the_others_are_named():
    two = [step(5), step(5, epoch=2, incarnation="b"), step(4)]
    assert chosen(two, step=5, epoch=1) == (5, 1)
    assert chosen(two, step=5, epoch=2) == (5, 2)
    found = resolve_step(two, step=5, epoch=3)
    assert found.chosen is None
    assert found.explain() == "there are steps 4@1, 5@1, 5@2"
    assert resolve_step(two, step=7).explain() == "there are steps 4, 5"
