"""Messages between ranks through their store: a round trip or a clear refusal."""

from __future__ import annotations

import zlib

import msgspec
import pytest
import torch.distributed as dist

from tieredckpt.checkpointer import hydrate_from_survivors
from tieredckpt.errors import CheckpointDamagedError

NAME = "stand/0"
SAID = {"step": 7, "names": ["weight", "bias"] * 100}
PACKED = zlib.compress(msgspec.msgpack.encode(SAID))


@pytest.fixture
def meeting():
    return hydrate_from_survivors._StoreExchange(dist.HashStore(), 0, 1)


def heard_of(meeting, packed: bytes):
    meeting._store.set(f"{hydrate_from_survivors._PREFIX}/{NAME}", packed)
    return meeting.receive(NAME, dict)


def test_message_round_trips(meeting):
    meeting.send(NAME, SAID)
    assert meeting.receive(NAME, dict) == SAID
    assert heard_of(meeting, PACKED) == SAID


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (PACKED[:-5], "ends too early"),
        (b"\x00" + PACKED[1:], "incorrect header"),
        (zlib.compress(b"\xc1"), "invalid"),
        (zlib.compress(msgspec.msgpack.encode([1])), "Expected `object`"),
    ],
    ids=["torn", "no zlib", "no msgpack", "something else"],
)
def test_a_damaged_message_is_refused(meeting, packed, why):
    with pytest.raises(CheckpointDamagedError, match=f"(?i){NAME}: .*{why}"):
        heard_of(meeting, packed)


def test_oversized_message_is_refused_before_unpacking(meeting, monkeypatch):
    monkeypatch.setattr(hydrate_from_survivors, "_MOST_BYTES", 1 << 20)
    bomb = zlib.compress(bytes(64 << 20))
    assert len(bomb) < 1 << 20
    with pytest.raises(CheckpointDamagedError, match="more than 1 MiB"):
        heard_of(meeting, bomb)
