"""The last pin or unpin of a step counts, in memory and in the durable tier, on every node."""

import time

from peerstore.shard_records import RetentionMark
from tests.unit.tieredckpt.agent.test_drain_listing import group_of, nodes, outside
from tieredckpt.format import object_keys

__all__ = ["nodes", "outside"]


def kept(catalog):
    return {group.version for group in catalog.listing(fresh=True).kept}


def test_unpin_is_not_reverted_by_a_stale_node(nodes, outside):
    a, b = nodes("a"), nodes("b")
    a.save(0)
    for node in (a, b):
        node.store.versions.retain("job", group_of(0))
    a.save(1)
    assert kept(outside) == {0}
    outside.keep(group_of(0), kept=False)  # by a process that sees only the durable tier
    b.save(2)
    a.save(3)
    assert kept(outside) == set()
    assert b.store.versions.retained("job") == set(), "the unpin reaches memory as well"


def test_a_pin_after_an_unpin_counts(nodes, outside):
    a, b = nodes("a"), nodes("b")
    a.save(0)
    outside.keep(group_of(0), kept=True)
    outside.keep(group_of(0), kept=False)
    b.store.versions.retain("job", group_of(0))
    b.save(1)
    assert kept(outside) == {0}
    assert outside.keep_changed_at(group_of(0), kept=False) == 0


def test_unpin_in_memory_reaches_the_durable_tier(nodes, outside):
    a = nodes("a")
    a.save(0)
    a.store.versions.retain("job", group_of(0))
    a.save(1)
    a.store.versions.retain("job", group_of(0), kept=False)  # then the store becomes unavailable
    a.save(2)
    assert kept(outside) == set()


def test_a_pin_of_an_earlier_release_has_no_time_and_stays(nodes, outside):
    a = nodes("a")
    a.save(0)
    outside.store.put(object_keys.keep_key("job", group_of(0)), b"")
    a.save(1)
    assert kept(outside) == {0}
    outside.keep(group_of(0), kept=False)
    a.store.versions.retain("job", group_of(1))
    a.save(2)
    assert kept(outside) == {1}


def test_slow_clock_can_revert_a_mark_of_a_fast_clock(nodes, outside):
    a = nodes("a")
    a.save(0)
    ahead = time.time_ns() + 3600 * 10**9
    a.store.replicas.apply_retention("job", (RetentionMark(group_of(0), True, ahead),))
    a.save(1)
    a.store.versions.retain("job", group_of(0), kept=False)
    assert a.store.versions.retained("job") == set()
    a.save(2)
    assert kept(outside) == set()
    a.store.replicas.apply_retention("job", (RetentionMark(group_of(1), True, ahead),))
    a.save(3)
    assert kept(outside) == {1}
    outside.keep(group_of(1), kept=False)
    a.save(4)
    assert kept(outside) == set()
