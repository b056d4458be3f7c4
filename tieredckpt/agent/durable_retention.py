"""Marks and deletions in the durable tier after a step became durable."""

from __future__ import annotations

from peerstore.shard_records import RetentionMark, VersionId
from peerstore.store.node_store import NodeStore
from tieredckpt.agent.durable_catalog import CatalogListing, DurableCatalog
from tieredckpt.agent.durable_tiers import DurableTiers
from tieredckpt.agent.retention import expired_steps
from tieredckpt.agent.shard_uploads import journaled_uploads
from tieredckpt.agent.step_marks import StepMarks

_ABANDONED_S = 24 * 3600.0
_PAGE = 1000
"""Names in one page of an S3 listing."""


class DurableRetention:
    """Exchange of quarantine and retention marks with the durable tier, and the choice of steps to delete."""

    def __init__(self, store: NodeStore, durable: DurableTiers, marks: StepMarks) -> None:
        self._store, self._durable, self._marks = store, durable, marks
        self._cleaned: set[str] = set()

    def exchange_marks(self, job: str, catalog: DurableCatalog) -> None:
        """Write this node's quarantine marks, and exchange retention marks; the newer mark of a step wins."""
        listing = catalog.cached_listing()
        for group, reason in self._marks.quarantine_reasons(job).items():
            if group in listing.manifests and group not in listing.quarantined:
                catalog.quarantine(group, reason)
        listing = catalog.cached_listing()
        for mark in self._store.jobs.versions(job).retention.values():
            if mark.version_id not in listing.manifests or mark.retained == (mark.version_id in listing.kept):
                continue
            at_ns = catalog.keep_changed_at(mark.version_id, kept=not mark.retained)
            if at_ns > mark.at_ns:
                self._store.replicas.apply_retention(job, (RetentionMark(mark.version_id, not mark.retained, at_ns),))
            elif at_ns or mark.retained:
                catalog.keep(mark.version_id, kept=mark.retained, at_ns=mark.at_ns)

    def steps_to_delete(self, job: str, catalog: DurableCatalog) -> list[VersionId]:
        """Return the steps that the job's settings do not retain, oldest first."""
        known = catalog.cached_listing()
        # Other nodes and users also delete, quarantine and retain steps, so list again before deleting. If a listing
        # has many pages, wait until it is worth deleting several steps.
        if len(self._expired(job, known)) <= len(known.manifests) // _PAGE:
            return []
        return self._expired(job, catalog.listing(fresh=True))

    def abort_stale_uploads(self, job: str, catalog: DurableCatalog) -> None:
        """Abort old uploads of the job that no agent resumes; once per job."""
        if job not in self._cleaned:
            self._cleaned.add(job)
            keep = journaled_uploads(self._store.blobs.list_names(job))
            catalog.store.abort_stale_uploads(f"{job}/", older_than_s=_ABANDONED_S, keep=keep)

    def _expired(self, job: str, listing: CatalogListing) -> list[VersionId]:
        settings = self._durable.settings(job)
        return expired_steps(
            {group: entry.base for group, entry in listing.manifests.items()},
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            quarantined=listing.quarantined,
            kept=listing.kept,
        )
