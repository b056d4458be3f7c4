"""Prepared batches in shared memory: one copy per node, mapped by every rank.

``batch_format`` encodes and decodes tensors. ``cache_directory`` stores batches by index, counts their bytes and evicts
them. ``cache`` has :class:`BatchCache`, which combines both. ``prefetch`` fills it ahead of its reader, with worker
processes if a thread is too slow. ``cached_loader`` serves a ``DataLoader`` or a data module.
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
