"""The cache between a Lightning data module and its trainer, without Lightning: both sides are what they look like."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastic.errors import PolicyError
from elastic.prepared.cache import BatchCache
from elastic.prepared.loader import CachedLoader, cached_loader


class CachedDataModule:
    """A data module whose training batches come out of the cache; all else is the module's own.

    ``open_cache`` is called in ``setup``, in the process that trains. The module's ``train_dataloader`` must return a
    map-style ``DataLoader`` over the whole job's data: which rank takes what is decided here.
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
        if name.startswith("__") or name == "_module":  # copying and unpickling ask before there is a module
            raise AttributeError(name)
        return getattr(self._module, name)

    def setup(self, stage: str | None = None) -> None:
        """Idempotent, as Lightning calls it once for every stage."""
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
        """Before or after there is a loader."""
        _call(self._module, "load_state_dict", state["module"])
        self._resumed = state["loader"]
        if self._loader is not None and self._resumed is not None:
            self._loader.load_state_dict(self._resumed)

    def teardown(self, stage: str | None = None) -> None:
        """The batches stay: the next trainer finds them."""
        _call(self._module, "teardown", stage)
        if self._cache is not None:
            self._cache.close()
        self._cache = self._loader = None


def _call(module: Any, name: str, *arguments: Any) -> Any:
    method = getattr(module, name, None)
    return None if method is None else method(*arguments)
