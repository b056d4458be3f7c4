"""Random numbers keyed by seed, step and microbatch, and the process's generators as checkpoint state.

Seed the generators from (seed, step, microbatch) before a microbatch, and restore them after it. Then its dropout is
the same on any rank of any world. The same holds for augmentation with (seed, data epoch, sample).

The generators belong to the whole process: numbers that other threads draw meanwhile are neither protected nor
reproducible.

::

    state = {"model": model, "optim": optimizer, "random": elastic.RNGState()}

Each rank saves Python's ``random``, ``numpy.random``, torch's CPU generator and the generator of its current device,
and restores them exactly. In a world of another size, a rank that the checkpoint contains continues its own generators.
Any other rank derives its seed from the state of rank ``rank % size`` and from its own number. This seed is the same at
every attempt, but different on each rank. Draw numbers that must not depend on the world size under
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
"""Spare generators: replacing numpy's takes less than 1 us, copying its state out and in 70 us."""


def microbatch_generator(seed: int, step: int, microbatch: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new generator for a microbatch, with numbers that no other microbatch uses.

    On CPU torch uses 32 bits of the key, on CUDA all 64.
    """
    generator = torch.Generator(device)
    generator.manual_seed(hash_key("generator", seed, step, microbatch))
    return generator


class seeded:  # noqa: N801 - read as a verb: with seeded(...)
    """Seed all generators from (seed, step, microbatch) in a block.

    The generators are torch's (CPU and current device), ``random`` and ``numpy.random``. After the block they continue
    as if it had not run. One exception: numpy draws normal numbers in pairs, and the second half of a pair that was
    begun before the block is lost.
    """

    def __init__(self, seed: int, step: int, microbatch: int) -> None:
        self._key = hash_key("microbatch", seed, step, microbatch)
        self._preserved = preserved_rng()

    def __enter__(self) -> None:
        self._preserved.__enter__()
        seed_generators(self._key)
        if self._preserved.on_device is not None:
            self._preserved.on_device.manual_seed(self._key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._preserved.__exit__(kind, error, traceback)


class preserved_rng:  # noqa: N801 - read as in: with kept()
    """Restore all generators after this block to their state before it."""

    on_device: torch.Generator | None = None
    """Generator of the current device, if a device is in use."""

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
    """Return the key for random decisions about one sample in one epoch."""
    return hash_key("sample", seed, epoch, index)


def seed_generators(key: int) -> None:
    """Seed the CPU generators of this process permanently."""
    random.seed(key)
    np.random.seed(key & _MASK32)  # noqa: NPY002 - what datasets use
    torch.default_generator.manual_seed(key)


_WORDS = 624
_PYTHON = struct.Struct(f"<i{_WORDS + 1}Idx")
"""Version, the words with the position, and the second half of a pair of normal numbers (NaN: none)."""
_NUMPY = struct.Struct(f"<{_WORDS}Iiid")
_DEVICE_BYTES = 64
_LENGTH = struct.Struct("<I")


class RNGState:
    """``Stateful`` random state that a :class:`~tieredckpt.Checkpointer` saves and restores.

    It does not cover generators that the script creates, which have their own ``state_dict`` or ``get_state``. Nor does
    it support other bit generators in place of numpy's default one.
    """

    def __init__(self) -> None:
        self._restore_name: str | None = None
        """Name of the state that the next restore loads here; "": none, ``None``: not selected."""

    def state_dict(self) -> dict[str, Any]:
        if self._restore_name is None:
            return {_name(_rank()): torch.frombuffer(_generators(), dtype=torch.uint8)}
        if not self._restore_name:
            return {}
        return {self._restore_name: torch.frombuffer(_generators(), dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restore_name = None
        for name, value in state.items():
            data = value.numpy().tobytes()
            if name == _name(_rank()):
                _set_generators(data)
            else:
                _seed_from_other_rank(data)

    def before_restore(self, saved: Collection[str]) -> None:
        """Select the state for this rank. ``saved`` has the names of the checkpoint in this part of the state."""
        ranks = sorted(int(name.removeprefix("rank")) for name in saved if name.removeprefix("rank").isdigit())
        self._restore_name = _name(ranks[_rank() % len(ranks)] if _rank() not in ranks else _rank()) if ranks else ""


def _name(rank: int) -> str:
    return f"rank{rank}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _generators() -> bytearray:
    """Return the state of all generators of this process, always with the same length."""
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


def _seed_from_other_rank(data: bytes) -> None:
    """Seed this rank, which the checkpoint does not contain, from another rank's state and its own number."""
    key = int.from_bytes(hashlib.blake2b(data, digest_size=8, key=struct.pack("<Q", _rank())).digest(), "little")
    random.seed(key)
    np.random.seed(key & _MASK32)  # noqa: NPY002 - what scripts use
    torch.manual_seed(key)
