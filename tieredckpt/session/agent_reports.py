"""Reports of one process to its agent: committed versions, aborted parts, and loads."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from peerstore.daemon_process import ProcessIdentity, current_process
from peerstore.errors import PeerStoreError, ShardNotFoundError
from peerstore.message_codec import from_msgpack
from peerstore.shard_records import ShardKey, VersionId
from tieredckpt.agent.agent_api import NodeAgentAPI
from tieredckpt.session.agent_registration import AgentRegistration
from tieredckpt.session.incarnation import IncarnationTracker

log = logging.getLogger(__name__)

_REMEMBERED = 64
_LOAD_PREFIX, _KEPT_LOADS = "resumed.", 32


class CommitReporter:
    """Reporter of one job's committed versions and aborted parts. Any thread may call it."""

    def __init__(self, job: str, node: NodeAgentAPI, registration: AgentRegistration) -> None:
        self._job = job
        self._agent = node
        self._registration = registration
        self.committed: VersionId | None = None
        """Newest version that all ranks have written or loaded, as agreed through DCP."""
        self._reported: VersionId | None = None
        """Last committed version that was reported to an agent without peers."""
        self._unreported_parts: list[tuple[VersionId, int]] = []
        """Aborted parts that were not reported to the agent yet."""
        self._unshared_parts: list[tuple[VersionId, int]] = []
        """Aborted parts that were not reported to the other ranks yet."""
        self._lock = threading.Lock()

    def newest_complete_step(self) -> int:
        """Return the newest step that this node knows as complete, or -1."""
        group = self._agent.store.versions.newest_committed(self._job)
        known = [one.version for one in (group, self.committed) if one is not None]
        return max(known, default=-1)

    @property
    def unshared_parts(self) -> Sequence[tuple[VersionId, int]]:
        """Aborted parts that the other ranks have to report to their agents."""
        return self._unshared_parts if self._registration.agents_are_isolated else ()

    def record_committed(self, group: VersionId) -> VersionId:
        """Record that all ranks have written or loaded a version; return the newest such version."""
        self.committed = group if self.committed is None else max(group, self.committed)
        return self.committed

    def report_complete(self, group: VersionId) -> None:
        """Record that all ranks have written their parts of a version, as known through DCP.

        Isolated agents receive this report. Agents that know each other count the parts themselves.
        """
        newest = self.record_committed(group)
        if self._registration.agents_are_isolated and self._reported != newest:
            try:
                self._agent.store.versions.mark_committed(self._job, newest)
                self._reported = newest
            except PeerStoreError as error:  # the version is complete anyway, and the next save repeats the report
                log.warning(
                    "%s: the agent did not receive the report that step %d is complete: %s",
                    self._job,
                    group.version,
                    error,
                )

    def abort_part(self, key: ShardKey) -> None:
        """Report to the agent that this rank never seals this part; all nodes then abort the version."""
        with self._lock:
            self._unreported_parts.append((key.version_id, key.part))
            self._unshared_parts = [*self._unshared_parts, (key.version_id, key.part)][-_REMEMBERED:]
        self.retry_aborted_parts()

    def report_shared_parts(self, parts: Sequence[tuple[VersionId, int]]) -> None:
        """Report the aborted parts that the ranks of a save have shared with each other."""
        with self._lock:
            self._unreported_parts += [part for part in parts if part not in self._unshared_parts]
            self._unshared_parts = [part for part in self._unshared_parts if part not in parts]
        self.retry_aborted_parts()

    def retry_aborted_parts(self) -> None:
        """Report the aborted parts that the agent does not know of yet."""
        with self._lock:
            unreported, self._unreported_parts = self._unreported_parts, []
        for number, (group, part) in enumerate(unreported):
            try:
                self._agent.store.versions.abort_part(self._job, group, part)
            except PeerStoreError as error:
                log.warning(
                    "%s: the agent did not receive the report that a part of step %d was aborted: %s",
                    *(self._job, group.version, error),
                )
                with self._lock:
                    # The next save retries.
                    self._unreported_parts = [*unreported[number:], *self._unreported_parts][-_REMEMBERED:]
                return

    def drop_steps(self, groups: Sequence[VersionId]) -> None:
        """Drop these versions in all tiers and on all nodes, on a user's request."""
        self._agent.drop_steps(self._job, groups)
        if self.committed in groups:
            self.committed = None


