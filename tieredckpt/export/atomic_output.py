"""Files and folders that appear completely or not at all. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from tieredckpt.errors import UsageError

_EXPORTED = re.compile(
    r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors|model\.safetensors\.index\.json|\.metadata|__[0-9_]+\.distcp"
)


@contextlib.contextmanager
def atomic_file(path: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary path and rename it to ``path`` after the block. After an error it is deleted."""
    if path.is_dir():
        raise UsageError(f"{path} is a directory; name a file in it")
    if path.exists() and not force:
        raise UsageError(f"{path} exists; --force replaces it")
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{secrets.token_hex(6)}.partial")
    try:
        yield staged
        _sync(staged)
        staged.replace(path)
        _sync(path.parent)
    finally:
        staged.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """Yield a temporary folder and rename it to ``path`` after the block. After an error it is deleted."""
    check_export_folder(path, force=force)
    path.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(6)
    staged = path.with_name(f".{path.name}.{token}.partial")
    staged.mkdir()
    try:
        yield staged
        for file in staged.iterdir():
            _sync(file)
        _sync(staged)
        old = path.with_name(f".{path.name}.{token}.old")
        if path.exists():
            path.rename(old)
        staged.rename(path)
        _sync(path.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def check_export_folder(path: Path, *, force: bool) -> None:
    """Raise :class:`UsageError` unless ``path`` can be replaced.

    Without ``force`` it must be empty or missing. With ``force`` it may hold files of an earlier export.
    """
    if not path.exists():
        return
    if not path.is_dir():
        raise UsageError(f"{path} is a file; name a folder")
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return
    if not force:
        raise UsageError(f"{path} is not empty; --force replaces what an earlier export left there")
    strange = [name for name in names if not _EXPORTED.fullmatch(name)]
    if strange:
        raise UsageError(
            f"{path} holds more than an export ({', '.join(strange[:3])}), so --force does not replace it: remove it "
            "yourself or choose another folder"
        )


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_M_MMAP_THRESHOLD = -3  # of glibc's mallopt


def return_freed_memory_to_os() -> None:
    """Set glibc to return large buffers to the system when they are freed.

    By default it retains and fragments them.
    """
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
