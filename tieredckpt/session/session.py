"""Session of one job in one process: agent connection, incarnation, slots, cached plans, seals."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch
import torch.distributed as dist

from peerstore.daemon_process import ProcessIdentity, current_process
from peerstore.errors import (
    ArenaBusyError,
    ArenaFullError,
    FencedError,
    LeaseLostError,
    PeerStoreError,
    ShardNotFoundError,
)
from peerstore.failpoints import failpoint
from peerstore.membership.topology import PeerNode
from peerstore.message_codec import from_msgpack
from peerstore.settings import JobPeersConfig
from peerstore.shard_records import Lease, ShardKey, ShardRecord, SlotInfo, VersionId
from peerstore.sizes_and_durations import show_size
from peerstore.store.node_store import MAX_BLOB_BYTES
from tieredckpt.agent.agent_api import (
    LAYOUT_BLOB_PREFIX,
    TABLE_BLOB_PREFIX,
    NodeAgentAPI,
    ProtectionStatus,
    StepInventory,
)
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.agent.local_agents import settings_of_newest_agent
from tieredckpt.agent.peer_config import configured_peer_plan, peer_transport
from tieredckpt.durable.object_store import ObjectStore
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import SaveFailedError, StoreBusyError, TieredCheckpointError, TierUnavailableError, UsageError
from tieredckpt.format.manifest import ShardMeta, StateTable, encode_meta, encode_table, pack_blob
from tieredckpt.format.shard_layout import Layout, encode_layout, round_up
from tieredckpt.resolve_step import resolve_step
from tieredckpt.session.incarnation import CapturePoint, IncarnationTracker, SaveDecision, SaveProposal
from tieredckpt.session.peer_reader import PeerReader
from tieredckpt.session.save_plan import PlannedSave
from tieredckpt.settings import DurableSettings, Settings, copy_thread_count, is_local_rank_zero, local_world_size
from tieredckpt.tensors.device import accelerator
from tieredckpt.tensors.finite_check import FiniteChecker
from tieredckpt.tensors.slot_copy import Copier, MappedSlot
from tieredckpt.tensors.state_dict import Fingerprint

log = logging.getLogger(__name__)

_SLOT_STEP = 1 << 20
"""Bytes that sizes of large leases are multiples of."""
_SMALL = 16 << 20
"""Bytes up to which leases have finer sizes and slots are not prepared."""
_PROVISIONAL = 1 << 40
"""First attempt number of slots that are leased before their step is known."""
_KEPT_PLANS = 4
_REMEMBERED = 64
_LOAD_PREFIX, _KEPT_LOADS = "resumed.", 32

AgentFactory = Callable[[Settings, str], NodeAgentAPI]
_sessions: dict[tuple[int, str, str], Session] = {}
_sessions_lock = threading.Lock()
_factory: AgentFactory = NodeAgentClient


def open_session(job: str, settings: Settings) -> Session:
    """Return this process's session for ``job``, opened by the first call: one per process and agent."""
    name = (os.getpid(), job, str(settings.agent_directory))
    with _sessions_lock:
        session = _sessions.get(name)
        if session is None:
            if not _sessions:
                atexit.register(close_sessions)
            try:
                located = settings_of_newest_agent(job, settings) if _factory is NodeAgentClient else settings
                node = _factory(located, job)
                with contextlib.ExitStack() as undo:
                    undo.callback(node.close)
                    session = _sessions[name] = Session(job, located, node)
                    undo.pop_all()
            except (PeerStoreError, OSError) as error:
                raise TierUnavailableError(f"the node agent cannot be used: {error}") from error
    session.update_settings(settings)
    return session


def session_if_open(job: str, settings: Settings) -> Session | None:
    """Return the session of :func:`open_session` if it is already open."""
    with _sessions_lock:
        return _sessions.get((os.getpid(), job, str(settings.agent_directory)))


def has_sessions() -> bool:
    """Return whether this process has a session of any job."""
    with _sessions_lock:
        return any(name[0] == os.getpid() for name in _sessions)


def close_sessions() -> None:
    """Close this process's sessions and their agent connections. Sealed shards remain with the agents."""
    with _sessions_lock:
        mine = [name for name in _sessions if name[0] == os.getpid()]
        for session in [_sessions.pop(name) for name in mine]:
            session.close()


def newest_sealed_key(*, current: bool = False) -> ShardKey | None:
    """Return the newest key that this process has sealed for any job, or ``None``.

    ``current``: consider only keys of the incarnation that the session writes for now.
    """
    with _sessions_lock:
        mine = [one for name, one in _sessions.items() if name[0] == os.getpid()]
    keys = [
        key
        for one in mine
        if (key := one.sealed_key) is not None
        and (not current or one.incarnation.current == (key.epoch, key.incarnation))
    ]
    return max(keys, key=lambda key: (key.version, key.job), default=None)


