"""Session: one job's agent connection, incarnation, mapped slots, cached plans and seals in this process."""

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
_SMALL = 16 << 20
_PROVISIONAL = 1 << 40
_KEPT_PLANS = 4
_REMEMBERED = 64
_RESUMED, _KEPT_RESUMED = "resumed.", 32

AgentFactory = Callable[[Settings, str], NodeAgentAPI]
_sessions: dict[tuple[int, str, str], Session] = {}
_sessions_lock = threading.Lock()
_factory: AgentFactory = NodeAgentClient


def open_session(job: str, settings: Settings) -> Session:
    """This process's session for ``job``: one per process and agent, whoever asks."""
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
    """The session :func:`open_session` would give, where nothing has to be opened for it."""
    with _sessions_lock:
        return _sessions.get((os.getpid(), job, str(settings.agent_directory)))


def has_sessions() -> bool:
    """Return whether this process has a session of any job."""
    with _sessions_lock:
        return any(name[0] == os.getpid() for name in _sessions)


def close_sessions() -> None:
    """Let go of every agent, and say goodbye to it. What was sealed stays with them."""
    with _sessions_lock:
        mine = [name for name in _sessions if name[0] == os.getpid()]
        for session in [_sessions.pop(name) for name in mine]:
            session.close()


def newest_sealed_key(*, current: bool = False) -> ShardKey | None:
    """The newest step that this process has sealed, whichever job's; ``current``: for the incarnation it writes for."""
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
    """The ranks of this process have left the world they were in, and will be in another one.

    Connections, mapped slots and what is sealed stay.
    """
    with _sessions_lock:
        for name, session in _sessions.items():
            if name[0] == os.getpid():
                session.leave_world()


@contextlib.contextmanager
def use_agent_factory(factory: AgentFactory) -> Iterator[None]:
    """While the block runs, new sessions get their node from ``factory``."""
    global _factory  # noqa: PLW0603 - one switch for the whole process is what a test wants
    before, _factory = _factory, factory
    try:
        yield
    finally:
        close_sessions()
        _factory = before


class _FencedSaveError(SaveFailedError):
    """Another incarnation of the job writes now."""


@dataclass
class StagedShard:
    """A slot that is filled (or being filled) and not sealed yet."""

    lease: Lease
    layout: Layout
    memory: MappedSlot
    owner: ProcessIdentity = field(default_factory=current_process)
    """Who has leased it; it may be filled and sealed by another process of the same rank."""


