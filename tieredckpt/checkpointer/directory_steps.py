"""Directories as steps: files that a framework wrote, saved and restored like any other state."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from peerstore.message_codec import from_json
from tieredckpt.dcp.rank_group import RankGroup
from tieredckpt.errors import CheckpointDamagedError, MismatchError, SaveFailedError, UsageError
from tieredckpt.format.saved_directory import DIRECTORY_ENTRY, ROOT_NAME, check_file_name
from tieredckpt.tensors.state_dict import StateDict

_READ_BYTES = 16 << 20
StoredFiles = Mapping[str, TensorStorageMetadata | BytesStorageMetadata]
T = TypeVar("T")


class FileIdentity(msgspec.Struct, frozen=True, array_like=True):
    """A file as one rank sees it. Two ranks with equal identities see the same file."""

    name: str
    size: int
    modified_ns: int
    inode: int


def list_directory(path: Path) -> list[FileIdentity]:
    """Return all files and directories below ``path`` in order of names; raise for anything else."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory")
    found = [FileIdentity(ROOT_NAME, 0, 0, 0)]
    for entry in _walk(path):
        name = os.path.relpath(entry.path, path)
        try:
            name.encode()
        except UnicodeEncodeError:
            raise UsageError(f"{path}: the name {name!r} is not UTF-8, so the file cannot be saved") from None
        state = entry.stat()
        if stat.S_ISDIR(state.st_mode):
            if entry.is_symlink():
                raise UsageError(f"{entry.path} is a symbolic link to a directory, which a step cannot contain")
            found.append(FileIdentity(f"{name}/", 0, 0, 0))
        elif stat.S_ISREG(state.st_mode):
            found.append(FileIdentity(name, state.st_size, state.st_mtime_ns, state.st_ino))
        else:
            raise UsageError(f"{entry.path} is neither a file nor a directory, and a step can contain nothing else")
    return sorted(found, key=lambda file: file.name)


def _walk(path: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        found = list(entries)
    for entry in found:
        yield entry
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))


class FilesToSave(NamedTuple):
    """Which rank saves each file, and the names that differ between ranks."""

    by_rank: list[list[FileIdentity]]
    differing: dict[str, list[int]]
    """Ranks that see different files of one name: the lowest rank of each file."""


def assign_files(listings: Sequence[Sequence[FileIdentity]]) -> FilesToSave:
    """Assign each name to one of the ranks that see it, so that all ranks save about as many bytes."""
    seen: dict[str, dict[FileIdentity, list[int]]] = {}
    for rank, listing in enumerate(listings):
        for file in listing:
            seen.setdefault(file.name, {}).setdefault(file, []).append(rank)
    by_rank: list[list[FileIdentity]] = [[] for _ in listings]
    load = [0] * len(listings)
    differing: dict[str, list[int]] = {}
    for name, files in sorted(seen.items(), key=lambda item: (-max(file.size for file in item[1]), item[0])):
        if len(files) > 1:
            differing[name] = sorted(ranks[0] for ranks in files.values())
        file, ranks = min(files.items(), key=lambda item: item[1][0])
        chosen = min(ranks, key=lambda rank: (load[rank], rank))
        by_rank[chosen].append(file)
        load[chosen] += file.size
    return FilesToSave(by_rank, differing)


def directory_state(ranks: RankGroup, path: Path) -> StateDict:
    """Return this rank's share of the files below ``path`` as a state, or raise on all ranks.

    The files are listed after all ranks have called, so each rank calls when its own files are complete.
    """
    ranks.all_gather("")
    mine = _on_all(ranks, lambda: list_directory(path))
    encoded = msgspec.json.encode(mine).decode()
    digests = ranks.all_gather(hashlib.sha256(encoded.encode()).hexdigest())
    if len(set(digests)) == 1:
        listings: list[list[FileIdentity]] = [mine] * ranks.size
    else:
        listings = [from_json(text, list[FileIdentity]) for text in ranks.all_gather(encoded)]
    files = assign_files(listings)
    _check_equal(ranks, path, files.differing)
    mine = files.by_rank[ranks.rank]
    return {DIRECTORY_ENTRY: _on_all(ranks, lambda: {file.name: _read_file(path, file) for file in mine})}


def _check_equal(ranks: RankGroup, path: Path, differing: Mapping[str, Collection[int]]) -> None:
    """Raise on all ranks if files of one name have different contents."""
    if not differing:
        return
    mine = _on_all(
        ranks, lambda: {name: _digest(path / name) for name, seen_by in differing.items() if ranks.rank in seen_by}
    )
    answers = [from_json(text, dict[str, str]) for text in ranks.all_gather(msgspec.json.encode(mine).decode())]
    for name in sorted(differing):
        found = {rank: answer[name] for rank, answer in enumerate(answers) if name in answer}
        if len(set(found.values())) > 1:
            first = min(found)
            other = next(rank for rank in sorted(found) if found[rank] != found[first])
            raise UsageError(
                f"{path / name} differs between rank {first} and rank {other}, and a step has one file of each name. "
                "Let ranks write files with different names, or save a directory that all of them share"
            )


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _read_file(path: Path, expected: FileIdentity) -> torch.Tensor:
    """Return the file's bytes; raise :class:`SaveFailedError` if it is not the file that was listed."""
    data = torch.empty(expected.size, dtype=torch.uint8)
    if expected.name.endswith("/"):
        return data
    view, at = data.numpy().data, 0
    with (path / expected.name).open("rb", buffering=0) as file:
        while at < expected.size and (count := file.readinto(view[at:])):
            at += count
        state = os.fstat(file.fileno())
    if at < expected.size or (state.st_size, state.st_mtime_ns) != (expected.size, expected.modified_ns):
        raise SaveFailedError(f"{path / expected.name} changed during the save: save the directory when it is complete")
    return data


