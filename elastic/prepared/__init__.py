"""Prepared batches in shared memory: tokenised, packed and collated once a node, and mapped from then on.

``layout`` is what a batch looks like as bytes, ``batches`` turn tensors into it and back; a ``folder`` has them by
index, its ``tally`` says how many bytes there are, ``room`` decides what is given up and ``keeping`` writes.
:class:`BatchCache` is all of that; :class:`Prefetched` fills it ``ahead`` of its reader, with ``workers`` where a
thread is not enough; ``loader`` and ``module`` are for who has a ``DataLoader`` or a data module already.
"""

from elastic.prepared.ahead import Prefetched
from elastic.prepared.cache import BatchCache, forget_job
from elastic.prepared.errors import BatchKindError, CacheFullError, CachePlaceError, PrepareError
from elastic.prepared.loader import CachedLoader, cached_loader
from elastic.prepared.module import CachedDataModule

__all__ = [
    "BatchCache",
    "BatchKindError",
    "CacheFullError",
    "CachePlaceError",
    "CachedDataModule",
    "CachedLoader",
    "Prefetched",
    "PrepareError",
    "cached_loader",
    "forget_job",
]