def leave_worlds() -> None:
    """Make all sessions begin a new incarnation at their next save, because the world was left.

    Connections, mapped slots and sealed shards remain.
    """
    with _sessions_lock:
        for name, session in _sessions.items():
            if name[0] == os.getpid():
                session.leave_world()


@contextlib.contextmanager
def use_agent_factory(factory: AgentFactory) -> Iterator[None]:
    """Create the agents of new sessions with ``factory`` while the block runs."""
    global _factory  # noqa: PLW0603 - tests switch the whole process
    before, _factory = _factory, factory
    try:
        yield
    finally:
        close_sessions()
        _factory = before


class _FencedSaveError(SaveFailedError):
    """Failure of a save because a newer incarnation of the job writes now."""


@dataclass
class StagedShard:
    """Slot that is filled, or being filled, before its seal."""

    lease: Lease
    layout: Layout
    memory: MappedSlot
    owner: ProcessIdentity = field(default_factory=current_process)
    """Process that leased the slot. Another process of the same rank may fill and seal it."""


class Session:
    """One job in this process: agent, incarnation, slots and plans. Any thread may call it."""

    def __init__(self, job: str, settings: Settings, node: NodeAgentAPI) -> None:
        self.job = job
        self.settings = settings
        self.agent = node
        self.copier = Copier(copy_thread_count(settings))
        self.incarnation = IncarnationTracker(job)
        self._inventory: StepInventory | None = None
        """Steps of the job as listed before the first save."""
        self._finite = FiniteChecker()
        self.sealed_key: ShardKey | None = None
        """Key of the last shard that this process sealed."""
        self._has_warned_memory_only = False
        """Whether this process has warned that no durable tier stores the steps. It warns again when it ends."""
        self._trainer_lifetime = ""
        """Last known lifetime of the trainer process that this process saves for."""
        self._has_published_load = False
        """Whether this process has published a load for processes that save for it."""
        self._is_loading = False
        """Whether the agent knows of a load of this process, and not of its end."""
        self._loaded: VersionId | None = None
        """Loaded version without a later step or save. A process that only reads a step stays here."""
        self.committed: VersionId | None = None
        """Newest version that all ranks have written or loaded, as agreed through DCP."""
        self._reported_committed: VersionId | None = None
        """Last committed version that was reported to an agent without peers."""
        self.has_single_agent = False
        """Whether all ranks use this node's agent, even if the launcher reports several nodes."""
        self._unreported_parts: list[tuple[VersionId, int]] = []
        """Aborted parts that were not reported to the agent yet."""
        self._unshared_parts: list[tuple[VersionId, int]] = []
        """Aborted parts that were not reported to the other ranks yet."""
        self._planned: list[PlannedSave] = []
        self._item_bytes = 0
        self._provisional = itertools.count()
        self._durable: ObjectStore | None = None
        self._memories: dict[str, MappedSlot] = {}
        self._prepared: set[tuple[int, int]] = set()
        """Part and size of slots that were prepared after a save."""
        self._preparing: list[threading.Thread] = []
        self._is_closing = False
        self._known_blobs: set[str] = set()
        self._arena_id, self._agent_start = node.store.arena_id, node.store.start_id
        self.refresh_peer_plan: Callable[[JobPeersConfig], JobPeersConfig] | None = None
        """Function that updates a plan with the current addresses of the job's nodes."""
        self._plan: JobPeersConfig | None = None
        self.standby_nodes: tuple[PeerNode, ...] = ()
        """Nodes outside the world that accept replicas, as last seen by this process."""
        transport = peer_transport(settings.agent.interface, settings.agent.tls, settings.agent.transport)
        self.peers = PeerReader(node, job, transport, streams=settings.peer.streams)
        self._lock = threading.RLock()
        self._checked_durable = ""
        """Durable URL of the last save, which was checked."""
        self._used_durable: DurableSettings | None = None
        """Durable tier that the agent has recorded, because all ranks began a save with it."""
        self._configure()

    def _configure(self) -> None:
        """Send the settings to the agent. Only a save changes the durable tier that the agent records."""
        durable = self.settings.durable
        used = bool(durable.url) and durable == self._used_durable
        self.agent.configure(self.job, durable, check="none" if used else "open")
        plan = configured_peer_plan(self.settings.peer)
        if plan is not None:
            self.join_peers(plan)

    def join_peers(self, plan: JobPeersConfig) -> None:
        """Send the plan of the job's nodes to the agent, which then replicates shards to them."""
        if plan != self._plan:
            self.agent.join_peers(self.job, plan)
            self._plan = plan

    @property
    def peer_plan(self) -> JobPeersConfig | None:
        """Plan that this process last sent to its agent."""
        return self._plan

    def update_settings(self, settings: Settings) -> None:
        """Use changed settings from the next save, for example another durable URL."""
        settings = replace(settings, agent=self.settings.agent)  # a session uses the same agent until it is closed
        if settings != self.settings:
            before, self.settings = self.settings, settings
            if (settings.durable, settings.peer) != (before.durable, before.peer):
                self._close_durable()
                try:
                    self._configure()
                except TieredCheckpointError:
                    self.settings = before  # so that the next call raises again
                    raise

    def check_durable(self) -> None:
        """Raise before the first save if nothing can become durable; one process of a node checks.

        :class:`DurableRefusedError` if the store takes no object, and :class:`TierUnavailableError` if it does not
        answer. A run that restored a step continues with a warning while the store is away.
        """
        durable = self.settings.durable
        if durable.url == self._checked_durable:
            return
        try:
            if durable.url:
                self.agent.configure(self.job, durable, check="write" if is_local_rank_zero() else "open")
        except TierUnavailableError as error:
            newest = self.incarnation.newest_step
            if durable.on_unreachable == "raise" and (newest is None or newest < 0):
                raise
            log.warning("%s continues in memory: %s", self.job, error)
        self._checked_durable = durable.url

    @property
    def is_closed(self) -> bool:
        """Whether the session is closed."""
        return self._is_closing

    @property
    def sealed_step(self) -> int:
        """Step that this process sealed last; -1 for none."""
        return -1 if self.sealed_key is None else self.sealed_key.version

    @property
    def agents_are_isolated(self) -> bool:
        """Whether ranks are on several nodes whose agents do not know each other.

        The ranks then report committed versions and aborted parts to their agents at each save.
        """
        if self._plan is not None or self.has_single_agent or not dist.is_initialized():
            return False
        return local_world_size() not in (0, dist.get_world_size())

    def propose(self, step: int, point: CapturePoint) -> SaveProposal:
        """Return this rank's proposal for a save of the state captured at ``point``."""
        self.report_continued()  # before any rank writes for a new incarnation
        left_out = self._unshared_parts if self.agents_are_isolated else ()
        return self.incarnation.propose(step, point, self.newest_known_epoch(), self.committed, left_out)

    def adopt(self, decision: SaveDecision, point: CapturePoint) -> None:
        """Write for the incarnation that the ranks of a save have decided on."""
        with self._lock:
            before = self.incarnation.current
            self.incarnation.adopt(decision, point)
            # On all ranks alike, because a rank with a cached plan would skip DCP's collectives.
            if self.incarnation.current != before:
                self._planned.clear()
        durable = self.settings.durable
        if durable.url and durable != self._used_durable:
            self.agent.configure(self.job, durable)
            self._used_durable = durable
        if decision.newest_complete is not None:
            self.report_complete(decision.newest_complete)
        with self._lock:
            self._unreported_parts += [left for left in decision.aborted_parts if left not in self._unshared_parts]
            self._unshared_parts = [left for left in self._unshared_parts if left not in decision.aborted_parts]
        self._report_aborted_parts()

    def leave_world(self) -> None:
        """Begin a new incarnation at the next save, even if the next world has the same size."""
        with self._lock:
            self.incarnation.leave_world()
            self._planned.clear()

    def rewind_to(self, step: int, ranks: int | None = None) -> None:
        """Make the next save continue from ``step`` (-1: from nothing); the job abandons later steps.

        ``ranks``: number of ranks that loaded it together; ``None`` for all.
        """
        with self._lock:
            self.incarnation.rewind_to(step, ranks)
            self._planned.clear()
            self._loaded = None

    def newest_known_epoch(self) -> int:
        """Return the newest epoch known to the agent or present in the job's steps in any tier."""
        known = self.agent.store.epoch(self.job)
        current = self.incarnation.current
        if current is not None:
            return max(known, current.epoch)
        # An agent that lost its memory has no epochs, but the steps in other tiers have them.
        inventory = self._inventory = self.agent.list_steps(self.job)
        return max([known, *(view.version_id.epoch for view in inventory.views)])

    def check_step_order(self, step: int) -> None:
        """Raise :class:`UsageError` if a restore would prefer an existing step to ``step``.

        This sends no request: the first save has just listed the steps, and later saves know their predecessor.
        """
        newest = self.incarnation.newest_step
        if newest is not None and newest > step:
            raise UsageError(
                f"Step {step} of job {self.job!r} is behind step {newest}, which this run saved or restored, so a "
                "restore would pass over it. Number the steps upwards, restore an earlier step first, or use another "
                "job name"
            )
        if newest is None and (found := _newest_loadable(self._inventory)) > step:
            raise UsageError(
                f"Step {step} of job {self.job!r} is behind step {found} of an earlier run, and nothing was restored. "
                "Restore before the first save to continue that run (Checkpointer.restore, or dcp.load with a "
                "TieredReader), or use another job name"
            )

    def start_over(self) -> None:
        """Abandon the job's earlier steps, unless this process has restored or saved one."""
        if self.incarnation.newest_step is None:
            self.rewind_to(-1)

    def report_part_aborted(self, key: ShardKey) -> None:
        """Report to the agent that this rank never seals this part; all nodes then abort the version."""
        with self._lock:
            self._unreported_parts.append((key.version_id, key.part))
            self._unshared_parts = [*self._unshared_parts, (key.version_id, key.part)][-_REMEMBERED:]
        self._report_aborted_parts()

    def _report_aborted_parts(self) -> None:
        with self._lock:
            unreported, self._unreported_parts = self._unreported_parts, []
        for number, (group, part) in enumerate(unreported):
            try:
                self.agent.store.abort_part(self.job, group, part)
            except PeerStoreError as error:
                log.warning(
                    "%s: the node agent has not heard that step %d was left out: %s", *(self.job, group.version, error)
                )
                with self._lock:
                    # The next save retries.
                    self._unreported_parts = [*unreported[number:], *self._unreported_parts][-_REMEMBERED:]
                return

    def align_attempts(self, step: int, attempts: int, part: int) -> None:
        """Advance to ``attempts`` attempts at ``step``, and abort this rank's parts of the ones it missed."""
        current = self.incarnation.current
        if current is None:
            return
        for attempt in range(self.incarnation.attempts_at(step), attempts):
            self.report_part_aborted(ShardKey(self.job, step, current.epoch, current.name, attempt, part))
        self.incarnation.skip_attempts(step, attempts)

    def drop_steps(self, groups: Sequence[VersionId]) -> None:
        """Drop these versions in all tiers and on all nodes, on a user's request."""
        self.agent.drop_steps(self.job, groups)
        if self.committed in groups:
            self.committed = None

    def report_complete(self, group: VersionId) -> None:
        """Record that all ranks have written their parts of a version, as known through DCP.

        Isolated agents receive this report. Agents that know each other count the parts themselves.
        """
        self.committed = group if self.committed is None else max(group, self.committed)
        if self.agents_are_isolated and self._reported_committed != self.committed:
            try:
                self.agent.store.mark_committed(self.job, self.committed)
                self._reported_committed = self.committed
            except PeerStoreError as error:  # the version is complete anyway, and the next save repeats the report
                log.warning("%s: its agent has not heard that step %d is whole: %s", self.job, group.version, error)

    def newest_complete_step(self) -> int:
        """Return the newest step that this node knows as complete, or -1."""
        group = self.agent.store.newest_committed(self.job)
        known = [one.version for one in (group, self.committed) if one is not None]
        return max(known, default=-1)

    @contextlib.contextmanager
    def track_load(self, group: VersionId, rank: int) -> Iterator[None]:
        """Attribute a death of this process to its load, in the block and until :meth:`report_load_survived`."""
        try:
            self.agent.report_load_started(self.job, group, rank)
        except PeerStoreError as error:
            log.debug("the node agent was not told of a load: %s", error)
        self._is_loading = True
        try:
            yield
        except BaseException:
            self.report_load_survived(stepped=False)
            raise

    def report_continued(self) -> None:
        """Report to the agent that the job continues from the loaded version, so newer ones are abandoned."""
        with self._lock:
            if self._loaded is not None:
                self.agent.report_restored(self.job, self._loaded, goes_on=True)
                self._loaded = None

    def report_load_survived(self, *, stepped: bool = True) -> None:
        """Report that the process survived its load; ``stepped``: it has also made a step or a save."""
        if stepped:
            try:
                self.report_continued()
            except (PeerStoreError, OSError) as error:
                log.debug("the node agent was not told what is gone on from: %s", error)
        if self._is_loading:
            self._is_loading = False
            try:
                self.agent.report_load_ended(self.job, stepped=stepped)
            except (PeerStoreError, OSError) as error:
                log.debug("the node agent was not told that a load is over: %s", error)

    def report_restored(self, group: VersionId, ranks: int) -> None:
        """Record that this process has loaded ``group`` together with ``ranks`` ranks in all."""
        with self._lock:
            self.rewind_to(group.version, ranks)
            self._loaded = group
        try:
            self.committed = group if self.committed is None else max(group, self.committed)
            self.agent.report_restored(self.job, group, goes_on=False)
            self._publish_load(group)
        except PeerStoreError as error:  # the state is loaded, so the load does not fail
            log.warning("the node agent did not note that step %d of %s was loaded: %s", group.version, self.job, error)

    def _publish_load(self, group: VersionId) -> None:
        """Publish a load in the agent for DCP's save processes, which receive the state and not the load."""
        message = msgspec.msgpack.encode((group, self.incarnation.capture().lifetime_id))
        store = self.agent.store
        store.put_blob(self.job, _load_blob_name(current_process()), message)
        if not self._has_published_load:
            self._has_published_load = True
            for name in _stale_load_blobs(store.list_blobs(self.job)):
                store.remove_blob(self.job, name)

    def follow_trainer_rewind(self, trainer: ProcessIdentity) -> None:
        """Rewind if the trainer process that this one saves for has loaded a step since the last call.

        A process that has itself loaded a step does not rewind, because it is not a save process of DCP.
        """
        if self._has_published_load:
            return
        try:
            message = self.agent.store.get_blob(self.job, _load_blob_name(trainer))
        except ShardNotFoundError:
            return
        group, lifetime = from_msgpack(message, tuple[VersionId, str])
        if lifetime != self._trainer_lifetime:
            self._trainer_lifetime = lifetime
            with self._lock:
                self.rewind_to(group.version)
                self._loaded = group  # the next save continues from the trainer's load

    def durable_store(self) -> ObjectStore:
        """Return the durable tier, opened by this process for reads."""
        with self._lock:
            if self._durable is None:
                durable = self.settings.durable
                if not durable.url:
                    durable = self.agent.list_steps(self.job).durable or durable
                self._durable = open_store(durable.url, durable)
            return self._durable

    @property
    def cached_layouts(self) -> list[Layout]:
        return [planned.layout for planned in self._planned]

    def cached_plan(self, found: Sequence[Fingerprint]) -> PlannedSave | None:
        """Return this world's plan for a state with these fingerprints, or ``None``."""
        wanted = tuple(found)
        return next(
            (p for p in self._planned if p.fingerprint == wanted and p.parts == self.incarnation.part_count), None
        )

    def has_plan(self, planned: PlannedSave) -> bool:
        """Return whether ``planned`` is still this world's plan for such a state."""
        return planned.parts == self.incarnation.part_count and any(one is planned for one in self._planned)

    def cache_plan(self, planned: PlannedSave) -> None:
        others = [
            old for old in self._planned if old.fingerprint != planned.fingerprint or old.layout != planned.layout
        ]
        self._planned = [planned, *others][:_KEPT_PLANS]

    def lease_slot(self, key: ShardKey, parts: int, layout: Layout, item_bytes: int, *, wait_s: float) -> StagedShard:
        """Lease and map a slot for ``layout`` and ``item_bytes`` bytes of objects.

        Wait up to ``wait_s`` seconds for a free slot.
        """
        self.report_load_survived()
        if isinstance(self.agent, NodeAgentClient):
            self.agent.watch_agent()
        if self._unreported_parts:
            self._report_aborted_parts()
        size = _lease_bytes(layout.header_bytes + layout.tensor_bytes + item_bytes)
        self._follow_agent_restart()
        self._unmap_evicted()
        try:
            lease = self._lease(key, size, parts, wait_s)
            self._follow_agent_restart()  # the old agent may have ended only now
            failpoint("stage.leased")
            memory = self._map_slot(lease)
            self._wait_for_preparation(lease, memory)
            return StagedShard(lease, layout, memory)
        except ArenaBusyError as error:
            raise StoreBusyError(str(error)) from error
        except FencedError as error:
            raise _FencedSaveError(
                f"Another process with the job name {self.job!r} has taken over, so this one can no longer save. Two "
                f"trainings need two job names ({error})"
            ) from error
        except ArenaFullError as error:
            raise SaveFailedError(
                f"{error}. The agent takes its budget from agent.budget (TIEREDCKPT_AGENT_BUDGET) when it starts"
            ) from error
        except (PeerStoreError, OSError, ValueError) as error:
            raise TierUnavailableError(f"no slot for {key}: {error}") from error

    def _lease(self, key: ShardKey, size: int, parts: int, wait_s: float) -> Lease:
        store = self.agent.store
        try:
            return store.lease(key, size, parts, wait_s=wait_s)
        except (ArenaBusyError, ArenaFullError):
            if not self._unmap_evicted():
                raise
            return store.lease(key, size, parts, wait_s=wait_s)  # the memory of unmapped slots is free now

    def _unmap_evicted(self) -> bool:
        """Unmap evicted slots, whose memory counts until then; return whether any were mapped."""
        with self._lock:
            dropped = [name for name, memory in self._memories.items() if memory.is_evicted]
            for name in dropped:
                self._memories.pop(name).close()
            return bool(dropped)

    def _follow_agent_restart(self) -> None:
        """Send the plan of the nodes, and after a lost arena everything else, to a restarted agent.

        An agent that lost its arena has no layouts and no peers. An agent that kept it may listen on another address,
        as may its peers.
        """
        with self._lock:
            store = self.agent.store
            if (store.arena_id, store.start_id) == (self._arena_id, self._agent_start):
                return
            lost, self._arena_id, self._agent_start = store.arena_id != self._arena_id, store.arena_id, store.start_id
            if lost:
                self._known_blobs.clear()
                self._configure()
            if self._plan is not None and self.refresh_peer_plan is not None:
                self._plan = self.refresh_peer_plan(self._plan)
            elif not lost:
                return
            if self._plan is not None:
                self.agent.join_peers(self.job, self._plan)

    def _map_slot(self, lease: Lease) -> MappedSlot:
        with self._lock:
            known = self._memories.get(lease.slot)
            if known is None or known.generation != lease.generation:
                if known is not None:
                    known.close()
                fd = self.agent.store.open_slot(lease.slot)
                known = self._memories[lease.slot] = MappedSlot(fd, lease.slot_bytes, lease.generation)
            self._unmap_evicted()
            return known

    def populated_mapping(self, fd: int, size_bytes: int) -> MappedSlot | None:
        """Return this process's mapping of a shard's open file, if all pages of the shard are populated."""
        with self._lock:
            return next((memory for memory in self._memories.values() if memory.maps_file(fd, size_bytes)), None)

    def lease_slot_before_step(self, planned: PlannedSave, *, wait_s: float) -> StagedShard | None:
        """Lease a slot for a planned save before its step is known; :meth:`seal` sets the key.

        Return ``None`` if a newer incarnation has begun. This rank learns its name when the ranks of the save agree.
        """
        current = self.incarnation.current
        if current is None:
            raise SaveFailedError(f"{self.job}: a planned save without an incarnation")
        key = ShardKey(self.job, 0, current.epoch, current.name, _PROVISIONAL + next(self._provisional), planned.part)
        try:
            return self.lease_slot(key, planned.parts, planned.layout, self._item_bytes, wait_s=wait_s)
        except _FencedSaveError:
            return None
        except (StoreBusyError, SaveFailedError, TierUnavailableError) as error:
            description = f"what part {planned.part} of {self.job} stages (epoch {current.epoch} {current.name})"
            raise type(error)(str(error).replace(str(key), description)) from error

    def relabel_slot(self, staged: StagedShard, key: ShardKey) -> StagedShard | None:
        """Return the slot moved to the incarnation of ``key``; :meth:`seal` sets the final key.

        Return ``None`` if another rank of this node has begun that incarnation first, which ended this lease. The
        mapped memory is unchanged, and the agent does not lease it again while its owner lives.
        """
        lease_key = staged.lease.key
        provisional = ShardKey(
            self.job, 0, key.epoch, key.incarnation, _PROVISIONAL + next(self._provisional), lease_key.part
        )
        try:
            lease = self.agent.store.relabel(staged.lease.id, provisional)
        except LeaseLostError:
            return None
        except PeerStoreError as error:
            raise SaveFailedError(f"{key}: what was staged for it was lost: {error}") from error
        return replace(staged, lease=lease)

    def adopt_slot(self, lease: Lease, layout: Layout, owner: ProcessIdentity) -> StagedShard:
        """Use a slot that another process of this rank has staged."""
        return StagedShard(lease, layout, self._map_slot(lease), owner)

    def seal(
        self,
        staged: StagedShard,
        key: ShardKey,
        items: Sequence[bytes | memoryview],
        *,
        durable: bool,
        table: StateTable | None,
        required: bool = False,
        keep: bool = False,
        finite: bool = False,
    ) -> ShardRecord:
        """Write the header and items next to the staged tensors, and make the shard immutable.

        ``durable``: upload the step. ``required``: upload it even if newer steps follow. ``keep``: never evict it.
        ``finite``: raise :class:`NonFiniteStateError` for tensors that have become NaN or infinite.
        """
        if finite:
            self._finite.check(staged.memory, staged.layout, f"step {key.version} of {self.job}, rank {key.part}")
        sizes = tuple(len(item) for item in items)
        layout, total = staged.layout, staged.layout.size_bytes(sizes)
        if staged.owner == current_process():
            self._prepare_following(staged)
        self._item_bytes = sum(sizes)
        try:
            staged = self._relabel_and_grow(staged, key, total)
            memory = staged.memory
            memory.write(0, layout.header(sizes))
            for start, item in zip(layout.item_starts(sizes), items, strict=True):
                memory.write(layout.header_bytes + start, item)
            failpoint("seal.written")
            meta = ShardMeta(
                layout=layout.digest,
                item_sizes=sizes,
                base=self.incarnation.base_step_of(key),
                table=table.digest if table else "",
                durable=durable or required,
                saved_ns=time.time_ns(),
                required=required or msgspec.UNSET,
            )
            if keep:  # before the seal, so that no newer step evicts it in between
                self.agent.store.retain(self.job, key.version_id)
            try:
                record = self._send_seal(staged.lease, total, meta, layout, table)
            except BaseException:
                if keep:
                    with contextlib.suppress(PeerStoreError):  # a failed step must not use up a retained one's place
                        self.agent.store.retain(self.job, key.version_id, kept=False)
                raise
        except PeerStoreError as error:
            raise SaveFailedError(f"{key} was not sealed: {error}") from error
        self.sealed_key = key
        self.incarnation.record_sealed(key)
        failpoint("seal.asked")
        return record

    def _send_seal(
        self, lease: Lease, total: int, meta: ShardMeta, layout: Layout, table: StateTable | None
    ) -> ShardRecord:
        """Seal with the layout and the table; send these once, and again if the agent has forgotten the job."""
        described: dict[str, Callable[[], bytes]] = {LAYOUT_BLOB_PREFIX + layout.digest: lambda: encode_layout(layout)}
        if table is not None:
            described[TABLE_BLOB_PREFIX + table.digest] = lambda: encode_table(table)

        def request() -> ShardRecord:
            for name, make in described.items():
                self._put_packed(name, make)
            return self.agent.store.seal(lease.id, total, encode_meta(meta), tuple(described))

        try:
            return request()
        except ShardNotFoundError:
            with self._lock:
                self._known_blobs.clear()
                self._configure()
                if self._plan is not None:
                    self.agent.join_peers(self.job, self._plan)
        return request()

    def _relabel_and_grow(self, staged: StagedShard, key: ShardKey, total: int) -> StagedShard:
        """Return the slot with its final key, grown to ``total`` bytes if necessary."""
        lease = staged.lease
        if lease.key != key:
            lease = self.agent.store.relabel(lease.id, key)
        if total > lease.size_bytes:  # this may copy the staged bytes into another file
            lease = self.agent.store.grow(lease.id, round_up(total, _SLOT_STEP))
        return staged if lease is staged.lease else replace(staged, lease=lease, memory=self._map_slot(lease))

    def prepare_slots(self, part: int, size_bytes: int, place: torch.device | None) -> None:
        """Map, populate and register in the background the slots that the next saves of ``part`` write into."""
        with self._lock:
            if self._is_closing:
                return
            thread = threading.Thread(
                target=self._prepare, args=(part, size_bytes, place), name="tieredckpt-prepare", daemon=True
            )
            self._preparing = [*(one for one in self._preparing if one.is_alive()), thread]
            thread.start()

    def _prepare(self, part: int, size_bytes: int, place: torch.device | None) -> None:
        try:
            # Own threads, because a save may use those of the session at the same time.
            with contextlib.closing(Copier(self.copier.threads)) as copier:
                for slot in self.agent.store.reserve(self.job, part, _lease_bytes(size_bytes)):
                    if not self._is_closing:
                        self._prepare_slot(slot, place, copier)
        except (PeerStoreError, OSError, ValueError) as error:
            # Saves work without prepared slots.
            log.debug("slots for %s were not prepared: %s", self.job, error)

    def _prepare_slot(self, slot: SlotInfo, place: torch.device | None, copier: Copier) -> None:
        with self._lock:
            memory = self._memories.get(slot.slot)
            if memory is not None and memory.generation == slot.generation:
                return
            fd = self.agent.store.open_slot(slot.slot)
            if memory is not None:
                memory.close()
            memory = self._memories[slot.slot] = MappedSlot(fd, slot.size_bytes, slot.generation)
            memory.ready.clear()
        try:
            memory.prefault(copier, lambda: self._is_closing)
            if place is not None and not self._is_closing:
                memory.register(accelerator(), place)
        finally:
            memory.ready.set()

    def _prepare_following(self, staged: StagedShard) -> None:
        """Prepare the slot of the next save, once for each part and size."""
        lease = staged.lease
        with self._lock:
            is_new = (lease.key.part, lease.size_bytes) not in self._prepared
            self._prepared.add((lease.key.part, lease.size_bytes))
        if is_new and lease.size_bytes > _SMALL:
            self.prepare_slots(lease.key.part, lease.size_bytes, staged.memory.place)

    def _wait_for_preparation(self, lease: Lease, memory: MappedSlot) -> None:
        if memory.ready.is_set():
            return
        log.info(
            "%s: step %d waits for its slot of %s, which is still being prepared. Call Checkpointer.prepare(state) "
            "earlier to avoid the wait",
            *(self.job, lease.key.version, show_size(lease.slot_bytes)),
        )
        memory.ready.wait()

    def wait_until_prepared(self) -> None:
        """Wait until the slots that are being prepared are ready for saves."""
        with self._lock:
            threads = list(self._preparing)
        for thread in threads:
            thread.join()

    def wait_for_drain(self, timeout_s: float) -> None:
        """Wait until every requested upload has succeeded or failed, or the timeout has passed."""
        view = self.agent.wait_durable(self.job, None, timeout_s)
        if view is not None and view.state in ("waiting", "running"):
            log.warning("step %d of %s is still not durable after %.0f s", view.version_id.version, self.job, timeout_s)

    def release_slot(self, staged: StagedShard) -> None:
        """Release the slot. Errors are only logged, because the lease expires anyway."""
        try:
            self.agent.store.release(staged.lease.id)
        except PeerStoreError as error:
            log.warning("slot of %s was not given back: %s", staged.lease.key, error)

    def _put_packed(self, name: str, make: Callable[[], bytes]) -> None:
        if name not in self._known_blobs:
            data = pack_blob(make())
            if len(data) > MAX_BLOB_BYTES:
                raise SaveFailedError(
                    f"The description of this rank's part has {show_size(len(data))} after compression. An agent keeps "
                    f"at most {show_size(MAX_BLOB_BYTES)}, enough for millions of tensors in one rank. Save fewer and "
                    "larger tensors, or save from more ranks"
                )
            self.agent.store.put_blob(self.job, name, data)
            self._known_blobs.add(name)

    def wants_durable(self, step: int) -> bool:
        """Return whether the policy requests an upload of ``step``."""
        durable = self.settings.durable
        return bool(durable.url) and step % durable.every == 0

    def warn_memory_only(self) -> None:
        """Warn once if no durable tier stores the steps: where they are, and for how long. For one rank."""
        if self._has_warned_memory_only or self.settings.durable.url:
            return
        self._has_warned_memory_only = True
        log.warning(
            "%s has no durable tier: its steps are in memory only. They go with the nodes that hold them, and %s after "
            "the job's last process. Checkpointer(durable='s3://bucket/prefix'), or durable.url, keeps them",
            self.job,
            f"{self.settings.agent.job_ttl_s / 3600:.3g} hours",
        )

    def _warn_remaining(self) -> None:
        """Warn at the end of the process how long the newest step remains in memory."""
        if not self._has_warned_memory_only or self.sealed_step < 0 or self.settings.durable.url:
            return
        until = time.time() + self.settings.agent.job_ttl_s
        log.warning(
            "%s: step %d is in memory only, and forgotten at %s unless the job runs again. `tieredckpt export %s DEST` "
            "writes it to a file",
            *(self.job, self.sealed_step, time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(until)), self.job),
        )

    def stop_watching_agent(self) -> None:
        """Stop restarting the agent after a failure, until the next save."""
        if isinstance(self.agent, NodeAgentClient):
            self.agent.stop_watching_agent()

    def add_metrics(self, **values: float) -> ProtectionStatus | None:
        """Add to the agent's metrics; return the job's protection status, or ``None`` on an error."""
        try:
            return self.agent.add_metrics(self.job, values)
        except PeerStoreError as error:
            log.debug("metrics were not taken: %s", error)
            return None

    def close(self) -> None:
        self._warn_remaining()
        self.report_load_survived(stepped=False)
        if self._has_published_load:
            with contextlib.suppress(PeerStoreError, OSError):
                self.agent.store.remove_blob(self.job, _load_blob_name(current_process()))
        self._is_closing = True
        self.wait_until_prepared()
        for memory in self._memories.values():
            memory.close()
        self._memories.clear()
        self.copier.close()
        self.peers.close()
        self._close_durable()
        self.agent.close()

    def _close_durable(self) -> None:
        durable, self._durable = self._durable, None
        if durable is not None:
            durable.close()


