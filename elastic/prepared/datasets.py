"""Batches of a ``torch.utils.data.DataLoader``, by their number instead of one after the other."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, Any

from elastic.errors import PolicyError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_ORDERS_KEPT = 2
"""This epoch's, and the next one's when batches are prepared ahead."""


class LoaderBatches:
    """``prepare`` for the batches of a loader: its dataset, its sampler and its ``collate_fn``.

    Batch ``n`` of epoch ``e`` has the number ``e * per_epoch + n``. What shuffles must be a function of the epoch
    alone, so each epoch's sampler gets a generator with the seed ``seed + epoch``, and its ``set_epoch`` is called
    where it has one. The loader's sampler must be the whole job's, not one rank's share. The loader itself is not
    iterated, and its workers, its ``worker_init_fn`` and its ``pin_memory`` are not used.
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
        many = getattr(self._dataset, "__getitems__", None)
        return self._collate(many(picks) if many else [self._dataset[pick] for pick in picks])

    def _order(self, epoch: int) -> list[Any]:
        with self._lock:
            if epoch not in self._orders:
                while len(self._orders) >= _ORDERS_KEPT:
                    del self._orders[min(self._orders)]
                self._orders[epoch] = list(self._sampler_of(epoch))
            return self._orders[epoch]

    def _sampler_of(self, epoch: int) -> Any:
        """The loader's own sampler stays as it is: somebody may be iterating it."""
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
