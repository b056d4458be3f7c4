"""Reducer for FSDP2 and HSDP with a custom reduce-scatter, plain or in tree order.

FSDP2 calls the reduce-scatter once per group and backward pass, and stores its result as gradient. Until the last pass
that result is zero, and this module holds the sums of the rank's own piece::

    pass 0   microbatches 0 4 8    all-to-all    each rank: its piece of 0, 4 and 8, summed as far as the tree allows
    pass 1                1 5 9    ──────────>              its piece of 1, 5 and 9
    ...                                                     the root, into FSDP2's gradient

HSDP adds one exchange of the replicas' sums, before the last pass ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from elastic.errors import PolicyError
from elastic.gradients.reduction import (
    MicrobatchPass,
    MicrobatchShare,
    PartialSums,
    add_in_place,
    complete_subtrees,
    piece_bounds,
    reduce_own_piece,
    reduce_scatter_sum,
)

_REQUIRED_METHODS = ("set_custom_reduce_scatter", "set_gradient_divide_factor", "set_force_sum_reduction_for_comms")


@dataclasses.dataclass
class PassState:
    """Current pass of the step, shared by all groups."""

    share: MicrobatchShare
    microbatch: MicrobatchPass
    passes: int
    number: int


@dataclasses.dataclass(frozen=True)
class ShardTopology:
    """Ranks that a group of parameters is sharded over.

    Ranks are numbered as in the share; ``replicas`` has one list per replica, in shard order.
    """

    replicas: tuple[tuple[int, ...], ...]
    replica: int
    replica_group: dist.ProcessGroup | None
    """Ranks with the same shard in all replicas."""


class FSDPReducer:
    """Reducer for all groups of a model that FSDP2 manages."""

    def __init__(
        self,
        modules: Sequence[FSDPModule],
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        tree: bool,
        dtype: torch.dtype | None,
        reduce_every_microbatch: bool,
    ) -> None:
        self.parameters = list(parameters)
        self._modules = modules
        self._tree = tree
        self._reduce_every_microbatch = reduce_every_microbatch or tree
        self._scatters: list[SumReduceScatter | TreeReduceScatter] = []
        missing = [name for name in _REQUIRED_METHODS if not hasattr(FSDPModule, name)]
        if missing:
            raise PolicyError(
                f"this torch ({torch.__version__}) has no FSDPModule.{missing[0]}: use DDP, or a newer one"
            )
        for module in modules:
            own = _own_parameters(module)
            if not own:
                continue
            sum_dtype = own[0].dtype if dtype is None else torch.promote_types(own[0].dtype, dtype)
            scatter = TreeReduceScatter(_topology(own[0], group), sum_dtype) if tree else SumReduceScatter()
            self._scatters.append(scatter)
            _install(module, scatter)

    def begin_step(self, share: MicrobatchShare) -> None:
        self.required_passes = share.max_per_rank
        self._share = share
        self._clear_gradients()
        for scatter in self._scatters:
            scatter.begin(share)

    def before_forward(self, microbatch: MicrobatchPass, number: int) -> None:
        state = PassState(self._share, microbatch, self.required_passes, number)
        for scatter in self._scatters:
            scatter.current_pass = state
        for module in self._modules:
            module.set_requires_gradient_sync(self._reduce_every_microbatch or microbatch.is_last, recurse=False)
            module.set_requires_all_reduce(microbatch.is_last, recurse=False)

    def after_backward(self, microbatch: MicrobatchPass) -> None:
        if self._tree and not microbatch.is_last:
            self._clear_gradients()

    def has_gradient(self) -> list[bool]:
        """Return True for every parameter: FSDP2 reduces zeros for unused ones and does not report them."""
        return [True] * len(self.parameters)

    def reduce(self, count: float, used: list[bool]) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_gradient(parameter.grad)
            gradient.div_(torch.tensor(count, dtype=gradient.dtype, device=gradient.device))

    def _clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def local_gradient(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _own_parameters(module: FSDPModule) -> list[DTensor]:
    """Return the parameters of this module's own group, without those of nested FSDP2 modules."""
    found: list[DTensor] = []
    remaining: list[nn.Module] = [module]  # type: ignore[list-item]  # FSDPModule is mixed into nn.Module
    while remaining:
        one = remaining.pop()
        found += [own.data for own in one.parameters(recurse=False) if isinstance(own.data, DTensor)]
        remaining += [child for child in one.children() if not isinstance(child, FSDPModule)]
    return found


