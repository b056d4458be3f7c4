"""Each sample exactly once per data epoch, despite faults and changes of the world.

::

    sample_schedule ──> data_loader, sampler     (seed, epoch, position) ──> a rank's samples ──> microbatches
    sample_audit                                 proof that each sample was used exactly once
    rng                                          random numbers keyed by seed, step and microbatch
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.errors import CursorError, DataWorkersLostError, StepOrderError
from elastic.samples.sample_audit import SampleAudit, SampleLog
from elastic.samples.sample_schedule import DataPosition, SampleOrder, SampleSchedule

if TYPE_CHECKING:
    from elastic.samples.data_loader import ElasticDataLoader
    from elastic.samples.rng import microbatch_generator, seeded
    from elastic.samples.sampler import ElasticSampler

__all__ = [
    "CursorError",
    "DataPosition",
    "DataWorkersLostError",
    "ElasticDataLoader",
    "ElasticSampler",
    "SampleAudit",
    "SampleLog",
    "SampleOrder",
    "SampleSchedule",
    "StepOrderError",
    "microbatch_generator",
    "seeded",
]

_LAZY = {
    "ElasticDataLoader": "elastic.samples.data_loader",
    "ElasticSampler": "elastic.samples.sampler",
    "microbatch_generator": "elastic.samples.rng",
    "seeded": "elastic.samples.rng",
}


if not TYPE_CHECKING:  # a type checker would accept any name of the package otherwise

    def __getattr__(name: str) -> object:
        """Import modules that need torch on first use, so that planning does not need it."""
        if name in _LAZY:
            from importlib import import_module

            return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
