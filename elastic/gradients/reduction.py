"""Gradient sums: the fixed tree, each rank's share, the exchange between ranks, replicated parameters.

::

    level 3              (3,0)                     7 microbatches. A node without a right child is its left child.
    level 2       (2,0)         (2,1)              A rank with 2, 3 and 4 holds (1,1) and (0,4): complete subtrees
    level 1    (1,0) (1,1)   (1,2) (1,3)           are summed at once, and the others wait for their siblings.
    level 0    0  1  2  3    4  5  6

Every rank owns a piece of the elements, and receives all ranks' partial sums of it. Only the owner adds them, in tree
order, so there is one result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from elastic.batch_scaling.batch_plan import RankPlan
from elastic.errors import PolicyError

T = TypeVar("T")


class TreeNode(NamedTuple):
    """Sum over the microbatches from ``position << level`` up to the next node of that level."""

    level: int
    position: int


class PartialSums(Generic[T]):
    """Sums of complete subtrees. A run of n ids has at most ``2 * log2(n) + 1`` of them."""

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._leaves = leaves
        self._depth = max(leaves - 1, 0).bit_length()
        self._add = add
        self._held: dict[TreeNode, T] = {}

    def add(self, node: TreeNode, value: T) -> None:
        """Add ``value``, the sum of ``node``, and merge it with existing siblings. May change ``value`` later."""
        level, place = node
        while level < self._depth:
            right_starts = (place | 1) << level
            if right_starts < self._leaves:
                sibling = self._held.pop(TreeNode(level, place ^ 1), None)
                if sibling is None:
                    break
                value = self._add(sibling, value) if place & 1 else self._add(value, sibling)
            level, place = level + 1, place >> 1
        self._held[TreeNode(level, place)] = value

    def add_leaf(self, id_: int, value: T) -> None:
        self.add(TreeNode(0, id_), value)

    @property
    def nodes(self) -> tuple[TreeNode, ...]:
        """Nodes in the order of their microbatch ids."""
        return tuple(sorted(self._held, key=lambda node: node.position << node.level))

    def values(self) -> list[T]:
        return [self._held[node] for node in self.nodes]

    @property
    def root(self) -> T:
        """Sum of all leaves. Raises ``KeyError`` while leaves are missing."""
        return self._held[TreeNode(self._depth, 0)]


def complete_subtrees(ids: Iterable[int], leaves: int) -> tuple[TreeNode, ...]:
    """Return the nodes that remain when the sums of ``ids`` are merged as far as possible."""
    partials = PartialSums[bool](leaves, lambda *_: True)
    for id_ in ids:
        partials.add_leaf(id_, True)
    return partials.nodes


def tree_sum(values: Sequence[float]) -> float:
    """Return the sum of one number per microbatch, in tree order."""
    partials = PartialSums[float](len(values), lambda left, right: left + right)
    for id_, value in enumerate(values):
        partials.add_leaf(id_, value)
    return partials.root


RecordPass = Callable[["MicrobatchPass", torch.Tensor, "torch.Tensor | float"], None]


class MicrobatchPass:
    """One forward and backward pass of this rank."""

    def __init__(self, id: int, position: int, *, is_empty: bool, is_last: bool, record: RecordPass) -> None:  # noqa: A002
        self.id = id
        """Id of the microbatch to compute with."""
        self.position = position
        """Index of that microbatch among this rank's own microbatches."""
        self.is_empty = is_empty
        """Whether the pass has no weight: it only matches the collectives of ranks with more microbatches."""
        self.is_last = is_last
        self.is_finished = False
        self._record = record

    def backward(self, loss: torch.Tensor, *, weight: torch.Tensor | float) -> None:
        """Run the backward pass. ``loss`` is a sum, not a mean, over ``weight`` samples or tokens."""
        if self.is_finished:
            raise PolicyError(f"backward was called twice for microbatch {self.id}")
        torch.autograd.backward([loss], [torch.zeros_like(loss)] if self.is_empty else None)
        self._record(self, loss.detach(), weight)
        self.is_finished = True


