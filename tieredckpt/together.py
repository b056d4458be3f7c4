"""What the ranks of one checkpointer do together: a group of their own, what each says to all, and DCP's own calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_PLAN_TIMEOUT = timedelta(minutes=10)


class Together:
    """The ranks of ``group``, of a new one where none is given, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._own = None
        if group is None and dist.is_initialized():
            # Planning must not meet the training's own collectives on one group.
            group = self._own = dist.new_group(backend="gloo", timeout=_PLAN_TIMEOUT)
        self._group = group

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group) if dist.is_initialized() else 0

    @property
    def size(self) -> int:
        return dist.get_world_size(self._group) if dist.is_initialized() else 1

    def from_all(self, text: str) -> list[str]:
        """What every rank says, in order of ranks."""
        if not dist.is_initialized():
            return [text]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, text, group=self._group)
        return gathered

    def dcp(self, call: Callable[..., object], state: dict[str, Any], **storage: object) -> None:
        """DCP's own save or load, between all ranks or, where there is no process group, in this process alone."""
        with warnings.catch_warnings():
            if alone := not dist.is_initialized():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            call(state, process_group=self._group, no_dist=alone, **storage)

    def close(self) -> None:
        if self._own is not None and dist.is_initialized():
            dist.destroy_process_group(self._own)
            self._own = None
