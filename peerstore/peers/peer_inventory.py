"""Inventory of a whole job: every node's shards, by delegates in large jobs, a negative cache of dead nodes."""

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
"""How long one node has to answer, or to verify what its last agent left."""
DEAD_NODE_TIMEOUT_S = 1.0
"""The same for one that is taken for dead, connecting included."""
NEGATIVE_CACHE_S = 10.0
"""How long it is remembered that a node which is taken for dead was not reached, where finding out took time."""
_COSTLY_S = 0.2
_RECENT_S = 2.0
_LOOKERS = 64
_VERIFYING_S = 0.2
"""Between two looks at a node that verifies what its last agent left."""
_MARGIN_S = 0.5


@dataclass(frozen=True)
class JobInventory:
    """What every node of the job holds, as far as it could be asked."""

    nodes: Mapping[str, NodeInventory]
    """This node included."""
    unreachable: Mapping[str, str]
    """Nodes that could not be asked, and why."""

    @property
    def sources(self) -> dict[ShardKey, tuple[str, ...]]:
        """Which nodes hold each shard, this one first."""
        found: dict[ShardKey, list[str]] = defaultdict(list)
        for node, looked in self.nodes.items():
            for fact in looked.shards:
                found[fact.key].append(node)
        return {key: tuple(nodes) for key, nodes in found.items()}


@dataclass(frozen=True)
class _PartitionResult:
    """What the nodes of this node's partition hold, this one included."""

    found: Mapping[str, InventoryOrError]

    @functools.cached_property
    def encoded(self) -> Mapping[str, bytes]:
        """Once for all who ask."""
        return {
            node: message_codec.encode_message(one)
            for node, one in self.found.items()
            if isinstance(one, NodeInventory)
        }

    def told(self, nodes: Iterable[str]) -> tuple[dict[str, msgspec.Raw], dict[str, str]]:
        """What these nodes hold, as much of it as fits into an answer; and of whom nothing is said, and why."""
        room, told, unsaid = MAX_PARTITION_REPLY_BYTES, dict[str, msgspec.Raw](), dict[str, str]()
        for node in nodes:
            data = self.encoded.get(node)
            if data is None:
                unsaid[node] = str(self.found.get(node, "it has just come to this partition"))
            elif len(data) > room:
                unsaid[node] = f"what it holds, {len(data)} bytes, does not fit into one answer with the others'"
            else:
                room -= len(data)
                told[node] = msgspec.Raw(data)
        return told, unsaid


