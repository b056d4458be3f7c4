"""Lines of JSON by their number, over any number of files; found once, read when they are needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from integration.finetune.errors import DataError

_ENDINGS = (".jsonl", ".json", ".ndjson")
_PIECE = 1 << 24


class _File(NamedTuple):
    path: str
    starts: np.ndarray
    """Where each line that is not blank begins, and at the end where the file ends."""
    numbers: np.ndarray
    """Which line of the file each is, from 1."""


class Corpus:
    """All samples of some files, in the order of the files' names and of their lines. Can be pickled."""

    def __init__(self, files: Iterable[Path]) -> None:
        digest = xxhash.xxh3_128()
        self._files = [_scanned(path, digest) for path in files]
        self._ends = np.cumsum([len(file.numbers) for file in self._files])
        self.digest = digest.hexdigest()
        """Of all bytes."""
        if not len(self):
            raise DataError(f"there is not a single line in {', '.join(file.path for file in self._files)}")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """The line's object; or :class:`DataError` that names the line."""
        file, place = self._find(index)
        start, end = int(file.starts[place]), int(file.starts[place + 1])
        with Path(file.path).open("rb") as opened:
            opened.seek(start)
            line = opened.read(end - start)
        try:
            found = json.loads(line.split(b"\n", 1)[0])
        except ValueError as error:
            raise DataError(f"{self.where(index)} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise DataError(f'{self.where(index)} is no object: write {{"text": ...}}, a line for each sample')
        return found

    def where(self, index: int) -> str:
        """``data.jsonl:12``: for people."""
        file, place = self._find(index)
        return f"{file.path}:{int(file.numbers[place])}"

    def firsts(self) -> list[int]:
        """The first sample of each file."""
        return [int(end) - len(file.numbers) for file, end in zip(self._files, self._ends, strict=True)]

    def _find(self, index: int) -> tuple[_File, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index} of {len(self)}")
        which = int(np.searchsorted(self._ends, index, side="right"))
        file = self._files[which]
        return file, index - int(self._ends[which]) + len(file.numbers)


def open_corpus(places: Iterable[str]) -> Corpus:
    """Files, and of folders every file of JSON lines in them."""
    files: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            inside = sorted(path for path in place.rglob("*") if path.suffix in _ENDINGS and path.is_file())
            if not inside:
                raise DataError(f"folder {place} has no file of JSON lines ({', '.join(_ENDINGS)})")
            files += inside
        elif place.is_file():
            files.append(place)
        else:
            raise DataError(f"there is no file or folder {place}")
    if not files:
        raise DataError("say where the data is: --data FILE or FOLDER")
    return Corpus(files)


def _scanned(path: Path, digest: Any) -> _File:
    starts: list[int] = []
    numbers: list[int] = []
    at = 0
    try:
        with path.open("rb", buffering=_PIECE) as opened:
            for number, line in enumerate(opened, start=1):
                digest.update(line)
                if line.strip():
                    starts.append(at)
                    numbers.append(number)
                at += len(line)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    # A blank line after a sample is read with it, and does not matter to it.
    return _File(str(path), np.array([*starts, at], np.int64), np.array(numbers, np.int64))
