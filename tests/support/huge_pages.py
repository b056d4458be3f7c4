"""Huge pages for the memory that forked processes share.

A fork copies the page table of its parent, and an exit frees it. In huge pages the table is 512 times smaller. The
tests start thousands of processes as forks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

_MADV_COLLAPSE = 25
_PMD_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def collapse_private_memory() -> int:
    """Move this process's private memory to huge pages, and return the number of bytes that were moved.

    The kernel refuses some ranges, and all of them before Linux 6.1.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return sum(size for start, size in _aligned_ranges() if madvise(start, size, _MADV_COLLAPSE) == 0)


def _aligned_ranges() -> Iterator[tuple[int, int]]:
    """Yield start and size of each part of the heap and of anonymous mappings that huge pages can have."""
    if not _PMD_SIZE.exists():
        return
    huge = int(_PMD_SIZE.read_text())
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, mode, _, _, _, *name = line.split(maxsplit=5)
        if mode == "rw-p" and name in ([], ["[heap]"]):
            first, last = (int(one, 16) for one in addresses.split("-"))
            start, end = -(-first // huge) * huge, last // huge * huge
            if start < end:
                yield start, end - start
