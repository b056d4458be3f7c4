"""Gradients that do not depend on who computed them: exact weights, and a sum in a fixed order where it is asked for.

::

    share ──> exact ──> replicated, hooked (DDP), sharded (FSDP2, HSDP) ──> exchange ──> tree
                  └──> norm

"""

from elastic.gradients.exact import ExactGradients, Microbatch, Total
from elastic.gradients.share import Share

__all__ = ["ExactGradients", "Microbatch", "Share", "Total"]
