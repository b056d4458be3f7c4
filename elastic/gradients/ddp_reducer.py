"""DDP's buckets summed instead of averaged.

DDP reads the hook's annotations, so they are not postponed here.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic.gradients.reduction import MicrobatchShare, MicrobatchSlot


class DDPReducer:
    """One all-reduce per step, overlapped with the backward. A rank with no microbatch takes part with zeros."""

    required_passes = 1

    def __init__(self, module: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._module = module
        # The reducer's hold of it is no collector's to see: were the module in reach of it, it would never be freed.
        self._sums = _Sums(module.process_group)
        module.register_comm_hook(self._sums, _sum)

    def begin_step(self, share: MicrobatchShare) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def before_forward(self, slot: MicrobatchSlot, turn: int) -> None:
        self._sums.empty = slot.id is None
        self._module.require_backward_grad_sync = slot.is_last  # as no_sync() does, over a loop's body

    def after_backward(self, slot: MicrobatchSlot) -> None:
        """The reducer has done it."""

    def has_gradient(self) -> list[bool]:
        return [one.grad is not None for one in self.parameters]

    def reduce(self, count: float, used: list[bool]) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                gradient = parameter.grad
                gradient.div_(torch.tensor(count, dtype=gradient.dtype, device=gradient.device))


class _Sums:
    """What the reducer sums over, and whether this rank has anything to add."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.empty = False


def _sum(sums: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    if sums.empty:
        buffer.zero_()
    work = dist.all_reduce(buffer, group=sums.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
