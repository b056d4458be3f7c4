"""Reducer that sums DDP's buckets instead of averaging them.

DDP reads the annotations of the hook, so this module does not postpone them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic.gradients.reduction import MicrobatchPass, MicrobatchShare


class DDPReducer:
    """Reducer with one all-reduce per step, which overlaps the backward pass.

    A rank without a microbatch adds zeros.
    """

    required_passes = 1

    def __init__(self, module: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._module = module
        # DDP's C++ reducer holds the state of the hook, where the garbage collector does not see it. If that state
        # referred to the module, the module would never be freed.
        self._sums = _HookState(module.process_group)
        module.register_comm_hook(self._sums, _sum)

    def begin_step(self, share: MicrobatchShare) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def before_forward(self, microbatch: MicrobatchPass, number: int) -> None:
        self._sums.empty = microbatch.is_empty
        self._module.require_backward_grad_sync = microbatch.is_last  # as no_sync() does, but over a loop's body

    def after_backward(self, microbatch: MicrobatchPass) -> None:
        """Do nothing: DDP's hook has reduced the gradients."""

    def has_gradient(self) -> list[bool]:
        return [one.grad is not None for one in self.parameters]

    def reduce(self, count: float, used: list[bool]) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                gradient = parameter.grad
                gradient.div_(torch.tensor(count, dtype=gradient.dtype, device=gradient.device))


class _HookState:
    """State of the hook: the group, and whether this rank adds zeros."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.empty = False


def _sum(sums: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    if sums.empty:
        buffer.zero_()
    work = dist.all_reduce(buffer, group=sums.group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
