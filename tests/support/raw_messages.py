"""Messages on a plain socket, for tests that play the other side of a connection."""

from __future__ import annotations

import socket
from typing import Any

from peerstore.message_codec import decode_message, encode_message, encode_raw_message
from peerstore.rpc import Request, Response
from peerstore.transport.framing import FRAME_MAGIC, FRAME_PREFIX, FRAME_VERSION, encode_frame


def send_message(sock: socket.socket, message: object) -> None:
    sock.sendall(encode_frame(encode_message(message)))


def send_request(sock: socket.socket, op: str, body: object) -> None:
    send_message(sock, Request(op, encode_raw_message(body)))


def send_response(sock: socket.socket, value: object) -> None:
    send_message(sock, Response("", encode_raw_message(value)))


def receive_message(sock: socket.socket, kind: Any) -> Any:
    """Receive a message without payload; return ``None`` if the other side has closed the connection."""
    prefix = _receive_exactly(sock, FRAME_PREFIX.size)
    if not prefix:
        return None
    magic, version, header, payload = FRAME_PREFIX.unpack(prefix)
    assert (magic, version, payload) == (FRAME_MAGIC, FRAME_VERSION, 0)
    return decode_message(_receive_exactly(sock, header), kind)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            assert not data
            return b""
        data += part
    return data
