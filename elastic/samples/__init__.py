"""Every sample exactly once per data epoch, whatever happens to the ranks.

::

    sample_schedule ──> data_loader, sampler     (seed, epoch, position) ──> a rank's samples ──> microbatches
    sample_audit                                 proof that each sample was used exactly once
    rng                                          random numbers keyed by seed, step and microbatch
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic.errors import CursorError, DataWorkersLostError, StepOrderError
from elastic.samples.sample_audit import SampleAudit, SampleLog
from elastic.samples.sample_schedule import DataPosition, RankShare, SampleOrder, SampleSchedule, ShareSource

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
    "RankShare",
    "SampleAudit",
    "SampleLog",
    "SampleOrder",
    "SampleSchedule",
    "ShareSource",
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


if not TYPE_CHECKING:  # a checker that saw it would take any name for one of this package's

    def __getattr__(name: str) -> object:
        """Import what needs torch only when it is asked for: whoever only plans does not."""
        if name in _LAZY:
            from importlib import import_module

            return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
