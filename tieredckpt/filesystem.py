"""``tiered://`` for fsspec: DCP's own file writer and reader work unmodified, without ``enable_urls()``.

Slower than :class:`~tieredckpt.writer.TieredWriter` (DCP pickles every tensor) but nothing has to be changed or called.
"""

from __future__ import annotations

import io
import os
import threading
from typing import TYPE_CHECKING, Any

from fsspec.spec import AbstractFileSystem

if TYPE_CHECKING:
    from tieredckpt.files import FileSpace, Place

_spaces: dict[tuple[int, str], FileSpace] = {}
_lock = threading.Lock()


class TieredFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """``tiered://JOB/step-N/FILE``: jobs hold steps, steps hold files, a step is there when its ``.metadata`` is."""

    protocol = "tiered"
    root_marker = ""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT002
        """Begin a step; a job needs no folder."""
        place = self._place(path)
        if place.step is None:
            return
        if not exist_ok and self.exists(path):
            raise FileExistsError(path)
        _space(place).begin(place.step)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:  # noqa: FBT002
        self.makedirs(path, exist_ok=False)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:  # noqa: FBT002
        place = self._place(path)
        found = self._list(place)
        return found if detail else [info["name"] for info in found]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        place = self._place(path)
        if place.step is None:
            self._list(place)
            return _folder(place.job)
        folder = f"{place.job}/step-{place.step}"
        if not place.name:
            if not _space(place).has_begun(place.step):
                self._files(place)
            return _folder(folder)
        files = self._files(place)
        if place.name not in files:
            raise FileNotFoundError(path)
        return _file(folder, place.name, files[place.name])

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether it is there; a tier that cannot be asked is an error, and not a no."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def rename(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Give a file that this process has just written its final name."""
        old, new = self._place(path1), self._place(path2)
        if (old.job, old.step) != (new.job, new.step) or old.step is None or not old.name or not new.name:
            raise io.UnsupportedOperation(f"{path1} to {path2}: only a file that was just written, within its step")
        _space(old).place(old.step, old.name, new.name)

    mv = rename

    def rm_file(self, path: str) -> None:
        place = self._place(path)
        if place.step is None or not place.name:
            raise io.UnsupportedOperation(f"{path}: only whole steps and files that are being written are removed")
        space = _space(place)
        # What is about to be replaced stays until then, so that the step never is without.
        if not space.drop(place.step, place.name) and not space.is_pending(place.step, place.name):
            raise io.UnsupportedOperation(f"{path}: the files of a step are removed with their step")

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:  # noqa: FBT002
        for one in path if isinstance(path, list) else [path]:
            place = self._place(one)
            if place.name:
                self.rm_file(one)
            elif place.step is None or not recursive:
                raise io.UnsupportedOperation(f"{one}: only whole steps are removed, recursively")
            else:
                _space(place).remove(place.step)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        place = self._place(path)
        if place.step is None or not place.name:
            raise IsADirectoryError(path)
        if mode == "rb":
            from tieredckpt.errors import CheckpointNotFoundError

            try:
                return _space(place).reader(place.step, place.name)
            except CheckpointNotFoundError as error:
                raise FileNotFoundError(str(error)) from error
        if mode in ("wb", "xb"):
            return _space(place).writer(place.step, place.name)
        raise io.UnsupportedOperation(f"{path}: mode {mode!r}; files are read and written as a whole (rb, wb)")

    # -- inside -----------------------------------------------------------------------------------------------

    def _place(self, path: str) -> Place:
        from tieredckpt.files import place_of

        return place_of(str(self._strip_protocol(path)))

    def _list(self, place: Place) -> list[dict[str, Any]]:
        if place.step is None:
            steps = _space(place).steps()
            if not steps:
                raise FileNotFoundError(f"tiered://{place.job} has no step made of files")
            return [_folder(f"{place.job}/step-{step}") for step in steps]
        folder = f"{place.job}/step-{place.step}"
        files = self._files(place)
        if place.name:
            if place.name not in files:
                raise FileNotFoundError(f"tiered://{folder}/{place.name}")
            return [_file(folder, place.name, files[place.name])]
        return [_file(folder, name, size) for name, size in sorted(files.items())]

    def _files(self, place: Place) -> dict[str, int]:
        from tieredckpt.errors import CheckpointNotFoundError

        assert place.step is not None  # noqa: S101 - for the type checker; callers have looked
        try:
            return _space(place).files(place.step)
        except CheckpointNotFoundError as error:
            raise FileNotFoundError(str(error)) from error


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _file(folder: str, name: str, size_bytes: int) -> dict[str, Any]:
    return {"name": f"{folder}/{name}", "size": size_bytes, "type": "file"}


def _space(place: Place) -> FileSpace:
    """One per job and process: fsspec makes a file system for every thread, and a save may use several."""
    from tieredckpt.files import FileSpace

    name = (os.getpid(), place.job)
    with _lock:
        space = _spaces.get(name)
        if space is None:
            space = _spaces[name] = FileSpace(place.job)
        return space
