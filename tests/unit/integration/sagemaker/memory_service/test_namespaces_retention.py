"""Complete steps of a namespace, and the shards that are retained."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.sagemaker.memory_service.namespaces import (
    Namespace,
    Registry,
    RemovedShard,
    ShardNote,
    complete_namespace_steps,
    encode_note,
    is_dcp_metadata,
    namespace_shard_key,
    namespace_view,
    surplus_shards,
    surplus_steps,
)
from integration.sagemaker.memory_service.shard_requests import NAMESPACE_PARTS
from peerstore.shard_records import ShardInfo

STEPS = st.sets(st.integers(0, 30), min_size=1)


def registry(*, ranks: int = 2, retained: int = 3, generation: int = 1) -> Registry:
    return Registry({"a": Namespace(generation, ranks, retained, 0)})


def fact(rank: int, step: int, stamp: int, *, plan: bool = False, name: str = "a", generation: int = 1) -> ShardInfo:
    meta = encode_note(ShardNote(name, generation, None, plan))
    return ShardInfo(namespace_shard_key(rank, step, stamp), NAMESPACE_PARTS, 1, meta, 0, marked_committed=False)


def whole(ranks: int, *facts: ShardInfo) -> list[int]:
    return complete_namespace_steps(namespace_view({"n1": facts}, registry(ranks=ranks)).of("a"), ranks)


@given(steps=STEPS, retained=st.integers(1, 5), data=st.data())
def test_newest_complete_and_last_written_steps_are_never_surplus(steps, retained, data) -> None:
    newest_whole = data.draw(st.none() | st.sampled_from(sorted(steps)))
    last_put = data.draw(st.sampled_from(sorted(steps)))
    gone = surplus_steps(steps, retained=retained, newest_whole=newest_whole, last_put=last_put)
    kept = steps - set(gone)
    assert {last_put} | ({newest_whole} - {None}) <= kept
    assert len(kept) <= max(retained, 2)
    assert len(kept) >= min(retained, len(steps))


@given(steps=STEPS, retained=st.integers(2, 5))
def test_highest_steps_stay_when_every_save_is_complete(steps, retained) -> None:
    """As the server that AWS's library is tested against does it."""
    kept: set[int] = set()
    before = None
    for step in sorted(steps):
        kept.add(step)
        kept -= set(surplus_steps(kept, retained=retained, newest_whole=before, last_put=step))
        before = step
    assert kept == set(sorted(steps)[-retained:])


def test_only_retained_step_stays_until_the_next_is_complete() -> None:
    kept = registry(retained=1)
    halfway = [fact(0, 1, 1), fact(1, 1, 2), fact(0, 2, 3)]
    assert surplus_shards(namespace_view({"n1": halfway}, kept), kept, sure=True) == []
    done = [*halfway, fact(1, 2, 4)]
    assert surplus_shards(namespace_view({"n1": done}, kept), kept, sure=True) == [
        namespace_shard_key(0, 1, 1),
        namespace_shard_key(1, 1, 2),
    ]


def test_failed_saves_displace_each_other() -> None:
    kept = registry(retained=3)
    good = [fact(0, 10, 1), fact(1, 10, 2)]
    failed = [fact(0, step, step) for step in (20, 30, 40, 50)]
    gone = surplus_shards(namespace_view({"n1": [*good, *failed]}, kept), kept, sure=True)
    assert gone == [namespace_shard_key(0, 20, 20), namespace_shard_key(0, 30, 30)]


def test_silent_node_limits_removal_to_steps_older_than_a_complete_one() -> None:
    kept = registry(retained=2)
    facts = [fact(rank, step, step) for step in (10, 20, 30) for rank in (0, 1)]
    seen = [one for one in facts if one.key.version != 30 or one.key.part == 0]
    unsure = surplus_shards(namespace_view({"n1": seen}, kept), kept, sure=False)
    assert unsure == [namespace_shard_key(0, 10, 10)]
    half = [one for one in facts if one.key.part == 0]
    assert surplus_shards(namespace_view({"n1": half}, kept), kept, sure=False) == []


