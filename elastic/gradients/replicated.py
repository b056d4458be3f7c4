"""Parameters of which every rank has all: gradients stay on the rank until the step ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from elastic.gradients.exchange import whole_sum
from elastic.gradients.share import Share, Slot
from elastic.gradients.tree import Partials, held

Gradients = list[torch.Tensor]
WINDOW_BYTES = 8 << 20
"""Of each partial sum, what is under way at a time."""
LEAST_BYTES = 64 << 10
"""Of it, what one rank is sent; with very many ranks windows are larger."""


class Replicated:
    """With the fixed tree, or without: then what autograd adds up is the rank's sum."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        *,
        tree: bool,
        dtype: torch.dtype | None,
        prepare: Callable[[], object] = lambda: None,
        least_turns: int = 0,
    ) -> None:
        self.parameters = list(parameters)
        self.turns = least_turns
        self._group = group
        self._tree = tree
        self._dtype = dtype
        self._prepare = prepare

    def begin(self, share: Share) -> None:
        self._share = share
        self._partials = Partials[Gradients](share.microbatches, _add)
        self._wide: dict[int, torch.Tensor] = {}
        self._seen = [isinstance(one.data, DTensor) for one in self.parameters]  # as FSDP2 has it on several ranks
        _drop(self.parameters)

    def before(self, slot: Slot, turn: int) -> None:
        self._prepare()

    def after(self, slot: Slot) -> None:
        if slot.id is None:
            _drop(self.parameters)
            return
        self._seen = [seen or one.grad is not None for seen, one in zip(self._seen, self.parameters, strict=True)]
        if self._tree:
            self._partials.leaf(slot.id, [self._take(one) for one in self.parameters])
        else:
            self._widen()

    def seen(self) -> list[bool]:
        return self._seen

    def finish(self, count: float, used: list[bool]) -> None:
        sums = self._all_ranks()
        for parameter, gradient, there in zip(self.parameters, sums, used, strict=True):
            if there:
                early = isinstance(parameter.data, DTensor)  # FSDP2 rounds before anybody knows the count
                total = gradient.to(parameter.dtype) if early else gradient
                total.div_(torch.tensor(count, dtype=total.dtype, device=total.device))
                parameter.grad = _like(parameter, total.to(parameter.dtype))
        self._partials = Partials(self._share.microbatches, _add)
        self._wide = {}

    def _widen(self) -> None:
        """Autograd adds up by itself, but in the gradient's own type."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and parameter.grad.dtype != self._sum_dtype(parameter.grad.dtype):
                found = self._take(parameter)
                self._wide[index] = self._wide[index].add_(found) if index in self._wide else found

    def _take(self, parameter: nn.Parameter) -> torch.Tensor:
        """The gradient of one microbatch. One that is missing is zeros: what is absent here may not be elsewhere."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return torch.zeros_like(_local(parameter.detach()), dtype=self._sum_dtype(parameter.dtype))
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        gradient = _local(gradient)
        return gradient.to(self._sum_dtype(gradient.dtype)).contiguous()

    def _sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self._dtype is None else torch.promote_types(dtype, self._dtype)

    def _plain_sum(self) -> Gradients:
        return [self._wide[i] if i in self._wide else self._take(one) for i, one in enumerate(self.parameters)]

    def _all_ranks(self) -> Gradients:
        share = self._share
        mine = self._partials.values() if self._tree else [self._plain_sum()]
        into = mine[0] if mine else [self._take(one) for one in self.parameters]
        if self._group is None or self._group.size() == 1:
            return [one.add_(0.0) for one in into]
        nodes = [held(ids, share.microbatches) for ids in share.by_rank] if self._tree else []
        for same in _alike(into):
            rows = [[one[index].view(-1) for index in same] for one in mine]
            target = [into[index].view(-1) for index in same]
            most = max(WINDOW_BYTES, LEAST_BYTES * self._group.size()) // target[0].element_size()
            for window in _windows([len(one) for one in target], most):
                size = sum(end - begin for _, begin, end in window)
                flat = target[0].new_empty(len(rows), size)
                for row, into_row in zip(rows, flat, strict=True):
                    torch.cat([row[index][begin:end] for index, begin, end in window], out=into_row)
                if self._tree:
                    result = whole_sum(flat, nodes, share.microbatches, self._group)
                else:
                    result = flat[0]
                    dist.all_reduce(result, group=self._group)
                for (index, begin, end), found in zip(
                    window, result.split([end - begin for _, begin, end in window]), strict=True
                ):
                    target[index][begin:end] = found
        return [one.add_(0.0) for one in into]  # -0 is what some ways of adding nothing leave of it


def _add(left: Gradients, right: Gradients) -> Gradients:
    torch._foreach_add_(left, right)
    return left


def _drop(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Of a DTensor on one rank, a DTensor again."""
    data = parameter.data
    if not isinstance(data, DTensor):
        return gradient
    return DTensor.from_local(
        gradient, data.device_mesh, data.placements, run_check=False, shape=data.shape, stride=data.stride()
    )


def _alike(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Indices of tensors that may be in one buffer."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, one in enumerate(tensors):
        kinds.setdefault((one.dtype, one.device), []).append(index)
    return list(kinds.values())


def _windows(sizes: Sequence[int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """``sizes`` cut into buffers of at most ``most`` elements: which one, from where, to where."""
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
