"""``Accelerator.save_state`` and ``load_state`` with steps, through a directory in shared memory."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils.constants import RNG_STATE_NAME

from tieredckpt.checkpointer.checkpointer import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveHandle
from tieredckpt.errors import UsageError

log = logging.getLogger(__name__)


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
            _warn_of_other_processes(accelerator, directory, restored)
            accelerator.load_state(str(directory), **options)
        return restored


def _warn_of_other_processes(accelerator: Accelerator, directory: Path, step: int) -> None:
    """Say what ``load_state`` does not restore if another number of processes saved the step."""
    saved = len(list(directory.glob(f"{RNG_STATE_NAME}_*.pkl")))
    if accelerator.is_main_process and saved != accelerator.num_processes:
        log.warning(
            "step %d was saved by another number of processes: %d, now %d. Model, optimizer and schedule are equal. "
            "Random numbers do not continue, so the losses differ",
            *(step, saved, accelerator.num_processes),
        )


@contextlib.contextmanager
def _temporary_directory(accelerator: Accelerator, ckpt: Checkpointer) -> Iterator[Path]:
    """Yield an empty directory that all processes of a node share, in shared memory if possible.

    Its name is that of the job and of the agent, so that the next process deletes what a killed one left.
    """
    memory = "/dev/shm"  # noqa: S108 - only this user's directory is used
    parent = memory if os.access(memory, os.W_OK) else tempfile.gettempdir()
    agent = zlib.crc32(bytes(ckpt.settings.agent_directory))
    directory = Path(parent) / f"tieredckpt-accelerate-{os.getuid()}-{ckpt.job}-{agent:08x}"
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
