"""Prepared batches in shared memory: one copy per node, mapped by every rank.

``layout`` is what a batch looks like as bytes, ``batches`` turn tensors into it and back; a ``folder`` has them by
index, its ``tally`` says how many bytes there are, ``room`` decides what is given up and ``keeping`` writes.
:class:`BatchCache` is all of that; :class:`PrefetchIterator` fills it ``ahead`` of its reader, with ``workers`` where a
thread is not enough; ``loader`` and ``module`` are for who has a ``DataLoader`` or a data module already.
"""

from elastic.batch_cache.cache import BatchCache, remove_job_batches
from elastic.batch_cache.cached_loader import CachedDataModule, CachedLoader, cached_loader
from elastic.batch_cache.prefetch import PrefetchIterator
from elastic.errors import CacheDirectoryError, CacheFullError, PrepareError, UnsupportedBatchError

__all__ = [
    "BatchCache",
    "CacheDirectoryError",
    "CacheFullError",
    "CachedDataModule",
    "CachedLoader",
    "PrefetchIterator",
    "PrepareError",
    "UnsupportedBatchError",
    "cached_loader",
    "remove_job_batches",
]
