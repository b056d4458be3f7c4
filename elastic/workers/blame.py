"""Whether an error is a rank's own, or what it sees of another one's end."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from elastic.world.consequences import names_another
from tieredckpt.errors import TieredCheckpointError

_KINDS = (dist.DistError, ConnectionError, TieredCheckpointError)
_DEEP = 20


def may_be_a_consequence(error: BaseException) -> bool:
    """Whether this could come of the loss of another rank. Then it is worth a moment to hear whether one was lost."""
    return any(_looks_so(one) for one in causes(error))


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it came of."""
    waiting, seen = [error], set[int]()
    while waiting and len(seen) < _DEEP:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, CheckpointException):
            waiting += [failure for failure, _ in one.failures.values()]
        waiting += [other for other in (one.__cause__, one.__context__) if other is not None]


def _looks_so(error: BaseException) -> bool:
    if isinstance(error, _KINDS):
        return True
    return isinstance(error, RuntimeError) and names_another(str(error))
