"""Entries of one rank in the event log: stages without gaps, and steps.

A stage that runs when the world breaks ends at the time of the detection.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from types import TracebackType
from typing import SupportsFloat

from elastic.control.control_plane import RankAssignment
from elastic.errors import JobFailedError
from elastic.settings import is_supervised
from peerstore.daemon_process import process_start_time
from tieredckpt.event_log import EventLog, NullEventLog, event_log_from_environ, event_types

_COORDINATOR = "coordinator"


class RankTimeline:
    """Timeline of one process.

    Any thread may call ``fault_detected``; the training thread calls all other methods.
    """

    def __init__(self, event_log: EventLog, environ: Mapping[str, str] = os.environ) -> None:
        self._event_log = event_log
        self._environ = environ
        self._node, self._job = environ.get("ELASTIC_NODE", ""), environ.get("ELASTIC_JOB", "")
        self._is_coordinator = False
        """Whether this rank writes the coordinator's entries: rank 0 of a launcher without a coordinator."""
        self._epoch = self._rank = self._local_rank = -1
        self._broken_at: dict[int, float] = {}
        """Per epoch, the wall-clock time at which this process detected that the world is broken."""
        # A process that joins a second time was not started for that world.
        self._launched_at = own_start_time() if event_log.position.epoch < 0 else None
        self._has_begun = False
        self._current_stage = event_types.STAGE_GROUPS
        """Running stage, before the first step of the world."""
        self._waiting: float | None = None
        self._boundary: float | None = None
        """Time at which the last step ended, or the first one began."""
        self._stopping: float | None = None
        self._sealed: float | None = None
        self._is_first = True
        self._loss: float | None = None
        self._not_finite = ""
        self._tokens: int | None = None
        self._samples: int | None = None

    def __enter__(self) -> RankTimeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            how = "job failed" if isinstance(error, JobFailedError) else "failed"
            self.ended(how, f"{type(error).__name__}: {error}")

    def waiting_began(self) -> None:
        """Record that this process has left its world, if any, and waits for the next one."""
        now = time.time()
        broken_at, position = self._broken_at.pop(self._epoch, None), self._event_log.position
        if position.stage_began_at is not None:
            self._stage(self._current_stage, position.stage_began_at, broken_at or now)
        if broken_at is not None:
            self._stage(event_types.STAGE_ABORT, broken_at, now)
        elif self._stopping is not None:
            sealed = self._sealed or now
            self._stage(event_types.STAGE_SEAL, self._stopping, sealed)
            self._stage(event_types.STAGE_LEAVE, sealed, now)
        self._broken_at.clear()
        self._boundary = self._stopping = self._sealed = position.stage_began_at = None
        self._waiting = now

    def assigned(self, assignment: RankAssignment) -> None:
        """Record the assignment of this process to a world."""
        now = time.time()
        supervised = is_supervised(self._environ)
        # A launcher that restarts all processes numbers its epochs from 0 again.
        self._epoch = assignment.epoch if supervised else assignment.epoch + assignment.restarts
        self._rank, self._local_rank = assignment.rank, assignment.local_rank
        if not self._has_begun:
            self._has_begun = True
            self._begin(assignment, supervised=supervised, now=now)
        waiting = now if self._waiting is None else self._waiting
        if self._launched_at is not None:
            self._stage(event_types.STAGE_LAUNCH, self._launched_at, waiting)
            self._launched_at = None
        self._stage(event_types.STAGE_RENDEZVOUS, waiting, now)
        self._is_first = True
        self._loss = self._tokens = self._samples = None
        position = self._event_log.position
        position.epoch, position.rank, position.stage_began_at, position.next_step = self._epoch, self._rank, now, 0
        self._current_stage = event_types.STAGE_GROUPS

    def groups_ready(self) -> None:
        """Record that the process groups are initialized."""
        self._end_stage()
        self._current_stage = event_types.STAGE_LOADER

    def survivors_asked(self, anything: bool) -> None:
        """Record the end of the hydration. ``anything``: whether survivors restored any state."""
        if anything:
            self._current_stage = event_types.STAGE_HYDRATE
            self._end_stage()
        self._current_stage = event_types.STAGE_LOADER

    def _begin(self, assignment: RankAssignment, *, supervised: bool, now: float) -> None:
        began = now if self._launched_at is None else self._launched_at
        self._event_log.write(event_types.ProcessBegan(began, self._job, node=self._node, local_rank=self._local_rank))
        self._is_coordinator = assignment.rank == 0 and not supervised
        if self._is_coordinator:
            is_restart = assignment.restarts > 0
            self._event_log.write(
                event_types.ProcessBegan(began, self._job, _COORDINATOR, again=is_restart, node=self._node)
            )
            self._event_log.write(
                event_types.WorldFormed(
                    now,
                    self._epoch,
                    assignment.world_size,
                    nproc=assignment.local_world_size,
                    how="restart" if is_restart else "start",
                    reason=assignment.reason,
                    restarts=assignment.restarts,
                )
            )

    @property
    def next_step(self) -> int:
        """Step after the restored one in this world, for loops that count steps themselves."""
        return self._event_log.position.next_step

    def step_began(self, step: int) -> None:
        """Record the begin of ``step``.

        Only the first step of a world reads the clock: the others begin at the end of one.
        """
        if self._boundary is None:
            self._boundary = self._end_stage()
            self._event_log.position.stage_began_at = None

    def step_metrics(self, loss: SupportsFloat | None, tokens: int | None, samples: int | None) -> None:
        """Record the script's metrics of the running step. Only rank 0 writes them."""
        if self._rank != 0 or isinstance(self._event_log, NullEventLog):
            return
        if loss is not None:
            value = float(loss)
            self._loss = value if math.isfinite(value) else None
            self._not_finite = "" if math.isfinite(value) else str(value)
        self._tokens = self._tokens if tokens is None else tokens
        self._samples = self._samples if samples is None else samples

    def step_ended(self, step: int) -> None:
        """Record the end of ``step``."""
        now, began = time.time(), self._boundary
        self._boundary = now
        if began is None:
            return
        self._event_log.position.newest_ended_step = step
        if self._is_first:
            self._is_first = False
            self._stage(event_types.STAGE_FIRST_STEP, began, now)
        if self._rank == 0:
            took = max(0.0, now - began)
            metrics = (self._loss, self._tokens, self._samples, self._not_finite)
            self._event_log.write(event_types.StepEvent(self._epoch, 0, step, began, took, *metrics))
            self._loss = self._tokens = self._samples = None
            self._not_finite = ""

    def fault_detected(self) -> None:
        """Record that this rank has received or detected the fault of its world."""
        now = time.time()
        if self._broken_at.setdefault(self._epoch, now) is now:
            self._stage(event_types.STAGE_DETECT, now, now)

    def pause_began(self) -> None:
        """Record that all ranks stopped at the common step and begin to seal."""
        self._stopping = time.time() if self._boundary is None else self._boundary

    def sealed(self) -> None:
        if self._stopping is not None:
            self._sealed = time.time()

    def ended(self, how: str, words: str = "") -> None:
        """Record the end of this process's part in the job."""
        now = time.time()
        if self._stopping is not None:
            self._stage(event_types.STAGE_SEAL, self._stopping, self._sealed or now)
        self._event_log.write(
            event_types.ProcessEnded(now, self._job, "rank", how, words, self._node, self._local_rank)
        )
        if self._is_coordinator:
            self._event_log.write(event_types.ProcessEnded(now, self._job, _COORDINATOR, how, words, self._node))
        self._event_log.close()

    def _end_stage(self) -> float:
        """Write the end of the running stage, and return the time."""
        now, position = time.time(), self._event_log.position
        if position.stage_began_at is not None:
            self._stage(self._current_stage, position.stage_began_at, now)
            position.stage_began_at = now
        return now

    def _stage(self, name: str, began: float, ended: float) -> None:
        took = max(0.0, ended - began)
        self._event_log.write(
            event_types.StageEvent(self._epoch, self._rank, name, began, took, self._node, self._local_rank)
        )


def open_rank_timeline() -> RankTimeline:
    """Return the timeline of this process, with the event log that its environment names, or without one."""
    return RankTimeline(event_log_from_environ())


def own_start_time() -> float | None:
    """Return the wall-clock start time of this process in seconds; ``None`` if it is unknown."""
    try:
        ticks = process_start_time(os.getpid())
    except OSError:
        return None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - max(0.0, age_s)
