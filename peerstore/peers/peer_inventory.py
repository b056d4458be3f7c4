"""Inventory of a whole job: every node's shards.

Large jobs are queried through delegates. Dead nodes whose queries failed slowly are not retried for a while.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass

import msgspec

from peerstore import message_codec
from peerstore.errors import PeerStoreError, ProtocolError
from peerstore.membership.topology import PARTITION_MIN_NODES, DelegateCandidates, MemberList, NodePartitions
from peerstore.peers.heartbeat_loop import HeartbeatLoop
from peerstore.peers.peer_messages import (
    MAX_NODES_PER_REQUEST,
    GetNodeInventory,
    GetPartitionInventory,
    NodeInventory,
    PartitionInventory,
)
from peerstore.peers.single_flight import SingleFlight
from peerstore.shard_records import ShardKey

NODE_INVENTORY_TIMEOUT_S = 5.0
"""Seconds that one node has to respond, including the verification of recovered shards."""
DEAD_NODE_TIMEOUT_S = 1.0
"""Seconds that a node which is taken for dead has to respond, including connection setup."""
NEGATIVE_CACHE_S = 10.0
"""Seconds for which a dead node is not tried again, if the failed attempt was slow."""
_SLOW_FAILURE_S = 0.2
_RECENT_S = 2.0
_QUERY_THREADS = 64
_VERIFYING_S = 0.2
"""Seconds between two requests to a node that verifies recovered shards."""
_MARGIN_S = 0.5


@dataclass(frozen=True)
class JobInventory:
    """The shards of all nodes of the job that responded."""

    nodes: Mapping[str, NodeInventory]
    """Inventories by node, including this node."""
    unreachable: Mapping[str, str]
    """Nodes without a usable response, and the reason."""

    @property
    def sources(self) -> dict[ShardKey, tuple[str, ...]]:
        """The nodes that hold each shard, this node first."""
        found: dict[ShardKey, list[str]] = defaultdict(list)
        for node, looked in self.nodes.items():
            for fact in looked.shards:
                found[fact.key].append(node)
        return {key: tuple(nodes) for key, nodes in found.items()}


@dataclass(frozen=True)
class _PartitionResult:
    """The inventories of this node's partition, including this node."""

    found: Mapping[str, InventoryOrError]

    @functools.cached_property
    def encoded(self) -> Mapping[str, bytes]:
        """Encoded inventories by node, encoded once for all requesters."""
        return {
            node: message_codec.encode_message(one)
            for node, one in self.found.items()
            if isinstance(one, NodeInventory)
        }

    def select(self, nodes: Iterable[str]) -> tuple[dict[str, msgspec.Raw], dict[str, str]]:
        """Return the nodes' inventories that fit into one response, and the other nodes with the reason."""
        room, reported, missing = MAX_PARTITION_REPLY_BYTES, dict[str, msgspec.Raw](), dict[str, str]()
        for node in nodes:
            data = self.encoded.get(node)
            if data is None:
                missing[node] = str(self.found.get(node, "it has just come to this partition"))
            elif len(data) > room:
                missing[node] = f"what it holds, {len(data)} bytes, does not fit into one answer with the others'"
            else:
                room -= len(data)
                reported[node] = msgspec.Raw(data)
        return reported, missing


