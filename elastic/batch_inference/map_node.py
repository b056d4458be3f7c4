"""One node of ``elastic map``: start workers, replace lost ones, report progress, join the output."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from elastic.batch_inference.chunk_plan import ChunkPlan
from elastic.batch_inference.map_worker import FAILED_STATUS, WorkerOptions, WorkerReport
from elastic.batch_inference.work_directory import WorkDirectory
from elastic.control.child_processes import die_with_parent, python_module_command, with_import_path
from elastic.errors import JobFailedError, PolicyError
from peerstore.message_codec import from_json
from tieredckpt.export.atomic_output import atomic_file

_POLL_S = 0.1
_PROGRESS_S = 5.0
_STOP_S = 30.0
"""Seconds that workers get to finish the input in progress."""
_EXIT_S = 5.0
"""Seconds that workers get to exit after the last chunk."""
_MAX_FAILED_STARTS = 3
_JOIN_BUFFER_BYTES = 1 << 20


class MapProgress(NamedTuple):
    """Finished work of all nodes."""

    chunks: int
    all_chunks: int
    inputs: int
    all_inputs: int
    seconds: float
    """Seconds since this node started."""


class MapWorkerProcess:
    """A worker process of this node."""

    def __init__(self, options: WorkerOptions) -> None:
        command = python_module_command("elastic.batch_inference.map_worker", msgspec.json.encode(options).decode())
        self.process = subprocess.Popen(  # noqa: S603 - this package's own program
            die_with_parent(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=with_import_path(os.environ),
        )
        assert self.process.stdout is not None  # noqa: S101
        self._pipe = self.process.stdout
        os.set_blocking(self._pipe.fileno(), False)

    def ended(self) -> bool:
        """Return whether the process has ended."""
        return self.process.poll() is not None

    def reports(self) -> list[WorkerReport]:
        """Return the reports of a process that has ended, and close the pipe."""
        with self._pipe:
            data = self._pipe.read() or b""
        return [from_json(line, WorkerReport) for line in data.splitlines()]

    def end(self, number: int) -> None:
        """Send a signal, if the process runs."""
        if not self.ended():
            self.process.send_signal(number)


class MapNode:
    """The workers of this node."""

    def __init__(
        self,
        work: WorkDirectory,
        plan: ChunkPlan,
        options: WorkerOptions,
        *,
        workers: int,
        on_progress: Callable[[MapProgress], None] = lambda _: None,
        on_message: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.work, self.plan, self.options, self.count = work, plan, options, workers
        self.on_progress, self.on_message = on_progress, on_message
        self._workers: list[MapWorkerProcess] = []
        self._failed_starts = 0
        self._stopping = threading.Event()

    def stop(self) -> None:
        """End the workers after their current input. :meth:`run` returns then."""
        self._stopping.set()

    def run(self) -> bool:
        """Run workers until all chunks are done. Return False if the node was stopped before.

        Raises :class:`PolicyError` or :class:`JobFailedError` if workers cannot work.
        """
        began = time.monotonic()
        next_listing = next_progress = 0.0
        try:
            while not self._stopping.is_set():
                has_idle = self._remove_ended()
                if (now := time.monotonic()) >= next_listing or has_idle:
                    done = self.work.done()
                    is_finished = len(done) == len(self.plan.chunks) or self.work.result() is not None
                    # A directory that takes long to list is listed less often.
                    next_listing = now + max(2 * _POLL_S, 20 * (time.monotonic() - now))
                    if now >= next_progress or is_finished:
                        self.on_progress(self._progress(done, is_finished, now - began))
                        next_progress = now + _PROGRESS_S
                    if is_finished:
                        return True
                while len(self._workers) < self.count:
                    self._workers.append(MapWorkerProcess(self.options))
                self._stopping.wait(_POLL_S)
            return False
        finally:
            self._end_workers(_STOP_S if self._stopping.is_set() else _EXIT_S)

    def _progress(self, done: set[int], is_finished: bool, seconds: float) -> MapProgress:
        chunks = range(len(self.plan.chunks)) if is_finished else done
        inputs = sum(self.plan.chunks[chunk].inputs for chunk in chunks)
        return MapProgress(len(chunks), len(self.plan.chunks), inputs, self.plan.inputs, seconds)

    def _remove_ended(self) -> bool:
        """Remove workers that have ended. Return whether one of them found no work."""
        ended = [worker for worker in self._workers if worker.ended()]
        for worker in ended:
            self._workers.remove(worker)
            self._check_ended(worker)
        return any(worker.process.returncode == 0 for worker in ended)

    def _check_ended(self, worker: MapWorkerProcess) -> None:
        reports, status = worker.reports(), worker.process.returncode
        if status == FAILED_STATUS and reports and reports[-1].error:
            raise (PolicyError if reports[-1].is_usage_error else JobFailedError)(reports[-1].error)
        if status == 0:
            return
        self._failed_starts = 0 if any(report.is_ready for report in reports) else self._failed_starts + 1
        ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        if self._failed_starts >= _MAX_FAILED_STARTS:
            raise JobFailedError(
                f"{self._failed_starts} workers ended with {ending} before {self.plan.function!r} loaded."
            )
        self.on_message(f"worker {worker.process.pid} ended with {ending}; another one starts")

    def _end_workers(self, within_s: float) -> None:
        for worker in self._workers:
            worker.end(signal.SIGTERM)
        deadline = time.monotonic() + within_s
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            worker.end(signal.SIGKILL)
            worker.process.wait()
            worker.reports()
        self._workers.clear()


@contextlib.contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` on SIGTERM and SIGINT while the block runs."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stop()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def join_output(work: WorkDirectory, plan: ChunkPlan, output: Path) -> dict[str, int]:
    """Write the finished chunks to ``output`` in order, and return the counts.

    Any number of nodes may call it at once. Raises :class:`elastic.errors.ChunkDamagedError` if a chunk is damaged.
    """
    if (result := work.result()) is not None:
        return result
    failed = 0
    try:
        with atomic_file(output, force=True) as staged, staged.open("wb", buffering=_JOIN_BUFFER_BYTES) as file:
            for number, chunk in enumerate(plan.chunks):
                finished = work.read_done(number, chunk)
                file.writelines(line + b"\n" for line in finished.lines)
                failed += finished.failed
    except FileNotFoundError:
        if (result := work.result()) is not None:  # another node has joined the output and removed the chunks
            return result
        raise
    result = {"inputs": plan.inputs, "failed": failed, "chunks": len(plan.chunks)}
    work.finish(result)
    return result
