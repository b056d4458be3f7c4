"""Requests of the memory service: parsing, bodies, names, refusals. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, unquote

_PREFIX = "/v1/cp/"
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)


@dataclass(frozen=True)
class HealthCheck:
    pass


@dataclass(frozen=True)
class Reset:
    pass


@dataclass(frozen=True)
class ShowNamespace:
    name: str


@dataclass(frozen=True)
class CreateNamespace:
    name: str
    num_ranks: int
    steps_retained: int


@dataclass(frozen=True)
class DeleteNamespace:
    name: str


@dataclass(frozen=True)
class Latest:
    name: str
    limit: int


@dataclass(frozen=True)
class Put:
    name: str
    rank: int
    step: int


@dataclass(frozen=True)
class Get:
    name: str
    rank: int
    step: int


@dataclass(frozen=True)
class Remove:
    name: str
    rank: int
    step: int


ShardRequest = HealthCheck | Reset | ShowNamespace | CreateNamespace | DeleteNamespace | Latest | Put | Get | Remove
_Query = dict[str, str]


def parse_request(method: str, target: str) -> ShardRequest:
    """Return the request.

    Raise :class:`RequestRefusedError` for an unknown path or method, or invalid values.
    """
    path, _, query = target.partition("?")
    values = dict(parse_qsl(query, keep_blank_values=True))
    if path == "/health":
        return _dispatch(method, {"GET": HealthCheck})
    if not path.startswith(_PREFIX):
        raise not_found_error("Not Found")
    parts = [unquote(part, errors="replace") for part in path.removeprefix(_PREFIX).split("/")]
    if any(not part or "/" in part for part in parts):
        raise not_found_error("Not Found")
    match parts:
        case ["cluster", "reset"]:
            return _dispatch(method, {"POST": Reset})
        case ["namespaces", name]:
            return _dispatch(
                method,
                {
                    "GET": lambda: ShowNamespace(parse_namespace(name)),
                    "POST": lambda: _create(name, values),
                    "DELETE": lambda: DeleteNamespace(parse_namespace(name)),
                },
            )
        case ["checkpoints", name, "latest"]:
            return _dispatch(method, {"GET": lambda: _latest(name, values)})
        case ["checkpoints", name, rank, step]:
            kinds: dict[str, type[Put | Get | Remove]] = {"GET": Get, "POST": Put, "DELETE": Remove}
            return _dispatch(method, {verb: _shard(kind, name, rank, step) for verb, kind in kinds.items()})
    raise not_found_error("Not Found")


def _dispatch(method: str, handlers: Mapping[str, Callable[[], ShardRequest]]) -> ShardRequest:
    if method not in handlers:
        raise RequestRefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "Method Not Allowed")
    return handlers[method]()


def _create(name: str, values: _Query) -> CreateNamespace:
    ranks, retained = values.get("num_ranks"), values.get("steps_retained", "3")
    where = ("query", "num_ranks")
    missing = FieldProblem("missing", where, "Field required", None)
    num_ranks, steps_retained = all_valid(
        missing if ranks is None else parse_number(ranks, where, least=1, most=NAMESPACE_PARTS),
        parse_number(retained, ("query", "steps_retained"), least=1, most=MAX_STEPS_RETAINED),
    )
    return CreateNamespace(parse_namespace(name), num_ranks, steps_retained)


def _latest(name: str, values: _Query) -> Latest:
    (limit,) = all_valid(parse_number(values.get("limit", "5"), ("query", "limit"), least=-MAX_STEP, most=MAX_STEP))
    return Latest(parse_namespace(name), limit)


def _shard(kind: type[Put | Get | Remove], name: str, rank: str, step: str) -> Callable[[], ShardRequest]:
    def read() -> ShardRequest:
        of_rank = parse_number(rank, ("path", "rank"), least=0, most=NAMESPACE_PARTS - 1)
        of_step = parse_number(step, ("path", "step"), least=0, most=MAX_STEP)
        return kind(parse_namespace(name), *all_valid(of_rank, of_step))

    return read


def parse_range(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """Return bytes ``[start, stop)`` of the header, or None for all bytes or several ranges."""
    found = _RANGE.fullmatch((header or "").strip())
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        start, stop = max(0, size_bytes - int(found[2])), size_bytes
    else:
        start, stop = int(found[1]), min(size_bytes, int(found[2]) + 1 if found[2] else size_bytes)
        if found[2] and int(found[2]) < start:
            return None
    if start >= stop:
        raise RequestRefusedError(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"There are {size_bytes} bytes")
    return start, stop


NAMESPACE_PARTS = 1 << 20
"""More parts than any namespace has, so no shard counts as a complete version."""
MAX_STEP = (1 << 62) - 1
MAX_STEPS_RETAINED = 1 << 20

_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_NUMBER = re.compile(r"[+-]?[0-9]{1,40}", re.ASCII)


def parse_namespace(text: str) -> str:
    """Return ``text`` if it is a valid namespace; raise :class:`InvalidRequestError` otherwise."""
    if not _NAMESPACE.fullmatch(text) or set(text) == {"."}:
        raise InvalidRequestError(
            FieldProblem(
                "string_pattern_mismatch",
                ("path", "namespace"),
                "A namespace has 1 to 128 letters, digits, '.', '_' or '-', and not only dots",
                text[:200],
            )
        )
    return text


def parse_number(
    text: str, where: tuple[str, str], *, least: int | None = None, most: int | None = None
) -> int | FieldProblem:
    """Return ``text`` as a number from ``least`` to ``most``, or a problem."""
    if not _NUMBER.fullmatch(text):
        message = "Input should be a valid integer, unable to parse string as an integer"
        return FieldProblem("int_parsing", where, message, text[:200])
    found = int(text)
    if least is not None and found < least:
        return FieldProblem("greater_than_equal", where, f"Input should be greater than or equal to {least}", text)
    if most is not None and found > most:
        return FieldProblem("less_than_equal", where, f"Input should be less than or equal to {most}", text)
    return found


def all_valid(*found: int | FieldProblem) -> list[int]:
    """Return all numbers, or raise :class:`InvalidRequestError` with all problems."""
    problems = [value for value in found if isinstance(value, FieldProblem)]
    if problems:
        raise InvalidRequestError(*problems)
    return [value for value in found if isinstance(value, int)]


_LENGTH = re.compile(r"[0-9]{1,18}", re.ASCII)
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_LINE_BYTES = 1024
_MAX_TRAILERS = 64
_CUT_OFF = "The connection ended in the middle of the body"


class SizedBody:
    """A body of declared length."""

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


class ChunkedBody:
    """A body in chunks, each after its length."""

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
            self._next_chunk()  # the body may end here
        return count

    def _next_chunk(self) -> None:
        line = self._line()
        if self._begun:  # the end of the previous chunk
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
        for _ in range(_MAX_TRAILERS):
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


def request_body(headers: Message, file: BinaryIO) -> SizedBody | ChunkedBody:
    """Return the body that the headers declare.

    Reject contradictory headers: a proxy may have interpreted them differently.
    """
    lengths = {value.strip(" \t") for value in headers.get_all("Content-Length", [])}
    encodings = [value.strip(" \t").lower() for value in headers.get_all("Transfer-Encoding", [])]
    if encodings:
        if lengths or encodings != ["chunked"]:
            raise RequestRefusedError(HTTPStatus.BAD_REQUEST, "Content-Length or Transfer-Encoding: chunked, not both")
        return ChunkedBody(file)
    if not lengths:
        return SizedBody(file, 0)
    length = lengths.pop()
    if lengths or not _LENGTH.fullmatch(length):
        raise RequestRefusedError(HTTPStatus.BAD_REQUEST, "The Content-Length is not a number")
    return SizedBody(file, int(length))


def _read_into(file: BinaryIO, view: memoryview) -> int:
    """Read into ``view`` and return the bytes read; 0 after the end, an error or a timeout."""
    try:
        return file.readinto(view) or 0  # type: ignore[attr-defined]  # a buffered reader has readinto
    except OSError:
        return 0


class RequestRefusedError(Exception):
    """Refusal of a request, with its status and reason."""

    def __init__(self, status: HTTPStatus, detail: Any, *, retry_after_s: int = 0) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class FieldProblem:
    """One invalid value of a request."""

    kind: str
    where: tuple[str, str]
    message: str
    found: str | None

    @property
    def as_dict(self) -> dict[str, Any]:
        return {"type": self.kind, "loc": list(self.where), "msg": self.message, "input": self.found}


class InvalidRequestError(RequestRefusedError):
    """The request has invalid values."""

    def __init__(self, *problems: FieldProblem) -> None:
        super().__init__(HTTPStatus.UNPROCESSABLE_ENTITY, [problem.as_dict for problem in problems])


def not_found_error(detail: str = "Not found") -> RequestRefusedError:
    return RequestRefusedError(HTTPStatus.NOT_FOUND, detail)


def no_namespace_error(namespace: str) -> RequestRefusedError:
    return not_found_error(f"Namespace '{namespace}' not found")
