"""What is not a tensor, as bytes that are the same wherever it is the same."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tieredckpt.export.source import raw_bytes
from tieredckpt.state import archive
from tieredckpt.tensors import dtype_name, is_plain


def canonical(value: Any) -> bytes:
    """Bytes that tell values and their types apart; the order in which a mapping or a set was filled does not count.

    What has no form of its own here is pickled. That is as canonical as its ``__reduce__`` is.
    """
    if value is None or value is True or value is False:
        return _tagged(str(value), b"")
    if type(value) is int:
        return _tagged("int", str(value).encode())
    if type(value) is float:
        return _tagged("float", struct.pack("<d", value))
    if type(value) is complex:
        return _tagged("complex", struct.pack("<dd", value.real, value.imag))
    if type(value) is str:
        return _tagged("str", value.encode("utf-8", "surrogatepass"))
    if type(value) in (bytes, bytearray):
        return _tagged("bytes", bytes(value))
    if type(value) in (list, tuple):
        return _tagged(type(value).__name__, _joined(map(canonical, value)))
    if type(value) in (set, frozenset):
        return _tagged("set", _joined(sorted(map(canonical, value))))
    if isinstance(value, Mapping):
        return _tagged("map", _joined(sorted(canonical(key) + canonical(inner) for key, inner in value.items())))
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    return _tagged("pickle", pickle.dumps(value, protocol=4))


def _tensor(tensor: torch.Tensor) -> bytes:
    if not is_plain(tensor):
        return _tagged("archive", archive(tensor))
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return _tagged(f"tensor {dtype_name(flat.dtype)} {tuple(flat.shape)}", bytes(raw_bytes(flat)))


def _tagged(kind: str, data: bytes) -> bytes:
    return f"{kind} {len(data)}:".encode() + data


def _joined(parts: Iterable[bytes]) -> bytes:
    return b"".join(parts)