class LoadReporter:
    """Reporter of one job's loads in this process, and of the rewinds that follow. Any thread may call it."""

    def __init__(self, job: str, node: NodeAgentAPI, incarnation: IncarnationTracker, commits: CommitReporter) -> None:
        self._job = job
        self._agent = node
        self._incarnation = incarnation
        self._commits = commits
        self._trainer_lifetime = ""
        """Last known lifetime of the trainer process that this process saves for."""
        self._has_published = False
        """Whether this process has published a load for processes that save for it."""
        self._is_loading = False
        """Whether the agent knows of a load of this process, and not of its end."""
        self._loaded: VersionId | None = None
        """Loaded version without a later step or save. A process that only reads a step stays here."""
        self._lock = threading.RLock()

    def rewind_to(self, step: int, ranks: int | None = None, *, loaded: VersionId | None = None) -> None:
        """Make the next save continue from ``step`` (-1: from nothing); the job abandons later steps.

        ``ranks``: number of ranks that loaded it together; ``None`` for all. ``loaded``: the version, if it was loaded.
        """
        with self._lock:
            self._incarnation.rewind_to(step, ranks)
            self._loaded = loaded

    @contextlib.contextmanager
    def track(self, group: VersionId, rank: int) -> Iterator[None]:
        """Attribute a death of this process to its load, in the block and until :meth:`report_survived`."""
        try:
            self._agent.report_load_started(self._job, group, rank)
        except PeerStoreError as error:
            log.debug("the agent did not receive the report of a load: %s", error)
        self._is_loading = True
        try:
            yield
        except BaseException:
            self.report_survived(stepped=False)
            raise

    def report_continued(self) -> None:
        """Report to the agent that the job continues from the loaded version, so newer ones are abandoned."""
        with self._lock:
            if self._loaded is not None:
                self._agent.report_restored(self._job, self._loaded, goes_on=True)
                self._loaded = None

    def report_survived(self, *, stepped: bool = True) -> None:
        """Report that the process survived its load; ``stepped``: it has also made a step or a save."""
        if stepped:
            try:
                self.report_continued()
            except (PeerStoreError, OSError) as error:
                log.debug("the agent did not receive the report of the resumed step: %s", error)
        if self._is_loading:
            self._is_loading = False
            try:
                self._agent.report_load_ended(self._job, stepped=stepped)
            except (PeerStoreError, OSError) as error:
                log.debug("the agent did not receive the report that a load ended: %s", error)

    def report_restored(self, group: VersionId, ranks: int) -> None:
        """Record that this process has loaded ``group`` together with ``ranks`` ranks in all."""
        self.rewind_to(group.version, ranks, loaded=group)
        try:
            self._commits.record_committed(group)
            self._agent.report_restored(self._job, group, goes_on=False)
            self._publish(group)
        except PeerStoreError as error:  # the state is loaded, so the load does not fail
            log.warning(
                "the agent did not receive the report that step %d of %s was loaded: %s",
                group.version,
                self._job,
                error,
            )

    def follow_trainer(self, trainer: ProcessIdentity) -> None:
        """Rewind if the trainer process that this one saves for has loaded a step since the last call.

        A process that has itself loaded a step does not rewind, because it is not a save process of DCP.
        """
        if self._has_published:
            return
        try:
            message = self._agent.store.blobs.get(self._job, _load_blob_name(trainer))
        except ShardNotFoundError:
            return
        group, lifetime = from_msgpack(message, tuple[VersionId, str])
        if lifetime != self._trainer_lifetime:
            self._trainer_lifetime = lifetime
            self.rewind_to(group.version, loaded=group)  # the next save continues from the trainer's load

    def close(self) -> None:
        """Report the end of the last load, and remove what this process has published."""
        self.report_survived(stepped=False)
        if self._has_published:
            with contextlib.suppress(PeerStoreError, OSError):
                self._agent.store.blobs.remove(self._job, _load_blob_name(current_process()))

    def _publish(self, group: VersionId) -> None:
        """Publish a load in the agent for DCP's save processes, which receive the state and not the load."""
        message = msgspec.msgpack.encode((group, self._incarnation.capture().lifetime_id))
        store = self._agent.store
        store.blobs.put(self._job, _load_blob_name(current_process()), message)
        if not self._has_published:
            self._has_published = True
            for name in _stale_load_blobs(store.blobs.list_names(self._job)):
                store.blobs.remove(self._job, name)


def _load_blob_name(process: ProcessIdentity) -> str:
    return f"{_LOAD_PREFIX}{process.pid}.{process.start_time}"


def _stale_load_blobs(blobs: Iterable[str]) -> list[str]:
    """Return the published loads of dead processes, except the latest.

    Processes in another PID namespace seem dead too, so the latest remain.
    """
    processes = [name.removeprefix(_LOAD_PREFIX).split(".") for name in blobs if name.startswith(_LOAD_PREFIX)]
    dead = [one for one in (ProcessIdentity(int(pid), int(started)) for pid, started in processes) if not one.is_alive]
    return [_load_blob_name(one) for one in sorted(dead, key=lambda one: one.start_time)[:-_KEPT_LOADS]]
