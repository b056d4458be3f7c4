"""A lost shard is rebuilt bit for bit from the rest of its group, or not at all."""

import contextlib
import itertools
import re
import subprocess
import sys
import tracemalloc

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerstore.errors import PeerUnreachableError, RequestError, ShardDamagedError, ShardNotFoundError
from peerstore.parity.parity_codec import decode_shard, encode_parity, xor_into
from tests.support.parity_stripes import ParityStripe, node_names, parity_stripes

untimed = settings(deadline=None)  # a busy machine is not a failure


def rebuilt(group, member, lost=None, chunks=None):
    """Return ``member``'s shard, rebuilt from all nodes except ``lost``."""
    lost = {member} if lost is None else lost
    found = decode_shard(
        member, group.parity_records(lost), group.shard_readers(lost), group.parity_readers(lost), chunks=chunks
    )
    return [(index, bytes(data)) for index, data in found]


def whole(chunks):
    assert [index for index, _ in chunks] == list(range(len(chunks)))
    return b"".join(data for _, data in chunks)


@untimed
@given(parity_stripes())
def test_lost_shard_and_parity_are_rebuilt(group):
    for lost in group.stripe.members:
        if lost in group.shards:
            assert whole(rebuilt(group, lost)) == group.shards[lost]
        again = list(encode_parity(group.stripe, lost, group.shard_readers({lost})))
        assert whole([(index, bytes(data)) for index, data in again]) == group.parities[lost]


def test_own_parity_of_the_lost_node_is_ignored():
    group = ParityStripe({name: bytes(range(40)) for name in node_names(3)})
    own = msgspec.structs.replace(group.records["n0"], stripe=group.stripe)
    found = decode_shard(
        "n0", [own, *group.parity_records({"n0"})], group.shard_readers(), group.parity_readers({"n0"})
    )
    assert b"".join(data for _, data in found) == group.shards["n0"]


@untimed
@given(parity_stripes(), st.data())
def test_shard_is_rebuilt_exactly_when_its_inputs_remain(group, data):
    lost = data.draw(st.sets(st.sampled_from(group.stripe.members), min_size=1))
    for member in lost & group.shards.keys():
        keepers = {segment.keeper for segment in group.stripe.segments(member) if segment.size_bytes}
        mixed = {one.member for keeper in keepers for one in group.stripe.parity(keeper).segments} - {member}
        if lost < set(group.stripe.members) and (keepers | mixed).isdisjoint(lost):
            assert whole(rebuilt(group, member, lost)) == group.shards[member]
        else:
            with pytest.raises(ShardNotFoundError):
                rebuilt(group, member, lost)


@untimed
@given(parity_stripes(missing=False), st.data())
def test_chunk_range_reads_only_its_inputs(group, data):
    lost = data.draw(st.sampled_from(group.stripe.members))
    count = len(group.stripe.shard(lost).checksums) // 8
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    size = group.stripe.chunk_bytes
    read = []

    def counted(readers):
        return {n: lambda a, b, r=r: (read.append(b - a), r(a, b))[1] for n, r in readers.items()}

    found = decode_shard(
        lost,
        group.parity_records({lost}),
        counted(group.shard_readers({lost})),
        counted(group.parity_readers({lost})),
        chunks=range(start, stop),
    )
    got = [(index, bytes(data)) for index, data in found]
    assert [index for index, _ in got] == list(range(start, stop))
    assert b"".join(data for _, data in got) == group.shards[lost][start * size : stop * size]
    assert sum(read) <= (stop - start) * size * (len(group.stripe.members) - 1)


@pytest.mark.parametrize("chunks", [range(-1, 2), range(3, 6), range(0, 4, 2), range(9, 9)])
def test_missing_chunks_are_refused(chunks):
    group = ParityStripe({name: bytes(20) for name in node_names(3)})
    with pytest.raises(RequestError, match="has 5 chunks"):
        rebuilt(group, "n0", chunks=chunks)


# -- damage -----------------------------------------------------------------------------------------------------


@untimed
@given(parity_stripes(), st.data())
def test_a_flipped_bit_anywhere_never_gives_wrong_bytes(group, data):
    lost = data.draw(st.sampled_from(sorted(group.shards)))
    right = group.shards[lost]
    inputs = [held for of in (group.shards, group.parities) for node, held in of.items() if node != lost and held]
    if inputs:
        flip(data, data.draw(st.sampled_from(inputs)))
    got = []
    found = decode_shard(lost, group.parity_records({lost}), group.shard_readers({lost}), group.parity_readers({lost}))
    with contextlib.suppress(ShardDamagedError):
        got.extend(bytes(chunk) for _, chunk in found)
    size = group.stripe.chunk_bytes
    assert got == [right[i * size : (i + 1) * size] for i in range(len(got))]


@untimed
@given(st.integers(2, 6), st.integers(1, 3), st.data())
def test_a_flipped_bit_in_an_input_is_found_and_named(count, chunks, data):
    size = 4 * chunks * (count - 1)  # no padding: every byte of every input but the lost one's own segments counts
    group = ParityStripe({name: data.draw(st.binary(min_size=size, max_size=size)) for name in node_names(count)})
    lost, bad = data.draw(st.permutations(group.stripe.members))[:2]
    if count > 2 and data.draw(st.booleans()):
        held, name = group.shards[bad], f"{group.stripe.shard(bad).key} on {bad}"
        mine = next(s for s in group.stripe.segments(bad) if s.keeper == lost)
        at = data.draw(st.sampled_from([i for i in range(size) if not mine.start <= i < mine.stop]))
    else:
        held, name = group.parities[bad], str(group.records[bad])
        at = data.draw(st.integers(0, len(held) - 1))
    held[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ShardDamagedError) as error:
        rebuilt(group, lost)
    assert str(error.value).endswith(f"damaged is chunk {at // 4} of {name}")


