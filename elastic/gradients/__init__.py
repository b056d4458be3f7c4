"""Gradients independent of the number of ranks: exact weights, and optionally a fixed sum order.

::

    exact_gradients ──> ddp_reducer (DDP), fsdp_reducer (FSDP2, HSDP) ──> reduction
"""

from elastic.gradients.exact_gradients import ExactGradients, StepTotal
from elastic.gradients.reduction import MicrobatchPass, MicrobatchShare

__all__ = ["ExactGradients", "MicrobatchPass", "MicrobatchShare", "StepTotal"]
