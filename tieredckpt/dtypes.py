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


def safetensors_type(dtype: str, sizes: tuple[int, ...], size_bytes: int) -> tuple[str, tuple[int, ...]]:
    """The type and shape under which safetensors shows a tensor."""
    name = SAFETENSORS_NAMES.get(dtype)
    return (name, sizes) if name is not None else ("U8", (size_bytes,))
