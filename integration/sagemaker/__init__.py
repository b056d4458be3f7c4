"""AWS's managed tiered checkpointing: its class names over this project's store, and its format.

::

    -from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
    +from integration.sagemaker import (
         SageMakerTieredStorageReader,
         SageMakerTieredStorageWriter,
     )

AWS's library is not needed, and not used even if it is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from integration.sagemaker.checkpoint_config import (
        DefaultS3PathStrategy,
        RayS3PathStrategy,
        S3PathStrategy,
        SageMakerCheckpointConfig,
    )
    from integration.sagemaker.errors import (
        SageMakerInMemoryTierError,
        SageMakerS3TierError,
        SageMakerTieredStorageConfigError,
        SageMakerTieredStorageError,
    )
    from integration.sagemaker.format_writer import SageMakerFormatWriter
    from integration.sagemaker.tiered_storage import SageMakerTieredStorageReader, SageMakerTieredStorageWriter

__all__ = [
    "DefaultS3PathStrategy",
    "RayS3PathStrategy",
    "S3PathStrategy",
    "SageMakerCheckpointConfig",
    "SageMakerFormatWriter",
    "SageMakerInMemoryTierError",
    "SageMakerS3TierError",
    "SageMakerTieredStorageConfigError",
    "SageMakerTieredStorageError",
    "SageMakerTieredStorageReader",
    "SageMakerTieredStorageWriter",
]

_MODULES = {
    "DefaultS3PathStrategy": "checkpoint_config",
    "RayS3PathStrategy": "checkpoint_config",
    "S3PathStrategy": "checkpoint_config",
    "SageMakerCheckpointConfig": "checkpoint_config",
    "SageMakerFormatWriter": "format_writer",
    "SageMakerInMemoryTierError": "errors",
    "SageMakerS3TierError": "errors",
    "SageMakerTieredStorageConfigError": "errors",
    "SageMakerTieredStorageError": "errors",
    "SageMakerTieredStorageReader": "tiered_storage",
    "SageMakerTieredStorageWriter": "tiered_storage",
}


if not TYPE_CHECKING:  # with it, a type checker would accept any name of this package

    def __getattr__(name: str) -> object:
        """Import modules that need torch on first use."""
        if name in _MODULES:
            from importlib import import_module

            return getattr(import_module(f"integration.sagemaker.{_MODULES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
