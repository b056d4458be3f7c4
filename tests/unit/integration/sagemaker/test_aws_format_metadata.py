"""Metadata of AWS's library: consistent metadata is accepted, any other is refused."""

import copy
import io
import os
import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from integration.sagemaker.aws_format import BlobRange, parse_metadata
from integration.sagemaker.format_writer import _Pickler
from tests.support.aws_checkpoints import encode_checkpoint, pickle_metadata
from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.format.slice_boxes import Box


def two_ranks():
    rows = torch.arange(12.0).view(4, 3)
    return encode_checkpoint(
        [[("w", (0, 0), rows[:2].clone()), ("s", (), torch.tensor(7))], [("w", (2, 0), rows[2:].clone())]],
        {"w": (4, 3)},
        {"step": 12},
    )


def test_metadata_locates_tensors_and_objects():
    blobs, metadata = two_ranks()
    found = parse_metadata(pickle_metadata(metadata), "m")
    assert found.tensors["w"].shape == (4, 3)
    assert found.tensors["w"].dtype == "float32"
    assert [chunk.box for chunk in found.tensors["w"].chunks] == [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    assert found.tensors["s"].shape == ()
    assert found.objects["step"].rank == 0
    assert found.sizes == {rank: len(blob) for rank, blob in enumerate(blobs)}
    assert found.paths == {"w": ("w",), "s": ("s",), "step": ("step",)}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_of_the_aws_class_is_parsed(protocol):
    """With AWS's own class in it, in every protocol."""
    info = pytest.importorskip("amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info")
    _, metadata = two_ranks()
    theirs = copy.deepcopy(metadata)
    theirs.storage_data = {
        index: info._SageMakerStorageInfo(rank=at.rank, offset=at.start, length=at.length)
        for index, at in metadata.storage_data.items()
    }
    assert parse_metadata(pickle.dumps(theirs, protocol), "m") == parse_metadata(pickle_metadata(metadata), "m")


def by_early_311(metadata, protocol, *, asks=getattr, whose=_MEM_FORMAT_ENCODING):
    """Pickle as Python 3.11.0 to 3.11.3 does: a member of an enum is looked up by its name."""

    class Early(_Pickler):
        def reducer_override(self, obj):
            return (asks, (whose, obj.name)) if isinstance(obj, _MEM_FORMAT_ENCODING) else NotImplemented

    into = io.BytesIO()
    Early(into, protocol).dump(metadata)
    return into.getvalue()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_of_early_python_3_11_is_parsed(protocol):
    _, metadata = two_ranks()
    data = by_early_311(metadata, protocol)
    assert (b"__builtin__" if protocol == 2 else b"builtins") in data
    assert parse_metadata(data, "m") == parse_metadata(pickle_metadata(metadata), "m")


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("changed", [{"whose": Metadata}, {"whose": "a name"}, {"asks": vars}])
def test_getattr_is_allowed_only_on_enumerations(protocol, changed):
    _, metadata = two_ranks()
    with pytest.raises(CheckpointDamagedError):
        parse_metadata(by_early_311(metadata, protocol, **changed), "m")


def test_written_metadata_uses_the_aws_class():
    info = pytest.importorskip("amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info")
    _, metadata = two_ranks()
    found = pickle.loads(pickle_metadata(metadata))
    assert isinstance(found, Metadata)
    assert all(type(one) is info._SageMakerStorageInfo for one in found.storage_data.values())
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert {(one.rank, one.offset, one.length) for one in found.storage_data.values()} == set(
        metadata.storage_data.values()
    )


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.complex64, torch.bool, torch.int64]
)
def test_every_element_type(dtype):
    _, metadata = encode_checkpoint([[("w", (0,), torch.zeros(3).to(dtype))]])
    assert parse_metadata(pickle_metadata(metadata), "m").tensors["w"].dtype == str(dtype).removeprefix("torch.")


def test_unknown_planner_data_is_ignored():
    _, metadata = two_ranks()
    metadata.planner_data = {"w": ["a", 1.5]}
    assert parse_metadata(pickle_metadata(metadata), "m").paths is None


def _tensor(sizes=(4,), chunks=(((0,), (4,)),), **properties):
    return TensorStorageMetadata(
        TensorProperties(dtype=torch.float32, **properties),
        torch.Size(sizes),
        [ChunkStorageMetadata(torch.Size(a), torch.Size(b)) for a, b in chunks],
    )


def _at(offset):
    return {MetadataIndex("w", offset): BlobRange(0, 0, 500)}


def _with(described=None, stored=None):
    return Metadata(
        {"w": _tensor()} if described is None else described,
        storage_data={MetadataIndex("w", (0,)): BlobRange(0, 0, 500)} if stored is None else stored,
    )


class Runs:
    def __reduce__(self):
        return os.system, ("true",)


BAD = {
    "another class": BlobRange(0, 0, 0),
    "no metadata": {"state_dict_metadata": {}},
    "nothing described": _with(described=[]),
    "no places": Metadata({"w": _tensor()}),
    "no place for a chunk": _with(stored={}),
    "no place for an object": _with({"o": BytesStorageMetadata()}, {}),
    "a negative rank": _with(stored={MetadataIndex("w", (0,)): BlobRange(-1, 0, 500)}),
    "a rank of a million millions": _with(stored={MetadataIndex("w", (0,)): BlobRange(10**12, 0, 500)}),
    "a negative offset": _with(stored={MetadataIndex("w", (0,)): BlobRange(0, -1, 500)}),
    "a length that is no number": _with(stored={MetadataIndex("w", (0,)): BlobRange(0, 0, "500")}),
    "a length that is a bool": _with(stored={MetadataIndex("w", (0,)): BlobRange(0, 0, True)}),
    "fewer bytes than elements": _with(stored={MetadataIndex("w", (0,)): BlobRange(0, 0, 15)}),
    "elements beyond the shape": _with({"w": _tensor(chunks=[((2,), (4,))])}, _at((2,))),
    "other dimensions": _with({"w": _tensor(chunks=[((0, 0), (4, 1))])}, _at((0, 0))),
    "a sparse tensor": _with({"w": _tensor(layout=torch.sparse_coo)}),
    "something that runs": _with({"w": Runs()}),
    "something that runs as an object's place": _with(stored={MetadataIndex("w", (0,)): Runs()}),
    "an entry of a strange kind": _with({"w": BlobRange(0, 0, 1)}),
    "an entry without a name": _with({5: BytesStorageMetadata()}),
}


@pytest.mark.parametrize("what", BAD)
def test_inconsistent_metadata_is_damage(what):
    with pytest.raises(CheckpointDamagedError):
        parse_metadata(pickle_metadata(BAD[what]), "m")


def test_metadata_with_too_many_repeated_chunks_is_refused():
    """One huge list of chunks, named a thousand times: a few bytes that would take hours to read."""
    chunk = ChunkStorageMetadata(torch.Size((0,)), torch.Size((1,)))
    many = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((1,)), [chunk] * (1 << 15))
    described = {f"w{number}": many for number in range(600)}
    stored = {MetadataIndex(name, (0,)): BlobRange(0, 0, 500) for name in described}
    with pytest.raises(CheckpointDamagedError, match="too many"):
        parse_metadata(pickle_metadata(Metadata(described, storage_data=stored)), "m")
