"""Trusts only the device work that completed before any abort.

An aborted NCCL collective ends without raising: its outputs hold anything, the stream goes on, and its events complete.
So nothing can be learned from an event that is asked afterwards. Whoever aborts asks all events first
(:meth:`AbortFence.close`), and whoever is about to note, stage or step on what tensors hold asks whether the world
still stands (:func:`raise_if_aborted`), which is known to be broken before anything is aborted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from tieredckpt.tensors.device import DeviceWork, record_device_work


class AbortFence:
    """One world's. ``refuse`` raises once the world is known to be broken."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse = refuse
        self._lock = threading.Lock()
        self._recorded: weakref.WeakSet[DeviceWork] = weakref.WeakSet()
        self._believed: frozenset[DeviceWork] | None = None
        """What had completed when the world was aborted; ``None`` while it is not."""

    def raise_if_aborted(self) -> None:
        """Raises where this world is broken: nothing that tensors hold from here on is what was computed."""
        self._refuse()

    def record(self, tensors: Iterable[torch.Tensor]) -> DeviceWork:
        """All that the devices of ``tensors`` were given by this thread so far."""
        work = record_device_work(tensors)
        with self._lock:
            self._recorded.add(work)
        return work

    def close(self) -> None:
        """Before groups are aborted, from any thread: from now on it is settled what is believed."""
        with self._lock:
            if self._believed is None:
                self._believed = frozenset(work for work in self._recorded if work.has_completed())

    def trusts(self, work: DeviceWork) -> bool:
        """Whether ``work`` had completed before anything was aborted."""
        with self._lock:
            return work.has_completed() if self._believed is None else work in self._believed


def _stands() -> None:
    """Where no loop goes from world to world, no world is aborted under a training that goes on."""


_fences: list[AbortFence] = [AbortFence(_stands)]


def current_fence() -> AbortFence:
    """That of the world this process trains in."""
    return _fences[-1]


def raise_if_aborted() -> None:
    """Raises where the world this process trains in is broken."""
    _fences[-1].raise_if_aborted()


@contextmanager
def use_fence(one: AbortFence) -> Iterator[None]:
    """While the block runs, ``one`` is this process's."""
    _fences.append(one)
    try:
        yield
    finally:
        _fences.remove(one)
