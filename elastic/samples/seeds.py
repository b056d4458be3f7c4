"""Random numbers that depend on what is computed, not on who computes it.

Dropout of a microbatch is the same on any rank of any world when the generators are set from (seed, step, microbatch)
before it and put back after it; the same for augmentation, by (seed, data epoch, sample).

The generators are the whole process's: what other threads draw meanwhile is neither protected nor reproducible.
"""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch

from elastic.samples.permutation import key_of
from tieredckpt.device import accelerator

_MASK32 = 0xFFFFFFFF
_spares: list[Any] = []
"""numpy's state takes 70 us to copy out and in, another generator in its place less than one."""


def generator(seed: int, step: int, microbatch: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of one's own for a microbatch, with numbers that no other microbatch of the job gets.

    On CPU torch uses 32 bits of the key, on CUDA all 64.
    """
    made = torch.Generator(device)
    made.manual_seed(key_of("generator", seed, step, microbatch))
    return made


class seeded:  # noqa: N801 - read as a verb: with seeded(...)
    """In this block, what torch (on CPU and the current device), ``random`` and ``numpy.random`` give depends
    on (seed, step, microbatch) alone; behind it they go on as if it had not been there.

    One exception: numpy makes normal numbers in pairs, and of a pair that was begun before the block the second half is
    forgotten.
    """

    def __init__(self, seed: int, step: int, microbatch: int) -> None:
        self._key = key_of("microbatch", seed, step, microbatch)
        self._kept = kept()

    def __enter__(self) -> None:
        self._kept.__enter__()
        set_all(self._key)
        if self._kept.on_device is not None:
            self._kept.on_device.manual_seed(self._key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kept.__exit__(kind, error, traceback)


class kept:  # noqa: N801 - read as in: with kept()
    """All generators are after this block as they were before it."""

    on_device: torch.Generator | None = None
    """The current device's, where one is in use."""

    def __enter__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        self._numpy = np.random.get_bit_generator()  # type: ignore[attr-defined]
        self._spare = _spares.pop() if _spares else np.random.MT19937()
        np.random.set_bit_generator(self._spare)  # type: ignore[attr-defined]
        device = accelerator()
        if device.in_use() and (on_device := device.generator()) is not None:
            self.on_device = on_device
            self._device_state = on_device.get_state()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.on_device is not None:
            self.on_device.set_state(self._device_state)
        np.random.set_bit_generator(self._numpy)  # type: ignore[attr-defined]
        _spares.append(self._spare)
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)


def sample_key(seed: int, epoch: int, index: int) -> int:
    """For what is random about one sample in one epoch."""
    return key_of("sample", seed, epoch, index)


def set_all(key: int) -> None:
    """Set the generators of this process's CPU side, for good."""
    random.seed(key)
    np.random.seed(key & _MASK32)  # noqa: NPY002 - what datasets use
    torch.default_generator.manual_seed(key)
