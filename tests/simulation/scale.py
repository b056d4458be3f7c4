"""Message counts, bytes and times of a large job: ``python -m tests.simulation.scale``.

The production code chooses targets and encodes messages, but sends none. Times are those of one process on one core.
Every node has one part, and each part has two copies.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from peerstore import message_codec
from peerstore.commit_protocol import CommitDecision, CommitReports, PartsReport, broadcast_targets, commit_leader
from peerstore.membership.swim import (
    GossipMessage,
    MembershipSettings,
    MemberState,
    MemberUpdate,
    SwimMembership,
    ring_order,
)
from peerstore.membership.topology import DelegateCandidates, NodeId, NodePartitions, PeerNode, member_list
from peerstore.peers.peer_messages import (
    GetPartitionInventory,
    NodeInventory,
    PartitionInventory,
    PingMessage,
)
from peerstore.replication.replica_placement import ReplicaPlacement, place_replicas
from peerstore.replication.replication_policy import ReplicationStatus
from peerstore.rpc import Request, Response
from peerstore.shard_records import ShardInfo, ShardKey, VersionId
from tieredckpt.agent.peer_tier import memory_step_statuses, peer_facts
from tieredckpt.format.manifest import ShardMeta, encode_meta
from tieredckpt.resolve_step import Tier, resolve_step

JOB = "llama-70b"
VERSIONS = (11_800, 11_900, 12_000)
SHARD_BYTES = 8 << 30
RACK, ZONE = 32, 2048
ROUNDS = 2
"""Queries of its partition per delegate: the query in progress, and one for all later requests."""
T = TypeVar("T")


@dataclass(frozen=True)
class InventoryQueries:
    """The number of inventory requests."""

    one_node: int
    """Requests when one node lists all shards, including those of its delegates."""
    restart: int
    """Requests when all nodes list at one time."""
    most_to_one: int
    """Most requests to one node in a restart."""
    most_from_one: int
    """Most requests from one node in a restart."""
    peers: int
    """Most nodes that one node exchanges requests with."""
    answered: Mapping[str, tuple[int, int]]
    """Responses of each node about itself, and about its partition."""


def make_nodes(count: int) -> list[PeerNode]:
    return [
        PeerNode(
            NodeId(f"ip-10-{number // 65536}-{number // 256 % 256}-{number % 256}"),
            f"10.{number // 65536}.{number // 256 % 256}.{number % 256}:7070",
            (("rack", f"rack-{number // RACK}"), ("zone", f"zone-{number // ZONE}")),
        )
        for number in range(count)
    ]


# -- placement --------------------------------------------------------------------------------------------------------


def moved_copies(before: ReplicaPlacement, after: ReplicaPlacement) -> int:
    """Count the new copies of nodes that are in both placements."""
    both = before.partners.keys() & after.partners.keys()
    return sum(len(set(after.partners[node]) - set(before.partners[node])) for node in both)


# -- membership -------------------------------------------------------------------------------------------------------


def ping_cost(nodes: list[PeerNode]) -> tuple[int, int, float]:
    """Return a node's pings per period in a healthy job, the bytes of a ping, and the seconds to decide."""
    members = SwimMembership(nodes[0], 1)
    members.set_member_list(0.0, member_list(1, nodes))
    updates = [MemberUpdate(node, 1, MemberState.ALIVE) for node in nodes[1:]]
    for first in range(0, len(updates), 48):
        members.receive_gossip(0.0, nodes[1].id, GossipMessage(tuple(updates[first : first + 48]), None, (0, "")))
    members.tick(0.0)
    for node in nodes:
        members.ping_acked(0.1, node.id)
    pings, seconds = timed(lambda: members.tick(1.0))
    size = max(len(_encode_request("ping", PingMessage(ping.gossip))) for ping in pings)
    return len(pings), size, seconds


# -- saving -----------------------------------------------------------------------------------------------------------


def commit_cost(names: list[str]) -> tuple[int, int, float]:
    """Return reports to the commit leader per version, nodes that it notifies, and seconds of counting.

    Every node reports that its part is sealed, and later that the part has its copies.
    """
    living = dict.fromkeys(names)
    group = VersionId(7, VERSIONS[-1], 0, "0" * 12)
    leader = commit_leader(living)
    assert leader is not None
    reports = CommitReports(leader)
    own = {name: CommitReports(name) for name in names}
    sent: list[PartsReport] = []
    for missing in (1, 0):
        for part, name in enumerate(names):
            status = ReplicationStatus(
                _key(VERSIONS[-1], part), is_owner=True, copies=2 - missing, missing=missing, unplaceable=0
            )
            to, pending = own[name].pending([status], {group: len(names)}, living=living, replicated=None, life=1)
            assert to == leader
            for report in pending:
                own[name].mark_reported(to, report)
            sent += pending

    def decide() -> CommitDecision:
        found = CommitDecision()
        for report in sent:
            reports.add(report)
            found |= reports.decide(living=living, life=lambda _: 1, replicated=None, quorum=True)
        return found

    found, seconds = timed(decide)
    assert (found.committed, found.replicated) == (group, group)
    return sum(report.node != leader for report in sent), len(broadcast_targets(living, leader)), seconds