class InventoryService:
    """Inventory of one job's nodes. Thread-safe."""

    def __init__(
        self,
        membership: HeartbeatLoop,
        here: Callable[[], NodeInventory],
        *,
        seen: Callable[[Mapping[str, NodeInventory], Mapping[str, int]], None] = lambda _seen, _lives: None,
        split_from: int = PARTITION_MIN_NODES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._membership = membership
        self._here = here
        self._seen = seen
        self._clock = clock
        self._lock = threading.Lock()
        self._unreached = NegativeCache(NEGATIVE_CACHE_S)
        self._split_from = split_from
        self._cached_partitions: tuple[MemberList | None, NodePartitions] = (None, NodePartitions(()))
        self._partition_flight = SingleFlight(self._collect_partition, clock=clock)
        self._job_flight = SingleFlight(self._collect_job, clock=clock)
        self._stop = threading.Event()
        self._query_pool = ThreadPoolExecutor(_QUERY_THREADS, thread_name_prefix="peerstore-look")
        self._delegate_client = DelegateClient(
            membership, self._query_nodes
        )  # requests to delegates have separate threads

    def close(self) -> None:
        self._stop.set()
        self._delegate_client.close()
        self._query_pool.shutdown(cancel_futures=True)

    def get(self, *, fresh: bool = False) -> JobInventory:
        """Return the inventory of all nodes; nodes that do not respond are listed with the reason.

        Without ``fresh`` the result may be up to ``_RECENT_S`` seconds old.
        """
        return self._job_flight.run() if fresh else self._job_flight.cached(_RECENT_S)

    def invalidate(self) -> None:
        """Drop cached results."""
        self._job_flight.invalidate()
        with self._lock:
            self._unreached.retain(self._dead)

    def serve_partition(self, asked: GetPartitionInventory) -> PartitionInventory:
        """Return the inventories of nodes of this node's partition; other nodes are listed as unreachable."""
        me = self._membership.this_node.id
        partition = {me, *self._partitions().partition_of(me)}
        silent = dict.fromkeys(asked.nodes, f"{me} does not look at it: it is in another partition")
        wanted = [node for node in silent if node in partition]
        if not wanted:
            return PartitionInventory({}, silent)
        nodes, missing = self._partition_flight.run().select(wanted)
        return PartitionInventory(nodes, {node: why for node, why in (silent | missing).items() if node not in nodes})

    def _collect_job(self) -> JobInventory:
        me = self._membership.this_node.id
        lives = (
            self._membership.generations
        )  # before the queries: a node that restarts afterwards may lose the shards that it reported
        beyond = self._partitions().other_partitions(me)
        if beyond:
            near = self._delegate_client.pool.submit(self._partition_flight.run)
            found = {**self._delegate_client.collect(beyond, short_s=DEAD_NODE_TIMEOUT_S), **near.result().found}
        else:
            found = dict(self._partition_flight.run().found)
        nodes = {node: one for node, one in found.items() if isinstance(one, NodeInventory)}
        silent = {node: one for node, one in found.items() if isinstance(one, str)}
        for node, one in nodes.items():
            if one.verifying and node != me:  # shards that are not verified are unknown, not absent
                silent[node] = f"it still verifies {one.verifying} shards that its last agent left"
        self._seen({node: one for node, one in nodes.items() if node != me}, lives)
        return JobInventory(nodes, silent)

    def _collect_partition(self) -> _PartitionResult:
        me = self._membership.this_node.id
        others = [node for node in self._partitions().partition_of(me) if node != me]
        return _PartitionResult({me: self._here(), **self._query_nodes(dict.fromkeys(others))})

    def _partitions(self) -> NodePartitions:
        member_list = self._membership.member_list
        known, partitions = self._cached_partitions
        if known is not member_list:
            nodes = [node.id for node in member_list.nodes] if member_list is not None else []
            partitions = NodePartitions(nodes, split_from=self._split_from)
            self._cached_partitions = (member_list, partitions)
        return partitions

    def _query_nodes(self, nodes: Mapping[str, float | None]) -> dict[str, InventoryOrError]:
        """Query the nodes in parallel, nodes that are taken for dead last; values are timeouts in seconds."""
        deadline = time.monotonic() + NODE_INVENTORY_TIMEOUT_S + _MARGIN_S
        order = sorted(nodes, key=self._dead)
        asked = {
            node: self._query_pool.submit(self._query_node, node, nodes[node] or NODE_INVENTORY_TIMEOUT_S)
            for node in order
        }
        return {node: _result_by(deadline, future) for node, future in asked.items()}

    def _query_node(self, node: str, within_s: float) -> InventoryOrError:
        since = self._clock()
        try:
            peer = self._membership.client_for(node)
            dead = self._dead(node)
            if dead and (why := self._cached_failure(node, peer.address)):
                return why
            within_s = min(within_s, DEAD_NODE_TIMEOUT_S) if dead else within_s
            while True:
                found: NodeInventory = peer.call("node_inventory", GetNodeInventory(), NodeInventory, within_s=within_s)
                within_s = since + NODE_INVENTORY_TIMEOUT_S - self._clock()
                if not found.verifying or within_s <= _VERIFYING_S or self._stop.wait(_VERIFYING_S):
                    return found
                within_s -= _VERIFYING_S
        except (PeerStoreError, OSError) as error:
            self._record_unreachable(node, str(error), self._clock() - since)
            return str(error)

    def _dead(self, node: str) -> bool:
        return self._membership.state_of(node) == "dead"

    def _cached_failure(self, node: str, address: str) -> str:
        with self._lock:
            return self._unreached.get(self._clock(), node, address)

    def _record_unreachable(self, node: str, why: str, took_s: float) -> None:
        if took_s >= _SLOW_FAILURE_S and self._dead(node):
            address = self._membership.client_for(node).address
            with self._lock:
                self._unreached.put(self._clock(), node, address, why)


def _result_by(deadline: float, future: Future[InventoryOrError]) -> InventoryOrError:
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError:  # the node accepts connections and does not respond
        return f"it did not answer within {NODE_INVENTORY_TIMEOUT_S:.0f} s"
    except CancelledError:
        return "this node's agent ends"


DELEGATE_HEDGE_S = 2.0
"""Seconds after which the next delegate is queried as well; the slow delegate's response still counts."""
DELEGATE_TIMEOUT_S = 11.0
"""Seconds for a delegate's response.

The delegate may have to finish one query before it starts the requested one.
"""
MAX_PARTITION_REPLY_BYTES = 32 << 20
"""Largest size of all inventories in one response: half of a message."""
_DELEGATE_THREADS = 64

InventoryOrError = NodeInventory | str
"""A node's inventory, or the reason why it is unknown."""


class DelegateClient:
    """Client of the delegates of other partitions. Thread-safe."""

    def __init__(
        self, membership: HeartbeatLoop, look_at: Callable[[Mapping[str, float | None]], dict[str, InventoryOrError]]
    ) -> None:
        self._membership = membership
        self._query_directly = look_at
        """Queries these nodes directly, each within its timeout in seconds."""
        self.pool = ThreadPoolExecutor(_DELEGATE_THREADS, thread_name_prefix="peerstore-ask")

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)

    def collect(self, partitions: Iterable[Sequence[str]], *, short_s: float) -> dict[str, InventoryOrError]:
        """Return the inventories of all nodes of these partitions.

        Each partition lists its members in the order of delegates. If no delegate of a partition responds, its nodes
        are queried directly. If a delegate did not reach a node, the path from the delegate may be at fault. Such a
        node is queried directly for ``short_s`` seconds, unless this node considers it dead.
        """
        errands = [DelegateCandidates(members, gone=self._membership.is_dead) for members in partitions]
        answers = _DelegateRound(self, errands).answers()
        found: dict[str, InventoryOrError] = {}
        directly: dict[str, float | None] = {}
        for errand, answer in zip(errands, answers, strict=True):
            if answer is None:
                directly |= dict.fromkeys(errand.members)
                continue
            for node in errand.members:
                found[node] = one = _inventory_of(answer, node)
                if isinstance(one, str) and self._membership.state_of(node) != "dead":
                    directly[node] = short_s
        return found | self._query_directly(directly)

    def ask_delegate(self, delegate: str, nodes: tuple[str, ...], within_s: float) -> PartitionInventory:
        asked = GetPartitionInventory(nodes[:MAX_NODES_PER_REQUEST])
        found: PartitionInventory = self._membership.client_for(delegate).call(
            "partition_inventory", asked, PartitionInventory, within_s=within_s
        )
        return found