class InventoryService:
    """One job's nodes, looked at. Any thread may call."""

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
        self._cut: tuple[MemberList | None, NodePartitions] = (None, NodePartitions(()))
        self._near = SingleFlight(self._collect_partition, clock=clock)
        self._turns = SingleFlight(self._collect_job, clock=clock)
        self._stop = threading.Event()
        self._lookers = ThreadPoolExecutor(_LOOKERS, thread_name_prefix="peerstore-look")
        self._delegate_client = DelegateClient(
            membership, self._query_nodes
        )  # who asks delegates never takes a thread from who looks

    def close(self) -> None:
        self._stop.set()
        self._delegate_client.close()
        self._lookers.shutdown(cancel_futures=True)

    def get(self, *, fresh: bool = False) -> JobInventory:
        """What all nodes hold. Those that do not answer are named, not left out.

        ``fresh``: as of now, not as of a moment ago.
        """
        return self._turns.run() if fresh else self._turns.cached(_RECENT_S)

    def invalidate(self) -> None:
        """What was seen is not so any more."""
        self._turns.invalidate()
        with self._lock:
            self._unreached.retain(self._dead)

    def serve_partition(self, asked: GetPartitionInventory) -> PartitionInventory:
        """What nodes of this node's partition hold, for one of another. Who else is named is not looked for."""
        me = self._membership.this_node.id
        partition = {me, *self._partitions().partition_of(me)}
        silent = dict.fromkeys(asked.nodes, f"{me} does not look at it: it is in another partition")
        wanted = [node for node in silent if node in partition]
        if not wanted:
            return PartitionInventory({}, silent)
        nodes, unsaid = self._near.run().told(wanted)
        return PartitionInventory(nodes, {node: why for node, why in (silent | unsaid).items() if node not in nodes})

    def _collect_job(self) -> JobInventory:
        me = self._membership.this_node.id
        lives = (
            self._membership.generations
        )  # as of before they were asked: who starts again meanwhile may lose what it said
        beyond = self._partitions().other_partitions(me)
        if beyond:
            near = self._delegate_client.pool.submit(self._near.run)
            found = {**self._delegate_client.collect(beyond, short_s=DEAD_NODE_TIMEOUT_S), **near.result().found}
        else:
            found = dict(self._near.run().found)
        nodes = {node: one for node, one in found.items() if isinstance(one, NodeInventory)}
        silent = {node: one for node, one in found.items() if isinstance(one, str)}
        for node, one in nodes.items():
            if one.verifying and node != me:  # what it does not say yet is unknown, not absent
                silent[node] = f"it still verifies {one.verifying} shards that its last agent left"
        self._seen({node: one for node, one in nodes.items() if node != me}, lives)
        return JobInventory(nodes, silent)

    def _collect_partition(self) -> _PartitionResult:
        me = self._membership.this_node.id
        others = [node for node in self._partitions().partition_of(me) if node != me]
        return _PartitionResult({me: self._here(), **self._query_nodes(dict.fromkeys(others))})

    def _partitions(self) -> NodePartitions:
        member_list = self._membership.member_list
        known, partitions = self._cut
        if known is not member_list:
            nodes = [node.id for node in member_list.nodes] if member_list is not None else []
            partitions = NodePartitions(nodes, split_from=self._split_from)
            self._cut = (member_list, partitions)
        return partitions

    def _query_nodes(self, nodes: Mapping[str, float | None]) -> dict[str, InventoryOrError]:
        """Those that are taken for dead come last: nobody waits for them who could be asked at once."""
        deadline = time.monotonic() + NODE_INVENTORY_TIMEOUT_S + _MARGIN_S
        order = sorted(nodes, key=self._dead)
        asked = {
            node: self._lookers.submit(self._query_node, node, nodes[node] or NODE_INVENTORY_TIMEOUT_S)
            for node in order
        }
        return {node: _by(deadline, future) for node, future in asked.items()}

    def _query_node(self, node: str, within_s: float) -> InventoryOrError:
        since = self._clock()
        try:
            peer = self._membership.client_for(node)
            dead = self._dead(node)
            if dead and (why := self._remembered(node, peer.address)):
                return why
            within_s = min(within_s, DEAD_NODE_TIMEOUT_S) if dead else within_s
            while True:
                found: NodeInventory = peer.call("node_inventory", GetNodeInventory(), NodeInventory, within_s=within_s)
                within_s = since + NODE_INVENTORY_TIMEOUT_S - self._clock()
                if not found.verifying or within_s <= _VERIFYING_S or self._stop.wait(_VERIFYING_S):
                    return found
                within_s -= _VERIFYING_S
        except (PeerStoreError, OSError) as error:
            self._not_reached(node, str(error), self._clock() - since)
            return str(error)

    def _dead(self, node: str) -> bool:
        return self._membership.state_of(node) == "dead"

    def _remembered(self, node: str, address: str) -> str:
        with self._lock:
            return self._unreached.get(self._clock(), node, address)

    def _not_reached(self, node: str, why: str, took_s: float) -> None:
        if took_s >= _COSTLY_S and self._dead(node):
            address = self._membership.client_for(node).address
            with self._lock:
                self._unreached.put(self._clock(), node, address, why)


def _by(deadline: float, future: Future[InventoryOrError]) -> InventoryOrError:
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError:  # it accepts connections and says nothing: who asked does not wait for it
        return f"it did not answer within {NODE_INVENTORY_TIMEOUT_S:.0f} s"
    except CancelledError:
        return "this node's agent ends"


DELEGATE_HEDGE_S = 2.0
"""A delegate that has not answered by then may still do so; the next one is asked as well."""
DELEGATE_TIMEOUT_S = 11.0
"""A delegate may have to end one look before it begins the one that is wanted; each takes as long as a silent node."""
MAX_PARTITION_REPLY_BYTES = 32 << 20
"""In one answer, whatever the nodes hold: half of what a message may have."""
_ASKERS = 64

InventoryOrError = NodeInventory | str
"""What a node holds, or why that is not known."""


