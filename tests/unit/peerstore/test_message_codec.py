"""Messages between a client and its agent."""

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from peerstore.errors import ProtocolError
from peerstore.message_codec import decode_message, encode_message, encode_raw_message
from peerstore.rpc import Request, Response
from peerstore.shard_records import Lease, PinResponse, ShardInfo, ShardKey, ShardRecord, VersionId
from peerstore.transport.authentication import Hello, Welcome

numbers = st.integers(0, (1 << 62) - 1)
names = st.text(max_size=20)
keys = st.builds(ShardKey, names, numbers, numbers, names, numbers, numbers)
records = st.builds(ShardRecord, keys, numbers, numbers, numbers, st.binary(), st.binary(), numbers)
messages = st.one_of(
    st.builds(Hello, numbers, names, names, st.binary(), names),
    st.builds(Welcome, names, numbers, names, names, names),
    keys,
    records,
    st.builds(Lease, names, keys, numbers, numbers, names, numbers, numbers, numbers),
    st.builds(PinResponse, names, records),
    st.builds(ShardInfo, keys, numbers, numbers, st.binary(), numbers, st.booleans()),
    st.builds(VersionId, numbers, numbers, numbers, names),
)


@given(messages)
def test_every_message_round_trips(message):
    assert decode_message(encode_message(message), type(message)) == message


@given(names, messages)
def test_requests_and_responses_carry_any_message(word, message):
    for envelope in (Request, Response):
        found = decode_message(encode_message(envelope(word, encode_raw_message(message))), envelope)
        assert decode_message(found.body, type(message)) == message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(data):
    for kind in (Hello, Welcome, Request, Response, ShardKey, list[ShardInfo]):
        with contextlib.suppress(ProtocolError):
            decode_message(data, kind)
