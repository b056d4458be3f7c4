"""Locations of AWS's checkpoints: S3, the memory service, and the search for the newest complete one."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import xxhash
from typing_extensions import Buffer

from integration.sagemaker.aws_format import MAX_METADATA_BYTES, CheckpointContents, parse_metadata
from integration.sagemaker.checkpoint_config import METADATA_FILE, SHARD_FILE, DefaultS3PathStrategy, RayS3PathStrategy
from peerstore.shard_records import validate_job_name
from tieredckpt.durable.object_store import ObjectInfo, ObjectNotFoundError, ObjectStore
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError, TierUnavailableError, UsageError
from tieredckpt.settings import DurableSettings

log = logging.getLogger(__name__)


class RankBlob(Protocol):
    """Bytes that one rank wrote in one step."""

    @property
    def size_bytes(self) -> int: ...
    def read(self, extents: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Return exactly the bytes ``[start, stop)`` of each extent, in order, or raise an error."""

    def close(self) -> None: ...


class CheckpointStore(Protocol):
    """One namespace's checkpoints in one store.

    All stores guarantee (``tests/contract/test_aws_checkpoint_stores.py`` tests it):

    - ``CheckpointNotFoundError`` means absent, ``TierUnavailableError`` unknown, ``CheckpointDamagedError`` that the
      bytes were changed. An empty list means that the store has no steps.
    - ``steps`` returns every step with any data, complete or not.
    """

    @property
    def name(self) -> str: ...
    def steps(self) -> Sequence[int]:
        """Return the steps, newest first."""

    def contents(self, step: int) -> CheckpointContents: ...
    def blob_size(self, step: int, rank: int) -> int:
        """Return the bytes of the rank's blob."""

    def open_blob(self, step: int, rank: int) -> RankBlob: ...
    def close(self) -> None: ...


@dataclass
class StoredCheckpoint:
    """A complete step: all its blobs exist with their expected sizes."""

    store: CheckpointStore
    step: int
    contents: CheckpointContents
    skipped: tuple[str, ...] = ()
    """Newer incomplete steps, with the reason."""
    _blobs: dict[int, RankBlob] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.store.name} step {self.step}"

    @property
    def world_size(self) -> int:
        """Return the number of ranks that wrote it, as far as their blobs show."""
        return 1 + max(self.contents.sizes, default=0)

    def blob(self, rank: int) -> RankBlob:
        if rank not in self._blobs:
            blob = self.store.open_blob(self.step, rank)
            if blob.size_bytes != self.contents.sizes[rank]:  # it was complete a moment ago
                blob.close()
                raise CheckpointDamagedError(_length_mismatch(rank, blob.size_bytes, self.contents.sizes[rank]))
            self._blobs[rank] = blob
        return self._blobs[rank]

    def close_blobs(self) -> None:
        """Close the blobs opened so far."""
        for blob in self._blobs.values():
            blob.close()
        self._blobs.clear()

    def __enter__(self) -> StoredCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_blobs()


class CompleteCheckpoints(Iterator[StoredCheckpoint]):
    """The complete steps, newest first; of equal steps, in the order of ``places``.

    The end is the error why no (further) one exists. A store that is unavailable may have a newer step; older steps of
    the other stores are still found.
    """

    def __init__(self, places: Sequence[CheckpointStore], step: int | None = None) -> None:
        self._places, self._step = places, step
        self._listed: list[tuple[int, CheckpointStore]] = []
        self._unknown: list[str] = []
        for store in places:
            try:
                self._listed += [(candidate, store) for candidate in store.steps() if step in (None, candidate)]
            except TierUnavailableError as error:
                log.warning("cannot list the steps in %s: %s", store.name, error)
                self._unknown.append(f"{store.name}: {error}")
            except CheckpointNotFoundError:
                continue
        self._listed.sort(key=lambda candidate: -candidate[0])
        self._search = self._find()

    @property
    def steps(self) -> list[int]:
        """All steps with any data, newest first, complete or not."""
        return list(dict.fromkeys(step for step, _ in self._listed))

    def __next__(self) -> StoredCheckpoint:
        return next(self._search)

    def _find(self) -> Iterator[StoredCheckpoint]:
        unknown, skipped = self._unknown, list[str]()
        for number, store in self._listed:
            try:
                contents = store.contents(number)
                _check_complete(store, number, contents)
            except (CheckpointDamagedError, CheckpointNotFoundError) as error:
                skipped.append(f"step {number} in {store.name}: {error}")
                continue
            except TierUnavailableError as error:
                unknown.append(f"step {number} in {store.name}: {error}")
                continue
            yield StoredCheckpoint(store, number, contents, tuple(skipped))
        where = " and ".join(store.name for store in self._places)
        if unknown:
            raise TierUnavailableError(f"no (other) complete step was found, but some could not be read: {unknown}")
        if skipped:
            raise CheckpointDamagedError(f"{where}: no (other) complete step: {'; '.join(skipped[:5])}")
        wanted = "" if self._step is None else f" {self._step}"
        raise CheckpointNotFoundError(f"{where}: no (other) step{wanted} that AWS's library wrote")


