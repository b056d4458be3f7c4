"""Verified reads of one step's shards from this node's memory, other nodes and the durable tier."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from peerstore.peers.range_reader import ReadTarget
from tieredckpt.agent.agent_api import PeerSource
from tieredckpt.durable.object_store import ObjectStore
from tieredckpt.errors import CheckpointDamagedError, TierUnavailableError
from tieredckpt.format.manifest import ShardIndex
from tieredckpt.resolve_step import Tier
from tieredckpt.restore.step_index import ByteRange
from tieredckpt.restore.verified_reads import PinnedShards, ShardCheck, VerifiedBytes, read_durable_shard
from tieredckpt.session.peer_reader import PeerReader

log = logging.getLogger(__name__)

_WINDOW_BYTES = 32 << 20


class StepShards(Protocol):
    """Shards of one step by part, with their tiers, nearest first, and the other nodes that hold them."""

    @property
    def shards(self) -> Mapping[int, ShardIndex]: ...
    @property
    def found(self) -> Mapping[int, tuple[Tier, ...]]: ...
    @property
    def sources(self) -> Mapping[int, tuple[PeerSource, ...]]: ...


class TierReader:
    """Reads of one step, each from the nearest good copy.

    ``peers`` is ``None`` in a process that cannot reach other nodes.
    """

    def __init__(
        self,
        step: StepShards,
        pinned: PinnedShards | None,
        peers: PeerReader | None,
        durable: Callable[[], ObjectStore],
    ) -> None:
        self._step = step
        self._pinned = pinned
        self._peers = peers
        self._durable = durable
        self._unusable: dict[int, ShardCheck] = {}
        """Parts with an unusable copy in this node's memory, and the reason."""
        self._left_to_durable: set[int] = set()
        """Parts that other nodes did not deliver."""
        self.bytes_by_tier: dict[str, int] = defaultdict(int)
        self.bytes_by_node: dict[str, int] = defaultdict(int)
        """Bytes read from the memory of each other node."""

    def read(self, part: int, span: ByteRange, *, is_verified: bool = False) -> bytes:
        """Return the bytes of ``span`` of a shard, or raise.

        ``is_verified``: the agent has verified them in this node's memory.
        """
        return b"".join(bytes(data) for data in self.windows(part, span, is_verified=is_verified))

    def windows(self, part: int, span: ByteRange, *, is_verified: bool = False) -> Iterator[memoryview]:
        """Yield the bytes of ``span`` in order. A yielded view is valid until the next one."""
        for start in range(span.start, span.stop, _WINDOW_BYTES):
            yield from self._window(part, ByteRange(start, min(span.stop, start + _WINDOW_BYTES)), is_verified)

    def read_peers(self, targets: Mapping[int, Sequence[ReadTarget]]) -> list[int]:
        """Fill ``targets`` from other nodes; return the parts that remain for the durable tier."""
        if self._peers is None:
            raise TierUnavailableError(
                f"{self._step.shards[next(iter(targets))].key} is only in the memory of nodes that this process cannot "
                "reach"
            )
        left, by_node = self._peers.read(targets, self._step.shards, self._step.sources, self._step.found)
        for node, count in by_node.items():
            self.bytes_by_node[node] += count
            self.bytes_by_tier[Tier.PEER.value] += count
        return left

    def read_durable(self, part: int, spans: Sequence[ByteRange]) -> Iterator[VerifiedBytes]:
        """Yield verified runs of the durable copy that cover ``spans``, which are in order."""
        self.bytes_by_tier[Tier.DURABLE.value] += sum(stop - start for start, stop in spans)
        yield from read_durable_shard(self._durable(), self._step.shards[part], spans)

    def _window(self, part: int, window: ByteRange, is_verified: bool) -> Iterator[memoryview]:
        shard, tiers = self._step.shards[part], self._step.found[part]
        size = window.stop - window.start
        if Tier.MEMORY in tiers and part not in self._unusable and self._pinned is not None:
            check = ShardCheck.GOOD if is_verified else self._pinned.verify(shard, [window])
            if check is ShardCheck.GOOD:
                self.bytes_by_tier[Tier.MEMORY.value] += size
                yield self._pinned.view(part)[window.start : window.stop]
                return
            log.warning("%s in memory: %s, looking for another copy", shard.key, check.value)
            self._unusable[part] = check
        is_durable = Tier.DURABLE in tiers
        if Tier.PEER in tiers and part not in self._left_to_durable and not (is_durable and self._peers is None):
            data = memoryview(bytearray(size))  # the shard's layout was checked, so the size is plausible
            if not self.read_peers({part: [ReadTarget(window.start, window.stop, data)]}):
                yield data
                return
            self._left_to_durable.add(part)
        if not is_durable:
            raise _no_copy_error(shard, self._unusable.get(part, ShardCheck.EVICTED))
        for found in self.read_durable(part, [window]):
            low, high = max(window.start, found.start), min(window.stop, found.start + len(found.data))
            yield found.data[low - found.start : high - found.start]


def _no_copy_error(shard: ShardIndex, found: ShardCheck) -> Exception:
    if found is ShardCheck.UNREADABLE:
        return TierUnavailableError(f"{shard.key} in memory: {found.value}. There is no other copy of it: try again")
    return CheckpointDamagedError(f"{shard.key} in memory: {found.value}. There is no other copy of it")
