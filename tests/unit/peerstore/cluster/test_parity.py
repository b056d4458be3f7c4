"""Who keeps what for whom in a parity group, and what a loss costs."""

import itertools
from fractions import Fraction
from math import comb

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerstore.checksums import chunk_count
from peerstore.errors import PeerStoreError, ProtocolError, RequestError, ShardDamagedError
from peerstore.parity.parity_codec import (
    MAX_PARITY_MEMBERS,
    ParityRecord,
    Redundancy,
    Stripe,
    decode_parity,
    loss_probability,
    memory_overhead,
    recoverable,
    split_segments,
    stripes,
)
from peerstore.shard_records import CHUNK_BYTES
from tests.support.parities import Kept, kept, nodes, shard_record

untimed = settings(deadline=None)  # a busy machine is no failure


@untimed
@given(kept())
def test_each_chunk_is_kept_once_and_elsewhere(group):
    stripe = group.stripe
    for member in stripe.members:
        shard, segments = stripe.shard(member), stripe.segments(member)
        assert sorted(segment.keeper for segment in segments) == sorted(set(stripe.members) - {member})
        count = chunk_count(shard.size_bytes, stripe.chunk_bytes) if shard else 0
        assert [chunk for segment in segments for chunk in segment.chunks] == list(range(count))
        assert sum(segment.size_bytes for segment in segments) == (shard.size_bytes if shard else 0)
        for segment in segments:
            assert segment.start == min(segment.chunks.start * stripe.chunk_bytes, shard.size_bytes if shard else 0)
            assert (segment in stripe.parity(segment.keeper).segments) == bool(segment.size_bytes)
    for keeper in stripe.members:
        members = [segment.member for segment in stripe.parity(keeper).segments]
        assert len(set(members)) == len(members)
        assert keeper not in members


def test_the_picture_in_the_docstring_is_the_plan():
    group = Kept({name: bytes(12) for name in ("n0", "n1", "n2", "n3")})
    mixed = {
        keeper: {
            f"{'abcd'[group.stripe.place(s.member)]}{s.chunks.start}" for s in group.stripe.parity(keeper).segments
        }
        for keeper in group.stripe.members
    }
    assert mixed == {
        "n0": {"b2", "c1", "d0"},
        "n1": {"a0", "c2", "d1"},
        "n2": {"a1", "b0", "d2"},
        "n3": {"a2", "b1", "c0"},
    }


@untimed
@given(st.data(), st.lists(st.lists(st.integers(0, 30), max_size=3), min_size=2, max_size=5))
def test_every_node_makes_the_same_plan(data, sizes):
    part = itertools.count(0, 8)
    shards = {
        name: [shard_record(next(part), bytes(size)) for size in of] for name, of in zip(nodes(5), sizes, strict=False)
    }
    elsewhere = {name: data.draw(st.permutations(shards[name])) for name in data.draw(st.permutations(list(shards)))}
    plan = stripes(shards)
    assert stripes(elsewhere) == plan
    assert len(plan) == max(map(len, shards.values()))
    for number, stripe in enumerate(plan):
        assert stripe.number == number
        for member, own in shards.items():
            assert stripe.shard(member) == (own[number] if number < len(own) else None)
            if number < len(own):  # what the member itself knows is enough
                size = own[number].size_bytes
                assert split_segments(member, stripe.members, size, chunk_bytes=4) == stripe.segments(member)


