"""Torch's element types: their names, widths and equivalents in safetensors."""

import pytest
import torch
from safetensors import deserialize
from safetensors.torch import save

from tieredckpt.errors import CheckpointDamagedError
from tieredckpt.format.shard_layout import DTYPE_WIDTHS, SAFETENSORS_DTYPES, safetensors_dtype_and_shape
from tieredckpt.tensors.plain_tensors import dtype_from_name, dtype_name

TORCH = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def test_the_width_of_every_type_torch_has_is_known():
    assert {dtype_name(dtype): dtype.itemsize for dtype in TORCH}.items() <= DTYPE_WIDTHS.items()


@pytest.mark.parametrize("dtype", sorted(TORCH, key=str), ids=str)
def test_every_name_leads_back_to_its_type(dtype):
    assert dtype_from_name(dtype_name(dtype)) is dtype


@pytest.mark.parametrize("name", ["float5", "", "Tensor", "nn", "float32\0", "__class__"])
def test_names_of_no_type_are_damage(name):
    with pytest.raises(CheckpointDamagedError, match="no element type"):
        dtype_from_name(name)


@pytest.mark.parametrize("name", SAFETENSORS_DTYPES)
def test_safetensors_calls_them_the_same(name):
    data = save({"t": torch.zeros(4, dtype=dtype_from_name(name))})
    assert dict(deserialize(data))["t"]["dtype"] == SAFETENSORS_DTYPES[name]


def test_types_safetensors_lacks_are_bytes():
    assert safetensors_dtype_and_shape("complex128", (2, 3), 96) == ("U8", (96,))
    assert safetensors_dtype_and_shape("bfloat16", (2, 3), 12) == ("BF16", (2, 3))
