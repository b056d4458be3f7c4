"""A restart of the simulated job.

Nodes query inventories. The ranks vote on a step, load it and begin a new incarnation. The sequence follows
tieredckpt/dcp/tiered_reader.py and tieredckpt/agent/agent_service.py. The decisions are those of
:mod:`tieredckpt.resolve_step`.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from peerstore.errors import PeerStoreError
from peerstore.parity.stripes import pending_recovery
from peerstore.peers.peer_messages import NodeInventory
from peerstore.shard_records import ShardInfo, ShardKey, ShardRecord, VersionId
from tests.simulation.agent import JOB, SimulatedAgent
from tests.simulation.memory import damaged_chunks, shard_content
from tests.simulation.trainers import Trainers
from tieredckpt.resolve_step import Candidate, Resolution, Tier, elect_step, resolve_step

if TYPE_CHECKING:
    from tests.simulation.world import SimulatedWorld

_MOST_TRIES = 4
_PATIENCE_S = 15.0
_REBUILT_S = 0.3


def candidates_of(here: NodeInventory, others: dict[str, NodeInventory]) -> list[Candidate]:
    """Return the steps that a node's own inventory and those of the other nodes contain."""
    found: dict[VersionId, dict[int, list[Tier]]] = defaultdict(dict)
    facts: dict[VersionId, ShardInfo] = {}
    for tier, looked in [(Tier.MEMORY, here), *((Tier.PEER, other) for other in others.values())]:
        for fact in looked.shards:
            facts[fact.key.version_id] = fact
            tiers = found[fact.key.version_id].setdefault(fact.key.part, [])
            if tier not in tiers:
                tiers.append(tier)
    bases = {group: int(fact.meta) for group, fact in facts.items()}
    return [
        Candidate(
            group,
            facts[group].parts,
            {part: tuple(tiers) for part, tiers in parts.items()},
            None if bases[group] < 0 else bases[group],
        )
        for group, parts in found.items()
    ]


