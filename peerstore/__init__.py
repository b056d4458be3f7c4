"""Bytes in machines' memory: sealed, checksummed shards that outlive the processes that wrote them.

Nothing here knows tensors or imports torch.
"""

from peerstore.client import Client
from peerstore.errors import (
    PeerStoreError,
    ShardDamagedError,
    ShardNotFoundError,
    UnavailableError,
)
from peerstore.operations import Store
from peerstore.records import Group, ShardKey, ShardRecord
from peerstore.settings import AgentPlace, StoreSettings
from peerstore.store import NodeStore

__all__ = [
    "AgentPlace",
    "Client",
    "Group",
    "NodeStore",
    "PeerStoreError",
    "ShardDamagedError",
    "ShardKey",
    "ShardNotFoundError",
    "ShardRecord",
    "Store",
    "StoreSettings",
    "UnavailableError",
]
