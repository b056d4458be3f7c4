"""The directory that the nodes of one job share.

::

    plan.json               the chunks; written once, compared by each node that starts
    claims/CHUNK.N          the N-th lease of a chunk; only its owner writes it
    parts/CHUNK.N           the output of that lease so far, a line per input
    done/CHUNK              the finished output; its creation fails if the file exists
    result.json             the counts, after the joined output has its name

A lease is a file created with ``O_EXCL``. The owner renews it by changing its contents. A claimant observes
the contents with its own monotonic clock. If they stay the same for the duration of the lease, it creates the file with
the next number. Exactly one claimant succeeds. On the machine of the owner, an owner that has exited loses its lease
at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from elastic.batch_inference.chunk_plan import ChunkPlan, InputChunk, changed_part
from elastic.errors import ChunkDamagedError, ControlPlaneUnavailableError, PolicyError
from peerstore.message_codec import from_json

_FOLDERS = ("claims", "parts", "done")
OK_LINE, FAILED_LINE, _FOOTER = b"0", b"1", b"#"
"""First byte of a stored line: an output, or the record of an input that failed."""


class LeaseOwner(msgspec.Struct, frozen=True):
    """A process that may hold leases, named so that a process on the same machine can find it."""

    machine: str
    """Boot and process namespace: process ids are comparable between equal ones."""
    pid: int
    started: str
    """Start time of the process in clock ticks since the boot."""
    token: str

    @classmethod
    def this_process(cls) -> LeaseOwner:
        """Return the record of the calling process."""
        return cls(_machine(), os.getpid(), process_start(os.getpid()), secrets.token_hex(8))

    def has_exited(self) -> bool:
        """Return whether the process is known to have ended. Processes of other machines are unknown."""
        return self.machine == _machine() and process_start(self.pid) != self.started


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def process_start(pid: int) -> str:
    """Return the start time of a process in clock ticks, or an empty text if it does not run."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    fields = text.rpartition(")")[2].split()  # the name may contain spaces and parentheses
    return "" if fields[0] in "ZX" else fields[19]


class ClaimRecord(NamedTuple):
    """Contents of a claim."""

    owner: LeaseOwner | None
    """``None``: the owner has created the file and not written it yet."""
    current: int
    """Position in the chunk of the input in progress; -1: none yet."""
    is_held: bool
    raw: bytes

    @classmethod
    def parse(cls, raw: bytes) -> ClaimRecord:
        """Return the record in ``raw``. Contents that cannot be read are a lease without a known owner."""
        try:
            owner, _, rest = raw.partition(b"\n")
            _, current, state = rest.split()
            return cls(from_json(owner, LeaseOwner), int(current), state == b"held", raw)
        except (msgspec.MsgspecError, ValueError):
            return cls(None, -1, True, raw)


class LeaseObserver:
    """Expiry of leases: the contents stayed the same for ``lease_s`` seconds."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._seen: dict[int, tuple[int, bytes, float]] = {}

    def has_expired(self, chunk: int, number: int, raw: bytes, now: float) -> bool:
        """Record an observation at the monotonic time ``now``, and return whether the lease has expired."""
        seen = self._seen.get(chunk)
        if seen is None or seen[:2] != (number, raw):
            self._seen[chunk] = (number, raw, now)
            return False
        return now - seen[2] >= self.lease_s


class ChunkLease:
    """A lease that this process holds. The methods may be called from several threads."""

    def __init__(self, path: Path, chunk: int, number: int, owner: LeaseOwner) -> None:
        self.chunk, self.number = chunk, number
        self._next = path.with_name(f"{chunk:08d}.{number + 1}")
        self._owner = msgspec.json.encode(owner)
        self._renewals, self._current = 0, -1
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._write("held")

    def renew(self) -> None:
        """Change the contents, so that other processes see that this one is alive."""
        self._write("held")

    def begin_input(self, position: int) -> None:
        """Record the input in progress, so that a successor knows where this process ended."""
        self._current = position
        self._write("held")

    def was_taken(self) -> bool:
        """Return whether another process has the chunk's next lease."""
        return self._next.exists()

    def end(self) -> None:
        """Give the lease up. Another process may claim the chunk at once. A second call does nothing."""
        self._write("ended")
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _write(self, state: str) -> None:
        with self._lock:
            if self._fd < 0:
                return
            self._renewals += 1
            text = f"\n{self._renewals:020d} {self._current:020d} {state:5s}\n"
            os.pwrite(self._fd, self._owner + text.encode(), 0)