class _DelegateRound:
    """One round of requests to delegates. Used by one thread."""

    def __init__(self, from_delegates: DelegateClient, errands: Sequence[DelegateCandidates]) -> None:
        self._delegate_client = from_delegates
        self._errands = errands
        self._deadline = time.monotonic() + DELEGATE_TIMEOUT_S
        self._answers: list[PartitionInventory | None] = [None] * len(errands)
        self._asked: dict[Future[PartitionInventory], int] = {}
        self._hedge_at: dict[int, float] = {}
        """Time at which a partition's next delegate is queried."""

    def answers(self) -> list[PartitionInventory | None]:
        """Return the response for each partition, or ``None`` if none of its delegates responded."""
        for number in range(len(self._errands)):
            self._ask_next(number)
        while self._asked and (now := time.monotonic()) < self._deadline:
            until = min([self._deadline, *self._hedge_at.values()])
            done, _ = wait(self._asked, max(0.0, until - now), FIRST_COMPLETED)
            for future in done:
                if future not in self._asked:  # another delegate of its partition has responded
                    continue
                self._handle_response(self._asked.pop(future), future)
            for number in [number for number, at in self._hedge_at.items() if at <= time.monotonic()]:
                self._ask_next(number)
        self._cancel(self._asked)
        return self._answers

    def _ask_next(self, number: int) -> None:
        errand = self._errands[number]
        self._hedge_at.pop(number, None)
        delegate = errand.next_delegate()
        if delegate is not None:
            now = time.monotonic()
            future = self._delegate_client.pool.submit(
                self._delegate_client.ask_delegate, delegate, errand.members, self._deadline - now
            )
            self._asked[future] = number
            self._hedge_at[number] = now + DELEGATE_HEDGE_S

    def _handle_response(self, number: int, future: Future[PartitionInventory]) -> None:
        try:
            self._answers[number] = future.result()
        except (PeerStoreError, OSError, CancelledError):
            self._ask_next(number)
            return
        self._hedge_at.pop(number, None)
        self._cancel([other for other, of in self._asked.items() if of == number])

    def _cancel(self, futures: Iterable[Future[PartitionInventory]]) -> None:
        """Cancel these requests."""
        for future in list(futures):
            future.cancel()
            del self._asked[future]


