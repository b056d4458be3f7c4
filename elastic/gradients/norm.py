"""The norm of all gradients: as fast as it goes, or the same to the last bit however they are spread.

For the second, squares are added within rows and then over rows by halving, one element with one other: how many rows
a rank has, threads and kernels change nothing. FSDP2 cuts no row; ranks exchange their sums, 8 bytes each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from elastic.errors import PolicyError
from elastic.gradients.exchange import bounds

BLOCK_ELEMENTS = 1 << 19
"""Squares at a time: they stay in a processor's cache. An accelerator takes more, or would wait for its next kernel."""
Spread = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh, and its dimensions over which a gradient is cut."""


def fast_norm(parameters: Sequence[nn.Parameter]) -> float:
    """By torch's own kernels, in the order in which they add."""
    by_spread: dict[Spread | None, list[torch.Tensor]] = {}
    for gradient in _gradients(parameters):
        by_spread.setdefault(_spread(gradient), []).append(_local(gradient))
    total = 0.0
    for spread, gradients in by_spread.items():
        norms = torch._foreach_norm(gradients)
        squares = torch.stack([norm.double() for norm in norms]).square_().sum()
        if spread is not None:
            mesh, dimensions = spread
            for dimension in dimensions:
                dist.all_reduce(squares, group=mesh.get_group(dimension))
        total += squares.item()
    return math.sqrt(total)


def fixed_norm(parameters: Sequence[nn.Parameter]) -> float:
    """In an order that depends on the parameters' shapes alone."""
    gradients = _gradients(parameters)
    if not gradients:
        return 0.0
    heights = [len(one) if one.ndim else 1 for one in gradients]
    device = _local(gradients[0]).device
    sums = torch.zeros(sum(heights), dtype=torch.float64, device=device)
    groups: dict[Spread, dist.ProcessGroup] = {}
    cut: list[tuple[Spread | None, torch.Tensor]] = []
    for gradient, rows in zip(gradients, sums.split(heights), strict=True):
        spread = _spread(gradient)
        cut.append((spread, rows))
        begin = 0
        if spread is not None:
            groups[spread] = _row_group(gradient, spread)
            begin = bounds(len(rows), groups[spread].size(), groups[spread].rank())[0]
        own = _row_sums(_local(gradient))
        rows[begin : begin + len(own)] = own
    for spread, group in groups.items():
        together = torch.cat([rows for one, rows in cut if one == spread])
        dist.all_reduce(together, group=group)  # of zeros and one value each: exact in any order
        mine = [rows for one, rows in cut if one == spread]
        for rows, whole in zip(mine, together.split([len(rows) for rows in mine]), strict=True):
            rows.copy_(whole)
    found = iter([_halve(rows.view(1, -1))[0] for _, rows in cut])
    nothing = sums.new_zeros(())
    each = [nothing if one.grad is None else next(found) for one in parameters]
    return math.sqrt(_halve(torch.stack(each).view(1, -1)).item())


def clip_by(parameters: Sequence[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients so that their norm is ``limit``; as torch's ``clip_grad_norm_`` does, with its 1e-6."""
    factor = limit / (norm + 1e-6)
    if factor < 1 or math.isnan(factor):
        for gradient in _gradients(parameters):
            _local(gradient).mul_(factor)


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [one.grad for one in parameters if one.grad is not None]


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _spread(gradient: torch.Tensor) -> Spread | None:
    if not isinstance(gradient, DTensor):
        return None
    cut = tuple(dimension for dimension, one in enumerate(gradient.placements) if isinstance(one, Shard))
    return (gradient.device_mesh, cut) if cut else None


def _row_group(gradient: torch.Tensor, spread: Spread) -> dist.ProcessGroup:
    mesh, dimensions = spread
    placements = gradient.placements if isinstance(gradient, DTensor) else ()
    if [one.dim for one in placements if isinstance(one, Shard)] != [0]:
        raise PolicyError(
            f"a norm that is the same for any number of ranks needs gradients that are cut by rows, once; there is one "
            f"with placements {placements}: clip without the fixed tree, or not at all"
        )
    return mesh.get_group(dimensions[0])


def _row_sums(gradient: torch.Tensor) -> torch.Tensor:
    """Of squares, one for each row; numbers are rows of their own, and so are elements of vectors."""
    rows = gradient.flatten(1) if gradient.ndim > 1 else gradient.view(-1, 1)
    most = BLOCK_ELEMENTS if rows.is_cpu else BLOCK_ELEMENTS * 32
    height = max(1, most // max(1, rows.shape[1]))
    wide = torch.promote_types(rows.dtype, torch.float32)
    return torch.cat([_halve(block.to(wide).square()) for block in rows.split(height)]).double()


def _halve(rows: torch.Tensor) -> torch.Tensor:
    """The sum of each row, by adding its second half to its first until one number is left. Changes ``rows``."""
    while (width := rows.shape[1]) > 1:
        kept = (width + 1) // 2
        rows[:, : width - kept] += rows[:, kept:]
        rows = rows[:, :kept]
    return rows[:, 0] if rows.shape[1] else rows.new_zeros(len(rows))
