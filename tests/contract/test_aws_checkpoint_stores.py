"""What every place keeps its word about: a bucket in both layouts, and a memory service."""

import base64
import contextlib
import json
from pathlib import Path

import pytest
import torch

from integration.sagemaker.checkpoint_config import DefaultS3PathStrategy, RayS3PathStrategy
from integration.sagemaker.checkpoint_stores import MemoryServiceStore, S3CheckpointStore
from tests.support.aws_checkpoints import FakePlace, pickled, write
from tests.support.memory_service import memory_service
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError, TierUnavailableError, UsageError
from tieredckpt.settings import DurableSettings

NAMESPACE = "job-1"
STATE = write([[("w", (0,), torch.ones(3))], [("v", (0,), torch.zeros(5))]], objects={"step": 4})


class InBucket:
    """A folder, as a bucket would have it."""

    def __init__(self, root, layout):
        self.root, self.layout = Path(root), layout
        self.root.mkdir()

    def open(self):
        return S3CheckpointStore.open(f"file://{self.root}", NAMESPACE, DurableSettings(retry_s=0.2))

    def path(self, rank, step, file):
        found = self.root / NAMESPACE / self.layout.name(rank, step, file)
        found.parent.mkdir(parents=True, exist_ok=True)
        return found

    def put(self, step, blobs, metadata):
        for rank, blob in enumerate(blobs):
            self.path(rank, step, "checkpoint.pt").write_bytes(blob)
        if metadata is not None:
            self.path(0, step, "metadata.metadata").write_bytes(metadata)

    def break_down(self, place):
        place._store = Down()


class Down:
    """A store that does not answer."""

    def list(self, prefix):
        raise TierUnavailableError(f"{prefix} cannot be listed")

    def close(self):
        pass


class InMemory:
    def __init__(self, service):
        self.service = service
        service.namespaces[NAMESPACE] = (3, 100)
        service.shards[NAMESPACE] = {}

    def open(self):
        return MemoryServiceStore(self.service.url, NAMESPACE)

    def put(self, step, blobs, metadata):
        for rank, blob in enumerate([*blobs, *([metadata] if metadata is not None else [])]):
            self.service.replace(NAMESPACE, rank, step, blob)

    def break_down(self, place):
        self.service.broken = True


class InFake:
    def __init__(self):
        self.place = FakePlace()

    def open(self):
        return self.place

    def put(self, step, blobs, metadata):
        self.place.put(step, blobs, metadata or b"")
        if metadata is None:
            del self.place.metadata[step]

    def break_down(self, place):
        self.place.down = TierUnavailableError("down")


@pytest.fixture(params=["default", "ray", "memory", "fake"])
def kept(request, tmp_path):
    if request.param == "memory":
        with memory_service() as service:
            yield InMemory(service)
    elif request.param == "fake":
        yield InFake()
    else:
        layout = DefaultS3PathStrategy if request.param == "default" else RayS3PathStrategy
        yield InBucket(tmp_path / "bucket", layout("s3://b"))


@pytest.fixture
def opened(kept):
    with contextlib.closing(kept.open()) as place:
        yield place


def test_stored_step_is_readable(kept, opened):
    blobs, metadata = STATE
    kept.put(4, blobs, pickled(metadata))
    kept.put(0, blobs, pickled(metadata))
    assert list(opened.steps()) == [4, 0]
    written = opened.contents(4)
    assert set(written.tensors) == {"w", "v"}
    assert set(written.objects) == {"step"}
    for rank, data in enumerate(blobs):
        assert opened.blob_size(4, rank) == len(data)
        with contextlib.closing(opened.open_blob(4, rank)) as blob:
            assert blob.size_bytes == len(data)
            found = blob.read([(0, 10), (7, 9), (5, len(data)), (3, 3)])
        assert [bytes(part) for part in found] == [data[:10], data[7:9], data[5:], b""]


def test_empty_store_has_no_steps(opened):
    with contextlib.suppress(CheckpointNotFoundError):
        assert list(opened.steps()) == []
    with pytest.raises(CheckpointNotFoundError):
        opened.contents(4)


