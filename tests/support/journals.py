"""Journals for tests: in this process, and in files that outlive it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote


class DictJournal:
    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self.entries.get(name)

    def put(self, name: str, data: bytes) -> None:
        self.entries[name] = data

    def remove(self, name: str) -> None:
        self.entries.pop(name, None)


class FileJournal:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)

    def get(self, name: str) -> bytes | None:
        path = self._path(name)
        return path.read_bytes() if path.exists() else None

    def put(self, name: str, data: bytes) -> None:
        staged = self._path(name).with_suffix(".new")
        staged.write_bytes(data)
        staged.replace(self._path(name))

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._directory / f"{quote(name, safe='')}.json"