class DelegateClient:
    """Asks delegates, several at a time. Any thread may call."""

    def __init__(
        self, membership: HeartbeatLoop, look_at: Callable[[Mapping[str, float | None]], dict[str, InventoryOrError]]
    ) -> None:
        self._membership = membership
        self._look_at = look_at
        """Looks at these nodes directly, each within so many seconds."""
        self.pool = ThreadPoolExecutor(_ASKERS, thread_name_prefix="peerstore-ask")

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)

    def collect(self, partitions: Iterable[Sequence[str]], *, short_s: float) -> dict[str, InventoryOrError]:
        """All nodes of these partitions, each in the order in which its members are asked to look.

        Where nobody looks its nodes are looked at from here. So are, for ``short_s``, those that a delegate did not
        reach and that live as far as this node knows: it may be the delegate's way that is bad, and not the node.
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
                found[node] = one = _said(answer, node)
                if isinstance(one, str) and self._membership.state_of(node) != "dead":
                    directly[node] = short_s
        return found | self._look_at(directly)

    def ask_delegate(self, delegate: str, nodes: tuple[str, ...], within_s: float) -> PartitionInventory:
        asked = GetPartitionInventory(nodes[:MAX_NODES_PER_REQUEST])
        found: PartitionInventory = self._membership.client_for(delegate).call(
            "partition_inventory", asked, PartitionInventory, within_s=within_s
        )
        return found


class _DelegateRound:
    """One round of questions. Used by one thread."""

    def __init__(self, from_delegates: DelegateClient, errands: Sequence[DelegateCandidates]) -> None:
        self._delegate_client = from_delegates
        self._errands = errands
        self._deadline = time.monotonic() + DELEGATE_TIMEOUT_S
        self._answers: list[PartitionInventory | None] = [None] * len(errands)
        self._asked: dict[Future[PartitionInventory], int] = {}
        self._late_at: dict[int, float] = {}
        """The partitions that the next delegate is to be asked for, and when."""

    def answers(self) -> list[PartitionInventory | None]:
        """What was said of each partition; ``None`` where nobody said anything."""
        for number in range(len(self._errands)):
            self._ask_next(number)
        while self._asked and (now := time.monotonic()) < self._deadline:
            until = min([self._deadline, *self._late_at.values()])
            done, _ = wait(self._asked, max(0.0, until - now), FIRST_COMPLETED)
            for future in done:
                if future not in self._asked:  # another one of its partition has answered, too
                    continue
                self._hear(self._asked.pop(future), future)
            for number in [number for number, at in self._late_at.items() if at <= time.monotonic()]:
                self._ask_next(number)
        self._let_go(self._asked)
        return self._answers

    def _ask_next(self, number: int) -> None:
        errand = self._errands[number]
        self._late_at.pop(number, None)
        delegate = errand.next_delegate()
        if delegate is not None:
            now = time.monotonic()
            future = self._delegate_client.pool.submit(
                self._delegate_client.ask_delegate, delegate, errand.members, self._deadline - now
            )
            self._asked[future] = number
            self._late_at[number] = now + DELEGATE_HEDGE_S

    def _hear(self, number: int, future: Future[PartitionInventory]) -> None:
        try:
            self._answers[number] = future.result()
        except (PeerStoreError, OSError, CancelledError):
            self._ask_next(number)
            return
        self._late_at.pop(number, None)
        self._let_go([other for other, of in self._asked.items() if of == number])

    def _let_go(self, futures: Iterable[Future[PartitionInventory]]) -> None:
        """Nobody waits for those any more."""
        for future in list(futures):
            future.cancel()
            del self._asked[future]


def _said(answer: PartitionInventory, node: str) -> InventoryOrError:
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
    """Remembers for ``longest_s`` that a node was not reached. Whoever calls sees to it that nobody else does.

    It speaks of nodes that are taken for dead alone: of one that is heard of again, or that is at another address now,
    nothing is remembered.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._verdicts: dict[str, _NegativeEntry] = {}

    def put(self, now: float, node: str, address: str, why: str) -> None:
        self._verdicts[node] = _NegativeEntry(now, address, why)

    def get(self, now: float, node: str, address: str) -> str:
        """Why the node at this address was not reached a moment ago; empty when nothing is known."""
        found = self._verdicts.get(node)
        if found is None:
            return ""
        if found.address != address or not 0 <= now - found.at < self._longest_s:
            del self._verdicts[node]
            return ""
        return found.why

    def retain(self, dead: Callable[[str], bool]) -> None:
        """Forget those that are heard of again."""
        self._verdicts = {node: verdict for node, verdict in self._verdicts.items() if dead(node)}
