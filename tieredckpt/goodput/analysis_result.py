"""The result of a goodput analysis, as values. docs/how-to/reports.md defines every number.

``docs/how-to/reports.md`` says what every number means.
"""

from __future__ import annotations

import enum

import msgspec

STAGE_UNSTATED = "unstated"
"""The stage of time on the way into a world that no rank said anything of."""


class TimeCategory(str, enum.Enum):
    """What a piece of a job's time was spent on."""

    PRODUCTIVE = "productive"
    """Steps that count in the end."""
    SAVE = "save"
    """The training waited for a checkpoint to be staged."""
    LOST = "lost"
    """Steps that were done again or undone, and the step a fault interrupted."""
    STARTUP = "startup"
    """Until the first step of a run."""
    RECOVERY = "recovery"
    """From a fault until the next world's first step."""
    RESIZE = "resize"
    """From the last step of a world to the first of the next, where nothing was wrong."""
    ENDING = "ending"
    """After the last step."""
    DOWN = "down"
    """Between two runs of the job."""
    UNKNOWN = "unknown"
    """Nobody wrote down what happened then: the last step of a run that goes on, maybe."""


class TimeInterval(msgspec.Struct, frozen=True):
    """All intervals of an analysis, in order, are the whole of its time, without a gap and without an overlap."""

    start_us: int
    end_us: int
    category: TimeCategory
    stage: str = ""
    """On the way into a world: what the job's slowest ranks were at. Of lost time: ``interrupted``, or "" for steps."""
    epoch: int = -1
    """The world of the steps, or the one it leads to."""
    ranks: int = 0
    """How many the world has."""
    run: int = 0

    @property
    def duration_us(self) -> int:
        return self.end_us - self.start_us


class StepRecord(msgspec.Struct, frozen=True):
    """A step that was done, whether or not it counted."""

    step: int
    start_us: int
    end_us: int
    epoch: int
    ranks: int
    counts: bool
    loss: float | None = None
    tokens: int | None = None
    samples: int | None = None
    run: int = 0
    not_finite: str = ""
    """What its loss was, where it was not finite."""


class UnnoticedInjection(msgspec.Struct, frozen=True):
    """A fault that was made on purpose and led to none that was noticed."""

    at_us: int
    kind: str
    epoch: int = -1
    node: str = ""
    local_rank: int = -1
    step: int = -1
    words: str = ""


class FaultRecord(msgspec.Struct, frozen=True):
    at_us: int
    """When it happened: when it was injected, else since when something was wrong, else when it was noticed."""
    noticed_us: int
    epoch: int
    node: str = ""
    local_rank: int = -1
    kind: str = ""
    reason: str = ""
    injected: str = ""
    """What was injected, where that is what it was."""


class TransitionRecord(msgspec.Struct, frozen=True):
    """A way from one world's steps to the next one's: after a fault or several, or because another world was wanted."""

    category: TimeCategory
    """``RECOVERY``, ``RESIZE``, or ``STARTUP`` where no step had been done."""
    start_us: int
    """The fault; without one, the end of the last step."""
    end_us: int
    """The next world's first step begins, or all is over."""
    resumed: bool
    epoch: int = -1
    """The world it left."""
    next_epoch: int = -1
    how: str = ""
    reason: str = ""
    ranks: int = 0
    next_ranks: int = 0
    faults: tuple[FaultRecord, ...] = ()
    known_us: int | None = None
    """When all its ranks that say so knew of the fault."""
    stages: dict[str, float] = {}
    """Seconds of the job; what its slowest ranks were at. Their sum is that of its part of the timeline."""
    steps_lost: int = 0
    """That had been done and were undone by it."""
    lost_s: float = 0.0
    """What those took, and the interrupted step."""
    run: int = 0

    @property
    def seconds(self) -> float:
        return (self.end_us - self.start_us) / 1e6

    @property
    def cost_s(self) -> float:
        return self.seconds + self.lost_s


