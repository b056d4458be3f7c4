"""What is to be undone when a world is left, whichever way it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

Call = TypeVar("Call", bound=Callable[[], Any])


class Finalizers:
    """Called once, the last one added first. One that fails is told of, and keeps no other from being called."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []

    def add(self, call: Call) -> Call:
        self._calls.append(call)
        return call

    def run(self) -> None:
        while self._calls:
            call = self._calls.pop()
            try:
                call()
            except Exception as error:  # the world is left all the same
                name = getattr(call, "__qualname__", repr(call))
                log.error("%s failed when its world was left", name, exc_info=error)
