"""The checksum that goes with every part to S3."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from typing import Literal, Protocol

from typing_extensions import Buffer

Checksum = Literal["crc32", "md5", "none"]
"""CRC-32 is fast and S3 checks it; some stores that speak like S3 check nothing but Content-MD5."""


class _Crc32(Protocol):
    def __call__(self, data: Buffer, value: int = 0, /) -> int: ...


@cache
def _crc32() -> _Crc32:
    try:
        from isal.isal_zlib import crc32
    except ImportError:
        from zlib import crc32
    return crc32


def digest(data: Buffer, kind: Checksum) -> str:
    """In base64, as the headers have it."""
    if kind == "crc32":
        return base64.b64encode(_crc32()(data).to_bytes(4, "big")).decode()
    if kind == "md5":
        return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
    return ""
