"""A simulated cluster: machines with agents, their network, the job's trainers, and the invariants."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from peerstore.errors import PeerStoreError, PeerUnreachableError
from peerstore.membership.swim import MembershipSettings
from peerstore.membership.topology import NodeId, PeerNode, member_list
from peerstore.peers.peer_messages import NodeInventory
from peerstore.shard_records import ShardKey, VersionId
from peerstore.store.slot_eviction import SlotLimits
from tests.simulation.agent import PendingReply, SimulatedAgent
from tests.simulation.invariants import NOTICED_S, Invariants
from tests.simulation.memory import BURST, SHARD_BYTES, SLOTS, DictArena
from tests.simulation.network import Events, SimulatedNetwork
from tests.simulation.sealed_shards import Violation
from tests.simulation.simulated_restore import SimulatedRestore
from tests.simulation.simulated_threads import SimulatedThreads
from tests.simulation.trainers import Trainers

MEMBERSHIP = MembershipSettings(
    heartbeat_s=2.0, ping_timeout_s=0.6, suspect_after=1, dead_after_s=2.0, ring_neighbours=1
)
REFUSED_S = 0.002
_KEYS_KEPT = 4096


@dataclass(frozen=True)
class ClusterShape:
    """The fixed parameters of one schedule."""

    nodes: int = 4
    racks: int = 0
    """Number of racks; 0 if nodes have no rack label."""
    copies: int = 2
    parts: int = 4
    budget_shards: int = 64
    parity: int = 0
    """Other nodes in each node's parity group; 0 to keep copies instead."""

    @property
    def redundant(self) -> bool:
        """Whether the cluster survives the loss of one machine."""
        return self.copies > 1 or self.parity > 0


@dataclass
class Machine:
    """A machine with its agent and its arena."""

    name: str
    node: PeerNode
    budget_bytes: int
    arena: DictArena = field(default_factory=DictArena)
    agent: SimulatedAgent | None = None
    up: bool = False
    clock_off_s: float = 0.0
    lives: int = 0


