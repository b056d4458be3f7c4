"""Drain: the background upload of sealed shards, indexes and manifests, and retention.
::

    waiting ──> running ──> done          its manifest is written: the step is durable
       │           ├──────> failed        the store rejected it; later steps are still uploaded
       │           └──────> waiting       the store does not answer; retried later, shard by shard
       └──> skipped                       a newer step was sealed and durable.on_busy is "skip", a save in memory needs
                                          the slots (such saves never wait for the store), or its owner dropped it

A required step is one whose save requested durability explicitly. Only saves in memory displace it, after all other
steps. It then counts as failed, and callers that wait for it see the failure.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from peerstore import deadlines
from peerstore.errors import PeerStoreError, ShardDamagedError, ShardNotFoundError
from peerstore.failpoints import failpoint
from peerstore.shard_records import RetentionMark, ShardKey, ShardRecord, VersionId
from peerstore.store.node_store import NodeStore
from peerstore.store.store_listener import StoreListener
from tieredckpt.agent.agent_api import DrainState, DrainStatus
from tieredckpt.agent.durable_catalog import (
    CatalogListing,
    DurableCatalog,
    delete_step,
    has_all_parts,
    manifest_from_shard_files,
)
from tieredckpt.agent.durable_tiers import DurableTiers
from tieredckpt.agent.node_step_reader import NodeStepReader
from tieredckpt.agent.retention import expired_steps
from tieredckpt.agent.step_marks import StepMarks
from tieredckpt.durable.object_store import ObjectNotFoundError, UploadCancelledError
from tieredckpt.errors import CheckpointDamagedError, DurableRefusedError, TieredCheckpointError
from tieredckpt.format import object_keys
from tieredckpt.format.manifest import (
    ShardIndex,
    compressed_shard,
    decode_meta,
    decode_shard_file,
    encode_shard_file,
)
from tieredckpt.settings import DurableSettings

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
_ABANDONED_S = 24 * 3600.0
_MAX_CLOSED_STEPS = 32
_PAGE = 1000
"""Names in one page of an S3 listing."""
DRAINED_BLOB_PREFIX, JOURNAL_BLOB_PREFIX = "drained.", "upload."
"""Prefixes of the drain's notes, which are blobs of the job."""


