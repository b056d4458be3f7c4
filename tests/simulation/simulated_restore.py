"""A restart of the job: every rank's node looks around, the ranks vote, all load one step, a new incarnation begins.

As in tieredckpt/dcp/tiered_reader.py and tieredckpt/agent/agent_service.py; the decisions are those of
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
    """What one node's survey says: its own shards and those of the others."""
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
        self.photo: dict[ShardKey, set[str]] = {}
        self.epoch = 0
        self._sights: dict[str, tuple[dict[str, NodeInventory], dict[str, str]]] = {}
        self._resolutions: dict[str, Resolution] = {}
        self._loaded: dict[int, bool] = {}
        self.choices: dict[str, VersionId] = {}
        """What the ranks of each node load."""
        self._tries = 0
        self.refused: set[VersionId] = set()

    def start(self) -> None:
        self.world.log(f"the job starts again on {','.join(self.nodes)}")
        for name in self.nodes:
            agent = self.world.machines[name].agent
            if agent is None:
                self._end("an agent is away")
                return
            self.agents[name] = agent
        self._query_inventories()

    def answering_nodes(self) -> set[str]:
        """The nodes that answered everybody."""
        return set.intersection(*(nodes.keys() - silent.keys() for nodes, silent in self._sights.values()))

    def _query_inventories(self) -> None:
        self._tries += 1
        self.photo = self.world.truth.snapshot()
        self._sights.clear()
        for name, agent in self.agents.items():
            if not agent.running:
                self._end(f"{name} went away")
                return
            agent.job_inventory(partial(self._inventories_received, name, self._tries))

    def _inventories_received(
        self, name: str, attempt: int, nodes: dict[str, NodeInventory], silent: dict[str, str]
    ) -> None:
        if self.outcome or attempt != self._tries:
            return
        self._sights[name] = nodes, silent
        others = {node: looked for node, looked in nodes.items() if node != name}
        unreachable = [Tier.PEER] if silent else []
        self._resolutions[name] = resolve_step(
            candidates_of(nodes[name], others), quarantined=self.refused, unreachable=unreachable
        )
        if len(self._sights) < len(self.agents):
            return
        if self._may_find_newer():
            self.world.events.schedule(_REBUILT_S, partial(self._retry_query, self._tries))
        else:
            self._vote()

    def _may_find_newer(self) -> bool:
        """With parity, whether a newer version may become whole; for so long it is waited for that."""
        if not self.world.shape.parity or self.world.now - self.began >= _PATIENCE_S:
            return False
        return any(pending_recovery(*self._sights[name], agent.live_nodes) for name, agent in self.agents.items())

    def _retry_query(self, attempt: int) -> None:
        if not self.outcome and attempt == self._tries:
            self._tries -= 1  # nothing was tried yet
            self._query_inventories()

    def _vote(self) -> None:
        votes = {
            name: [candidate.version_id for candidate in (found.chosen, *found.alternatives) if candidate is not None]
            for name, found in self._resolutions.items()
        }
        self.choices.clear()
        for name, vote in votes.items():  # every rank counts them itself, its own first: all come to the same
            chosen = elect_step([vote, *(other for node, other in votes.items() if node != name)])
            if chosen is not None:
                self.choices[name] = chosen
        if self.choices:
            self.world.truth.restore_chosen(self)
            self._load(next(iter(self.choices.values())))
        elif any(self._resolutions[name].unreachable for name in self.agents) or any(votes.values()) or self.refused:
            self._end("nothing that all ranks can load, and not everybody answered")
        else:
            self.world.truth.restarted_empty(self)
            self._resume(None)

    def _load(self, group: VersionId) -> None:
        self.world.log(f"the ranks choose {self.world.short_name(group)}")
        self._loaded.clear()
        for part, name in enumerate(self.places):
            nodes, _ = self._sights[name]
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
            self._end("no step could be read whole")

    def _resume(self, group: VersionId | None) -> None:
        if self.outcome:
            return
        if any(not agent.running for agent in self.agents.values()) or not self.world.reachable(self.nodes):
            self._end("a rank's node went away")
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
        self.world.log(f"{trainers} goes on from {self.world.short_name(group) if group else 'nothing'}")
        self.world.start_job(trainers)

    def _known_epoch(self, name: str) -> int:
        """As a session counts: what the node knows, or what it can see."""
        nodes, silent = self._sights[name]
        seen = max((fact.key.epoch for looked in nodes.values() for fact in looked.shards), default=0)
        known = max(self.agents[name].jobs.incarnations.epoch(JOB), seen)
        return max(known, 1000 + int(self.world.now)) if silent else known

    def give_up(self, nodes: list[str]) -> None:
        """The job is started once more on some of these nodes."""
        if set(nodes) & set(self.nodes):
            self._end("it was started once more")

    def _end(self, why: str) -> None:
        if not self.outcome:
            self.outcome = why
            self.world.log(f"the restart on {','.join(self.nodes)} fails: {why}")
