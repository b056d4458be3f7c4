"""A local job's run directory: the coordinator's address, secret and lock.

::

    /dev/shm/elastic-UID/JOB/run.json   secret   peer-secret   lock   NODE/rank.sock
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from elastic.errors import ControlPlaneRefusedError, ControlPlaneUnavailableError, JobNotFoundError, PolicyError
from peerstore.daemon_process import trusted_users
from peerstore.errors import PeerStoreError
from peerstore.message_codec import from_json
from peerstore.server.store_server import ensure_private_directory
from peerstore.shard_records import JobName, validate_job_name
from peerstore.suggestions import did_you_mean
from peerstore.transport.authentication import generate_secret, read_secret

_LONGEST_SOCKET = 100
_MOST_BYTES = 1 << 20
_SETTING = "$ELASTIC_RUN_DIRECTORY"
_PEER_SECRET_PURPOSE = b"tieredckpt peer secret 1"


class LocalRun(msgspec.Struct, frozen=True):
    """A job that runs here."""

    job: str
    coordinator: str
    secret_file: str
    nproc: int
    spares: int
    command: tuple[str, ...]
    working_directory: str
    """Where the command is run."""
    logs: str
    grace_s: float
    event_log: str = ""
    generated_secret: bool = False
    """Whether this run generated its secret: the next run has another one."""


class LastRun(msgspec.Struct, frozen=True):
    """The end of a job's newest run on this machine."""

    job: str
    how: str
    """``finished``, ``stopped``, ``job failed`` or another word for it."""
    ended_at: float
    """Seconds since 1970."""
    command: str


class RunDirectory:
    """A job's own directory below the directory of all runs."""

    def __init__(self, root: Path, job: str) -> None:
        self.root = root
        self.job: JobName = validate_job_name(job)
        self.directory = root / self.job
        self.file = self.directory / "run.json"
        self.secret_file = self.directory / "secret"
        self.peer_secret_file = self.directory / "peer-secret"
        self.address_file = self.directory / "address"
        self.epoch_file = self.directory / "epoch"
        """Of a coordinator that is started alone."""
        self.end_file = self.directory / "end_message"
        """How the job ended, as the coordinator wrote it."""
        self.last_run_file = self.directory / "last_run.json"

    def node_directory(self, name: str) -> Path:
        """A node's directory; its socket must not have too long a name for the kernel."""
        path = self.directory / name
        if len(os.fsencode(path / "rank.sock")) > _LONGEST_SOCKET:
            raise PolicyError(
                f"{path}/rank.sock is too long a name for a socket: shorten the names of the job and the node, or set "
                "$ELASTIC_RUN_DIRECTORY to a shorter path"
            )
        return path

    def prepare(self) -> None:
        ensure_private_directory(self.root)
        ensure_private_directory(self.directory)

    @contextlib.contextmanager
    def locked(self, name: str = "lock") -> Iterator[None]:
        """Nobody else on this machine is this; the kernel lets go when this process ends."""
        self.prepare()
        fd = os.open(self.directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                what = f"job {self.job}" if name == "lock" else f"node {name.removesuffix('.lock')} of job {self.job}"
                raise ControlPlaneRefusedError(f"{what} runs on this machine already") from None
            yield
        finally:
            os.close(fd)

    def write_secret(self, secret: bytes | None, node: str = "") -> Path:
        """The file with the job's secret, as whoever leads it here knows it, or as a ``node`` does.

        A new one is made where none is given.
        """
        self.prepare()
        path = self.directory / f"{node}.secret" if node else self.secret_file
        write_private_file(path, secret or generate_secret())
        return path

    def write_peer_secret(self, secret: bytes, *, keep: bool = False) -> Path:
        """Write the secret of the job's agents, derived from the control secret, and return its file.

        With ``keep``, the file of an earlier run stays: agents of stopped nodes prove the secret that it has.
        """
        if keep:
            with contextlib.suppress(PeerStoreError):
                read_secret(self.peer_secret_file)
                return self.peer_secret_file
        write_private_file(self.peer_secret_file, derive_peer_secret(secret, self.job))
        return self.peer_secret_file

    def write(self, run: LocalRun) -> None:
        write_private_file(self.file, msgspec.json.encode(run))

    def end_record(self) -> bytes:
        """Return what the coordinator wrote about the end of the job; empty if it finished."""
        with contextlib.suppress(OSError):
            return _read(self.end_file)
        return b""

    def write_last_run(self, last: LastRun) -> None:
        with contextlib.suppress(OSError):  # only `elastic status` reads it
            write_private_file(self.last_run_file, msgspec.json.encode(last))

    def remove(self) -> None:
        for path in (self.file, self.secret_file, self.address_file, self.end_file):
            with contextlib.suppress(PermissionError):  # the job may have succeeded all the same
                path.unlink(missing_ok=True)

    def read(self) -> LocalRun:
        """Only where nobody but this user can have written it: it says which files are secrets, and what is asked."""
        try:
            for folder in (self.root, self.directory):
                trusted_users(folder, setting=_SETTING)
            return from_json(_read(self.file), LocalRun)
        except FileNotFoundError:
            raise JobNotFoundError(describe_no_job(self.root, self.job)) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise ControlPlaneUnavailableError(f"{self.file} cannot be read: {error}") from error


def list_runs(root: Path) -> list[LocalRun]:
    """All jobs that were started on this machine by this user, and have not been ended."""
    found = []
    try:
        trusted_users(root, setting=_SETTING)
    except FileNotFoundError:
        return []
    except PermissionError as error:
        raise ControlPlaneUnavailableError(str(error)) from None
    for path in sorted(root.glob("*/run.json")):
        with contextlib.suppress(ControlPlaneUnavailableError, PeerStoreError):
            found.append(RunDirectory(root, path.parent.name).read())
    return found


def newest_last_run(root: Path, job: str | None = None) -> LastRun | None:
    """Return the run that ended last on this machine, of one job or of any; ``None`` if none is known."""
    found = []
    for path in root.glob(f"{job or '*'}/last_run.json"):
        with contextlib.suppress(OSError, PeerStoreError, msgspec.MsgspecError):
            found.append(from_json(_read(path), LastRun))
    return max(found, key=lambda last: last.ended_at, default=None)


def describe_no_job(root: Path, job: str | None = None) -> str:
    """Say that no job runs on this machine, and which one ended last."""
    what = "no job runs" if job is None else f"job {job!r} does not run"
    said = f"{what} on this machine (looked in {root})"
    if job is not None and (meant := did_you_mean(job, (run.job for run in list_runs(root)))):
        return f"{said}.{meant}"
    last = newest_last_run(root, job)
    if last is None:
        return f"{said}. Start one with: elastic run SCRIPT"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.ended_at))
    which = f"Job {last.job!r} was the last one. It" if job is None else "Its last run"
    return f"{said}. {which} ended at {at} ({last.how}). The same command starts it again: {last.command}"


def derive_peer_secret(secret: bytes, job: str) -> bytes:
    """Return the secret of a job's agents, which is the same on every node that has the control secret."""
    return hmac.new(secret, _PEER_SECRET_PURPOSE + b"\0" + job.encode(), "sha256").hexdigest().encode()


def run_secret(run: LocalRun) -> bytes:
    return read_secret(Path(run.secret_file))


def _read(path: Path) -> bytes:
    """A file that a process of this job has written; nothing else that may have its name is waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        return file.read(_MOST_BYTES)


def write_private_file(path: Path, data: bytes) -> None:
    """Whole or not at all, and for this user only."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    beside.replace(path)
