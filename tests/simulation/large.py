"""A job of thousands of ranks, message by message: ``python -m tests.simulation.large --nodes 1250 --ranks 8``.

Each node is a real store, membership and account of copies, as in the schedules of this package, and they say to each
other all that they say in a job: ranks seal, copies are made, the first node counts and tells the others. Then that
node is lost, what it held is copied again, and the job goes on from memory with fewer ranks. Nodes know each other when
it begins. Every node looks around as in production; of what they see a few come to a step and plan all that their
ranks read, by the maps of :mod:`tieredckpt.agent.step_locator`.
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
"""Nodes that come to a step and plan what their ranks read."""
_LONGEST_S = 120.0
"""Of simulated time, for anything to happen."""


class LargeRunError(AssertionError):
    """Of what always happens here; what must never happen is looked for by the invariants."""


@dataclass
class Phase:
    """What it took until something was so."""

    what: str
    seconds: float
    """Of the processor, for the whole job in one process."""
    simulated_s: float
    sent: Counter[str]
    most: int
    """Messages that one node got."""

    def __str__(self) -> str:
        kinds = ", ".join(f"{count:,} {op}" for op, count in self.sent.most_common(5))
        return (
            f"{self.what}: {self.simulated_s:.1f} s of the job, {self.seconds:.1f} s here; {self.sent.total():,} "
            f"messages ({kinds}), one node got {self.most:,} at most"
        )


@dataclass
class RestorePlanCost:
    """What it takes one node to find what its ranks read."""

    pieces: int = 0
    layouts: int = 0
    seconds: float = 0.0


class LargeWorld(SimulatedWorld):
    """Counts what is sent."""

    most_events = sys.maxsize

    def __init__(self, nodes: int, ranks: int, fewer: int) -> None:
        parts = nodes * ranks
        self.rows = math.lcm(parts, fewer * ranks)
        """Of each tensor: any of the worlds cuts it evenly."""
        self.layouts: dict[str, bytes] = {}
        self.sent: Counter[str] = Counter()
        self.got: Counter[str] = Counter()
        super().__init__(
            1, ClusterShape(nodes, -(-nodes // RACK), 2, parts, 12 * parts), membership=MembershipSettings()
        )

    def call(self, source: SimulatedAgent, target: str, op: str, *rest: Any) -> None:
        self.sent[op] += 1
        self.got[target] += 1
        super().call(source, target, op, *rest)

    @property
    def agents(self) -> list[SimulatedAgent]:
        return [machine.agent for machine in self.machines.values() if machine.agent is not None]

    def introduce_all(self) -> None:
        """Everybody has heard of everybody."""
        rumours = [
            MemberUpdate(agent.machine.node, agent.members.generation, MemberState.ALIVE) for agent in self.agents
        ]
        for agent in self.agents:
            others = tuple(rumour for rumour in rumours if rumour.node.id != agent.name)
            agent.members.receive_gossip(agent.clock(), others[0].node.id, GossipMessage(others, None, (0, "")))

    def rows_of(self, part: int, parts: int) -> Box:
        each = self.rows // parts
        return Box((part * each, 0), (each, COLUMNS))

    def meta(self, part: int, parts: int, base: int | None) -> bytes:
        """What a rank says of its shard; its layout is kept as its node would."""
        box, shape = self.rows_of(part, parts), (self.rows, COLUMNS)
        entries = [TensorEntry(name, "float32", shape, box, 4, sharded=True) for name in tensor_names()]
        layout = build_layout(entries, (), {name: tuple(name.split(".")) for name in tensor_names()})
        self.layouts[layout.digest] = encode_layout(layout)
        return encode_meta(ShardMeta(layout.digest, (), base=-1 if base is None else base))

    def run_phase(self, what: str, done: Callable[[], bool]) -> Phase:
        self.sent.clear()
        self.got.clear()
        began, then = time.process_time(), self.now
        if not self.run(_LONGEST_S, done):
            raise LargeRunError(f"{what}: not within {_LONGEST_S:.0f} s")
        most = max(self.got.values(), default=0)
        return Phase(what, time.process_time() - began, self.now - then, Counter(self.sent), most)


class LargeTrainers(Trainers):
    world: LargeWorld

    def meta(self, key: ShardKey) -> bytes:
        return self.world.meta(key.part, len(self.places), self.base)


class LargeRestore(SimulatedRestore):
    """Some of the nodes come to a step, the others to the same: what they see is what those see."""

    world: LargeWorld
    job = LargeTrainers

    def __init__(self, world: SimulatedWorld, places: tuple[str, ...]) -> None:
        super().__init__(world, places)
        self.planned: list[RestorePlanCost] = []
        self.read = 0
        """Shards that ranks of these nodes took pieces of, all of them looked at."""

    def _inventories_received(
        self, name: str, attempt: int, nodes: dict[str, NodeInventory], silent: dict[str, str]
    ) -> None:
        self._sights[name] = nodes, silent
        if len(self._sights) == len(self.agents):
            self._decide()

    def _decide(self) -> None:
        ranks = self.places.count(self.nodes[0])
        deciding = self.nodes[:: max(1, len(self.nodes) // DECIDING)]
        votes = [self._vote_of(name) for name in deciding]
        chosen = elect_step([vote for vote in votes for _ in range(ranks)])
        if chosen is None:
            raise LargeRunError("the nodes do not come to one step")
        self.choices = dict.fromkeys(self.nodes, chosen)
        self.world.truth.restore_chosen(self)
        for name in deciding:
            self._plan(self.agents[name], chosen)
        self._resume(chosen)

    def _vote_of(self, name: str) -> list[VersionId]:
        nodes, silent = self._sights[name]
        views = memory_step_statuses(nodes[name].shards, peer_facts(nodes, name), lambda _: False)
        found = resolve_step([view.candidate for view in views], unreachable=["peer"] if silent else ())
        return [candidate.version_id for candidate in (found.chosen, *found.alternatives) if candidate is not None]

    def _plan(self, agent: SimulatedAgent, group: VersionId) -> None:
        """All that the ranks of one node read, as its agent finds it, and where that is."""
        began = time.process_time()
        nodes, silent = self._sights[agent.name]
        facts, sources = peer_tier(agent, nodes, silent).holders_of_parts(JOB, group)
        here = {
            fact.key.part: agent.shelf.find_shard(fact.key)[1]
            for fact in nodes[agent.name].shards
            if fact.key.version_id == group
        }
        took, used = RestorePlanCost(), set[str]()

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
                raise LargeRunError(f"rank {rank} finds {rows} rows of {TENSORS * box.sizes[0]}")
            took.pieces += len(found)
            parts |= {one.part for one in found}
        took.layouts, took.seconds = len(used), time.process_time() - began
        self.planned.append(took)
        for part in parts - here.keys():
            key = self._shard_key(group, part)
            agent.call(
                sources[part][0].node,
                "read_ranges",
                key,
                lambda found, key=key: self._looked_at(key, found),
                _raise_read_error,
            )

    def _known_epoch(self, _name: str) -> int:
        return max(agent.jobs.incarnations.epoch(JOB) for agent in self.agents.values())

    def _looked_at(self, key: ShardKey, found: tuple[Any, bytes]) -> None:
        record, data = found
        if damaged_chunks(data, record) or data != shard_content(key):
            raise LargeRunError(f"{self.world.short_name(key)} is read with bytes that nobody wrote")
        self.read += 1


def _raise_read_error(error: PeerStoreError) -> None:
    raise LargeRunError(f"a shard that was seen is not read: {error}")


def peer_tier(agent: SimulatedAgent, nodes: Mapping[str, NodeInventory], silent: Mapping[str, str]) -> PeerTier:
    """The part of the agent that says where shards are, over what was seen."""
    team = SimpleNamespace(
        this_node=agent.machine.node,
        inventory=lambda: JobInventory(nodes, silent),
        membership=SimpleNamespace(client_for=lambda node: agent.world.machines[node].node),
    )
    return PeerTier(SimpleNamespace(job_peers=lambda _: team))  # type: ignore[arg-type]


def tensor_names() -> list[str]:
    return [f"model.layers.{number // 4}.projection{number % 4}.weight" for number in range(TENSORS)]


@dataclass
class LargeJobResult:
    """A save, its commit, a lost node, and a restore into a smaller world."""

    phases: list[Phase] = field(default_factory=list)
    planned: list[RestorePlanCost] = field(default_factory=list)
    read: int = 0
    counted: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    memory_mib: int = 0


def run_large_job(nodes: int, ranks: int, fewer: int, say: Callable[[str], None] = lambda _: None) -> LargeJobResult:
    """``nodes`` of ``ranks`` each; ``fewer`` of them go on."""
    story, began = LargeJobResult(), time.process_time()

    def run_phase(what: str, done: Callable[[], bool]) -> None:
        story.phases.append(world.run_phase(what, done))
        say(str(story.phases[-1]))

    with seeded_randomness(random.Random(f"{nodes} {ranks}")):
        world = LargeWorld(nodes, ranks, fewer)
        world.introduce_all()
        world.run(2.0)
        everybody = sorted(world.machines)
        job: Trainers = LargeTrainers(world, tuple(n for n in everybody for _ in range(ranks)), 1, "a", None)
        world.start_job(job)
        run_phase(
            f"{nodes * ranks:,} ranks save, all know it to be settled", _is_replicated_everywhere(world, job.save())
        )
        lost = everybody[0]
        world.crash(world.machines[lost])
        run_phase(
            "the node that counts is lost, and all know it",
            lambda: not any(lost in one.live_nodes for one in world.agents),
        )
        floor = world.truth.floor
        assert floor is not None
        parts = range(world.truth.parts_of(floor))
        run_phase(
            "its shards have two copies again", lambda: all(len(world.truth.holders(floor, p)) > 1 for p in parts)
        )
        restore = LargeRestore(world, tuple(n for n in everybody[1 : fewer + 1] for _ in range(ranks)))
        world.restores.append(restore)
        restore.start()
        run_phase(f"{fewer * ranks:,} ranks look around and choose", lambda: bool(restore.outcome))
        if restore.outcome != "done":
            raise LargeRunError(restore.outcome)
        job = world.jobs[-1]
        run_phase(
            f"{fewer * ranks:,} ranks save, all know it to be settled", _is_replicated_everywhere(world, job.save())
        )
        world.truth.check()
        story.planned, story.read = restore.planned, restore.read
    story.seconds = time.process_time() - began
    story.memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    most = max(story.planned, key=lambda one: one.seconds)
    say(
        f"{len(story.planned)} nodes planned what {ranks} ranks each read: {most.pieces:,} pieces out of "
        f"{most.layouts:,} layouts a node, {most.seconds:.2f} s at most; {story.read:,} shards of other nodes "
        f"were read"
    )
    say(f"all of it: {story.seconds:.0f} s of one core, {story.memory_mib:,} MiB")
    return story


def _is_replicated_everywhere(world: LargeWorld, group: VersionId | None) -> Callable[[], bool]:
    def is_replicated() -> bool:
        return group in world.truth.replicated and all(
            one.jobs.versions(JOB).replicated == group for one in world.agents
        )

    return is_replicated


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.large")
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--ranks", type=int, default=8, help="of each node")
    parser.add_argument("--fewer", type=int, help="nodes that go on; four fifths when not given")
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
