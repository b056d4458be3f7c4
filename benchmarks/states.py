"""The three states: few large tensors, many small ones, a model with its optimizer.

- A: 64 equal fp32 tensors.
- B: fp32 tensors of 256 KiB, 4,096 in 1 GiB.
- C: a Llama-like model of 6 layers (57 parameters) with AdamW's moments and step counts, a generator's state, and a few
  Python objects: 229 tensors.

On several ranks every tensor with rows is a DTensor, ``Shard(0)``. All ranks together hold the same number of bytes as
one rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

State = dict[str, Any]
_COLUMNS = 64
_LAYERS = 6
TOP_OF_EXPONENT = 1 << 30


def build(kind: str, size_bytes: int, *, rank: int, world: int) -> State:
    """Return a state of ``size_bytes`` random bytes over all ranks, the same in every run.

    No element is NaN or infinite, because a ``Checkpointer`` refuses to save those.
    """
    make = _Maker(rank, world)
    if kind == "C":
        return _llama(size_bytes, make)
    count = 64 if kind == "A" else max(1, size_bytes // (256 << 10))  # so that B's ratios do not depend on the size
    rows = max(world, size_bytes // count // 4 // _COLUMNS // world * world)
    return {f"layers.{number:04}.weight": make.rows(rows, _COLUMNS) for number in range(count)}


def tiny(count: int, *, rank: int, world: int) -> State:
    """Return ``count`` tensors of a few bytes, so that a save is mostly planning."""
    make = _Maker(rank, world)
    return {f"layers.{number:04}.weight": make.rows(2 * world, 8) for number in range(count)}


class _Maker:
    def __init__(self, rank: int, world: int) -> None:
        self._random = np.random.Generator(np.random.SFC64(1000 + rank))
        self._common = np.random.Generator(np.random.SFC64(7))
        self._world = world
        self._mesh: DeviceMesh | None = init_device_mesh("cpu", (world,)) if world > 1 else None

    def rows(self, rows: int, *columns: int) -> torch.Tensor:
        local = _fill(torch.empty((rows // self._world, *columns)), self._random)
        if self._mesh is None:
            return local
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False)

    def everywhere(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return _fill(torch.empty(shape, dtype=dtype), self._common)


def _fill(tensor: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    raw(tensor).numpy()[...] = np.frombuffer(random.bytes(tensor.nbytes), dtype=np.uint8)
    if tensor.dtype == torch.float32:
        tensor.view(torch.int32).bitwise_and_(~TOP_OF_EXPONENT)
    return tensor


def _llama(size_bytes: int, make: _Maker) -> State:
    width = max(16, round(math.sqrt(size_bytes / 960) / 16) * 16)  # 12 bytes for each of about 80 width² parameters
    inner, vocabulary = width * 8 // 3 // 16 * 16 or 16, 4 * width
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocabulary, width)}
    for layer in range(_LAYERS):
        name = f"layers.{layer}"
        shapes |= {f"{name}.attention.{part}.weight": (width, width) for part in ("wq", "wk", "wv", "wo")}
        shapes |= {f"{name}.feed_forward.{part}.weight": (inner, width) for part in ("gate", "up")}
        shapes[f"{name}.feed_forward.down.weight"] = (width, inner)
        shapes |= {f"{name}.{norm}.weight": (width,) for norm in ("attention_norm", "ffn_norm")}
    shapes |= {"norm.weight": (width,), "output.weight": (vocabulary, width)}
    moments = {
        name: {"exp_avg": make.rows(*shape), "exp_avg_sq": make.rows(*shape), "step": make.everywhere()}
        for name, shape in shapes.items()
    }
    groups = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    return {
        "model": {name: make.rows(*shape) for name, shape in shapes.items()},
        "optim": {"state": moments, "groups": groups},
        "rng": make.everywhere(5056, dtype=torch.uint8),
    }


def moved(state: Mapping[str, Any], device: str) -> State:
    """Return the state on the current device of that kind."""
    made: State = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            made[key] = moved(value, device)
        else:
            made[key] = value.to(device) if isinstance(value, torch.Tensor) else value
    return made


def leaves(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values; for a DTensor, the part on this rank."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from leaves(value, f"{name}.")
        else:
            yield name, value.to_local() if isinstance(value, DTensor) else value


def tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in leaves(state) if isinstance(value, torch.Tensor)}


def size_of(state: Mapping[str, Any]) -> int:
    """Return the number of bytes on this rank."""
    return sum(tensor.nbytes for tensor in tensors(state).values())


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def advance(state: Mapping[str, Any], turn: int) -> None:
    """Change a byte of every tensor, so that the result of an earlier save differs from this one."""
    for tensor in tensors(state).values():
        raw(tensor)[-1] = turn % 256


def turn_over(state: Mapping[str, Any]) -> None:
    """Change every byte, so that no chunk of an earlier save matches this one."""
    for tensor in tensors(state).values():
        raw(tensor).add_(1)


def touch(state: Mapping[str, Any], every_bytes: int) -> int:
    """Change one byte in every ``every_bytes`` and return the number of changed bytes."""
    at = count = 0
    for tensor in tensors(state).values():
        there = raw(tensor)[-at % every_bytes :: every_bytes]
        there.add_(1)
        at, count = at + tensor.nbytes, count + len(there)
    return count


def blank(state: Mapping[str, Any]) -> State:
    """Return a state of the same structure with zeros and None as values."""
    made: State = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            made[key] = blank(value)
        else:
            made[key] = torch.zeros_like(value) if isinstance(value, torch.Tensor) else None
    return made


def wipe(state: State) -> None:
    for key, value in state.items():
        if isinstance(value, Mapping):
            wipe(state[key])
        elif isinstance(value, torch.Tensor):
            (value.to_local() if isinstance(value, DTensor) else value).zero_()
        else:
            state[key] = None


def fill_from(target: State, found: Mapping[str, Any]) -> None:
    """Copy the flat values into the tensors and objects of ``target``, as a training script does."""

    def visit(into: State, prefix: str) -> None:
        for key, value in into.items():
            name = f"{prefix}{key}"
            if isinstance(value, Mapping):
                visit(into[key], f"{name}.")
            elif isinstance(value, torch.Tensor):
                (value.to_local() if isinstance(value, DTensor) else value).copy_(found[name])
            elif name in found:
                into[key] = found[name]

    visit(target, "")


def difference(expected: Mapping[str, Any], found: Mapping[str, Any], *, objects: bool = True) -> str:
    """Return the first name whose bits differ, or an empty string."""
    there = dict(leaves(found))
    for name, value in leaves(expected):
        other = there.get(name)
        if isinstance(value, torch.Tensor):
            same = isinstance(other, torch.Tensor) and (value.shape, value.dtype) == (other.shape, other.dtype)
            if not same or not torch.equal(raw(value).cpu(), raw(other).cpu()):
                return name
        elif objects and value != other:
            return name
    return ""
