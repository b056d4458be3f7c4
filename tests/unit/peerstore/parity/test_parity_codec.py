"""Placement of data and parity in a parity group, and the cost of a loss."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerstore.checksums import chunk_count
from peerstore.errors import PeerStoreError, ProtocolError, RequestError
from peerstore.message_codec import decode_message
from peerstore.parity.parity_codec import (
    MAX_PARITY_MEMBERS,
    ParityRecord,
    Stripe,
    split_segments,
)
from peerstore.shard_records import CHUNK_BYTES
from tests.support.parity_stripes import ParityStripe, node_names, parity_stripes, shard_record

untimed = settings(deadline=None)  # a busy machine is not a failure


@untimed
@given(parity_stripes())
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
    group = ParityStripe({name: bytes(12) for name in ("n0", "n1", "n2", "n3")})
    mixed = {
        keeper: {
            f"{'abcd'[group.stripe.index_of(s.member)]}{s.chunks.start}" for s in group.stripe.parity(keeper).segments
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
@given(parity_stripes())
def test_a_member_splits_its_shard_without_knowing_the_others(group):
    stripe = group.stripe
    for member, shard in zip(stripe.members, stripe.shards, strict=True):
        if shard is not None:
            size = shard.size_bytes
            own = split_segments(member, stripe.members, size, chunk_bytes=stripe.chunk_bytes)
            assert own == stripe.segments(member)


@untimed
@given(parity_stripes())
def test_no_parity_is_longer_than_a_share_of_the_longest_shard(group):
    stripe = group.stripe
    for keeper in stripe.members:
        others = [s.size_bytes for m, s in zip(stripe.members, stripe.shards, strict=True) if s and m != keeper]
        share = -(-chunk_count(max(others, default=0), stripe.chunk_bytes) // (len(stripe.members) - 1))
        assert stripe.parity(keeper).size_bytes <= share * stripe.chunk_bytes


def test_two_nodes_keep_copies():
    group = ParityStripe({"b": b"the shard of b", "a": b"of a"})
    assert group.parities == {"a": b"the shard of b", "b": b"of a"}


# -- what is not a stripe ---------------------------------------------------------------------------------------


def wire(record):
    return msgspec.to_builtins(record, builtin_types=(bytes,))


def test_parity_record_round_trips():
    record = ParityStripe({name: bytes(50) for name in node_names(4)}).records["n8"]
    assert decode_message(msgspec.msgpack.encode(record), ParityRecord) == record
    assert str(record) == "parity 0 of job/3 on n8"


def change(path, value):
    """A record of a group of three in which ``path`` is ``value``."""
    record = wire(ParityStripe({name: bytes(50) for name in ("a", "b", "c")}).records["b"])
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
        ((*SHARD, "size_bytes"), 1 << 62, RequestError),
        ((*SHARD, "chunk_bytes"), 0, RequestError),
        ((*SHARD, "chunk_bytes"), -4, RequestError),
        ((*SHARD, "chunk_bytes"), CHUNK_BYTES + 1, PeerStoreError),
        ((*SHARD, "checksums"), b"", RequestError),
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
    decode_message(change(("keeper",), "b"), ParityRecord)
    with pytest.raises(error):
        decode_message(change(path, value), ParityRecord)


def test_large_chunks_are_refused_before_allocation():
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
def test_garbage_is_not_parsed_as_a_record(data):
    with pytest.raises(ProtocolError):
        decode_message(data, ParityRecord)


@pytest.mark.parametrize("count", [0, 1, MAX_PARITY_MEMBERS + 1])
def test_a_group_has_two_to_many_nodes(count):
    shards = {name: [shard_record(number, b"some")] for number, name in enumerate(node_names(count))}
    members = tuple(sorted(shards))
    with pytest.raises(RequestError, match=f"2 to {MAX_PARITY_MEMBERS} nodes"):
        Stripe(0, members, tuple(shards[member][0] for member in members))


def test_node_outside_the_group_is_refused():
    stripe = ParityStripe({"a": b"x", "b": b"y"}).stripe
    with pytest.raises(RequestError, match="node z"):
        stripe.segments("z")
    with pytest.raises(RequestError, match="node z"):
        ParityRecord(stripe, "z", b"")
