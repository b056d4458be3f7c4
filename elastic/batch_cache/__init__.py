"""Prepared batches in shared memory: one copy per node, mapped by every rank.

``batch_format`` encodes and decodes tensors. ``cache_directory`` stores batches by index, counts their bytes and evicts
them. ``cache`` has :class:`BatchCache`, which combines both. ``microbatch_cache`` is the layer between a loader and a
cache.
"""

from elastic.batch_cache.cache import BatchCache, remove_job_batches
from elastic.errors import CacheDirectoryError, CacheFullError, UnsupportedBatchError

__all__ = [
    "BatchCache",
    "CacheDirectoryError",
    "CacheFullError",
    "UnsupportedBatchError",
    "remove_job_batches",
]