def newest_checkpoint(places: Sequence[CheckpointStore], step: int | None = None) -> StoredCheckpoint:
    """Return the newest complete step, or the requested one."""
    chosen = next(CompleteCheckpoints(places, step))
    for reason in chosen.skipped:
        log.warning("passed over: %s", reason)
    return chosen


def _check_complete(store: CheckpointStore, step: int, contents: CheckpointContents) -> None:
    """Raise :class:`CheckpointDamagedError` if a blob is missing or has the wrong size. It reads no blob."""
    for rank, size in sorted(contents.sizes.items()):
        try:
            actual = store.blob_size(step, rank)
        except CheckpointNotFoundError as error:
            raise CheckpointDamagedError(f"the data of rank {rank} is missing") from error
        if actual != size:
            raise CheckpointDamagedError(_length_mismatch(rank, actual, size))


def _length_mismatch(rank: int, found: int, expected: int) -> str:
    return f"what rank {rank} wrote has {found} bytes and should have {expected}"


class _Step(NamedTuple):
    shards: dict[int, ObjectInfo]
    metadata: list[ObjectInfo]


class S3CheckpointStore:
    """Checkpoints of one namespace in an object store. Listed once, on the first use."""

    def __init__(self, store: ObjectStore, namespace: str) -> None:
        self.name = f"{store.url}/{namespace}"
        self._store = store
        self._below = f"{validate_job_name(namespace)}/"
        self._steps: dict[int, list[_Step]] | None = None
        """Objects by step, one entry for each layout that has any."""
        self._chosen: dict[int, tuple[_Step, CheckpointContents]] = {}

    @classmethod
    def open(cls, base_path: str, namespace: str, settings: DurableSettings) -> S3CheckpointStore:
        return cls(open_store(base_path.rstrip("/"), settings), namespace)

    def steps(self) -> Sequence[int]:
        return sorted(self._listed(), reverse=True)

    def contents(self, step: int) -> CheckpointContents:
        """Return the contents of the newest metadata in any layout and of any coordinator."""
        if step not in self._chosen:
            found = [(info, layout) for layout in self._listed().get(step, []) for info in layout.metadata]
            if not found:
                raise CheckpointNotFoundError("its metadata was never written")
            info, layout = max(found, key=lambda entry: entry[0].modified_s)
            if info.size_bytes > MAX_METADATA_BYTES:
                raise CheckpointDamagedError(f"{info.name} has {info.size_bytes} bytes, which no metadata has")
            self._chosen[step] = layout, parse_metadata(self._store.get(info.name), f"{self._store.url}/{info.name}")
        return self._chosen[step][1]

    def blob_size(self, step: int, rank: int) -> int:
        return self._shard(step, rank).size_bytes

    def open_blob(self, step: int, rank: int) -> S3RankBlob:
        return S3RankBlob(self._store, self._shard(step, rank))

    def close(self) -> None:
        self._store.close()

    def _shard(self, step: int, rank: int) -> ObjectInfo:
        self.contents(step)
        info = self._chosen[step][0].shards.get(rank)
        if info is None:
            raise CheckpointNotFoundError(f"{self.name} has nothing of rank {rank} in step {step}")
        return info

    def _listed(self) -> dict[int, list[_Step]]:
        if self._steps is None:
            self._steps = {}
            infos = list(self._store.list(self._below))
            for layout in (DefaultS3PathStrategy(""), RayS3PathStrategy("")):
                found: dict[int, _Step] = {}
                for info in infos:
                    named = layout.parse(info.name.removeprefix(self._below))
                    if named is None:
                        continue
                    step = found.setdefault(named.step, _Step({}, []))
                    if named.file == SHARD_FILE:
                        step.shards[named.rank] = info
                    elif named.file == METADATA_FILE:
                        step.metadata.append(info)
                for number, step in found.items():
                    self._steps.setdefault(number, []).append(step)
        return self._steps


