"""Both ends of a channel, controlled by one test."""

from __future__ import annotations

import contextlib
import importlib.util
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from peerstore.testing import MemoryNetwork
from peerstore.transport.base import Listener, MessageChannel, PartitionableTransport, Transport
from peerstore.transport.nixl import NixlTransport
from peerstore.transport.tcp import TcpTransport
from tests.support.tls import node_files

PATIENCE_S = 200.0


class ChannelPair:
    """Two nodes connected by one kind of transport."""

    def __init__(self, here: Transport, there: Transport, address: str) -> None:
        self.here = here
        self.there = there
        self.address = address
        self._meeting: Listener | None = None
        self._arrived: queue.Queue[MessageChannel] = queue.Queue()
        self._done = threading.Event()
        self._stack = contextlib.ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(8, thread_name_prefix="wire"))

    def listen(self, serve: Callable[[MessageChannel], None]) -> Listener:
        return self._stack.enter_context(contextlib.closing(self.there.listen(self.address, serve)))

    def connect(self, listener: Listener) -> MessageChannel:
        return self._stack.enter_context(contextlib.closing(self.here.connect(listener.address, timeout_s=PATIENCE_S)))

    def connected_ends(self) -> tuple[MessageChannel, MessageChannel]:
        """Connect and return both ends. The far one stays open until the test ends or closes it."""
        if self._meeting is None:
            self._meeting = self.listen(self._hand_over)
            self._stack.callback(self._done.set)
        near = self.connect(self._meeting)
        return near, self._arrived.get(timeout=PATIENCE_S)

    def _hand_over(self, channel: MessageChannel) -> None:
        self._arrived.put(channel)
        self._done.wait()

    def run_in_background(self, work: Callable[..., object], *args: object, **more: object) -> Future:
        """Run ``work`` on another thread and return its future."""
        return self._pool.submit(work, *args, **more)

    def close(self) -> None:
        self._stack.close()


def nixl_missing_reason() -> str:
    """Return the reason NIXL cannot be tested here, or an empty string."""
    found = any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13"))
    return "" if found else "NIXL is not installed: pip install nixl-cu12"


@contextlib.contextmanager
def nixl_channel_pair(timeout_s: float) -> Iterator[ChannelPair]:
    """Yield two NIXL nodes with few, small buffers, which a test can exhaust."""
    if reason := nixl_missing_reason():
        pytest.skip(reason)
    here, there = (
        NixlTransport(timeout_s=timeout_s, buffer_bytes=1 << 20, buffers=buffers, least_bytes=64 << 10)
        for buffers in (6, 8)
    )
    try:
        yield ChannelPair(here, there, "127.0.0.1:0")
    finally:
        here.close()
        there.close()


@contextlib.contextmanager
def channel_pair(kind: str, directory: Path, *, timeout_s: float = PATIENCE_S) -> Iterator[ChannelPair]:
    """Yield a pair of the contract suite's ``kind``; ``timeout_s`` limits waits within a message."""
    if kind in ("memory", "severable"):
        network = MemoryNetwork()
        ends: list[Transport] = [network.transport(name, timeout_s=timeout_s) for name in ("n1", "n2")]
        made = ChannelPair(*(map(PartitionableTransport, ends) if kind == "severable" else ends), "n2:0")
    elif kind == "nixl":
        with nixl_channel_pair(timeout_s) as made, contextlib.closing(made):
            yield made
        return
    else:
        tls = node_files(directory / "tls") if kind == "tls" else None
        transport = TcpTransport(tls=tls, timeout_s=timeout_s)
        made = ChannelPair(transport, transport, "127.0.0.1:0")
    with contextlib.closing(made):
        yield made
