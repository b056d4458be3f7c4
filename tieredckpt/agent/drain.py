"""Drain: sealed shards uploaded to the durable tier, then index, manifest, retention.

::

    waiting ──> running ──> done          the manifest is there: the step is durable
       │           ├──────> failed        the store said no; the next step tries again
       │           └──────> waiting       the store is away; tried again later, shard by shard
       └──> skipped                       a newer step was sealed first and policy says skip, a save in memory needs the
                                          slots (those go on whatever the store does), or its owner has dropped it.
                                          Where somebody has asked for this very step it gives way to saves in memory
                                          only, after all others, and then it has failed: that is said to who asked
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from peerstore import deadlines
from peerstore.errors import PeerStoreError, ShardDamagedError, ShardNotFoundError
from peerstore.failpoints import failpoint
from peerstore.shard_records import RetentionMark, ShardKey, ShardRecord, VersionId
from peerstore.store.node_store import NodeStore, StoreListener
from tieredckpt.agent.agent_api import DrainState, DrainStatus
from tieredckpt.agent.durable_catalog import (
    CatalogListing,
    DurableCatalog,
    delete_step,
    has_all_parts,
    manifest_from_shard_files,
)
from tieredckpt.agent.retention import expired_steps
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
_OTHERS_S = 2.0
"""Between two looks whether other nodes have done their part; this node's slots wait for it."""
_TAKE_OVER_S = 60.0
"""After that a node looks for all parts itself: who was to commit the step may be there and yet not do it."""
_DROP_S = 30.0
"""How long whoever drops a step waits for an upload of it."""
_UNSURE_S = 600.0
"""What was uploaded so long ago is looked for before it is counted on: somebody may have taken it for a dead job's."""
_ABANDONED_S = 24 * 3600.0
_REMEMBERED = 32
_PAGE = 1000
"""Names in a page of a listing, as S3 has them."""
DRAINED_BLOB_PREFIX, JOURNAL_BLOB_PREFIX = "drained.", "upload."
"""Prefixes of the notes a drain keeps beside a job's shards."""


class DrainContext(Protocol):
    """What a drain has to know about jobs."""

    def catalog(self, job: str) -> AbstractContextManager[DurableCatalog | None]: ...
    def durable_settings(self, job: str) -> DurableSettings: ...
    def is_committer(self, job: str, group: VersionId) -> bool:
        """Whether it is this node that looks for all parts of a step and makes it exist, of all that have some."""

    def announce_not_durable(self, job: str, group: VersionId, why: str) -> None:
        """Have the job's other nodes hear that a step does not become durable. Waits for nobody."""

    def describe_shard(self, record: ShardRecord) -> tuple[ShardIndex, bytes, bytes]: ...
    def quarantine_reasons(self, job: str) -> Mapping[VersionId, str]: ...


@dataclass
class _DrainingStep:
    job: str
    version_id: VersionId
    parts: int
    base: int | None
    state: DrainState = "waiting"
    shards: dict[ShardKey, int] = field(default_factory=dict)
    """The shards of this node, and their sizes."""
    done: set[ShardKey] = field(default_factory=set)
    bytes_done: int = 0
    error: str = ""
    required: bool = False
    """Somebody has asked for this very step: it gives way to saves in memory only, and not without a word."""
    over: str = ""
    """Why it does not become durable any more, whatever is under way."""
    dropped: bool = False
    """Its owner has said so: nothing of it stays in the durable tier."""
    cancel: threading.Event = field(default_factory=threading.Event)
    """Ends its upload."""
    url: str = ""
    """Where what is ``done`` is."""
    held: bool = False
    """Its shards keep their slots."""
    not_before: float = 0.0
    sealed_at: float = 0.0
    uploaded_at: float = 0.0
    """When this node's parts were all in the durable tier."""
    checked_at: float = 0.0
    """When they were seen there last."""

    @property
    def view(self) -> DrainStatus:
        return DrainStatus(self.version_id, self.state, self.bytes_done, sum(self.shards.values()), self.error)

    @property
    def open(self) -> bool:
        return self.state in ("waiting", "running")


