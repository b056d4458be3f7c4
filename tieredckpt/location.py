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
    """Epoch of the incarnation that saved the step; ``None``: the newest."""
    cast: bool = False
    """To be loaded into tensors of other element types than were saved (``?cast=1``)."""

    def __str__(self) -> str:
        branch = "" if self.epoch is None else f"@{self.epoch}"
        return f"{TIERED_SCHEME}://{self.job}" + ("" if self.step is None else f"/step-{self.step}{branch}")

    def includes(self, version_id: VersionId) -> bool:
        """Return whether this location names ``version_id``, alone or among others."""
        return self.step in (None, version_id.version) and self.epoch in (None, version_id.epoch)


def parse_location(target: str | os.PathLike[str]) -> Location:
    """The job and step ``target`` names; a bare job name is fine too."""
    text = os.fspath(target) if isinstance(target, str | os.PathLike) else target
    if not isinstance(text, str):
        raise UsageError(
            f"{target!r} is not a checkpoint location: write {TIERED_SCHEME}://JOB or {TIERED_SCHEME}://JOB/step-N"
        )
    scheme, separator, rest = text.partition("://")
    if not separator:
        # Path("tiered://job") has lost one slash
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
    """Return the step and the epoch that ``STEP`` or ``STEP@EPOCH`` names; the epoch is ``None`` if it names none."""
    match = _STEP.fullmatch(f"step-{text}")
    if match is None:
        raise UsageError(f"{text!r} is not a step: write STEP or STEP@EPOCH, as `tieredckpt ls JOB` shows them")
    return int(match[1]), None if match[2] is None else int(match[2])


def check_step(step: int) -> int:
    """A training step: an integer from 0 on."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 1 << 62:
        raise UsageError(f"step {step!r} is not a training step: an integer from 0 on")
    return step


def reject_local_tiered_folder() -> None:
    """Refuse to go on where something has taken a URL for a path: it writes to a local folder ``tiered:``."""
    if Path(f"{TIERED_SCHEME}:").is_dir():
        raise UsageError(
            f"there is a local folder {TIERED_SCHEME}: in {Path.cwd()}: something (a framework, pathlib, os.path) "
            f"has taken "
            f"{TIERED_SCHEME}://... for a path and makes there what is meant for the store. Look what it is, move it "
            f"away, "
            "and pass the URL as a string to what understands it (docs/how-to/urls.md)"
        )


def location_at_step(location: Location, step: int | None) -> Location:
    """``location`` with its step named, unless it names another one already."""
    if step is None:
        return location
    check_step(step)
    if location.step not in (None, step):
        raise UsageError(f"{location} and step={step} name different steps")
    return dataclasses.replace(location, step=step)


def location_for_checkpoint_id(checkpoint_id: str | os.PathLike[str], location: Location, step: int | None) -> Location:
    """What ``checkpoint_id`` names. Where it names no step, the writer or reader keeps the one that it was given."""
    given = parse_location(checkpoint_id)
    if given.step is not None:
        return given
    if given.job != location.job:
        return dataclasses.replace(given, step=step)
    return dataclasses.replace(given, step=location.step if step is None else step, epoch=location.epoch)