class S3RankBlob:
    """An object of which only the requested ranges are fetched."""

    def __init__(self, store: ObjectStore, info: ObjectInfo) -> None:
        self.size_bytes = info.size_bytes
        self._store = store
        self._name = info.name

    def read(self, extents: Sequence[tuple[int, int]]) -> list[Buffer]:
        try:
            return self._store.get_ranges(self._name, extents)
        except ObjectNotFoundError as error:
            raise CheckpointDamagedError(f"{self._store.url}/{self._name} is gone") from error

    def close(self) -> None:
        pass


_MAX_STEPS = 1000
_MAX_JSON_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
_PICKLE, _ARCHIVE = b"\x80", b"PK"


class MemoryServiceStore:
    """Checkpoints of one namespace in the memory service at ``url``.

    Metadata is stored as the shard after the last rank's, so its rank depends on the number of saving ranks. The search
    tries ``world_size`` first, then the namespace's setting, then all ranks.
    """

    def __init__(
        self, url: str, namespace: str, *, world_size: int | None = None, token: str = "", timeout_s: float = 60.0
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is not where a memory service is: write http://HOST:PORT")
        address = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
        self.name = f"{address}/v1/cp/checkpoints/{namespace}"
        self._parts = parts
        self._namespace = validate_job_name(namespace)
        self._guessed_rank = world_size
        token = token or parts.password or ""
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s
        self._written: dict[int, CheckpointContents] = {}

    def steps(self) -> Sequence[int]:
        found = self._json(f"/v1/cp/checkpoints/{self._namespace}/latest?limit={_MAX_STEPS}")
        if not isinstance(found, list) or not all(type(step) is int and 0 <= step < 1 << 62 for step in found):
            raise CheckpointDamagedError(f"{self.name}/latest is not a list of steps")
        return sorted(set(found), reverse=True)

    def contents(self, step: int) -> CheckpointContents:
        if step not in self._written:
            problem: CheckpointDamagedError | None = None
            for rank in self._metadata_ranks(step):
                try:
                    data = self._download(step, rank, MAX_METADATA_BYTES)
                    with data:
                        self._written[step] = parse_metadata(data.read(), f"{self.name}/{rank}/{step}")
                    break
                except CheckpointNotFoundError:
                    continue
                except CheckpointDamagedError as error:
                    problem = problem or error
            else:
                raise problem or CheckpointNotFoundError("its metadata was never written, or is not kept any more")
        return self._written[step]

    def blob_size(self, step: int, rank: int) -> int:
        with self._get(self._path(step, rank)) as response:
            return _content_length(response, self.name)

    def open_blob(self, step: int, rank: int) -> MemoryRankBlob:
        return MemoryRankBlob(self._download(step, rank, self.blob_size(step, rank)))

    def close(self) -> None:
        pass

    def _path(self, step: int, rank: int) -> str:
        return f"/v1/cp/checkpoints/{self._namespace}/{rank}/{step}"

    def _metadata_ranks(self, step: int) -> Iterator[int]:
        """Yield the ranks that may hold metadata, likeliest first.

        The search reads the first bytes of every rank's shard.
        """
        tried = []
        config = self._json(f"/v1/cp/namespaces/{self._namespace}")
        ranks = config.get("num_ranks") if isinstance(config, dict) else None
        for guess in (self._guessed_rank, ranks - 1 if type(ranks) is int else None):
            if guess is not None and guess not in tried and self._content_kind(step, guess) == _PICKLE:
                tried.append(guess)
                yield guess
        rank, gaps = 0, 0
        found = []
        while gaps < 2:  # one shard may be lost
            begins = self._content_kind(step, rank)
            gaps = gaps + 1 if begins is None else 0
            if begins == _PICKLE and rank not in tried:
                found.append(rank)
            rank += 1
        yield from reversed(found)

    def _content_kind(self, step: int, rank: int) -> bytes | None:
        """Return the kind of a rank's shard by its first bytes; None if it does not exist."""
        try:
            with self._get(self._path(step, rank)) as response:
                begin: bytes = response.read(2)
        except CheckpointNotFoundError:
            return None
        return _ARCHIVE if begin == _ARCHIVE else begin[:1]

    def _download(self, step: int, rank: int, most_bytes: int) -> IO[bytes]:
        """Download a rank's shard into a file and verify its checksum."""
        path = self._path(step, rank)
        with self._get(path) as response, contextlib.ExitStack() as cleanup:
            length = _content_length(response, path)
            if length > most_bytes:
                raise CheckpointDamagedError(f"{path} has {length} bytes, {most_bytes} are the most")
            expected = _checksum(response.headers.get("Shard-Meta"), path)
            file = cleanup.enter_context(tempfile.TemporaryFile(prefix="sagemaker-"))
            digest, left = xxhash.xxh3_128(), length
            while left:
                piece = response.read(min(left, _PIECE_BYTES))
                if not piece:
                    raise CheckpointDamagedError(f"{path} ends {left} bytes early")
                digest.update(piece)
                file.write(piece)
                left -= len(piece)
            if digest.digest() != expected:
                raise CheckpointDamagedError(f"{path} is not what was written: its checksum differs")
            file.seek(0)
            cleanup.pop_all()
            return file

    def _json(self, path: str) -> Any:
        with self._get(path) as response:
            data = response.read(_MAX_JSON_BYTES)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointDamagedError(f"{path} is not JSON") from error

    @contextmanager
    def _get(self, path: str) -> Iterator[http.client.HTTPResponse]:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert self._parts.hostname is not None  # noqa: S101 - checked by the constructor
        connection = kind(self._parts.hostname, self._parts.port, timeout=self._timeout_s)
        try:
            connection.request("GET", self._parts.path.rstrip("/") + path, headers=self._headers)
            response = connection.getresponse()
            if response.status == http.HTTPStatus.NOT_FOUND:
                raise CheckpointNotFoundError(f"there is no {path}")
            if response.status != http.HTTPStatus.OK:
                raise TierUnavailableError(f"{path} answers {response.status} {response.reason}")
            yield response
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise TierUnavailableError(
                f"the memory service at {self._parts.hostname} cannot be reached: {reason}"
            ) from error
        finally:
            connection.close()


class MemoryRankBlob:
    """A rank's shard, fetched completely, because only the whole shard has a checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size_bytes = os.fstat(file.fileno()).st_size
        # DCP does not notify this reader if another rank fails.
        self._close = weakref.finalize(self, file.close)

    def read(self, extents: Sequence[tuple[int, int]]) -> list[Buffer]:
        found: list[Buffer] = []
        for start, stop in extents:
            data = memoryview(bytearray(stop - start))
            at = 0
            while at < len(data):  # one call reads at most 2 GiB
                size = os.preadv(self._file.fileno(), [data[at:]], start + at)
                if not size:
                    raise CheckpointDamagedError(f"bytes {start} to {stop} are not all there")
                at += size
            found.append(data)
        return found

    def close(self) -> None:
        self._close()


def _content_length(response: http.client.HTTPResponse, path: str) -> int:
    text = response.headers.get("Content-Length", "")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise CheckpointDamagedError(f"{path} does not say how long it is")
    return int(text)


def _checksum(text: str | None, path: str) -> bytes:
    """Return the digest in ``Shard-Meta``."""
    try:
        meta = json.loads(text or "")
        if meta["algorithm"] == "xxh3_128":
            return base64.b64decode(meta["checksum"], validate=True)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} comes without a checksum") from error
    raise CheckpointDamagedError(f"{path} has a checksum of a kind that is not known")
