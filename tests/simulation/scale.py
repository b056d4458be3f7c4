"""What a job of many nodes costs, counted with the code that decides it: ``python -m tests.simulation.scale``.

Nothing is sent: messages are counted from who tells whom, bytes from what would be sent, and times are those of one
process on one core. Every node has one part; each version's parts are kept twice.
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
    PeerRequest,
    PeerResponse,
    PingMessage,
)
from peerstore.replication.replica_placement import ReplicaPlacement, place_replicas
from peerstore.replication.replication_policy import ReplicationStatus as Kept
from peerstore.shard_records import ShardInfo, ShardKey, VersionId
from tieredckpt.agent.peer_tier import memory_step_statuses, peer_facts
from tieredckpt.format.manifest import ShardMeta, encode_meta
from tieredckpt.resolve_step import Tier, resolve_step

JOB = "llama-70b"
VERSIONS = (11_800, 11_900, 12_000)
SHARD_BYTES = 8 << 30
RACK, ZONE = 32, 2048
ROUNDS = 2
"""Looks at its partition that a delegate makes for all who ask at one time: one goes on, who come later share one."""
T = TypeVar("T")


@dataclass(frozen=True)
class InventoryQueries:
    """Questions, each of which has an answer."""

    one_survey: int
    restart: int
    """Every node surveys at one time."""
    most_at_one: int
    """Questions that one node gets in a restart."""
    most_from_one: int
    peers: int
    """Other nodes that one has to do with, at most."""
    answered: Mapping[str, tuple[int, int]]
    """How many of a node's answers are about itself, and how many about its partition."""


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
    """Copies that are made anew, of nodes that were there before and are there after."""
    both = before.partners.keys() & after.partners.keys()
    return sum(len(set(after.partners[node]) - set(before.partners[node])) for node in both)


# -- membership -------------------------------------------------------------------------------------------------------


def ping_cost(nodes: list[PeerNode]) -> tuple[int, int, float]:
    """What one node of a job where all are well sends in a period, how large a ping is, and how long deciding takes."""
    members = SwimMembership(nodes[0], 1)
    members.set_member_list(0.0, member_list(1, nodes))
    rumours = [MemberUpdate(node, 1, MemberState.ALIVE) for node in nodes[1:]]
    for first in range(0, len(rumours), 48):
        members.receive_gossip(0.0, nodes[1].id, GossipMessage(tuple(rumours[first : first + 48]), None, (0, "")))
    members.tick(0.0)
    for node in nodes:
        members.ping_acked(0.1, node.id)
    pings, seconds = timed(lambda: members.tick(1.0))
    size = max(len(_encode_request("ping", PingMessage(ping.gossip))) for ping in pings)
    return len(pings), size, seconds


# -- saving -----------------------------------------------------------------------------------------------------------


def commit_cost(names: list[str]) -> tuple[int, int, float]:
    """Reports that reach the commit leader for one version, whom it tells, and how long it counts.

    Every node says that its part is sealed, and later that it has its copies.
    """
    living = dict.fromkeys(names)
    group = VersionId(7, VERSIONS[-1], 0, "0" * 12)
    teller = commit_leader(living)
    assert teller is not None
    reports = CommitReports(teller)
    own = {name: CommitReports(name) for name in names}
    notes: list[PartsReport] = []
    for lacking in (1, 0):
        for part, name in enumerate(names):
            kept = Kept(_key(VERSIONS[-1], part), is_owner=True, copies=2 - lacking, missing=lacking, unplaceable=0)
            to, told = own[name].pending([kept], {group: len(names)}, living=living, replicated=None, life=1)
            assert to == teller
            for note in told:
                own[name].mark_reported(to, note)
            notes += told

    def decide() -> CommitDecision:
        found = CommitDecision()
        for note in notes:
            reports.add(note)
            found |= reports.decide(living=living, life=lambda _: 1, replicated=None, quorum=True)
        return found

    found, seconds = timed(decide)
    assert (found.committed, found.replicated) == (group, group)
    return sum(note.node != teller for note in notes), len(broadcast_targets(living, teller)), seconds


def periods_until_known(names: list[str]) -> int:
    """Pings that every node sends, one each period, until all know what the commit leader told some of them."""
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
    raise AssertionError("the news does not get about")


# -- looking ----------------------------------------------------------------------------------------------------------


def count_queries(names: list[str], partitions: NodePartitions) -> InventoryQueries:
    """Everybody is well."""
    got: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for_all: Counter[str] = Counter()
    peers: dict[str, set[str]] = {name: set() for name in names}

    def count_query(one: str, other: str, times: int = 1) -> None:
        got[other] += times
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
    answered = {name: (got[name] - for_all[name], for_all[name]) for name in names}
    return InventoryQueries(
        alone, sent.total(), max(got.values()), max(sent.values()), max(map(len, peers.values())), answered
    )


# -- inventories ------------------------------------------------------------------------------------------------------


def inventory(names: list[str], placement: ReplicaPlacement) -> dict[str, NodeInventory]:
    """What each node says that it holds: its own parts and those it keeps for another."""
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
    return message_codec.encode_message(PeerRequest(op, message_codec.encode_raw_message(body)))


def _encode_response(body: object) -> bytes:
    return message_codec.encode_message(PeerResponse("", message_codec.encode_raw_message(body)))