def flip(data, held):
    held[data.draw(st.integers(0, len(held) - 1))] ^= 1 << data.draw(st.integers(0, 7))


@untimed
@given(st.integers(2, 5), st.data())
def test_no_parity_is_made_of_damaged_bytes(count, data):
    group = ParityStripe({name: bytes(40) for name in node_names(count)})
    bad = data.draw(st.sampled_from(group.stripe.members))
    at = data.draw(st.integers(0, 39))
    group.shards[bad][at] ^= 1
    keeper = next(s.keeper for s in group.stripe.segments(bad) if s.start <= at < s.stop)
    name = f"chunk {at // 4} of {group.stripe.shard(bad).key} on {bad}"
    with pytest.raises(ShardDamagedError, match=re.escape(name)):
        list(encode_parity(group.stripe, keeper, group.shard_readers()))


def test_mismatched_intact_inputs_are_reported():
    group = ParityStripe({name: bytes([ord(name[-1])]) * 40 for name in node_names(3)})
    others = ParityStripe({name: bytes([7]) * 40 for name in node_names(3)})
    mixed = [
        msgspec.structs.replace(record, checksums=others.records[record.keeper].checksums)
        for record in group.parity_records({"n0"})
    ]
    with pytest.raises(ShardDamagedError, match="do not belong together"):
        list(decode_shard("n0", mixed, group.shard_readers({"n0"}), others.parity_readers({"n0"})))


@pytest.mark.parametrize("which", ["shards", "parities"])
def test_short_read_is_damage(which):
    group = ParityStripe({name: bytes(40) for name in node_names(3)})
    del getattr(group, which)["n8"][-1:]
    with pytest.raises(ShardDamagedError, match=r"on n8: requested bytes .*, received 3 bytes"):
        rebuilt(group, "n0")


def test_unreachable_reader_raises_its_own_error():
    group = ParityStripe({name: bytes(40) for name in node_names(3)})

    def unreachable(start, stop):
        raise PeerUnreachableError("n8 does not answer")

    with pytest.raises(PeerUnreachableError):
        list(
            decode_shard(
                "n0", group.parity_records(), group.shard_readers(), {**group.parity_readers(), "n8": unreachable}
            )
        )


# -- what is missing ---------------------------------------------------------------------------------------------


def test_missing_shards_are_reported_before_reading():
    group = ParityStripe({name: bytes(40) for name in node_names(3)})
    read = []
    shards = {node: lambda start, stop: read.append(start) for node in ("n8", "n16")}
    parities = dict(shards)
    records = group.parity_records({"n0"})
    with pytest.raises(ShardNotFoundError, match="parity on node n16"):
        decode_shard("n0", records, shards, {"n8": parities["n8"]})
    with pytest.raises(ShardNotFoundError, match="parity on node n16"):
        decode_shard("n0", [record for record in records if record.keeper == "n8"], shards, parities)
    with pytest.raises(ShardNotFoundError, match="shard of node n8"):
        decode_shard("n0", records, {"n16": shards["n16"]}, parities)
    with pytest.raises(ShardNotFoundError, match="shard of node n8"):
        encode_parity(group.stripe, "n0", {"n16": shards["n16"]})
    with pytest.raises(ShardNotFoundError, match="a shard of node n0"):
        decode_shard("n0", [], shards, parities)
    assert read == []


def test_a_parity_made_without_the_lost_shard_is_not_used():
    group = ParityStripe({name: bytes(40) for name in node_names(3)})
    early = ParityStripe({"n0": None, "n8": bytes(40), "n16": bytes(40)})
    with pytest.raises(ShardNotFoundError, match="parity on node n8"):
        list(
            decode_shard(
                "n0", [early.records["n8"], group.records["n16"]], group.shard_readers(), group.parity_readers()
            )
        )


def test_parities_of_different_stripes_are_refused():
    group = ParityStripe({name: bytes(40) for name in node_names(3)})
    other = ParityStripe(dict.fromkeys(node_names(3), b"x" * 40))
    larger = ParityStripe({name: bytes(40) for name in node_names(4)})
    second = msgspec.structs.replace(group.stripe, number=1)
    renumbered = msgspec.structs.replace(group.records["n16"], stripe=second)
    for strange in (other.records["n16"], larger.records["n16"], renumbered):
        with pytest.raises(RequestError, match="tell different things about job/3 part 0"):
            decode_shard("n0", [group.records["n8"], strange], group.shard_readers(), group.parity_readers())


# -- the arithmetic ----------------------------------------------------------------------------------------------


@untimed
@given(st.binary(max_size=100), st.binary(max_size=100), st.booleans())
def test_xor_is_xor(one, two, as_view):
    short, long = sorted((one, two), key=len)
    target = bytearray(long)
    xor_into(memoryview(target) if as_view else target, short)
    assert bytes(target) == bytes(a ^ b for a, b in itertools.zip_longest(long, short, fillvalue=0))


def test_xor_of_more_than_fits_is_refused():
    with pytest.raises(RequestError):
        xor_into(bytearray(3), b"four")


def test_numpy_is_imported_only_for_parity():
    code = "import sys; import peerstore.parity.parity_codec; print('numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_memory_is_bounded_by_a_chunk_per_member():
    chunk, members = 1 << 16, 4
    group = ParityStripe({name: bytes(90 * chunk) for name in node_names(members)}, chunk_bytes=chunk)
    lost = "n0"
    readers = group.shard_readers({lost}), group.parity_readers({lost})
    tracemalloc.start()
    try:
        for _ in decode_shard(lost, group.parity_records({lost}), *readers):
            pass
        for _ in encode_parity(group.stripe, lost, readers[0]):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * members * chunk