class DrainContext(Protocol):
    """Durable tiers, shards and quarantine of jobs, as the drain needs them."""

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
class _DrainingStep:
    job: str
    version_id: VersionId
    parts: int
    base: int | None
    state: DrainState = "waiting"
    shards: dict[ShardKey, int] = field(default_factory=dict)
    """Sizes of this node's shards, in bytes."""
    done: set[ShardKey] = field(default_factory=set)
    bytes_done: int = 0
    error: str = ""
    required: bool = False
    """Whether the save requested durability explicitly.

    Only saves in memory displace the step; it then fails.
    """
    over: str = ""
    """Why it can no longer become durable, even if an upload is in progress; "" if it can."""
    dropped: bool = False
    """Whether its owner dropped it. Its objects in the durable tier are then deleted."""
    cancel: threading.Event = field(default_factory=threading.Event)
    """Set to stop its upload."""
    url: str = ""
    """URL of the store that has the ``done`` shards."""
    held: bool = False
    """Whether its shards hold their slots."""
    not_before: float = 0.0
    sealed_at: float = 0.0
    uploaded_at: float = 0.0
    """Time when all of this node's parts were uploaded; 0 before."""
    checked_at: float = 0.0
    """Time when these uploads were last checked; 0 before."""

    @property
    def view(self) -> DrainStatus:
        return DrainStatus(self.version_id, self.state, self.bytes_done, sum(self.shards.values()), self.error)

    @property
    def open(self) -> bool:
        return self.state in ("waiting", "running")


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
        self._steps: dict[tuple[str, VersionId], _DrainingStep] = {}
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._cleaned: set[str] = set()
        self._problems: dict[str, str] = {}
        """By job: why the last failed upload failed, until an upload succeeds."""
        self.totals = DrainTotals()
        self._thread = threading.Thread(target=self._run, name="tieredckpt-drain", daemon=True)
        self._thread.start()

    def on_shard_sealed(self, record: ShardRecord) -> None:
        try:
            meta = decode_meta(record.meta)
        except CheckpointDamagedError:
            return  # not a shard of a step
        key = record.key
        with self._changed:
            if not meta.durable and (key.job, key.version_id) not in self._steps:
                return
            step = self._steps.setdefault(
                (key.job, key.version_id), _DrainingStep(key.job, key.version_id, record.parts, meta.base)
            )
            if step.state in ("done", "skipped") or step.over:
                return
            step.required |= meta.required is True
            self._hold(key)
            step.held, step.shards[key] = True, record.size_bytes
            step.sealed_at, step.not_before = self._clock(), 0.0
            step.state = "running" if step.state == "running" else "waiting"
            if len(step.shards) >= step.parts:
                self._supersede(step)
            self._changed.notify_all()

    def _supersede(self, newer: _DrainingStep) -> None:
        """Skip waiting steps older than the complete step ``newer``, unless durable.on_busy is "wait".

        Lock held.

        Required steps and steps with uploaded shards remain.
        """
        if self._context.durable.settings(newer.job).on_busy == "wait":
            return
        for step in list(self._steps.values()):
            older = step.job == newer.job and step.version_id < newer.version_id and step.state == "waiting"
            if older and not step.done and not step.required:
                self._skip(step, "a newer one is ready")

    def free_a_slot(self, job: str, last: bool) -> bool:
        """Release the slots of uploaded shards for a save, or else skip the oldest waiting step.

        A running upload continues. Each rank has slots for that step, the newest complete step and the step being
        written.
        """
        with self._changed:
            waiting = sorted(
                (step for step in self._steps.values() if step.job == job and step.state == "waiting"),
                key=lambda step: (step.required, bool(step.done), step.version_id),
            )
            uploaded = [step for step in waiting if step.held and step.done.issuperset(step.shards)]
            for step in uploaded:
                self._unhold(step)
            # A required step remains while the save can wait, unless its upload has failed.
            held = [step for step in waiting if step.held and (last or step.error or not step.required)]
            if not uploaded and held:
                trouble = f"; the store: {held[0].error}" if held[0].error else ""
                self._skip(held[0], f"saves in memory needed its slots{trouble}")
                self._announce_failure(held[0])
            return bool(uploaded or held)

    def retry_now(self) -> None:
        """Retry failed uploads now, because the settings changed."""
        with self._changed:
            for step in self._steps.values():
                step.not_before = 0.0
            self._changed.notify_all()

    def destination_changed(self, job: str) -> None:
        """Restart the job's uploads from the beginning, because its URL or its options changed."""
        with self._changed:
            for step in self._steps.values():
                if step.job == job:
                    step.url = ""
                    step.cancel.set()

    @property
    def busy(self) -> bool:
        with self._changed:
            return any(step.open for step in self._steps.values())

    def is_tracking(self, job: str, group: VersionId) -> bool:
        with self._changed:
            return (job, group) in self._steps

    def status(self, job: str) -> tuple[DrainStatus, ...]:
        with self._changed:
            return tuple(step.view for (owner, _), step in sorted(self._steps.items()) if owner == job)

    def wait(
        self, job: str, group: VersionId | None, timeout_s: float, *, before: int | None = None
    ) -> DrainStatus | None:
        """Wait until ``group``, or every step of ``job`` for ``None``, is no longer open; return one status.

        ``before``: only the steps before this one.
        It is the status of the newest open step. With none open, it is the newest failed step's, unless a newer one is
        durable, or else the newest step's. Return ``None`` without any step.
        """

        def is_finished() -> bool:
            steps = self._steps_of(job, group, before)
            return not any(step.open for step in steps)

        with self._changed:
            self._changed.wait_for(lambda: is_finished() or self._stop.is_set(), deadlines.remaining_s(timeout_s))
            steps = self._steps_of(job, group, before)
            unfinished = [step for step in steps if step.open]
            failed = [step for step in steps if step.state == "failed"]
            done = [step for step in steps if step.state == "done"]
            if not unfinished and failed and not (done and done[-1].version_id > failed[-1].version_id):
                return failed[-1].view
            return (unfinished or steps)[-1].view if steps else None

    def _steps_of(self, job: str, group: VersionId | None, before: int | None = None) -> list[_DrainingStep]:
        steps = [
            step
            for (owner, found), step in self._steps.items()
            if owner == job and group in (None, found) and (before is None or found.version < before)
        ]
        return sorted(steps, key=lambda step: step.version_id)

    def stop(self) -> None:
        """Stop the running upload between two of its parts and start no other; the next agent resumes it."""
        self._stop.set()
        with self._changed:
            for step in self._steps.values():
                step.cancel.set()
            self._changed.notify_all()

    def close(self) -> None:
        self.stop()
        self._thread.join()

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
                self._settle(step, "failed", f"internal error: {type(error).__name__}: {error}")

    def _next(self) -> _DrainingStep | None:
        with self._changed:
            while not self._stop.is_set():
                now = self._clock()
                ready = [s for s in self._steps.values() if s.state == "waiting" and s.not_before <= now and s.shards]
                if ready:
                    return self._pick(ready)
                later = [s.not_before - now for s in self._steps.values() if s.state == "waiting"]
                self._changed.wait(min(later) if later else None)
            return None

    def _pick(self, ready: list[_DrainingStep]) -> _DrainingStep:
        """Return the oldest waiting step and mark it as running. Lock held."""
        step = min(ready, key=lambda step: step.version_id)
        step.state = "running"
        step.cancel.clear()
        return step

    def _skip(self, step: _DrainingStep, why: str) -> None:
        """Skip the step, or fail it if it is required and was not dropped. Lock held."""
        step.over = why
        if step.required and not step.dropped:
            log.error(
                "%s step %d required durability and does not become durable: %s", step.job, step.version_id.version, why
            )
            self.totals.errors += 1
            step.state, step.error = "failed", why
        else:
            log.info("%s step %d is not uploaded to the durable tier: %s", step.job, step.version_id.version, why)
            self.totals.skipped += 1
            step.state, step.error = "skipped", why
        self._release(step)
        self._changed.notify_all()

    def _cancel(self, step: _DrainingStep, why: str) -> None:
        """Prevent the step from becoming durable and cancel its upload. Lock held."""
        step.over = step.over or why
        step.cancel.set()
        if step.state == "waiting":
            self._skip(step, why)

    def _drain(self, step: _DrainingStep) -> None:
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
                step.state = "waiting"
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
                step.state, step.error, step.not_before = "waiting", str(error), self._clock() + _RETRY_S
                self._changed.notify_all()
        with self._changed:
            if step.over and step.state == "waiting":
                self._skip(step, step.over)

    def _note_problem(self, step: _DrainingStep, error: Exception, what: str) -> None:
        with self._changed:
            self._problems[step.job] = f"step {step.version_id.version} {what}: {error}"

    def problem(self, job: str) -> str:
        """Return why the last failed upload of ``job`` failed; "" if an upload has succeeded since."""
        with self._changed:
            return self._problems.get(job, "")

    def _drain_to(self, catalog: DurableCatalog, step: _DrainingStep) -> None:
        began = self._clock()
        with self._changed:
            if step.url != catalog.store.url:  # uploads to another store do not count
                step.url, step.done = catalog.store.url, set()
                step.uploaded_at = step.checked_at = 0.0
        committed = not catalog.has(step.version_id, step.base)
        if committed and not self._make_durable(step, catalog):
            return
        if step.dropped or step.url != catalog.store.url:
            raise UploadCancelledError("the step was dropped, or the job's durable tier has changed")
        self._finish(step, catalog, began, committed=committed)

    def _delete_dropped(self, step: _DrainingStep, catalog: DurableCatalog) -> None:
        try:
            delete_step(catalog, step.job, step.version_id)
        except (TieredCheckpointError, OSError) as error:
            log.warning(
                "%s step %d cannot be deleted from %s: %s", step.job, step.version_id.version, catalog.store.url, error
            )

    def _make_durable(self, step: _DrainingStep, catalog: DurableCatalog) -> bool:
        """Upload this node's shards and, with all parts uploaded, the manifest; return whether all parts were."""
        self._add_local_parts(step)
        self._recheck_uploads(step, catalog)
        step.bytes_done = sum(step.shards[key] for key in step.done)
        while True:
            with self._changed:
                todo = sorted(key for key in step.shards if key not in step.done)
            if not todo:
                break
            self._drain_shard(step, catalog, todo[0])
            with self._changed:
                step.done.add(todo[0])
        step.uploaded_at = step.uploaded_at or self._clock()
        step.checked_at = step.checked_at or self._clock()
        files = self._uploaded_files(step, catalog)
        if not has_all_parts(files, step.parts):
            with self._changed:
                if all(key in step.done for key in step.shards):
                    # A shard that this node seals later resets not_before. Parts of other nodes must be polled.
                    step.error, step.not_before = "other parts are not durable yet", self._clock() + _POLL_PARTS_S
                step.state = "waiting"
            return False
        manifest = manifest_from_shard_files(list(files.values()), created_ns=time.time_ns(), writer=self._writer)
        failpoint("drain.complete")
        if step.cancel.is_set():
            raise UploadCancelledError(f"the upload of {step.job} step {step.version_id.version} was canceled")
        catalog.commit(manifest, step.base)
        failpoint("drain.committed")
        return True

    def _recheck_uploads(self, step: _DrainingStep, catalog: DurableCatalog) -> None:
        """Recheck the uploads of a step that has long waited for other nodes' parts.

        Shards that the store no longer has leave ``done``.
        """
        if step.checked_at and self._clock() - step.checked_at > _UNSURE_S:
            step.checked_at = self._clock()
            uploaded = {key for key in step.done if self._is_uploaded(step.job, key, catalog)}
            with self._changed:
                step.done = uploaded

    def _is_uploaded(self, job: str, key: ShardKey, catalog: DurableCatalog) -> bool:
        """Return whether the store still has a shard that was recorded as uploaded.

        If not, delete the record.
        """
        note = self._read_note(job, DRAINED_BLOB_PREFIX + _shard_stem(key))
        if note is None:
            return False
        try:
            for name in (decode_shard_file(note)[0].object, object_keys.shard_index_key(key)):
                catalog.store.get_ranges(name, [(0, 1)])
        except (ObjectNotFoundError, CheckpointDamagedError):
            log.warning("%s is missing or damaged in %s and is uploaded again", key, catalog.store.url)
            self._store.blobs.remove(job, DRAINED_BLOB_PREFIX + _shard_stem(key))
            return False
        return True

    def _add_local_parts(self, step: _DrainingStep) -> None:
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
                    self._hold(record.key)
                    step.held, step.shards[record.key] = True, record.size_bytes

    def _uploaded_files(
        self, step: _DrainingStep, catalog: DurableCatalog
    ) -> dict[int, tuple[ShardIndex, bytes, bytes]]:
        """Return index, layout and table of all uploaded parts, or only of this node's.

        Only the committing node lists the parts of all nodes. Other nodes do so after ``_TAKE_OVER_S``.
        """
        own = {}
        for key in step.done:
            note = self._read_note(step.job, DRAINED_BLOB_PREFIX + _shard_stem(key))
            if note is not None:
                own[key.part] = decode_shard_file(note)
        first_look = not step.error
        if has_all_parts(own, step.parts) or (first_look and 0 not in own):
            return own
        waited_s = self._clock() - step.uploaded_at
        if waited_s < _TAKE_OVER_S and not self._context.is_committer(step.job, step.version_id):
            return own
        return {**catalog.shard_files(step.version_id, at_least=step.parts), **own}

    def _drain_shard(self, step: _DrainingStep, catalog: DurableCatalog, key: ShardKey) -> None:
        if self._is_uploaded(step.job, key, catalog):  # uploaded by an earlier agent
            step.bytes_done += step.shards[key]
            return
        try:
            record = self._store.reader.hold(key, "drain")
            bad = self._store.verify(key)
        except ShardNotFoundError as error:
            raise CheckpointDamagedError(f"{key} was evicted from this node's memory before it was durable") from error
        if bad:
            raise CheckpointDamagedError(f"{key} changed in memory after it was sealed, so it is not uploaded")
        settings = self._context.durable.settings(step.job)
        index, layout, table = self._context.steps.describe_shard(record)
        journal = _Journal(self._store, step.job)
        failpoint("drain.began")
        index = self._upload(step, catalog, settings, index, journal)
        failpoint("drain.uploaded")
        file = encode_shard_file(index, layout, table)
        catalog.store.put(object_keys.shard_index_key(key), file)
        failpoint("drain.indexed")
        self._store.blobs.put(step.job, DRAINED_BLOB_PREFIX + _shard_stem(key), file)
        journal.flush()
        failpoint("drain.noted")

    def _upload(
        self,
        step: _DrainingStep,
        catalog: DurableCatalog,
        settings: DurableSettings,
        index: ShardIndex,
        journal: _Journal,
    ) -> ShardIndex:
        key = index.key

        def progress(count: int) -> None:
            step.bytes_done += count
            self.totals.bytes += count

        source = Path(self._store.reader.shard_path(key))
        with compressed_shard(source, index, wanted=settings.compress == "zstd") as (path, frames):
            name = object_keys.shard_object_key(key, spread=settings.hashed_keys, compressed=frames is not None)
            size = index.size_bytes if frames is None else sum(frames)
            identity = xxhash.xxh3_128_hexdigest(index.checksums) + ("" if frames is None else ".zst")
            catalog.store.upload(
                name, path, size, journal=journal, identity=identity, progress=progress, cancel=step.cancel
            )
        return msgspec.structs.replace(
            index, object=name, encoding="raw" if frames is None else "zstd", frames=tuple(frames or ())
        )

    def _finish(self, step: _DrainingStep, catalog: DurableCatalog, began: float, *, committed: bool) -> None:
        self.totals.steps += 1
        with self._changed:
            self._problems.pop(step.job, None)
        self.totals.seconds += self._clock() - began
        self.totals.lag_s = self._clock() - step.sealed_at
        self._store.versions.mark_committed(step.job, step.version_id)
        self._settle(step, "done")
        log.info("%s step %d is durable in %s", step.job, step.version_id.version, catalog.store.url)
        self._skip_incomplete(step)
        try:
            self._upload_quarantine(step.job, catalog)
            self._exchange_retention_marks(step.job, catalog)
            if committed:  # only the node that committed the step deletes old ones
                self._delete_expired(step.job, catalog)
        except (TieredCheckpointError, OSError) as error:
            log.warning("old steps of %s were not deleted: %s", step.job, error)

    def _skip_incomplete(self, newer: _DrainingStep) -> None:
        """Skip older steps that are uploaded here and lack parts of other nodes.

        With durable.on_busy "wait", skip none.
        """
        with self._changed:
            if self._context.durable.settings(newer.job).on_busy == "wait":
                return
            for step in list(self._steps.values()):
                older = step.job == newer.job and step.version_id < newer.version_id and step.state == "waiting"
                if older and step.done.issuperset(step.shards) and not step.required:
                    self._skip(step, "other nodes skipped it, and a newer step is durable")
            self._changed.notify_all()

    def _upload_quarantine(self, job: str, catalog: DurableCatalog) -> None:
        listing = catalog.cached_listing()
        for group, reason in self._context.marks.quarantine_reasons(job).items():
            if group in listing.manifests and group not in listing.quarantined:
                catalog.quarantine(group, reason)

    def _exchange_retention_marks(self, job: str, catalog: DurableCatalog) -> None:
        """Exchange retention marks between memory and the durable tier; the newer mark of a step wins."""
        listing = catalog.cached_listing()
        for mark in self._store.jobs.versions(job).retention.values():
            if mark.version_id not in listing.manifests or mark.retained == (mark.version_id in listing.kept):
                continue
            at_ns = catalog.keep_changed_at(mark.version_id, kept=not mark.retained)
            if at_ns > mark.at_ns:
                self._store.replicas.apply_retention(job, (RetentionMark(mark.version_id, not mark.retained, at_ns),))
            elif at_ns or mark.retained:
                catalog.keep(mark.version_id, kept=mark.retained, at_ns=mark.at_ns)

    def on_version_decided(self, job: str, group: VersionId, *, torn: bool) -> None:
        with self._changed:
            step = self._steps.get((job, group))
            if torn and step is not None:
                self._cancel(step, "a rank aborted its part")

    def on_not_durable(self, job: str, group: VersionId, why: str) -> None:
        """Fail a step whose part on another node will not become durable, and stop its upload here."""
        with self._changed:
            step = self._steps.setdefault((job, group), _DrainingStep(job, group, 0, None, "failed", error=why))
            step.required = True
            if step.open:
                self._cancel(step, why)
            elif not step.shards:  # this node may seal its parts later
                step.over = why
                self._forget_closed(job)
            self._changed.notify_all()

    def _announce_failure(self, step: _DrainingStep) -> None:
        """Announce a required step that failed here, so that it fails on all nodes for good. Lock held."""
        if step.required and step.state == "failed":
            step.over = step.over or step.error
            self._context.announce_not_durable(step.job, step.version_id, step.error)

    def on_versions_deleted(self, job: str, groups: Collection[VersionId]) -> None:
        with self._changed:
            for step in self._known_steps(job, groups):
                step.dropped = True
                self._cancel(step, "it was dropped")

    def cancel_steps(self, job: str, groups: Collection[VersionId]) -> None:
        """Cancel the uploads of dropped steps and wait until they end, at most ``_DROP_S`` seconds.

        A canceled upload deletes its step from the durable tier.
        """
        self.on_versions_deleted(job, groups)
        with self._changed:
            steps = self._known_steps(job, groups)
            left_s = deadlines.remaining_s(_DROP_S)
            self._changed.wait_for(lambda: not any(step.open for step in steps) or self._stop.is_set(), left_s)

    def _known_steps(self, job: str, groups: Collection[VersionId]) -> list[_DrainingStep]:
        return [self._steps[job, group] for group in groups if (job, group) in self._steps]

    def _delete_expired(self, job: str, catalog: DurableCatalog) -> None:
        known = catalog.cached_listing()
        # Other nodes and users also delete, quarantine and retain steps, so list again before deleting. If a listing
        # has many pages, wait until it is worth deleting several steps.
        if len(self._expired_steps(job, known)) > len(known.manifests) // _PAGE:
            for group in self._expired_steps(job, catalog.listing(fresh=True)):
                delete_step(catalog, job, group)
                self.totals.deleted += 1
                log.info("%s step %d was deleted from %s", job, group.version, catalog.store.url)
        if job not in self._cleaned:
            self._cleaned.add(job)
            journals = [name for name in self._store.blobs.list_names(job) if name.startswith(JOURNAL_BLOB_PREFIX)]
            keep = [name.removeprefix(JOURNAL_BLOB_PREFIX).replace("@", "/") for name in journals]
            catalog.store.abort_stale_uploads(f"{job}/", older_than_s=_ABANDONED_S, keep=keep)

    def _expired_steps(self, job: str, listing: CatalogListing) -> list[VersionId]:
        settings = self._context.durable.settings(job)
        return expired_steps(
            {group: entry.base for group, entry in listing.manifests.items()},
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            quarantined=listing.quarantined,
            kept=listing.kept,
        )

    def _settle(self, step: _DrainingStep, state: DrainState, error: str = "") -> None:
        with self._changed:
            step.state, step.error = state, error
            self._release(step)
            self._announce_failure(step)
            self._changed.notify_all()

    def _unhold(self, step: _DrainingStep) -> None:
        step.held = False
        for key in step.shards:
            self._store.reader.release_hold(key, "drain")

    def _release(self, step: _DrainingStep) -> None:
        self._unhold(step)
        for key in step.shards:
            self._store.blobs.remove(step.job, DRAINED_BLOB_PREFIX + _shard_stem(key))
        self._forget_closed(step.job)

    def _forget_closed(self, job: str) -> None:
        closed = sorted((k for k, s in self._steps.items() if k[0] == job and not s.open), key=lambda k: k[1])
        for old in closed[:-_MAX_CLOSED_STEPS]:
            del self._steps[old]

    def _hold(self, key: ShardKey) -> None:
        try:
            self._store.reader.hold(key, "drain")
        except (ShardNotFoundError, ShardDamagedError):
            log.warning("%s was evicted or damaged before its upload", key)

    def _read_note(self, job: str, name: str) -> bytes | None:
        try:
            return self._store.blobs.get(job, name)
        except (ShardNotFoundError, ShardDamagedError):
            return None


