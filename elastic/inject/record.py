"""What has happened of a plan: a file for each, in the job's run directory, so that nothing happens twice.

Whoever makes the file carries the fault out, at once: not even a rank that is started anew does it again. ``elastic
run`` begins without any. Each machine has its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

import msgspec

from elastic.inject.plan import Injection, Phase, Place
from peerstore.decode import from_json

_FOLDER = "injected"
_BEGAN = ".began"


class Injected(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fault that was carried out, as it was about to be."""

    injection: Injection
    at: float
    """Wall-clock seconds."""
    pid: int
    node: str
    phase: Phase | None = None
    """``None``: a supervisor did it, at no particular one."""
    step: int = -1
    rank: int = -1
    local_rank: int = -1
    epoch: int = -1


class Record:
    """Of the job whose run directory this is."""

    def __init__(self, run: Path) -> None:
        self.folder = run / _FOLDER

    def claim(self, told: Injected) -> bool:
        """Whether this process is to carry it out: true for one of all, once."""
        return self._make(told.injection.name, msgspec.json.encode(told))

    def is_done(self, name: str) -> bool:
        return (self.folder / name).exists()

    def done(self) -> list[Injected]:
        """In order. One that is just being written is left out."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    found.append(from_json(path.read_bytes(), Injected))
        return sorted(found, key=lambda one: one.at)

    def began(self) -> float:
        """When the first process of the job looked, by the wall clock."""
        self._make(_BEGAN, b"")
        return (self.folder / _BEGAN).stat().st_mtime

    def forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make(self, name: str, data: bytes) -> bool:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        return True


def told(
    injection: Injection, place: Place, *, phase: Phase | None = None, step: int = -1, epoch: int = -1
) -> Injected:
    """What is about to happen here and now."""
    return Injected(
        injection=injection,
        at=time.time(),
        pid=os.getpid(),
        node=place.node,
        phase=phase,
        step=step,
        rank=place.rank,
        local_rank=place.local_rank,
        epoch=epoch,
    )
