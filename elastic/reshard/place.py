"""Where a checkpoint is, or is to be, as the command line writes it. Only files of this machine are looked at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from peerstore.errors import InvalidNameError
from peerstore.names import JobName, job_name
from tieredckpt.errors import UsageError
from tieredckpt.location import SCHEME, Location, parse_location

_STEP = re.compile(r"step-([0-9]{1,18})")
FORMS = "tiered://JOB[/step-N], a durable URL that ends with JOB[/step-N], or a folder"


@dataclass(frozen=True)
class Stored:
    """A job's step below a durable URL."""

    url: str
    location: Location

    @property
    def job(self) -> JobName:
        return self.location.job

    def __str__(self) -> str:
        step = self.location.step
        return f"{self.url}/{self.job}" + ("" if step is None else f"/step-{step}")


@dataclass(frozen=True)
class Folder:
    """A plain DCP checkpoint."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Place = Location | Stored | Folder


def parse_source(text: str) -> Place:
    """A checkpoint to read. A folder with ``.metadata`` in it is a plain one, one that holds a job's steps is not."""
    if text.startswith(f"{SCHEME}:"):
        return parse_location(text)
    path = local_path(text)
    if path is None:
        return _stored(text)
    if not (path / ".metadata").exists():
        if urlsplit(text).scheme:
            return _stored(text)
        if _has_job(path):
            return _stored(f"file://{path.absolute()}")
    return Folder(path)


def parse_target(text: str) -> Stored | Folder:
    """A checkpoint to write: a URL is a durable one, a path a plain one."""
    if text.startswith(f"{SCHEME}:"):
        raise UsageError(
            f"{text}: memory belongs to the job that runs; write to a durable URL, which every job can load"
        )
    return _stored(text) if urlsplit(text).scheme else Folder(Path(text))


def local_path(text: str) -> Path | None:
    """The path of a file URL or of no URL at all."""
    parts = urlsplit(text)
    if not parts.scheme:
        return Path(text)
    return Path(unquote(parts.path)) if parts.scheme == "file" and parts.netloc in ("", "localhost") else None


def _has_job(path: Path) -> bool:
    job = path.parent if _STEP.fullmatch(path.name) else path
    return (job / "manifests").is_dir() or any((step / ".metadata").exists() for step in job.glob("step-*"))


def _stored(text: str) -> Stored:
    rest, _, last = text.rstrip("/").rpartition("/")
    match = _STEP.fullmatch(last)
    if match:
        rest, _, last = rest.rpartition("/")
    parts = urlsplit(rest)
    if not parts.scheme or not (parts.netloc or parts.path.strip("/")):
        raise UsageError(f"{text!r} names no job: write {FORMS}")
    try:
        return Stored(rest, Location(job_name(last), int(match[1]) if match else None))
    except InvalidNameError as error:
        raise UsageError(f"{text!r}: {error}") from error
