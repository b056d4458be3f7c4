"""An ObjectStore over a backend: retries, coalesced ranges, idle timeouts, and ``open_store(url)``."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from bisect import bisect_right
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from typing_extensions import Buffer

from peerstore.rate_limiter import RateLimiter
from peerstore.sizes_and_durations import parse_size
from tieredckpt.durable.object_backend import ObjectBackend, RetryPolicy, UploadJob
from tieredckpt.durable.object_store import (
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    ProgressCallback,
    StopSignal,
    StoreCapabilities,
    UploadJournal,
    UploadSource,
    check_object_name,
    check_object_prefix,
    is_valid_object_name,
    part_size_for,
)
from tieredckpt.errors import (
    CheckpointDamagedError,
    DurableRefusedError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tieredckpt.settings import DurableSettings

T = TypeVar("T")
_log = logging.getLogger(__name__)
_PROBE_PREFIX = ".probe-"


class RetryingStore:
    """An :class:`~tieredckpt.durable.object_store.ObjectStore` over any backend."""

    def __init__(
        self,
        backend: ObjectBackend,
        *,
        retry: RetryPolicy,
        bandwidth: RateLimiter,
        fetch_bytes: int,
        fetch_threads: int,
    ) -> None:
        self._backend = backend
        self._stop = StopSignal()
        self._retry = replace(retry, refresh_credentials=backend.refresh_credentials, sleep=self._stop.wait)
        self._bandwidth = bandwidth
        self._fetch_bytes = fetch_bytes
        self._lock = threading.Lock()
        self._capabilities: StoreCapabilities | None = None
        self._readers = ThreadPoolExecutor(fetch_threads, thread_name_prefix="tieredckpt-read")

    @property
    def url(self) -> str:
        return self._backend.url

    def put(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        check_object_name(name)
        if create_only:
            self._create(name, data)
        else:
            self._run("writing", name, partial(self._backend.put, name, data, create_only=False))

    def get(self, name: str) -> bytes:
        check_object_name(name)
        return self._run("reading", name, partial(self._backend.get, name), absent=ObjectNotFoundError)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        check_object_name(name)
        fetches = plan_range_requests(ranges, gap_bytes=MAX_GAP_BYTES, most_bytes=self._fetch_bytes)

        if len(fetches) == 1:
            return assemble_ranges(ranges, fetches, [self._fetch(name, fetches[0], self._retry)])
        stop = self._stop.child()
        retry = replace(self._retry, sleep=stop.wait)
        pending: list[Future[Buffer]] = []
        try:
            pending += (self._readers.submit(self._fetch, name, each, retry) for each in fetches)
            return assemble_ranges(ranges, fetches, [future.result() for future in pending])
        except (RuntimeError, CancelledError):
            self._stop.raise_if_set()  # the store was closed between two requests
            raise
        finally:
            stop.set()
            for future in pending:
                future.cancel()

    def list(self, prefix: str, *, patience_s: float = math.inf) -> Iterable[ObjectInfo]:
        check_object_prefix(prefix)
        what = self._what("listing", prefix)
        retry = replace(self._retry, retry_s=min(self._retry.retry_s, patience_s))

        def fetch(on_progress: Callable[[], None]) -> Sequence[ObjectInfo]:
            return retry.run(what, partial(self._listed, prefix, on_progress))

        if self._backend.lists_in_pages and patience_s < math.inf:
            found = call_with_idle_timeout(what, fetch, patience_s=patience_s, stop=self._stop)
        else:
            found = fetch(lambda: None)
        matching = (info for info in found if info.name.startswith(prefix) and is_valid_object_name(info.name))
        return sorted(matching, key=lambda info: info.name)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            check_object_name(name)
        if names:
            what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            self._run("deleting", what, partial(self._backend.delete, names))

    def upload(
        self,
        name: str,
        source: Path,
        size_bytes: int,
        *,
        journal: UploadJournal,
        identity: str = "",
        progress: ProgressCallback = lambda _: None,
        cancel: threading.Event | None = None,
    ) -> None:
        check_object_name(name)
        stop = StopSignal()
        with UploadSource(source, size_bytes) as opened, stop.linked_to(cancel):
            upload = UploadJob(
                name=name,
                what=self._what("uploading", name),
                source=opened,
                identity=identity,
                journal=journal,
                progress=progress,
                stop=stop,
                retry=replace(self._retry, sleep=stop.wait),
                bandwidth=self._bandwidth,
            )
            self._backend.upload(upload)

    def abort_stale_uploads(self, prefix: str, *, older_than_s: float, keep: Iterable[str] = ()) -> int:
        check_object_prefix(prefix)
        kept = frozenset(keep)
        return self._run(
            "discarding uploads below", prefix, lambda: self._backend.abort_stale_uploads(prefix, older_than_s, kept)
        )

    def capabilities(self) -> StoreCapabilities:
        with self._lock:
            if self._capabilities is None:
                self._capabilities = StoreCapabilities(self._probe_conditional_put(), self._backend.resumes_uploads)
            return self._capabilities

    def check_root(self) -> None:
        replace(self._retry, retry_s=0.0).run(f"creating {self.url}", self._backend.check_root)

    def check_writes(self) -> None:
        self.check_root()
        name = f"{_PROBE_PREFIX}{secrets.token_hex(8)}"
        data = name.encode()
        self.put(name, data)
        try:
            if self._run("reading", name, partial(self._backend.get, name)) != data:
                raise DurableRefusedError(f"{self._what('reading', name)}: the store returned other bytes than it took")
        finally:
            self._delete_probe(name)

    def interrupt(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self.interrupt()
        self._readers.shutdown(cancel_futures=True)
        self._backend.close()

    def _listed(self, prefix: str, on_progress: Callable[[], None]) -> Sequence[ObjectInfo]:
        found = []
        on_progress()
        try:
            for info in self._backend.list(prefix):
                found.append(info)
                on_progress()
        finally:
            on_progress()
        return found

    def _create(self, name: str, data: bytes) -> None:
        """Create an object, or raise :class:`ObjectExistsError`.

        An attempt without a response may have written the object that the next attempt finds. Its bytes identify it,
        so racing callers must write different bytes.
        """
        if not self.capabilities().conditional_put and self._run(
            "looking for", name, partial(self._backend.exists, name)
        ):
            raise ObjectExistsError(f"{self._what('creating', name)}: there is an object of that name")
        tries = 0

        def put() -> None:
            nonlocal tries
            tries += 1
            self._backend.put(name, data, create_only=True)

        try:
            self._run("creating", name, put)
        except ObjectExistsError:
            if tries == 1 or self.get(name) != data:
                raise

    def _probe_conditional_put(self) -> bool:
        name = f"{_PROBE_PREFIX}{secrets.token_hex(8)}"
        put = partial(self._backend.put, name, b"probe", create_only=True)
        self._run("probing", name, partial(self._backend.put, name, b"probe", create_only=False))
        try:
            self._run("probing", name, put)
        except ObjectExistsError:
            return True
        finally:
            self._delete_probe(name)
        return False

    def _delete_probe(self, name: str) -> None:
        try:
            self.delete([name])
        except DurableRefusedError as error:  # saving needs no permission to delete
            _log.info("%s stays: %s", name, error)

    def _fetch(self, name: str, fetch: RangeRequest, retry: RetryPolicy) -> Buffer:
        what = self._what(f"reading [{fetch.start}, {fetch.stop}) of", name)
        read = partial(self._backend.get_range, name, fetch.start, fetch.stop)
        data = retry.run(what, read, absent=ObjectNotFoundError)
        size = memoryview(data).nbytes
        if size != fetch.stop - fetch.start:
            raise CheckpointDamagedError(f"{what}: got {size} bytes; the object is shorter than the saved one")
        return data

    def _run(
        self,
        doing: str,
        name: str,
        operation: Callable[[], T],
        *,
        absent: type[TieredCheckpointError] = DurableRefusedError,
    ) -> T:
        return self._retry.run(self._what(doing, name), operation, absent=absent)

    def _what(self, doing: str, name: str) -> str:
        return f"{doing} {self.url.rstrip('/')}/{name}"


MAX_GAP_BYTES = 1 << 20
"""Largest gap between two ranges of one request. Reading such a gap costs less than another request."""


@dataclass(frozen=True)
class RangeRequest:
    start: int
    stop: int


def plan_range_requests(ranges: Iterable[tuple[int, int]], *, gap_bytes: int, most_bytes: int) -> list[RangeRequest]:
    """Return disjoint requests, in order, that cover every range and have at most ``most_bytes`` each."""
    runs: list[list[int]] = []
    for start, stop in sorted(ranges):
        if not 0 <= start <= stop:
            raise UsageError(f"[{start}, {stop}) is not a range of bytes")
        if start == stop:
            continue
        if runs and start - runs[-1][1] <= gap_bytes:
            runs[-1][1] = max(runs[-1][1], stop)
        else:
            runs.append([start, stop])
    return [
        RangeRequest(at, min(at + most_bytes, run_stop))
        for run_start, run_stop in runs
        for at in range(run_start, run_stop, most_bytes)
    ]


def assemble_ranges(
    ranges: Sequence[tuple[int, int]], fetches: Sequence[RangeRequest], results: Sequence[Buffer]
) -> list[Buffer]:
    """Return the ranges from the results of ``fetches``.

    A range is a view if one result has all of it, otherwise a copy.
    """
    starts = [fetch.start for fetch in fetches]
    views = [memoryview(result) for result in results]

    def assemble(start: int, stop: int) -> Buffer:
        if start == stop:
            return b""
        at = bisect_right(starts, start) - 1
        if stop <= fetches[at].stop:
            return views[at][start - starts[at] : stop - starts[at]]
        whole = bytearray(stop - start)
        done = start
        while done < stop:
            end = min(stop, fetches[at].stop)
            whole[done - start : end - start] = views[at][done - starts[at] : end - starts[at]]
            done, at = end, at + 1
        return whole

    return [assemble(start, stop) for start, stop in ranges]


_POLL_S = 0.05


def call_with_idle_timeout(
    what: str, ask: Callable[[Callable[[], None]], T], *, patience_s: float, stop: StopSignal
) -> T:
    """Return the result of ``ask``, which must call its argument at least every ``patience_s`` seconds.

    If it does not, raise :class:`TierUnavailableError`; ``ask`` then continues in a daemon thread.
    """
    answer = Future[T]()
    progress_at = time.monotonic()

    def on_progress() -> None:
        nonlocal progress_at
        progress_at = time.monotonic()

    def run() -> None:
        try:
            answer.set_result(ask(on_progress))
        except BaseException as error:  # noqa: BLE001 - the waiting caller raises it
            answer.set_exception(error)

    threading.Thread(target=run, name="tieredckpt-ask", daemon=True).start()
    while True:
        try:
            return answer.result(_POLL_S)
        except FutureTimeoutError:
            if answer.done():
                return answer.result()
        stop.raise_if_set()
        if time.monotonic() - progress_at > patience_s:
            raise TierUnavailableError(f"{what}: timed out after {patience_s:g} s without progress")


_READ_THREADS = 8


def open_store(url: str, settings: DurableSettings, *, bandwidth: RateLimiter | None = None) -> RetryingStore:
    """Return the store at ``url``.

    Before the first call, S3 and directories are not accessed, and no SDK is imported for them.

    ``bandwidth`` is a limit that several stores share. By default this store has its own, ``settings.bandwidth``.
    """
    limit = bandwidth or RateLimiter(parse_size(settings.bandwidth) if settings.bandwidth else 0)
    return RetryingStore(
        _backend(url, settings),
        retry=RetryPolicy(settings.retry_s),
        bandwidth=limit,
        fetch_bytes=part_size_for(0, parse_size(settings.part_size)),
        fetch_threads=max(_READ_THREADS, settings.concurrency),
    )


def _backend(url: str, settings: DurableSettings) -> ObjectBackend:
    # Import each library only for its scheme: the node agent starts without any of them.
    parts = urlsplit(url)
    if url.startswith("/") or parts.scheme == "file":
        from tieredckpt.durable.filesystem_backends import DirectoryBackend

        if parts.netloc not in ("", "localhost"):
            raise UsageError(f"durable.url {url}: a file URL names this machine, write file:///path")
        _reject_options(url, settings)
        return DirectoryBackend(Path(url if url.startswith("/") else unquote(parts.path)))
    if not parts.scheme:
        raise UsageError(f"durable.url {url!r} is neither a URL (s3://bucket/prefix) nor an absolute path")
    if parts.scheme == "s3":
        from tieredckpt.durable.s3 import S3Backend

        if not parts.netloc:
            raise UsageError(f"durable.url {url}: names no bucket, write s3://bucket/prefix")
        return S3Backend(url, parts.netloc, parts.path.strip("/"), settings)
    if parts.scheme in ("gs", "az", "abfs", "abfss", "memory"):
        from tieredckpt.durable.obstore_backend import open_obstore_backend

        return open_obstore_backend(url, settings)
    from tieredckpt.durable.filesystem_backends import FsspecBackend

    return FsspecBackend(url, settings.options)


def _reject_options(url: str, settings: DurableSettings) -> None:
    if settings.options:
        raise UsageError(f"durable.options: {url} takes none, found {', '.join(sorted(settings.options))}")
