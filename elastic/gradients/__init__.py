"""Gradients independent of the number of ranks: exact weights, and optionally a fixed summation order.

::

    share ──> exact ──> replicated, hooked (DDP), sharded (FSDP2, HSDP) ──> exchange ──> tree
                  └──> norm
"""

from elastic.gradients.exact_gradients import ExactGradients, MicrobatchPass, StepTotal
from elastic.gradients.reduction import MicrobatchShare

__all__ = ["ExactGradients", "MicrobatchPass", "MicrobatchShare", "StepTotal"]
