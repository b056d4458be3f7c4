"""A request's body as it comes off the connection, in the two ways HTTP/1.1 sends one."""

from __future__ import annotations

import re
from email.message import Message
from http import HTTPStatus
from typing import BinaryIO

from tieredckpt.agent.memory_service.answers import RefusedError

_LENGTH = re.compile(r"[0-9]{1,18}", re.ASCII)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_LINE_BYTES = 1024
_TRAILERS = 64
_CUT_OFF = "The connection ended in the middle of the body"


class Sized:
    """A body whose length was said."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self.size_bytes: int | None = size_bytes
        self.problem = ""
        self._file = file
        self._left = size_bytes

    @property
    def at_end(self) -> bool:
        return self._left == 0

    def fill(self, view: memoryview) -> int:
        count = 0
        with view[: min(len(view), self._left)] as wanted:
            while count < len(wanted):
                with wanted[count:] as rest:
                    got = _read_into(self._file, rest)
                if not got:
                    self.problem = _CUT_OFF
                    break
                count += got
        self._left -= count
        return count


class Chunked:
    """A body that comes in chunks, each with its own length in front."""

    def __init__(self, file: BinaryIO) -> None:
        self.size_bytes: int | None = None
        self.problem = ""
        self._file = file
        self._left = 0
        self._begun = self.at_end = False

    def fill(self, view: memoryview) -> int:
        count = 0
        while count < len(view) and not self.at_end and not self.problem:
            if not self._left:
                self._next_chunk()
                continue
            with view[count : count + self._left] as wanted:
                got = _read_into(self._file, wanted)
            if not got:
                self.problem = _CUT_OFF
            self._left -= got
            count += got
        if count == len(view) and not self._left and not self.at_end and not self.problem:
            self._next_chunk()  # perhaps that was all
        return count

    def _next_chunk(self) -> None:
        line = self._line()
        if self._begun:  # what ends the chunk before
            if line != b"\r\n":
                self.problem = self.problem or "A chunk of the body does not end where it should"
                return
            line = self._line()
        self._begun = True
        found = _CHUNK.fullmatch(line)
        if found is None:
            self.problem = self.problem or "The length of a chunk of the body cannot be read"
            return
        self._left = int(found[1], 16)
        if not self._left:
            self._end()

    def _end(self) -> None:
        for _ in range(_TRAILERS):
            line = self._line()
            if line == b"\r\n":
                self.at_end = True
                return
            if not line.endswith(b"\r\n"):
                break
        self.problem = self.problem or "What follows the body's last chunk does not end"

    def _line(self) -> bytes:
        try:
            return self._file.readline(_LINE_BYTES)
        except OSError:
            self.problem = _CUT_OFF
            return b""


def body_of(headers: Message, file: BinaryIO) -> Sized | Chunked:
    """What a request brings by its headers. Where they say two things nothing is believed: somebody else on the way
    may have believed the other one.
    """
    lengths = {value.strip(" \t") for value in headers.get_all("Content-Length", [])}
    encodings = [value.strip(" \t").lower() for value in headers.get_all("Transfer-Encoding", [])]
    if encodings:
        if lengths or encodings != ["chunked"]:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "Content-Length or Transfer-Encoding: chunked, not both")
        return Chunked(file)
    if not lengths:
        return Sized(file, 0)
    length = lengths.pop()
    if lengths or not _LENGTH.fullmatch(length):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "The Content-Length is not a number")
    return Sized(file, int(length))


def _read_into(file: BinaryIO, view: memoryview) -> int:
    """Nothing when the connection has ended, or nothing came for too long."""
    try:
        return file.readinto(view) or 0  # type: ignore[attr-defined]  # of a buffered reader
    except OSError:
        return 0
