"""Bytes in machines' memory: sealed, checksummed shards that outlive the processes that wrote them.

Nothing here knows tensors or imports torch.
"""

from peerstore.errors import (
    PeerStoreError,
    ShardDamagedError,
    ShardNotFoundError,
    UnavailableError,
)
from peerstore.server.store_api import Store
from peerstore.server.store_client import Client
from peerstore.settings import AgentPaths, StoreSettings
from peerstore.shard_records import ShardKey, ShardRecord, VersionId
from peerstore.store.node_store import NodeStore

__all__ = [
    "AgentPaths",
    "Client",
    "NodeStore",
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
