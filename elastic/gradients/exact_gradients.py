"""ExactGradients: one step from microbatches to clipped gradients, with a sharding-independent norm.

The deterministic norm adds squares within rows, and then over rows by halving, always in pairs. So the number of rows
on a rank, threads and kernels change nothing. FSDP2 does not split a row. Ranks exchange the sums of their rows, 8
bytes each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from elastic.batch_scaling.batch_plan import RankPlan
from elastic.errors import NonFiniteLossError, PolicyError
from elastic.gradients.reduction import (
    GradientReducer,
    MicrobatchPass,
    MicrobatchShare,
    ReplicatedReducer,
    piece_bounds,
    tree_sum,
)


@dataclasses.dataclass(frozen=True)
class StepTotal:
    """Result of a step, the same on every rank."""

    loss: float
    """Sum of all microbatches' losses, divided by ``weight``."""
    weight: float
    """Samples or tokens of the whole step."""
    norm: float | None
    """Norm of the gradients before clipping; ``None`` if neither ``clip`` nor ``on_nonfinite`` needs it."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and (self.norm is None or math.isfinite(self.norm))


class FiniteCheck(Protocol):
    """Reaction of a world to a number that must be finite."""

    def __call__(self, value: float, /, *, what: str) -> bool:
        """Return whether the step continues with its gradients."""


_finite_checks: list[FiniteCheck] = []


@contextlib.contextmanager
def use_finite_check(check: FiniteCheck) -> Iterator[None]:
    """Let ``check`` react to non-finite steps of all :class:`ExactGradients` while the block runs."""
    _finite_checks.append(check)
    try:
        yield
    finally:
        _finite_checks.remove(check)


class ExactGradients:
    """Gradients of one model that do not depend on the number of ranks.

    ::

        sums = ExactGradients(model, tree=True)
        for mb in sums.step(plan):
            x, y = mine[mb.position]
            mb.backward(loss_sum(model(x), y), weight=y.numel())
        total = sums.finish(clip=1.0)           # p.grad is the result of one rank with all microbatches
        optimizer.step()

    ``model`` is a plain module, or one wrapped by DDP or ``fully_shard``. After a change of the world, wrap it again
    and create another instance. ``group`` has the ranks that share the step; by default DDP's group, or all ranks.

    With ``tree`` every bit of loss and gradients is independent of the number of ranks. Gradients of lower precision
    are summed in ``dtype`` (``None``: in their own type). Without the tree, DDP and FSDP2 sum in the type of their
    configuration. Without the tree, FSDP2 reduces once per step and holds whole gradients until then. With
    ``reduce_every_microbatch`` it reduces after each microbatch, and holds shards.

    ``on_nonfinite`` is the reaction to a non-finite loss, or to a non-finite norm if gradients are clipped here.
    ``"fault"``: the reaction of :attr:`elastic.RecoveryPolicy.nonfinite`, or a
    :class:`~elastic.errors.NonFiniteLossError` outside a world. A function is called with the :class:`StepTotal`, and
    the norm is always computed. ``None``: no reaction. Gradients of a loss that a ``GradScaler`` has scaled may
    overflow. Then clip with the scaler instead of ``clip``: the scaler skips the step as usual.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        tree: bool = False,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = torch.float32,
        reduce_every_microbatch: bool = False,
        on_nonfinite: Callable[[StepTotal], object] | Literal["fault"] | None = "fault",
    ) -> None:
        if group is None and dist.is_initialized():
            group = model.process_group if isinstance(model, DistributedDataParallel) else dist.group.WORLD
        self._group = group
        self._tree = tree
        self._on_nonfinite = on_nonfinite
        self._reducers = _reducers(
            model, group, tree=tree, dtype=dtype, reduce_every_microbatch=reduce_every_microbatch
        )
        self._model = model
        self._share: MicrobatchShare | None = None

    def step(self, share: RankPlan | MicrobatchShare) -> Iterator[MicrobatchPass]:
        """Yield this rank's passes, and drop existing gradients.

        FSDP2's collectives need the same number of passes on all ranks. A rank with fewer microbatches runs empty
        passes first, with data of one of its microbatches.
        """
        ranks = 1 if self._group is None else self._group.size()
        if isinstance(share, RankPlan):
            share = MicrobatchShare.from_plan(share)
        if len(share.by_rank) != ranks:
            raise PolicyError(f"the microbatches are shared by {len(share.by_rank)} ranks, the group has {ranks}")
        if self._group is not None and share.rank != self._group.rank():
            raise PolicyError(f"this is rank {self._group.rank()} of the group, not {share.rank}")
        self._share = share
        self._losses_by_id: dict[int, tuple[torch.Tensor, torch.Tensor | float]] = {}
        for part in self._reducers:
            part.begin_step(share)
        least = max(part.required_passes for part in self._reducers)
        for number, microbatch in enumerate(share.passes(least, self._record_pass)):
            for part in self._reducers:
                part.before_forward(microbatch, number)
            yield microbatch
            if not microbatch.is_finished:
                raise PolicyError(f"microbatch {microbatch.id} was left without a backward")

    def finish(self, *, clip: float | None = None) -> StepTotal:
        """Sum over all ranks, divide by the global weight, and clip. Waits for the device.

        If loss or norm is not finite, ``on_nonfinite`` is called on every rank before this returns, and may raise. A
        step that all ranks skip (``RecoveryPolicy(nonfinite="skip")``) has no gradients, so an optimizer step changes
        nothing.
        """
        share = self._share
        if share is None or len(self._losses_by_id) != len(share.own_ids):
            raise PolicyError("finish() before all microbatches of step() had their backward")
        self._share = None
        if isinstance(self._model, DistributedDataParallel):
            self._model.require_backward_grad_sync = True
        losses, weights, used = self._exchange(share)
        weight = tree_sum(weights)
        if weight == 0:
            raise PolicyError(f"none of the {share.microbatches} microbatches of this step counts: all weights are 0")
        begin = 0
        for part in self._reducers:
            part.reduce(weight, used[begin : begin + len(part.parameters)])
            begin += len(part.parameters)
        found = self._norm(clip)
        total = StepTotal(tree_sum(losses) / weight, weight, found)
        if self._on_nonfinite == "fault":
            self._check(total, losses, share)
        elif self._on_nonfinite is not None and not total.is_finite:
            self._on_nonfinite(total)
        return total

    def _check(self, total: StepTotal, losses: Sequence[float], share: MicrobatchShare) -> None:
        """React to a non-finite total. All ranks have the same numbers, so they decide alike."""
        value, what = total.loss, "the loss"
        if not math.isfinite(value):
            first = next((id_ for id_, loss in enumerate(losses) if not math.isfinite(loss)), 0)
            rank = next((rank for rank, ids in enumerate(share.by_rank) if first in ids), 0)
            what = f"the loss (of microbatch {first}, which rank {rank} computed)"
        elif not total.is_finite and total.norm is not None:
            value, what = total.norm, "the norm of the gradients"
        if not _finite_checks:
            if not math.isfinite(value):
                raise NonFiniteLossError(f"{what} is not finite ({value}). ExactGradients(on_nonfinite=None) allows it")
        elif not _finite_checks[-1](value, what=what):
            for part in self._reducers:
                for parameter in part.parameters:
                    parameter.grad = None

    def _record_pass(self, microbatch: MicrobatchPass, loss: torch.Tensor, weight: torch.Tensor | float) -> None:
        if not microbatch.is_empty:
            self._losses_by_id[microbatch.id] = (loss, weight)
        for part in self._reducers:
            part.after_backward(microbatch)

    def _exchange(self, share: MicrobatchShare) -> tuple[list[float], list[float], list[bool]]:
        """Return losses and weights by microbatch, and whether each parameter has a gradient.

        One small all-reduce: for each value all ranks but one add zeros, so the order does not matter.
        """
        many = share.microbatches
        used = [flag for part in self._reducers for flag in part.has_gradient()]
        device = next((loss.device for loss, _ in self._losses_by_id.values()), self._reducers[0].parameters[0].device)
        values = torch.zeros(3 * many + len(used), dtype=torch.float64, device=device)
        for id_, (loss, weight) in self._losses_by_id.items():
            values[id_], values[many + id_], values[2 * many + id_] = loss, weight, 1
        values[3 * many :] = torch.tensor(used, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        found: list[float] = values.tolist()
        times = found[2 * many : 3 * many]
        wrong = [id_ for id_, count in enumerate(times) if count != 1]
        if wrong:
            raise PolicyError(f"the ranks do not agree who computes what: microbatches {wrong[:5]} not exactly once")
        return found[:many], found[many : 2 * many], [count > 0 for count in found[3 * many :]]

    def _norm(self, clip: float | None) -> float | None:
        if clip is None and not callable(self._on_nonfinite):
            return None
        parameters = [one for part in self._reducers for one in part.parameters]
        found = deterministic_gradient_norm(parameters) if self._tree else gradient_norm(parameters)
        if clip is not None:
            clip_gradients(parameters, found, clip)
        return found


def _reducers(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    *,
    tree: bool,
    dtype: torch.dtype | None,
    reduce_every_microbatch: bool,
) -> list[GradientReducer]:
    parameters = [one for one in model.parameters() if one.requires_grad]
    if not parameters:
        raise PolicyError("the model has no parameter that requires a gradient")
    _reject_unsupported_wrappers(model)
    if isinstance(model, DistributedDataParallel):
        if not tree:
            from elastic.gradients.ddp_reducer import DDPReducer

            return [DDPReducer(model, parameters)]

        def disable_gradient_sync() -> None:
            model.require_backward_grad_sync = False  # as no_sync() does, but over a loop's body

        return [
            ReplicatedReducer(parameters, group, tree=True, dtype=dtype, prepare=disable_gradient_sync, least_passes=1)
        ]
    sharded = [one for one in parameters if isinstance(one.data, DTensor)]
    plain = [one for one in parameters if not isinstance(one.data, DTensor)]
    parts: list[GradientReducer] = []
    if sharded:
        parts.append(
            _fsdp_reducer(
                model, sharded, group, tree=tree, dtype=dtype, reduce_every_microbatch=reduce_every_microbatch
            )
        )
    if plain:
        parts.append(ReplicatedReducer(plain, group, tree=tree, dtype=dtype))
    return parts


def _reject_unsupported_wrappers(model: nn.Module) -> None:
    """Raise :class:`PolicyError` for wrappers that would average or shard gradients separately."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without this module no module is wrapped
    for name, inside in model.named_modules():
        if fsdp is not None and isinstance(inside, fsdp.FullyShardedDataParallel):
            raise PolicyError(f"module {name!r} is wrapped by FSDP1: use fully_shard, or DDP")
        if inside is not model and isinstance(inside, DistributedDataParallel):
            raise PolicyError(f"only module {name!r} is wrapped by DDP: wrap the whole model, or no part of it")


def _fsdp_reducer(
    model: nn.Module,
    parameters: list[nn.Parameter],
    group: dist.ProcessGroup | None,
    *,
    tree: bool,
    dtype: torch.dtype | None,
    reduce_every_microbatch: bool,
) -> GradientReducer:
    from torch.distributed.fsdp import FSDPModule

    from elastic.gradients.fsdp_reducer import FSDPReducer

    modules = [one for one in model.modules() if isinstance(one, FSDPModule)]
    if group is None or not modules:
        raise PolicyError("the model has DTensor parameters that no fully_shard manages: sum their gradients yourself")
    if tree and group.size() == 1:  # FSDP2 reduces nothing on one rank: its gradients are those of one microbatch
        return ReplicatedReducer(parameters, group, tree=True, dtype=dtype)
    return FSDPReducer(
        modules, parameters, group, tree=tree, dtype=dtype, reduce_every_microbatch=reduce_every_microbatch
    )


NORM_BLOCK_ELEMENTS = 1 << 19
"""Squares per block, which stay in the CPU cache.

An accelerator uses larger blocks, or it would wait for kernel launches.
"""
ShardedDims = tuple[DeviceMesh, tuple[int, ...]]
"""A mesh, and its dimensions that shard a gradient."""


def gradient_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Return the norm of the gradients, in the summation order of torch's kernels."""
    by_spread: dict[ShardedDims | None, list[torch.Tensor]] = {}
    for gradient in _gradients(parameters):
        by_spread.setdefault(_sharded_dims(gradient), []).append(_local(gradient))
    total = 0.0
    for sharded, gradients in by_spread.items():
        norms = torch._foreach_norm(gradients)
        squares = torch.stack([norm.double() for norm in norms]).square_().sum()
        if sharded is not None:
            mesh, dimensions = sharded
            for dimension in dimensions:
                dist.all_reduce(squares, group=mesh.get_group(dimension))
        total += squares.item()
    return math.sqrt(total)


def deterministic_gradient_norm(parameters: Sequence[nn.Parameter]) -> float:
    """Return the norm of the gradients, in an order that depends only on the parameters' shapes."""
    gradients = _gradients(parameters)
    if not gradients:
        return 0.0
    heights = [len(one) if one.ndim else 1 for one in gradients]
    device = _local(gradients[0]).device
    sums = torch.zeros(sum(heights), dtype=torch.float64, device=device)
    groups: dict[ShardedDims, dist.ProcessGroup] = {}
    cut: list[tuple[ShardedDims | None, torch.Tensor]] = []
    for gradient, rows in zip(gradients, sums.split(heights), strict=True):
        sharded = _sharded_dims(gradient)
        cut.append((sharded, rows))
        begin = 0
        if sharded is not None:
            groups[sharded] = _row_group(gradient, sharded)
            begin = piece_bounds(len(rows), groups[sharded].size(), groups[sharded].rank())[0]
        own = _row_sums(_local(gradient))
        rows[begin : begin + len(own)] = own
    for sharded, group in groups.items():
        together = torch.cat([rows for one, rows in cut if one == sharded])
        dist.all_reduce(together, group=group)  # each element is zero on all ranks but one: exact in any order
        mine = [rows for one, rows in cut if one == sharded]
        for rows, whole in zip(mine, together.split([len(rows) for rows in mine]), strict=True):
            rows.copy_(whole)
    found = iter([_halve(rows.view(1, -1))[0] for _, rows in cut])
    nothing = sums.new_zeros(())
    each = [nothing if one.grad is None else next(found) for one in parameters]
    return math.sqrt(_halve(torch.stack(each).view(1, -1)).item())


def clip_gradients(parameters: Sequence[nn.Parameter], norm: float, limit: float) -> None:
    """Scale gradients to a norm of at most ``limit``, like torch's ``clip_grad_norm_`` with its 1e-6."""
    factor = limit / (norm + 1e-6)
    if factor < 1 or math.isnan(factor):
        for gradient in _gradients(parameters):
            _local(gradient).mul_(factor)


def _gradients(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [one.grad for one in parameters if one.grad is not None]


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _sharded_dims(gradient: torch.Tensor) -> ShardedDims | None:
    if not isinstance(gradient, DTensor):
        return None
    cut = tuple(dimension for dimension, one in enumerate(gradient.placements) if isinstance(one, Shard))
    return (gradient.device_mesh, cut) if cut else None


def _row_group(gradient: torch.Tensor, sharded: ShardedDims) -> dist.ProcessGroup:
    mesh, dimensions = sharded
    placements = gradient.placements if isinstance(gradient, DTensor) else ()
    if [one.dim for one in placements if isinstance(one, Shard)] != [0]:
        raise PolicyError(
            f"cannot clip a gradient with placements {placements}: a norm that does not depend on the number of ranks "
            "needs gradients sharded once, by rows. Clip without the fixed tree, or not at all"
        )
    return mesh.get_group(dimensions[0])


def _row_sums(gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row. Scalars and elements of vectors are separate rows."""
    rows = gradient.flatten(1) if gradient.ndim > 1 else gradient.view(-1, 1)
    most = NORM_BLOCK_ELEMENTS if rows.is_cpu else NORM_BLOCK_ELEMENTS * 32
    height = max(1, most // max(1, rows.shape[1]))
    wide = torch.promote_types(rows.dtype, torch.float32)
    return torch.cat([_halve(block.to(wide).square()) for block in rows.split(height)]).double()


def _halve(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum of each row, by adding its second half to its first until one number is left.

    Changes ``rows``.
    """
    while (width := rows.shape[1]) > 1:
        kept = (width + 1) // 2
        rows[:, : width - kept] += rows[:, kept:]
        rows = rows[:, :kept]
    return rows[:, 0] if rows.shape[1] else rows.new_zeros(len(rows))
