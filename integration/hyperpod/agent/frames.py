"""The frames between the elastic agent and its workers: ``uint32 length (big endian) | JSON object in UTF-8``.

Every object has a ``type``. A frame that cannot be read ends the connection: what it said may have been a fault, and
to go on without having heard it is worse than to start again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from elastic.errors import ControlLostError, PolicyError

Message = dict[str, Any]

MAX_HEARD_BYTES = 64 << 20
"""What all ranks of a job say of themselves comes back in one frame."""
MAX_SAID_BYTES = 1 << 20

_LENGTH = struct.Struct(">I")
_SHOWN = 60


class DamagedFrameError(ControlLostError):
    """What came is no frame of the agent's."""


def encode(message: Mapping[str, Any]) -> bytes:
    """One frame, or :class:`PolicyError` where nobody could want to read it."""
    try:
        body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{message.get('type')}: not a JSON object: {error}") from error
    if len(body) > MAX_SAID_BYTES:
        raise PolicyError(f"{message.get('type')} of {len(body)} bytes: the agent is sent {MAX_SAID_BYTES} at the most")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Frames out of bytes that come in pieces of any size.

    No more is kept than what has come; a length above the limit is refused before the first byte of its body.
    """

    def __init__(self, limit_bytes: int = MAX_HEARD_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete with ``data``, up to the first damaged one."""
        self._bytes += data
        while (body := self._body()) is not None:
            yield decode(body)

    def end(self) -> None:
        """Nothing more comes: that is in order between two frames only."""
        if self._bytes:
            raise DamagedFrameError(f"the connection ended within a frame, {len(self._bytes)} bytes of which had come")

    def _body(self) -> bytes | None:
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self._limit_bytes:
            raise DamagedFrameError(f"a frame of {length} bytes was announced, the limit is {self._limit_bytes}")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return body


def decode(body: bytes) -> Message:
    """``body`` as an object with a ``type``, or :class:`DamagedFrameError`."""
    try:
        message = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedFrameError(f"{_shown(body)} is no JSON in UTF-8: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise DamagedFrameError(f"{_shown(body)} is no object with a type")
    return message


def _shown(body: bytes) -> str:
    return repr(body[:_SHOWN]) + ("…" if len(body) > _SHOWN else "")
