"""Safetensors files, written tensor by tensor: the header follows from names, types and shapes alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tieredckpt.boxes import whole
from tieredckpt.dtypes import SAFETENSORS_NAMES
from tieredckpt.errors import UsageError
from tieredckpt.export.source import StepSource, raw_bytes

INDEX = "model.safetensors.index.json"
_SHOWN = 8


@dataclass(frozen=True)
class Stored:
    """One tensor of the file to be."""

    source: str
    """Its name in the checkpoint."""
    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


def tensors_for(source: StepSource, names: Mapping[str, str]) -> list[Stored]:
    """The tensors of ``names`` in file order; refuses what the format cannot hold, naming all of it."""
    found = []
    for name, shown in names.items():
        if name in source.step.tensors:
            entry = source.entry(name)
            size = whole(entry.shape).volume * entry.itemsize
            found.append(Stored(name, shown, entry.dtype, entry.shape, size))
    _check(source, found)
    # The widest types first keeps every tensor aligned to its own elements.
    width = {one.source: source.entry(one.source).itemsize for one in found}
    return sorted(found, key=lambda one: (-width[one.source], one.name))


def _check(source: StepSource, tensors: Sequence[Stored]) -> None:
    strange = [f"{one.source} ({one.dtype})" for one in tensors if one.dtype not in SAFETENSORS_NAMES]
    strange += [
        f"{one.source} (not a plain tensor)"
        for one in tensors
        if one.dtype in SAFETENSORS_NAMES and any(place.item >= 0 for place in source.step.tensors[one.source])
    ]
    if strange:
        more = f" and {len(strange) - _SHOWN} more" if len(strange) > _SHOWN else ""
        raise UsageError(
            f"safetensors has no type for {', '.join(strange[:_SHOWN])}{more}: use --format torch or dcp, or leave "
            "them out with --exclude"
        )
    if not tensors:
        raise UsageError("none of the selected names is a tensor, and safetensors holds nothing else")


def header_of(tensors: Sequence[Stored]) -> bytes:
    """Length and JSON, padded so that data starts at a multiple of 8."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for one in tensors:
        fields[one.name] = {
            "dtype": SAFETENSORS_NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [at, at + one.size_bytes],
        }
        at += one.size_bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def write_file(path: Path, source: StepSource, tensors: Sequence[Stored], advance: Callable[[int], None]) -> None:
    with path.open("xb") as file:
        file.write(header_of(tensors))
        for one in tensors:
            file.write(raw_bytes(source.tensor(one.source)))
            advance(one.size_bytes)


def split(tensors: Sequence[Stored], most_bytes: int) -> list[list[Stored]]:
    """Files of at most ``most_bytes``, in order of names; a larger tensor has one to itself."""
    files: list[list[Stored]] = []
    size = 0
    for one in sorted(tensors, key=lambda one: one.name):
        if not files or size + one.size_bytes > most_bytes:
            files.append([])
            size = 0
        files[-1].append(one)
        size += one.size_bytes
    return files


def write_folder(
    folder: Path, source: StepSource, tensors: Sequence[Stored], most_bytes: int, advance: Callable[[int], None]
) -> int:
    """What ``from_pretrained`` reads: one file, or several and their index. Returns how many files hold tensors."""
    order = {one.name: number for number, one in enumerate(tensors)}
    files = split(tensors, most_bytes)
    if len(files) == 1:
        write_file(folder / "model.safetensors", source, tensors, advance)
        return 1
    where = {}
    for number, group in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_file(folder / name, source, sorted(group, key=lambda one: order[one.name]), advance)
        where.update({one.name: name for one in group})
    total = sum(one.size_bytes for one in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": {name: where[name] for name in sorted(where)}}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return len(files)