@dataclasses.dataclass(frozen=True)
class MicrobatchShare:
    """Microbatches 0 … M-1 of a step by rank, each rank's in the order of its passes."""

    by_rank: tuple[tuple[int, ...], ...]
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.by_rank):
            raise PolicyError(f"rank {self.rank} is not one of the {len(self.by_rank)} ranks that share the step")
        if not self.microbatches or sorted(id_ for ids in self.by_rank for id_ in ids) != [*range(self.microbatches)]:
            raise PolicyError(
                f"the ranks' microbatches {self.by_rank} are not 0 to {self.microbatches - 1}, each of them once"
            )

    @classmethod
    def contiguous(cls, quotas: Sequence[int], rank: int) -> MicrobatchShare:
        """Return a share of consecutive runs: ``quotas[R]`` microbatches for rank R."""
        by_rank, first = [], 0
        for quota in quotas:
            by_rank.append((*range(first, first + quota),))
            first += quota
        return cls((*by_rank,), rank)

    @classmethod
    def even(cls, microbatches: int, ranks: int, rank: int) -> MicrobatchShare:
        """Return a share of consecutive runs whose lengths differ by at most one."""
        least, more = divmod(microbatches, ranks)
        return cls.contiguous([least + (one < more) for one in range(ranks)], rank)

    @classmethod
    def from_plan(cls, plan: RankPlan) -> MicrobatchShare:
        """Return the share of a :class:`~elastic.batch_scaling.batch_plan.RankPlan`."""
        return cls.even(plan.batch_plan.microbatch_count, plan.batch_plan.world_size, plan.rank)

    @classmethod
    def round_robin(cls, microbatches: int, ranks: int, rank: int) -> MicrobatchShare:
        """Return a share that deals microbatches round-robin.

        With it FSDP2 holds the fewest sums for the fixed tree.
        """
        return cls((*((*range(one, microbatches, ranks),) for one in range(ranks)),), rank)

    @functools.cached_property
    def microbatches(self) -> int:
        return sum(map(len, self.by_rank))

    @property
    def own_ids(self) -> tuple[int, ...]:
        return self.by_rank[self.rank]

    @functools.cached_property
    def max_per_rank(self) -> int:
        """Largest number of microbatches of any rank."""
        return max(map(len, self.by_rank))

    def id_of_pass(self, rank: int, number: int, passes: int) -> int | None:
        """Return the microbatch of ``rank`` in pass ``number``; ``None`` for an empty pass.

        Empty passes come first.
        """
        ids = self.by_rank[rank]
        position = number - (passes - len(ids))
        return ids[position] if position >= 0 else None

    def passes(self, least: int, record: RecordPass) -> Iterator[MicrobatchPass]:
        """Yield this rank's passes: at least ``least``, and at least one for each of its microbatches."""
        ids = self.own_ids
        empty = max(least - len(ids), 0)
        for number in range(empty + len(ids)):
            position = max(number - empty, 0)
            yield MicrobatchPass(
                ids[position] if ids else 0,
                position,
                is_empty=number < empty,
                is_last=number == empty + len(ids) - 1,
                record=record,
            )


TreeNodesByRank = Sequence[Sequence[TreeNode]]