class FinishedChunk(NamedTuple):
    """The output of a finished chunk."""

    lines: list[bytes]
    failed: int
    """Number of inputs that failed."""


class SalvagedChunk(NamedTuple):
    """Results of the earlier leases of a chunk."""

    lines: list[bytes]
    """Stored lines of the first inputs."""
    losses: Counter[int]
    """Number of processes that ended at each position."""


class WorkDirectory:
    """The shared directory of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, plan: ChunkPlan, resolve: Callable[[], dict[str, object] | None] = lambda: None) -> None:
        """Create the directory for ``plan``, or resume the job in it.

        The first node calls ``resolve`` for the options that all nodes use. Raises :class:`PolicyError` if the
        directory belongs to another job.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / "plan.json").exists():
            first = msgspec.structs.replace(plan, resolved=resolve())
            self._publish("plan.json", msgspec.json.encode(first), is_first=True)
        if change := changed_part(self.plan(), plan):
            raise PolicyError(
                f"Cannot resume in {str(self.path)!r}: {change}. Repeat the first command, or remove that directory "
                "to start again."
            )
        if self.result() is None:
            for name in _FOLDERS:
                (self.path / name).mkdir(exist_ok=True)

    def plan(self) -> ChunkPlan:
        """Return the stored plan."""
        data = (self.path / "plan.json").read_bytes()
        try:
            return from_json(data, ChunkPlan)
        except msgspec.MsgspecError as error:
            raise ChunkDamagedError(f"{str(self.path / 'plan.json')!r} is damaged: {error}. Remove it.") from error

    def result(self) -> dict[str, int] | None:
        """Return the counts of the finished job, or ``None`` if its output was not joined yet."""
        try:
            return from_json((self.path / "result.json").read_bytes(), dict[str, int])
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise ChunkDamagedError(f"{str(self.path / 'result.json')!r} is damaged: {error}. Remove it.") from error

    def finish(self, result: dict[str, int]) -> None:
        """Store the counts, and remove the files of chunks."""
        self._publish("result.json", msgspec.json.encode(result))
        for name in _FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def done(self) -> set[int]:
        """Return the finished chunks. The set is empty after :meth:`finish`: read :meth:`result` afterward."""
        return {int(name) for name in self._names("done") if name.isdecimal()}

    def is_done(self, chunk: int) -> bool:
        """Return whether the output of the chunk, or of the job, exists."""
        return self._done_file(chunk).exists() or self.result() is not None

    def claims(self) -> dict[int, int]:
        """Return the number of the newest lease of each claimed chunk."""
        newest: dict[int, int] = {}
        for name in self._names("claims"):
            chunk, _, number = name.partition(".")
            newest[int(chunk)] = max(int(number), newest.get(int(chunk), 0))
        return newest

    def read_claim(self, chunk: int, number: int) -> ClaimRecord:
        """Return the contents of a lease. A file that was removed is a lease that has ended."""
        try:
            return ClaimRecord.parse((self.path / "claims" / f"{chunk:08d}.{number}").read_bytes())
        except FileNotFoundError:
            return ClaimRecord(None, -1, False, b"")

    def claim(self, chunk: int, number: int, owner: LeaseOwner) -> ChunkLease | None:
        """Return lease ``number`` of the chunk, or ``None`` if another process has it or the job is finished."""
        try:
            lease = ChunkLease(self.path / "claims" / f"{chunk:08d}.{number}", chunk, number, owner)
        except FileExistsError:
            return None
        except FileNotFoundError:
            if self.result() is not None:
                return None
            raise
        if self.is_done(chunk):
            lease.end()
            return None
        return lease

    def part_file(self, lease: ChunkLease) -> Path:
        """Return the path of the partial output of a lease."""
        return self.path / "parts" / f"{lease.chunk:08d}.{lease.number}"

    def salvage(self, lease: ChunkLease, inputs: int) -> SalvagedChunk:
        """Return the longest partial output of earlier leases, and the positions of lost owners."""
        best: list[bytes] = []
        losses: Counter[int] = Counter()
        for number in range(lease.number):
            with contextlib.suppress(FileNotFoundError):
                data = (self.path / "parts" / f"{lease.chunk:08d}.{number}").read_bytes()
                best = max(best, complete_lines(data)[:inputs], key=len)
            record = self.read_claim(lease.chunk, number)
            if record.is_held and record.current >= 0:
                losses[record.current] += 1
        return SalvagedChunk(best, losses)

    def finish_chunk(self, lease: ChunkLease, part: int) -> bool:
        """Give the partial output its final name, and return whether this process was the first.

        ``part`` is its open file.
        """
        path = self.part_file(lease)
        os.fsync(part)
        try:
            os.link(path, self._done_file(lease.chunk))
            was_first = True
        except (FileExistsError, FileNotFoundError):
            if not self.is_done(lease.chunk):
                raise
            was_first = False
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):
                raise
            raise ControlPlaneUnavailableError(
                f"Cannot finish a chunk in {str(self.path)!r}: {error.strerror}. The file system must have hard links."
            ) from error
        for number in range(lease.number + 1):
            path.with_name(f"{lease.chunk:08d}.{number}").unlink(missing_ok=True)
        return was_first

    def read_done(self, number: int, chunk: InputChunk) -> FinishedChunk:
        """Return the output of a finished chunk.

        Raises :class:`ChunkDamagedError` if it differs from its checksum.
        """
        path = self._done_file(number)
        body, _, footer = path.read_bytes().rpartition(_FOOTER)
        lines = body.split(b"\n")[:-1]
        if footer != chunk_footer(body)[1:] or len(lines) != chunk.inputs:
            raise ChunkDamagedError(
                f"{str(path)!r} is damaged. Remove it and repeat the command: it is computed again."
            )
        return FinishedChunk([line[1:] for line in lines], sum(line.startswith(FAILED_LINE) for line in lines))

    def _done_file(self, chunk: int) -> Path:
        return self.path / "done" / f"{chunk:08d}"

    def _names(self, folder: str) -> Iterable[str]:
        try:
            return [path.name for path in (self.path / folder).iterdir()]
        except FileNotFoundError:
            if self.result() is None:
                raise
            return ()

    def _publish(self, name: str, data: bytes, *, is_first: bool = False) -> None:
        """Write a file that appears completely. With ``is_first`` an existing file stays."""
        staged = self.path / f".{name}.{secrets.token_hex(6)}"
        with staged.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if not is_first:
            staged.replace(self.path / name)
            return
        with contextlib.suppress(FileExistsError):
            os.link(staged, self.path / name)
        staged.unlink()


def chunk_footer(body: bytes) -> bytes:
    """Return the last line of a finished chunk, which proves that the lines before it are complete."""
    return _FOOTER + xxhash.xxh3_64_hexdigest(body).encode() + b"\n"


def complete_lines(data: bytes) -> list[bytes]:
    """Return the complete lines of a partial output, up to the first that is damaged."""
    lines = []
    for line in data.split(b"\n")[:-1]:
        if line[:1] not in (OK_LINE, FAILED_LINE):
            break
        try:
            json.loads(line[1:])
        except ValueError:
            break
        lines.append(line)
    return lines
