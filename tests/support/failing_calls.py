"""System calls that fail for a while, as on a node without free descriptors or memory."""

from __future__ import annotations

import _pyio
import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

UNKNOWN = (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.EINTR, errno.EACCES)
"""Errors that imply nothing about a file's contents."""


@contextlib.contextmanager
def failing_os_call(call: str, code: int, *, below: str) -> Iterator[list[int]]:
    """Make ``os.call`` fail for files below a path; yield a list that grows with every failure."""
    real, failed = getattr(os, call), []

    def wrapper(first: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            path = Path(f"/proc/self/fd/{first}").readlink() if isinstance(first, int) else first
        except OSError:
            path = ""
        if str(path).startswith(below):
            failed.append(code)
            raise OSError(code, os.strerror(code), str(path))
        return real(first, *args, **kwargs)

    with mock.patch.object(os, call, wrapper), mock.patch.object(io, "open", _pyio.open):  # opens files through ``os``
        yield failed
