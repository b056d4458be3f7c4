"""Check of a staged state for NaN and infinity, in the background, in its slot.

Adjacent tensors of one element type are summed in one operation. Only if the sum is not finite (possibly by an
overflow), each tensor is checked. Small floats (float8 and narrower) are not checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from tieredckpt.errors import NonFiniteStateError
from tieredckpt.format.shard_layout import Layout, TensorEntry
from tieredckpt.tensors.plain_tensors import dtype_from_name
from tieredckpt.tensors.slot_copy import MappedSlot

_SUMMED = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
_MAX_NAMES = 3
_CHECKED_ELEMENTS = 1 << 20
"""Elements that are checked one by one in one operation, which takes memory."""


class FiniteChecker:
    """Checks of one job's saves. Infinities at the first save count as intended, such as in masks."""

    def __init__(self) -> None:
        self._intended: frozenset[str] | None = None

    def check(self, memory: MappedSlot, layout: Layout, what: str) -> None:
        """Raise for tensors with NaN, or with new infinities; ``what`` names the step and the rank."""
        found = {entry.fqn: kind for entry, kind in _not_finite(memory, layout)}
        if self._intended is None:
            self._intended = frozenset(name for name, kind in found.items() if kind == "inf")
        wrong = [f"{name} ({kind})" for name, kind in found.items() if kind == "nan" or name not in self._intended]
        if wrong:
            more = f" and {len(wrong) - _MAX_NAMES} more" if len(wrong) > _MAX_NAMES else ""
            raise NonFiniteStateError(
                f"{what}: not finite: {', '.join(wrong[:_MAX_NAMES])}{more}. It is not saved, and the last finite "
                "step stays the newest: restore that. If these values are intended, set memory.nonfinite=save "
                "(TIEREDCKPT_MEMORY_NONFINITE)"
            )


def _not_finite(memory: MappedSlot, layout: Layout) -> Iterator[tuple[TensorEntry, str]]:
    header = layout.header_bytes
    for dtype, entries in _runs(layout.tensors):
        start, end = entries[0].start, entries[-1].start + entries[-1].size_bytes
        if not _sum_is_infinite(memory.tensor(header + start, dtype, ((end - start) // dtype.itemsize,))):
            continue
        for entry in entries:
            one = memory.tensor(header + entry.start, dtype, (entry.size_bytes // dtype.itemsize,))
            if _sum_is_infinite(one):
                kinds = {kind for part in one.split(_CHECKED_ELEMENTS) if (kind := _kind(part))}
                if kinds:
                    yield entry, "nan" if "nan" in kinds else "inf"


def _runs(tensors: Sequence[TensorEntry]) -> Iterator[tuple[torch.dtype, list[TensorEntry]]]:
    """Yield runs of adjacent tensors of one type."""
    for name, group in itertools.groupby(tensors, key=lambda entry: entry.dtype):
        if name not in _SUMMED:
            continue
        run: list[TensorEntry] = []
        for entry in group:
            if run and entry.start != run[-1].start + run[-1].size_bytes:
                yield dtype_from_name(name), run
                run = []
            run.append(entry)
        yield dtype_from_name(name), run


def _sum_is_infinite(tensor: torch.Tensor) -> bool:
    """Return whether the sum of the elements is not finite."""
    return not bool(tensor.sum(dtype=torch.float32 if tensor.dtype.itemsize == 2 else None).isfinite())


def _kind(tensor: torch.Tensor) -> str:
    if bool(tensor.isnan().any()):
        return "nan"
    return "inf" if bool(tensor.isinf().any()) else ""
