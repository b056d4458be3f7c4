"""A payload that arrives too slowly times out, however steadily its bytes arrive."""

from __future__ import annotations

import pytest

from peerstore.errors import PeerUnreachableError
from peerstore.transport.framing import FRAME_MAGIC, FRAME_PREFIX, FRAME_VERSION, FramedChannel

SIZE = 1 << 20


class Trickle:
    """A peer that announces its payload and then sends ``step`` bytes every ``pause_s``."""

    def __init__(self, step, pause_s):
        self.step, self.pause_s = step, pause_s
        self.time = 0.0
        self.said = bytearray(FRAME_PREFIX.pack(FRAME_MAGIC, FRAME_VERSION, 1, SIZE) + b"h")

    def now(self):
        return self.time

    def receive(self, views, *, within_s):
        if self.said:
            count = min(len(self.said), views[0].nbytes)
            views[0][:count] = self.said[:count]
            del self.said[:count]
            return count
        self.time += min(self.pause_s, within_s)
        if within_s < self.pause_s:
            raise PeerUnreachableError(f"silent for {within_s:.0f} s")
        return min(self.step, views[0].nbytes)

    def shut(self):
        pass


def test_trickling_payload_times_out():
    channel = FramedChannel(Trickle(1, 29.0), "n2", 30.0)
    assert channel.receive().payload_bytes == SIZE
    with pytest.raises(PeerUnreachableError):
        channel.receive_into([memoryview(bytearray(SIZE))])
    assert channel._stream.now() < 60


def test_slow_steady_payload_completes():
    channel = FramedChannel(Trickle(SIZE // 8, 4.0), "n2", 30.0)
    channel.receive()
    channel.receive_into([memoryview(bytearray(SIZE))])