@pytest.mark.parametrize(
    ("ranks", "found", "is_whole"),
    [
        (3, {0, 1, 2}, True),
        (3, {0, 1}, False),
        (3, {0, 2}, False),
        (3, {1, 2}, False),
        (3, {0, 1, 2, 7}, True),
        (1, {0}, True),
    ],
)
def test_step_is_complete_when_every_rank_is_present(ranks: int, found: set[int], is_whole: bool) -> None:
    assert whole(ranks, *(fact(rank, 5, 1) for rank in found)) == ([5] if is_whole else [])


@pytest.mark.parametrize(
    ("shards", "plan", "is_whole"),
    [({0, 1}, 2, True), ({0, 1, 2, 3, 4, 5, 6, 7}, 8, True), ({1}, 2, False), ({0, 1, 2}, 4, False), (set(), 0, True)],
)
def test_plan_gives_the_rank_count_of_a_resized_job(shards: set[int], plan: int, is_whole: bool) -> None:
    facts = [*(fact(rank, 5, 1) for rank in shards), fact(plan, 5, 1, plan=True)]
    assert whole(5, *facts) == ([5] if is_whole else [])


def test_dcp_metadata_is_recognized() -> None:
    from torch.distributed.checkpoint.metadata import Metadata

    assert is_dcp_metadata(pickle.dumps(Metadata({}), protocol=pickle.HIGHEST_PROTOCOL))
    assert is_dcp_metadata(pickle.dumps(Metadata({}), protocol=2))
    assert not is_dcp_metadata(pickle.dumps({"torch.distributed": 1}))
    assert not is_dcp_metadata(b"PK\x03\x04 torch.distributed.checkpoint.metadata")
    assert not is_dcp_metadata(b"")


def test_newest_attempt_wins_on_any_node() -> None:
    view = namespace_view({"n1": [fact(0, 5, 1)], "n2": [fact(0, 5, 2)], "n3": [fact(0, 5, 2)]}, registry())
    shard = view.of("a")[5][0]
    assert (shard.key.attempt, shard.nodes) == (2, ("n2", "n3"))
    assert view.outdated == [namespace_shard_key(0, 5, 1)]


def test_shards_of_older_generations_are_outdated_and_newer_ones_unknown() -> None:
    held = {"n1": [fact(0, 1, 1, generation=1), fact(0, 2, 2, generation=2), fact(0, 3, 3, generation=3)]}
    view = namespace_view(held, registry(generation=2))
    assert list(view.of("a")) == [2]
    assert view.outdated == [namespace_shard_key(0, 1, 1)]
    gone = Registry({"a": Namespace(2, 2, 3, 0, deleted=True)})
    assert namespace_view(held, gone).outdated == [namespace_shard_key(0, 1, 1), namespace_shard_key(0, 2, 2)]
    assert namespace_view(held, Registry()).outdated == []


def test_deleted_shard_is_outdated_until_written_again() -> None:
    said = Registry(registry().namespaces, (RemovedShard("a", 1, 0, 5, 7),))
    assert namespace_view({"n1": [fact(0, 5, 7)]}, said).outdated == [namespace_shard_key(0, 5, 7)]
    assert list(namespace_view({"n1": [fact(0, 5, 8)]}, said).of("a")) == [5]


def test_foreign_shards_of_the_job_are_left_alone() -> None:
    strange = ShardInfo(namespace_shard_key(0, 5, 1), NAMESPACE_PARTS, 1, b"\xff not ours", 0, marked_committed=False)
    few = ShardInfo(namespace_shard_key(0, 6, 1), 4, 1, b"", 0, marked_committed=False)
    view = namespace_view({"n1": [strange, few]}, registry())
    assert (view.of("a"), view.outdated) == ({}, [])