def periods_until_known(names: list[str]) -> int:
    """Return the ping periods until all nodes know a decision that the commit leader sent to some of them."""
    first = names[0]
    ring = [first, *ring_order(NodeId(first), [NodeId(name) for name in names[1:]])]
    watched, drawn = MembershipSettings().ring_neighbours, random.Random(7)
    known = {first, *broadcast_targets(names, first)}
    for period in range(len(names)):
        if len(known) == len(names):
            return period
        before = frozenset(known)
        for place_on_ring, name in enumerate(ring):
            next_ones = [ring[(place_on_ring + step) % len(ring)] for step in range(1, watched + 1)]
            for other in (*next_ones, drawn.choice(ring)):
                if name in before or other in before:
                    known |= {name, other}
    raise AssertionError("The decision did not reach all nodes.")


# -- inventory requests -----------------------------------------------------------------------------------------------


def count_queries(names: list[str], partitions: NodePartitions) -> InventoryQueries:
    """Count the inventory requests of a job whose nodes are all live."""
    received: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for_all: Counter[str] = Counter()
    peers: dict[str, set[str]] = {name: set() for name in names}

    def count_query(one: str, other: str, times: int = 1) -> None:
        received[other] += times
        sent[one] += times
        peers[one].add(other)
        peers[other].add(one)

    for me in names:
        for other in partitions.partition_of(me):
            if other != me:
                count_query(me, other, ROUNDS)
        for members in partitions.other_partitions(me):
            delegate = DelegateCandidates(members, gone=lambda _: False).next_delegate()
            assert delegate is not None
            count_query(me, delegate)
            for_all[delegate] += 1
    first = names[0]
    beyond = partitions.other_partitions(first)
    alone = len(partitions.partition_of(first)) - 1 + sum(len(members) for members in beyond)
    answered = {name: (received[name] - for_all[name], for_all[name]) for name in names}
    return InventoryQueries(
        alone, sent.total(), max(received.values()), max(sent.values()), max(map(len, peers.values())), answered
    )


# -- inventories ------------------------------------------------------------------------------------------------------


def make_inventories(names: list[str], placement: ReplicaPlacement) -> dict[str, NodeInventory]:
    """Return each node's inventory: its own parts and its copies of other parts."""
    number = {name: part for part, name in enumerate(names)}
    held: dict[str, list[ShardInfo]] = {name: [] for name in names}
    for name, part in number.items():
        holders = (name, *placement.partners[NodeId(name)])
        for version in VERSIONS:
            own = _fact(version, part, len(names))
            held[name].append(own)
            for partner in holders[1:]:
                held[partner].append(_fact(version, part, len(names), holders))
    replicated = VersionId(7, VERSIONS[-1], 0, "0" * 12)
    return {name: NodeInventory(tuple(facts), 7, "0" * 12, replicated, 0) for name, facts in held.items()}


def _fact(version: int, part: int, parts: int, holders: tuple[str, ...] = ()) -> ShardInfo:
    meta = ShardMeta(f"{part:032x}", (1 << 20, 4096), base=11_700, table=f"{7:032x}", saved_ns=time.time_ns())
    return ShardInfo(_key(version, part), parts, SHARD_BYTES, encode_meta(meta), time.time_ns(), True, holders)


def _key(version: int, part: int) -> ShardKey:
    return ShardKey(JOB, version, 7, "0" * 12, 0, part)


def _encode_request(op: str, body: object) -> bytes:
    return message_codec.encode_message(Request(op, message_codec.encode_raw_message(body)))


def _encode_response(body: object) -> bytes:
    return message_codec.encode_message(Response("", message_codec.encode_raw_message(body)))


def responses_for(me: str, partitions: NodePartitions, inventories: dict[str, NodeInventory]) -> list[bytes]:
    """Return the responses to one node from its own partition's nodes and the other partitions' delegates."""
    near = [_encode_response(inventories[node]) for node in partitions.partition_of(me) if node != me]
    far = [
        _encode_response(
            PartitionInventory({node: message_codec.encode_raw_message(inventories[node]) for node in members}, {})
        )
        for members in partitions.other_partitions(me)
    ]
    return near + far


def largest_response_bytes(
    queries: InventoryQueries, partitions: NodePartitions, inventories: dict[str, NodeInventory]
) -> int:
    """Return the most response bytes that one node sends when all nodes list at one time."""
    own = {name: len(_encode_response(inventory)) for name, inventory in inventories.items()}
    return max(
        about_it * own[name] + about_all * sum(own[member] for member in partitions.partition_of(name))
        for name, (about_it, about_all) in queries.answered.items()
    )


