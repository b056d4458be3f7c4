"""A rank's entries in the event log: contiguous stages and steps.

A rank's way is written without gaps, stage after stage. What happens to be going on when the world breaks ends there.
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
    """One process's. ``fault_detected`` is called by any thread, all else by the thread that trains."""

    def __init__(self, event_log: EventLog, environ: Mapping[str, str] = os.environ) -> None:
        self._event_log = event_log
        self._environ = environ
        self._node, self._job = environ.get("ELASTIC_NODE", ""), environ.get("ELASTIC_JOB", "")
        self._leads = False
        """Nobody runs the job: its first rank speaks for a coordinator."""
        self._epoch = self._rank = self._local_rank = -1
        self._known: dict[int, float] = {}
        """When it was known of a world that it is over."""
        # A process that comes a second time was not started for it.
        self._launched = own_start_time() if event_log.position.epoch < 0 else None
        self._has_begun = False
        self._at = event_types.STAGE_GROUPS
        """The stage it is in, on its way to a first step."""
        self._waiting: float | None = None
        self._boundary: float | None = None
        """When the last step ended, or the first began."""
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

    # -- into a world -------------------------------------------------------------------------------------------------

    def waiting_began(self) -> None:
        """It has left whatever world it was in, and waits for the next."""
        now = time.time()
        known, where = self._known.pop(self._epoch, None), self._event_log.position
        if where.stage_began_at is not None:
            self._stage(self._at, where.stage_began_at, known or now)
        if known is not None:
            self._stage(event_types.STAGE_ABORT, known, now)
        elif self._stopping is not None:
            sealed = self._sealed or now
            self._stage(event_types.STAGE_SEAL, self._stopping, sealed)
            self._stage(event_types.STAGE_LEAVE, sealed, now)
        self._known.clear()
        self._boundary = self._stopping = self._sealed = where.stage_began_at = None
        self._waiting = now

    def assigned(self, place: RankAssignment) -> None:
        """It has a place."""
        now = time.time()
        supervised = is_supervised(self._environ)
        # Whoever starts all processes anew counts worlds anew, too.
        self._epoch = place.epoch if supervised else place.epoch + place.restarts
        self._rank, self._local_rank = place.rank, place.local_rank
        if not self._has_begun:
            self._has_begun = True
            self._begin(place, supervised=supervised, now=now)
        waiting = now if self._waiting is None else self._waiting
        if self._launched is not None:
            self._stage(event_types.STAGE_LAUNCH, self._launched, waiting)
            self._launched = None
        self._stage(event_types.STAGE_RENDEZVOUS, waiting, now)
        self._is_first = True
        self._loss = self._tokens = self._samples = None
        where = self._event_log.position
        where.epoch, where.rank, where.stage_began_at, where.next_step = self._epoch, self._rank, now, 0
        self._at = event_types.STAGE_GROUPS

    def groups_ready(self) -> None:
        """It is in the groups of its world."""
        self._reach()
        self._at = event_types.STAGE_LOADER

    def survivors_asked(self, anything: bool) -> None:
        """Survivors of a fault have said what they still have, where they were asked."""
        if anything:
            self._at = event_types.STAGE_HYDRATE
            self._reach()
        self._at = event_types.STAGE_LOADER

    def _begin(self, place: RankAssignment, *, supervised: bool, now: float) -> None:
        began = now if self._launched is None else self._launched
        self._event_log.write(event_types.ProcessBegan(began, self._job, node=self._node, local_rank=self._local_rank))
        self._leads = place.rank == 0 and not supervised
        if self._leads:
            again = place.restarts > 0
            self._event_log.write(
                event_types.ProcessBegan(began, self._job, _COORDINATOR, again=again, node=self._node)
            )
            self._event_log.write(
                event_types.WorldFormed(
                    now,
                    self._epoch,
                    place.world_size,
                    nproc=place.local_world_size,
                    how="restart" if again else "start",
                    reason=place.reason,
                    restarts=place.restarts,
                )
            )

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """After what was restored in this world: for loops that count steps themselves."""
        return self._event_log.position.next_step

    def step_began(self, step: int) -> None:
        """The next step begins. Only the first of a world looks at the clock: all others begin where one ended."""
        self._event_log.position.newest_begun_step = step
        if self._boundary is None:
            self._boundary = self._reach()
            self._event_log.position.stage_began_at = None

    def step_metrics(self, loss: SupportsFloat | None, tokens: int | None, samples: int | None) -> None:
        """What the script says of the step it is in. Only the first rank's words are written."""
        if self._rank != 0 or isinstance(self._event_log, NullEventLog):
            return
        if loss is not None:
            value = float(loss)
            self._loss = value if math.isfinite(value) else None
            self._not_finite = "" if math.isfinite(value) else str(value)
        self._tokens = self._tokens if tokens is None else tokens
        self._samples = self._samples if samples is None else samples

    def step_ended(self, step: int) -> None:
        """That step has ended."""
        now, began = time.time(), self._boundary
        self._boundary = now
        if began is None:
            return
        if self._is_first:
            self._is_first = False
            self._stage(event_types.STAGE_FIRST_STEP, began, now)
        if self._rank == 0:
            took = max(0.0, now - began)
            said = (self._loss, self._tokens, self._samples, self._not_finite)
            self._event_log.write(event_types.StepEvent(self._epoch, 0, step, began, took, *said))
            self._loss = self._tokens = self._samples = None
            self._not_finite = ""

    # -- out of a world -----------------------------------------------------------------------------------------------

    def fault_detected(self) -> None:
        """The world is broken: so this rank has heard, or sees."""
        now = time.time()
        if self._known.setdefault(self._epoch, now) is now:
            self._stage(event_types.STAGE_DETECT, now, now)

    def pause_began(self) -> None:
        """All ranks stand at the step at which they were asked to stop; what they hold is to be sealed."""
        self._stopping = time.time() if self._boundary is None else self._boundary

    def sealed(self) -> None:
        if self._stopping is not None:
            self._sealed = time.time()

    def ended(self, how: str, words: str = "") -> None:
        """Its part is over."""
        now = time.time()
        if self._stopping is not None:
            self._stage(event_types.STAGE_SEAL, self._stopping, self._sealed or now)
        self._event_log.write(
            event_types.ProcessEnded(now, self._job, "rank", how, words, self._node, self._local_rank)
        )
        if self._leads:
            self._event_log.write(event_types.ProcessEnded(now, self._job, _COORDINATOR, how, words, self._node))
        self._event_log.close()

    # -- writing ------------------------------------------------------------------------------------------------------

    def _reach(self) -> float:
        """The end of the stage it is in."""
        now, where = time.time(), self._event_log.position
        if where.stage_began_at is not None:
            self._stage(self._at, where.stage_began_at, now)
            where.stage_began_at = now
        return now

    def _stage(self, name: str, began: float, ended: float) -> None:
        took = max(0.0, ended - began)
        self._event_log.write(
            event_types.StageEvent(self._epoch, self._rank, name, began, took, self._node, self._local_rank)
        )


def open_rank_timeline() -> RankTimeline:
    """Of this process, into the event log that its environment names, or into none."""
    return RankTimeline(event_log_from_environ())


def own_start_time() -> float | None:
    """When this process was started, by the wall clock; ``None`` where the kernel does not say."""
    try:
        ticks = process_start_time(os.getpid())
    except OSError:
        return None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - max(0.0, age_s)
