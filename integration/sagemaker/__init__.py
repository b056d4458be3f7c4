"""AWS's managed tiered checkpointing: its class names over this project's store, and its own format.

::

    -from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
    +from integration.sagemaker import (
         SageMakerTieredStorageReader,
         SageMakerTieredStorageWriter,
     )

Nothing of AWS's library is needed, and nothing of it is used where it is installed.
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

_WHERE = {
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


if not TYPE_CHECKING:  # a checker that saw it would take any name for one of this package's

    def __getattr__(name: str) -> object:
        """Import what needs torch only when it is asked for."""
        if name in _WHERE:
            from importlib import import_module

            return getattr(import_module(f"integration.sagemaker.{_WHERE[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
