"""Checkpoint locations: ``tiered://JOB/step-N``."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from pathlib import Path

from peerstore.errors import InvalidNameError
from peerstore.shard_records import JobName, VersionId, validate_job_name
from tieredckpt.errors import UsageError

TIERED_SCHEME = "tiered"
_STEP = re.compile(r"step-([0-9]{1,18})(?:@([0-9]{1,18}))?")


@dataclass(frozen=True)
class Location:
    job: JobName
    step: int | None = None
    epoch: int | None = None
    """Epoch of the incarnation that saved the step. ``None``: the newest one."""
    cast: bool = False
    """Whether tensors of other element types than the saved ones may be filled (``?cast=1``)."""

    def __str__(self) -> str:
        branch = "" if self.epoch is None else f"@{self.epoch}"
        return f"{TIERED_SCHEME}://{self.job}" + ("" if self.step is None else f"/step-{self.step}{branch}")

    def includes(self, version_id: VersionId) -> bool:
        """Return whether ``version_id`` matches the step and epoch of this location. The job is not compared."""
        return self.step in (None, version_id.version) and self.epoch in (None, version_id.epoch)


def parse_location(target: str | os.PathLike[str]) -> Location:
    """Return the location of a URL or bare job name, with an optional step and epoch."""
    text = os.fspath(target) if isinstance(target, str | os.PathLike) else target
    if not isinstance(text, str):
        raise UsageError(
            f"{target!r} is not a checkpoint location: write {TIERED_SCHEME}://JOB or {TIERED_SCHEME}://JOB/step-N"
        )
    scheme, separator, rest = text.partition("://")
    if not separator:
        # pathlib turns "tiered://job" into "tiered:/job"
        rest = text.removeprefix(f"{TIERED_SCHEME}:/") if text.startswith(f"{TIERED_SCHEME}:/") else text
    elif scheme != TIERED_SCHEME:
        raise UsageError(
            f"{text!r} is not a checkpoint location: write {TIERED_SCHEME}://JOB or {TIERED_SCHEME}://JOB/step-N"
        )
    rest, _, query = rest.partition("?")
    job, _, step = rest.rstrip("/").partition("/")
    match = _STEP.fullmatch(step) if step else None
    if step and match is None:
        raise UsageError(f"{text!r}: after the job comes nothing, step-N or step-N@EPOCH, not {step!r}")
    try:
        number, epoch = (match[1], match[2]) if match else (None, None)
        return Location(
            validate_job_name(job),
            None if number is None else int(number),
            None if epoch is None else int(epoch),
            _wants_cast(text, query),
        )
    except InvalidNameError as error:
        raise UsageError(f"{text!r}: {error}") from error


def _wants_cast(text: str, query: str) -> bool:
    if not query:
        return False
    name, _, value = query.partition("=")
    if name != "cast" or value not in ("1", "0"):
        raise UsageError(f"{text!r}: after ? comes cast=1 (load into tensors of other types) or cast=0, not {query!r}")
    return value == "1"


def parse_step(text: str) -> tuple[int, int | None]:
    """Return the step and epoch of ``STEP`` or ``STEP@EPOCH``. Without an epoch the second is ``None``."""
    match = _STEP.fullmatch(f"step-{text}")
    if match is None:
        raise UsageError(f"{text!r} is not a step: write STEP or STEP@EPOCH, as `tieredckpt ls JOB` shows them")
    return int(match[1]), None if match[2] is None else int(match[2])


def check_step(step: int) -> int:
    """Return ``step``, or raise :class:`UsageError` unless it is an integer from 0 to 2**62 - 1."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 62:
        raise UsageError(f"step {step!r} is not a training step: pass an integer from 0 to 2**62 - 1")
    return step


def reject_local_tiered_folder() -> None:
    """Raise :class:`UsageError` if the working directory has a folder ``tiered:``.

    Such a folder means that some code used a URL as a path.
    """
    if Path(f"{TIERED_SCHEME}:").is_dir():
        raise UsageError(
            f"there is a local folder {TIERED_SCHEME}: in {Path.cwd()}: some code (a framework, pathlib, os.path) "
            f"has used {TIERED_SCHEME}://... as a path. Move the folder away, and pass the URL as a string to code "
            "that accepts URLs (docs/tutorials/framework.md)"
        )


def location_at_step(location: Location, step: int | None) -> Location:
    """Return ``location`` with its step set to ``step``.

    ``None`` leaves it. Raise if the two name different steps.
    """
    if step is None:
        return location
    check_step(step)
    if location.step not in (None, step):
        raise UsageError(f"{location} and step={step} name different steps")
    return dataclasses.replace(location, step=step)


def location_for_checkpoint_id(checkpoint_id: str | os.PathLike[str], location: Location, step: int | None) -> Location:
    """Return the location that ``checkpoint_id`` names.

    If it names no step, ``step`` is used. For the same job, the step and epoch of ``location`` are the default.
    """
    parsed = parse_location(checkpoint_id)
    if parsed.step is not None:
        return parsed
    if parsed.job != location.job:
        return dataclasses.replace(parsed, step=step)
    return dataclasses.replace(parsed, step=location.step if step is None else step, epoch=location.epoch)
