"""A namespace behind ``/v1/cp``: the memory service that AWS's library writes to, or any other that speaks it."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any
from urllib.parse import urlsplit

import xxhash
from typing_extensions import Buffer

from integration.sagemaker.metadata import MOST_METADATA_BYTES, Written, read_metadata
from peerstore.names import job_name
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError, TierUnavailableError, UsageError

DEFAULT_URL = "http://ai-toolkit-gossip-headless.aws-hyperpod.svc.cluster.local:9200"
_MOST_STEPS = 1000
_MOST_JSON_BYTES = 1 << 20
_PIECE_BYTES = 1 << 20
_PICKLE, _ARCHIVE = b"\x80", b"PK"


class MemoryPlace:
    """What one namespace has in the memory service at ``url``.

    Metadata is kept as if it were one more rank's, the one after the last. Which that is depends on the number of ranks
    that saved; ``world_size`` is only the first guess, then comes what the namespace says, then looking.
    """

    def __init__(
        self, url: str, namespace: str, *, world_size: int | None = None, token: str = "", timeout_s: float = 60.0
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is not where a memory service is: write http://HOST:PORT")
        where = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl().rstrip("/")
        self.name = f"{where}/v1/cp/checkpoints/{namespace}"
        self._parts = parts
        self._namespace = job_name(namespace)
        self._guess = world_size
        token = token or parts.password or ""
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s
        self._written: dict[int, Written] = {}

    def steps(self) -> Sequence[int]:
        found = self._json(f"/v1/cp/checkpoints/{self._namespace}/latest?limit={_MOST_STEPS}")
        if not isinstance(found, list) or not all(type(step) is int and 0 <= step < 1 << 62 for step in found):
            raise CheckpointDamagedError(f"{self.name}/latest is no list of steps")
        return sorted(set(found), reverse=True)

    def written(self, step: int) -> Written:
        if step not in self._written:
            problem: CheckpointDamagedError | None = None
            for rank in self._metadata_ranks(step):
                try:
                    data = self._checked(step, rank, MOST_METADATA_BYTES)
                    with data:
                        self._written[step] = read_metadata(data.read(), f"{self.name}/{rank}/{step}")
                    break
                except CheckpointNotFoundError:
                    continue
                except CheckpointDamagedError as error:
                    problem = problem or error
            else:
                raise problem or CheckpointNotFoundError("its metadata was never written, or is not kept any more")
        return self._written[step]

    def size(self, step: int, rank: int) -> int:
        with self._get(self._path(step, rank)) as response:
            return _length(response, self.name)

    def blob(self, step: int, rank: int) -> MemoryBlob:
        return MemoryBlob(self._checked(step, rank, self.size(step, rank)))

    def close(self) -> None:
        pass

    # -- inside -----------------------------------------------------------------------------------------------

    def _path(self, step: int, rank: int) -> str:
        return f"/v1/cp/checkpoints/{self._namespace}/{rank}/{step}"

    def _metadata_ranks(self, step: int) -> Iterator[int]:
        """Where metadata may be, the likeliest first; looking costs the first bytes of what every rank wrote."""
        tried = []
        config = self._json(f"/v1/cp/namespaces/{self._namespace}")
        ranks = config.get("num_ranks") if isinstance(config, dict) else None
        for guess in (self._guess, ranks - 1 if type(ranks) is int else None):
            if guess is not None and guess not in tried and self._begins(step, guess) == _PICKLE:
                tried.append(guess)
                yield guess
        rank, gaps = 0, 0
        found = []
        while gaps < 2:  # one shard may be lost
            begins = self._begins(step, rank)
            gaps = gaps + 1 if begins is None else 0
            if begins == _PICKLE and rank not in tried:
                found.append(rank)
            rank += 1
        yield from reversed(found)

    def _begins(self, step: int, rank: int) -> bytes | None:
        """What kind of bytes a rank wrote; ``None``: nothing."""
        try:
            with self._get(self._path(step, rank)) as response:
                begin: bytes = response.read(2)
        except CheckpointNotFoundError:
            return None
        return _ARCHIVE if begin == _ARCHIVE else begin[:1]

    def _checked(self, step: int, rank: int, most_bytes: int) -> IO[bytes]:
        """What a rank wrote, on disk and compared with its checksum."""
        path = self._path(step, rank)
        with self._get(path) as response, contextlib.ExitStack() as cleanup:
            length = _length(response, path)
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
            data = response.read(_MOST_JSON_BYTES)
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise CheckpointDamagedError(f"{path} is no JSON") from error

    @contextmanager
    def _get(self, path: str) -> Iterator[http.client.HTTPResponse]:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        assert self._parts.hostname is not None  # noqa: S101 - the constructor looked
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
            said = str(error) or type(error).__name__
            raise TierUnavailableError(
                f"the memory service at {self._parts.hostname} cannot be asked: {said}"
            ) from error
        finally:
            connection.close()


class MemoryBlob:
    """What a rank wrote: fetched as a whole, because only the whole has a checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size_bytes = os.fstat(file.fileno()).st_size
        # Where another rank fails, DCP tells this one's reader nothing.
        self._close = weakref.finalize(self, file.close)

    def read(self, extents: Sequence[tuple[int, int]]) -> list[Buffer]:
        found: list[Buffer] = []
        for start, stop in extents:
            data = memoryview(bytearray(stop - start))
            at = 0
            while at < len(data):  # one call gives 2 GiB at most
                size = os.preadv(self._file.fileno(), [data[at:]], start + at)
                if not size:
                    raise CheckpointDamagedError(f"bytes {start} to {stop} are not all there")
                at += size
            found.append(data)
        return found

    def close(self) -> None:
        self._close()


def _length(response: http.client.HTTPResponse, path: str) -> int:
    text = response.headers.get("Content-Length", "")
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise CheckpointDamagedError(f"{path} does not say how long it is")
    return int(text)


def _checksum(text: str | None, path: str) -> bytes:
    """The digest that ``Shard-Meta`` states."""
    try:
        meta = json.loads(text or "")
        if meta["algorithm"] == "xxh3_128":
            return base64.b64decode(meta["checksum"], validate=True)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointDamagedError(f"{path} comes without a checksum") from error
    raise CheckpointDamagedError(f"{path} has a checksum of a kind that is not known")