def _topology(parameter: DTensor, group: dist.ProcessGroup) -> ShardTopology:
    """Return the topology of a parameter on a mesh over all ranks of ``group``.

    The mesh has one dimension (FSDP), or two (HSDP: replicas, shards).
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    shards = [isinstance(one, Shard) for one in placements]
    plain = all(isinstance(one, (Shard, Replicate)) for one in placements) and len(placements) <= 2
    if not plain or shards not in ([True], [False, True]) or mesh.size() != group.size():
        raise PolicyError(
            f"the fixed tree needs FSDP2 or HSDP over all {group.size()} ranks of the group, without other "
            f"parallelism. This model has placements {placements} on a mesh of {mesh.size()} ranks"
        )
    index = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(group))}
    grid = mesh.mesh.view(-1, mesh.size(mesh.ndim - 1)).tolist()
    if len(grid) > 1 and len(grid[0]) == 1:
        raise PolicyError(f"{len(grid)} replicas of one shard each: use DDP, or fully_shard over one dimension")
    replicas = tuple(tuple(index[rank] for rank in row) for row in grid)
    across = mesh.get_group(0) if len(grid) > 1 else None
    return ShardTopology(replicas, mesh.get_coordinate()[0] if across else 0, across)  # type: ignore[index]


def _install(module: FSDPModule, scatter: SumReduceScatter | TreeReduceScatter) -> None:
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    try:
        module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]  # its base class is not public
    except ValueError as error:
        raise PolicyError(str(error)) from error
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)


class SumReduceScatter:
    """Reduce-scatter that leaves out the gradients of empty passes."""

    current_pass: PassState

    def begin(self, share: MicrobatchShare) -> None: ...

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT002 - as FSDP2 calls it
    ) -> None:
        if self.current_pass.microbatch.is_empty:
            input_tensor.zero_()
        reduce_scatter_sum(output_tensor, input_tensor, group)


class TreeReduceScatter(SumReduceScatter):
    """Reduce-scatter in the order of the tree."""

    def __init__(self, groups: ShardTopology, dtype: torch.dtype) -> None:
        self._topology = groups
        self._dtype = dtype

    def begin(self, share: MicrobatchShare) -> None:
        self._partials = PartialSums[torch.Tensor](share.microbatches, add_in_place)
        self._done = -1  # index of the last pass

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # noqa: FBT002 - as FSDP2 calls it
    ) -> None:
        current = self.current_pass
        if self._done == current.number:
            raise PolicyError(
                "a module that fully_shard wraps was run twice in one forward: the fixed tree needs one reduction per "
                "microbatch; wrap the module around both uses"
            )
        if input_tensor.dtype != self._dtype:
            raise PolicyError(
                f"FSDP2 reduces these gradients as {input_tensor.dtype}, the fixed tree sums {self._dtype}: give "
                f"fully_shard a MixedPrecisionPolicy with reduce_dtype={self._dtype}"
            )
        self._done = current.number
        incoming = torch.empty_like(input_tensor)
        dist.all_to_all_single(incoming, input_tensor, group=group)
        self._add_pieces(incoming.view(group.size(), -1))
        output_tensor.zero_()
        if current.microbatch.is_last:
            self._write_root(output_tensor)

    def _add_pieces(self, pieces: torch.Tensor) -> None:
        current = self.current_pass
        for rank, piece in zip(self._topology.replicas[self._topology.replica], pieces, strict=True):
            id_ = current.share.id_of_pass(rank, current.number, current.passes)
            if id_ is not None:
                self._partials.add_leaf(id_, piece.clone())

    def _write_root(self, output: torch.Tensor) -> None:
        """Write the root into ``output``.

        With replicas, each one writes its own piece among zeros, so that FSDP2's all-reduce adds only zeros to it.
        """
        share, groups = self.current_pass.share, self._topology
        if groups.replica_group is None:
            output.copy_(self._partials.root)
        else:
            nodes = [
                complete_subtrees((id_ for rank in ranks for id_ in share.by_rank[rank]), share.microbatches)
                for ranks in groups.replicas
            ]
            values = self._partials.values()
            mine = torch.stack(values) if values else output.new_empty(0, len(output))
            begin, end = piece_bounds(len(output), len(nodes), groups.replica)
            output[begin:end] = reduce_own_piece(mine, nodes, share.microbatches, groups.replica_group)
        output.add_(0.0)  # turns -0 into 0: some sums with zeros yield -0
        self._partials = PartialSums(share.microbatches, add_in_place)
