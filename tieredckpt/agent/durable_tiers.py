"""The jobs' durable settings, and their durable tiers, which stay open while they are in use."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator

import msgspec

from peerstore import deadlines
from peerstore.daemon_process import ProcessIdentity
from peerstore.message_codec import from_msgpack
from peerstore.shard_records import VersionId
from peerstore.store.slot_metadata import BlobStore
from tieredckpt.agent.agent_api import CHECKED_SETTINGS_BLOB, DURABLE_SETTINGS_BLOB
from tieredckpt.agent.durable_catalog import CatalogListing, DurableCatalog
from tieredckpt.agent.durable_check import StoreOpener, check_durable
from tieredckpt.durable.object_store import ObjectNotFoundError
from tieredckpt.errors import DurableRefusedError, TierUnavailableError
from tieredckpt.format.manifest import Manifest
from tieredckpt.settings import DurableSettings


class _CheckedSettings(msgspec.Struct, frozen=True):
    """Durable settings that a process has checked and no save has used yet."""

    durable: DurableSettings
    owner: ProcessIdentity


@dataclasses.dataclass(eq=False)
class _OpenCatalog:
    """An open durable tier and the number of its current users."""

    settings: DurableSettings
    catalog: DurableCatalog | None
    users: int = 0

    def close(self) -> None:
        if self.catalog is not None:
            self.catalog.store.close()


class DurableTiers:
    """Durable tiers of all jobs: one for saves, and one for loads until a save uses the same.

    A process that restores checks its settings first (:meth:`set_checked`). Loads use them from then on. Saves use the
    stored settings (:meth:`store_settings`).
    """

    def __init__(self, blobs: BlobStore, open_store: StoreOpener) -> None:
        self._blobs = blobs
        self._open = open_store
        self._lock = threading.Lock()
        self._catalogs_lock = threading.Lock()
        """Guards the open catalogs and their settings. Taken before ``_lock``."""
        self._catalogs: dict[str, _OpenCatalog] = {}
        self._checked_catalogs: dict[str, _OpenCatalog] = {}
        """Durable tiers by job that a process has checked and no save has used yet."""
        self._checked_lock = threading.Lock()
        """Held while a job's checked settings are replaced."""
        self._opened: list[_OpenCatalog] = []
        """All open catalogs, including replaced ones that are still in use."""
        self._settings: dict[str, DurableSettings] = {}

    # -- settings -----------------------------------------------------------------------------------------------------

    def settings(self, job: str) -> DurableSettings:
        """Return the settings of the job's saves."""
        with self._lock:
            settings = self._settings.get(job)
            if settings is None:
                blob = self._blobs.find(job, DURABLE_SETTINGS_BLOB)
                settings = from_msgpack(blob, DurableSettings) if blob else DurableSettings()
                self._settings[job] = settings
            return settings

    def store_settings(self, job: str, durable: DurableSettings) -> bool:
        """Store the settings of the job's saves, and return whether the destination changed."""
        data = msgspec.msgpack.encode(durable)
        # Compare the stored blob: the cached settings may be those of an expired job.
        if self._blobs.find(job, DURABLE_SETTINGS_BLOB) != data:
            self._blobs.put(job, DURABLE_SETTINGS_BLOB, data)
        previous = self.settings(job)
        with self._checked_lock:
            if self._blobs.find(job, CHECKED_SETTINGS_BLOB) is not None:
                self._blobs.remove(job, CHECKED_SETTINGS_BLOB)
        if previous != durable:
            self._forget(job)
        return (previous.url, previous.options) != (durable.url, durable.options)

    def settings_for_reading(self, job: str) -> DurableSettings:
        """Return the settings that a running process checked last, or those of the job's saves."""
        checked = self._checked(job)
        return checked[-1].durable if checked else self.settings(job)

    def set_checked(self, job: str, durable: DurableSettings, owner: ProcessIdentity) -> None:
        """Read ``job`` from the tier ``durable`` while ``owner`` runs. Settings without a URL end this."""
        with self._checked_lock:
            settings = [one for one in self._checked(job) if one.owner != owner]
            if durable.url:
                settings.append(_CheckedSettings(durable, owner))
            if settings:
                self._blobs.put(job, CHECKED_SETTINGS_BLOB, msgspec.msgpack.encode(settings))
            elif self._blobs.find(job, CHECKED_SETTINGS_BLOB) is not None:
                self._blobs.remove(job, CHECKED_SETTINGS_BLOB)

    def check(self, job: str, durable: DurableSettings, *, writes: bool) -> None:
        """Try the tier ``durable``, with a small object if ``writes``; raise an error that says what is wrong."""
        check_durable(self._open, job, durable, writes=writes)

    def _checked(self, job: str) -> list[_CheckedSettings]:
        blob = self._blobs.find(job, CHECKED_SETTINGS_BLOB)
        if blob is None:
            return []
        return [one for one in from_msgpack(blob, list[_CheckedSettings]) if one.owner.is_alive]

    # -- catalogs -----------------------------------------------------------------------------------------------------

    def catalog(self, job: str) -> contextlib.AbstractContextManager[DurableCatalog | None]:
        """Return a context with the durable tier of the job's saves, or ``None`` if it has none.

        The tier is opened once and stays open while in use, even if the settings change.
        """
        return self._catalog(job, self._catalogs, self.settings)

    def catalog_for_reading(self, job: str) -> contextlib.AbstractContextManager[DurableCatalog | None]:
        """Return a context as :meth:`catalog` does, with the tier that :meth:`settings_for_reading` names."""
        checked = self._checked(job)
        if not checked:
            return self.catalog(job)
        return self._catalog(job, self._checked_catalogs, lambda _: checked[-1].durable)

    def listing(self, job: str, *, fresh: bool) -> CatalogListing | None:
        """Return what is in the job's tier within the caller's time, or ``None`` if it has no tier."""

        def listed() -> CatalogListing | None:
            with self.catalog_for_reading(job) as catalog:
                return None if catalog is None else catalog.listing(fresh=fresh)

        return deadlines.run_within_deadline(listed, functools.partial(self._timeout_error, job))

    def manifest(self, job: str, group: VersionId, *, needed: bool) -> Manifest | None:
        """Return the manifest of a version, or ``None`` if the tier does not have it.

        Without ``needed``, return ``None`` for an unavailable tier too.
        """

        def read() -> Manifest | None:
            with self.catalog_for_reading(job) as catalog:
                if catalog is None or not (needed or group in catalog.listing().manifests):
                    return None
                return catalog.manifest(group)

        try:
            return deadlines.run_within_deadline(read, functools.partial(self._timeout_error, job))
        except ObjectNotFoundError:
            return None
        except (TierUnavailableError, DurableRefusedError):
            if needed:
                raise
            return None

    def interrupt(self) -> None:
        """Make the requests that are in progress fail soon."""
        with self._catalogs_lock:
            for one in self._opened:
                if one.catalog is not None:
                    one.catalog.store.interrupt()

    def close(self) -> None:
        with self._catalogs_lock:
            opened, self._opened, self._catalogs, self._checked_catalogs = self._opened, [], {}, {}
        for one in opened:
            one.close()

    @contextlib.contextmanager
    def _catalog(
        self, job: str, catalogs: dict[str, _OpenCatalog], settings_of: Callable[[str], DurableSettings]
    ) -> Iterator[DurableCatalog | None]:
        with self._catalogs_lock:
            settings = settings_of(job)
            opened = catalogs.get(job)
            if opened is None or opened.settings != settings:
                catalog = DurableCatalog(self._open(settings.url, settings), job) if settings.url else None
                opened = catalogs[job] = _OpenCatalog(settings, catalog)
                self._opened.append(opened)
            opened.users += 1
        try:
            yield opened.catalog
        finally:
            with self._catalogs_lock:
                opened.users -= 1
            self._close_unused()

    def _timeout_error(self, job: str) -> TierUnavailableError:
        return TierUnavailableError(f"{self.settings_for_reading(job).url} has not answered in the time that was given")

    def _forget(self, job: str) -> None:
        with self._catalogs_lock:
            with self._lock:
                self._settings.pop(job, None)
            self._catalogs.pop(job, None)
            checked = self._checked_catalogs.pop(job, None)
            if checked is not None and checked.settings == self.settings(job):
                self._catalogs[job] = checked
        self._close_unused()

    def _close_unused(self) -> None:
        """Close replaced catalogs that have no users."""
        with self._catalogs_lock:
            current = [*self._catalogs.values(), *self._checked_catalogs.values()]
            unused = [one for one in self._opened if not one.users and one not in current]
            self._opened = [one for one in self._opened if one not in unused]
        for one in unused:
            one.close()
