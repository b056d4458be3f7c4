"""What the memory service calls things, and what may be called so by those who ask."""

from __future__ import annotations

import re

from tieredckpt.agent.memory_service.answers import Invalid, Problem

JOB = "memory-service"
"""The job under which every namespace's shards are kept, on every node. A trainer's job should not be called so."""
EPOCH, INCARNATION = 1, "memory-service"
REGISTRY = "registry."
"""With a node's name: what that node knows of all namespaces."""
PARTS = 1 << 20
"""More than any namespace has, so that nothing ever takes a shard for a whole version."""
MOST_STEP = (1 << 62) - 1
MOST_STEPS_RETAINED = 1 << 20

_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
_NUMBER = re.compile(r"[+-]?[0-9]{1,40}", re.ASCII)


def namespace_name(text: str) -> str:
    """``text`` as a namespace, or what is wrong with it."""
    if not _NAMESPACE.fullmatch(text) or set(text) == {"."}:
        raise Invalid(
            Problem(
                "string_pattern_mismatch",
                ("path", "namespace"),
                "A namespace has 1 to 128 letters, digits, '.', '_' or '-', and not only dots",
                text[:200],
            )
        )
    return text


def number(text: str, where: tuple[str, str], *, least: int | None = None, most: int | None = None) -> int | Problem:
    """``text`` as a whole number from ``least`` to ``most``, or what is wrong with it."""
    if not _NUMBER.fullmatch(text):
        message = "Input should be a valid integer, unable to parse string as an integer"
        return Problem("int_parsing", where, message, text[:200])
    found = int(text)
    if least is not None and found < least:
        return Problem("greater_than_equal", where, f"Input should be greater than or equal to {least}", text)
    if most is not None and found > most:
        return Problem("less_than_equal", where, f"Input should be less than or equal to {most}", text)
    return found


def numbers(*found: int | Problem) -> list[int]:
    """All of them, or everything that is wrong with them."""
    problems = [one for one in found if isinstance(one, Problem)]
    if problems:
        raise Invalid(*problems)
    return [one for one in found if isinstance(one, int)]
