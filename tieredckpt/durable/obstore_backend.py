"""Google Cloud Storage, Azure and ``memory://`` through obstore."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from typing_extensions import Buffer

from peerstore.sizes_and_durations import parse_size
from tieredckpt.durable.object_backend import FailureKind, classify_error
from tieredckpt.durable.object_store import ObjectInfo, listable_folder, part_size_for
from tieredckpt.durable.s3_upload import CONNECT_TIMEOUT_S
from tieredckpt.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from obstore import ObjectMeta
    from obstore.store import ObjectStore as ObstoreStore

    from tieredckpt.durable.object_backend import UploadJob
    from tieredckpt.settings import DurableSettings


def obstore_client_options(timeout_s: float) -> dict[str, Any]:
    """Return obstore's client options. ``timeout_s`` limits silence, not the length of a transfer."""
    return {
        "connect_timeout": timedelta(seconds=min(CONNECT_TIMEOUT_S, timeout_s)),
        "read_timeout": timedelta(seconds=timeout_s),
        "timeout": timedelta(days=1),
    }


def open_obstore_backend(url: str, settings: DurableSettings) -> ObstoreBackend:
    """Open ``gs://``, ``az://``, ``abfs://`` or ``memory://``.

    ``durable.options`` are obstore's options; its environment variables also apply.
    """
    import obstore.store
    from obstore.exceptions import BaseError

    part_bytes = part_size_for(0, parse_size(settings.part_size))
    patience = {"max_retries": 1_000_000, "retry_timeout": timedelta(seconds=settings.retry_s)}

    def open_with(retry_config: Mapping[str, Any]) -> Any:
        if url.startswith("memory://"):
            return obstore.store.MemoryStore()
        arguments: dict[str, Any] = {
            "config": dict(settings.options),
            "client_options": obstore_client_options(settings.timeout_s),
            "retry_config": retry_config,
        }
        return obstore.store.from_url(url, **arguments)

    try:
        objects = open_with({"max_retries": 0})
        patient = objects if url.startswith("memory://") else open_with(patience)
    except BaseError as error:
        reason = str(error).partition("\n\nDebug source")[0]
        raise UsageError(f"durable.url {url} with durable.options {sorted(settings.options)}: {reason}") from error
    return ObstoreBackend(url, objects, patient, part_bytes=part_bytes, concurrency=settings.concurrency)


class ObstoreClient:
    """Small requests to one bucket, with one attempt each."""

    def __init__(self, store: ObstoreStore) -> None:
        self._store = store

    def check_root(self) -> None:
        pass

    def put(self, name: str, data: bytes, *, create_only: bool) -> None:
        self._store.put(name, data, mode="create" if create_only else "overwrite", use_multipart=False)

    def exists(self, name: str) -> bool:
        try:
            self._store.head(name)
        except FileNotFoundError as error:
            _raise_unless_absent(error)
            return False
        return True

    def get(self, name: str) -> bytes:
        return bytes(self._store.get(name).bytes())

    def get_range(self, name: str, start: int, stop: int) -> Buffer:
        return self._store.get_range(name, start=start, end=stop)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folders: list[str | None] = [listable_folder(prefix) or None]
        if prefix and not prefix.endswith("/"):  # obstore lists whole folders: list only those that match the prefix
            top = self._store.list_with_delimiter(folders[0])
            yield from (_info(each) for each in top["objects"] if each["path"].startswith(prefix))
            folders = [name for name in top["common_prefixes"] if name.startswith(prefix)]
        for folder in folders:
            for batch in self._store.list(folder):
                yield from map(_info, batch)

    def delete(self, names: Sequence[str]) -> None:
        try:
            self._store.delete(names)
        except FileNotFoundError as error:  # an absent name is an error in this store: others may not be deleted
            _raise_unless_absent(error)
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    self._store.delete(name)


class ObstoreBackend(ObstoreClient):
    """Backend with one attempt for each request except ``upload``.

    obstore cannot resume an upload after its finished parts, so obstore itself retries parts.
    """

    resumes_uploads = False
    lists_in_pages = True

    def __init__(
        self, url: str, store: ObstoreStore, patient: ObstoreStore, *, part_bytes: int, concurrency: int
    ) -> None:
        super().__init__(store)
        self.url = url
        self._patient = patient
        self._part_bytes = part_bytes
        self._concurrency = concurrency

    def refresh_credentials(self) -> bool:
        return False

    def upload(self, upload: UploadJob) -> None:
        def send() -> None:
            # obstore retains its input until it is sent, so the input must not be views into a window.
            with contextlib.closing(upload.pieces()) as pieces:
                copies = (bytes(piece) for piece in pieces)
                self._patient.put(upload.name, copies, chunk_size=self._part_bytes, max_concurrency=self._concurrency)

        replace(upload.retry, retry_s=0.0).run(upload.what, send)
        upload.progress(upload.source.size_bytes)

    def abort_stale_uploads(self, prefix: str, older_than_s: float, keep: frozenset[str]) -> int:
        return 0

    def close(self) -> None:
        pass


def _info(each: ObjectMeta) -> ObjectInfo:
    return ObjectInfo(each["path"], each["size"], each["last_modified"].timestamp())


def _raise_unless_absent(error: FileNotFoundError) -> None:
    """Raise ``error`` unless an object is absent. An absent bucket has the same exception class."""
    if classify_error(error).meaning is not FailureKind.NOT_FOUND:
        raise error