@dataclass
class DrainTotals:
    """Counted since the agent started."""

    steps: int = 0
    bytes: int = 0
    seconds: float = 0.0
    skipped: int = 0
    errors: int = 0
    deleted: int = 0
    lag_s: float = 0.0
    """From the last drained step's seal to its manifest."""


class Drain(StoreListener):
    """One background thread that makes steps durable, one after the other."""

    def __init__(
        self, store: NodeStore, places: DrainContext, *, writer: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._places = places
        self._writer = writer
        self._clock = clock
        self._steps: dict[tuple[str, VersionId], _DrainingStep] = {}
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._cleaned: set[str] = set()
        self._problems: dict[str, str] = {}
        """By job: why the newest upload failed, until one succeeds."""
        self.totals = DrainTotals()
        self._thread = threading.Thread(target=self._run, name="tieredckpt-drain", daemon=True)
        self._thread.start()

    # -- what comes in ----------------------------------------------------------------------------------------

    def on_shard_sealed(self, record: ShardRecord) -> None:
        try:
            meta = decode_meta(record.meta)
        except CheckpointDamagedError:
            return  # a shard of somebody else's
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

    def marked(self, job: str, group: VersionId) -> None:
        """The step is whole, although some of its parts are on other nodes."""
        with self._changed:
            step = self._steps.get((job, group))
            if step is not None:
                self._supersede(step)
                self._changed.notify_all()

    def _supersede(self, newer: _DrainingStep) -> None:
        """Where policy says skip, a step that waits gives up its slots for a newer whole one. Lock held."""
        if self._places.durable_settings(newer.job).on_busy == "wait":
            return
        for step in list(self._steps.values()):
            older = step.job == newer.job and step.version_id < newer.version_id and step.state == "waiting"
            if older and not step.done and not step.required:
                self._skip(step, "a newer one is ready")

    def free_a_slot(self, job: str, last: bool) -> bool:
        """A save finds no slot: first what is uploaded already need not be held, then the oldest step that waits goes.

        One that is running goes on: with it, the newest whole step and the one being written each rank has a slot.
        """
        with self._changed:
            waiting = sorted(
                (step for step in self._steps.values() if step.job == job and step.state == "waiting"),
                key=lambda step: (step.required, bool(step.done), step.version_id),
            )
            uploaded = [step for step in waiting if step.held and step.done.issuperset(step.shards)]
            for step in uploaded:
                self._unhold(step)
            # What was asked for waits as long as the save does, unless the store is known to be away.
            held = [step for step in waiting if step.held and (last or step.error or not step.required)]
            if not uploaded and held:
                trouble = f"; the store: {held[0].error}" if held[0].error else ""
                self._skip(held[0], f"it gave way to saves in memory{trouble}")
                self._say(held[0])
            return bool(uploaded or held)

    def retry_now(self) -> None:
        """Settings changed: what failed may work now."""
        with self._changed:
            for step in self._steps.values():
                step.not_before = 0.0
            self._changed.notify_all()

    def destination_changed(self, job: str) -> None:
        """The job's durable tier is elsewhere, or another account's: what is under way begins again there."""
        with self._changed:
            for step in self._steps.values():
                if step.job == job:
                    step.url = ""
                    step.cancel.set()

    # -- what others see --------------------------------------------------------------------------------------

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

    def wait(self, job: str, group: VersionId | None, timeout_s: float) -> DrainStatus | None:
        """Until ``group`` (or everything of ``job``) is not open any more."""

        def is_finished() -> bool:
            steps = self._wanted(job, group)
            return not any(step.open for step in steps)

        with self._changed:
            self._changed.wait_for(lambda: is_finished() or self._stop.is_set(), deadlines.remaining_s(timeout_s))
            steps = self._wanted(job, group)
            still = [step for step in steps if step.open]
            failed = [step for step in steps if step.state == "failed"]
            done = [step for step in steps if step.state == "done"]
            if not still and failed and not (done and done[-1].version_id > failed[-1].version_id):
                return failed[-1].view
            return (still or steps)[-1].view if steps else None

    def _wanted(self, job: str, group: VersionId | None) -> list[_DrainingStep]:
        steps = [step for (owner, found), step in self._steps.items() if owner == job and group in (None, found)]
        return sorted(steps, key=lambda step: step.version_id)

    def stop(self) -> None:
        """Begin nothing new, and stop between two parts; the next agent goes on from there."""
        self._stop.set()
        with self._changed:
            for step in self._steps.values():
                step.cancel.set()
            self._changed.notify_all()

    def close(self) -> None:
        self.stop()
        self._thread.join()

    # -- the thread -------------------------------------------------------------------------------------------

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
        """The oldest step that waits. Called with the lock held."""
        step = min(ready, key=lambda step: step.version_id)
        step.state = "running"
        step.cancel.clear()
        return step

    def _skip(self, step: _DrainingStep, why: str) -> None:
        """Lock held. Whoever has asked for this very step, and not dropped it since, is told that it has failed."""
        step.over = why
        if step.required and not step.dropped:
            log.error("%s step %d was to be durable and does not become so: %s", step.job, step.version_id.version, why)
            self.totals.errors += 1
            step.state, step.error = "failed", why
        else:
            log.info("%s step %d is left out of the durable tier: %s", step.job, step.version_id.version, why)
            self.totals.skipped += 1
            step.state, step.error = "skipped", why
        self._release(step)
        self._changed.notify_all()

    def _end(self, step: _DrainingStep, why: str) -> None:
        """It does not become durable any more, also where its upload is under way. Lock held."""
        step.over = step.over or why
        step.cancel.set()
        if step.state == "waiting":
            self._skip(step, why)

    def _drain(self, step: _DrainingStep) -> None:
        try:
            with self._places.catalog(step.job) as catalog:
                if catalog is None:
                    self._settle(step, "failed" if step.required else "skipped", "the job has no durable tier")
                    return
                try:
                    self._drain_to(catalog, step)
                finally:
                    if step.dropped:
                        self._take_back(step, catalog)
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
        """Return why the newest upload of ``job`` failed; "" where none did since one succeeded."""
        with self._changed:
            return self._problems.get(job, "")

    def _drain_to(self, catalog: DurableCatalog, step: _DrainingStep) -> None:
        began = self._clock()
        with self._changed:
            if step.url != catalog.store.url:  # what was uploaded to another place does not count for this one
                step.url, step.done = catalog.store.url, set()
                step.uploaded_at = step.checked_at = 0.0
        committed = not catalog.has(step.version_id, step.base)
        if committed and not self._make_durable(step, catalog):
            return
        if step.dropped or step.url != catalog.store.url:
            raise UploadCancelledError("it is not wanted here any more")
        self._finish(step, catalog, began, committed=committed)

    def _take_back(self, step: _DrainingStep, catalog: DurableCatalog) -> None:
        try:
            delete_step(catalog, step.job, step.version_id)
        except (TieredCheckpointError, OSError) as error:
            log.warning("what is in %s of %s step %d: %s", catalog.store.url, step.job, step.version_id.version, error)

    def _make_durable(self, step: _DrainingStep, catalog: DurableCatalog) -> bool:
        """Upload this node's shards and, when every part is there, the manifest. False: others' parts are missing."""
        self._gather(step)
        self._look_again(step, catalog)
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
        files = self._all_files(step, catalog)
        if not has_all_parts(files, step.parts):
            with self._changed:
                if all(key in step.done for key in step.shards):
                    # A part of this node that is sealed later wakes the step up; others' are looked for again.
                    step.error, step.not_before = "other parts are not durable yet", self._clock() + _OTHERS_S
                step.state = "waiting"
            return False
        manifest = manifest_from_shard_files(list(files.values()), created_ns=time.time_ns(), writer=self._writer)
        failpoint("drain.complete")
        if step.cancel.is_set():
            raise UploadCancelledError(
                f"{step.job} step {step.version_id.version} is not to be made durable here and now"
            )
        catalog.commit(manifest, step.base)
        failpoint("drain.committed")
        return True

    def _look_again(self, step: _DrainingStep, catalog: DurableCatalog) -> None:
        """Of what waits for other nodes' parts for long, what is not in the durable tier any more is uploaded again."""
        if step.checked_at and self._clock() - step.checked_at > _UNSURE_S:
            step.checked_at = self._clock()
            there = {key for key in step.done if self._is_there(step.job, key, catalog)}
            with self._changed:
                step.done = there

    def _is_there(self, job: str, key: ShardKey, catalog: DurableCatalog) -> bool:
        """Whether a shard that was noted as uploaded can still be counted on; if not, nothing is noted of it now."""
        noted = self._note(job, DRAINED_BLOB_PREFIX + _shard_stem(key))
        if noted is None:
            return False
        try:
            for name in (decode_shard_file(noted)[0].object, object_keys.shard_index_key(key)):
                catalog.store.get_ranges(name, [(0, 1)])
        except (ObjectNotFoundError, CheckpointDamagedError):
            log.warning("%s is not in %s any more, and uploaded again", key, catalog.store.url)
            self._store.remove_blob(job, DRAINED_BLOB_PREFIX + _shard_stem(key))
            return False
        return True

    def _gather(self, step: _DrainingStep) -> None:
        """All parts of the step that are here, also those that did not ask for it.

        The parts of a preempted rank's last step do not all know that it is the last one; of a step of files only the
        last one knows whether it is to be durable.
        """
        copies = {fact.key for fact in self._store.list_shards(step.job) if fact.holders}
        for record in self._store.reader.records(step.job, step.version_id):
            if record.key in copies:  # the node that wrote it makes it durable, or who took it over
                continue
            with self._changed:
                if record.key not in step.shards:
                    self._hold(record.key)
                    step.held, step.shards[record.key] = True, record.size_bytes

    def _all_files(self, step: _DrainingStep, catalog: DurableCatalog) -> dict[int, tuple[ShardIndex, bytes, bytes]]:
        """Every part's index, or too few: of many nodes one looks for those of all, the others for what it commits."""
        own = {}
        for key in step.done:
            note = self._note(step.job, DRAINED_BLOB_PREFIX + _shard_stem(key))
            if note is not None:
                own[key.part] = decode_shard_file(note)
        first_look = not step.error
        if has_all_parts(own, step.parts) or (first_look and 0 not in own):
            return own
        waited_s = self._clock() - step.uploaded_at
        if waited_s < _TAKE_OVER_S and not self._places.is_committer(step.job, step.version_id):
            return own
        return {**catalog.shard_files(step.version_id, at_least=step.parts), **own}

    def _drain_shard(self, step: _DrainingStep, catalog: DurableCatalog, key: ShardKey) -> None:
        if self._is_there(step.job, key, catalog):  # an agent before this one has uploaded it
            step.bytes_done += step.shards[key]
            return
        try:
            record = self._store.reader.hold(key, "drain")
            bad = self._store.verify(key)
        except ShardNotFoundError as error:
            raise CheckpointDamagedError(f"{key} left this node's memory before it was durable") from error
        if bad:
            raise CheckpointDamagedError(f"{key} changed in memory after it was sealed, so it is not uploaded")
        settings = self._places.durable_settings(step.job)
        index, layout, table = self._places.describe_shard(record)
        journal = _Journal(self._store, step.job)
        failpoint("drain.began")
        index = self._upload(step, catalog, settings, index, journal)
        failpoint("drain.uploaded")
        file = encode_shard_file(index, layout, table)
        catalog.store.put(object_keys.shard_index_key(key), file)
        failpoint("drain.indexed")
        self._store.put_blob(step.job, DRAINED_BLOB_PREFIX + _shard_stem(key), file)
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
        self._store.mark_committed(step.job, step.version_id)
        self._settle(step, "done")
        log.info("%s step %d is durable in %s", step.job, step.version_id.version, catalog.store.url)
        self._leave_torn(step)
        try:
            self._say_quarantined(step.job, catalog)
            self._say_kept(step.job, catalog)
            if committed:  # one node deletes for all
                self._retain(step.job, catalog)
        except (TieredCheckpointError, OSError) as error:
            log.warning("old steps of %s were not deleted: %s", step.job, error)

    def _leave_torn(self, newer: _DrainingStep) -> None:
        """An older step whose part here is uploaded has waited long enough for parts that other nodes left out."""
        with self._changed:
            if self._places.durable_settings(newer.job).on_busy == "wait":
                return
            for step in list(self._steps.values()):
                older = step.job == newer.job and step.version_id < newer.version_id and step.state == "waiting"
                if older and step.done.issuperset(step.shards) and not step.required:
                    self._skip(step, "other nodes left it out, and a newer one is durable")
            self._changed.notify_all()

    def _say_quarantined(self, job: str, catalog: DurableCatalog) -> None:
        listing = catalog.cached_listing()
        for group, reason in self._places.quarantine_reasons(job).items():
            if group in listing.manifests and group not in listing.quarantined:
                catalog.quarantine(group, reason)

    def _say_kept(self, job: str, catalog: DurableCatalog) -> None:
        """What was said last counts, in memory or in the durable tier: who has not heard of it says nothing older."""
        listing = catalog.cached_listing()
        for said in self._store.jobs.versions(job).retention.values():
            if said.version_id not in listing.manifests or said.retained == (said.version_id in listing.kept):
                continue
            at_ns = catalog.keep_changed_at(said.version_id, kept=not said.retained)
            if at_ns > said.at_ns:
                self._store.replicas.apply_retention(job, (RetentionMark(said.version_id, not said.retained, at_ns),))
            elif at_ns or said.retained:
                catalog.keep(said.version_id, kept=said.retained, at_ns=said.at_ns)

    def on_version_decided(self, job: str, group: VersionId, *, torn: bool) -> None:
        with self._changed:
            step = self._steps.get((job, group))
            if torn and step is not None:
                self._end(step, "a rank left its part out")

    def on_not_durable(self, job: str, group: VersionId, why: str) -> None:
        """A part on another node: nobody here waits for it, nor uploads what can never be whole there."""
        with self._changed:
            step = self._steps.setdefault((job, group), _DrainingStep(job, group, 0, None, "failed", error=why))
            step.required = True
            if step.open:
                self._end(step, why)
            elif not step.shards:  # its parts here are sealed later
                step.over = why
                self._forget_closed(job)
            self._changed.notify_all()

    def _say(self, step: _DrainingStep) -> None:
        """What was asked for and has failed here has failed for good, and on all nodes. Lock held."""
        if step.required and step.state == "failed":
            step.over = step.over or step.error
            self._places.announce_not_durable(step.job, step.version_id, step.error)

    def on_versions_deleted(self, job: str, groups: Collection[VersionId]) -> None:
        with self._changed:
            for step in self._these(job, groups):
                step.dropped = True
                self._end(step, "it was dropped")

    def cancel_steps(self, job: str, groups: Collection[VersionId]) -> None:
        """Their owner gives these steps up: nothing more of them is uploaded, and what was goes again."""
        self.on_versions_deleted(job, groups)
        with self._changed:
            steps = self._these(job, groups)
            left_s = deadlines.remaining_s(_DROP_S)
            self._changed.wait_for(lambda: not any(step.open for step in steps) or self._stop.is_set(), left_s)

    def _these(self, job: str, groups: Collection[VersionId]) -> list[_DrainingStep]:
        return [self._steps[job, group] for group in groups if (job, group) in self._steps]

    def _retain(self, job: str, catalog: DurableCatalog) -> None:
        known = catalog.cached_listing()
        # Others delete, mark and keep steps, too: all of it is looked at before anything goes. A listing of many pages
        # is not for one step.
        if len(self._victims(job, known)) > len(known.manifests) // _PAGE:
            for group in self._victims(job, catalog.listing(fresh=True)):
                delete_step(catalog, job, group)
                self.totals.deleted += 1
                log.info("%s step %d was deleted from %s", job, group.version, catalog.store.url)
        if job not in self._cleaned:
            self._cleaned.add(job)
            journals = [name for name in self._store.list_blobs(job) if name.startswith(JOURNAL_BLOB_PREFIX)]
            keep = [name.removeprefix(JOURNAL_BLOB_PREFIX).replace("@", "/") for name in journals]
            catalog.store.abort_stale_uploads(f"{job}/", older_than_s=_ABANDONED_S, keep=keep)

    def _victims(self, job: str, listing: CatalogListing) -> list[VersionId]:
        settings = self._places.durable_settings(job)
        return expired_steps(
            {group: entry.base for group, entry in listing.manifests.items()},
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            quarantined=listing.quarantined,
            kept=listing.kept,
        )

    # -- bookkeeping ------------------------------------------------------------------------------------------

    def _settle(self, step: _DrainingStep, state: DrainState, error: str = "") -> None:
        with self._changed:
            step.state, step.error = state, error
            self._release(step)
            self._say(step)
            self._changed.notify_all()

    def _unhold(self, step: _DrainingStep) -> None:
        step.held = False
        for key in step.shards:
            self._store.reader.release_hold(key, "drain")

    def _release(self, step: _DrainingStep) -> None:
        self._unhold(step)
        for key in step.shards:
            self._store.remove_blob(step.job, DRAINED_BLOB_PREFIX + _shard_stem(key))
        self._forget_closed(step.job)

    def _forget_closed(self, job: str) -> None:
        closed = sorted((k for k, s in self._steps.items() if k[0] == job and not s.open), key=lambda k: k[1])
        for old in closed[:-_REMEMBERED]:
            del self._steps[old]

    def _hold(self, key: ShardKey) -> None:
        try:
            self._store.reader.hold(key, "drain")
        except (ShardNotFoundError, ShardDamagedError):
            log.warning("%s was given up before it could be drained", key)

    def _note(self, job: str, name: str) -> bytes | None:
        try:
            return self._store.get_blob(job, name)
        except (ShardNotFoundError, ShardDamagedError):
            return None


class _Journal:
    """Where uploads note what they began: beside the job's shards, so that the next agent finds it.

    An upload that is complete stays noted until :meth:`flush`, when the drain has noted the shard itself: an agent
    that is killed in between leaves enough to recognise the finished object.
    """

    def __init__(self, store: NodeStore, job: str) -> None:
        self._store = store
        self._job = job
        self._removed: set[str] = set()

    def get(self, name: str) -> bytes | None:
        if name in self._removed:
            return None
        try:
            return self._store.get_blob(self._job, JOURNAL_BLOB_PREFIX + _flat(name))
        except (ShardNotFoundError, ShardDamagedError):
            return None

    def put(self, name: str, data: bytes) -> None:
        self._store.put_blob(self._job, JOURNAL_BLOB_PREFIX + _flat(name), data)
        self._removed.discard(name)

    def remove(self, name: str) -> None:
        self._removed.add(name)

    def flush(self) -> None:
        for name in self._removed:
            self._store.remove_blob(self._job, JOURNAL_BLOB_PREFIX + _flat(name))
        self._removed.clear()


def _shard_stem(key: ShardKey) -> str:
    return f"{object_keys.group_stem(key.version_id)}.{key.part}"


def _flat(name: str) -> str:
    return name.replace("/", "@")
