"""A store may take a connection and never say a word. Whoever waits hears of it long before a transfer would end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYetError
from typing import TYPE_CHECKING, TypeVar

from tieredckpt.errors import TierUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tieredckpt.durable.stop import Stop

_POLL_S = 0.05
T = TypeVar("T")


def unless_silent(what: str, ask: Callable[[Callable[[], None]], T], *, patience_s: float, stop: Stop) -> T:
    """The answer to ``ask``, however long it takes, while that calls what it is given now and then.

    Where it does not for ``patience_s``, :class:`TierUnavailableError`; it ends by itself, in a thread of its own.
    """
    answer = Future[T]()
    heard_at = time.monotonic()

    def heard() -> None:
        nonlocal heard_at
        heard_at = time.monotonic()

    def work() -> None:
        try:
            answer.set_result(ask(heard))
        except BaseException as error:  # noqa: BLE001 - it is for whoever waits
            answer.set_exception(error)

    threading.Thread(target=work, name="tieredckpt-ask", daemon=True).start()
    while True:
        try:
            return answer.result(_POLL_S)
        except NotYetError:
            if answer.done():
                return answer.result()
        stop.check()
        if time.monotonic() - heard_at > patience_s:
            raise TierUnavailableError(f"{what}: timed out, nothing was heard of it for {patience_s:g} s")
