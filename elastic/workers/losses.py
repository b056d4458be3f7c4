"""Losses that are not finite: no rank may use one, and no step may be tried for ever.

A rank that sees one makes a fault of it, before its optimizer steps: everybody drops the step and goes back to the last
whole one. A flip of a bit is gone at the second attempt; what is in the batch or in the state is not, and then the job
ends and says so, or the step is left out by all ranks. They agree on that where they meet again after a fault, so that
asking costs no collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from elastic.errors import NonFiniteLossError, PolicyError

if TYPE_CHECKING:
    import torch

NonFinite = Literal["fault", "skip", "ignore"]
_KNOWN = ("fault", "skip", "ignore")


class Losses:
    """What this process knows of losses that were not finite, in all worlds it was in."""

    def __init__(self, how: NonFinite, tries: int, most_left_out: int) -> None:
        if how not in _KNOWN or tries < 1 or most_left_out < 0:
            raise PolicyError(
                f"nonfinite={how!r}, nonfinite_tries={tries}, nonfinite_skips={most_left_out}: the first is one of "
                f"{', '.join(_KNOWN)}, the second at least 1, the third at least 0"
            )
        self._how = how
        self._tries = tries
        self._most = most_left_out
        self.seen: dict[int, int] = {}
        """Step, and in how many worlds its loss was not finite."""
        self._agreed: frozenset[int] = frozenset()

    def meet(self, restarts: int) -> None:
        """In the groups of a new world, all ranks at once: everybody knows from here on what any of them did."""
        import torch.distributed as dist

        if self._how == "ignore" or restarts == 0 or not dist.is_initialized():
            return
        known: list[dict[int, int]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(known, self.seen)
        self.seen = {step: max(one.get(step, 0) for one in known) for step in set[int]().union(*known)}
        if self._how == "skip":
            self._agreed = frozenset(step for step, count in self.seen.items() if count >= self._tries)

    def check(
        self,
        step: int,
        loss: float | torch.Tensor,
        what: str = "the loss",
        *,
        ask: Callable[[], None] = lambda: None,
    ) -> bool:
        """Whether the step's gradients are to be used: the same answer at all ranks, or a fault that says ``what``.

        ``ask`` raises where the world is broken, and what was read of ``loss`` may be anything.
        """
        if step in self._agreed:
            return False
        is_good = self._how == "ignore" or _is_finite(loss)
        ask()
        if is_good:
            return True
        count = self.seen[step] = self.seen.get(step, 0) + 1
        what = f"{what} of step {step} is not finite ({_shown(loss)})"
        if count < self._tries:
            raise NonFiniteLossError(f"{what}; trying again")
        if self._how == "fault" or count > self._tries:  # the latter where there were no groups to agree in
            raise NonFiniteLossError(f"{what}, in {count} attempts of {self._tries} (nonfinite_tries)", final=True)
        if len(self._agreed) >= self._most:
            left_out = f"{len(self._agreed)} steps were left out before (nonfinite_skips={self._most})"
            raise NonFiniteLossError(f"{what}, in {count} attempts, and {left_out}", final=True)
        raise NonFiniteLossError(f"{what}, in {count} attempts; all ranks leave it out from here on")


def _is_finite(loss: float | torch.Tensor) -> bool:
    if isinstance(loss, int | float):
        return math.isfinite(loss)
    return bool(loss.detach().isfinite().all())


def _shown(loss: float | torch.Tensor) -> str:
    if isinstance(loss, int | float) or loss.numel() == 1:
        return f"{float(loss)}"
    return f"{int((~loss.detach().isfinite()).sum())} of {loss.numel()} values"
