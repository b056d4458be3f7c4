"""Bytes in machines' memory: sealed, checksummed shards that outlive the processes that wrote them.

Nothing here knows tensors or imports torch.
"""

from peerstore.client.store_api import Store
from peerstore.client.store_client import Client
from peerstore.errors import (
    PeerStoreError,
    ShardDamagedError,
    ShardNotFoundError,
    UnavailableError,
)
from peerstore.settings import AgentPaths, StoreSettings
from peerstore.shard_records import ShardKey, ShardRecord, VersionId

__all__ = [
    "AgentPaths",
    "Client",
    "PeerStoreError",
    "ShardDamagedError",
    "ShardKey",
    "ShardNotFoundError",
    "ShardRecord",
    "Store",
    "StoreSettings",
    "UnavailableError",
    "VersionId",
]
