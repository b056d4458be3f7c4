"""Training that continues when the world changes: any number of ranks, the same batch, no sample lost.

::

    cli ──> supervisor, coordinator ──> control ──> world     who is in the job (never imports torch)
    workers ──> rendezvous, control                           a rank's loop through the worlds
    batch_scaling ──> samples, gradients                      who computes what of a step, its order and exact sum
    batch_cache, reshard, schedulers                          prepared batches, resharded checkpoints, Slurm
    fault_injection, demo                                     faults on purpose, and a proof that losses stay equal

Nothing here imports torch until it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.batch_scaling.batch_plan import BatchPlan, RankPlan
from elastic.errors import ElasticError

if TYPE_CHECKING:
    from elastic.batch_cache.cache import BatchCache
    from elastic.batch_scaling.lr_scaler import LRScaler
    from elastic.gradients.exact_gradients import ExactGradients
    from elastic.samples.data_loader import ElasticDataLoader
    from elastic.samples.rng import RNGState, seeded
    from elastic.workers.event_detector import elastic_event_detected
    from elastic.workers.loop import Loop, LoopStep
    from elastic.workers.step_hooks import StepHooks
    from elastic.workers.train_loop import RecoveryPolicy, recoverable, run
    from elastic.workers.world_handle import World

__all__ = [
    "BatchCache",
    "BatchPlan",
    "ElasticDataLoader",
    "ElasticError",
    "ExactGradients",
    "LRScaler",
    "Loop",
    "LoopStep",
    "RNGState",
    "RankPlan",
    "RecoveryPolicy",
    "StepHooks",
    "World",
    "elastic_event_detected",
    "recoverable",
    "run",
    "seeded",
]

_LAZY = {
    "BatchCache": "elastic.batch_cache.cache",
    "ElasticDataLoader": "elastic.samples.data_loader",
    "LRScaler": "elastic.batch_scaling.lr_scaler",
    "Loop": "elastic.workers.loop",
    "LoopStep": "elastic.workers.loop",
    "StepHooks": "elastic.workers.step_hooks",
    "ExactGradients": "elastic.gradients.exact_gradients",
    "RecoveryPolicy": "elastic.workers.train_loop",
    "RNGState": "elastic.samples.rng",
    "World": "elastic.workers.world_handle",
    "elastic_event_detected": "elastic.workers.event_detector",
    "recoverable": "elastic.workers.train_loop",
    "run": "elastic.workers.train_loop",
    "seeded": "elastic.samples.rng",
}


if not TYPE_CHECKING:  # a checker that saw it would take any name for one of this package's

    def __getattr__(name: str) -> object:
        """Import a name that needs torch on first access. The control plane never imports torch."""
        if name in _LAZY:
            from importlib import import_module

            return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
