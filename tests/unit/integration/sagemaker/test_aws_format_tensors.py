"""Tensors from ``torch.save`` archives: the same bits as torch's, and none from false archives."""

import io
import os
import pickle
import resource
import struct
import zipfile

import pytest
import torch

from integration.sagemaker.aws_format import read_archived_tensor
from tests.support.aws_checkpoints import torch_archive
from tests.support.bits import assert_same_bits
from tieredckpt.errors import CheckpointDamagedError

TENSORS = {
    "float32": torch.randn(3, 4),
    "bfloat16": torch.randn(5).bfloat16(),
    "float16": torch.randn(5).half(),
    "float64": torch.randn(2, 2, 2, dtype=torch.float64),
    "int64": torch.arange(7),
    "uint8": torch.arange(7, dtype=torch.uint8),
    "bool": torch.tensor([True, False, True]),
    "complex64": torch.randn(3, dtype=torch.complex64),
    "float8": torch.randn(6).to(torch.float8_e4m3fn),
    "uint16": torch.arange(5).to(torch.uint16),
    "a scalar": torch.tensor(2.5),
    "nothing": torch.empty(0, 3),
    "nan and zeros": torch.tensor([float("nan"), -0.0, float("inf")]),
    "a column of a base": torch.arange(12.0).view(3, 4)[:, 1],
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "the middle of a base": torch.arange(100)[40:60],
    "needs gradients": torch.randn(3, requires_grad=True),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "negated": torch.randn(3, dtype=torch.complex64).conj().imag,
}


def read(data, tensor):
    return read_archived_tensor(memoryview(data), tuple(tensor.shape), tensor.dtype, "w")


@pytest.mark.parametrize("name", TENSORS)
def test_the_same_bits(name):
    tensor = TENSORS[name]
    found = read(torch_archive(tensor), tensor)
    assert_same_bits(found, tensor.detach().resolve_conj().resolve_neg())


def test_without_checksums():
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        data = torch_archive(TENSORS["float32"])
    finally:
        torch.serialization.set_crc32_options(before)
    assert_same_bits(read(data, TENSORS["float32"]), TENSORS["float32"])


@pytest.mark.parametrize(("sizes", "dtype"), [((4, 3), torch.float32), ((3, 4), torch.int32), ((12,), torch.float32)])
def test_tensor_of_another_shape_or_dtype_is_damage(sizes, dtype):
    with pytest.raises(CheckpointDamagedError, match="should be"):
        read_archived_tensor(memoryview(torch_archive(torch.zeros(3, 4))), sizes, dtype, "w")


def test_every_cut_and_every_flipped_byte_of_the_data():
    tensor = torch.arange(8.0)
    data = torch_archive(tensor)
    for end in range(0, len(data), 7):
        with pytest.raises(CheckpointDamagedError):
            read(data[:end], tensor)
    start = data.index(tensor.numpy().tobytes())
    for at in range(start, start + tensor.nbytes):
        with pytest.raises(CheckpointDamagedError):
            read(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], tensor)


def rezipped(change=None, *, compression=zipfile.ZIP_STORED, more=()):
    """Return the archive of four ones with ``data.pkl`` changed, compression, or extra members."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(torch_archive(torch.ones(4)))) as old,
        zipfile.ZipFile(out, "w", compression) as new,
    ):
        for member in old.infolist():
            data = old.read(member)
            if change is not None and member.filename.endswith("data.pkl"):
                data = change(data)
            new.writestr(member.filename, data)
        for name in more:
            new.writestr(name, b"")
    return out.getvalue()


def claiming(count):
    """Claim ``count`` elements for a storage of four."""

    def change(data):
        assert data.count(b"K\x04tq") == 1
        return data.replace(b"K\x04tq", b"J" + struct.pack("<i", count) + b"tq")

    return change


class Runs:
    def __reduce__(self):
        return os.system, ("true",)


HOSTILE = {
    "more elements than bytes": rezipped(claiming(1 << 30)),
    "fewer elements than bytes": rezipped(claiming(1)),
    "a negative number of elements": rezipped(claiming(-4)),
    "a call": rezipped(lambda _: pickle.dumps(Runs(), 2)),
    "a string": rezipped(lambda _: pickle.dumps("w", 2)),
    "no pickle": rezipped(lambda _: b""),
    "compressed": rezipped(compression=zipfile.ZIP_DEFLATED),
    "many members": rezipped(more=[f"archive/{number}" for number in range(100)]),
    "another object": torch_archive({"w": torch.ones(4)}),
    "a sparse tensor": torch_archive(torch.eye(2).to_sparse()),
    "a parameter": torch_archive(torch.nn.Parameter(torch.ones(4))),
    "no zip": pickle.dumps(Runs()),
    "nothing": b"",
    "torch's old form": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.",
}


def test_unexpected_size_is_refused_before_allocation():
    """One element with strides of zero says that it is a gibibyte, and marks have every element written."""
    one = torch.zeros(1).as_strided((1 << 28,), (0,))
    data = torch_archive(torch._neg_view(one))
    assert len(data) < 2000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointDamagedError, match="should be"):
        read_archived_tensor(memoryview(data), (4,), torch.float32, "w")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB


@pytest.mark.parametrize("what", HOSTILE)
def test_archives_that_lie(what):
    with pytest.raises(CheckpointDamagedError):
        read_archived_tensor(memoryview(HOSTILE[what]), (4,), torch.float32, "w")


def test_a_view_beyond_its_storage():
    """``torch.load`` refuses this one as well; it accepts a stride of zero over few bytes."""
    data = torch_archive(torch.ones(4))
    assert data.count(b"K\x00K\x04\x85") == 1  # offset 0, size (4,)
    lying = _without_checksum(data, b"K\x00K\x04\x85", b"K\x01K\x04\x85")
    with pytest.raises(CheckpointDamagedError, match="reaches to element"):
        read_archived_tensor(memoryview(lying), (4,), torch.float32, "w")


def _without_checksum(data, old, new):
    return rezipped(lambda pickled: pickled.replace(old, new))