class SimulatedRestore:
    """One attempt to start the job on ``places``."""

    job = Trainers

    def __init__(self, world: SimulatedWorld, places: tuple[str, ...]) -> None:
        self.world, self.places = world, places
        self.nodes = sorted(set(places))
        self.agents: dict[str, SimulatedAgent] = {}
        self.began = world.now
        self.outcome = ""
        self.holders_before: dict[ShardKey, set[str]] = {}
        """Holders of every shard when the queries began."""
        self.epoch = 0
        self._inventories: dict[str, tuple[dict[str, NodeInventory], dict[str, str]]] = {}
        self._resolutions: dict[str, Resolution] = {}
        self._loaded: dict[int, bool] = {}
        self.choices: dict[str, VersionId] = {}
        """The step that the ranks of each node load."""
        self._tries = 0
        self.refused: set[VersionId] = set()

    def start(self) -> None:
        self.world.log(f"the job restarts on {','.join(self.nodes)}")
        for name in self.nodes:
            agent = self.world.machines[name].agent
            if agent is None:
                self._end("an agent is not running")
                return
            self.agents[name] = agent
        self._query_inventories()

    def answering_nodes(self) -> set[str]:
        """Return the nodes that answered every query."""
        return set.intersection(*(nodes.keys() - silent.keys() for nodes, silent in self._inventories.values()))

    def _query_inventories(self) -> None:
        self._tries += 1
        self.holders_before = self.world.truth.snapshot()
        self._inventories.clear()
        for name, agent in self.agents.items():
            if not agent.running:
                self._end(f"the agent of {name} ended")
                return
            agent.job_inventory(partial(self._inventories_received, name, self._tries))

    def _inventories_received(
        self, name: str, attempt: int, nodes: dict[str, NodeInventory], silent: dict[str, str]
    ) -> None:
        if self.outcome or attempt != self._tries:
            return
        self._inventories[name] = nodes, silent
        others = {node: looked for node, looked in nodes.items() if node != name}
        unreachable = [Tier.PEER] if silent else []
        self._resolutions[name] = resolve_step(
            candidates_of(nodes[name], others), quarantined=self.refused, unreachable=unreachable
        )
        if len(self._inventories) < len(self.agents):
            return
        if self._may_find_newer():
            self.world.events.schedule(_REBUILT_S, partial(self._retry_query, self._tries))
        else:
            self._vote()

    def _may_find_newer(self) -> bool:
        """Return whether to wait: with parity, a newer version may still become complete."""
        if not self.world.shape.parity or self.world.now - self.began >= _PATIENCE_S:
            return False
        return any(pending_recovery(*self._inventories[name], agent.live_nodes) for name, agent in self.agents.items())

    def _retry_query(self, attempt: int) -> None:
        if not self.outcome and attempt == self._tries:
            self._tries -= 1  # a wait is not a failed try
            self._query_inventories()

    def _vote(self) -> None:
        votes = {
            name: [candidate.version_id for candidate in (found.chosen, *found.alternatives) if candidate is not None]
            for name, found in self._resolutions.items()
        }
        self.choices.clear()
        for name, vote in votes.items():  # every rank elects for itself, with its own vote first
            chosen = elect_step([vote, *(other for node, other in votes.items() if node != name)])
            if chosen is not None:
                self.choices[name] = chosen
        if self.choices:
            self.world.truth.restore_chosen(self)
            self._load(next(iter(self.choices.values())))
        elif any(self._resolutions[name].unreachable for name in self.agents) or any(votes.values()) or self.refused:
            self._end("no step that all ranks can load, and the answers may be incomplete")
        else:
            self.world.truth.restarted_empty(self)
            self._resume(None)

    def _load(self, group: VersionId) -> None:
        self.world.log(f"the ranks choose {self.world.short_name(group)}")
        self._loaded.clear()
        for part, name in enumerate(self.places):
            nodes, _ = self._inventories[name]
            holders = [
                node
                for node, looked in nodes.items()
                if any(f.key == self._shard_key(group, part) for f in looked.shards)
            ]
            holders.sort(key=lambda node, name=name: node != name)
            self._read(group, part, holders)

    def _shard_key(self, group: VersionId, part: int) -> ShardKey:
        return ShardKey(JOB, group.version, group.epoch, group.incarnation, group.attempt, part)

    def _read(self, group: VersionId, part: int, holders: list[str]) -> None:
        agent, key = self.agents[self.places[part]], self._shard_key(group, part)
        if not agent.running:
            self._end(f"{agent.name} went away")
            return
        if not holders:
            self._part_loaded(group, part, ok=False)
            return
        holder, rest = holders[0], holders[1:]

        def shard_received(found: tuple[ShardRecord, bytes]) -> None:
            record, data = found
            if damaged_chunks(data, record):
                self.world.log(f"part {part} at {holder} is damaged")
                if holder == agent.name:
                    agent.verify(key)
                else:
                    agent.call(holder, "verify_chunks", key)
                self._read(group, part, rest)
                return
            self.world.truth.shard_loaded(key, data, shard_content(key))
            self._part_loaded(group, part, ok=True)

        if holder == agent.name:
            try:
                shard_received(agent.read(key))
            except PeerStoreError:
                self._read(group, part, rest)
        else:
            agent.call(holder, "read_ranges", key, shard_received, lambda _: self._read(group, part, rest))

    def _part_loaded(self, group: VersionId, part: int, *, ok: bool) -> None:
        self._loaded[part] = ok
        if self.outcome or len(self._loaded) < len(self.places):
            return
        if all(self._loaded.values()):
            self._resume(group)
        elif self._tries < _MOST_TRIES:
            self.refused.add(group)
            self._query_inventories()
        else:
            self._end("no step could be read completely")

    def _resume(self, group: VersionId | None) -> None:
        if self.outcome:
            return
        if any(not agent.running for agent in self.agents.values()) or not self.world.reachable(self.nodes):
            self._end("a rank's node is lost or unreachable")
            return
        self.outcome = "done"
        self.epoch = max(self._known_epoch(name) for name in self.agents) + 1
        if group is not None:
            self.world.truth.version_restored(self, group)
            for agent in self.agents.values():
                agent.mark_committed(group)
                agent.jobs.incarnations.resume_from(JOB, group)
                agent.wake()
        incarnation = chr(ord("a") + len(self.world.restores) % 26)
        trainers = self.job(self.world, self.places, self.epoch, incarnation, group)
        if group is not None:
            self.world.log(f"{trainers} resumes from {self.world.short_name(group)}")
        else:
            self.world.log(f"{trainers} starts without a checkpoint")
        self.world.start_job(trainers)

    def _known_epoch(self, name: str) -> int:
        """Return the newest epoch known to a node, as a session computes it."""
        nodes, silent = self._inventories[name]
        seen = max((fact.key.epoch for looked in nodes.values() for fact in looked.shards), default=0)
        known = max(self.agents[name].jobs.incarnations.epoch(JOB), seen)
        return max(known, 1000 + int(self.world.now)) if silent else known

    def give_up(self, nodes: list[str]) -> None:
        """Abandon this attempt if the job restarts on some of its nodes."""
        if set(nodes) & set(self.nodes):
            self._end("another restart replaced it")

    def _end(self, why: str) -> None:
        if not self.outcome:
            self.outcome = why
            self.world.log(f"the restart on {','.join(self.nodes)} fails: {why}")
