"""``Accelerator.save_state`` and ``load_state`` with steps, through a directory in shared memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from tieredckpt.checkpointer.checkpointer import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveHandle
from tieredckpt.errors import UsageError


def save_state(
    accelerator: Accelerator,
    ckpt: Checkpointer,
    step: int,
    *,
    keep: bool = False,
    durable: bool = False,
    **options: Any,
) -> SaveHandle:
    """Save all that ``accelerator.save_state(**options)`` writes as ``step`` of the job of ``ckpt``.

    All processes call this. Training may continue as soon as it returns.
    """
    with _temporary_directory(accelerator, ckpt) as directory:
        written = accelerator.save_state(str(directory), **options)
        return ckpt.save_directory(written, step, keep=keep, durable=durable)


def restore_state(accelerator: Accelerator, ckpt: Checkpointer, step: int | None = None, **options: Any) -> int:
    """Load the newest complete step, or ``step``, with ``accelerator.load_state(**options)``.

    Call it after ``accelerator.prepare``. Return the step, or -1 without a change if nothing was ever saved.
    """
    with _temporary_directory(accelerator, ckpt) as directory:
        restored = ckpt.restore_directory(directory, step)
        if restored >= 0:
            accelerator.load_state(str(directory), **options)
        return restored


@contextlib.contextmanager
def _temporary_directory(accelerator: Accelerator, ckpt: Checkpointer) -> Iterator[Path]:
    """Yield an empty directory that all processes of a node share, in shared memory if possible.

    Its name is the job's, so that the next process deletes what a killed one left.
    """
    memory = "/dev/shm"  # noqa: S108 - only this user's directory is used
    parent = memory if os.access(memory, os.W_OK) else tempfile.gettempdir()
    directory = Path(parent) / f"tieredckpt-accelerate-{os.getuid()}-{ckpt.job}"
    if accelerator.is_local_main_process:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, exist_ok=True)
    accelerator.wait_for_everyone()
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        raise UsageError(f"{directory} belongs to another user: remove it")
    try:
        yield directory
        accelerator.wait_for_everyone()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
