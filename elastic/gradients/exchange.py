"""Partial sums of several ranks become one sum, in the order of the tree.

Every rank owns a piece of the elements and is sent all ranks' partial sums of it. It adds them as the tree says; nobody
else does, so there is one result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from elastic.gradients.tree import Node, Partials

NodesByRank = Sequence[Sequence[Node]]


def bounds(count: int, ranks: int, rank: int) -> tuple[int, int]:
    """The elements that a rank owns. The last ranks may own fewer, or none."""
    piece = -(-count // ranks)
    return min(rank * piece, count), min((rank + 1) * piece, count)


def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)


def own_sum(mine: torch.Tensor, nodes: NodesByRank, leaves: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole sum of the elements that this rank owns.

    ``mine`` has a row for each of this rank's nodes. What is sent is all of it but the own piece: where a rank holds
    one node that is what a reduce-scatter sends, with two it is twice that.
    """
    ranks, rank = group.size(), group.rank()
    count = mine.shape[1]
    pieces = [bounds(count, ranks, owner) for owner in range(ranks)]
    outgoing = torch.cat([mine[:, begin:end].reshape(-1) for begin, end in pieces])
    own = pieces[rank][1] - pieces[rank][0]
    sizes = [len(held) * own for held in nodes]
    incoming = mine.new_empty(sum(sizes))
    dist.all_to_all_single(incoming, outgoing, sizes, [len(mine) * (end - begin) for begin, end in pieces], group=group)
    del outgoing
    partials = Partials[torch.Tensor](leaves, add)
    for held, block in zip(nodes, incoming.split(sizes), strict=True):
        for node, value in zip(held, block.view(len(held), own), strict=True):
            partials.put(node, value)
    return partials.root


def whole_sum(mine: torch.Tensor, nodes: NodesByRank, leaves: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The same for all elements, on every rank."""
    count = mine.shape[1]
    piece = bounds(count, group.size(), 0)[1]
    own = own_sum(mine, nodes, leaves, group)
    padded = mine.new_zeros(piece)
    padded[: len(own)] = own
    result = mine.new_empty(piece * group.size())
    all_gather(result, padded, group)
    return result[:count]


def all_gather(into: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """By its new name where it has one; the old one warns there."""
    gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(into, part, group=group)


def reduce_scatter(into: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The sum, in whatever order the backend likes."""
    reduce: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    reduce(into, whole, op=dist.ReduceOp.SUM, group=group)
