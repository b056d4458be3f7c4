"""The seam between a step and the parameters it sums gradients of: plain ones, those of DDP, those of FSDP2."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from elastic.gradients.share import Share, Slot


class Part(Protocol):
    """Parameters whose gradients are summed in one way.

    Promises every part makes:

    - ``before`` comes before the forward of a slot, ``after`` follows its backward; then autograd does as it likes.
    - After ``finish`` each ``grad`` is the sum over all microbatches of all ranks divided by ``count``, once; what an
      empty slot computed is in none of it.
    - ``begin`` forgets everything, whatever became of the step before.
    - Collectives are the same on all ranks, in the same order.
    """

    parameters: list[nn.Parameter]
    turns: int
    """Slots that every rank needs so that collectives fit together; 0 where they do not matter. Set by ``begin``."""

    def begin(self, share: Share) -> None: ...

    def before(self, slot: Slot, turn: int) -> None: ...

    def after(self, slot: Slot) -> None: ...

    def finish(self, count: float, used: list[bool]) -> None:
        """``used`` says of each parameter whether any rank saw a gradient of it."""

    def seen(self) -> list[bool]:
        """Which parameters had a gradient on this rank."""
