"""Parities to encode and lost shards to rebuild, as tables."""

from __future__ import annotations

import msgspec
import pytest

from peerstore.errors import RequestError
from peerstore.membership.topology import NodeId
from peerstore.parity.parity_codec import Stripe
from peerstore.parity.stripes import (
    assign_stripe_numbers,
    is_first_rebuilder,
    lost_shards,
    parities_to_make,
    parity_key,
    parity_sets_for,
    parity_shard_record,
    parse_stored_parity,
    rebuildable_parts,
    superseded_parities,
    versions_being_rebuilt,
)
from peerstore.peers.peer_messages import NodeInventory, ParityInfo
from peerstore.shard_records import ShardInfo, ShardKey, VersionId
from tests.support.chunk_sums import chunk_checksums
from tests.support.parity_stripes import shard_record

MEMBERS = ("n0", "n16", "n8")


def fact(part, sealed_ns, version=1):
    return ShardInfo(ShardKey("job", version, 1, "a", 0, part), 8, 1, b"", sealed_ns, False)


def stripe(members=MEMBERS, number=0, version=3, **parts):
    """Return a stripe; ``n8=3`` gives node n8 part 3, whose size is ten plus its number."""
    shards = {
        member: shard_record(parts[member], bytes([parts[member]]) * (10 + parts[member]), version=version)
        for member in members
        if member in parts
    }
    return Stripe(number, tuple(map(NodeId, members)), tuple(shards.get(member) for member in members))


def kept(keeper, members=MEMBERS, number=0, version=3, **parts):
    """Return a parity as ``keeper`` has sealed it."""
    made = stripe(members, number, version, **parts)
    size = made.parity(NodeId(keeper)).size_bytes
    sums = chunk_checksums(memoryview(bytes(size)), chunk_bytes=4)
    return parse_stored_parity(parity_shard_record(made, NodeId(keeper), sums, 1))


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_shards_are_numbered_as_they_were_sealed_each_version_for_itself():
    facts = [fact(0, 20), fact(1, 10), fact(0, 5, version=2)]
    assert {key.part: n for key, n in assign_stripe_numbers(facts, {}).items() if key.version == 1} == {1: 0, 0: 1}
    assert assign_stripe_numbers(facts, {})[facts[2].key] == 0


def test_stripe_number_is_stable():
    first, gone, late = fact(5, 10), fact(6, 20), fact(1, 1)
    known = assign_stripe_numbers([first, gone], {})
    assert assign_stripe_numbers([first, late], known) == {first.key: 0, late.key: 2}


# -- what is to be made -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "done", "complete", "due"),
    [
        ({"n16": {0: 1}, "n8": {0: 2}}, [], False, {0: {"n16": 1, "n8": 2}}),
        ({"n16": {0: 1}}, [], False, {}),
        ({"n16": {0: 1}}, [], True, {0: {"n16": 1}}),
        ({"n16": {0: 1}, "n8": {0: 2}}, [{"n16": 1, "n8": 2}], True, {}),
        ({"n16": {0: 1}, "n8": {0: 2}}, [{"n16": 1}], True, {0: {"n16": 1, "n8": 2}}),
        ({"n16": {0: 1, 1: 3}, "n8": {0: 2}}, [], False, {0: {"n16": 1, "n8": 2}}),
        ({"n16": {0: 1, 1: 3}, "n8": {0: 2}}, [], True, {0: {"n16": 1, "n8": 2}, 1: {"n16": 3}}),
        ({"n16": {0: 1}, "n8": {0: 1}}, [], False, {0: {"n16": 1}}),
        ({"n16": {0: 1}, "n8": {}}, [{"n16": 1, "n8": 2}], True, {}),
        ({"n0": {0: 0}}, [], True, {}),
        ({}, [], True, {}),
    ],
    ids=[
        "everybody has told",
        "one has not told yet",
        "nobody will tell more",
        "it is there",
        "one was late",
        "the second stripe waits",
        "the second stripe has one shard",
        "two have the same shard",
        "one has lost what is in the parity: it stays",
        "its own shard is not its business",
        "nobody has anything",
    ],
)
def test_stripes_due(told, done, complete, due):
    assert parities_to_make("n0", MEMBERS, told, done, complete=complete) == due


def test_parity_superseded_by_a_fuller_one_is_removed():
    early, late = kept("n0", n16=1), kept("n0", n16=1, n8=2)
    other_group = kept("n0", members=("n0", "n16"), n16=1)
    assert superseded_parities([early, late, other_group], [early, late, other_group]) == [early.key]
    assert superseded_parities([late, other_group], [late, other_group]) == []
    assert superseded_parities([early, late], [early]) == [], "what is in the later one is not where it was"


# -- how it is kept ---------------------------------------------------------------------------------------------------


def test_parity_key_depends_on_its_inputs():
    one = stripe(n16=1, n8=2)
    assert parity_key(one, NodeId("n0")) == parity_key(stripe(n16=1, n8=2), NodeId("n0"))
    keys = [
        parity_key(one, NodeId("n0")),
        parity_key(stripe(n16=1), NodeId("n0")),
        parity_key(stripe(n16=1, n8=2, number=1), NodeId("n0")),
        parity_key(stripe(n16=1, n0=2), NodeId("n8")),
    ]
    assert len(set(keys)) == 4
    assert all(key.kind and key.slot_part < 0 for key in keys)


