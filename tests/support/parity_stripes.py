"""Groups of nodes with shards in memory, and the parities they hold for each other."""

import msgspec
from hypothesis import strategies as st

from peerstore.membership.topology import NodeId
from peerstore.parity.parity_codec import ParityRecord, Stripe, encode_parity
from peerstore.shard_records import ShardKey, ShardRecord
from tests.support.chunk_sums import chunk_checksums


def shard_record(part, data, *, chunk_bytes=4, version=3, meta=b"its owner's notes"):
    key = ShardKey("job", version, 1, "i1", 0, part)
    sums = chunk_checksums(memoryview(data), chunk_bytes=chunk_bytes)
    return ShardRecord(key, 1 << 10, len(data), chunk_bytes, sums, meta, 1)


class ParityStripe:
    """One stripe: the shard and the parity of each node."""

    def __init__(self, shards, *, chunk_bytes=4):
        records = {
            NodeId(node): None if data is None else shard_record(8 * place, data, chunk_bytes=chunk_bytes)
            for place, (node, data) in enumerate(shards.items())
        }
        members = tuple(sorted(records))
        self.stripe = Stripe(0, members, tuple(records[member] for member in members))
        self.shards = {NodeId(node): bytearray(data) for node, data in shards.items() if data is not None}
        self.parities, self.records = {}, {}
        for keeper in self.stripe.members:
            chunks = list(encode_parity(self.stripe, keeper, self.shard_readers()))
            assert [number for number, _ in chunks] == list(range(len(chunks)))
            self.parities[keeper] = bytearray(b"".join(data for _, data in chunks))
            sums = chunk_checksums(memoryview(self.parities[keeper]), chunk_bytes=chunk_bytes)
            self.records[keeper] = ParityRecord(self.without_own_shard(keeper), keeper, sums)

    def without_own_shard(self, keeper):
        """Return the stripe as ``keeper`` knows it before its own shard is sealed."""
        others = tuple(None if node == keeper else self.stripe.shard(node) for node in self.stripe.members)
        return msgspec.structs.replace(self.stripe, shards=others) if any(others) else self.stripe

    def shard_readers(self, lost=()):
        return {node: _reads(data) for node, data in self.shards.items() if node not in lost}

    def parity_readers(self, lost=()):
        return {node: _reads(data) for node, data in self.parities.items() if node not in lost}

    def parity_records(self, lost=()):
        return [record for node, record in self.records.items() if node not in lost]


def _reads(data):
    return lambda start, stop: bytes(data[start:stop])


def node_names(count):
    """Return names whose order is not the order of their numbers."""
    return [f"n{8 * number}" for number in range(count)]


@st.composite
def parity_stripes(draw, least=2, most=6, missing=True):
    names = draw(st.permutations(node_names(draw(st.integers(least, most)))))
    chunk_bytes = draw(st.sampled_from([1, 4, 7]))
    some = st.binary(max_size=60) | st.none() if missing else st.binary(max_size=60)
    shards = {name: draw(some) for name in names}
    if all(data is None for data in shards.values()):
        shards[names[0]] = draw(st.binary(max_size=60))
    return ParityStripe(shards, chunk_bytes=chunk_bytes)
