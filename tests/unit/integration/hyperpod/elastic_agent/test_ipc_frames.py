"""Frames in pieces, and invalid frames of every kind."""

from __future__ import annotations

import json
import pickle
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import ControlPlaneUnavailableError, PolicyError
from integration.hyperpod.elastic_agent.ipc import (
    MAX_SENT_FRAME_BYTES,
    DamagedFrameError,
    FrameDecoder,
    decode_agent_frame,
    encode_agent_frame,
)
from tests.support.example_counts import examples

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_messages = st.dictionaries(st.text(), _values, max_size=4).map(lambda fields: {**fields, "type": "said"})


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@settings(max_examples=examples(60))
@given(st.lists(_messages, max_size=5), st.data())
def test_pieces_of_any_size_make_the_same_messages(messages, data):
    stream = b"".join(encode_agent_frame(message) for message in messages)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    frames, found = FrameDecoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += frames.feed(stream[start:end])
    frames.finish()
    assert found == messages


@settings(max_examples=examples(60))
@given(_messages, st.data())
def test_incomplete_frame_is_neither_a_message_nor_an_end(message, data):
    frame = encode_agent_frame(message)
    frames = FrameDecoder()
    assert list(frames.feed(frame[: data.draw(st.integers(1, len(frame) - 1))])) == []
    with pytest.raises(DamagedFrameError, match="within a frame"):
        frames.finish()


@settings(max_examples=examples(100))
@given(st.binary(max_size=64))
def test_any_bytes_are_messages_or_refused(body):
    try:
        message = decode_agent_frame(body)
    except DamagedFrameError:
        return
    assert isinstance(message["type"], str)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b'["job_fault"]',
        b'"job_fault"',
        b"{}",
        b'{"type": 7}',
        b'{"type": null}',
        b'{"type": "\xff\xfe"}',
        '{"type": "job_start"}'.encode("utf-16"),
        b"[" * 100_000,
        b'{"type": "x", "number": ' + b"9" * 10_000 + b"}",
        b"\x00" * 8,
    ],
)
def test_malformed_message_is_refused_with_its_first_bytes(body):
    with pytest.raises(DamagedFrameError) as refused:
        list(FrameDecoder().feed(framed(body)))
    assert repr(body[:20]).rstrip("'") in str(refused.value)
    assert len(str(refused.value)) < 600
    assert isinstance(pickle.loads(pickle.dumps(refused.value)), ControlPlaneUnavailableError)


def test_oversized_length_is_refused_before_allocation():
    tracemalloc.start()
    try:
        with pytest.raises(DamagedFrameError, match="1073741824 bytes was announced"):
            list(FrameDecoder().feed(struct.pack(">I", 1 << 30) + b"{"))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_announced_length_allocates_nothing():
    tracemalloc.start()
    try:
        assert list(FrameDecoder().feed(struct.pack(">I", 60 << 20) + b"{")) == []
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_messages_before_a_damaged_frame_are_delivered():
    coming = FrameDecoder().feed(encode_agent_frame({"type": "job_fault"}) + framed(b"[]"))
    assert next(coming) == {"type": "job_fault"}
    with pytest.raises(DamagedFrameError):
        next(coming)


def test_unencodable_message_is_refused():
    for message in ({"type": "x", "data": object()}, {"type": "x", "loss": float("nan")}):
        with pytest.raises(PolicyError):
            encode_agent_frame(message)
    with pytest.raises(PolicyError, match="at the most"):
        encode_agent_frame({"type": "x", "data": "a" * MAX_SENT_FRAME_BYTES})


def test_the_length_is_big_endian_and_the_body_is_json():
    frame = encode_agent_frame({"type": "init", "local_rank": 8})
    assert frame[:4] == len(frame[4:]).to_bytes(4, "big")
    assert json.loads(frame[4:]) == {"type": "init", "local_rank": 8}