def decode_all(answers: Iterable[bytes], near: int) -> dict[int, NodeInventory]:
    """Decode all inventories in the responses, of which the first ``near`` are direct."""
    found: dict[int, NodeInventory] = {}
    for number, data in enumerate(answers):
        body = message_codec.decode_message(data, Response).body
        if number < near:
            found[len(found)] = message_codec.decode_message(body, NodeInventory)
        else:
            for raw in message_codec.decode_message(body, PartitionInventory).nodes.values():
                found[len(found)] = message_codec.decode_message(raw, NodeInventory)
    return found


# -- table ------------------------------------------------------------------------------------------------------------


def timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    found = work()
    return found, time.perf_counter() - began


def measure(count: int) -> dict[str, str]:
    """Return the rows of the table for one number of nodes."""
    nodes = make_nodes(count)
    placement, placed_s = timed(lambda: place_replicas(nodes))
    joined = place_replicas([*nodes, PeerNode(NodeId("one-more"), "", (("rack", "rack-0"), ("zone", "zone-0")))])
    left = place_replicas([node for node in nodes if node is not nodes[count // 2]])
    names = sorted(node.id for node in nodes)
    pings, ping_bytes, tick_s = ping_cost(nodes)
    reports, notified, count_s = commit_cost(list(names))
    partitions, partition_s = timed(lambda: NodePartitions(names))
    queries = count_queries(list(names), partitions)
    inventories = make_inventories(list(names), placement)
    me = names[0]
    answers = responses_for(me, partitions, inventories)
    near = len(partitions.partition_of(me)) - 1
    decoded, decode_s = timed(lambda: decode_all(answers, near))
    largest_b = largest_response_bytes(queries, partitions, inventories)
    others = {str(number): inventory for number, inventory in decoded.items()}
    views, views_s = timed(
        lambda: memory_step_statuses(inventories[me].shards, peer_facts(others, me), lambda _: False)
    )
    found, resolve_s = timed(lambda: resolve_step([view.candidate for view in views], unreachable=()))
    assert found.chosen is not None
    assert found.chosen.version_id.version == VERSIONS[-1]
    assert Tier.PEER in found.chosen.tiers
    sources = {name for name, inventory in inventories.items() if name != me and inventory.shards}
    request = len(
        _encode_request(
            "partition_inventory", GetPartitionInventory(max(partitions.other_partitions(me), key=len, default=()))
        )
    )
    received = sum(map(len, answers))
    return {
        "placement, seconds": f"{placed_s:.2f}",
        "a node joins: new copies, of all": f"{moved_copies(placement, joined)} of {count}",
        "a node leaves: new copies, besides its own": f"{moved_copies(placement, left)} of {count}",
        "pings that a node sends, and receives, per second": str(pings),
        "bytes of a ping": f"{ping_bytes:,}",
        "membership decisions of one period, ms": f"{tick_s * 1e3:.1f}",
        "a save: reports to the commit leader": f"{reports:,}",
        "a save: nodes that the commit leader notifies": f"{notified:,}",
        "... ping periods until all nodes know": str(periods_until_known(list(names))),
        "a save: seconds of counting": f"{count_s:.2f}",
        "partitions, and the largest": f"{len(partitions.other_partitions(me)) + 1}, "
        f"{max(map(len, _all_partitions(partitions, me)))}",
        "computing the partitions, ms": f"{partition_s * 1e3:.1f}",
        "one node lists all shards: requests": f"{queries.one_node:,}",
        "all nodes list at once: requests": f"{queries.restart:,}",
        "... without partitions": f"{count * (count - 1):,}",
        "... most requests to one node": f"{queries.most_to_one:,}",
        "... most requests from one node": f"{queries.most_from_one:,}",
        "... most connections of one node": f"{queries.peers:,}",
        "all restore into another world: requests for layouts": f"{count * len(sources):,}",
        "inventory of one node, bytes": f"{len(_encode_response(inventories[me])):,}",
        "a request to a delegate, bytes": f"{request:,}",
        "its response, bytes": f"{max(map(len, answers)):,}",
        "all nodes list at once: most that one node sends, MB": f"{largest_b / 1e6:.1f}",
        "the result of one listing, MB": f"{received / 1e6:.1f}",
        "decoding it, seconds": f"{decode_s:.2f}",
        "merging it into steps, seconds": f"{views_s:.2f}",
        "choosing a step, ms": f"{resolve_s * 1e3:.2f}",
    }


def _all_partitions(partitions: NodePartitions, me: str) -> list[tuple[str, ...]]:
    return [partitions.partition_of(me), *partitions.other_partitions(me)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.scale")
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000, 10_000])
    sizes: Any = parser.parse_args().nodes
    tables = [measure(size) for size in sizes]
    print("| | " + " | ".join(f"{size:,} nodes" for size in sizes) + " |")
    print("|---|" + "---|" * len(sizes))
    for row in tables[0]:
        print(f"| {row} | " + " | ".join(table[row] for table in tables) + " |")


if __name__ == "__main__":
    main()
