"""Record of the device work that completed before any abort: no other result is trusted.

An aborted NCCL collective ends without raising: its outputs are undefined, the stream continues, and its events
complete. So an event that is queried after an abort proves nothing. Code that aborts groups first queries all events
(:meth:`AbortFence.close`). Code that records, stages or steps tensors first calls :func:`raise_if_aborted`: a world is
marked as broken before its groups are aborted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from tieredckpt.tensors.device import DeviceWork, record_device_work


class AbortFence:
    """Fence of one world. ``refuse`` raises once the world is known to be broken."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse = refuse
        self._lock = threading.Lock()
        self._recorded: weakref.WeakSet[DeviceWork] = weakref.WeakSet()
        self._believed: frozenset[DeviceWork] | None = None
        """Work that had completed when the fence was closed. ``None``: it is open."""

    def raise_if_aborted(self) -> None:
        """Raise if this world is broken: the values of its tensors can no longer be trusted."""
        self._refuse()

    def record(self, tensors: Iterable[torch.Tensor]) -> DeviceWork:
        """Record and return the work that this thread has queued on the devices of ``tensors``."""
        work = record_device_work(tensors)
        with self._lock:
            self._recorded.add(work)
        return work

    def close(self) -> None:
        """Fix the set of trusted work.

        Call it before groups are aborted, from any thread. Later calls do nothing.
        """
        with self._lock:
            if self._believed is None:
                self._believed = frozenset(work for work in self._recorded if work.has_completed())

    def trusts(self, work: DeviceWork) -> bool:
        """Return whether ``work`` has completed.

        If the fence is closed: whether it had completed at that time.
        """
        with self._lock:
            return work.has_completed() if self._believed is None else work in self._believed


def _never_broken() -> None:
    """Do nothing: without a recovery loop no world is aborted while training continues."""


_fences: list[AbortFence] = [AbortFence(_never_broken)]


def current_fence() -> AbortFence:
    """Return the fence of the world that this process trains in."""
    return _fences[-1]


def raise_if_aborted() -> None:
    """Raise if the world that this process trains in is broken."""
    _fences[-1].raise_if_aborted()


@contextmanager
def use_fence(one: AbortFence) -> Iterator[None]:
    """Make ``one`` the fence of this process while the block runs."""
    _fences.append(one)
    try:
        yield
    finally:
        _fences.remove(one)