def piece_bounds(count: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the bounds of the elements that a rank owns. The last ranks may own fewer, or none."""
    piece = -(-count // ranks)
    return min(rank * piece, count), min((rank + 1) * piece, count)


def add_in_place(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)


def reduce_own_piece(mine: torch.Tensor, nodes: TreeNodesByRank, leaves: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over all ranks of the elements that this rank owns.

    ``mine`` has a row for each of this rank's nodes. The rank sends all of it except its own piece. With one node per
    rank this is the traffic of a reduce-scatter; with two nodes, twice that.
    """
    ranks, rank = group.size(), group.rank()
    count = mine.shape[1]
    pieces = [piece_bounds(count, ranks, owner) for owner in range(ranks)]
    outgoing = torch.cat([mine[:, begin:end].reshape(-1) for begin, end in pieces])
    own = pieces[rank][1] - pieces[rank][0]
    sizes = [len(held) * own for held in nodes]
    incoming = mine.new_empty(sum(sizes))
    dist.all_to_all_single(incoming, outgoing, sizes, [len(mine) * (end - begin) for begin, end in pieces], group=group)
    del outgoing
    partials = PartialSums[torch.Tensor](leaves, add_in_place)
    for held, block in zip(nodes, incoming.split(sizes), strict=True):
        for node, value in zip(held, block.view(len(held), own), strict=True):
            partials.add(node, value)
    return partials.root


def tree_all_reduce(mine: torch.Tensor, nodes: TreeNodesByRank, leaves: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum over all ranks of all elements, on every rank."""
    count = mine.shape[1]
    piece = piece_bounds(count, group.size(), 0)[1]
    own = reduce_own_piece(mine, nodes, leaves, group)
    padded = mine.new_zeros(piece)
    padded[: len(own)] = own
    result = mine.new_empty(piece * group.size())
    all_gather_tensor(result, padded, group)
    return result[:count]


def all_gather_tensor(into: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Gather with the newer function of torch if it exists: the older one warns there."""
    gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(into, part, group=group)


def reduce_scatter_sum(into: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum and scatter in the backend's own order."""
    reduce: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce(into, whole, op=dist.ReduceOp.SUM, group=group)


class GradientReducer(Protocol):
    """Reducer of parameters whose gradients are summed in one way.

    Every implementation guarantees:

    - ``before_forward`` comes before the forward of a pass, ``after_backward`` follows its backward.
    - After ``reduce`` each ``grad`` is the sum over all microbatches of all ranks divided by ``count``. Empty passes do
      not contribute.
    - ``begin_step`` drops all state of the step before, even if that failed.
    - Collectives are the same on all ranks, in the same order.
    """

    parameters: list[nn.Parameter]
    required_passes: int
    """Passes that every rank needs to match the collectives; 0 if their number does not matter."""

    def begin_step(self, share: MicrobatchShare) -> None: ...

    def before_forward(self, microbatch: MicrobatchPass, number: int) -> None: ...

    def after_backward(self, microbatch: MicrobatchPass) -> None: ...

    def reduce(self, count: float, used: list[bool]) -> None:
        """Sum the gradients over all ranks. ``used``: for each parameter, whether any rank had a gradient."""

    def has_gradient(self) -> list[bool]:
        """Return for each parameter whether it had a gradient on this rank."""


GradientList = list[torch.Tensor]
EXCHANGE_WINDOW_BYTES = 8 << 20
"""Bytes of each partial sum that are exchanged at a time."""
MIN_PIECE_BYTES = 64 << 10
"""Bytes of it for one rank; with very many ranks, windows are larger."""


class ReplicatedReducer:
    """Reducer of replicated parameters, with the fixed tree or without it.

    Without it, autograd sums within the rank.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        tree: bool,
        dtype: torch.dtype | None,
        prepare: Callable[[], object] = lambda: None,
        least_passes: int = 0,
    ) -> None:
        self.parameters = list(parameters)
        self.required_passes = least_passes
        self._group = group
        self._tree = tree
        self._dtype = dtype
        self._prepare = prepare

    def begin_step(self, share: MicrobatchShare) -> None:
        self._share = share
        self._partials = PartialSums[GradientList](share.microbatches, _add)
        self._wide_sums: dict[int, torch.Tensor] = {}
        self._has_gradient = [
            isinstance(one.data, DTensor) for one in self.parameters
        ]  # FSDP2 on several ranks reports all of them
        _clear_gradients(self.parameters)

    def before_forward(self, microbatch: MicrobatchPass, number: int) -> None:
        self._prepare()

    def after_backward(self, microbatch: MicrobatchPass) -> None:
        if microbatch.is_empty:
            _clear_gradients(self.parameters)
            return
        self._has_gradient = [
            seen or one.grad is not None for seen, one in zip(self._has_gradient, self.parameters, strict=True)
        ]
        if self._tree:
            self._partials.add_leaf(microbatch.id, [self._take_gradient(one) for one in self.parameters])
        else:
            self._add_wide()

    def has_gradient(self) -> list[bool]:
        return self._has_gradient

    def reduce(self, count: float, used: list[bool]) -> None:
        sums = self._all_ranks()
        for parameter, gradient, is_used in zip(self.parameters, sums, used, strict=True):
            if is_used:
                is_sharded = isinstance(parameter.data, DTensor)  # FSDP2 rounds before the count is known
                total = gradient.to(parameter.dtype) if is_sharded else gradient
                total.div_(torch.tensor(count, dtype=total.dtype, device=total.device))
                parameter.grad = _like(parameter, total.to(parameter.dtype))
        self._partials = PartialSums(self._share.microbatches, _add)
        self._wide_sums = {}

    def _add_wide(self) -> None:
        """Sum in the wider type: autograd would add in the gradient's own type."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and parameter.grad.dtype != self._sum_dtype(parameter.grad.dtype):
                found = self._take_gradient(parameter)
                self._wide_sums[index] = self._wide_sums[index].add_(found) if index in self._wide_sums else found

    def _take_gradient(self, parameter: nn.Parameter) -> torch.Tensor:
        """Take the gradient of one microbatch, or zeros if it is missing: another rank may have one."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return torch.zeros_like(_local(parameter.detach()), dtype=self._sum_dtype(parameter.dtype))
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        gradient = _local(gradient)
        return gradient.to(self._sum_dtype(gradient.dtype)).contiguous()

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self._dtype is None else torch.promote_types(dtype, self._dtype)

    def _plain_sum(self) -> GradientList:
        return [
            self._wide_sums[i] if i in self._wide_sums else self._take_gradient(one)
            for i, one in enumerate(self.parameters)
        ]

    def _all_ranks(self) -> GradientList:
        share = self._share
        mine = self._partials.values() if self._tree else [self._plain_sum()]
        into = mine[0] if mine else [self._take_gradient(one) for one in self.parameters]
        if self._group is None or self._group.size() == 1:
            return [one.add_(0.0) for one in into]
        nodes = [complete_subtrees(ids, share.microbatches) for ids in share.by_rank] if self._tree else []
        for same in _group_by_kind(into):
            rows = [[one[index].view(-1) for index in same] for one in mine]
            target = [into[index].view(-1) for index in same]
            most = max(EXCHANGE_WINDOW_BYTES, MIN_PIECE_BYTES * self._group.size()) // target[0].element_size()
            for window in _windows([len(one) for one in target], most):
                size = sum(end - begin for _, begin, end in window)
                flat = target[0].new_empty(len(rows), size)
                for row, into_row in zip(rows, flat, strict=True):
                    torch.cat([row[index][begin:end] for index, begin, end in window], out=into_row)
                if self._tree:
                    result = tree_all_reduce(flat, nodes, share.microbatches, self._group)
                else:
                    result = flat[0]
                    dist.all_reduce(result, group=self._group)
                for (index, begin, end), found in zip(
                    window, result.split([end - begin for _, begin, end in window]), strict=True
                ):
                    target[index][begin:end] = found
        return [one.add_(0.0) for one in into]  # turns -0 into 0: some sums with zeros yield -0


def _add(left: GradientList, right: GradientList) -> GradientList:
    torch._foreach_add_(left, right)
    return left


def _clear_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Return ``gradient`` as a DTensor if the parameter is one."""
    data = parameter.data
    if not isinstance(data, DTensor):
        return gradient
    return DTensor.from_local(
        gradient, data.device_mesh, data.placements, run_check=False, shape=data.shape, stride=data.stride()
    )


def _group_by_kind(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the indices of tensors that may share one buffer."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, one in enumerate(tensors):
        kinds.setdefault((one.dtype, one.device), []).append(index)
    return list(kinds.values())


def _windows(sizes: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Split ``sizes`` into windows of at most ``most`` elements, as (index, begin, end)."""
    window: list[tuple[int, int, int]] = []
    room = most
    for index, size in enumerate(sizes):
        begin = 0
        while begin < size:
            end = min(size, begin + room)
            window.append((index, begin, end))
            room, begin = room - (end - begin), end
            if not room:
                yield window
                window, room = [], most
    if window:
        yield window
