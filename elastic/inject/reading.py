"""Faults as words, of a command line or of ``$ELASTIC_INJECT``: ``step=30 rank=8 kind=sigkill``. Pure but for a file.

The variable holds such words, several of them with ``;`` between, or their JSON, or ``file:PATH`` with either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from elastic.errors import PolicyError
from elastic.inject.plan import Injection, Kind, Phase, checked
from peerstore.decode import from_json

INJECT = "ELASTIC_INJECT"
_FILE = "file:"
_FIELDS: Mapping[str, type] = {
    "step": int,
    "after_s": float,
    "phase": Phase,
    "rank": int,
    "node": str,
    "local_rank": int,
    "kind": Kind,
    "seconds": float,
    "times": int,
    "then": str,
    "name": str,
}
_WORDS = {int: "a whole number", float: "a number of seconds"}


def phase_of(word: object) -> Phase:
    try:
        return Phase(word)
    except ValueError:
        raise PolicyError(f"phase={word}: one of {', '.join(phase.value for phase in Phase)}") from None


def kind_of(word: str) -> Kind:
    try:
        return Kind(word)
    except ValueError:
        raise PolicyError(f"kind={word}: one of {', '.join(kind.value for kind in Kind)}") from None


def injection_of(words: Iterable[str], kind: str | None = None) -> Injection:
    """``step=30 rank=8``, and what is to happen there, if it is not among the words."""
    values: dict[str, object] = {} if kind is None else {"kind": kind_of(kind)}
    for word in words:
        name, sign, text = word.partition("=")
        if name not in _FIELDS or not sign:
            raise PolicyError(f"{word!r}: write NAME=VALUE, with a name of {', '.join(_FIELDS)}")
        if name in values:
            raise PolicyError(f"{name}={text}: {name} was said twice")
        values[name] = _value(name, text)
    if "kind" not in values:
        raise PolicyError(f"kind: say what is to happen, one of {', '.join(kind.value for kind in Kind)}")
    return Injection(**values)  # type: ignore[arg-type]


def _value(name: str, text: str) -> object:
    kind = _FIELDS[name]
    if kind is Phase:
        return phase_of(text)
    if kind is Kind:
        return kind_of(text)
    try:
        if not text:
            raise ValueError(text)
        return kind(text)
    except ValueError:
        raise PolicyError(f"{name}={text}: must be {_WORDS.get(kind, 'a name')}") from None


def plan_of(text: str) -> tuple[Injection, ...]:
    """All faults that the variable's value speaks of."""
    if text.startswith(_FILE):
        path = Path(text.removeprefix(_FILE))
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError(f"{INJECT}: the faults cannot be read from {path}: {error}") from error
    if text.lstrip().startswith("["):
        try:
            return checked(from_json(text, tuple[Injection, ...]))
        except msgspec.MsgspecError as error:
            raise PolicyError(f"{INJECT}: {error}") from error
    return checked(tuple(injection_of(part.split()) for part in text.split(";") if part.strip()))
