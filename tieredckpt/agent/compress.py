"""Shards that gain from it, compressed chunk by chunk, so that a reader still fetches only the chunks it needs."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import zstandard

from peerstore.pages import Mapping
from tieredckpt.manifest import ShardIndex

_SAMPLES = 16
_WORTH = 0.95
_LEVEL = 1


@contextlib.contextmanager
def compressed(source: Path, index: ShardIndex, *, wanted: bool) -> Iterator[tuple[Path, list[int] | None]]:
    """The file to upload and, when it is a compressed one, the stored size of each chunk."""
    if not wanted or not index.size_bytes or not _gains(source, index):
        yield source, None
        return
    with tempfile.NamedTemporaryFile(prefix="tieredckpt-", suffix=".zst") as spool:
        packer = zstandard.ZstdCompressor(level=_LEVEL)
        frames = []
        with source.open("rb") as file, Mapping(file.fileno(), index.size_bytes) as mapping, mapping.view as view:
            for start in range(0, index.size_bytes, index.chunk_bytes):
                with view[start : start + index.chunk_bytes] as chunk:
                    frame = packer.compress(chunk)
                spool.write(frame)
                frames.append(len(frame))
        spool.flush()
        yield Path(spool.name), frames


def decompress(frame: bytes | memoryview, size_bytes: int) -> bytes:
    """One chunk back; raises ``zstandard.ZstdError`` for anything that is not exactly that chunk."""
    if zstandard.frame_content_size(frame) != size_bytes:
        raise zstandard.ZstdError(f"a frame of {zstandard.frame_content_size(frame)} bytes, expected {size_bytes}")
    return zstandard.ZstdDecompressor().decompress(frame, max_output_size=size_bytes)


def _gains(source: Path, index: ShardIndex) -> bool:
    """Whether a sample of its chunks shrinks enough to be worth the time."""
    count = -(-index.size_bytes // index.chunk_bytes)
    packer = zstandard.ZstdCompressor(level=_LEVEL)
    before = after = 0
    with source.open("rb") as file, Mapping(file.fileno(), index.size_bytes) as mapping, mapping.view as view:
        for chunk in range(0, count, max(1, count // _SAMPLES)):
            with view[chunk * index.chunk_bytes : (chunk + 1) * index.chunk_bytes] as sample:
                before += len(sample)
                after += len(packer.compress(sample))
    return after < before * _WORTH
