"""The steps that survivors hold completely between them, as a table and by construction."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.example_counts import examples
from tieredckpt.live.survivor_choice import (
    ContentDigest,
    HeldSlice,
    RequiredNames,
    SurvivorCoverage,
    SurvivorHolding,
    SurvivorReport,
    choose_survivor_step,
    coverage_reporters,
    diverging_replicas,
    holdings_by_job,
    ranks_to_compare,
    reached_steps,
    trusted_steps,
)

NEEDED = RequiredNames(5, frozenset({"w"}), frozenset({"lr"}))


def rows(first: int, count: int, of: int = 4, name: str = "w", dtype: str = "F32") -> HeldSlice:
    return HeldSlice(name, dtype, (of, 3), (first, 0), (count, 3))


WHOLE = SurvivorCoverage((rows(0, 4),), ("lr",))
UPPER = SurvivorCoverage((rows(0, 2),), ("lr",))
LOWER = SurvivorCoverage((rows(2, 2),), ())


def chosen(*held: tuple[int, SurvivorCoverage], needed: RequiredNames | None = NEEDED):
    covers = {cover.digest: cover for _, cover in held}
    return choose_survivor_step([SurvivorHolding(step, 0, cover.digest) for step, cover in held], covers, needed)


@pytest.mark.parametrize(
    ("held", "step", "why"),
    [
        ([], -1, "no rank still has the state of a step boundary"),
        ([(7, WHOLE)], 7, ""),
        ([(7, WHOLE), (8, WHOLE)], 8, ""),
        ([(7, UPPER), (7, LOWER)], 7, ""),
        ([(7, UPPER), (8, LOWER)], -1, "of step 8 no survivor has lr and 1 more; of step 7 no survivor has w"),
        ([(7, WHOLE), (8, UPPER)], 7, ""),
        ([(7, UPPER)], -1, "of step 7 no survivor has w"),
        ([(7, LOWER)], -1, "of step 7 no survivor has lr and 1 more"),
        ([(5, WHOLE)], -1, "step 5 is a complete checkpoint"),
        ([(6, UPPER), (5, WHOLE)], -1, "of step 6 no survivor has w; step 5 is a complete checkpoint"),
        ([(7, SurvivorCoverage((), ("lr",)))], -1, "of step 7 no survivor has w"),
        ([(7, SurvivorCoverage((rows(0, 2), rows(2, 2, of=6)), ("lr",)))], -1, "of step 7 no survivor has w"),
        ([(7, SurvivorCoverage((rows(0, 2), rows(2, 2, dtype="BF16")), ("lr",)))], -1, "of step 7 no survivor has w"),
        ([(7, SurvivorCoverage((rows(0, 4), rows(0, 1, name="more")), ("lr",)))], -1, "of step 7 no survivor has more"),
    ],
)
def test_choices(held, step, why):
    found = chosen(*held)
    assert (found.step, found.why) == (step, why)


def test_survivors_with_all_names_give_a_step_when_none_is_complete():
    assert "no survivor knows the names" in chosen((7, WHOLE), needed=None).why

    def given(*held: tuple[int, SurvivorCoverage, bool]):
        covers = {cover.digest: cover for _, cover, _ in held}
        holdings = [SurvivorHolding(step, 0, cover.digest, complete) for step, cover, complete in held]
        return choose_survivor_step(holdings, covers, None, unknown="its nodes are lost")

    assert given((7, WHOLE, True)).step == 7
    assert given((7, UPPER, True), (7, LOWER, False)).step == 7
    assert given((8, WHOLE, False), (7, WHOLE, True)).step == 7
    assert given((7, UPPER, True)).why == "of step 7 no survivor has w"
    assert given((7, WHOLE, False)).why.startswith("the saved steps are unknown: its nodes are lost, and no survivor")


def test_holder_outside_the_last_world_is_ignored():
    old, new = SurvivorHolding(9, 1, "a"), SurvivorHolding(7, 2, "b")
    stands = [
        SurvivorReport(1, {"job": old}, {"job": 9}),
        SurvivorReport(2, {"job": new}, {"job": 8}),
        SurvivorReport(),
    ]
    assert holdings_by_job(stands) == {"job": {1: new}}
    assert reached_steps(stands) == {"job": 8}
    # A world that trained and kept nothing has left it all the same.
    assert holdings_by_job([SurvivorReport(1, {"job": old}), SurvivorReport(2)]) == {}


def test_single_replica_reports_its_coverage():
    assert coverage_reporters(
        {3: SurvivorHolding(7, 0, "a"), 1: SurvivorHolding(7, 0, "b"), 2: SurvivorHolding(6, 0, "a")}
    ) == {1: "b", 2: "a"}


def test_steps_not_completed_before_the_abort_are_not_trusted():
    def stand(left, step, *, silent=True):
        return SurvivorReport(left, {}, {"job": step}, {"job": step} if silent else None)

    assert trusted_steps([stand(2, 8), stand(2, 7), stand(1, 3), SurvivorReport()]) == {"job": 7}
    # A rank that had completed no step before it received the fault.
    assert trusted_steps([stand(2, 8), SurvivorReport(2, {}, {}, {})]) == {"job": -1}
    # If an abort raises in every waiting rank, no rank takes an incomplete result for a valid one.
    assert trusted_steps([stand(2, 8, silent=False), stand(2, 7, silent=False)]) == {}


def test_untrusted_steps_are_not_chosen():
    covers = {WHOLE.digest: WHOLE}
    holdings = [SurvivorHolding(step, 0, WHOLE.digest) for step in (7, 8)]
    assert choose_survivor_step(holdings, covers, NEEDED, most=7).step == 7
    assert (
        choose_survivor_step(holdings, covers, NEEDED, wrong={8: "ranks 0 and 2 do not hold the same parameters"}).step
        == 7
    )
    found = choose_survivor_step(
        holdings, covers, NEEDED, most=7, wrong={7: "ranks 0 and 2 do not hold the same parameters"}
    )
    assert found.step == -1
    assert found.why.split("; ") == [
        "of step 8 it is not known on all survivors that it was complete before the abort",
        "of step 7 ranks 0 and 2 do not hold the same parameters",
    ]


def test_diverging_replicas_are_named():
    holdings = {rank: SurvivorHolding(7, 0, "upper" if rank in (0, 2, 4) else "lower") for rank in range(4)}
    holdings[5] = SurvivorHolding(6, 0, "upper")  # alone at its step
    assert ranks_to_compare(holdings) == {0: [0, 2], 1: [1, 3]}
    same = {rank: ContentDigest("a") for rank in range(4)}
    assert diverging_replicas(holdings, same) == {}
    assert diverging_replicas(holdings, {**same, 3: ContentDigest("b")}) == {
        7: "ranks 1 and 3 do not hold the same parameters"
    }
    assert diverging_replicas(holdings, {**same, 2: ContentDigest(why="an illegal memory access")}) == {
        7: "rank 2: an illegal memory access"
    }


@st.composite
def survivors(draw):
    """Draw ranks of a mesh of replicas and shards; some are lost and some are a step behind."""
    replicas, shards = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ranks = [(replica, shard) for replica in range(replicas) for shard in range(shards)]
    there = draw(st.lists(st.sampled_from(ranks), unique=True, max_size=len(ranks)))
    return shards, {rank: draw(st.integers(5, 8)) for rank in there}


@settings(max_examples=examples(60))
@given(survivors())
def test_the_newest_step_with_all_shards_is_chosen(world):
    shards, steps = world
    covers = [SurvivorCoverage((rows(2 * shard, 2, of=2 * shards),), ("lr",)) for shard in range(shards)]
    found = chosen(*((step, covers[shard]) for (_, shard), step in steps.items()))
    there = {step: {shard for (_, shard), stood in steps.items() if stood == step} for step in range(6, 9)}
    assert found.step == max((step for step, held in there.items() if len(held) == shards), default=-1)
    assert bool(found.why) == (found.step < 0)
