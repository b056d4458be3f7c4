"""An object store that keeps its promises, over a backend that makes one try."""

from __future__ import annotations

import math
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import Buffer

from tieredckpt.durable.backend import Backend, Upload
from tieredckpt.durable.object_names import check_name, check_prefix, is_name
from tieredckpt.durable.ranges import GAP_BYTES, Fetch, assemble, plan_fetches
from tieredckpt.durable.silence import unless_silent
from tieredckpt.durable.source import Source
from tieredckpt.durable.stop import Stop
from tieredckpt.durable.store import (
    Capabilities,
    Journal,
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    Progress,
)
from tieredckpt.errors import CheckpointDamagedError, DurableRefusedError, TieredCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from peerstore.bandwidth import Bandwidth
    from tieredckpt.durable.retry import Retry

T = TypeVar("T")


class ReliableStore:
    """The :class:`~tieredckpt.durable.store.ObjectStore` that users of this package get."""

    def __init__(
        self, backend: Backend, *, retry: Retry, bandwidth: Bandwidth, fetch_bytes: int, fetch_threads: int
    ) -> None:
        self._backend = backend
        self._stop = Stop()
        self._retry = replace(retry, renew=backend.renew, sleep=self._stop.wait)
        self._bandwidth = bandwidth
        self._fetch_bytes = fetch_bytes
        self._lock = threading.Lock()
        self._capabilities: Capabilities | None = None
        self._readers = ThreadPoolExecutor(fetch_threads, thread_name_prefix="tieredckpt-read")

    @property
    def url(self) -> str:
        return self._backend.url

    def put(self, name: str, data: bytes, *, create_only: bool = False) -> None:
        check_name(name)
        if create_only:
            self._create(name, data)
        else:
            self._run("writing", name, partial(self._backend.put, name, data, create_only=False))

    def get(self, name: str) -> bytes:
        check_name(name)
        return self._run("reading", name, partial(self._backend.get, name), absent=ObjectNotFoundError)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        check_name(name)
        fetches = plan_fetches(ranges, gap_bytes=GAP_BYTES, most_bytes=self._fetch_bytes)

        if len(fetches) == 1:
            return assemble(ranges, fetches, [self._fetch(name, fetches[0], self._retry)])
        stop = Stop()
        retry = replace(self._retry, sleep=stop.wait)
        pending = [self._readers.submit(self._fetch, name, each, retry) for each in fetches]
        try:
            return assemble(ranges, fetches, [future.result() for future in pending])
        finally:
            stop.set()
            for future in pending:
                future.cancel()

    def list(self, prefix: str, *, patience_s: float = math.inf) -> Iterable[ObjectInfo]:
        check_prefix(prefix)
        what = self._what("listing", prefix)
        retry = replace(self._retry, retry_s=min(self._retry.retry_s, patience_s))

        def ask(heard: Callable[[], None]) -> Sequence[ObjectInfo]:
            return retry.run(what, partial(self._listed, prefix, heard))

        if self._backend.pages and patience_s < math.inf:
            found = unless_silent(what, ask, patience_s=patience_s, stop=self._stop)
        else:
            found = ask(lambda: None)
        mine = (info for info in found if info.name.startswith(prefix) and is_name(info.name))
        return sorted(mine, key=lambda info: info.name)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            check_name(name)
        if names:
            what = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            self._run("deleting", what, partial(self._backend.delete, names))

    def upload(
        self,
        name: str,
        source: Path,
        size_bytes: int,
        *,
        journal: Journal,
        identity: str = "",
        progress: Progress = lambda _: None,
        cancel: threading.Event | None = None,
    ) -> None:
        check_name(name)
        stop = Stop()
        with Source(source, size_bytes) as opened, stop.following(cancel):
            upload = Upload(
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

    def discard_uploads(self, prefix: str, *, older_than_s: float, keep: Iterable[str] = ()) -> int:
        check_prefix(prefix)
        kept = frozenset(keep)
        return self._run(
            "discarding uploads below", prefix, lambda: self._backend.discard_uploads(prefix, older_than_s, kept)
        )

    def capabilities(self) -> Capabilities:
        with self._lock:
            if self._capabilities is None:
                self._capabilities = Capabilities(self._probe_conditional_put(), self._backend.resumes)
            return self._capabilities

    def interrupt(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._backend.close()

    def _listed(self, prefix: str, heard: Callable[[], None]) -> Sequence[ObjectInfo]:
        found = []
        heard()
        try:
            for info in self._backend.list(prefix):
                found.append(info)
                heard()
        finally:
            heard()
        return found

    def _create(self, name: str, data: bytes) -> None:
        """A try without an answer may have written the object that the next one finds: then it is ours.

        That is told by its bytes, so callers who race put something of their own into them.
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
        name = f".probe-{secrets.token_hex(8)}"
        put = partial(self._backend.put, name, b"probe", create_only=True)
        self._run("probing", name, partial(self._backend.put, name, b"probe", create_only=False))
        try:
            self._run("probing", name, put)
        except ObjectExistsError:
            return True
        finally:
            self._run("deleting", name, partial(self._backend.delete, [name]))
        return False

    def _fetch(self, name: str, fetch: Fetch, retry: Retry) -> Buffer:
        what = self._what(f"reading [{fetch.start}, {fetch.stop}) of", name)
        ask = partial(self._backend.get_range, name, fetch.start, fetch.stop)
        got = retry.run(what, ask, absent=ObjectNotFoundError)
        size = memoryview(got).nbytes
        if size != fetch.stop - fetch.start:
            raise CheckpointDamagedError(f"{what}: got {size} bytes; the object is shorter than what was saved")
        return got

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
