"""HTTP requests to an agent, over the Unix socket in its directory."""

from __future__ import annotations

import http.client
import socket
import urllib.error
from pathlib import Path


class UnixSocketConnection(http.client.HTTPConnection):
    """Connection to the Unix socket named in an agent directory's ``http`` file."""

    def __init__(self, directory: Path) -> None:
        super().__init__("localhost", timeout=30)
        where = (directory / "http").read_text()
        assert where.startswith("unix:/")
        self.path = where.removeprefix("unix:")

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def get_text(directory: Path, path: str) -> str:
    connection = UnixSocketConnection(directory)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200:
            raise urllib.error.HTTPError(path, answer.status, answer.reason, answer.headers, answer)
        return answer.read().decode()
    finally:
        connection.close()
