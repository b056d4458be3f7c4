"""What a simulated operator leaves in a folder: its state, what it last saw, and what people want of it.

::

    /dev/shm/hyperpod-sim-UID/JOB/kept.json   wishes.json   pods.json   pods/NAME/agent.log, logs/   lock
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from elastic.control.runs import write_private
from elastic.errors import ControlLostError, PolicyError, RefusedError
from integration.hyperpod.operator.seen import Situation
from integration.hyperpod.operator.spec import JobSpec
from integration.hyperpod.operator.state import JobState
from peerstore.decode import from_json
from peerstore.names import job_name
from peerstore.server import private_directory

DIRECTORY = "HYPERPOD_SIM_DIRECTORY"


class Kept(msgspec.Struct, frozen=True):
    """Stored before anything is done."""

    spec: JobSpec
    state: JobState
    seen: Situation
    at_s: float


class Wishes(msgspec.Struct, frozen=True):
    """What a cluster would say by itself."""

    capacity: int | None = None
    bad_nodes: dict[str, str] = {}


class SimPlace:
    def __init__(self, job: str, root: Path | None = None) -> None:
        self.root = root or default_root()
        self.job = str(job_name(job))
        self.folder = self.root / self.job
        self._kept, self._wishes = self.folder / "kept.json", self.folder / "wishes.json"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else on this machine operates this job."""
        private_directory(self.root)
        private_directory(self.folder)
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RefusedError(f"job {self.job} has an operator on this machine already") from None
            yield
        finally:
            os.close(fd)

    def keep(self, kept: Kept) -> None:
        write_private(self._kept, msgspec.json.encode(kept))

    def kept(self) -> Kept | None:
        try:
            return from_json(self._kept.read_bytes(), Kept)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as damaged:
            raise ControlLostError(f"{self._kept} cannot be read: {damaged}") from damaged

    def wishes(self) -> Wishes:
        try:
            return from_json(self._wishes.read_bytes(), Wishes)
        except FileNotFoundError:
            return Wishes()
        except (OSError, msgspec.MsgspecError) as damaged:
            raise ControlLostError(f"{self._wishes} cannot be read: {damaged}") from damaged

    def wish(self, wishes: Wishes) -> None:
        write_private(self._wishes, msgspec.json.encode(wishes))

    def forget(self) -> None:
        """The job is over; what its pods printed stays."""
        self._kept.unlink(missing_ok=True)
        self._wishes.unlink(missing_ok=True)


def default_root() -> Path:
    """``$HYPERPOD_SIM_DIRECTORY``, or on the machine's shared memory."""
    named = os.environ.get(DIRECTORY)
    return Path(named) if named else Path("/dev/shm") / f"hyperpod-sim-{os.getuid()}"  # noqa: S108


def the_place(job: str | None) -> SimPlace:
    """The job somebody means who named it, or the only one that is here."""
    root = default_root()
    if job is not None:
        return SimPlace(job, root)
    found = sorted(path.parent.name for path in root.glob("*/kept.json"))
    if not found:
        raise ControlLostError(f"no job is operated on this machine (looked in {root})")
    if len(found) > 1:
        raise PolicyError(f"several jobs are operated on this machine, name one with --job: {', '.join(found)}")
    return SimPlace(found[0], root)
