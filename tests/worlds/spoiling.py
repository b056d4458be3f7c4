"""Rules of production, each broken on purpose, to see that the simulation finds out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

SPOILT = {}


@contextlib.contextmanager
def spoilt_rule(name: str | None) -> Iterator[None]:
    yield
