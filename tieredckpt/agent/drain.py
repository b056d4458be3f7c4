"""Drain: the thread that uploads sealed shards, their indexes and the manifests of complete steps.

:mod:`~tieredckpt.agent.drain_steps` has the states of a step, :mod:`~tieredckpt.agent.shard_uploads` uploads one shard,
and :mod:`~tieredckpt.agent.durable_retention` chooses the old steps to delete.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from peerstore import deadlines
from peerstore.errors import PeerStoreError
from peerstore.failpoints import failpoint
from peerstore.shard_records import ShardKey, ShardRecord, VersionId
from peerstore.store.node_store import NodeStore
from peerstore.store.store_listener import StoreListener
from tieredckpt.agent.agent_api import DrainState, DrainStatus
from tieredckpt.agent.drain_steps import DrainingStep, DrainSteps, all_closed, summarize
from tieredckpt.agent.durable_catalog import DurableCatalog, delete_step, has_all_parts, manifest_from_shard_files
from tieredckpt.agent.durable_retention import DurableRetention
from tieredckpt.agent.durable_tiers import DurableTiers
from tieredckpt.agent.node_step_reader import NodeStepReader
from tieredckpt.agent.shard_uploads import ShardFile, ShardUploads
from tieredckpt.agent.step_marks import StepMarks
from tieredckpt.durable.object_store import UploadCancelledError
from tieredckpt.errors import CheckpointDamagedError, DurableRefusedError, TieredCheckpointError
from tieredckpt.format.manifest import decode_meta

log = logging.getLogger(__name__)

_RETRY_S = 15.0
_POLL_PARTS_S = 2.0
"""Seconds between two checks for the parts of other nodes. This node's slots stay in use meanwhile."""
_TAKE_OVER_S = 60.0
"""Seconds after which any node may commit a step.

The committing node may be alive and still fail to do so.
"""
_DROP_S = 30.0
"""Seconds that dropping a step waits for its upload to end."""
_UNSURE_S = 600.0
"""Seconds after which uploaded shards are checked again.

Garbage collection may have deleted them as orphans.
"""


class DrainContext(Protocol):
    """Durable tiers, shards and marks of jobs, as the drain needs them."""

    @property
    def durable(self) -> DurableTiers: ...
    @property
    def steps(self) -> NodeStepReader: ...
    @property
    def marks(self) -> StepMarks: ...
    def is_committer(self, job: str, group: VersionId) -> bool:
        """Return whether this node commits the step once all parts are uploaded.

        One of the nodes with parts of the step does so.
        """

    def announce_not_durable(self, job: str, group: VersionId, why: str) -> None:
        """Report to the job's other nodes, in the background, that a step will not become durable."""


@dataclass
class DrainTotals:
    """Totals since the agent started."""

    steps: int = 0
    bytes: int = 0
    seconds: float = 0.0
    skipped: int = 0
    errors: int = 0
    deleted: int = 0
    lag_s: float = 0.0
    """Seconds from the last drained step's seal to its manifest."""


