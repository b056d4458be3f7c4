"""Resumable loaders over the cache, for a DataLoader and for a Lightning data module."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from elastic.batch_cache.cache import BatchCache, PrepareFunction
from elastic.batch_cache.prefetch import PrefetchIterator
from elastic.errors import PolicyError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class CachedLoader:
    """Loader of one rank's share of the job's batches, epoch by epoch.

    ``position`` counts the delivered batches of the whole job, over all epochs; each round delivers one to every rank.
    A checkpoint stores it, and a world of another size continues from it. Batches that other ranks prepared on this
    node are in the cache. The last round of an epoch is skipped if it does not have a batch for every rank.
    """

    def __init__(
        self,
        cache: BatchCache,
        prepare: PrepareFunction,
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
        self._last_state_position: int | None = None

    @property
    def epoch(self) -> int:
        """Current epoch, or the next one between two epochs."""
        return self.position // self._per_epoch

    def __len__(self) -> int:
        """Return the number of remaining rounds of this epoch."""
        return (self._end - self.position) // self._world_size

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of this epoch.

        Use one iterator at a time: all of them move the same position.
        """
        if self._last_state_position is None:  # a job does not return to batches before its start
            self._last_state_position = self.position
            self._cache.mark_committed(self.position)
        if not len(self):
            self.position = self._end
        start, end = self.position, self._end
        indices = range(start + self._rank, start + len(self) * self._world_size, self._world_size)
        with PrefetchIterator(
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
        """Return the state for a checkpoint. Treats the state of the previous call as committed."""
        if self._last_state_position is not None:
            self._cache.mark_committed(self._last_state_position)
        self._last_state_position = self.position
        return {"position": self.position, "fingerprint": self._cache.fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["fingerprint"] != self._cache.fingerprint:
            raise PolicyError(
                f"position {state['position']} counts batches of fingerprint {state['fingerprint']}, these are "
                f"of {self._cache.fingerprint}: use the data, tokenizer, seed and packing of then, or set position"
            )
        self.position = self._last_state_position = int(state["position"])
        self._cache.mark_committed(self.position)

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
    """Return a loader of the cached batches of a map-style ``DataLoader``.

    :class:`IndexedLoader` defines their order.
    """
    batches = IndexedLoader(loader, seed=seed)
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


_MAX_ORDERS = 2
"""Orders to store: the current epoch, and the next one while its batches are prepared ahead."""


class IndexedLoader:
    """``prepare`` function for the batches of a loader: its dataset, its sampler and its ``collate_fn``.

    Batch ``n`` of epoch ``e`` has the index ``e * per_epoch + n``. The order must depend on the epoch only. So each
    epoch's sampler has a generator with the seed ``seed + epoch``, and its ``set_epoch`` is called if it exists. The
    loader's sampler must cover the whole job, not one rank's share. The loader itself is not iterated; its workers,
    ``worker_init_fn`` and ``pin_memory`` are not used.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int = 0) -> None:
        from torch.utils.data import IterableDataset

        if isinstance(loader.dataset, IterableDataset):
            raise PolicyError(
                "the batches of an IterableDataset have no numbers: give the cache a prepare(index) of your own"
            )
        self._dataset: Any = loader.dataset
        self._collate = loader.collate_fn
        self._in_batches = loader.batch_sampler is not None
        sampler: Any = loader.batch_sampler if self._in_batches else loader.sampler
        self._sampler = sampler
        self._seed = seed
        self._lock = threading.Lock()
        self._orders: dict[int, list[Any]] = {}
        self.per_epoch: int = len(self._sampler)
        if not self.per_epoch:
            raise PolicyError("the loader has no batches")

    def __call__(self, index: int) -> Any:
        epoch, number = divmod(index, self.per_epoch)
        picks = self._order(epoch)[number]
        if not self._in_batches:
            return self._collate(self._dataset[picks])
        read_many = getattr(self._dataset, "__getitems__", None)
        return self._collate(read_many(picks) if read_many else [self._dataset[pick] for pick in picks])

    def _order(self, epoch: int) -> list[Any]:
        with self._lock:
            if epoch not in self._orders:
                while len(self._orders) >= _MAX_ORDERS:
                    del self._orders[min(self._orders)]
                self._orders[epoch] = list(self._sampler_of(epoch))
            return self._orders[epoch]

    def _sampler_of(self, epoch: int) -> Any:
        """Return a copy of the loader's sampler for this epoch: another thread may iterate over the original."""
        outer = copy.copy(self._sampler)
        samplers = [outer]
        if hasattr(outer, "sampler"):
            outer.sampler = copy.copy(outer.sampler)
            samplers.append(outer.sampler)
        for sampler in samplers:
            if hasattr(sampler, "generator"):
                import torch

                sampler.generator = torch.Generator().manual_seed(self._seed + epoch)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        return outer

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_orders")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _orders={})


class CachedDataModule:
    """Data module with cached training batches. All other attributes are those of the wrapped module.

    ``open_cache`` is called in ``setup``, in the training process. The module's ``train_dataloader`` must return a
    map-style ``DataLoader`` over the whole job's data: this class assigns batches to ranks.
    """

    def __init__(
        self,
        module: Any,
        open_cache: Callable[[], BatchCache],
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        ahead: int = 8,
        workers: int = 0,
    ) -> None:
        self._module = module
        self._open_cache = open_cache
        self._options: dict[str, Any] = {
            "seed": seed, "rank": rank, "world_size": world_size, "ahead": ahead, "workers": workers,
        }  # fmt: skip
        self._cache: BatchCache | None = None
        self._loader: CachedLoader | None = None
        self._resumed: Mapping[str, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_module":  # copying and unpickling read attributes before _module exists
            raise AttributeError(name)
        return getattr(self._module, name)

    def setup(self, stage: str | None = None) -> None:
        """Set up the module and open the cache. Idempotent: Lightning calls it once per stage."""
        self._module.setup(stage)
        if self._cache is None:
            self._cache = self._open_cache()

    def train_dataloader(self) -> CachedLoader:
        if self._cache is None:
            raise PolicyError("setup() comes before train_dataloader()")
        loader = cached_loader(self._module.train_dataloader(), self._cache, **self._options)
        if self._loader is not None:
            loader.position = self._loader.position
        elif self._resumed is not None:
            loader.load_state_dict(self._resumed)
        self._loader = loader
        return loader

    def state_dict(self) -> dict[str, Any]:
        loader = self._resumed if self._loader is None else self._loader.state_dict()
        return {"loader": loader, "module": _call(self._module, "state_dict") or {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state, before or after the loader is created."""
        _call(self._module, "load_state_dict", state["module"])
        self._resumed = state["loader"]
        if self._loader is not None and self._resumed is not None:
            self._loader.load_state_dict(self._resumed)

    def teardown(self, stage: str | None = None) -> None:
        """Close the cache. The batches remain for the next trainer."""
        _call(self._module, "teardown", stage)
        if self._cache is not None:
            self._cache.close()
        self._cache = self._loader = None


def _call(module: Any, name: str, *arguments: Any) -> Any:
    method = getattr(module, name, None)
    return None if method is None else method(*arguments)