class Session:
    """One job, as this process takes part in it. Any thread may call."""

    def __init__(self, job: str, settings: Settings, node: NodeAgentAPI) -> None:
        self.job = job
        self.settings = settings
        self.agent = node
        self.copier = Copier(copy_thread_count(settings))
        self.incarnation = IncarnationTracker(job)
        self._found: StepInventory | None = None
        """The job's steps as they were listed before the first save."""
        self._finite = FiniteChecker()
        self.sealed_key: ShardKey | None = None
        """What this process sealed last."""
        self._speaks = False
        """This process has said that no durable tier keeps the job's steps, and says so again when it ends."""
        self._followed = ""
        """What the process that this one saves for had loaded when it was asked last."""
        self._told_children = False
        self._loading = False
        """The agent has heard of a load, and not yet that this process came further."""
        self._loaded: VersionId | None = None
        """What was loaded and not gone on from yet: who never comes to a step, or to a save, has only looked."""
        self.committed: VersionId | None = None
        """The newest version that all ranks have written or loaded, as DCP told them."""
        self._told_whole: VersionId | None = None
        """Of which the agent has heard, where it cannot count by itself."""
        self.has_single_agent = False
        """All ranks have this node's agent, whatever the launcher says of nodes."""
        self._unsaid: list[tuple[VersionId, int]] = []
        """Parts that this rank left out, and of which its agent has not heard."""
        self._unagreed: list[tuple[VersionId, int]] = []
        """The same, of which the ranks of a save have not heard."""
        self._planned: list[PlannedSave] = []
        self._item_bytes = 0
        self._provisional = itertools.count()
        self._durable: ObjectStore | None = None
        self._memories: dict[str, MappedSlot] = {}
        self._prepared: set[tuple[int, int]] = set()
        """Parts and sizes whose slots were prepared after a save."""
        self._preparing: list[threading.Thread] = []
        self._is_closing = False
        self._known_blobs: set[str] = set()
        self._arena_id, self._agent_start = node.store.arena_id, node.store.start_id
        self.refresh_peer_plan: Callable[[JobPeersConfig], JobPeersConfig] | None = None
        """The plan with the addresses that the job's nodes have by now, of which this one may have changed."""
        self._plan: JobPeersConfig | None = None
        self.standby_nodes: tuple[PeerNode, ...] = ()
        """Nodes outside the world that may get replicas, as this process last saw them."""
        transport = peer_transport(settings.agent.interface, settings.agent.tls, settings.agent.transport)
        self.peers = PeerReader(node, job, transport, streams=settings.peer.streams)
        self._lock = threading.RLock()
        self._checked_durable = ""
        """The durable URL that a save was last begun with, which takes objects."""
        self._used_durable: DurableSettings | None = None
        """The durable tier that the agent remembers, because all ranks began a save with it."""
        self._configure()

    def _configure(self) -> None:
        """Only a save changes the durable tier that the agent remembers; until then this process reads its own."""
        durable = self.settings.durable
        used = bool(durable.url) and durable == self._used_durable
        self.agent.configure(self.job, durable, check="none" if used else "open")
        plan = configured_peer_plan(self.settings.peer)
        if plan is not None:
            self.join_peers(plan)

    def join_peers(self, plan: JobPeersConfig) -> None:
        """Keep copies with the job's other nodes from now on."""
        if plan != self._plan:
            self.agent.join_peers(self.job, plan)
            self._plan = plan

    @property
    def peer_plan(self) -> JobPeersConfig | None:
        """The plan that this process last sent to its agent."""
        return self._plan

    def update_settings(self, settings: Settings) -> None:
        """Settings may change between saves (another durable URL, say)."""
        settings = replace(settings, agent=self.settings.agent)  # a session stays with its agent
        if settings != self.settings:
            before, self.settings = self.settings, settings
            if (settings.durable, settings.peer) != (before.durable, before.peer):
                self._close_durable()
                try:
                    self._configure()
                except TieredCheckpointError:
                    self.settings = before  # what was refused is refused again
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
        """Whether this process has let go of the agent."""
        return self._is_closing

    @property
    def sealed_step(self) -> int:
        """The step that this process sealed last; -1 for none."""
        return -1 if self.sealed_key is None else self.sealed_key.version

    @property
    def agents_are_isolated(self) -> bool:
        """Whether ranks are on several nodes whose agents do not know each other. Those hear from the ranks what is
        whole, and what was left out, by what the ranks agree on at each save.
        """
        if self._plan is not None or self.has_single_agent or not dist.is_initialized():
            return False
        return local_world_size() not in (0, dist.get_world_size())

    # -- incarnation ------------------------------------------------------------------------------------------

    def propose(self, step: int, point: CapturePoint) -> SaveProposal:
        """What this rank says to the others of a save of what was captured at ``point``."""
        self.report_continued()  # before any rank writes for the incarnation that this save may begin
        left_out = self._unagreed if self.agents_are_isolated else ()
        return self.incarnation.propose(step, point, self.newest_known_epoch(), self.committed, left_out)

    def adopt(self, decision: SaveDecision, point: CapturePoint) -> None:
        """Write for what the ranks of a save have decided."""
        with self._lock:
            before = self.incarnation.current
            self.incarnation.adopt(decision, point)
            if (
                self.incarnation.current != before
            ):  # alike on all ranks: with something planned, a rank plans with no other
                self._planned.clear()
        durable = self.settings.durable
        if durable.url and durable != self._used_durable:
            self.agent.configure(self.job, durable)
            self._used_durable = durable
        if decision.newest_complete is not None:
            self.report_complete(decision.newest_complete)
        with self._lock:
            self._unsaid += [left for left in decision.aborted_parts if left not in self._unagreed]
            self._unagreed = [left for left in self._unagreed if left not in decision.aborted_parts]
        self._say_left_out()

    def leave_world(self) -> None:
        """What is saved next is of a new incarnation, also where the next world is as large as the last one was."""
        with self._lock:
            self.incarnation.leave_world()
            self._planned.clear()

    def rewind_to(self, step: int, ranks: int | None = None) -> None:
        """What is saved next goes on from ``step`` (-1: from nothing): what was saved after it is of a past.

        ``ranks``: how many have loaded it together; ``None``: all.
        """
        with self._lock:
            self.incarnation.rewind_to(step, ranks)
            self._planned.clear()
            self._loaded = None

    def newest_known_epoch(self) -> int:
        """The newest epoch anybody has heard of: this node's agent, or who wrote what is in the durable tier."""
        known = self.agent.store.epoch(self.job)
        current = self.incarnation.current
        if current is not None:
            return max(known, current.epoch)
        # An agent that lost its memory has forgotten the epochs, but the job's steps are still there.
        seen = self._found = self.agent.list_steps(self.job)
        return max([known, *(view.version_id.epoch for view in seen.views)])

    def check_step_order(self, step: int) -> None:
        """Raise :class:`UsageError` where a restore would prefer a step that the job has to ``step``.

        No agent is asked: the first save has just listed the steps, and later ones know what they follow.
        """
        newest = self.incarnation.newest_step
        if newest is not None and newest > step:
            raise UsageError(
                f"Step {step} of job {self.job!r} is behind step {newest}, which this run saved or restored, so a "
                "restore would pass over it. Number the steps upwards, restore an earlier step first, or use another "
                "job name"
            )
        if newest is None and (found := _newest_loadable(self._found)) > step:
            raise UsageError(
                f"Step {step} of job {self.job!r} is behind step {found} of an earlier run, and nothing was restored. "
                "Restore before the first save to continue that run (Checkpointer.restore, or dcp.load with a "
                "TieredReader), or use another job name"
            )

    def start_over(self) -> None:
        """Leave the job's earlier steps behind, unless this process has restored or saved one."""
        if self.incarnation.newest_step is None:
            self.rewind_to(-1)

    def report_part_aborted(self, key: ShardKey) -> None:
        """This rank will never seal this part: its agent hears it, which has all nodes give the version up."""
        with self._lock:
            self._unsaid.append((key.version_id, key.part))
            self._unagreed = [*self._unagreed, (key.version_id, key.part)][-_REMEMBERED:]
        self._say_left_out()

    def _say_left_out(self) -> None:
        with self._lock:
            unsaid, self._unsaid = self._unsaid, []
        for number, (group, part) in enumerate(unsaid):
            try:
                self.agent.store.abort_part(self.job, group, part)
            except PeerStoreError as error:
                log.warning(
                    "%s: the node agent has not heard that step %d was left out: %s", *(self.job, group.version, error)
                )
                with self._lock:
                    self._unsaid = [*unsaid[number:], *self._unsaid][-_REMEMBERED:]  # with the next save
                return

    def align_attempts(self, step: int, attempts: int, part: int) -> None:
        """Others have tried ``step`` so often: of tries that this rank has not made it has left its part out."""
        current = self.incarnation.current
        if current is None:
            return
        for attempt in range(self.incarnation.attempts_at(step), attempts):
            self.report_part_aborted(ShardKey(self.job, step, current.epoch, current.name, attempt, part))
        self.incarnation.skip_attempts(step, attempts)

    def drop_steps(self, groups: Sequence[VersionId]) -> None:
        """The user gives up these steps, wherever they are."""
        self.agent.drop_steps(self.job, groups)
        if self.committed in groups:
            self.committed = None

    def report_complete(self, group: VersionId) -> None:
        """All ranks have written their parts of a version, as DCP told one of them. Agents that know each other count
        by themselves.
        """
        self.committed = group if self.committed is None else max(group, self.committed)
        if self.agents_are_isolated and self._told_whole != self.committed:
            try:
                self.agent.store.mark_committed(self.job, self.committed)
                self._told_whole = self.committed
            except PeerStoreError as error:  # it is whole all the same, and said again with the next save
                log.warning("%s: its agent has not heard that step %d is whole: %s", self.job, group.version, error)

    def newest_complete_step(self) -> int:
        """The newest step that this node knows to be whole; -1 for none."""
        group = self.agent.store.newest_committed(self.job)
        known = [one.version for one in (group, self.committed) if one is not None]
        return max(known, default=-1)

    @contextlib.contextmanager
    def track_load(self, group: VersionId, rank: int) -> Iterator[None]:
        """In the block, and until :meth:`report_load_survived`, this process's death is put down to its load."""
        try:
            self.agent.report_load_started(self.job, group, rank)
        except PeerStoreError as error:
            log.debug("the node agent was not told of a load: %s", error)
        self._loading = True
        try:
            yield
        except BaseException:
            self.report_load_survived(stepped=False)
            raise

    def report_continued(self) -> None:
        """This process trains on from what it has loaded: the node hears that the job has left what is newer."""
        with self._lock:
            if self._loaded is not None:
                self.agent.report_restored(self.job, self._loaded, goes_on=True)
                self._loaded = None

    def report_load_survived(self, *, stepped: bool = True) -> None:
        """The load did not end this process: it comes to a step, or ends as it should."""
        if stepped:
            try:
                self.report_continued()
            except (PeerStoreError, OSError) as error:
                log.debug("the node agent was not told what is gone on from: %s", error)
        if self._loading:
            self._loading = False
            try:
                self.agent.report_load_ended(self.job, stepped=stepped)
            except (PeerStoreError, OSError) as error:
                log.debug("the node agent was not told that a load is over: %s", error)

    def report_restored(self, group: VersionId, ranks: int) -> None:
        """This process has ``group``, which so many ranks have loaded; what it saves next says so."""
        with self._lock:
            self.rewind_to(group.version, ranks)
            self._loaded = group
        try:
            self.committed = group if self.committed is None else max(group, self.committed)
            self.agent.report_restored(self.job, group, goes_on=False)
            self._tell_children(group)
        except PeerStoreError as error:  # every byte is where it belongs: no reason to fail the load
            log.warning("the node agent did not note that step %d of %s was loaded: %s", group.version, self.job, error)

    def _tell_children(self, group: VersionId) -> None:
        """For processes that DCP saves in: they are handed what they save, and not what was loaded before."""
        said = msgspec.msgpack.encode((group, self.incarnation.capture().lifetime_id))
        store = self.agent.store
        store.put_blob(self.job, _resumed(current_process()), said)
        if not self._told_children:
            self._told_children = True
            for name in _left_behind(store.list_blobs(self.job)):
                store.remove_blob(self.job, name)

    def follow_trainer_rewind(self, trainer: ProcessIdentity) -> None:
        """Go back where the process that this one saves for has loaded a step since this was called last.

        Not where this one has loaded one itself: a child of somebody who loads is not always one that DCP saves in.
        """
        if self._told_children:
            return
        try:
            said = self.agent.store.get_blob(self.job, _resumed(trainer))
        except ShardNotFoundError:
            return
        group, life = from_msgpack(said, tuple[VersionId, str])
        if life != self._followed:
            self._followed = life
            with self._lock:
                self.rewind_to(group.version)
                self._loaded = group  # who saves for a process that loaded goes on from there

    def durable_store(self) -> ObjectStore:
        """The durable tier, opened by this process for reading."""
        with self._lock:
            if self._durable is None:
                durable = self.settings.durable
                if not durable.url:
                    durable = self.agent.list_steps(self.job).durable or durable
                self._durable = open_store(durable.url, durable)
            return self._durable

    # -- plans ------------------------------------------------------------------------------------------------

    @property
    def cached_layouts(self) -> list[Layout]:
        return [planned.layout for planned in self._planned]

    def cached_plan(self, found: Sequence[Fingerprint]) -> PlannedSave | None:
        """What was planned for a state like this one, in this world."""
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

    # -- writing ----------------------------------------------------------------------------------------------

    def lease_slot(self, key: ShardKey, parts: int, layout: Layout, item_bytes: int, *, wait_s: float) -> StagedShard:
        """A slot for ``layout`` and ``item_bytes`` more, mapped."""
        self.report_load_survived()
        if isinstance(self.agent, NodeAgentClient):
            self.agent.watch_agent()
        if self._unsaid:
            self._say_left_out()
        size = _lease_bytes(layout.header_bytes + layout.tensor_bytes + item_bytes)
        self._notice_new_agent()
        self._let_go_of_dropped()
        try:
            lease = self._leased(key, size, parts, wait_s)
            self._notice_new_agent()  # the one before may have ended only now
            failpoint("stage.leased")
            memory = self._memory(lease)
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

    def _leased(self, key: ShardKey, size: int, parts: int, wait_s: float) -> Lease:
        store = self.agent.store
        try:
            return store.lease(key, size, parts, wait_s=wait_s)
        except (ArenaBusyError, ArenaFullError):
            if not self._let_go_of_dropped():
                raise
            return store.lease(key, size, parts, wait_s=wait_s)  # what was dropped for it has just become free memory

    def _let_go_of_dropped(self) -> bool:
        """Unmap slots that the agent has given up: their memory counts until then. Whether there were any."""
        with self._lock:
            dropped = [name for name, memory in self._memories.items() if memory.is_evicted]
            for name in dropped:
                self._memories.pop(name).close()
            return bool(dropped)

    def _notice_new_agent(self) -> None:
        """An agent that lost its arena has none of the layouts it was given before, and knows no other node.

        One that only began again knows them as they were, and may listen elsewhere, as may theirs.
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

    def _memory(self, lease: Lease) -> MappedSlot:
        with self._lock:
            known = self._memories.get(lease.slot)
            if known is None or known.generation != lease.generation:
                if known is not None:
                    known.close()
                fd = self.agent.store.open_slot(lease.slot)
                known = self._memories[lease.slot] = MappedSlot(fd, lease.slot_bytes, lease.generation)
            self._let_go_of_dropped()
            return known

    def populated_mapping(self, fd: int, size_bytes: int) -> MappedSlot | None:
        """Return this process's mapping of a shard's open file, if all pages of the shard are populated."""
        with self._lock:
            return next((memory for memory in self._memories.values() if memory.maps_file(fd, size_bytes)), None)

    def lease_slot_before_step(self, planned: PlannedSave, *, wait_s: float) -> StagedShard | None:
        """A slot for a planned save whose step is not known yet; :meth:`seal` gives it its key.

        ``None`` where a newer incarnation has begun that this rank hears of when the ranks of this save agree.
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
            what = f"what part {planned.part} of {self.job} stages (epoch {current.epoch} {current.name})"
            raise type(error)(str(error).replace(str(key), what)) from error

    def relabel_slot(self, staged: StagedShard, key: ShardKey) -> StagedShard | None:
        """The same slot, as one of the incarnation of ``key``; :meth:`seal` gives it its key.

        ``None`` where another rank of this node has begun that incarnation first, which ended this slot. Its memory is
        as it was for whoever has mapped it, and nobody else is given it while its owner lives.
        """
        mine = staged.lease.key
        later = ShardKey(self.job, 0, key.epoch, key.incarnation, _PROVISIONAL + next(self._provisional), mine.part)
        try:
            lease = self.agent.store.relabel(staged.lease.id, later)
        except LeaseLostError:
            return None
        except PeerStoreError as error:
            raise SaveFailedError(f"{key}: what was staged for it was lost: {error}") from error
        return replace(staged, lease=lease)

    def adopt_slot(self, lease: Lease, layout: Layout, owner: ProcessIdentity) -> StagedShard:
        """Go on with a slot that another process of this rank has staged."""
        return StagedShard(lease, layout, self._memory(lease), owner)

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
        """Write header and items beside the staged tensors, and make the shard immutable.

        ``required``: this very step is to become durable, whatever comes after it. ``keep``: it is not given up.
        ``finite``: tensors that have become NaN or infinite are a :class:`NonFiniteStateError`.
        """
        if finite:
            self._finite.check(staged.memory, staged.layout, f"step {key.version} of {self.job}, rank {key.part}")
        sizes = tuple(len(item) for item in items)
        layout, total = staged.layout, staged.layout.size_bytes(sizes)
        if staged.owner == current_process():
            self._prepare_following(staged)
        self._item_bytes = sum(sizes)
        try:
            staged = self._labelled(staged, key, total)
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
            if keep:  # before it is there: no newer one takes its place in between
                self.agent.store.retain(self.job, key.version_id)
            try:
                record = self._sealed(staged.lease, total, meta, layout, table)
            except BaseException:
                if keep:
                    with contextlib.suppress(PeerStoreError):  # as many as there may be are not for what is not there
                        self.agent.store.retain(self.job, key.version_id, kept=False)
                raise
        except PeerStoreError as error:
            raise SaveFailedError(f"{key} was not sealed: {error}") from error
        self.sealed_key = key
        self.incarnation.record_sealed(key)
        failpoint("seal.asked")
        return record

    def _sealed(
        self, lease: Lease, total: int, meta: ShardMeta, layout: Layout, table: StateTable | None
    ) -> ShardRecord:
        """With what describes it; that is given once, and again where the agent has forgotten the job since."""
        described: dict[str, Callable[[], bytes]] = {LAYOUT_BLOB_PREFIX + layout.digest: lambda: encode_layout(layout)}
        if table is not None:
            described[TABLE_BLOB_PREFIX + table.digest] = lambda: encode_table(table)

        def ask() -> ShardRecord:
            for name, make in described.items():
                self._put_packed(name, make)
            return self.agent.store.seal(lease.id, total, encode_meta(meta), tuple(described))

        try:
            return ask()
        except ShardNotFoundError:
            with self._lock:
                self._known_blobs.clear()
                self._configure()
                if self._plan is not None:
                    self.agent.join_peers(self.job, self._plan)
        return ask()

    def _labelled(self, staged: StagedShard, key: ShardKey, total: int) -> StagedShard:
        """The same slot under its final key, and large enough."""
        lease = staged.lease
        if lease.key != key:
            lease = self.agent.store.relabel(lease.id, key)
        if total > lease.size_bytes:  # perhaps another file then, with what was staged in it
            lease = self.agent.store.grow(lease.id, round_up(total, _SLOT_STEP))
        return staged if lease is staged.lease else replace(staged, lease=lease, memory=self._memory(lease))

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
            # Threads of its own: a save that comes meanwhile copies with those of the session.
            with contextlib.closing(Copier(self.copier.threads)) as copier:
                for slot in self.agent.store.reserve(self.job, part, _lease_bytes(size_bytes)):
                    if not self._is_closing:
                        self._prepare_slot(slot, place, copier)
        except (PeerStoreError, OSError, ValueError) as error:
            # A save may take a slot at any time: it is only not prepared then.
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
        """Once for each size that is saved: the next save finds its slot prepared, as the tenth does."""
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
        """Until everything that was to become durable is, or cannot, or the time is over."""
        view = self.agent.wait_durable(self.job, None, timeout_s)
        if view is not None and view.state in ("waiting", "running"):
            log.warning("step %d of %s is still not durable after %.0f s", view.version_id.version, self.job, timeout_s)

    def release_slot(self, staged: StagedShard) -> None:
        """Give the slot back; errors do not matter, the lease would expire anyway."""
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
        """Whether policy wants ``step`` in the durable tier."""
        durable = self.settings.durable
        return bool(durable.url) and step % durable.every == 0

    def warn_memory_only(self) -> None:
        """Once: where the job's steps are, and for how long, when no durable tier keeps them. For one of its ranks."""
        if self._speaks or self.settings.durable.url:
            return
        self._speaks = True
        log.warning(
            "%s has no durable tier: its steps are in memory only. They go with the nodes that hold them, and %s after "
            "the job's last process. Checkpointer(durable='s3://bucket/prefix'), or durable.url, keeps them",
            self.job,
            f"{self.settings.agent.job_ttl_s / 3600:.3g} hours",
        )

    def _say_what_is_left(self) -> None:
        """At the end of the process: until when the newest step is there."""
        if not self._speaks or self.sealed_step < 0 or self.settings.durable.url:
            return
        until = time.time() + self.settings.agent.job_ttl_s
        log.warning(
            "%s: step %d is in memory only, and forgotten at %s unless the job runs again. `tieredckpt export %s DEST` "
            "writes it to a file",
            *(self.job, self.sealed_step, time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(until)), self.job),
        )

    def stop_watching_agent(self) -> None:
        """Nothing is saved for now: this process does not look after the agent any more."""
        if isinstance(self.agent, NodeAgentClient):
            self.agent.stop_watching_agent()

    def add_metrics(self, **values: float) -> ProtectionStatus | None:
        """Tell the agent's metrics, and hear up to which step the job is protected; never worth an error."""
        try:
            return self.agent.add_metrics(self.job, values)
        except PeerStoreError as error:
            log.debug("metrics were not taken: %s", error)
            return None

    def close(self) -> None:
        self._say_what_is_left()
        self.report_load_survived(stepped=False)
        if self._told_children:
            with contextlib.suppress(PeerStoreError, OSError):
                self.agent.store.remove_blob(self.job, _resumed(current_process()))
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
    """The size of the lease for a shard of ``size_bytes``, alike for shards that differ a little."""
    return round_up(size_bytes, _SLOT_STEP if size_bytes > _SMALL else 1 << 16)


def _newest_loadable(seen: StepInventory | None) -> int:
    """The step that a restore would take; -1 for none."""
    if seen is None:
        return -1
    marked = [view.version_id for view in seen.views if view.quarantined]
    chosen = resolve_step([view.candidate for view in seen.views], quarantined=marked, torn=seen.torn).chosen
    return max([-1 if chosen is None else chosen.version_id.version, *seen.plain])


def _resumed(process: ProcessIdentity) -> str:
    return f"{_RESUMED}{process.pid}.{process.start_time}"


def _left_behind(blobs: Iterable[str]) -> list[str]:
    """What processes that were killed have said, but for the latest: of another namespace they only seem to be gone."""
    said = [name.removeprefix(_RESUMED).split(".") for name in blobs if name.startswith(_RESUMED)]
    gone = [one for one in (ProcessIdentity(int(pid), int(started)) for pid, started in said) if not one.is_alive]
    return [_resumed(one) for one in sorted(gone, key=lambda one: one.start_time)[:-_KEPT_RESUMED]]
