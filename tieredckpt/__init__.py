"""PyTorch checkpoints in node memory, drained to an object store, restored bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointDeletedError,
    CheckpointLostError,
    CheckpointNotFoundError,
    CheckpointTornError,
    DurableRefusedError,
    FormatVersionError,
    JobTakenOverError,
    MismatchError,
    MissingStepError,
    NonFiniteStateError,
    PeersLostError,
    RestoreProofError,
    SaveFailedError,
    SettingsError,
    StoreBusyError,
    TieredCheckpointError,
    TierUnavailableError,
    UntrustedObjectError,
    UsageError,
)
from tieredckpt.settings import Settings

if TYPE_CHECKING:
    from tieredckpt.checkpointer.checkpointer import Checkpointer
    from tieredckpt.checkpointer.durable_callback import DurableStep
    from tieredckpt.checkpointer.null_checkpointer import NullCheckpointer
    from tieredckpt.dcp.load_save import load, save
    from tieredckpt.dcp.tiered_reader import TieredReader
    from tieredckpt.dcp.tiered_urls import enable_urls
    from tieredckpt.dcp.tiered_writer import TieredWriter

__all__ = [
    "CheckpointDamagedError",
    "CheckpointDeletedError",
    "CheckpointLostError",
    "CheckpointNotFoundError",
    "CheckpointTornError",
    "Checkpointer",
    "DurableRefusedError",
    "DurableStep",
    "FormatVersionError",
    "JobTakenOverError",
    "MismatchError",
    "MissingStepError",
    "NonFiniteStateError",
    "NullCheckpointer",
    "PeersLostError",
    "RestoreProofError",
    "SaveFailedError",
    "Settings",
    "SettingsError",
    "StoreBusyError",
    "TierUnavailableError",
    "TieredCheckpointError",
    "TieredReader",
    "TieredWriter",
    "UntrustedObjectError",
    "UsageError",
    "enable_urls",
    "load",
    "save",
]

_LAZY = {
    "Checkpointer": "tieredckpt.checkpointer.checkpointer",
    "DurableStep": "tieredckpt.checkpointer.durable_callback",
    "NullCheckpointer": "tieredckpt.checkpointer.null_checkpointer",
    "TieredReader": "tieredckpt.dcp.tiered_reader",
    "TieredWriter": "tieredckpt.dcp.tiered_writer",
    "enable_urls": "tieredckpt.dcp.tiered_urls",
    "load": "tieredckpt.dcp.load_save",
    "save": "tieredckpt.dcp.load_save",
}


if not TYPE_CHECKING:  # with __getattr__, a type checker would accept every name

    def __getattr__(name: str) -> object:
        """Import the names that need torch on first use, so that the node agent never imports torch."""
        if name in _LAZY:
            from importlib import import_module

            return getattr(import_module(_LAZY[name]), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
