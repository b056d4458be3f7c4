"""Which samples a rank works on, so that each comes once per data epoch, whatever happens to the ranks.

::

    permutation ──> order ──> course ──> feed ──> lines ──> loader
     of a range    (seed,     steps,     this     worker    steps and
                   epoch)     cursor     rank's   processes microbatches

"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.samples.course import Course, Place
from elastic.samples.errors import CursorError, StepError, WorkersLostError
from elastic.samples.ledger import Journal, Ledger
from elastic.samples.order import Order
from elastic.samples.shares import PlanShares, Shares

if TYPE_CHECKING:
    from elastic.samples.loader import ElasticDataLoader
    from elastic.samples.sampler import ElasticSampler
    from elastic.samples.seeds import generator, seeded

__all__ = [
    "Course",
    "CursorError",
    "ElasticDataLoader",
    "ElasticSampler",
    "Journal",
    "Ledger",
    "Order",
    "Place",
    "PlanShares",
    "Shares",
    "StepError",
    "WorkersLostError",
    "generator",
    "seeded",
]

_LAZY = {
    "ElasticDataLoader": "elastic.samples.loader",
    "ElasticSampler": "elastic.samples.sampler",
    "generator": "elastic.samples.seeds",
    "seeded": "elastic.samples.seeds",
}


if not TYPE_CHECKING:  # a checker that saw it would take any name for one of this package's

    def __getattr__(name: str) -> object:
        """Import what needs torch only when it is asked for: whoever only plans does not."""
        if name in _LAZY:
            from importlib import import_module

            return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
