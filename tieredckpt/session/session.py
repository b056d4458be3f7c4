"""Session of one job in one process: agent connection, incarnation, slots, cached plans, seals."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from peerstore.errors import PeerStoreError, ShardNotFoundError
from peerstore.failpoints import failpoint
from peerstore.shard_records import ShardKey, ShardRecord
from tieredckpt.agent.agent_api import (
    LAYOUT_BLOB_PREFIX,
    TABLE_BLOB_PREFIX,
    NodeAgentAPI,
    ProtectionStatus,
)
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.agent.local_agents import settings_of_newest_agent
from tieredckpt.agent.peer_config import peer_transport
from tieredckpt.errors import SaveFailedError, TieredCheckpointError, TierUnavailableError, UsageError
from tieredckpt.format.manifest import ShardMeta, StateTable, encode_meta, encode_table
from tieredckpt.format.shard_layout import encode_layout
from tieredckpt.session.agent_registration import AgentRegistration
from tieredckpt.session.agent_reports import CommitReporter, LoadReporter
from tieredckpt.session.durable_tier import DurableTier
from tieredckpt.session.incarnation import CapturePoint, IncarnationTracker, SaveDecision, SaveProposal
from tieredckpt.session.peer_reader import PeerReader
from tieredckpt.session.save_plan import PlanCache
from tieredckpt.session.slot_pool import SlotPool, StagedShard
from tieredckpt.settings import Settings, copy_thread_count
from tieredckpt.step_inventory import LoadChoice, StepInventory
from tieredckpt.tensors.finite_check import FiniteChecker
from tieredckpt.tensors.slot_copy import Copier

log = logging.getLogger(__name__)
_WAYS_OUT = (
    "Restore before the first save to continue that run (Checkpointer.restore, or dcp.load with a TieredReader), or "
    "use another job name"
)

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


def base_step_of(key: ShardKey) -> int | None:
    """Return the step from which the incarnation of a key that this process has sealed continues.

    -1 for nothing, ``None`` if it is unknown.
    """
    with _sessions_lock:
        mine = [one for name, one in _sessions.items() if name[:2] == (os.getpid(), key.job)]
    return next((base for one in mine if (base := one.incarnation.base_step_of(key)) is not None), None)


def leave_worlds() -> None:
    """Make all sessions begin a new incarnation at their next save, because the world was left.

    Connections, mapped slots and sealed shards remain.
    """
    with _sessions_lock:
        for name, session in _sessions.items():
            if name[0] == os.getpid():
                session.incarnation.leave_world()


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


class Session:
    """One job in this process: the parts of its saves and loads, and the seal. Any thread may call it.

    Each part has its own lock. The order of nested locks is: loads, incarnation, plans.
    """

    def __init__(self, job: str, settings: Settings, node: NodeAgentAPI) -> None:
        self.job = job
        self.settings = settings
        self.agent = node
        self.is_closed = False
        self.sealed_key: ShardKey | None = None
        """Key of the last shard that this process sealed."""
        self.copier = Copier(copy_thread_count(settings))
        self.incarnation = IncarnationTracker(job)
        self.plans = PlanCache(self.incarnation)
        self.durable = DurableTier(job, node, lambda: self.settings)
        self.registration = AgentRegistration(job, node, self.durable, lambda: self.settings)
        self.commits = CommitReporter(job, node, self.registration)
        self.loads = LoadReporter(job, node, self.incarnation, self.commits)
        self.slots = SlotPool(
            *(job, node, self.incarnation, self.copier.threads),
            before_lease=self._before_lease,
            follow_restart=self.registration.follow_restart,
        )
        transport = peer_transport(settings.agent.interface, settings.agent.tls, settings.agent.transport)
        self.peers = PeerReader(node, job, transport, streams=settings.peer.streams)
        self._finite = FiniteChecker()
        self._inventory: StepInventory | None = None
        """Steps of the job as listed before the first save."""
        self.registration.configure()

    @property
    def sealed_step(self) -> int:
        """Step that this process sealed last; -1 for none."""
        return -1 if self.sealed_key is None else self.sealed_key.version

    def update_settings(self, settings: Settings) -> None:
        """Use changed settings from the next save, for example another durable URL."""
        settings = replace(settings, agent=self.settings.agent)  # a session uses the same agent until it is closed
        if settings != self.settings:
            before, self.settings = self.settings, settings
            if (settings.durable, settings.peer) != (before.durable, before.peer):
                self.durable.close()
                try:
                    self.registration.configure()
                except TieredCheckpointError:
                    self.settings = before  # so that the next call raises again
                    raise

    def propose(self, step: int, point: CapturePoint) -> SaveProposal:
        """Return this rank's proposal for a save of the state captured at ``point``."""
        self.loads.report_continued()  # before any rank writes for a new incarnation
        commits = self.commits
        known_epoch = self.newest_known_epoch()
        return self.incarnation.propose(step, point, known_epoch, commits.committed, commits.unshared_parts)

    def adopt(self, decision: SaveDecision, point: CapturePoint) -> None:
        """Write for the incarnation that the ranks of a save have decided on."""
        self.incarnation.adopt(decision, point)
        self.durable.record_used()
        if decision.newest_complete is not None:
            self.commits.report_complete(decision.newest_complete)
        self.commits.report_shared_parts(decision.aborted_parts)

    def newest_known_epoch(self) -> int:
        """Return the newest epoch known to the agent or present in the job's steps in any tier."""
        known = self.agent.store.epoch(self.job)
        current = self.incarnation.current
        if current is not None:
            return max(known, current.epoch)
        # An agent that lost its memory has no epochs, but the steps in other tiers have them.
        inventory = self._inventory = self.list_steps(fresh=True)
        return max([known, *(view.version_id.epoch for view in inventory.views)])

    def list_steps(self, *, fresh: bool = False, patience_s: float = 0.0) -> StepInventory:
        """Return the steps that the agent knows. A new agent receives the job's settings first."""
        store = self.agent.store
        while True:
            self.registration.follow_restart()
            start = store.arena_id, store.start_id
            inventory = self.agent.list_steps(self.job, fresh=fresh, patience_s=patience_s)
            if (store.arena_id, store.start_id) == start:
                return inventory

    def choose_step(self, inventory: StepInventory, step: int | None = None) -> LoadChoice:
        """Return the step that a load takes from ``inventory``: the newest one, or ``step``."""
        return inventory.choose(step, avoid_after=self.settings.memory.avoid_after_crashed_loads)

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
        if (
            newest is None
            and self._inventory is not None
            and (found := self.choose_step(self._inventory).newest_step) > step
        ):
            raise UsageError(
                f"Step {step} of job {self.job!r} is behind step {found} of an earlier run, and nothing was restored. "
                f"{_WAYS_OUT}"
            )

    def warn_unrestored(self, step: int) -> None:
        """Warn if the job has steps of an earlier run and this run restored none, before the first save."""
        if self.incarnation.newest_step is not None or self._inventory is None:
            return
        found = self.choose_step(self._inventory).newest_step
        if found >= 0:
            log.warning(
                "Job %r has step %d of an earlier run, and nothing was restored before the save of step %d. That step "
                "will be the newest one. %s",
                *(self.job, found, step, _WAYS_OUT),
            )

    def start_over(self) -> None:
        """Abandon the job's earlier steps, unless this process has restored or saved one."""
        if self.incarnation.newest_step is None:
            self.loads.rewind_to(-1)

    def align_attempts(self, step: int, attempts: int, part: int) -> None:
        """Advance to ``attempts`` attempts at ``step``, and abort this rank's parts of the ones it missed."""
        current = self.incarnation.current
        if current is None:
            return
        for attempt in range(self.incarnation.attempts_at(step), attempts):
            self.commits.abort_part(ShardKey(self.job, step, current.epoch, current.name, attempt, part))
        self.incarnation.skip_attempts(step, attempts)

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
        store = self.agent.store
        try:
            staged = self.slots.finish(staged, key, items)
            failpoint("seal.written")
            meta = ShardMeta(
                layout=staged.layout.digest,
                item_sizes=tuple(len(item) for item in items),
                base=self.incarnation.base_step_of(key),
                table=table.digest if table else "",
                durable=durable or required,
                saved_ns=time.time_ns(),
                required=required or msgspec.UNSET,
            )
            if keep:  # before the seal, so that no newer step evicts it in between
                store.versions.retain(self.job, key.version_id)
            try:
                record = self._send_seal(staged, meta, table)
            except BaseException:
                if keep:
                    with contextlib.suppress(PeerStoreError):  # a failed step must not use up a retained one's place
                        store.versions.retain(self.job, key.version_id, kept=False)
                raise
        except PeerStoreError as error:
            raise SaveFailedError(f"{key} was not sealed: {error}") from error
        self.sealed_key = key
        self.incarnation.record_sealed(key)
        failpoint("seal.asked")
        return record

    def _send_seal(self, staged: StagedShard, meta: ShardMeta, table: StateTable | None) -> ShardRecord:
        """Seal with the layout and the table; send these once, and again if the agent has forgotten the job."""
        layout = staged.layout
        described: dict[str, Callable[[], bytes]] = {LAYOUT_BLOB_PREFIX + layout.digest: lambda: encode_layout(layout)}
        if table is not None:
            described[TABLE_BLOB_PREFIX + table.digest] = lambda: encode_table(table)

        def request() -> ShardRecord:
            for name, encode in described.items():
                self.registration.put_blob(name, encode)
            total = layout.size_bytes(meta.item_sizes)
            return self.agent.store.seal(staged.lease.id, total, encode_meta(meta), tuple(described))

        try:
            return request()
        except ShardNotFoundError:
            self.registration.renew()
        return request()

    def _before_lease(self) -> None:
        self.loads.report_survived()
        if isinstance(self.agent, NodeAgentClient):
            self.agent.watch_agent()
        self.commits.retry_aborted_parts()

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
        self.durable.warn_remaining(self.sealed_step)
        self.loads.close()
        self.is_closed = True
        self.slots.close()
        self.copier.close()
        self.peers.close()
        self.durable.close()
        self.agent.close()
