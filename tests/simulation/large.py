"""A simulation of thousands of ranks that sends every message: ``python -m tests.simulation.large``.

Each node has a real store, membership and replication, and knows all other nodes from the start. The ranks save, the
nodes copy the shards, and the commit leader counts reports and notifies the others. Then the leader is lost, its shards
are copied again, and the job resumes from memory with fewer ranks. Every node queries the inventories as in production.
A few nodes choose a step and plan all reads of their ranks with :mod:`tieredckpt.agent.step_locator`.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from peerstore.errors import PeerStoreError
from peerstore.membership.swim import GossipMessage, MembershipSettings, MemberState, MemberUpdate
from peerstore.peers.peer_inventory import JobInventory
from peerstore.peers.peer_messages import NodeInventory
from peerstore.shard_records import ShardKey, VersionId
from tests.simulation.agent import JOB, SimulatedAgent
from tests.simulation.memory import damaged_chunks, seeded_randomness, shard_content
from tests.simulation.simulated_restore import SimulatedRestore
from tests.simulation.trainers import Trainers
from tests.simulation.world import ClusterShape, SimulatedWorld
from tieredckpt.agent.peer_tier import PeerTier, memory_step_statuses, peer_facts
from tieredckpt.agent.step_locator import StepLayoutCache, StepLocator
from tieredckpt.format.manifest import ShardMeta, encode_meta
from tieredckpt.format.shard_layout import TensorEntry, build_layout, encode_layout
from tieredckpt.format.slice_boxes import Box
from tieredckpt.resolve_step import elect_step, resolve_step

RACK = 32
TENSORS, COLUMNS = 12, 4
DECIDING = 8
"""Nodes that choose a step and plan the reads of their ranks."""
_LONGEST_S = 120.0
"""Simulated seconds that a phase may take."""


class LargeRunError(AssertionError):
    """A phase that did not end as expected. The invariants raise their own violations."""


@dataclass
class Phase:
    """The cost of one phase of the job."""

    name: str
    seconds: float
    """Processor seconds for the whole job in one process."""
    simulated_s: float
    sent: Counter[str]
    most: int
    """Most messages that one node received."""

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {op}" for op, count in self.sent.most_common(5))
        return (
            f"{self.name}: {self.simulated_s:.1f} s of the job, {self.seconds:.1f} s of processor time; "
            f"{self.sent.total():,} messages ({kinds}), at most {self.most:,} to one node"
        )


@dataclass
class RestorePlanCost:
    """The cost of planning the reads of one node's ranks."""

    pieces: int = 0
    layouts: int = 0
    seconds: float = 0.0


