"""Checkpoint URLs of the command line, parsed without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from peerstore.errors import InvalidNameError
from peerstore.shard_records import JobName, validate_job_name
from tieredckpt.errors import UsageError
from tieredckpt.location import TIERED_SCHEME, Location, parse_location

_STEP = re.compile(r"step-([0-9]{1,18})")
CHECKPOINT_URL_FORMS = "tiered://JOB[/step-N], a durable URL that ends with JOB[/step-N], or a folder"


@dataclass(frozen=True)
class DurableUrl:
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
class PlainFolder:
    """A plain DCP checkpoint."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


CheckpointUrl = Location | DurableUrl | PlainFolder


def parse_source_url(text: str) -> CheckpointUrl:
    """Return the checkpoint to read.

    A folder with ``.metadata`` is a plain checkpoint. A folder with a job's steps is a durable one.
    """
    if text.startswith(f"{TIERED_SCHEME}:"):
        return parse_location(text)
    path = local_path_of_url(text)
    if path is None:
        return _durable_url(text)
    if not (path / ".metadata").exists():
        if urlsplit(text).scheme:
            return _durable_url(text)
        if _has_job(path):
            return _durable_url(f"file://{path.absolute()}")
    return PlainFolder(path)


def parse_target_url(text: str) -> DurableUrl | PlainFolder:
    """Return the checkpoint to write: a URL means a durable one, a path a plain one."""
    if text.startswith(f"{TIERED_SCHEME}:"):
        raise UsageError(
            f"{text}: memory belongs to the job that runs; write to a durable URL, which every job can load"
        )
    return _durable_url(text) if urlsplit(text).scheme else PlainFolder(Path(text))


def local_path_of_url(text: str) -> Path | None:
    """Return the path of a file URL or a plain path; ``None`` for any other URL."""
    parts = urlsplit(text)
    if not parts.scheme:
        return Path(text)
    return Path(unquote(parts.path)) if parts.scheme == "file" and parts.netloc in ("", "localhost") else None


def _has_job(path: Path) -> bool:
    job = path.parent if _STEP.fullmatch(path.name) else path
    return (job / "manifests").is_dir() or any((step / ".metadata").exists() for step in job.glob("step-*"))


def _durable_url(text: str) -> DurableUrl:
    rest, _, last = text.rstrip("/").rpartition("/")
    match = _STEP.fullmatch(last)
    if match:
        rest, _, last = rest.rpartition("/")
    parts = urlsplit(rest)
    if not parts.scheme or not (parts.netloc or parts.path.strip("/")):
        raise UsageError(f"{text!r} names no job: write {CHECKPOINT_URL_FORMS}")
    try:
        return DurableUrl(rest, Location(validate_job_name(last), int(match[1]) if match else None))
    except InvalidNameError as error:
        raise UsageError(f"{text!r}: {error}") from error