def responses_for(me: str, partitions: NodePartitions, said: dict[str, NodeInventory]) -> list[bytes]:
    """What one node is sent in a survey: by its own partition's nodes and by the delegates of the others."""
    near = [_encode_response(said[node]) for node in partitions.partition_of(me) if node != me]
    far = [
        _encode_response(
            PartitionInventory({node: message_codec.encode_raw_message(said[node]) for node in members}, {})
        )
        for members in partitions.other_partitions(me)
    ]
    return near + far


def largest_response_bytes(seen: InventoryQueries, partitions: NodePartitions, said: dict[str, NodeInventory]) -> int:
    """Bytes of the answers that one node gives when all survey at one time."""
    own = {name: len(_encode_response(looked)) for name, looked in said.items()}
    return max(
        about_it * own[name] + about_all * sum(own[member] for member in partitions.partition_of(name))
        for name, (about_it, about_all) in seen.answered.items()
    )


def decode_all(answers: Iterable[bytes], near: int) -> dict[int, NodeInventory]:
    """All that was said, decoded."""
    found: dict[int, NodeInventory] = {}
    for number, data in enumerate(answers):
        body = message_codec.decode_message(data, PeerResponse).body
        if number < near:
            found[len(found)] = message_codec.decode_message(body, NodeInventory)
        else:
            for raw in message_codec.decode_message(body, PartitionInventory).nodes.values():
                found[len(found)] = message_codec.decode_message(raw, NodeInventory)
    return found


# -- all of it --------------------------------------------------------------------------------------------------------


def timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    found = work()
    return found, time.perf_counter() - began


def measure(count: int) -> dict[str, str]:
    """The rows of the table for one size."""
    nodes = make_nodes(count)
    placement, placed_s = timed(lambda: place_replicas(nodes))
    joined = place_replicas([*nodes, PeerNode(NodeId("one-more"), "", (("rack", "rack-0"), ("zone", "zone-0")))])
    left = place_replicas([node for node in nodes if node is not nodes[count // 2]])
    names = sorted(node.id for node in nodes)
    pings, ping_bytes, tick_s = ping_cost(nodes)
    reports, told, count_s = commit_cost(list(names))
    partitions, cut_s = timed(lambda: NodePartitions(names))
    seen = count_queries(list(names), partitions)
    said = inventory(list(names), placement)
    me = names[0]
    answers = responses_for(me, partitions, said)
    near = len(partitions.partition_of(me)) - 1
    taken, taken_s = timed(lambda: decode_all(answers, near))
    largest_b = largest_response_bytes(seen, partitions, said)
    others = {str(number): looked for number, looked in taken.items()}
    views, views_s = timed(lambda: memory_step_statuses(said[me].shards, peer_facts(others, me), lambda _: False))
    found, resolve_s = timed(lambda: resolve_step([view.candidate for view in views], unreachable=()))
    assert found.chosen is not None
    assert found.chosen.version_id.version == VERSIONS[-1]
    assert Tier.PEER in found.chosen.tiers
    sources = {name for name, looked in said.items() if name != me and looked.shards}
    question = len(
        _encode_request(
            "partition_inventory", GetPartitionInventory(max(partitions.other_partitions(me), key=len, default=()))
        )
    )
    received = sum(map(len, answers))
    return {
        "placement, seconds": f"{placed_s:.2f}",
        "a node joins: copies made anew, of all": f"{moved_copies(placement, joined)} of {count}",
        "a node leaves: copies made anew, beside its own": f"{moved_copies(placement, left)} of {count}",
        "membership: pings a node sends, and gets, per second": str(pings),
        "membership: bytes of a ping": f"{ping_bytes:,}",
        "membership: one period's decisions, ms": f"{tick_s * 1e3:.1f}",
        "a save: reports to the commit leader": f"{reports:,}",
        "a save: nodes the commit leader tells": f"{told:,}",
        "... periods of pings until all know": str(periods_until_known(list(names))),
        "a save: seconds the commit leader counts": f"{count_s:.2f}",
        "partitions, and the largest": f"{len(partitions.other_partitions(me)) + 1}, "
        f"{max(map(len, _all_partitions(partitions, me)))}",
        "cutting them, ms": f"{cut_s * 1e3:.1f}",
        "one node surveys: questions": f"{seen.one_survey:,}",
        "all survey at once: questions": f"{seen.restart:,}",
        "... if everybody asked everybody": f"{count * (count - 1):,}",
        "... most that one node gets": f"{seen.most_at_one:,}",
        "... most that one node asks": f"{seen.most_from_one:,}",
        "... most nodes one has a connection with": f"{seen.peers:,}",
        "all restore into another world: questions for layouts": f"{count * len(sources):,}",
        "inventory of one node, bytes": f"{len(_encode_response(said[me])):,}",
        "a question to a delegate, bytes": f"{question:,}",
        "its answer, bytes": f"{max(map(len, answers)):,}",
        "all survey at once: most that one node sends, MB": f"{largest_b / 1e6:.1f}",
        "all that one survey brings, MB": f"{received / 1e6:.1f}",
        "decoding that, seconds": f"{taken_s:.2f}",
        "merging it to steps, seconds": f"{views_s:.2f}",
        "resolve, ms": f"{resolve_s * 1e3:.2f}",
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