def _lease_bytes(size_bytes: int) -> int:
    """Return the lease size for a shard of ``size_bytes``, rounded so that similar shards share slots."""
    return round_up(size_bytes, _SLOT_STEP if size_bytes > _SMALL else 1 << 16)


def _newest_loadable(inventory: StepInventory | None) -> int:
    """Return the step that a restore would load; -1 for none."""
    if inventory is None:
        return -1
    quarantined = [view.version_id for view in inventory.views if view.quarantined]
    chosen = resolve_step(
        [view.candidate for view in inventory.views], quarantined=quarantined, torn=inventory.torn
    ).chosen
    return max([-1 if chosen is None else chosen.version_id.version, *inventory.plain])


def _load_blob_name(process: ProcessIdentity) -> str:
    return f"{_LOAD_PREFIX}{process.pid}.{process.start_time}"


def _stale_load_blobs(blobs: Iterable[str]) -> list[str]:
    """Return the published loads of dead processes, except the latest.

    Processes in another PID namespace seem dead too, so the latest remain.
    """
    processes = [name.removeprefix(_LOAD_PREFIX).split(".") for name in blobs if name.startswith(_LOAD_PREFIX)]
    dead = [one for one in (ProcessIdentity(int(pid), int(started)) for pid, started in processes) if not one.is_alive]
    return [_load_blob_name(one) for one in sorted(dead, key=lambda one: one.start_time)[:-_KEPT_LOADS]]
