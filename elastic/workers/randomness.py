"""The generators of this process as a part of the checkpoint: what a rank drew next before a fault, it draws after it.

::

    state = {"model": model, "optim": optimizer, "random": elastic.Randomness()}

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
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tieredckpt.device import accelerator

_MASK32 = 0xFFFFFFFF
_WORDS = 624
_PYTHON = struct.Struct(f"<i{_WORDS + 1}Idx")
"""Version, the words with the position, the second half of a pair of normal numbers (NaN: there is none)."""
_NUMPY = struct.Struct(f"<{_WORDS}Iiid")
_DEVICE_BYTES = 64
_LENGTH = struct.Struct("<I")


class Randomness:
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
    on_device = device.generator() if device.in_use() else None
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
    on_device = accelerator().generator() if device_bytes else None
    if on_device is not None:
        on_device.set_state(torch.frombuffer(bytearray(data[at : at + device_bytes]), dtype=torch.uint8))
    torch.set_rng_state(torch.frombuffer(bytearray(data[at + _DEVICE_BYTES :]), dtype=torch.uint8))


def _begin_anew(data: bytes) -> None:
    """For a rank that there was not: from what another one had, and its own number."""
    key = int.from_bytes(hashlib.blake2b(data, digest_size=8, key=struct.pack("<Q", _rank())).digest(), "little")
    random.seed(key)
    np.random.seed(key & _MASK32)  # noqa: NPY002 - what scripts use
    torch.manual_seed(key)