class DirectoryRestore:
    """A directory that appears when all ranks have written their share of its files.

    The files are written to a new directory next to it. The rank that could create that one moves it into place.
    """

    def __init__(self, ranks: RankGroup, path: Path, *, overwrite: bool) -> None:
        self._ranks, self._path, self._overwrite = ranks, path, overwrite
        self._members: list[int] = []
        """Ranks that write to the same directory as this one."""
        self._is_leader = False
        token = ranks.all_gather(secrets.token_hex(8))[0]
        self._staging = path.with_name(f".{path.name}.{token}")
        self._files = _RestoredFiles(ranks, self._members)

    def begin(self) -> StateDict:
        """Create the staging directory, and return the state to restore."""
        _on_all(self._ranks, self._create_staging)
        leader = _on_all(self._ranks, lambda: int((self._staging / "leader").read_text()))
        leaders = self._ranks.all_gather(str(leader))
        self._members += [rank for rank, text in enumerate(leaders) if text == str(leader)]
        return {DIRECTORY_ENTRY: self._files}

    def _create_staging(self) -> None:
        if not self._overwrite and self._path.exists() and (not self._path.is_dir() or any(self._path.iterdir())):
            raise UsageError(f"{self._path} exists and is not empty: name another directory, or pass overwrite=True")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._staging.mkdir()
        except FileExistsError:
            return
        self._is_leader = True
        (self._staging / "leader").write_text(str(self._ranks.rank))
        (self._staging / "files").mkdir()

    def finish(self) -> None:
        """Write this rank's files, and move the directory into place once all ranks have."""
        _on_all(self._ranks, lambda: self._files.write_to(self._staging / "files"))
        _on_all(self._ranks, self._move)

    def _move(self) -> None:
        if not self._is_leader:
            return
        if self._overwrite and self._path.exists():
            self._path.rename(self._staging / "replaced")
        (self._staging / "files").rename(self._path)

    def clean_up(self) -> None:
        """Delete the staging directory, and with it the files of a restore that failed."""
        if self._is_leader:
            shutil.rmtree(self._staging, ignore_errors=True)


class _RestoredFiles:
    """This rank's share of a step's files, for a restore."""

    def __init__(self, ranks: RankGroup, members: Sequence[int]) -> None:
        self._ranks, self._members = ranks, members
        self._files: dict[str, Any] = {}

    def before_restore(self, saved: StoredFiles) -> None:
        """Select the files that this rank reads. Ranks with the same directory share them."""
        if ROOT_NAME not in saved:
            raise MismatchError("The step is not a directory: restore it with restore(state)")
        sizes: dict[str, int] = {}
        for name, kind in saved.items():
            if (
                not isinstance(kind, TensorStorageMetadata)
                or kind.properties.dtype != torch.uint8
                or len(kind.size) != 1
            ):
                raise CheckpointDamagedError(f"{name!r} in a saved directory is not a file")
            check_file_name(name)
            sizes[name] = kind.size[0]
        load = [(0, rank) for rank in self._members]
        mine = []
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            least, rank = heapq.heappop(load)
            heapq.heappush(load, (least + sizes[name], rank))
            if rank == self._ranks.rank:
                mine.append(name)
        self._files = {name: torch.empty(sizes[name], dtype=torch.uint8) for name in mine}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._files)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._files = dict(state)

    def write_to(self, directory: Path) -> None:
        for name, data in self._files.items():
            place = directory / name
            if name.endswith("/"):
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("xb", buffering=0) as file:
                view, at = data.numpy().data, 0
                while at < len(view):
                    at += file.write(view[at:])


def _on_all(ranks: RankGroup, call: Callable[[], T]) -> T:
    """Return the result of ``call`` as :meth:`RankGroup.call_on_all` does.

    A directory that cannot be used is the caller's error.
    """

    def checked() -> T:
        try:
            return call()
        except OSError as error:
            raise UsageError(str(error)) from error

    return ranks.call_on_all(checked)


def restore_directory(
    ranks: RankGroup, path: str | os.PathLike[str], restore: Callable[[StateDict], int], *, overwrite: bool
) -> int:
    """Restore a step with ``restore`` into the directory ``path``, and return what ``restore`` returns."""
    target = DirectoryRestore(ranks, Path(path).absolute(), overwrite=overwrite)
    with contextlib.ExitStack() as stack:
        stack.callback(target.clean_up)
        step = restore(target.begin())
        if step >= 0:
            target.finish()
    return step