class _Journal:
    """Journal of started uploads, stored as blobs of the job for the next agent.

    A complete upload remains in the journal until :meth:`flush`, which the drain calls after it recorded the shard. If
    the agent is killed in between, the entry identifies the finished object.
    """

    def __init__(self, store: NodeStore, job: str) -> None:
        self._store = store
        self._job = job
        self._removed: set[str] = set()

    def get(self, name: str) -> bytes | None:
        if name in self._removed:
            return None
        try:
            return self._store.blobs.get(self._job, JOURNAL_BLOB_PREFIX + _blob_name(name))
        except (ShardNotFoundError, ShardDamagedError):
            return None

    def put(self, name: str, data: bytes) -> None:
        self._store.blobs.put(self._job, JOURNAL_BLOB_PREFIX + _blob_name(name), data)
        self._removed.discard(name)

    def remove(self, name: str) -> None:
        self._removed.add(name)

    def flush(self) -> None:
        for name in self._removed:
            self._store.blobs.remove(self._job, JOURNAL_BLOB_PREFIX + _blob_name(name))
        self._removed.clear()


def _shard_stem(key: ShardKey) -> str:
    return f"{object_keys.group_stem(key.version_id)}.{key.part}"


def _blob_name(name: str) -> str:
    return name.replace("/", "@")
