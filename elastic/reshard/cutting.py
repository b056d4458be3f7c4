"""Which rank of a new world gets what: boxes of tensors, and objects. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from elastic.reshard.forms import Form, disjoint
from tieredckpt.boxes import Box, whole
from tieredckpt.errors import MismatchError, UsageError

LayoutName = Literal["fsdp", "whole"]
MOST_RANKS = 1 << 16


class Slice(NamedTuple):
    name: str
    box: Box


@dataclass(frozen=True)
class Cut:
    """What each part of the new checkpoint holds."""

    parts: tuple[tuple[Slice, ...], ...]
    objects: int = 0
    """The part with the objects."""


def fsdp(forms: Mapping[str, Form], ranks: int) -> Cut:
    """Each tensor along its first axis, as ``fully_shard`` cuts it: a rank of such a world reads one part alone.

    What has no first axis goes where there is the least so far.
    """
    parts: list[list[Slice]] = [[] for _ in range(_checked(ranks))]
    loads = [0] * ranks
    undivided = []
    for name, form in forms.items():
        box = whole(form.shape)
        if not form.shape or not box.volume:
            undivided.append(name)
            continue
        size = -(-form.shape[0] // ranks)
        for rank in range(-(-form.shape[0] // size)):
            rows = min(size, form.shape[0] - rank * size)
            piece = Box((rank * size, *box.offsets[1:]), (rows, *box.sizes[1:]))
            parts[rank].append(Slice(name, piece))
            loads[rank] += piece.volume * form.itemsize
    _spread({name: forms[name] for name in undivided}, parts, loads)
    return Cut(tuple(map(tuple, parts)))


def undivided(forms: Mapping[str, Form], ranks: int) -> Cut:
    """No tensor is cut (as DDP saves them); the largest first, each to the part with the least so far."""
    parts: list[list[Slice]] = [[] for _ in range(_checked(ranks))]
    _spread(forms, parts, [0] * ranks)
    return Cut(tuple(map(tuple, parts)))


def like(forms: Mapping[str, Form], other: Mapping[str, Form], ranks: int) -> Cut:
    """The boxes, in the parts, that another checkpoint of the same tensors has."""
    missing, strange = sorted(other.keys() - forms.keys()), sorted(forms.keys() - other.keys())
    if missing or strange:
        raise MismatchError(
            f"the checkpoint to be like has other tensors: {len(strange)} are not in it ({', '.join(strange[:3])}), "
            f"{len(missing)} are only in it ({', '.join(missing[:3])})"
        )
    parts: list[list[Slice]] = [[] for _ in range(_checked(ranks))]
    for name, form in forms.items():
        model = other[name]
        if model.shape != form.shape:
            raise MismatchError(f"{name} is {form.shape} here and {model.shape} in the checkpoint to be like")
        owner = {box: part for part, box in reversed(model.pieces)}
        for box in disjoint(name, model):
            part = owner.get(box)
            if part is None:  # its pieces overlap: whoever has all of this one
                part = next(p for p, stored in model.pieces if _inside(box, stored))
            parts[part].append(Slice(name, box))
        if not whole(form.shape).volume:
            parts[model.pieces[0][0]].append(Slice(name, whole(form.shape)))
    return Cut(tuple(map(tuple, parts)))


def _spread(forms: Mapping[str, Form], parts: Sequence[list[Slice]], loads: list[int]) -> None:
    for name in sorted(forms, key=lambda name: (-forms[name].size_bytes, name)):
        rank = loads.index(min(loads))
        parts[rank].append(Slice(name, whole(forms[name].shape)))
        loads[rank] += max(1, forms[name].size_bytes)


def _inside(box: Box, outer: Box) -> bool:
    axes = zip(box.offsets, box.sizes, outer.offsets, outer.sizes, strict=True)
    return all(o <= b and b + n <= o + m for b, n, o, m in axes)


def _checked(ranks: int) -> int:
    if not 1 <= ranks <= MOST_RANKS:
        raise UsageError(f"{ranks} ranks: from 1 to {MOST_RANKS}")
    return ranks
