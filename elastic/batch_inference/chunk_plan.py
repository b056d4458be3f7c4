"""Chunks of an input file: consecutive byte ranges made of complete lines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from elastic.errors import JobFailedError, PolicyError


class InputChunk(msgspec.Struct, frozen=True, array_like=True):
    """A byte range of the input, made of complete lines."""

    start: int
    stop: int
    first_line: int
    """Number of the first line in the file, from 1."""
    inputs: int
    """Number of lines that are not blank."""
    digest: str
    """XXH3 of the bytes."""


class ChunkPlan(msgspec.Struct, frozen=True):
    """The chunks of one input for one function. All nodes of a job compute the same plan."""

    function: str
    options: dict[str, object]
    chunk_size: int
    """Inputs per chunk. The last chunk may have fewer."""
    chunks: list[InputChunk]
    resolved: dict[str, object] | None = None
    """Options that the first node has resolved, such as a step. ``None``: use ``options``."""

    @property
    def inputs(self) -> int:
        """Number of inputs of all chunks."""
        return sum(chunk.inputs for chunk in self.chunks)


class InputLine(NamedTuple):
    """A line of the input that is not blank."""

    number: int
    text: bytes


def cut_chunks(lines: Iterable[bytes], chunk_size: int) -> Iterator[InputChunk]:
    """Yield chunks of ``chunk_size`` inputs.

    Blank lines belong to the chunk before them and are not inputs.
    """
    start = stop = 0
    first_line = number = 1
    inputs = 0
    digest = xxhash.xxh3_64()
    for line in lines:
        is_input = bool(line.strip())
        if is_input and inputs == chunk_size:
            yield InputChunk(start, stop, first_line, inputs, digest.hexdigest())
            start, first_line, inputs, digest = stop, number, 0, xxhash.xxh3_64()
        digest.update(line)
        stop += len(line)
        number += 1
        inputs += is_input
    if inputs:
        yield InputChunk(start, stop, first_line, inputs, digest.hexdigest())


def plan_chunks(path: Path, function: str, options: dict[str, object], chunk_size: int) -> ChunkPlan:
    """Read the input once and return its plan.

    Raises :class:`PolicyError` if the file is missing or a folder.
    """
    try:
        with path.open("rb") as file:
            return ChunkPlan(function, options, chunk_size, list(cut_chunks(file, chunk_size)))
    except (FileNotFoundError, IsADirectoryError) as error:
        raise PolicyError(f"Cannot read the input {str(path)!r}: {error.strerror}.") from error


def read_chunk(path: Path, chunk: InputChunk) -> list[InputLine]:
    """Return the inputs of a chunk. Raises :class:`JobFailedError` if its bytes differ from the plan."""
    with path.open("rb") as file:
        file.seek(chunk.start)
        data = file.read(chunk.stop - chunk.start)
    if xxhash.xxh3_64_hexdigest(data) != chunk.digest:
        raise JobFailedError(
            f"The input {str(path)!r} has changed since the job began: bytes {chunk.start} to {chunk.stop} differ. "
            "Restore the file, or start a job with another output."
        )
    # Only b"\n" ends a line: splitlines() would also split at a carriage return.
    numbered = enumerate(data.split(b"\n"), chunk.first_line)
    return [InputLine(number, text) for number, text in numbered if text.strip()]


def changed_part(stored: ChunkPlan, wanted: ChunkPlan) -> str:
    """Return the first difference of two plans in words, or an empty text if they are equal."""
    if stored.function != wanted.function:
        return f"the function was {stored.function!r} and is {wanted.function!r}"
    if stored.options != wanted.options:
        return f"the options were {stored.options} and are {wanted.options}"
    if stored.chunk_size != wanted.chunk_size:
        return f"the chunk size was {stored.chunk_size} and is {wanted.chunk_size}"
    if stored.chunks != wanted.chunks:
        return "the input has other bytes"
    return ""
