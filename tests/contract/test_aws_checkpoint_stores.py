"""Contract of every store of AWS checkpoints: a bucket in both layouts and a memory service."""

import base64
import contextlib
import json
from pathlib import Path

import pytest
import torch

from integration.sagemaker.checkpoint_config import DefaultS3PathStrategy, RayS3PathStrategy
from integration.sagemaker.checkpoint_stores import MemoryServiceStore, S3CheckpointStore
from tests.support.aws_checkpoints import FakeCheckpointStore, encode_checkpoint, pickle_metadata
from tests.support.memory_service import fake_memory_service
from tieredckpt.errors import CheckpointDamagedError, CheckpointNotFoundError, TierUnavailableError, UsageError
from tieredckpt.settings import DurableSettings

NAMESPACE = "job-1"
STATE = encode_checkpoint([[("w", (0,), torch.ones(3))], [("v", (0,), torch.zeros(5))]], objects={"step": 4})


class BucketCase:
    """A folder with the layout of a bucket."""

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
        place._store = UnreachableStore()


class UnreachableStore:
    """A store in which every listing fails."""

    def list(self, prefix):
        raise TierUnavailableError(f"{prefix} cannot be listed")

    def close(self):
        pass


class MemoryServiceCase:
    def __init__(self, service):
        self.service = service
        service.namespaces[NAMESPACE] = (3, 100)
        service.shards[NAMESPACE] = {}

    def open(self):
        return MemoryServiceStore(self.service.url, NAMESPACE)

    def put(self, step, blobs, metadata):
        for rank, blob in enumerate([*blobs, *([metadata] if metadata is not None else [])]):
            self.service.replace_shard(NAMESPACE, rank, step, blob)

    def break_down(self, place):
        self.service.broken = True


class FakeStoreCase:
    def __init__(self):
        self.place = FakeCheckpointStore()

    def open(self):
        return self.place

    def put(self, step, blobs, metadata):
        self.place.put(step, blobs, metadata or b"")
        if metadata is None:
            del self.place.metadata[step]

    def break_down(self, place):
        self.place.down = TierUnavailableError("down")


@pytest.fixture(params=["default", "ray", "memory", "fake"])
def case(request, tmp_path):
    if request.param == "memory":
        with fake_memory_service() as service:
            yield MemoryServiceCase(service)
    elif request.param == "fake":
        yield FakeStoreCase()
    else:
        layout = DefaultS3PathStrategy if request.param == "default" else RayS3PathStrategy
        yield BucketCase(tmp_path / "bucket", layout("s3://b"))


@pytest.fixture
def store(case):
    with contextlib.closing(case.open()) as place:
        yield place


def test_stored_step_is_readable(case, store):
    blobs, metadata = STATE
    case.put(4, blobs, pickle_metadata(metadata))
    case.put(0, blobs, pickle_metadata(metadata))
    assert list(store.steps()) == [4, 0]
    written = store.contents(4)
    assert set(written.tensors) == {"w", "v"}
    assert set(written.objects) == {"step"}
    for rank, data in enumerate(blobs):
        assert store.blob_size(4, rank) == len(data)
        with contextlib.closing(store.open_blob(4, rank)) as blob:
            assert blob.size_bytes == len(data)
            found = blob.read([(0, 10), (7, 9), (5, len(data)), (3, 3)])
        assert [bytes(part) for part in found] == [data[:10], data[7:9], data[5:], b""]


def test_empty_store_has_no_steps(store):
    with contextlib.suppress(CheckpointNotFoundError):
        assert list(store.steps()) == []
    with pytest.raises(CheckpointNotFoundError):
        store.contents(4)


def test_step_without_metadata_is_listed_without_a_description(case, store):
    blobs, metadata = STATE
    case.put(8, blobs, pickle_metadata(metadata))
    case.put(4, blobs, None)
    assert list(store.steps()) == [8, 4]
    with pytest.raises(CheckpointNotFoundError):
        store.contents(4)


def test_lost_rank_is_absent(case, store):
    blobs, metadata = STATE
    case.put(4, blobs[:1], pickle_metadata(metadata))
    if isinstance(case, MemoryServiceCase):  # the metadata's key is one above the last rank
        case.service.replace_shard(NAMESPACE, 2, 4, pickle_metadata(metadata))
        case.service.delete_shard(NAMESPACE, 1, 4)
    assert store.blob_size(4, 0) == len(blobs[0])
    with pytest.raises(CheckpointNotFoundError):
        store.blob_size(4, 1)


def test_unreachable_store_is_not_an_empty_one(case, store):
    blobs, metadata = STATE
    case.put(4, blobs, pickle_metadata(metadata))
    case.break_down(store)
    with pytest.raises(TierUnavailableError):
        store.steps()


def test_invalid_metadata_is_damage(case, store):
    blobs, _ = STATE
    case.put(4, blobs, b"\x80\x04N.")
    with pytest.raises(CheckpointDamagedError):
        store.contents(4)


# -- of the memory service alone ------------------------------------------------------------------------------


@pytest.fixture
def memory_service_case():
    with fake_memory_service() as service:
        kept = MemoryServiceCase(service)
        blobs, metadata = STATE
        kept.put(4, blobs, pickle_metadata(metadata))
        yield kept


def test_blob_that_differs_from_its_checksum_is_damage(memory_service_case):
    service = memory_service_case.service
    data = service.shard_bytes(NAMESPACE, 0, 4)
    service.replace_shard(NAMESPACE, 0, 4, data[:-1] + b"?", resealed=False)
    with pytest.raises(CheckpointDamagedError, match="checksum"):
        memory_service_case.open().open_blob(4, 0)


@pytest.mark.parametrize(
    "meta",
    ["", "{}", "null", "no json", '{"checksum": 5, "algorithm": "xxh3_128"}', '{"checksum": "", "algorithm": "md5"}'],
)
def test_blob_without_a_checksum_is_damage(memory_service_case, meta):
    service = memory_service_case.service
    service.shards[NAMESPACE][0][4] = (service.shard_bytes(NAMESPACE, 0, 4), meta)
    with pytest.raises(CheckpointDamagedError):
        memory_service_case.open().open_blob(4, 0)


@pytest.mark.parametrize("guess", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("said", [2, 3, 9])
def test_metadata_is_found_for_any_configured_world_size(memory_service_case, guess, said):
    """Its key is one above the last rank that saved; neither reader nor namespace need that number."""
    memory_service_case.service.namespaces[NAMESPACE] = (said, 3)
    assert MemoryServiceStore(memory_service_case.service.url, NAMESPACE, world_size=guess).contents(4).tensors


def test_metadata_is_found_behind_a_lost_shard(memory_service_case):
    memory_service_case.service.namespaces[NAMESPACE] = (9, 3)
    memory_service_case.service.delete_shard(NAMESPACE, 1, 4)
    assert memory_service_case.open().contents(4).tensors


def test_missing_service_is_unavailable():
    with fake_memory_service() as service:
        url = service.url
    with pytest.raises(TierUnavailableError, match="cannot be reached"):
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