class Drain(StoreListener):
    """Background thread that makes steps durable, one at a time."""

    def __init__(
        self, store: NodeStore, context: DrainContext, *, writer: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._context = context
        self._writer = writer
        self._clock = clock
        self._uploads = ShardUploads(store, context.durable, context.steps)
        self._retention = DurableRetention(store, context.durable, context.marks)
        self._steps = DrainSteps()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._problems: dict[str, str] = {}
        """By job: why the last failed upload failed, until an upload succeeds."""
        self.totals = DrainTotals()
        self._thread = threading.Thread(target=self._run, name="tieredckpt-drain", daemon=True)
        self._thread.start()

    # -- events of the store ------------------------------------------------------------------------------------------

    def on_shard_sealed(self, record: ShardRecord) -> None:
        try:
            meta = decode_meta(record.meta)
        except CheckpointDamagedError:
            return  # not a shard of a step
        key = record.key
        with self._changed:
            if not meta.durable and self._steps.get(key.job, key.version_id) is None:
                return
            step = self._steps.add(DrainingStep(key.job, key.version_id, record.parts, meta.base))
            if not step.accepts_shards:
                return
            self._uploads.hold(key)
            step.add_sealed(key, record.size_bytes, self._clock(), required=meta.required is True)
            if len(step.shards) >= step.parts and not self._waits_when_busy(step.job):
                for older in self._steps.superseded_by(step):
                    self._give_up(older, "a newer one is ready")
            self._changed.notify_all()

    def free_a_slot(self, job: str, last: bool) -> bool:
        """Release the slots of uploaded shards for a save, or else skip the oldest waiting step.

        Each rank has slots for a running upload, the newest complete step and the step being written.
        """
        with self._changed:
            uploaded, displaced = self._steps.slots_to_free(job, last=last)
            for step in uploaded:
                self._release_slots(step)
            if displaced is not None:
                trouble = f"; the store: {displaced.error}" if displaced.error else ""
                self._give_up(displaced, f"saves in memory needed its slots{trouble}")
                self._announce_failure(displaced)
            return bool(uploaded) or displaced is not None

    def on_version_decided(self, job: str, group: VersionId, *, torn: bool) -> None:
        with self._changed:
            step = self._steps.get(job, group)
            if torn and step is not None:
                self._cancel(step, "a rank aborted its part")

    def on_not_durable(self, job: str, group: VersionId, why: str) -> None:
        """Fail a step whose part on another node will not become durable, and stop its upload here."""
        with self._changed:
            step = self._steps.add(DrainingStep(job, group, 0, None, "failed", error=why))
            step.required = True
            if step.is_open:
                self._cancel(step, why)
            elif not step.shards:  # this node may seal its parts later
                step.over = why
                self._steps.forget_closed(job)
            self._changed.notify_all()

    def on_versions_deleted(self, job: str, groups: Collection[VersionId]) -> None:
        with self._changed:
            for step in self._known_steps(job, groups):
                step.dropped = True
                self._cancel(step, "it was dropped")

    # -- requests -----------------------------------------------------------------------------------------------------

    def retry_now(self) -> None:
        """Retry failed uploads now, because the settings changed."""
        with self._changed:
            for step in self._steps:
                step.not_before = 0.0
            self._changed.notify_all()

    def destination_changed(self, job: str) -> None:
        """Restart the job's uploads from the beginning, because its URL or its options changed."""
        with self._changed:
            for step in self._steps.of_job(job):
                step.url = ""
                step.cancel.set()

    @property
    def busy(self) -> bool:
        with self._changed:
            return any(step.is_open for step in self._steps)

    def is_tracking(self, job: str, group: VersionId) -> bool:
        with self._changed:
            return self._steps.get(job, group) is not None

    def status(self, job: str) -> tuple[DrainStatus, ...]:
        with self._changed:
            return tuple(step.view for step in self._steps.of_job(job))

    def problem(self, job: str) -> str:
        """Return why the last failed upload of ``job`` failed; "" if an upload has succeeded since."""
        with self._changed:
            return self._problems.get(job, "")

    def wait(
        self, job: str, group: VersionId | None, timeout_s: float, *, before: int | None = None
    ) -> DrainStatus | None:
        """Wait until ``group``, or every step of ``job`` for ``None``, is no longer open; return one status.

        ``before``: only the steps before this one.
        """

        def is_finished() -> bool:
            return self._stop.is_set() or all_closed(self._steps.of_job(job, group, before=before))

        with self._changed:
            self._changed.wait_for(is_finished, deadlines.remaining_s(timeout_s))
            return summarize(self._steps.of_job(job, group, before=before))

    def cancel_steps(self, job: str, groups: Collection[VersionId]) -> None:
        """Cancel the uploads of dropped steps and wait until they end, at most ``_DROP_S`` seconds.

        A canceled upload deletes its step from the durable tier.
        """
        self.on_versions_deleted(job, groups)
        with self._changed:
            steps = self._known_steps(job, groups)
            self._changed.wait_for(lambda: all_closed(steps) or self._stop.is_set(), deadlines.remaining_s(_DROP_S))

    def stop(self) -> None:
        """Stop the running upload between two of its parts and start no other; the next agent resumes it."""
        self._stop.set()
        with self._changed:
            for step in self._steps:
                step.cancel.set()
            self._changed.notify_all()

    def close(self) -> None:
        self.stop()
        self._thread.join()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            step = self._next()
            if step is None:
                return
            try:
                self._drain(step)
            except Exception as error:  # the thread must outlive any one step
                self.totals.errors += 1
                log.exception("draining %s step %d failed unexpectedly", step.job, step.version_id.version)
                if step.is_open:
                    self._settle(step, "failed", f"internal error: {type(error).__name__}: {error}")

    def _next(self) -> DrainingStep | None:
        with self._changed:
            while not self._stop.is_set():
                now = self._clock()
                step = self._steps.next_ready(now)
                if step is not None:
                    step.start()
                    return step
                self._changed.wait(self._steps.seconds_until_ready(now))
            return None

    def _drain(self, step: DrainingStep) -> None:
        try:
            with self._context.durable.catalog(step.job) as catalog:
                if catalog is None:
                    self._settle(step, "failed" if step.required else "skipped", "the job has no durable tier")
                    return
                try:
                    self._drain_to(catalog, step)
                finally:
                    if step.dropped:
                        self._delete_dropped(step, catalog)
        except UploadCancelledError:
            with self._changed:
                step.move("waiting", step.error)
        except (DurableRefusedError, CheckpointDamagedError) as error:
            self.totals.errors += 1
            self._note_problem(step, error, "does not become durable")
            log.error("%s step %d does not become durable: %s", step.job, step.version_id.version, error)
            self._settle(step, "failed", str(error))
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            self.totals.errors += 1
            self._note_problem(step, error, f"is not durable yet, and its upload is retried every {_RETRY_S:.0f} s")
            log.warning("%s step %d: %s; tried again in %.0f s", step.job, step.version_id.version, error, _RETRY_S)
            with self._changed:
                step.wait_until(self._clock() + _RETRY_S, str(error))
                self._changed.notify_all()
        with self._changed:
            if step.over and step.state == "waiting":
                self._give_up(step, step.over)

    def _drain_to(self, catalog: DurableCatalog, step: DrainingStep) -> None:
        began = self._clock()
        with self._changed:
            step.use_store(catalog.store.url)
        committed = not catalog.has(step.version_id, step.base)
        if committed and not self._make_durable(step, catalog):
            return
        if step.dropped or step.url != catalog.store.url:
            raise UploadCancelledError("the step was dropped, or the job's durable tier has changed")
        self._finish(step, catalog, began, committed=committed)

    def _make_durable(self, step: DrainingStep, catalog: DurableCatalog) -> bool:
        """Upload this node's shards and, with all parts uploaded, the manifest; return whether all parts were."""
        self._add_local_parts(step)
        self._recheck_uploads(step, catalog)
        step.bytes_done = sum(step.shards[key] for key in step.done)
        while True:
            with self._changed:
                todo = sorted(key for key in step.shards if key not in step.done)
            if not todo:
                break
            self._upload(step, catalog, todo[0])
            with self._changed:
                step.done.add(todo[0])
        step.uploaded_at = step.uploaded_at or self._clock()
        step.checked_at = step.checked_at or self._clock()
        files = self._uploaded_files(step, catalog)
        if not has_all_parts(files, step.parts):
            with self._changed:
                if step.is_uploaded_here:
                    # A shard that this node seals later resets not_before. Parts of other nodes must be polled.
                    step.wait_until(self._clock() + _POLL_PARTS_S, "other parts are not durable yet")
                else:
                    step.move("waiting", step.error)
            return False
        manifest = manifest_from_shard_files(list(files.values()), created_ns=time.time_ns(), writer=self._writer)
        failpoint("drain.complete")
        if step.cancel.is_set():
            raise UploadCancelledError(f"the upload of {step.job} step {step.version_id.version} was canceled")
        catalog.commit(manifest, step.base)
        failpoint("drain.committed")
        return True

    def _add_local_parts(self, step: DrainingStep) -> None:
        """Add this node's other parts of the step, including parts that were not sealed as durable.

        In a preempted job not every rank knows that a step is its last one. In a step of files only the last part knows
        whether the step is to be durable.
        """
        replicas = {fact.key for fact in self._store.list_shards(step.job) if fact.holders}
        for record in self._store.reader.records(step.job, step.version_id):
            if record.key in replicas:  # the node that wrote it, or took it over, uploads it
                continue
            with self._changed:
                if record.key not in step.shards:
                    self._uploads.hold(record.key)
                    step.hold(record.key, record.size_bytes)

    def _recheck_uploads(self, step: DrainingStep, catalog: DurableCatalog) -> None:
        """Recheck the uploads of a step that has long waited for other nodes' parts.

        Shards that the store no longer has leave ``done``.
        """
        if step.checked_at and self._clock() - step.checked_at > _UNSURE_S:
            step.checked_at = self._clock()
            uploaded = {key for key in step.done if self._uploads.is_uploaded(key, catalog)}
            with self._changed:
                step.done = uploaded

    def _upload(self, step: DrainingStep, catalog: DurableCatalog, key: ShardKey) -> None:
        if self._uploads.is_uploaded(key, catalog):  # by an earlier agent
            step.bytes_done += step.shards[key]
            return

        def progress(count: int) -> None:
            step.bytes_done += count
            self.totals.bytes += count

        self._uploads.upload(key, catalog, progress=progress, cancel=step.cancel)

    def _uploaded_files(self, step: DrainingStep, catalog: DurableCatalog) -> dict[int, ShardFile]:
        """Return index, layout and table of all uploaded parts, or only of this node's.

        Only the committing node lists the parts of all nodes. Other nodes do so after ``_TAKE_OVER_S``.
        """
        own = {key.part: file for key in step.done if (file := self._uploads.uploaded_file(key)) is not None}
        first_look = not step.error
        if has_all_parts(own, step.parts) or (first_look and 0 not in own):
            return own
        waited_s = self._clock() - step.uploaded_at
        if waited_s < _TAKE_OVER_S and not self._context.is_committer(step.job, step.version_id):
            return own
        return {**catalog.shard_files(step.version_id, at_least=step.parts), **own}

    def _finish(self, step: DrainingStep, catalog: DurableCatalog, began: float, *, committed: bool) -> None:
        self.totals.steps += 1
        with self._changed:
            self._problems.pop(step.job, None)
        self.totals.seconds += self._clock() - began
        self.totals.lag_s = self._clock() - step.sealed_at
        self._store.versions.mark_committed(step.job, step.version_id)
        self._settle(step, "done")
        log.info("%s step %d is durable in %s", step.job, step.version_id.version, catalog.store.url)
        with self._changed:
            if not self._waits_when_busy(step.job):
                for older in self._steps.incomplete_before(step):
                    self._give_up(older, "other nodes skipped it, and a newer step is durable")
            self._changed.notify_all()
        try:
            self._retention.exchange_marks(step.job, catalog)
            if committed:  # only the node that committed the step deletes old ones
                for group in self._retention.steps_to_delete(step.job, catalog):
                    delete_step(catalog, step.job, group)
                    self.totals.deleted += 1
                    log.info("%s step %d was deleted from %s", step.job, group.version, catalog.store.url)
                self._retention.abort_stale_uploads(step.job, catalog)
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            log.warning("old steps of %s were not deleted: %s", step.job, error)

    def _delete_dropped(self, step: DrainingStep, catalog: DurableCatalog) -> None:
        try:
            delete_step(catalog, step.job, step.version_id)
        except (TieredCheckpointError, OSError) as error:
            log.warning(
                "%s step %d cannot be deleted from %s: %s", step.job, step.version_id.version, catalog.store.url, error
            )

    # -- changes of a step, mostly with the lock held -----------------------------------------------------------------

    def _waits_when_busy(self, job: str) -> bool:
        return self._context.durable.settings(job).on_busy == "wait"

    def _note_problem(self, step: DrainingStep, error: Exception, what: str) -> None:
        with self._changed:
            self._problems[step.job] = f"step {step.version_id.version} {what}: {error}"

    def _settle(self, step: DrainingStep, state: DrainState, error: str = "") -> None:
        with self._changed:
            self._release(step)
            step.move(state, error)
            self._steps.forget_closed(step.job)
            self._announce_failure(step)
            self._changed.notify_all()

    def _give_up(self, step: DrainingStep, why: str) -> None:
        """Skip the step, or fail it if it is required and was not dropped."""
        self._release(step)
        step.give_up(why)
        self._steps.forget_closed(step.job)
        if step.state == "failed":
            log.error(
                "%s step %d required durability and does not become durable: %s", step.job, step.version_id.version, why
            )
            self.totals.errors += 1
        else:
            log.info("%s step %d is not uploaded to the durable tier: %s", step.job, step.version_id.version, why)
            self.totals.skipped += 1
        self._changed.notify_all()

    def _cancel(self, step: DrainingStep, why: str) -> None:
        """Prevent the step from becoming durable and cancel its upload."""
        step.over = step.over or why
        step.cancel.set()
        if step.state == "waiting":
            self._give_up(step, why)

    def _announce_failure(self, step: DrainingStep) -> None:
        """Announce a required step that failed here, so that it fails on all nodes for good."""
        if step.required and step.state == "failed":
            step.over = step.over or step.error
            self._context.announce_not_durable(step.job, step.version_id, step.error)

    def _known_steps(self, job: str, groups: Collection[VersionId]) -> list[DrainingStep]:
        return [step for group in groups if (step := self._steps.get(job, group)) is not None]

    def _release(self, step: DrainingStep) -> None:
        self._release_slots(step)
        for key in step.shards:
            self._uploads.forget(key)

    def _release_slots(self, step: DrainingStep) -> None:
        step.held = False
        for key in step.shards:
            self._uploads.release_hold(key)
