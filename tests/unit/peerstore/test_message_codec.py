"""Frames and messages on the socket between a client and its agent."""

import contextlib
import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerstore import message_codec
from peerstore.errors import AgentUnreachableError, ProtocolError
from peerstore.message_codec import AgentHello, AgentRequest, AgentResponse
from peerstore.shard_records import Lease, PinResponse, ShardInfo, ShardKey, ShardRecord, VersionId

numbers = st.integers(0, (1 << 62) - 1)
names = st.text(max_size=20)
keys = st.builds(ShardKey, names, numbers, numbers, names, numbers, numbers)
records = st.builds(ShardRecord, keys, numbers, numbers, numbers, st.binary(), st.binary(), numbers)
messages = st.one_of(
    st.builds(AgentHello, numbers, names, names, names, names),
    keys,
    records,
    st.builds(Lease, names, keys, numbers, numbers, names, numbers, numbers, numbers),
    st.builds(PinResponse, names, records),
    st.builds(ShardInfo, keys, numbers, numbers, st.binary(), numbers, st.booleans()),
    st.builds(VersionId, numbers, numbers, numbers, names),
)


@contextlib.contextmanager
def pair():
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(10)
        there.settimeout(10)
        yield here, there


@given(messages)
def test_every_message_round_trips(message):
    with pair() as (here, there):
        message_codec.send_frame(here, message)
        assert message_codec.receive_frame(there, type(message)) == message


@given(names, messages)
def test_requests_and_responses_carry_any_message(word, message):
    with pair() as (here, there):
        for envelope in (AgentRequest, AgentResponse):
            message_codec.send_frame(here, envelope(word, message_codec.encode_raw_message(message)))
            got = message_codec.receive_frame(there, envelope)
            assert message_codec.decode_message(got.body, type(message)) == message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(data):
    for kind in (AgentHello, AgentRequest, AgentResponse, ShardKey, list[ShardInfo]):
        with contextlib.suppress(ProtocolError):
            message_codec.decode_message(data, kind)


def test_a_large_frame_crosses_in_pieces():
    with pair() as (here, there):
        data = os.urandom(5 << 20)
        sender = threading.Thread(target=message_codec.send_frame, args=(here, data))
        sender.start()
        assert message_codec.receive_frame(there, bytes) == data
        sender.join()


def test_a_message_above_the_limit_is_not_sent():
    with pair() as (here, there):
        with pytest.raises(ProtocolError, match="above the limit"):
            message_codec.send_frame(here, bytes(message_codec.MAX_FRAME_BYTES + 1))
        here.close()
        assert message_codec.receive_frame(there, bytes) is None


def test_end_between_frames_is_clean_and_within_a_frame_an_error():
    with pair() as (here, there):
        message_codec.send_frame(here, b"whole")
        here.sendall(b"\0\0\0\x09half")
        here.close()
        assert message_codec.receive_frame(there, bytes) == b"whole"
        with pytest.raises(AgentUnreachableError, match="ended after 4 of 9 bytes"):
            message_codec.receive_frame(there, bytes)


def test_a_frame_that_has_begun_must_end_in_time():
    with pair() as (here, there):
        here.sendall(b"\0\0\0\x09half")
        with pytest.raises(TimeoutError):
            message_codec.receive_frame(there, bytes, within_s=0.01)
        assert there.gettimeout() == 10, "the socket's own patience is as it was"
