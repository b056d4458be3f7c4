"""PeerReader: reads from other nodes' memory, for restores and exports."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence

from peerstore.errors import PeerStoreError, ShardDamagedError
from peerstore.membership.topology import validate_node_id
from peerstore.peers.peer_client import PeerClient, PeerCredentials
from peerstore.peers.peer_messages import VerifyChunks
from peerstore.peers.range_reader import RangeReader, ReadRequest, ReadTarget
from peerstore.shard_records import ShardKey
from peerstore.transport.base import Transport
from tieredckpt.agent.agent_api import NodeAgentAPI, PeerSource, ReaderCredentials
from tieredckpt.errors import CheckpointDamagedError, PeersLostError, TierUnavailableError
from tieredckpt.format.manifest import ShardIndex
from tieredckpt.resolve_step import Tier

log = logging.getLogger(__name__)


class PeerReader:
    """Reads of one job's shards from the agents that hold them. Any thread may call it."""

    def __init__(self, node: NodeAgentAPI, job: str, transport: Transport, *, streams: int) -> None:
        self._node = node
        self._job = job
        self._transport = transport
        self._streams = streams
        self._reader: tuple[ReaderCredentials, RangeReader] | None = None
        self._peers: dict[str, PeerClient] = {}
        self._lock = threading.Lock()

    def read(
        self,
        wanted: Mapping[int, Sequence[ReadTarget]],
        shards: Mapping[int, ShardIndex],
        sources: Mapping[int, tuple[PeerSource, ...]],
        found: Mapping[int, Sequence[Tier]],
    ) -> tuple[list[int], dict[str, int]]:
        """Fill the targets of each part; return the parts left for the durable tier, and bytes by node.

        Raise :class:`CheckpointDamagedError` or :class:`PeersLostError` for a part that no node delivers and that is
        not durable.
        """
        if not wanted:
            return [], {}
        requests = [
            ReadRequest(shards[part], targets, [source.node for source in sources[part]])
            for part, targets in wanted.items()
        ]
        result = self._reader_for(source for part in wanted for source in sources[part]).read(requests)
        left = []
        for part in wanted:
            shard, failure = shards[part], result.failed.get(shards[part].key)
            if failure is None:
                continue
            if Tier.DURABLE not in found[part]:
                kind = CheckpointDamagedError if isinstance(failure, ShardDamagedError) else PeersLostError
                raise kind(f"{shard.key} cannot be read from other nodes: {failure}") from failure
            log.warning("%s is read from the durable tier: %s", shard.key, failure)
            left.append(part)
        return left, dict(result.bytes_from)

    def is_damaged(self, source: PeerSource, key: ShardKey, chunks: tuple[int, int]) -> bool:
        """Return whether ``source`` finds damage in these chunks of its replica, which it then drops."""
        self._reader_for([source])
        damaged: bool = self._peers[source.node].call("verify_chunks", VerifyChunks(key, (chunks,)), bool)
        return damaged

    def close(self) -> None:
        with self._lock:
            self._close_peers()
        self._transport.close()

    def _reader_for(self, sources: Iterable[PeerSource]) -> RangeReader:
        try:
            credentials = self._node.peer_credentials(self._job)
        except PeerStoreError as error:
            raise TierUnavailableError(f"{self._job}: {error}") from error
        if credentials is None:
            raise TierUnavailableError(f"{self._job}: this node's agent does not know the job's other nodes")
        with self._lock:
            if self._reader is None or self._reader[0] != credentials:
                self._close_peers()
                self._reader = credentials, RangeReader(self._peers.__getitem__, streams=self._streams)
            peer_credentials = PeerCredentials(self._job, validate_node_id(credentials.node), credentials.secret)
            for source in sources:
                known = self._peers.get(source.node)
                if known is None or known.address != source.address:
                    self._peers[source.node] = PeerClient(self._transport, source.address, peer_credentials)
            return self._reader[1]

    def _close_peers(self) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(PeerStoreError):
                peer.close()
        self._peers.clear()
