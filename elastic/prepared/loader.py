"""A loader that goes on where the job is: its position is one number, and its batches are in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elastic.errors import PolicyError
from elastic.prepared.ahead import Prefetched
from elastic.prepared.cache import BatchCache, Prepare
from elastic.prepared.datasets import LoaderBatches

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class CachedLoader:
    """One rank's share of the job's batches, epoch by epoch.

    ``position`` counts batches of the whole job that have been handed out, over all epochs; each round hands one to
    every rank. A checkpoint keeps it, and a world of another size goes on from it: what other ranks prepared on this
    node is found there. An epoch's last round that has not a batch for every rank is left out.
    """

    def __init__(
        self,
        cache: BatchCache,
        prepare: Prepare,
        *,
        per_epoch: int,
        rank: int = 0,
        world_size: int = 1,
        ahead: int = 8,
        workers: int = 0,
        start_method: str = "spawn",
    ) -> None:
        if not 0 <= rank < world_size <= per_epoch:
            raise PolicyError(
                f"rank {rank} of {world_size} with {per_epoch} batches an epoch: every rank needs at least one"
            )
        self.position = 0
        self._cache = cache
        self._prepare = prepare
        self._per_epoch = per_epoch
        self._rank = rank
        self._world_size = world_size
        self._ahead = ahead
        self._workers = workers
        self._start_method = start_method
        self._said: int | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or comes next."""
        return self.position // self._per_epoch

    def __len__(self) -> int:
        """Rounds left in this epoch."""
        return (self._end - self.position) // self._world_size

    def __iter__(self) -> Iterator[Any]:
        """The rest of this epoch. One iterator at a time: all move the same position."""
        if self._said is None:  # a job does not go back before where it began
            self._said = self.position
            self._cache.committed(self.position)
        if not len(self):
            self.position = self._end
        start, end = self.position, self._end
        indices = range(start + self._rank, start + len(self) * self._world_size, self._world_size)
        with Prefetched(
            self._cache,
            indices,
            self._prepare,
            ahead=self._ahead,
            workers=self._workers,
            start_method=self._start_method,
        ) as batches:
            for number, batch in enumerate(batches, start=1):
                self.position = end if number == len(indices) else start + number * self._world_size
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps. Asked for again, the one before is taken for committed."""
        if self._said is not None:
            self._cache.committed(self._said)
        self._said = self.position
        return {"position": self.position, "fingerprint": self._cache.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["fingerprint"] != self._cache.fingerprint:
            raise PolicyError(
                f"position {state['position']} counts batches of fingerprint {state['fingerprint']}, these are "
                f"of {self._cache.fingerprint}: use the data, tokenizer, seed and packing of then, or set position"
            )
        self.position = self._said = int(state["position"])
        self._cache.committed(self.position)

    @property
    def _end(self) -> int:
        return (self.epoch + 1) * self._per_epoch


def cached_loader(
    loader: DataLoader[Any],
    cache: BatchCache,
    *,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    ahead: int = 8,
    workers: int = 0,
    start_method: str = "spawn",
) -> CachedLoader:
    """The batches of a map-style ``DataLoader``, out of the cache; see :class:`LoaderBatches` for their order."""
    batches = LoaderBatches(loader, seed=seed)
    return CachedLoader(
        cache,
        batches,
        per_epoch=batches.per_epoch,
        rank=rank,
        world_size=world_size,
        ahead=ahead,
        workers=workers,
        start_method=start_method,
    )
