"""SaveQueue: background copies and seals of one Checkpointer's saves, one seal at a time."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import Any

from peerstore.errors import PeerStoreError
from peerstore.shard_records import ShardKey, ShardRecord, VersionId
from tieredckpt.checkpointer.overlapped_copy import OverlappedStaging
from tieredckpt.checkpointer.progress_hook import SaveRestoreLog, notify_progress_hook
from tieredckpt.checkpointer.save_handle import await_copies, describe_replication
from tieredckpt.checkpointer.save_template import PlannedState, StateTemplates
from tieredckpt.errors import StoreBusyError, TieredCheckpointError
from tieredckpt.session.save_job import SaveJob, SaveOptions
from tieredckpt.session.session import Session
from tieredckpt.session.slot_pool import StagedShard
from tieredckpt.settings import Settings
from tieredckpt.tensors.slot_copy import SlotWrite
from tieredckpt.tensors.state_dict import ObjectArchiveCache

log = logging.getLogger(__name__)

_REMEMBERED = 32


class SaveQueue:
    """Queue of planned saves: stage them, seal them in the background, report to the agent's metrics."""

    def __init__(
        self,
        job: str,
        settings: Settings,
        recorded: SaveRestoreLog,
        *,
        is_first: bool,
        on_upload: Callable[[Session, VersionId], None] | None = None,
    ) -> None:
        self._job = job
        self._settings = settings
        self._recorded = recorded
        self._is_first = is_first
        """Whether this rank logs for all ranks."""
        self._archives = ObjectArchiveCache(trusted=settings.memory.trust_objects)
        self._templates = StateTemplates()
        overlaps = settings.enabled and settings.memory.staging == "overlapped"
        self._overlapped = OverlappedStaging() if overlaps else None
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="tieredckpt-seal")
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="tieredckpt-stage")
        self._sealing: Future[ShardRecord] | None = None
        self.last_sealed: ShardKey | None = None
        self._wanted_durable: deque[VersionId] = deque(maxlen=_REMEMBERED)
        """The newest sealed steps whose upload was requested."""
        self._on_upload = on_upload
        """Receives each sealed step whose upload was requested."""
        self._upload_problem_logged = False

    def planned(self, session: Session, state: Mapping[str, Any]) -> PlannedState | None:
        """Return the state with the plan of an earlier save, or ``None`` if this world has no such plan."""
        return self._templates.find(session, state)

    def stage(
        self, session: Session, found: PlannedState, key: ShardKey, options: SaveOptions, *, wait_s: float
    ) -> SaveJob:
        """Copy a planned state into a slot; parameters and moments in the background, if they can wait."""
        planned = found.planned
        items = [self._archives.archive(item.fqn, found.objects[item.fqn]) for item in planned.layout.items]
        job = SaveJob(session, key, options, partial(self.report, session))
        fill = partial(self._fill, session, found.writes)
        job.stage(planned.layout, planned.parts, sum(map(len, items)), fill, wait_s=wait_s)
        job.describe(items, planned.table)
        return job

    def _fill(self, session: Session, writes: Sequence[SlotWrite], staged: StagedShard) -> Future[float] | None:
        layout, memory = staged.layout, staged.memory
        # The first copy into a slot without pages populates it, which takes longer than a step may wait.
        if self._overlapped is not None and memory.is_populated(layout.header_bytes + layout.tensor_bytes):
            late = self._overlapped.start(staged.lease.key.version, memory, layout, writes, session.copier)
            if late is not None:
                try:
                    return self._copying.submit(late.run, session.copier)
                except RuntimeError:  # the interpreter is shutting down and starts no background work
                    late.run(session.copier)
                    return None
        memory.copy_in(writes, session.copier)
        return None

    def start_seal(self, job: SaveJob) -> None:
        """Seal in the background. A sealed step does not depend on this process."""
        self._sealing = job.start_seal(self._sealer, partial(self.add_sealed, job))

    def add_sealed(self, job: SaveJob, record: ShardRecord) -> None:
        """Record a sealed part and notify the progress hook."""
        self.last_sealed = record.key
        if job.options.durable:
            self._wanted_durable.append(record.key.version_id)
            if self._on_upload is not None:
                self._on_upload(job.session, record.key.version_id)
        notify_progress_hook(job.session)

    def submit(self, call: Callable[..., object], *args: Any, **named: Any) -> None:
        """Run ``call`` in the background, after the seals that were started before."""
        self._sealer.submit(call, *args, **named)

    def finish_last(self, *, wait_s: float) -> None:
        """Wait for the last seal, so that at most one seal runs at a time."""
        if self._sealing is not None:
            try:
                self._sealing.result(wait_s)
            except FutureTimeoutError:
                raise StoreBusyError(f"the last save is still being sealed after {wait_s:.0f} s") from None
            except (TieredCheckpointError, PeerStoreError):
                pass  # reported where it happened
            self._sealing = None

    def require_copies(self, session: Session) -> None:
        """Raise if ``peer.require`` is ``copied`` and the last save lacks replicas."""
        if self.last_sealed is None or self._settings.peer.require != "copied":
            return
        wait_s = self._settings.memory.wait_s
        found = await_copies(session, self.last_sealed, wait_s)
        if found.missing_copies:
            raise StoreBusyError(f"the last save has {describe_replication(found)} after {wait_s:g} s")

    def report(self, session: Session | None, **values: float) -> None:
        """Add to the agent's metrics; the first rank records which step the agent reports as protected."""
        found = session.add_metrics(**values) if session is not None else None
        if self._is_first and found is not None and found.upload_problem and not self._upload_problem_logged:
            self._upload_problem_logged = True
            log.warning("%s: %s. Training continues", self._job, found.upload_problem)
        if self._is_first:
            self._recorded.protection(found, missed=round(values.get("skipped", 0) + values.get("failed", 0)))

    def report_not_durable(self, session: Session) -> None:
        """Log an error if the newest step with a requested upload is not durable, and why."""
        if not self._wanted_durable:
            return
        try:
            uploads = {one.version_id: one for one in session.agent.drain_status(self._job)}
        except PeerStoreError as error:
            log.warning("%s: the agent did not report which steps are durable: %s", self._job, error)
            return
        mine = [uploads[one] for one in self._wanted_durable if one in uploads]
        bad = [one for one in mine if one.state == "failed" or (one.state == "waiting" and one.error)]
        if bad and bad[-1] is mine[-1]:
            done = sum(one.state == "done" for one in mine)
            log.error(
                "%s: %d of the last %d steps were uploaded to %s. Step %d: %s",
                *(self._job, done, len(mine), self._settings.durable.url, bad[-1].version_id.version),
                bad[-1].error,
            )

    def close(self) -> None:
        """Wait for the started copies and seals, and release the state's tensors."""
        self._templates.close()
        self._copying.shutdown()
        if self._overlapped is not None:
            self._overlapped.close()
        self._sealer.shutdown()
