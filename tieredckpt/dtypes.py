"""Names of element types, without torch: how wide they are and what safetensors calls them."""

from __future__ import annotations

SAFETENSORS_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""Types every safetensors reader knows. All others are written as bytes; our index keeps their type."""

_BY_WIDTH = {
    1: "bool uint8 int8 quint8 qint8 bits8 bits1x8 bits2x4 bits4x2 quint4x2 quint2x4 float4_e2m1fn_x2 float8_e4m3fn "
    "float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu uint1 uint2 uint3 uint4 uint5 uint6 uint7 "
    "int1 int2 int3 int4 int5 int6 int7",
    2: "int16 uint16 float16 bfloat16 bits16",
    4: "int32 uint32 float32 complex32 qint32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}
WIDTHS = {name: width for width, names in _BY_WIDTH.items() for name in names.split()}
"""Bytes per element of every type torch has."""


def safetensors_type(dtype: str, sizes: tuple[int, ...], size_bytes: int) -> tuple[str, tuple[int, ...]]:
    """The type and shape under which safetensors shows a tensor."""
    name = SAFETENSORS_NAMES.get(dtype)
    return (name, sizes) if name is not None else ("U8", (size_bytes,))