@untimed
@given(kept())
def test_no_parity_is_longer_than_a_share_of_the_longest_shard(group):
    stripe = group.stripe
    for keeper in stripe.members:
        others = [s.size_bytes for m, s in zip(stripe.members, stripe.shards, strict=True) if s and m != keeper]
        share = -(-chunk_count(max(others, default=0), stripe.chunk_bytes) // (len(stripe.members) - 1))
        assert stripe.parity(keeper).size_bytes <= share * stripe.chunk_bytes


@untimed
@given(st.integers(2, 9), st.integers(1, 400))
def test_equal_shards_cost_one_part_in_g_more_and_rounding(count, size):
    stripe = Kept({name: bytes(size) for name in nodes(count)}).stripe
    overhead = memory_overhead([stripe])
    assert 1 / (count - 1) <= overhead <= 1 / (count - 1) + stripe.chunk_bytes / size
    if size % (4 * (count - 1)) == 0:
        assert overhead == 1 / (count - 1)


def test_the_overhead_of_nothing_is_nothing():
    assert memory_overhead([]) == 0
    assert memory_overhead([Kept({"a": b"", "b": None}).stripe]) == 0


def test_two_nodes_keep_copies():
    group = Kept({"b": b"the shard of b", "a": b"of a"})
    assert group.parities == {"a": b"the shard of b", "b": b"of a"}


@untimed
@given(st.integers(2, 7), st.data())
def test_one_loss_is_recovered_and_two_in_a_group_are_not(count, data):
    names = nodes(count)
    shards = {name: bytes(data.draw(st.integers(4 * count, 80))) for name in names}
    stripe = Kept(shards).stripe
    lost = data.draw(st.sampled_from(names))
    ((rebuild,), gone) = recoverable({lost, "a node of another group"}, [stripe])
    assert (rebuild.member, gone) == (lost, ())
    assert set(rebuild.parities) == set(names) - {lost}
    assert set(rebuild.shards) == (set(names) - {lost} if count > 2 else set())
    other = data.draw(st.sampled_from([name for name in names if name != lost]))
    assert recoverable({lost, other}, [stripe]) == ((), ((stripe, min(lost, other)), (stripe, max(lost, other))))


def test_losses_in_different_groups_do_not_add_up():
    groups = [Kept({name + row: bytes(40) for name in "abc"}).stripe for row in "01"]
    recovery = recoverable({"a0", "b1"}, groups)
    assert [(rebuild.stripe, rebuild.member) for rebuild in recovery.rebuilds] == [(groups[0], "a0"), (groups[1], "b1")]
    assert recovery.gone == ()


def test_a_shard_without_bytes_is_recovered_by_its_record():
    stripe = Kept({"a": b"", "b": bytes(20), "c": bytes(20)}).stripe
    ((rebuild,), gone) = recoverable({"a", "b"}, [stripe])
    assert (rebuild.member, rebuild.shards, rebuild.parities) == ("a", (), ("c",))
    assert gone == ((stripe, "b"),)
    assert recoverable({"a", "b", "c"}, [stripe]).rebuilds == ()


def test_a_short_shard_is_gone_with_another_only_where_they_meet_in_a_parity():
    stripe = Kept({"a": bytes(4), "b": bytes(8), "c": bytes(8)}).stripe  # a's only chunk is kept by c, with b's first
    assert recoverable({"a", "b"}, [stripe]).gone == ((stripe, "a"), (stripe, "b"))
    stripe = Kept({"a": bytes(4), "b": bytes(4), "c": bytes(8)}).stripe  # b's only chunk is kept by a
    ((rebuild,), gone) = recoverable({"a", "b"}, [stripe])
    assert (rebuild.member, rebuild.shards, rebuild.parities) == ("a", (), ("c",))
    assert gone == ((stripe, "b"),)


# -- how likely a loss is ---------------------------------------------------------------------------------------

redundancies = st.integers(1, 4).flatmap(lambda n: st.builds(Redundancy, st.just(n), st.integers(0, n)))


@untimed
@given(st.lists(redundancies, min_size=1, max_size=3), st.data())
def test_the_odds_are_what_counting_gives(groups, data):
    owner = [number for number, group in enumerate(groups) for _ in range(group.nodes)]
    lost = data.draw(st.integers(0, len(owner)))
    cases = list(itertools.combinations(owner, lost))
    bad = sum(any(case.count(n) > group.tolerates for n, group in enumerate(groups)) for case in cases)
    assert loss_probability(groups, lost) == Fraction(bad, len(cases))


@untimed
@given(st.integers(1, 200), st.integers(2, 8), st.integers(0, 12))
def test_the_odds_of_equal_parity_groups_have_a_closed_form(groups, size, lost):
    if lost <= groups * size:
        expected = 1 - Fraction(comb(groups, lost) * size**lost, comb(groups * size, lost))
        assert loss_probability([Redundancy(size, 1)] * groups, lost) == expected


def test_a_table_of_odds_for_sixteen_nodes():
    pairs, triples, eights = [Redundancy(2, 1)] * 8, [Redundancy(3, 2)] * 5 + [Redundancy(1, 0)], [Redundancy(8, 1)] * 2
    assert [loss_probability(pairs, lost) for lost in (1, 2, 3)] == [0, Fraction(1, 15), Fraction(1, 5)]
    assert [loss_probability(eights, lost) for lost in (1, 2, 3)] == [0, Fraction(7, 15), 1]
    assert loss_probability(triples, 1) == Fraction(1, 16)


@pytest.mark.parametrize("lost", [-1, 17])
def test_more_nodes_than_there_are_cannot_be_lost(lost):
    with pytest.raises(RequestError, match="16 nodes"):
        loss_probability([Redundancy(8, 1)] * 2, lost)


# -- what is not a stripe ---------------------------------------------------------------------------------------


def wire(record):
    return msgspec.to_builtins(record, builtin_types=(bytes,))


def test_a_record_comes_back_as_it_was():
    record = Kept({name: bytes(50) for name in nodes(4)}).records["n8"]
    assert decode_parity(msgspec.msgpack.encode(record)) == record
    assert str(record) == "parity 0 of job/3 on n8"


def change(path, value):
    """A record of a group of three in which ``path`` is ``value``."""
    record = wire(Kept({name: bytes(50) for name in ("a", "b", "c")}).records["b"])
    inner = record
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return msgspec.msgpack.encode(record)


SHARD = ("stripe", "shards", 0)
KEY = (*SHARD, "key")


@pytest.mark.parametrize(
    ("path", "value", "error"),
    [
        (("stripe",), None, ProtocolError),
        (("keeper",), "z", RequestError),
        (("keeper",), "a", RequestError),  # its checksums are those of b's parity
        (("checksums",), bytes(8), RequestError),
        (("stripe", "number"), -1, RequestError),
        (("stripe", "members"), ["a", "c", "b"], RequestError),
        (("stripe", "members"), ["a", "b", "b"], RequestError),
        (("stripe", "members"), ["a", "b", "../c"], RequestError),
        (("stripe", "members"), ["a", "b"], RequestError),
        (("stripe", "members"), [f"n{number:04}" for number in range(5000)], RequestError),
        (("stripe", "shards"), [None] * 3, RequestError),
        (("stripe", "shards"), [None] * 5000, RequestError),
        ((*SHARD, "size_bytes"), -1, PeerStoreError),
        ((*SHARD, "size_bytes"), 1 << 62, ShardDamagedError),
        ((*SHARD, "chunk_bytes"), 0, ShardDamagedError),
        ((*SHARD, "chunk_bytes"), -4, ShardDamagedError),
        ((*SHARD, "chunk_bytes"), CHUNK_BYTES + 1, PeerStoreError),
        ((*SHARD, "checksums"), b"", ShardDamagedError),
        ((*SHARD, "parts"), 0, RequestError),
        ((*KEY, "job"), "../other", RequestError),
        ((*KEY, "job"), "other", RequestError),
        ((*KEY, "version"), 4, RequestError),
        ((*KEY, "incarnation"), "i2", RequestError),
        ((*KEY, "part"), 16, RequestError),  # c's
        ((*KEY, "part"), -1, RequestError),
    ],
)
def test_a_hostile_record_is_refused(path, value, error):
    decode_parity(change(("keeper",), "b"))
    with pytest.raises(error):
        decode_parity(change(path, value))


def test_large_chunks_are_refused_before_anybody_allocates_one():
    shard = msgspec.structs.replace(shard_record(0, b"x"), chunk_bytes=1 << 30)
    with pytest.raises(RequestError, match="chunks of 1073741824 bytes"):
        Stripe(0, ("a", "b"), (shard, None))


def test_chunks_of_two_sizes_do_not_mix():
    with pytest.raises(RequestError, match="chunks of one size"):
        Stripe(0, ("a", "b"), (shard_record(0, b"x"), shard_record(8, b"y", chunk_bytes=8)))


@pytest.mark.parametrize("members", [("a", "a"), ("b", "a")])
def test_the_nodes_of_a_stripe_are_in_order_and_once(members):
    with pytest.raises(RequestError, match="named once"):
        Stripe(0, members, (shard_record(0, b"x"), None))


@untimed
@given(st.binary(max_size=200))
def test_garbage_is_no_record(data):
    with pytest.raises(ProtocolError):
        decode_parity(data)


def test_a_record_that_is_too_long_is_not_even_decoded():
    with pytest.raises(RequestError, match="above the limit"):
        decode_parity(bytearray((64 << 20) + 1))


@pytest.mark.parametrize("count", [0, 1, MAX_PARITY_MEMBERS + 1])
def test_a_group_has_two_to_many_nodes(count):
    shards = {name: [shard_record(number, b"some")] for number, name in enumerate(nodes(count))}
    if not count:
        assert stripes(shards) == ()
        return
    with pytest.raises(RequestError, match=f"2 to {MAX_PARITY_MEMBERS} nodes"):
        stripes(shards)


def test_a_node_outside_the_group_has_no_place_in_it():
    stripe = Kept({"a": b"x", "b": b"y"}).stripe
    with pytest.raises(RequestError, match="node z"):
        stripe.segments("z")
    with pytest.raises(RequestError, match="node z"):
        ParityRecord(stripe, "z", b"")
