"""Prepared batches in shared memory: one copy per node, mapped by every rank.

``batch_format`` turns tensors into bytes and back. ``cache_directory`` stores batches by index, counts their bytes and
evicts. ``cache`` has :class:`BatchCache`, which combines both; ``prefetch`` fills it ahead of its reader, with worker
processes where a thread is too slow. ``cached_loader`` serves a ``DataLoader`` or a data module.
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
