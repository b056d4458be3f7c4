"""PyTorch checkpoints in node memory first, in an object store a little later, restored bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointNotFoundError,
    SaveFailedError,
    TieredCheckpointError,
    TierUnavailableError,
)
from tieredckpt.settings import Settings

if TYPE_CHECKING:
    from tieredckpt.checkpointer import Checkpointer
    from tieredckpt.null import NullCheckpointer
    from tieredckpt.reader import TieredReader
    from tieredckpt.urls import enable_urls
    from tieredckpt.whole_state import load, save
    from tieredckpt.writer import TieredWriter

__all__ = [
    "CheckpointDamagedError",
    "CheckpointNotFoundError",
    "Checkpointer",
    "NullCheckpointer",
    "SaveFailedError",
    "Settings",
    "TierUnavailableError",
    "TieredCheckpointError",
    "TieredReader",
    "TieredWriter",
    "enable_urls",
    "load",
    "save",
]

_LAZY = {
    "Checkpointer": "tieredckpt.checkpointer",
    "NullCheckpointer": "tieredckpt.null",
    "TieredReader": "tieredckpt.reader",
    "TieredWriter": "tieredckpt.writer",
    "enable_urls": "tieredckpt.urls",
    "load": "tieredckpt.whole_state",
    "save": "tieredckpt.whole_state",
}


if not TYPE_CHECKING:  # a checker that saw it would take any name for one of this package's

    def __getattr__(name: str) -> object:
        """Import what needs torch only when it is asked for: the node agent never does."""
        if name in _LAZY:
            from importlib import import_module

            return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