def _inventory_of(answer: PartitionInventory, node: str) -> InventoryOrError:
    raw = answer.nodes.get(node)
    if raw is None:
        return answer.unreachable.get(node, "its delegate said nothing of it")
    try:
        return message_codec.decode_message(raw, NodeInventory)
    except ProtocolError as error:
        return f"its delegate did not repeat what it said: {error}"


@dataclass(frozen=True)
class _NegativeEntry:
    at: float
    address: str
    why: str


class NegativeCache:
    """Failed attempts to reach dead nodes, for ``longest_s`` seconds. Not thread-safe.

    An entry ends when the node is no longer dead or has another address.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._entries: dict[str, _NegativeEntry] = {}

    def put(self, now: float, node: str, address: str, why: str) -> None:
        self._entries[node] = _NegativeEntry(now, address, why)

    def get(self, now: float, node: str, address: str) -> str:
        """Return why the node at this address was unreachable recently; empty without an entry."""
        found = self._entries.get(node)
        if found is None:
            return ""
        if found.address != address or not 0 <= now - found.at < self._longest_s:
            del self._entries[node]
            return ""
        return found.why

    def retain(self, dead: Callable[[str], bool]) -> None:
        """Drop the entries of nodes that are no longer dead."""
        self._entries = {node: verdict for node, verdict in self._entries.items() if dead(node)}
