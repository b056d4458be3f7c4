"""Many small pieces, far apart in one shard: n of them take n times as long as one."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from peerstore.shard_records import ShardKey
from tests.support.chunk_sums import chunk_checksums
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.format.manifest import ShardIndex, ShardMeta, compressed_shard
from tieredckpt.restore.read_executor import ReadExecutor
from tieredckpt.restore.step_index import ByteRange
from tieredckpt.settings import DurableSettings
from tieredckpt.tensors.slot_copy import Copier

pytestmark = pytest.mark.slow

CHUNK = 64


@pytest.fixture(scope="module", params=[40_000, pytest.param(100_000, marks=pytest.mark.nightly)])
def data(request):
    """Twice as many chunks as the pieces that are read."""
    chunks = 2 * request.param
    found = np.zeros((chunks, CHUNK), dtype=np.uint8)
    found[:, :8] = np.random.default_rng(0).integers(0, 256, (chunks, 8), dtype=np.uint8)
    return found.reshape(-1)


@pytest.fixture(scope="module", params=["raw", "zstd"])
def stored(request, data, tmp_path_factory):
    """A durable shard with chunks so small that pieces are as far apart as in a huge shard."""
    folder = tmp_path_factory.mktemp("stored")
    source = folder / "shard"
    source.write_bytes(data.tobytes())
    sums = chunk_checksums(memoryview(data), chunk_bytes=CHUNK)
    index = ShardIndex(ShardKey("job", 1, 1, "x", 0, 0), 1, len(data), CHUNK, sums, ShardMeta("", ()), object="shard")
    if request.param == "zstd":
        with compressed_shard(source, index, wanted=True) as (path, frames):
            (folder / "packed").write_bytes(path.read_bytes())
        index = ShardIndex(
            *(index.key, 1, len(data), CHUNK, sums, index.meta), object="packed", encoding="zstd", frames=tuple(frames)
        )
    with contextlib.closing(open_store(f"file://{folder}", DurableSettings())) as store:
        yield store, index


@pytest.mark.timeout(120)
def test_pieces_of_every_other_chunk(stored, data):
    store, index = stored
    target = torch.zeros(len(data) // (2 * CHUNK), dtype=torch.uint8)
    with contextlib.closing(Copier(1)) as copier:
        session = SimpleNamespace(durable=SimpleNamespace(open=lambda: store), copier=copier, peers=None)
        reading = ReadExecutor(session, SimpleNamespace(shards={0: index}), None, None, cast=False, trust=False)
        places = range(5, len(data), 2 * CHUNK)
        reading._read_from_durable(0, [(ByteRange(at, at + 1), target.data_ptr() + n) for n, at in enumerate(places)])
    assert np.array_equal(target.numpy(), data[5 :: 2 * CHUNK])


def test_overlapping_pieces_across_windows_are_read(stored, data):
    """Some begin in one window and end in another; some are the same."""
    store, index = stored
    ranges = [(0, 3), (0, 4000 * CHUNK), (CHUNK - 1, CHUNK + 1), (0, 3), (10_000, 10_000), (20_001, 20_500)]
    target = torch.zeros(sum(stop - start for start, stop in ranges), dtype=torch.uint8)
    wanted, at = [], 0
    for start, stop in ranges:
        wanted.append((ByteRange(start, stop), target.data_ptr() + at))
        at += stop - start
    with contextlib.closing(Copier(1)) as copier:
        session = SimpleNamespace(durable=SimpleNamespace(open=lambda: store), copier=copier, peers=None)
        ReadExecutor(
            session, SimpleNamespace(shards={0: index}), None, None, cast=False, trust=False
        )._read_from_durable(0, wanted)
    assert np.array_equal(target.numpy(), np.concatenate([data[start:stop] for start, stop in ranges]))