def test_step_without_metadata_is_listed_without_a_description(kept, opened):
    blobs, metadata = STATE
    kept.put(8, blobs, pickled(metadata))
    kept.put(4, blobs, None)
    assert list(opened.steps()) == [8, 4]
    with pytest.raises(CheckpointNotFoundError):
        opened.contents(4)


def test_lost_rank_is_absent(kept, opened):
    blobs, metadata = STATE
    kept.put(4, blobs[:1], pickled(metadata))
    if isinstance(kept, InMemory):  # metadata is the rank behind the last
        kept.service.replace(NAMESPACE, 2, 4, pickled(metadata))
        kept.service.lose(NAMESPACE, 1, 4)
    assert opened.blob_size(4, 0) == len(blobs[0])
    with pytest.raises(CheckpointNotFoundError):
        opened.blob_size(4, 1)


def test_unreachable_store_is_not_an_empty_one(kept, opened):
    blobs, metadata = STATE
    kept.put(4, blobs, pickled(metadata))
    kept.break_down(opened)
    with pytest.raises(TierUnavailableError):
        opened.steps()


def test_invalid_metadata_is_damage(kept, opened):
    blobs, _ = STATE
    kept.put(4, blobs, b"\x80\x04N.")
    with pytest.raises(CheckpointDamagedError):
        opened.contents(4)


# -- of the memory service alone ------------------------------------------------------------------------------


@pytest.fixture
def in_memory():
    with memory_service() as service:
        kept = InMemory(service)
        blobs, metadata = STATE
        kept.put(4, blobs, pickled(metadata))
        yield kept


def test_blob_that_differs_from_its_checksum_is_damage(in_memory):
    service = in_memory.service
    data = service.blob(NAMESPACE, 0, 4)
    service.replace(NAMESPACE, 0, 4, data[:-1] + b"?", resealed=False)
    with pytest.raises(CheckpointDamagedError, match="checksum"):
        in_memory.open().open_blob(4, 0)


@pytest.mark.parametrize(
    "meta",
    ["", "{}", "null", "no json", '{"checksum": 5, "algorithm": "xxh3_128"}', '{"checksum": "", "algorithm": "md5"}'],
)
def test_blob_without_a_checksum_is_damage(in_memory, meta):
    service = in_memory.service
    service.shards[NAMESPACE][0][4] = (service.blob(NAMESPACE, 0, 4), meta)
    with pytest.raises(CheckpointDamagedError):
        in_memory.open().open_blob(4, 0)


@pytest.mark.parametrize("guess", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("said", [2, 3, 9])
def test_metadata_is_found_for_any_configured_world_size(in_memory, guess, said):
    """Its key is one more than the last rank that saved, and neither reader nor namespace need to know that."""
    in_memory.service.namespaces[NAMESPACE] = (said, 3)
    assert MemoryServiceStore(in_memory.service.url, NAMESPACE, world_size=guess).contents(4).tensors


def test_metadata_is_found_behind_a_lost_shard(in_memory):
    in_memory.service.namespaces[NAMESPACE] = (9, 3)
    in_memory.service.lose(NAMESPACE, 1, 4)
    assert in_memory.open().contents(4).tensors


def test_missing_service_is_unavailable():
    with memory_service() as service:
        url = service.url
    with pytest.raises(TierUnavailableError, match="cannot be asked"):
        MemoryServiceStore(url, NAMESPACE).steps()


@pytest.mark.parametrize("url", ["", "here:9200", "ftp://here", "http://"])
def test_invalid_service_url_is_refused(url):
    with pytest.raises(UsageError):
        MemoryServiceStore(url, NAMESPACE)


def test_checksum_matches_the_aws_example():
    """Base64 of xxh3-128 in big-endian order, as in AWS's example."""
    from tests.support.memory_service import shard_meta

    said = json.loads(shard_meta(b""))
    assert base64.b64decode(said["checksum"]).hex() == "99aa06d3014798d86001c324468d497f"
