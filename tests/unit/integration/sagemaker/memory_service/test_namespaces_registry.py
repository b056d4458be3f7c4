"""Namespace registries converge to the same state on all nodes."""

from __future__ import annotations

import functools
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from integration.sagemaker.memory_service.namespaces import (
    REMOVED_SHARD_TTL_NS,
    Namespace,
    Registry,
    RemovedShard,
    decode_registry,
    encode_registry,
    merge_registries,
    with_deleted_namespaces,
    with_namespace,
    with_removed_shard,
)
from tests.support.example_counts import examples

NOW = 1_800_000_000 * 10**9
names = st.sampled_from("ab")
namespaces = st.builds(Namespace, st.integers(1, 3), st.integers(1, 3), st.just(3), st.integers(0, 5), st.booleans())
removed = st.builds(
    RemovedShard, names, st.integers(1, 3), st.integers(0, 2), st.integers(0, 2), st.integers(NOW - 9, NOW)
)
registries = st.builds(
    Registry,
    st.dictionaries(names, namespaces),
    st.lists(removed, max_size=4).map(lambda many: tuple(sorted(many, key=encode_registry))),
)


def both(one: Registry, other: Registry) -> Registry:
    return merge_registries(one, other, now_ns=NOW)


def put_together(*many: Registry) -> Registry:
    return functools.reduce(both, many, Registry())


@settings(max_examples=examples(50))
@given(many=st.lists(registries, min_size=1, max_size=3))
def test_merge_is_independent_of_the_order(many: list[Registry]) -> None:
    found = [put_together(*order) for order in itertools.permutations(many)]
    assert all(one == found[0] for one in found)
    assert put_together(*many, *many) == found[0]


@given(registry=registries)
def test_registry_round_trips(registry: Registry) -> None:
    assert decode_registry(encode_registry(registry)) == registry


def test_recreated_namespace_has_a_new_generation() -> None:
    first = with_namespace(Registry(), "a", num_ranks=2, steps_retained=3, now_ns=NOW)
    gone = with_deleted_namespaces(first, "a", "never there", now_ns=NOW + 1)
    again = with_namespace(gone, "a", num_ranks=4, steps_retained=1, now_ns=NOW + 2)
    assert (first.namespaces["a"].generation, again.namespaces["a"].generation) == (1, 2)
    assert gone.get("a") is None
    assert gone.live_namespaces == {}
    for order in itertools.permutations((first, gone, again)):
        assert put_together(*order).get("a") == again.get("a")


def test_stale_node_does_not_restore_a_deleted_namespace() -> None:
    first = with_namespace(Registry(), "a", num_ranks=2, steps_retained=3, now_ns=NOW)
    gone = with_deleted_namespaces(first, "a", now_ns=NOW + 1)
    assert both(gone, first).get("a") is None


def test_concurrent_creations_of_a_namespace_merge() -> None:
    one = with_namespace(Registry(), "a", num_ranks=2, steps_retained=3, now_ns=NOW)
    other = with_namespace(Registry(), "a", num_ranks=2, steps_retained=3, now_ns=NOW + 1)
    assert both(one, other).namespaces["a"].generation == 1


def test_removals_are_retained_for_an_hour_unless_the_namespace_is_deleted() -> None:
    first = with_namespace(Registry(), "a", num_ranks=2, steps_retained=3, now_ns=NOW)
    told = with_removed_shard(first, RemovedShard("a", 1, 0, 5, NOW), now_ns=NOW)
    assert told.removals() == {("a", 1, 0, 5): NOW}
    later = merge_registries(told, Registry(), now_ns=NOW + REMOVED_SHARD_TTL_NS + 1)
    assert later.removals() == {}
    assert with_deleted_namespaces(told, "a", now_ns=NOW).removals() == {}
