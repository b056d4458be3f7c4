"""What a request asks for, by its method, path and query. Pure: text in, values out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote

from tieredckpt.agent.memory_service.answers import Problem, RefusedError, not_found
from tieredckpt.agent.memory_service.names import (
    MOST_STEP,
    MOST_STEPS_RETAINED,
    PARTS,
    namespace_name,
    number,
    numbers,
)

_PREFIX = "/v1/cp/"
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)


@dataclass(frozen=True)
class Health:
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


Asked = Health | Reset | ShowNamespace | CreateNamespace | DeleteNamespace | Latest | Put | Get | Remove
_Query = dict[str, str]


def asked(method: str, target: str) -> Asked:
    """What is asked for, or :class:`RefusedError`: no such path, no such method, values that cannot be."""
    path, _, query = target.partition("?")
    values = dict(parse_qsl(query, keep_blank_values=True))
    if path == "/health":
        return _one_of(method, {"GET": Health})
    if not path.startswith(_PREFIX):
        raise not_found("Not Found")
    parts = [unquote(part, errors="replace") for part in path.removeprefix(_PREFIX).split("/")]
    if any(not part or "/" in part for part in parts):
        raise not_found("Not Found")
    match parts:
        case ["cluster", "reset"]:
            return _one_of(method, {"POST": Reset})
        case ["namespaces", name]:
            return _one_of(
                method,
                {
                    "GET": lambda: ShowNamespace(namespace_name(name)),
                    "POST": lambda: _create(name, values),
                    "DELETE": lambda: DeleteNamespace(namespace_name(name)),
                },
            )
        case ["checkpoints", name, "latest"]:
            return _one_of(method, {"GET": lambda: _latest(name, values)})
        case ["checkpoints", name, rank, step]:
            kinds: dict[str, type[Put | Get | Remove]] = {"GET": Get, "POST": Put, "DELETE": Remove}
            return _one_of(method, {verb: _shard(kind, name, rank, step) for verb, kind in kinds.items()})
    raise not_found("Not Found")


def _one_of(method: str, ways: Mapping[str, Callable[[], Asked]]) -> Asked:
    if method not in ways:
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "Method Not Allowed")
    return ways[method]()


def _create(name: str, values: _Query) -> CreateNamespace:
    ranks, retained = values.get("num_ranks"), values.get("steps_retained", "3")
    where = ("query", "num_ranks")
    missing = Problem("missing", where, "Field required", None)
    num_ranks, steps_retained = numbers(
        missing if ranks is None else number(ranks, where, least=1, most=PARTS),
        number(retained, ("query", "steps_retained"), least=1, most=MOST_STEPS_RETAINED),
    )
    return CreateNamespace(namespace_name(name), num_ranks, steps_retained)


def _latest(name: str, values: _Query) -> Latest:
    (limit,) = numbers(number(values.get("limit", "5"), ("query", "limit"), least=-MOST_STEP, most=MOST_STEP))
    return Latest(namespace_name(name), limit)


def _shard(kind: type[Put | Get | Remove], name: str, rank: str, step: str) -> Callable[[], Asked]:
    def read() -> Asked:
        of_rank = number(rank, ("path", "rank"), least=0, most=PARTS - 1)
        of_step = number(step, ("path", "step"), least=0, most=MOST_STEP)
        return kind(namespace_name(name), *numbers(of_rank, of_step))

    return read


def range_of(header: str | None, size_bytes: int) -> tuple[int, int] | None:
    """Bytes ``[start, stop)`` of ``size_bytes``, or all of them (``None``): also where several ranges are asked for."""
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
        raise RefusedError(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"There are {size_bytes} bytes")
    return start, stop
