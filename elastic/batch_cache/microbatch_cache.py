"""The microbatches of a loader in a BatchCache, by the position of their first sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import tieredckpt.tensors.plain_tensors  # noqa: F401 - the format needs it, and a forked worker would import it again
from elastic.batch_cache.cache import BatchCache, CacheResult


class MicrobatchCache:
    """Layer between a loader and a :class:`~elastic.batch_cache.cache.BatchCache`.

    An entry has the indices and the seed of its samples. Any other entry at the same position counts as absent and is
    replaced, such as a microbatch of another size, order or seed.
    """

    def __init__(self, cache: BatchCache, seed: int) -> None:
        self._cache = cache
        self._seed = seed
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[type[MicrobatchCache], tuple[BatchCache, int]]:
        return MicrobatchCache, (self._cache, self._seed)

    def lookup(self, position: int, indices: Sequence[int]) -> CacheResult:
        """Return the microbatch, mapped, if it is cached."""
        found = self._own_cache().lookup(position)
        if not found.is_cached:
            return found
        entry = found.batch
        if isinstance(entry, dict) and entry.get("samples") == self._samples(indices):
            return CacheResult(is_cached=True, batch=entry["data"])
        self._own_cache().remove(position)
        return CacheResult(is_cached=False)

    def prepare(
        self, position: int, indices: Sequence[int], read: Callable[[], Any], *, should_stop: Callable[[], bool]
    ) -> CacheResult:
        """Cache the microbatch that ``read`` returns, unless it is cached. Return it if it cannot be cached.

        ``should_stop`` ends the wait for another process that prepares it.
        """
        if self.lookup(position, indices).is_cached:
            return CacheResult(is_cached=True)
        result = self._own_cache().prepare(
            position, lambda _: {"samples": self._samples(indices), "data": read()}, should_stop=should_stop
        )
        return result if result.is_cached else CacheResult(is_cached=False, batch=result.batch["data"])

    def mark_committed(self, position: int) -> None:
        """Record that training will not return to microbatches before ``position``."""
        self._own_cache().mark_committed(position)

    def _samples(self, indices: Sequence[int]) -> list[int]:
        return [self._seed, *indices]

    def _own_cache(self) -> BatchCache:
        """Return the cache, opened again in a forked process."""
        if self._pid != os.getpid():
            self._cache, self._pid = self._cache.reopen(), os.getpid()
        return self._cache
