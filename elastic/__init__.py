"""Training that goes on when the world changes: any number of ranks, the same batch, no sample lost.

::

    cli ──> control ──> world          who is in the job (never imports torch)
    workers ──> control                a rank's loop through the worlds
    batch ──> samples, gradients       who computes what of a step, in which order, and its exact sum
    rates, prepared, reshard           the learning rate, batches made ahead, checkpoints cut anew
    rootless, inject, demo             a store without a root, faults on purpose, the whole story

Nothing here imports torch until it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.batch.plan import BatchPlan
from elastic.errors import ElasticError

if TYPE_CHECKING:
    from elastic.gradients.exact import ExactGradients
    from elastic.prepared.cache import BatchCache
    from elastic.rates.stepping import ElasticRate
    from elastic.samples.loader import ElasticDataLoader
    from elastic.samples.seeds import seeded
    from elastic.samples.shares import PlanShares
    from elastic.workers.detected import elastic_event_detected
    from elastic.workers.loop import Policy, recoverable, run
    from elastic.workers.randomness import Randomness
    from elastic.workers.world import World

__all__ = [
    "BatchCache",
    "BatchPlan",
    "ElasticDataLoader",
    "ElasticError",
    "ElasticRate",
    "ExactGradients",
    "PlanShares",
    "Policy",
    "Randomness",
    "World",
    "elastic_event_detected",
    "recoverable",
    "run",
    "seeded",
]

_LAZY = {
    "BatchCache": "elastic.prepared.cache",
    "ElasticDataLoader": "elastic.samples.loader",
    "ElasticRate": "elastic.rates.stepping",
    "ExactGradients": "elastic.gradients.exact",
    "PlanShares": "elastic.samples.shares",
    "Policy": "elastic.workers.loop",
    "Randomness": "elastic.workers.randomness",
    "World": "elastic.workers.world",
    "elastic_event_detected": "elastic.workers.detected",
    "recoverable": "elastic.workers.loop",
    "run": "elastic.workers.loop",
    "seeded": "elastic.samples.seeds",
}


if not TYPE_CHECKING:  # a checker that saw it would take any name for one of this package's

    def __getattr__(name: str) -> object:
        """Import what needs torch only when it is asked for: the control plane never does."""
        if name in _LAZY:
            from importlib import import_module

            return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
