"""AWS's checkpointing library in this process, pointed at a test's servers."""

from __future__ import annotations

import functools
import logging
from typing import Any

_ORIGINALS: dict[str, Any] = {}


def use_servers(memory_url: str, s3_endpoint: str = "") -> None:
    """Patch the library to use these servers: it has no option for either address."""
    import amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client as memory
    import amzn_sagemaker_checkpointing.storage.clients.s3.s3_client as s3
    from amzn_sagemaker_checkpointing.checkpointing.filesystem import storage_base
    from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    client = memory.InMemoryCheckpointClient
    original = _ORIGINALS.setdefault("init", client.__init__)

    def init(self: Any, *args: Any, config: Any = None, **kwargs: Any) -> None:
        original(self, *args, config=config or InMemoryClientConfig(base_url=memory_url), **kwargs)

    client.__init__ = init
    s3.S3Checkpoint = functools.partial(
        S3Checkpoint, endpoint=s3_endpoint, s3client_config=S3ClientConfig(force_path_style=True)
    )
    # Its own logger writes to /var/log.
    storage_base._TieredStorageBase._setup_logger = staticmethod(lambda *_: logging.getLogger("aws"))


def library_classes() -> tuple[Any, Any, Any]:
    """Return the library's config, writer and reader classes."""
    from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import (
        SageMakerTieredStorageReader,
        SageMakerTieredStorageWriter,
    )
    from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig

    return SageMakerCheckpointConfig, SageMakerTieredStorageWriter, SageMakerTieredStorageReader
