"""Random numbers keyed by seed, step and microbatch, and this process's generators as checkpoint state.

Dropout of a microbatch is the same on any rank of any world when the generators are set from (seed, step, microbatch)
before it and put back after it; the same for augmentation, by (seed, data epoch, sample).

The generators are the whole process's: what other threads draw meanwhile is neither protected nor reproducible.

::

    state = {"model": model, "optim": optimizer, "random": elastic.RNGState()}

Each rank saves ``python``'s ``random``, ``numpy.random``, torch's generator of the CPU and the one of its current
device, and gets them back as they were, bit by bit. In a world of another size a rank that the checkpoint knows
continues its own; one that it does not know takes what rank ``rank % size`` had, mixed with its own number: the same at
every attempt, and another sequence than anybody else's. What is to be the same at every size is drawn under
:func:`elastic.seeded`.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct
from collections.abc import Collection
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from elastic.samples.sample_schedule import hash_key
from tieredckpt.tensors.device import accelerator

_MASK32 = 0xFFFFFFFF
_spares: list[Any] = []
"""numpy's state takes 70 us to copy out and in, another generator in its place less than one."""


def microbatch_generator(seed: int, step: int, microbatch: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of one's own for a microbatch, with numbers that no other microbatch of the job gets.

    On CPU torch uses 32 bits of the key, on CUDA all 64.
    """
    made = torch.Generator(device)
    made.manual_seed(hash_key("generator", seed, step, microbatch))
    return made


class seeded:  # noqa: N801 - read as a verb: with seeded(...)
    """In this block, what torch (on CPU and the current device), ``random`` and ``numpy.random`` give depends
    on (seed, step, microbatch) alone; behind it they go on as if it had not been there.

    One exception: numpy makes normal numbers in pairs, and of a pair that was begun before the block the second half is
    forgotten.
    """

    def __init__(self, seed: int, step: int, microbatch: int) -> None:
        self._key = hash_key("microbatch", seed, step, microbatch)
        self._kept = preserved_rng()

    def __enter__(self) -> None:
        self._kept.__enter__()
        seed_generators(self._key)
        if self._kept.on_device is not None:
            self._kept.on_device.manual_seed(self._key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kept.__exit__(kind, error, traceback)


class preserved_rng:  # noqa: N801 - read as in: with kept()
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
        if device.is_initialized() and (on_device := device.default_generator()) is not None:
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
    return hash_key("sample", seed, epoch, index)


def seed_generators(key: int) -> None:
    """Set the generators of this process's CPU side, for good."""
    random.seed(key)
    np.random.seed(key & _MASK32)  # noqa: NPY002 - what datasets use
    torch.default_generator.manual_seed(key)


_WORDS = 624
_PYTHON = struct.Struct(f"<i{_WORDS + 1}Idx")
"""Version, the words with the position, the second half of a pair of normal numbers (NaN: there is none)."""
_NUMPY = struct.Struct(f"<{_WORDS}Iiid")
_DEVICE_BYTES = 64
_LENGTH = struct.Struct("<I")


class RNGState:
    """A ``Stateful`` for the state that a :class:`~tieredckpt.Checkpointer` saves and restores.

    Not covered: generators that the script has made for itself (they have a ``state_dict`` or ``get_state`` of their
    own), and another kind of bit generator in the place of numpy's usual one.
    """

    def __init__(self) -> None:
        self._wanted: str | None = None
        """The name under which the next restore finds this rank's, where that was looked up."""

    def state_dict(self) -> dict[str, Any]:
        if self._wanted is None:
            return {_name(_rank()): torch.frombuffer(_generators(), dtype=torch.uint8)}
        if not self._wanted:
            return {}
        return {self._wanted: torch.frombuffer(_generators(), dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._wanted = None
        for name, value in state.items():
            data = value.numpy().tobytes()
            if name == _name(_rank()):
                _set_generators(data)
            else:
                _begin_anew(data)

    def before_restore(self, saved: Collection[str]) -> None:
        """``saved`` are the names, in this part of the state, that the checkpoint has."""
        ranks = sorted(int(name.removeprefix("rank")) for name in saved if name.removeprefix("rank").isdigit())
        self._wanted = _name(ranks[_rank() % len(ranks)] if _rank() not in ranks else _rank()) if ranks else ""


def _name(rank: int) -> str:
    return f"rank{rank}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _generators() -> bytearray:
    """All generators of this process; always as long."""
    version, words, spare = random.getstate()
    kind, numbers, position, has_spare, numpy_spare = np.random.get_state(legacy=True)  # noqa: NPY002 - what scripts use
    if kind != "MT19937":
        raise TypeError(f"numpy.random draws from a {kind}, and only the usual MT19937 can be kept")
    device = accelerator()
    on_device = device.default_generator() if device.is_initialized() else None
    drawn = b"" if on_device is None else on_device.get_state().numpy().tobytes()
    parts = (
        _PYTHON.pack(version, *words, float("nan") if spare is None else spare),
        _NUMPY.pack(*(int(number) for number in numbers), position, has_spare, numpy_spare),
        _LENGTH.pack(len(drawn)) + drawn.ljust(_DEVICE_BYTES, b"\0"),
        torch.get_rng_state().numpy().tobytes(),
    )
    return bytearray(b"".join(parts))


def _set_generators(data: bytes) -> None:
    version, *words, spare = _PYTHON.unpack_from(data)
    random.setstate((version, tuple(words), None if math.isnan(spare) else spare))
    at = _PYTHON.size
    *numbers, position, has_spare, numpy_spare = _NUMPY.unpack_from(data, at)
    np.random.set_state(("MT19937", np.array(numbers, np.uint32), position, has_spare, numpy_spare))  # noqa: NPY002
    at += _NUMPY.size
    (device_bytes,) = _LENGTH.unpack_from(data, at)
    at += _LENGTH.size
    on_device = accelerator().default_generator() if device_bytes else None
    if on_device is not None:
        on_device.set_state(torch.frombuffer(bytearray(data[at : at + device_bytes]), dtype=torch.uint8))
    torch.set_rng_state(torch.frombuffer(bytearray(data[at + _DEVICE_BYTES :]), dtype=torch.uint8))


def _begin_anew(data: bytes) -> None:
    """For a rank that there was not: from what another one had, and its own number."""
    key = int.from_bytes(hashlib.blake2b(data, digest_size=8, key=struct.pack("<Q", _rank())).digest(), "little")
    random.seed(key)
    np.random.seed(key & _MASK32)  # noqa: NPY002 - what scripts use
    torch.manual_seed(key)
