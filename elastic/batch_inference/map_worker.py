"""A worker process of ``elastic map``.

It claims a chunk, calls the function for its inputs, publishes the output, and repeats. The worker
reports to its parent on its standard output, and redirects the function's output to standard error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from elastic.batch_inference.chunk_plan import ChunkPlan, read_chunk
from elastic.batch_inference.map_task import MapTask, failed_line, load_function
from elastic.batch_inference.work_directory import (
    ChunkLease,
    LeaseObserver,
    LeaseOwner,
    WorkDirectory,
    chunk_footer,
)
from elastic.errors import ElasticError, PolicyError
from peerstore.message_codec import from_json

FAILED_STATUS = 3
"""Exit status of a worker that reported an error: another worker would fail in the same way."""
TIMEOUT_STATUS = 75
"""Exit status of a worker whose function exceeded the timeout of an input."""
_RENEWALS_PER_LEASE = 4


class WorkerOptions(msgspec.Struct, frozen=True):
    """Options of a worker, on its command line as JSON."""

    input: str
    work: str
    batch_size: int = 1
    retries: int = 2
    max_losses: int = 3
    """Processes that may be lost at one input before it fails."""
    lease_s: float = 30.0
    timeout_s: float = 0.0
    """Seconds that a call may take; 0: no limit."""


class WorkerReport(msgspec.Struct, frozen=True):
    """A line from the worker to its parent."""

    is_ready: bool = False
    error: str = ""
    is_usage_error: bool = False


class LeaseKeeper:
    """A thread that renews the lease of the current chunk, and enforces the timeout of a call."""

    def __init__(self, lease_s: float, timeout_s: float) -> None:
        self.interval_s, self.timeout_s = lease_s / _RENEWALS_PER_LEASE, timeout_s
        self._lease: ChunkLease | None = None
        self._call_began = 0.0
        self.was_taken = threading.Event()
        self._has_warned = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease-renewal", daemon=True)
        self._thread.start()

    def hold(self, lease: ChunkLease) -> None:
        """Renew this lease until :meth:`release`."""
        self.was_taken.clear()
        self._call_began, self._lease = 0.0, lease

    def release(self) -> None:
        """End the lease, if one is held."""
        if self._lease is not None:
            self._lease.end()
        self._lease = None

    def close(self) -> None:
        """End the lease and the thread."""
        self.release()
        self._closed.set()
        self._thread.join()

    def call_begins(self) -> None:
        """Start the timeout of a call."""
        self._call_began = time.monotonic()

    def call_ends(self) -> None:
        """Stop the timeout."""
        self._call_began = 0.0

    def _renew(self) -> None:
        interval_s = min(self.interval_s, self.timeout_s / 4) if self.timeout_s else self.interval_s
        while not self._closed.wait(interval_s):
            lease, began = self._lease, self._call_began
            if self.timeout_s and began and time.monotonic() - began > self.timeout_s:
                print(f"a call exceeded the timeout of {self.timeout_s:g} s", file=sys.stderr, flush=True)
                os._exit(TIMEOUT_STATUS)
            if lease is not None:
                self._renew_lease(lease)

    def _renew_lease(self, lease: ChunkLease) -> None:
        """Renew the lease. After an error, such as of the file server, the next interval tries again."""
        try:
            lease.renew()
            if lease.was_taken():
                self.was_taken.set()
        except OSError as error:
            if not self._has_warned:
                print(f"chunk {lease.chunk}: the lease cannot be renewed: {error}", file=sys.stderr, flush=True)
            self._has_warned = True
        else:
            self._has_warned = False


class ChunkWorker:
    """The loop of one worker."""

    def __init__(self, options: WorkerOptions, task: MapTask, is_stopping: Callable[[], bool]) -> None:
        self.options, self.task, self.is_stopping = options, task, is_stopping
        self.input = Path(options.input)
        self.work = WorkDirectory(Path(options.work))
        self.plan: ChunkPlan = self.work.plan()
        self.owner = LeaseOwner.this_process()
        self.keeper = LeaseKeeper(options.lease_s, options.timeout_s)

    def run(self) -> None:
        """Process chunks until all are done or the process has to stop."""
        with contextlib.closing(self.keeper):
            for lease in self._leases():
                self._finish(lease)

    def _finish(self, lease: ChunkLease) -> None:
        """Process one chunk and end its lease."""
        self.keeper.hold(lease)
        try:
            self._process(lease)
        except FileNotFoundError:  # an earlier owner was late and finished the chunk, and then the job was joined
            if not self.work.is_done(lease.chunk):
                raise
        finally:
            self.keeper.call_ends()
            self.keeper.release()

    def _leases(self) -> Iterator[ChunkLease]:
        """Yield one lease after another. Wait while all remaining chunks have owners."""
        observer = LeaseObserver(self.options.lease_s)
        while not self.is_stopping():
            done = self.work.done()
            if self.work.result() is not None:
                return
            remaining = [chunk for chunk in range(len(self.plan.chunks)) if chunk not in done]
            if not remaining:
                return
            claims = self.work.claims()
            has_claimed = False
            for chunk in remaining:
                if self.is_stopping():
                    return
                number = claims.get(chunk)
                if number is not None and not self._is_free(observer, chunk, number):
                    continue
                if lease := self.work.claim(chunk, 0 if number is None else number + 1, self.owner):
                    has_claimed = True
                    yield lease
            if not has_claimed:
                time.sleep(min(1.0, self.options.lease_s / 10))

    def _is_free(self, observer: LeaseObserver, chunk: int, number: int) -> bool:
        record = self.work.read_claim(chunk, number)
        if not record.is_held or (record.owner is not None and record.owner.has_exited()):
            return True
        return observer.has_expired(chunk, number, record.raw, time.monotonic())

    def _process(self, lease: ChunkLease) -> None:
        inputs = read_chunk(self.input, self.plan.chunks[lease.chunk])
        salvaged = self.work.salvage(lease, len(inputs))
        # A loss may be due to any input of a batch: alone, the next loss names the input.
        batch_size = 1 if salvaged.losses else self.options.batch_size
        with self.work.part_file(lease).open("xb+", buffering=0) as part:
            body = b"".join(line + b"\n" for line in salvaged.lines)
            part.write(body)
            position = len(salvaged.lines)
            while position < len(inputs):
                if self.is_stopping() or self.keeper.was_taken.is_set():
                    return
                lost = salvaged.losses[position]
                if lost >= self.options.max_losses:
                    text = f"{lost} processes ended or stopped during this input"
                    lines = [failed_line(inputs[position], "WorkerLost", text, attempts=lost)]
                else:
                    lease.begin_input(position)
                    self.keeper.call_begins()
                    lines = self.task.lines_for(inputs[position : position + batch_size])
                    self.keeper.call_ends()
                position += len(lines)
                added = b"".join(line + b"\n" for line in lines)
                part.write(added)
                body += added
            part.write(chunk_footer(body))
            self.work.finish_chunk(lease, part.fileno())


def main() -> int:
    """Run a worker with the options in the first argument, and return its exit status."""
    reports = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal interrupts the parent, which stops its workers
    options = from_json(sys.argv[1], WorkerOptions)

    def report(report: WorkerReport) -> None:
        reports.write(msgspec.json.encode(report) + b"\n")

    try:
        plan = WorkDirectory(Path(options.work)).plan()
        try:
            function = load_function(plan.function, plan.options if plan.resolved is None else plan.resolved)
        except ElasticError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of the user's module
            traceback.print_exc()
            report(WorkerReport(error=f"Cannot load {plan.function!r}: {type(error).__name__}: {error}"))
            return FAILED_STATUS
        report(WorkerReport(is_ready=True))
        task = MapTask(function, takes_lists=options.batch_size > 1, retries=options.retries)
        ChunkWorker(options, task, stopping.is_set).run()
    except (ElasticError, OSError) as error:
        report(WorkerReport(error=str(error), is_usage_error=isinstance(error, PolicyError)))
        return FAILED_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main())
