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
from peerstore.daemon_process import ensure_private_directory, trusted_users
from peerstore.errors import PeerStoreError
from peerstore.message_codec import from_json
from peerstore.shard_records import JobName, validate_job_name
from peerstore.suggestions import did_you_mean
from peerstore.transport.authentication import generate_secret, read_secret

_MAX_SOCKET_PATH_BYTES = 100
_MAX_BYTES = 1 << 20
_SETTING = "$ELASTIC_RUN_DIRECTORY"
_PEER_SECRET_PURPOSE = b"tieredckpt peer secret 1"


class LocalRun(msgspec.Struct, frozen=True):
    """Record of a job that runs on this machine."""

    job: str
    coordinator: str
    secret_file: str
    nproc: int
    spares: int
    command: tuple[str, ...]
    working_directory: str
    """Directory in which the command runs."""
    logs: str
    grace_s: float
    event_log: str = ""
    generated_secret: bool = False
    """Whether this run generated its secret, so that the next run has another one."""
    shared_agent_node: str = ""
    """Node that uses the machine's shared agent, now and when it joins again; "" if none does."""


class LastRun(msgspec.Struct, frozen=True):
    """Record of the end of a job's newest run on this machine."""

    job: str
    how: str
    """``finished``, ``stopped``, ``job failed`` or a similar word."""
    ended_at: float
    """Seconds since 1970."""
    command: str


class RunDirectory:
    """Directory of one job, below the directory of all runs."""

    def __init__(self, root: Path, job: str) -> None:
        self.root = root
        self.job: JobName = validate_job_name(job)
        self.directory = root / self.job
        self.file = self.directory / "run.json"
        self.secret_file = self.directory / "secret"
        self.peer_secret_file = self.directory / "peer-secret"
        self.address_file = self.directory / "address"
        self.epoch_file = self.directory / "epoch"
        """Epoch file of a coordinator that was started without nodes."""
        self.end_file = self.directory / "end_message"
        """File in which the coordinator writes how the job ended."""
        self.last_run_file = self.directory / "last_run.json"

    def node_directory(self, name: str) -> Path:
        """Return a node's directory. Raise :class:`PolicyError` if its socket path is too long for the kernel."""
        path = self.directory / name
        if len(os.fsencode(path / "rank.sock")) > _MAX_SOCKET_PATH_BYTES:
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
        """Hold a lock of the job on this machine, or raise :class:`ControlPlaneRefusedError` if it is held.

        ``name`` is ``lock`` for the job itself, or ``NODE.lock`` for a node. The kernel releases the lock when this
        process exits.
        """
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
        """Write the job's secret and return its file: the coordinator's file, or that of ``node``.

        A new secret is generated if ``secret`` is empty.
        """
        self.prepare()
        path = self.directory / f"{node}.secret" if node else self.secret_file
        write_private_file(path, secret or generate_secret())
        return path

    def write_peer_secret(self, secret: bytes, *, keep: bool = False) -> Path:
        """Write the secret of the job's agents, derived from the control secret, and return its file.

        With ``keep``, a file of an earlier run is not replaced: agents of stopped nodes use its secret.
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
        """Return the coordinator's record of the end of the job; empty without one."""
        with contextlib.suppress(OSError):
            return _read(self.end_file)
        return b""

    def write_last_run(self, last: LastRun) -> None:
        with contextlib.suppress(OSError):  # only `elastic status` reads it
            write_private_file(self.last_run_file, msgspec.json.encode(last))

    def remove(self) -> None:
        for path in (self.file, self.secret_file, self.address_file, self.end_file):
            with contextlib.suppress(PermissionError):  # the job may have succeeded nevertheless
                path.unlink(missing_ok=True)

    def read(self) -> LocalRun:
        """Return the record of the running job.

        Only this user may have been able to write it, as it names secret files and a command. Raise
        :class:`JobNotFoundError` if the job does not run here.
        """
        try:
            for folder in (self.root, self.directory):
                trusted_users(folder, setting=_SETTING)
            return from_json(_read(self.file), LocalRun)
        except FileNotFoundError:
            raise JobNotFoundError(describe_no_job(self.root, self.job)) from None
        except (OSError, msgspec.MsgspecError) as error:
            raise ControlPlaneUnavailableError(f"{self.file} cannot be read: {error}") from error

    def is_run(self, coordinator: str, secret: bytes) -> bool:
        """Return whether the recorded run has this coordinator and secret, or its record is unreadable."""
        try:
            run = self.read()
            return run.coordinator == coordinator and run_secret(run) == secret
        except JobNotFoundError:
            return False
        except (ControlPlaneUnavailableError, PeerStoreError):
            return True


def list_runs(root: Path) -> list[LocalRun]:
    """Return the running jobs that this user started on this machine."""
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
    """Return the run that ended last on this machine, of ``job`` or of any job, or ``None``."""
    found = []
    for path in root.glob(f"{job or '*'}/last_run.json"):
        with contextlib.suppress(OSError, PeerStoreError, msgspec.MsgspecError):
            found.append(from_json(_read(path), LastRun))
    return max(found, key=lambda last: last.ended_at, default=None)


def describe_no_job(root: Path, job: str | None = None) -> str:
    """Return a message that no job runs on this machine, with the last run that ended."""
    what = "no job runs" if job is None else f"job {job!r} does not run"
    message = f"{what} on this machine (looked in {root})"
    if job is not None and (suggestion := did_you_mean(job, (run.job for run in list_runs(root)))):
        return f"{message}.{suggestion}"
    last = newest_last_run(root, job)
    if last is None:
        return f"{message}. Start one with: elastic run SCRIPT"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(last.ended_at))
    subject = f"Job {last.job!r} was the last one. It" if job is None else "Its last run"
    return f"{message}. {subject} ended at {at} ({last.how}). The same command starts it again: {last.command}"


def derive_peer_secret(secret: bytes, job: str) -> bytes:
    """Return the secret of a job's agents, which is the same on every node that has the control secret."""
    return hmac.new(secret, _PEER_SECRET_PURPOSE + b"\0" + job.encode(), "sha256").hexdigest().encode()


def run_secret(run: LocalRun) -> bytes:
    return read_secret(Path(run.secret_file))


def _read(path: Path) -> bytes:
    """Return the content of a regular file. Do not block on a FIFO, and do not follow a symbolic link."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a file")
        return file.read(_MAX_BYTES)


def write_private_file(path: Path, data: bytes) -> None:
    """Write a file atomically, readable by this user only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    temporary.replace(path)