class StageStats(msgspec.Struct, frozen=True):
    """One stage over all ranks and all worlds of a category."""

    category: TimeCategory
    name: str
    count: int
    p50_s: float
    p99_s: float
    most_s: float


class TimeTotals(msgspec.Struct, frozen=True):
    """Of a time in microseconds; of its ranks, in rank-microseconds."""

    total: int
    by: dict[str, int]
    """Every category, and in rank-time ``missing``: ranks that the largest world had and this one has not."""

    def share(self, name: str) -> float:
        return self.by.get(name, 0) / self.total if self.total else 0.0


class DurationStats(msgspec.Struct, frozen=True):
    count: int = 0
    sum_s: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0
    most_s: float = 0.0


class Unprotected(msgspec.Struct, frozen=True):
    """A time in which something newer than the newest protected step lacked its copies, or was not saved at all."""

    start_us: int
    end_us: int
    """When it was protected again, as far as that was written down; else the end of the job's last run."""
    step: int
    """Up to which step the job was protected then; -1: not at all."""
    left_out: int = 0
    """Saves that were skipped or failed."""
    lasts: bool = False
    """Nothing says that it ended."""


class RunRecord(msgspec.Struct, frozen=True):
    """From one start of the job to its end."""

    start_us: int
    end_us: int
    how: str = ""
    """``finished``, ``stopped``, ``job failed``, ``failed``; "" while it runs, or where nobody could write its end."""
    words: str = ""


class Analysis(msgspec.Struct, frozen=True):
    """A job's time, from its first start to its last end or to now."""

    job: str
    start_us: int
    end_us: int
    runs: tuple[RunRecord, ...]
    wall: TimeTotals
    capacity: TimeTotals
    """Wall-clock time times the ranks of the largest world."""
    ranks: int
    """Of the largest world."""
    worlds: int
    faults: int
    steps: int
    """Done, the same one twice where it was done twice."""
    steps_counted: int
    steps_lost: int
    tokens: int | None
    """Of the steps that count, where they say so; as samples."""
    samples: int | None
    ettr: float
    """Effective training time ratio: the share of the time that went into steps that count."""
    goodput: float
    """The same of the capacity: less than ``ettr`` where worlds were smaller than the largest one."""
    mttr_s: float | None
    """Mean time from a fault to the next step, over the recoveries that came to one; ``None`` without any."""
    mtbf_s: float | None
    """Time in which worlds did steps, per interruption by faults."""
    step_s: DurationStats
    save_s: DurationStats
    restores: dict[str, int]
    """How many ranks' restores, by mode."""
    restored_bytes: dict[str, int]
    """By tier."""
    stages: tuple[StageStats, ...]
    recoveries: tuple[TransitionRecord, ...]
    warnings: tuple[str, ...] = ()
    timeline: tuple[TimeInterval, ...] = ()
    step_views: tuple[StepRecord, ...] = ()
    injections: tuple[UnnoticedInjection, ...] = ()
    """That are the cause of no fault."""
    protected_step: int | None = None
    """Up to which step the job is protected, as its agents said last; -1: no step is. ``None`` where nobody said."""
    unprotected: tuple[Unprotected, ...] = ()

    @property
    def unprotected_since_us(self) -> int | None:
        """Since when newer saves are not protected; ``None`` where they are, or nobody said."""
        return self.unprotected[-1].start_us if self.unprotected and self.unprotected[-1].lasts else None

    @property
    def unattributed_us(self) -> int:
        """Of the timeline, what nobody said anything of: the unknown, and the parts of ways without a stage."""
        return sum(
            one.duration_us
            for one in self.timeline
            if one.category is TimeCategory.UNKNOWN or one.stage == STAGE_UNSTATED
        )

    @property
    def is_running(self) -> bool:
        """Whether no end of the last run is written down."""
        return not self.runs or not self.runs[-1].how
