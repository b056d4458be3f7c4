"""A simulated node agent: the real store and membership, driven by simulated time and messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from peerstore.commit_protocol import CommitDecision, CommitReports, PartsReport, broadcast_targets
from peerstore.daemon_process import ProcessIdentity
from peerstore.errors import NoQuorumError, PeerStoreError, PeerUnreachableError, ShardNotFoundError
from peerstore.membership.swim import MemberState, SwimMembership
from peerstore.membership.topology import DelegateCandidates, MemberList, NodePartitions
from peerstore.peers import heartbeat_loop
from peerstore.peers.heartbeat_loop import PendingMembers
from peerstore.peers.peer_inventory import DEAD_NODE_TIMEOUT_S, DELEGATE_TIMEOUT_S, NODE_INVENTORY_TIMEOUT_S
from peerstore.peers.peer_messages import NodeInventory, PingMessage
from peerstore.replication.replication_policy import (
    ReplicationPolicy,
    ReplicationState,
    ReplicationView,
    original_holders,
    pending_reports,
    shards_to_take_over,
    should_retry_repair,
)
from peerstore.shard_records import ShardKey, ShardRecord, VersionId
from peerstore.store.crash_recovery import CrashRecovery
from peerstore.store.job_table import JobTable
from peerstore.store.leases import LeaseManager
from peerstore.store.received_replicas import ReplicaStore
from peerstore.store.shards import ShardRemoval
from peerstore.store.slot_eviction import SlotLimits
from peerstore.store.slot_table import SlotTable
from peerstore.store.slots import SlotState
from peerstore.store.store_listener import StoreListeners
from tests.simulation.memory import BURST, SLOTS, SimulatedSealing, damaged_chunks
from tests.simulation.parity import SimulatedParityReplicator
from tests.simulation.transfers import IncomingTransfers, OutgoingTransfer

if TYPE_CHECKING:
    from tests.simulation.world import Machine, SimulatedWorld

JOB = "job"
TRAINER, COPIER = ProcessIdentity(0, 0), ProcessIdentity(-1, 0)
CALL_S = 1.0
DISCOVER_S = 10.0


class PendingReply:
    """A reply that a handler sends later."""

    def __init__(self, begin: Callable[[Callable[[Any], None]], None]) -> None:
        self.then = begin


class SimulatedAgent:
    """One run of a node's agent: the decisions of production without its threads and sockets."""

    def __init__(self, world: SimulatedWorld, machine: Machine) -> None:
        self.world, self.machine, self.name = world, machine, machine.name
        self.shelf = SlotTable(machine.arena, SlotLimits(machine.budget_bytes, SLOTS, BURST), self.clock)  # type: ignore[arg-type]
        self.jobs = JobTable(self.shelf, ttl_s=float("inf"))
        self.keeping = ShardRemoval(self.shelf, self.jobs)
        self.leasing = LeaseManager(self.shelf, self.jobs, lambda *_: False, self.keeping.expire_job)
        self.sealing = SimulatedSealing(self.shelf, self.jobs, None)  # type: ignore[arg-type]
        self.copies = ReplicaStore(self.shelf, self.jobs, self.leasing, self.keeping, StoreListeners())
        self.adoption = CrashRecovery(self.shelf, self.jobs, self.leasing)
        with self.shelf.lock:
            self.adoption.load_metadata()
            for slot in self.shelf.slots.in_state(SlotState.LEASED):
                if slot.owner == COPIER:
                    self.shelf.revoke_lease(slot, "the agent that received this copy has ended")
        self.members = SwimMembership(machine.node, int((1e9 + self.clock()) * 1e6), world.membership, seed=world.seed)
        self.newcomers = PendingMembers(world.membership)
        self.accounts = ReplicationState(machine.node.id, ReplicationPolicy(world.copies, ("zone", "rack")))
        self.sharing = SimulatedParityReplicator(self) if world.shape.parity else None
        """Replaces ``accounts`` when the cluster keeps parities."""
        self.reports = CommitReports(self.name) if self.sharing is None else self.sharing.reports
        self.incoming, self.outgoing = IncomingTransfers(self), OutgoingTransfer(self)
        self.jobs.incarnations.set_replication_guard(JOB, guarded=world.redundant, permit=self.check_quorum)
        self._partitions: tuple[MemberList | None, NodePartitions] = (None, NodePartitions(()))
        self._is_querying_partition = False
        self._partition_waiters: list[Callable[[Any], None]] = []
        """Callbacks that receive the result of the next query of this node's partition."""
        self._pump_at: float | None = None
        self._repairs: list[ShardRecord] = []
        self._handlers: dict[str, Callable[[str, Any], Any]] = {
            "ping": self._handle_ping,
            "indirect_ping": lambda _, node: self.world.is_reachable(
                self.name, node, self.members.settings.ping_timeout_s
            ),
            "member_list": lambda *_: self.members.member_list,
            "report_parts": lambda _, note: self.receive_report(note),
            "commit_decision": lambda _, found: self._apply_decision(found),
            "node_inventory": lambda *_: self.local_inventory(),
            "partition_inventory": lambda *_: PendingReply(self._partition_inventory),
            "read_ranges": lambda _, key: self.read(key),
            "verify_chunks": lambda _, key: self.verify(key),
            **self.incoming.handlers,
            **(self.sharing.handlers if self.sharing is not None else {}),
        }

    def start(self) -> None:
        self.set_member_list(self.world.member_list)
        self.run_later(self.world.random.random() * 0.5, self._send_heartbeats)
        self.run_later(DISCOVER_S, self._discover)
        self.run_later(0.3 if self.adoption.unverified_count() else 0.0, self._adopt)
        self.wake()

    def _discover(self) -> None:
        self.set_member_list(self.world.member_list)
        self.run_later(DISCOVER_S, self._discover)

    # -- the world ----------------------------------------------------------------------------------------------------

    def clock(self) -> float:
        return self.world.now + self.machine.clock_off_s

    @property
    def running(self) -> bool:
        return self.machine.agent is self

    def run_later(self, delay_s: float, work: Callable[[], None]) -> None:
        """Run ``work`` after a delay if this agent still runs."""
        self.world.events.schedule(delay_s, partial(self._if_running, work))

    def _if_running(self, work: Callable[[], None]) -> None:
        if self.running:
            work()

    def handle_request(self, sender: str, op: str, body: Any) -> Any:
        return self._handlers[op](sender, body)

    def call(
        self,
        node: str,
        op: str,
        body: Any,
        done: Callable[[Any], None] = lambda _: None,
        failed: Callable[[PeerStoreError], None] = lambda _: None,
        timeout_s: float = CALL_S,
    ) -> None:
        self.world.call(self, node, op, body, done, failed, timeout_s)

    # -- membership, as in peerstore/peers/heartbeat_loop.py
    # ---------------------------------------------------------------------------

    def check_quorum(self) -> None:
        if not self.members.has_quorum:
            raise NoQuorumError(self.members.explain_quorum())

    @property
    def live_nodes(self) -> dict[str, Any]:
        return self.newcomers.alive_or_pending(self.world.now, self.members.alive or (self.machine.node,))

    def _send_heartbeats(self) -> None:
        self.run_later(self.members.settings.heartbeat_s, self._send_heartbeats)
        self._advance_fence()
        before = self.members.changes
        for ping in self.members.tick(self.clock()):
            node = ping.node.id
            self.call(
                node,
                "ping",
                heartbeat_loop.build_ping(ping.gossip, self.copies, JOB),
                partial(self._ping_acked, node),
                partial(self._ping_failed, node),
                self.members.settings.ping_timeout_s,
            )
        for ping in self.members.indirect_pings():
            self.call(ping.helper.id, "indirect_ping", ping.node, partial(self._indirect_ping_done, ping.node))
        self._membership_changed(before)
        if self.members.newer_list_holder is not None:
            self.call(self.members.newer_list_holder, "member_list", None, self.set_member_list)
        self.incoming.sweep()

    def _advance_fence(self) -> None:
        self.members.advance_fence(self.jobs.versions(JOB).owner)

    def _handle_ping(self, sender: str, ping: PingMessage) -> PingMessage:
        before = self.members.changes
        self._advance_fence()
        self.members.receive_gossip(self.clock(), sender, ping.gossip)  # type: ignore[arg-type]
        answer = self.members.gossip_for(sender)  # type: ignore[arg-type]
        heartbeat_loop.apply_ping(self.copies, JOB, self.members.fence, ping)
        self._membership_changed(before)
        return heartbeat_loop.build_ping(answer, self.copies, JOB)

    def _ping_acked(self, node: Any, answer: PingMessage) -> None:
        before = self.members.changes
        self.members.ping_acked(self.clock(), node)
        self.members.receive_gossip(self.clock(), node, answer.gossip)
        heartbeat_loop.apply_ping(self.copies, JOB, self.members.fence, answer)
        self._membership_changed(before)

    def _indirect_ping_done(self, node: Any, reached: bool) -> None:
        if reached:
            self.members.indirect_ack(self.clock(), node)

    def _ping_failed(self, node: Any, _error: PeerStoreError) -> None:
        before = self.members.changes
        self.members.ping_failed(self.clock(), node)
        self._membership_changed(before)

    def set_member_list(self, member_list: Any) -> None:
        before = self.members.changes
        if member_list is not None and self.members.set_member_list(self.clock(), member_list):
            self.newcomers.announce(self.world.now, member_list, self.members.alive)
            self._membership_changed(before)

    def _membership_changed(self, before: int) -> None:
        if self.members.changes != before:
            self._take_over()
            self.wake()

    def _take_over(self) -> None:
        facts = self.copies.list_shards(JOB)
        heads = {node for fact in facts for node in fact.holders[:1]}
        now = self.world.now
        dead = {
            node
            for node in heads
            if self.members.state_of(node) is MemberState.DEAD and not self.newcomers.is_pending(now, node)
        }
        for fact in shards_to_take_over(facts, me=self.name, living=self.live_nodes, dead=dead):
            self.world.log(f"{self.name} takes over {self.world.short_name(fact.key)} from {fact.holders[0]}")
            self.copies.set_holders(fact.key, ())

    # -- copies, as in peerstore/replication/mirror_strategy.py
    # ----------------------------------------------------------------------------

    def replication_view(self) -> ReplicationView:
        known = self.jobs.versions(JOB)
        return ReplicationView(
            self.world.now,
            self.live_nodes,
            self.copies.list_shards(JOB),
            known.replicated,
            known.epoch,
            known.resume_point,
            self.members.generation_of,
            known.aborted_parts,
            self.members.standby,
        )

    def wake(self, delay_s: float = 0.001) -> None:
        at = self.world.now + delay_s
        if self._pump_at is None or at < self._pump_at:
            self._pump_at = at
            self.run_later(delay_s, partial(self._pump, at))

    def _pump(self, at: float) -> None:
        if self._pump_at == at:
            self._pump_at = None
            self.pump()

    def pump(self) -> None:
        """Send the next copy if none is in flight. Without one to send, report to the commit leader."""
        if self.sharing is not None:
            self.sharing.work()
            return
        if self.outgoing.is_busy:
            return
        look = self.replication_view()
        found = self.accounts.next_task(look)
        if found is not None:  # copies precede reports
            self.outgoing.begin(found, look)
            return
        self.wake(max(self.accounts.retry_s(look), 0.01))
        if not self.newcomers.all_resolved(self.world.now, self.members.alive):
            return
        self.send_reports(*pending_reports(self.reports, self.accounts.statuses(look), look, me=self.name))

    def send_reports(self, leader: str, reports: Iterable[PartsReport]) -> None:
        for report in reports:
            if leader == self.name:
                self.reports.add(report)
                self.reports.mark_reported(leader, report)
            else:
                self.call(
                    leader,
                    "report_parts",
                    report,
                    lambda _, report=report: self.reports.mark_reported(leader, report),
                    lambda _: self.accounts.leader_unreachable(leader, self.world.now),
                )
        self._decide()

    def receive_report(self, note: PartsReport) -> None:
        self.reports.add(note)
        self._decide()

    def _decide(self) -> None:
        found = self.reports.decide(
            living=self.live_nodes,
            life=self.members.generation_of,
            replicated=self.jobs.versions(JOB).replicated,
            quorum=self.members.has_quorum,
        )
        if not found:
            return
        self.world.log(f"{self.name} decides: {self._describe(found)}")
        self.world.truth.commit_decided(self, found)
        self._apply_decision(found)
        for node in broadcast_targets(self.live_nodes, self.name):
            self.call(node, "commit_decision", found)

    def _describe(self, found: CommitDecision) -> str:
        committed = f"{self.world.short_name(found.committed)} is committed" if found.committed is not None else ""
        replicated = f"{self.world.short_name(found.replicated)} is replicated" if found.replicated is not None else ""
        aborted = ", ".join(map(self.world.short_name, found.aborted)) + " is aborted" if found.aborted else ""
        return ", ".join(filter(None, (committed, replicated, aborted)))

    def _apply_decision(self, found: CommitDecision) -> None:
        self.copies.apply_decision(JOB, found)

    # -- shards -------------------------------------------------------------------------------------------------------

    def sealed(self, key: ShardKey) -> None:
        """Delete the version if it was aborted, as the store does after each seal."""
        with self.shelf.lock:
            if self.jobs.is_aborted(JOB, key.version_id):
                self.keeping.delete_versions(JOB, [key.version_id])
        self.wake()

    def mark_committed(self, group: VersionId) -> None:
        with self.shelf.lock:
            changed = self.jobs.mark_committed(JOB, group)
        if changed:
            self.wake()

    def abort_part(self, key: ShardKey) -> None:
        with self.shelf.lock:
            aborted = self.jobs.abort_part(JOB, key.version_id, key.part)
            if aborted:
                self.keeping.delete_versions(JOB, [key.version_id])
        if aborted:
            self.world.truth.part_aborted(key)
            self.wake()

    def local_inventory(self) -> NodeInventory:
        epoch, incarnation = self.jobs.versions(JOB).owner
        facts = tuple(self.copies.list_shards(JOB))
        parities = tuple(one.info for one in self.sharing.parity.stored_parities) if self.sharing is not None else ()
        return NodeInventory(
            facts, epoch, incarnation, self.jobs.versions(JOB).replicated, self.adoption.unverified_count(), parities
        )

    def read(self, key: ShardKey) -> tuple[ShardRecord, bytes]:
        slot, record = self.shelf.slots.find_shard(key)
        return record, bytes(self.machine.arena.bytes[slot.name])

    def verify(self, key: ShardKey) -> bool:
        """Drop a shard if it is damaged, and return whether it was."""
        try:
            record, data = self.read(key)
        except ShardNotFoundError:
            return False
        if not damaged_chunks(data, record):
            return False
        self.drop_damaged(key, "changed after it was sealed")
        return True

    def verify_all(self) -> None:
        keys = [fact.key for fact in self.copies.list_shards(JOB)]
        for key in keys + [record.key for record in self.copies.list_parities(JOB)]:
            self.verify(key)

    def drop_damaged(self, key: ShardKey, reason: str) -> None:
        record = self.keeping.drop_damaged(key, reason)
        if record is not None:
            self.world.log(f"{self.name} drops its damaged {self.world.short_name(key)}")
            if key.kind:
                self.wake()
            else:
                self.repair(record)

    def _adopt(self) -> None:
        self.adoption.verify_checksums(
            lambda record, path, _: damaged_chunks(self.machine.arena.bytes[path], record),
            lambda *_: self.wake(),
            self.drop_damaged,
        )

    # -- other nodes' shards, as in peerstore/server/job_peers.py
    # ---------------------------------------------------------------------

    def job_inventory(self, done: Callable[[dict[str, NodeInventory], dict[str, str]], None]) -> None:
        """Return the inventories of all listed nodes, and why nodes did not answer.

        A large job is queried as in peerstore/peers/peer_inventory.py: this node's partition directly, each other
        partition through a delegate.
        """
        partitions = self._node_partitions()
        beyond = partitions.other_partitions(self.name)
        nodes: dict[str, NodeInventory] = {}
        silent: dict[str, str] = {}
        waiting, lives = 1 + len(beyond), self._generations(name for members in beyond for name in members)

        def inventories_received(found: Mapping[str, NodeInventory], unknown: Mapping[str, str]) -> None:
            nonlocal waiting
            nodes.update(found)
            silent.update(unknown)
            waiting -= 1
            if not waiting:
                done(nodes, silent)

        def partition_received(
            members: tuple[str, ...], answer: tuple[Mapping[str, NodeInventory], Mapping[str, str]]
        ) -> None:
            """Query live members directly if the delegate did not reach them."""
            found = {node: answer[0][node] for node in members if node in answer[0]}
            for inventory in found.values():
                self.jobs.incarnations.fence(JOB, inventory.epoch, inventory.incarnation)
            self._note_holders(found, lives)
            rest = [node for node in members if node not in found]
            dead = {node: answer[1].get(node, "") for node in rest if node not in self.live_nodes}
            rest = [node for node in rest if node not in dead]
            if rest:
                self._query_nodes(rest, lambda more, unknown: inventories_received(found | more, dead | unknown))
            else:
                inventories_received(found, dead)

        def query_delegate(candidates: DelegateCandidates) -> None:
            delegate = candidates.next_delegate()
            if delegate is None:
                self._query_nodes(candidates.members, inventories_received)
            else:
                self.call(
                    delegate,
                    "partition_inventory",
                    None,
                    partial(partition_received, candidates.members),
                    lambda _: query_delegate(candidates),
                    DELEGATE_TIMEOUT_S,
                )

        for members in beyond:
            query_delegate(DelegateCandidates(members, gone=lambda node: node not in self.live_nodes))
        self._query_nodes(sorted({self.name, *partitions.partition_of(self.name)}), inventories_received)

    def _node_partitions(self) -> NodePartitions:
        member_list = self.members.member_list
        if self._partitions[0] is not member_list:
            self._partitions = (
                member_list,
                NodePartitions([node.id for node in member_list.nodes] if member_list is not None else []),
            )
        return self._partitions[1]

    def _partition_inventory(self, done: Callable[[Any], None]) -> None:
        """Return the inventories of this node's partition. Callers during a query share the next one."""
        self._partition_waiters.append(done)
        if self._is_querying_partition:
            return
        waiters, self._partition_waiters = self._partition_waiters, []
        self._is_querying_partition = True

        def inventories_received(found: Mapping[str, NodeInventory], silent: Mapping[str, str]) -> None:
            self._is_querying_partition = False
            for waiter in waiters:
                waiter((found, silent))
            if self._partition_waiters:
                self._partition_inventory(self._partition_waiters.pop())

        self._query_nodes(sorted({self.name, *self._node_partitions().partition_of(self.name)}), inventories_received)

    def _query_nodes(
        self, names: Sequence[str], done: Callable[[dict[str, NodeInventory], dict[str, str]], None]
    ) -> None:
        """Request each node's inventory directly."""
        nodes: dict[str, NodeInventory] = {}
        silent: dict[str, str] = {}
        waiting, living, lives = set(names), self.live_nodes, self._generations(names)
        began = self.world.now

        def inventory_received(node: str, found: NodeInventory | PeerStoreError) -> None:
            if isinstance(found, NodeInventory):
                if found.verifying and self.world.now - began < NODE_INVENTORY_TIMEOUT_S:
                    self.run_later(0.2, partial(query, node))
                    return
                nodes[node] = found
                self.jobs.incarnations.fence(JOB, found.epoch, found.incarnation)
                self._note_holders({node: found}, lives)
                if found.verifying:
                    silent[node] = f"it still verifies {found.verifying} shards"
            else:
                silent[node] = str(found)
            waiting.discard(node)
            if not waiting:
                done(nodes, silent)

        def query(node: str) -> None:
            if node == self.name:
                inventory_received(node, self.local_inventory())
            else:
                within_s = NODE_INVENTORY_TIMEOUT_S if node in living else DEAD_NODE_TIMEOUT_S
                self.call(
                    node,
                    "node_inventory",
                    None,
                    partial(inventory_received, node),
                    partial(inventory_received, node),
                    within_s,
                )

        for node in names:
            query(node)

    def _generations(self, names: Iterable[str]) -> dict[str, int]:
        """Return the generation of each node at the time of a query."""
        return {name: self.members.generation_of(name) for name in names}  # type: ignore[arg-type]

    def _note_holders(self, found: Mapping[str, NodeInventory], lives: Mapping[str, int]) -> None:
        mine = {fact.key for fact in self.copies.list_shards(JOB)}
        if self.sharing is not None:
            mine |= self.sharing.parity.protected_keys
        for node, looked in found.items():
            shared = self.world.keys_of(looked) & mine if node != self.name else ()
            if shared:
                confirm = self.accounts.confirm_holder if self.sharing is None else self.sharing.confirm_holder
                for key in [fact.key for fact in looked.shards if fact.key in shared]:
                    confirm(key, node, lives.get(node, 0))

    def repair(self, record: ShardRecord, wait_s: float = 1.0) -> None:
        """Fetch a dropped shard from a node that has a copy."""

        def inventories_received(nodes: dict[str, NodeInventory], _silent: dict[str, str]) -> None:
            holders = {
                node: fact.holders
                for node, looked in nodes.items()
                for fact in looked.shards
                if node != self.name and fact.key == record.key
            }
            self._fetch(record, holders, sorted(holders), wait_s)

        self.job_inventory(inventories_received)

    def _retry_repair(self, record: ShardRecord, error: PeerStoreError, wait_s: float) -> None:
        self.world.log(f"{self.name} could not repair {self.world.short_name(record.key)}: {str(error)[:100]}")
        if should_retry_repair(record, error, self.jobs.versions(JOB).replicated):
            self.run_later(wait_s, partial(self.repair, record, min(60.0, 2 * wait_s)))

    def _fetch(
        self, record: ShardRecord, reported: dict[str, tuple[str, ...]], sources: list[str], wait_s: float
    ) -> None:
        if not sources and self.sharing is not None:
            self.world.turns.start_streams(
                partial(self._rebuild, record, original_holders(self.name, reported), wait_s)
            )
            return
        if not sources:
            self._retry_repair(record, PeerUnreachableError("no reachable node has a copy"), wait_s)
            return

        def shard_received(found: tuple[ShardRecord, bytes]) -> None:
            if damaged_chunks(found[1], record):
                self.call(sources[0], "verify_chunks", record.key)
                self._fetch(record, reported, sources[1:], wait_s)
            else:
                self._seal_repaired(record, found[1], original_holders(self.name, reported), wait_s)

        self.call(
            sources[0],
            "read_ranges",
            record.key,
            shard_received,
            lambda _: self._fetch(record, reported, sources[1:], wait_s),
        )

    def _rebuild(self, record: ShardRecord, holders: tuple[str, ...], wait_s: float) -> None:
        try:
            if self.sharing is not None:
                self.sharing.parity.rebuild(record, holders)
        except PeerStoreError as error:
            self._retry_repair(record, error, wait_s)

    def _seal_repaired(self, record: ShardRecord, data: bytes, holders: tuple[str, ...], wait_s: float) -> None:
        try:
            lease = self.copies.begin_replica(record, whole=True, owner=COPIER)
            if lease is not None:
                self.machine.arena.bytes[lease.slot][:] = data
                self.copies.seal_replica(lease.id, record, holders)
                self.wake()
        except PeerStoreError as error:
            self._retry_repair(record, error, wait_s)
