"""The agent's end of its Unix socket, driven by a test."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from integration.hyperpod.elastic_agent.ipc import AgentMessage, FrameDecoder, encode_agent_frame


class WorkerConnection:
    """The agent's connection to one process."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._frames = FrameDecoder()
        self._heard: list[AgentMessage] = []

    def receive(self) -> AgentMessage | None:
        """Return the next message, or ``None`` once the process has closed the connection."""
        while not self._heard:
            data = self.sock.recv(1 << 16)
            if not data:
                self._frames.finish()
                return None
            self._heard += self._frames.feed(data)
        return self._heard.pop(0)

    def send(self, kind: str, **fields: object) -> None:
        self.sock.sendall(encode_agent_frame({"type": kind, **fields}))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class AgentListener:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.bind(str(path))
        self._sock.listen()

    def accept(self) -> WorkerConnection:
        return WorkerConnection(self._sock.accept()[0])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


@contextlib.contextmanager
def agent_listener() -> Iterator[AgentListener]:
    with tempfile.TemporaryDirectory() as folder:
        listener = AgentListener(Path(folder) / "agent.sock")
        try:
            yield listener
        finally:
            listener.close()