class LargeWorld(SimulatedWorld):
    """A simulated cluster that counts messages."""

    most_events = sys.maxsize

    def __init__(self, nodes: int, ranks: int, fewer: int) -> None:
        parts = nodes * ranks
        self.rows = math.lcm(parts, fewer * ranks)
        """Rows of each tensor, divisible by both world sizes."""
        self.layouts: dict[str, bytes] = {}
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        super().__init__(
            1, ClusterShape(nodes, -(-nodes // RACK), 2, parts, 12 * parts), membership=MembershipSettings()
        )

    def call(self, source: SimulatedAgent, target: str, op: str, *rest: Any) -> None:
        self.sent[op] += 1
        self.received[target] += 1
        super().call(source, target, op, *rest)

    @property
    def agents(self) -> list[SimulatedAgent]:
        return [machine.agent for machine in self.machines.values() if machine.agent is not None]

    def introduce_all(self) -> None:
        """Send every agent the member updates of all others."""
        updates = [
            MemberUpdate(agent.machine.node, agent.members.generation, MemberState.ALIVE) for agent in self.agents
        ]
        for agent in self.agents:
            others = tuple(update for update in updates if update.node.id != agent.name)
            agent.members.receive_gossip(agent.clock(), others[0].node.id, GossipMessage(others, None, (0, "")))

    def rows_of(self, part: int, parts: int) -> Box:
        each = self.rows // parts
        return Box((part * each, 0), (each, COLUMNS))

    def meta(self, part: int, parts: int, base: int | None) -> bytes:
        """Return the metadata of a rank's shard, and store its layout as the node would."""
        box, shape = self.rows_of(part, parts), (self.rows, COLUMNS)
        entries = [TensorEntry(name, "float32", shape, box, 4, sharded=True) for name in tensor_names()]
        layout = build_layout(entries, (), {name: tuple(name.split(".")) for name in tensor_names()})
        self.layouts[layout.digest] = encode_layout(layout)
        return encode_meta(ShardMeta(layout.digest, (), base=-1 if base is None else base))

    def run_phase(self, name: str, done: Callable[[], bool]) -> Phase:
        self.sent.clear()
        self.received.clear()
        began, then = time.process_time(), self.now
        if not self.run(_LONGEST_S, done):
            raise LargeRunError(f"The phase '{name}' did not end within {_LONGEST_S:.0f} simulated seconds.")
        most = max(self.received.values(), default=0)
        return Phase(name, time.process_time() - began, self.now - then, Counter(self.sent), most)


class LargeTrainers(Trainers):
    world: LargeWorld

    def meta(self, key: ShardKey) -> bytes:
        return self.world.meta(key.part, len(self.places), self.base)


class LargeRestore(SimulatedRestore):
    """A restore in which only some nodes choose a step. The others see the same inventories."""

    world: LargeWorld
    job = LargeTrainers

    def __init__(self, world: SimulatedWorld, places: tuple[str, ...]) -> None:
        super().__init__(world, places)
        self.planned: list[RestorePlanCost] = []
        self.read = 0
        """Shards of other nodes that the ranks of the planning nodes read, all verified."""

    def _inventories_received(
        self, name: str, attempt: int, nodes: dict[str, NodeInventory], silent: dict[str, str]
    ) -> None:
        self._inventories[name] = nodes, silent
        if len(self._inventories) == len(self.agents):
            self._decide()

    def _decide(self) -> None:
        ranks = self.places.count(self.nodes[0])
        deciding = self.nodes[:: max(1, len(self.nodes) // DECIDING)]
        votes = [self._vote_of(name) for name in deciding]
        chosen = elect_step([vote for vote in votes for _ in range(ranks)])
        if chosen is None:
            raise LargeRunError("The nodes did not elect a step.")
        self.choices = dict.fromkeys(self.nodes, chosen)
        self.world.truth.restore_chosen(self)
        for name in deciding:
            self._plan(self.agents[name], chosen)
        self._resume(chosen)

    def _vote_of(self, name: str) -> list[VersionId]:
        nodes, silent = self._inventories[name]
        views = memory_step_statuses(nodes[name].shards, peer_facts(nodes, name), lambda _: False)
        found = resolve_step([view.candidate for view in views], unreachable=["peer"] if silent else ())
        return [candidate.version_id for candidate in (found.chosen, *found.alternatives) if candidate is not None]

    def _plan(self, agent: SimulatedAgent, group: VersionId) -> None:
        """Plan all reads of one node's ranks, and read the shards that other nodes hold."""
        began = time.process_time()
        nodes, silent = self._inventories[agent.name]
        facts, sources = peer_tier(agent, nodes, silent).holders_of_parts(JOB, group)
        here = {
            fact.key.part: agent.shelf.slots.find_shard(fact.key)[1]
            for fact in nodes[agent.name].shards
            if fact.key.version_id == group
        }
        cost, used = RestorePlanCost(), set[str]()

        def layouts(digests: Collection[str]) -> Mapping[str, bytes]:
            used.update(digests)
            return {digest: self.world.layouts[digest] for digest in digests}

        step = StepLocator(
            group,
            here=here,
            elsewhere=facts,
            sources=sources,
            durable=None,
            layouts=layouts,
            records=lambda _: {},
            table=lambda _: None,
            known=StepLayoutCache(),
        )
        parts = set[int]()
        for rank in (rank for rank, place in enumerate(self.places) if place == agent.name):
            box = self.world.rows_of(rank, len(self.places))
            found = step.pieces(rank, [(name, *box) for name in tensor_names()], ()).pieces
            rows = sum((one.sizes if one.box is None else one.box[1])[0] for one in found)
            if rows != TENSORS * box.sizes[0]:
                raise LargeRunError(f"Rank {rank} found {rows} of {TENSORS * box.sizes[0]} rows.")
            cost.pieces += len(found)
            parts |= {one.part for one in found}
        cost.layouts, cost.seconds = len(used), time.process_time() - began
        self.planned.append(cost)
        for part in parts - here.keys():
            key = self._shard_key(group, part)
            agent.call(
                sources[part][0].node,
                "read_ranges",
                key,
                lambda found, key=key: self._shard_read(key, found),
                _raise_read_error,
            )

    def _known_epoch(self, _name: str) -> int:
        return max(agent.jobs.incarnations.epoch(JOB) for agent in self.agents.values())

    def _shard_read(self, key: ShardKey, found: tuple[Any, bytes]) -> None:
        record, data = found
        if damaged_chunks(data, record) or data != shard_content(key):
            raise LargeRunError(f"Shard {self.world.short_name(key)} was read damaged.")
        self.read += 1


def _raise_read_error(error: PeerStoreError) -> None:
    raise LargeRunError(f"A listed shard could not be read: {error}")


def peer_tier(agent: SimulatedAgent, nodes: Mapping[str, NodeInventory], silent: Mapping[str, str]) -> PeerTier:
    """Create the production peer tier over the given inventories."""
    peers = SimpleNamespace(
        this_node=agent.machine.node,
        inventory=lambda: JobInventory(nodes, silent),
        membership=SimpleNamespace(client_for=lambda node: agent.world.machines[node].node),
    )
    return PeerTier(SimpleNamespace(job_peers=lambda _: peers))  # type: ignore[arg-type]


def tensor_names() -> list[str]:
    return [f"model.layers.{number // 4}.projection{number % 4}.weight" for number in range(TENSORS)]


@dataclass
class LargeJobResult:
    """The cost of a save, its commit, a lost node, and a restore into a smaller world."""

    phases: list[Phase] = field(default_factory=list)
    planned: list[RestorePlanCost] = field(default_factory=list)
    read: int = 0
    seconds: float = 0.0
    memory_mib: int = 0


def run_large_job(nodes: int, ranks: int, fewer: int, report: Callable[[str], None] = lambda _: None) -> LargeJobResult:
    """Run a job on ``nodes`` nodes with ``ranks`` ranks each, and resume it on ``fewer`` nodes."""
    result, began = LargeJobResult(), time.process_time()

    def run_phase(name: str, done: Callable[[], bool]) -> None:
        result.phases.append(world.run_phase(name, done))
        report(str(result.phases[-1]))

    with seeded_randomness(random.Random(f"{nodes} {ranks}")):
        world = LargeWorld(nodes, ranks, fewer)
        world.introduce_all()
        world.run(2.0)
        names = sorted(world.machines)
        job: Trainers = LargeTrainers(world, tuple(n for n in names for _ in range(ranks)), 1, "a", None)
        world.start_job(job)
        run_phase(
            f"{nodes * ranks:,} ranks have saved, and all nodes know that all copies exist",
            _is_replicated_everywhere(world, job.save()),
        )
        lost = names[0]
        world.crash(world.machines[lost])
        run_phase(
            "the commit leader is lost, and all nodes know it",
            lambda: not any(lost in one.live_nodes for one in world.agents),
        )
        floor = world.truth.floor
        assert floor is not None
        parts = range(world.truth.parts_of(floor))
        run_phase(
            "the lost node's shards have two copies again",
            lambda: all(len(world.truth.holders(floor, p)) > 1 for p in parts),
        )
        restore = LargeRestore(world, tuple(n for n in names[1 : fewer + 1] for _ in range(ranks)))
        world.restores.append(restore)
        restore.start()
        run_phase(f"{fewer * ranks:,} ranks have listed the shards and chosen a step", lambda: bool(restore.outcome))
        if restore.outcome != "done":
            raise LargeRunError(restore.outcome)
        job = world.jobs[-1]
        run_phase(
            f"{fewer * ranks:,} ranks have saved, and all nodes know that all copies exist",
            _is_replicated_everywhere(world, job.save()),
        )
        world.truth.check()
        result.planned, result.read = restore.planned, restore.read
    result.seconds = time.process_time() - began
    result.memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    slowest = max(result.planned, key=lambda one: one.seconds)
    report(
        f"{len(result.planned)} nodes planned the reads of {ranks} ranks each; the slowest needed "
        f"{slowest.seconds:.2f} s for {slowest.pieces:,} pieces from {slowest.layouts:,} layouts; "
        f"the ranks read {result.read:,} shards of other nodes"
    )
    report(f"total: {result.seconds:.0f} s of one core, {result.memory_mib:,} MiB")
    return result


def _is_replicated_everywhere(world: LargeWorld, group: VersionId | None) -> Callable[[], bool]:
    def is_replicated() -> bool:
        return group in world.truth.replicated and all(
            one.jobs.versions(JOB).replicated == group for one in world.agents
        )

    return is_replicated


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.large")
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--ranks", type=int, default=8, help="ranks per node")
    parser.add_argument("--fewer", type=int, help="nodes that resume the job; default: four fifths of all nodes")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.disable()
    run_large_job(
        options.nodes, options.ranks, options.fewer or options.nodes * 4 // 5, lambda text: print(text, flush=True)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