class SimulatedWorld:
    most_events = 40_000

    def __init__(
        self,
        seed: int,
        shape: ClusterShape,
        *,
        log: Callable[[str], None] | None = None,
        membership: MembershipSettings = MEMBERSHIP,
    ) -> None:
        self.seed, self.shape = seed, shape
        self.copies = shape.copies
        self.redundant = shape.redundant
        self.membership = membership
        self.random = random.Random(f"world {seed}")
        self.events = Events()
        self.network = SimulatedNetwork(self.events, self.random)
        self.turns = SimulatedThreads()
        self.machines: dict[str, Machine] = {}
        self.wire_damage = 0.0
        self.window_s = NOTICED_S
        self._log = log
        self.truth = Invariants(self)
        self.jobs: list[Trainers] = []
        self.restores: list[SimulatedRestore] = []
        self._added = itertools.count()
        self._keys: dict[int, tuple[NodeInventory, frozenset[ShardKey]]] = {}
        for _ in range(shape.nodes):
            self._add()
        self.member_list = member_list(1, [machine.node for machine in self.machines.values()])
        for machine in self.machines.values():
            self.boot(machine)
        self.truth.begin()

    def _add(self) -> Machine:
        number = next(self._added)
        name = f"n{number}"
        labels = (("rack", f"r{number % self.shape.racks}"),) if self.shape.racks else ()
        node = PeerNode(NodeId(name), f"{name}:1", labels)
        machine = self.machines[name] = Machine(name, node, self.shape.budget_shards * SHARD_BYTES)
        return machine

    @property
    def now(self) -> float:
        return self.events.now

    def log(self, text: str) -> None:
        if self._log is not None:
            self._log(f"{self.now:9.3f}  {text}")

    def short_name(self, what: ShardKey | VersionId) -> str:
        """Return a short name of a shard or version for logs."""
        part = f".{what.part}" if isinstance(what, ShardKey) else ""
        return f"{what.epoch % 1000}{what.incarnation}/{what.version}{part}"

    # -- time ---------------------------------------------------------------------------------------------------------

    def run(self, seconds: float, until: Callable[[], bool] | None = None) -> bool:
        """Run events for some time or until ``until`` is true, and return whether it is."""
        end = self.now + seconds
        if until is not None and until():
            return True
        checked_at = self.now
        while (work := self.events.next(end)) is not None:
            work()
            if self.events.count > self.most_events:
                raise Violation(f"the cluster is still not at rest after {self.most_events} events")
            if self.truth.deleted_copies:
                self.truth.check()
            if until is not None and self.now - checked_at > 0.25:
                checked_at = self.now
                if until():
                    return True
        return until() if until is not None else True

    # -- machines -----------------------------------------------------------------------------------------------------

    def boot(self, machine: Machine) -> None:
        """Start an agent over the machine's current arena."""
        machine.up, machine.lives = True, machine.lives + 1
        self.truth.record_trouble()
        self.truth.watch(machine)
        machine.agent = SimulatedAgent(self, machine)
        machine.agent.start()

    def crash(self, machine: Machine) -> None:
        """Crash a machine, which loses its memory."""
        self.log(f"{machine.name} crashes")
        machine.agent, machine.up = None, False
        machine.arena = DictArena()
        self.truth.machine_crashed(machine)
        for job in self.jobs:
            job.lose_machine(machine.name)

    def join(self) -> Machine:
        """Add a machine to the cluster and to the member list."""
        machine = self._add()
        self.log(f"{machine.name} joins the member list")
        self.publish([*self.member_list.nodes, machine.node])
        self.boot(machine)
        return machine

    def publish(self, nodes: Sequence[PeerNode], standby: Collection[NodeId] | None = None) -> None:
        """Publish a new member list. Agents read it at different times or receive it from each other."""
        wanted = self.member_list.standby if standby is None else standby
        known = [node.id for node in nodes if node.id in wanted]
        self.member_list = member_list(self.member_list.version + 1, nodes, known if len(known) < len(nodes) else ())
        for machine in self.machines.values():
            if machine.agent is not None and self.random.random() < 0.7:
                machine.agent.run_later(
                    self.random.random() * 2, partial(machine.agent.set_member_list, self.member_list)
                )

    def is_full(self, machine: Machine) -> bool:
        return machine.arena.full or machine.budget_bytes < self.shape.budget_shards * SHARD_BYTES

    def set_budget(self, machine: Machine, shards: int) -> None:
        machine.budget_bytes = shards * SHARD_BYTES
        if machine.agent is not None:
            machine.agent.shelf._limits = SlotLimits(machine.budget_bytes, SLOTS, BURST)

    # -- messages -----------------------------------------------------------------------------------------------------

    def is_reachable(self, source: str, target: str, within_s: float) -> bool:
        """Return whether a ping would be answered in time."""
        machine = self.machines.get(target)
        delays = [self.network.delay_s(source, target), self.network.delay_s(target, source)]
        answers = machine is not None and machine.agent is not None
        return answers and None not in delays and sum(delay or 0.0 for delay in delays) <= within_s

    def call(
        self,
        source: SimulatedAgent,
        target: str,
        op: str,
        body: Any,
        done: Callable[[Any], None],
        failed: Callable[[PeerStoreError], None],
        timeout_s: float,
    ) -> None:
        """Send a request and its reply. Both may be lost or late, and the request may arrive twice."""
        network, sent_at, machine = self.network, self.now, self.machines.get(target)

        def request_lost(_: object = None) -> None:
            left = max(0.0, sent_at + timeout_s - self.now)
            source.run_later(left, partial(failed, PeerUnreachableError(f"{target} does not answer")))

        def request_arrives(*, first: bool) -> None:
            agent = machine.agent if machine is not None else None
            if agent is None:
                if first and machine is not None and machine.up:
                    source.run_later(REFUSED_S, partial(failed, PeerUnreachableError(f"{target} refuses")))
                elif first:
                    request_lost()
                return
            try:
                answer = agent.handle_request(source.name, op, body)
            except PeerStoreError as error:
                send_reply(partial(failed, error), first=first)
                return
            if isinstance(answer, PendingReply):
                answer.then(lambda known: send_reply(partial(done, known), first=first))
            else:
                send_reply(partial(done, answer), first=first)

        def send_reply(work: Callable[[], None], *, first: bool) -> None:
            delay = network.delay_s(target, source.name)
            if not first:
                return
            if delay is None or self.now + delay - sent_at > timeout_s:
                request_lost()
            else:
                source.run_later(delay, work)

        delay = network.delay_s(source.name, target)
        if delay is None:
            request_lost()
            return
        self.events.schedule(delay, partial(request_arrives, first=True))
        # A connection has one transfer at a time, so an offer that opens one does not arrive twice.
        if network.is_duplicated() and op != "offer_replica":
            self.events.schedule(2 * delay + self.random.random(), partial(request_arrives, first=False))

    def damage_on_wire(self, chunk: bytes) -> bytes:
        if self.wire_damage and self.random.random() < self.wire_damage:
            return bytes([chunk[0] ^ 1]) + chunk[1:] if chunk else chunk
        return chunk

    def keys_of(self, inventory: NodeInventory) -> frozenset[ShardKey]:
        """Return the keys in an inventory, cached because thousands of nodes receive it."""
        known, keys = self._keys.get(id(inventory), (None, frozenset[ShardKey]()))
        if known is not inventory:
            keys = frozenset(fact.key for fact in inventory.shards)
            self._keys[id(inventory)] = inventory, keys
            while len(self._keys) > _KEYS_KEPT:
                del self._keys[next(iter(self._keys))]
        return keys

    def agent_at(self, name: str) -> SimulatedAgent | None:
        """Return a machine's agent, or ``None`` if it is not running or the machine was replaced."""
        machine = self.machines.get(name)
        return machine.agent if machine is not None else None

    # -- the job ------------------------------------------------------------------------------------------------------

    def reachable(self, names: Sequence[str]) -> bool:
        return all(self.network.is_open(one, other) for one in names for other in names)

    def restart(self, names: Sequence[str]) -> SimulatedRestore | None:
        """Restart the job on these machines, or return ``None`` if they cannot reach each other."""
        names = [name for name in names if self.machines[name].agent is not None]
        if not names or not self.reachable(names):
            return None
        for job in self.jobs:
            job.stop(names)
        for earlier in self.restores:
            earlier.give_up(names)
        places = tuple(names[part % len(names)] for part in range(self.shape.parts))
        restore = SimulatedRestore(self, places)
        self.restores.append(restore)
        restore.start()
        return restore

    def start_job(self, trainers: Trainers) -> None:
        self.jobs = [job for job in self.jobs if job.running and not set(job.places) & set(trainers.places)]
        self.jobs.append(trainers)

    def heal(self) -> None:
        self.network.heal()
        self.wire_damage = 0.0
        for machine in self.machines.values():
            machine.arena.full = False
            self.set_budget(machine, self.shape.budget_shards)