def test_inconsistent_parity_record_is_refused():
    record = parity_shard_record(
        stripe(n16=1), NodeId("n0"), chunk_checksums(memoryview(bytes(4)), chunk_bytes=4) * 2, 1
    )
    assert parse_stored_parity(record).parity.keeper == "n0"
    for change in (
        {"key": msgspec.structs.replace(record.key, kind="parity.0000000000000000")},
        {"checksums": record.checksums[8:]},
        {"meta": b"\x80"},
        {"size_bytes": record.size_bytes + 1},
    ):
        with pytest.raises(RequestError):
            parse_stored_parity(msgspec.structs.replace(record, **change))


def test_old_keys_are_read_and_written_as_before():
    old = {"job": "job", "version": 1, "epoch": 1, "incarnation": "a", "attempt": 0, "part": 0}
    key = msgspec.convert(old, ShardKey)
    assert (key.kind, key.slot_part) == ("", 0)
    assert msgspec.to_builtins(key) == old


# -- what was lost ----------------------------------------------------------------------------------------------------


def missing(one, living, held=()):
    return [
        (lost.shard.key.part, lost.rebuilders)
        for lost in lost_shards([one], living=living, held=set(held).__contains__)
    ]


def test_shard_without_a_known_holder_is_missing():
    mine = kept("n0", n16=1, n8=2)
    first, second = (mine.shards[NodeId(node)].key for node in ("n16", "n8"))
    assert missing(mine, MEMBERS) == [(1, ("n0", "n8")), (2, ("n0", "n16"))]
    assert missing(mine, ("n0", "n16"), [first]) == [(2, ("n0", "n16"))]
    assert missing(mine, ("n0", "n8"), [first]) == [(2, ("n0",))], "it lives, and has started again"
    assert missing(mine, MEMBERS, [first, second]) == []


def looked(*parities):
    return NodeInventory((), 1, "a", None, 0, tuple(one.info for one in parities))


def test_the_first_that_has_a_parity_makes_a_shard_again():
    third = kept("n8", n0=0, n16=1)
    (_, lost) = lost_shards([third], living=MEMBERS, held=lambda _: False)
    assert lost.rebuilders == ("n0", "n8")
    assert not is_first_rebuilder(lost, "n8", {"n0": looked(kept("n0", n16=1, n8=2))})
    assert is_first_rebuilder(lost, "n8", {"n0": looked()}), "the first one has started again with nothing"
    assert is_first_rebuilder(lost, "n8", {})
    assert is_first_rebuilder(lost, "n8", {"n0": looked(kept("n0", version=4, n16=1, n8=2))})


def test_only_complete_parity_sets_rebuild_a_shard():
    first, third = kept("n0", n16=1, n8=2), kept("n8", n0=0, n16=1)
    lost = first.shards[NodeId("n16")].key
    parities = [first.parity, third.parity]
    assert [(member, len(row)) for member, row in parity_sets_for(lost, parities, held=lambda _: True)] == [("n16", 2)]
    assert parity_sets_for(lost, parities[:1], held=lambda _: True) == []
    other = kept("n8", members=("n0", "n16", "n24", "n8"), n0=0, n16=1)
    assert parity_sets_for(lost, [first.parity, other.parity], held=lambda _: True) == []
    fuller = kept("n8", n0=0, n16=1)
    emptier = kept("n8", n16=1)
    ((_, row),) = parity_sets_for(lost, [first.parity, fuller.parity, emptier.parity], held=lambda _: True)
    assert fuller.parity in row
    assert emptier.parity not in row
    gone = fuller.shards[NodeId("n0")].key
    ((_, row),) = parity_sets_for(
        lost, [first.parity, fuller.parity, emptier.parity], held=lambda key: key not in (lost, gone)
    )
    assert emptier.parity in row, "the other one is of no use without what nobody has"


G1, G2, G3 = (VersionId(1, version, 0, "a") for version in (1, 2, 3))


def facts_of(group, *keepers, parts):
    return [
        ParityInfo(group, 0, MEMBERS, keeper, {m: p for m, p in parts.items() if m != keeper}) for keeper in keepers
    ]


def test_rebuildable_parts_follow_from_parities():
    parts = {"n0": 0, "n16": 1, "n8": 2}
    found = facts_of(G1, "n0", "n8", parts=parts)
    assert rebuildable_parts(found, {G1: {0, 2}}) == {G1: {1}}
    assert rebuildable_parts(found[:1], {G1: {0, 2}}) == {}
    assert rebuildable_parts(found, {G1: {0}}) == {}
    assert rebuildable_parts(found, {G1: {0, 1, 2}}) == {}
    emptier = facts_of(G1, "n0", "n8", parts={"n16": 1})
    assert rebuildable_parts([*found, *emptier], {G1: {0}}) == {G1: {1}}, "without the part that nobody has"


def test_only_versions_newer_than_the_newest_complete_one_are_rebuilt():
    parts = {"n0": 0, "n16": 1, "n8": 2}
    found = [one for group in (G1, G2, G3) for one in facts_of(group, "n0", "n8", parts=parts)]
    in_all = dict.fromkeys((G1, G2, G3), 3)
    assert versions_being_rebuilt({G1: {0, 2}, G2: {0, 2}}, in_all, found) == {G1: {1}, G2: {1}}
    assert versions_being_rebuilt({G1: {0, 2}, G2: {0, 1, 2}}, in_all, found) == {}
    assert versions_being_rebuilt({G2: {0, 1, 2}, G3: {0, 2}}, in_all, found) == {G3: {1}}
    assert versions_being_rebuilt({G2: {0, 1, 2}, G3: {2}}, in_all, found) == {}
    assert versions_being_rebuilt({}, {}, []) == {}
