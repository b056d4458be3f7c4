"""Whether a process that has left a world is fit for another one; else it ends, and a new one takes its seat."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from elastic.errors import UnhealthyError

Health = Callable[[], Any]
"""Raises where this process is not fit for another world."""


class DeviceHealth:
    """The device does what it is given within ``limit_s``, and has its memory back.

    ``most_left_bytes``: so much more than after the first world may be allocated after a later one; not given: as much
    as it likes. Nothing is looked at where this process has not used a device; else it is the calling thread's.
    """

    def __init__(self, limit_s: float = 30.0, most_left_bytes: int | None = None) -> None:
        self._limit_s = limit_s
        self._most_left_bytes = most_left_bytes
        self._baseline_bytes: int | None = None

    def __call__(self) -> None:
        from tieredckpt.device import accelerator

        device = accelerator()
        if not device.in_use():
            return
        place = device.current()  # asked here: a new thread's is the first one, whichever this rank has
        within(self._limit_s, lambda: device.synchronize(place), f"the device {place}")
        if self._most_left_bytes is None:
            return
        gc.collect()
        device.release_cached()
        left_bytes = device.allocated_bytes()
        if self._baseline_bytes is None:
            self._baseline_bytes = left_bytes
        more_bytes = left_bytes - self._baseline_bytes
        if more_bytes > self._most_left_bytes:
            raise UnhealthyError(
                f"{more_bytes} bytes more of the device's memory are in use than after the first world, "
                f"{self._most_left_bytes} may be: something outside the train function keeps what it made"
            )


def within(limit_s: float, call: Callable[[], Any], what: str) -> None:
    """:class:`UnhealthyError` where ``call`` raises, or does not come back within ``limit_s``."""
    from tieredckpt.device import answered

    try:
        answered(limit_s, call)
    except TimeoutError as error:
        raise UnhealthyError(f"{what} has not answered for {limit_s:g} s") from error
    except Exception as error:
        raise UnhealthyError(f"{what} is broken: {error}") from error
