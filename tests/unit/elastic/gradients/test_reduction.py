"""The reduction tree over microbatch ids: one expression for any assignment to ranks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import PolicyError
from elastic.gradients.reduction import MicrobatchShare, PartialSums, TreeNode, complete_subtrees, tree_sum


def written(left: str, right: str) -> str:
    return f"({left}{right})"


def expression(ids_by_rank: list[list[int]], leaves: int) -> str:
    """Return the expression if each rank sums its own ids and one process adds the partial sums."""
    whole = PartialSums[str](leaves, written)
    for ids in reversed(ids_by_rank):
        own = PartialSums[str](leaves, written)
        for id_ in ids:
            own.add_leaf(id_, f" {id_} ")
        for node, value in zip(own.nodes, own.values(), strict=True):
            whole.add(node, value)
    return whole.root


@given(st.data(), st.integers(1, 40))
def test_reduction_tree_is_independent_of_the_id_assignment(data: st.DataObject, leaves: int) -> None:
    ranks = data.draw(st.integers(1, 6))
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=leaves, max_size=leaves))
    order = data.draw(st.permutations(range(leaves)))
    spread = [[id_ for id_ in order if owners[id_] == rank] for rank in range(ranks)]
    assert expression(spread, leaves) == expression([list(range(leaves))], leaves)


def test_sum_is_a_balanced_tree_in_id_order() -> None:
    assert expression([[0, 1, 2, 3, 4, 5, 6]], 7).replace(" ", "") == "(((01)(23))((45)6))"
    assert expression([[0]], 1).strip() == "0"


@given(st.integers(1, 200), st.data())
def test_a_run_of_ids_leaves_few_sums(leaves: int, data: st.DataObject) -> None:
    begin, end = sorted(data.draw(st.tuples(st.integers(0, leaves), st.integers(0, leaves))))
    partials = PartialSums[list[int]](leaves, lambda left, right: left + right)
    most = 0
    for id_ in range(begin, end):
        partials.add_leaf(id_, [id_])
        most = max(most, len(partials.nodes))
    assert [id_ for value in partials.values() for id_ in value] == [*range(begin, end)]
    assert most <= 2 * math.log2(max(1, end - begin)) + 1
    assert partials.nodes == complete_subtrees(range(begin, end), leaves)


def test_aligned_run_is_one_subtree() -> None:
    assert complete_subtrees(range(8, 16), 32) == (TreeNode(3, 1),)
    assert complete_subtrees(range(4, 6), 6) == (TreeNode(2, 1),)  # no id follows 5
    assert len(complete_subtrees(range(12, 24), 24)) == 2


def test_sum_is_unavailable_before_all_leaves_are_added() -> None:
    partials = PartialSums[int](3, lambda left, right: left + right)
    partials.add_leaf(2, 4)
    partials.add_leaf(0, 1)
    with pytest.raises(KeyError):
        _ = partials.root
    partials.add_leaf(1, 2)
    assert partials.root == 7


def test_numbers_are_summed_by_the_tree() -> None:
    values = [1e16, 1.0, -1e16, 1.0]
    assert tree_sum(values) == (1e16 + 1.0) + (-1e16 + 1.0) != math.fsum(values)


@pytest.mark.parametrize(
    ("made", "by_rank"),
    [
        (MicrobatchShare.even(10, 3, 0), ((0, 1, 2, 3), (4, 5, 6), (7, 8, 9))),
        (MicrobatchShare.even(2, 3, 0), ((0,), (1,), ())),
        (MicrobatchShare.contiguous([1, 0, 3], 2), ((0,), (), (1, 2, 3))),
        (MicrobatchShare.round_robin(5, 2, 1), ((0, 2, 4), (1, 3))),
    ],
)
def test_shares(made: MicrobatchShare, by_rank: tuple[tuple[int, ...], ...]) -> None:
    assert made.by_rank == by_rank
    assert made.own_ids == by_rank[made.rank]


@pytest.mark.parametrize(
    ("by_rank", "rank", "words"),
    [
        (((0, 1), (1,)), 0, "each of them once"),
        (((0,), (2,)), 0, "are not 0 to 1"),
        (((), ()), 1, "are not 0 to"),
        (((0,), (1,)), 2, "rank 2 is not one of the 2 ranks"),
    ],
)
def test_a_share_that_cannot_be_is_refused(by_rank: tuple[tuple[int, ...], ...], rank: int, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        MicrobatchShare(by_rank, rank)


@given(st.integers(1, 30), st.integers(1, 9))
def test_empty_passes_come_first_and_are_known_to_all_ranks(microbatches: int, ranks: int) -> None:
    for rank in range(ranks):
        share = MicrobatchShare.even(microbatches, ranks, rank)
        passes = list(share.passes(share.max_per_rank, lambda *_: None))
        assert len(passes) == share.max_per_rank
        assert tuple(one.id for one in passes if not one.is_empty) == share.own_ids
        assert not any(after.is_empty and not before.is_empty for before, after in pairwise(passes))
        assert [one.is_last for one in passes] == [False] * (len(passes) - 1) + [True]
        assert all(one.id in (share.own_ids or (0,)) for one in passes)
        assert all(share.own_ids[one.position] == one.id for one in passes if share.own_ids)
        for other in range(ranks):
            elsewhere = MicrobatchShare.even(microbatches, ranks, other)
            ids = [elsewhere.id_of_pass(rank, number, len(passes)) for number in range(len(passes))]
            assert ids == [None if one.is_empty else one.id for one in passes]
