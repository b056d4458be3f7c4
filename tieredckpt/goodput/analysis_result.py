"""Result of a goodput analysis, as values. ``docs/how-to/reports.md`` defines every number."""

from __future__ import annotations

import enum

import msgspec

STAGE_UNSTATED = "unstated"
"""Stage of the time of a transition that no rank reported."""


class TimeCategory(str, enum.Enum):
    """Category of a part of a job's time."""

    PRODUCTIVE = "productive"
    """Steps that count."""
    SAVE = "save"
    """Training waited for the staging of a checkpoint."""
    LOST = "lost"
    """Steps that were repeated or undone, and the step that a fault interrupted."""
    STARTUP = "startup"
    """Time until the first step of a run."""
    RECOVERY = "recovery"
    """Time from a fault to the first step of the next world."""
    RESIZE = "resize"
    """Time from the last step of a world to the first step of the next, without a fault."""
    ENDING = "ending"
    """Time after the last step."""
    DOWN = "down"
    """Time between two runs of the job."""
    UNKNOWN = "unknown"
    """Time without events, such as the current step of a run in progress."""


class TimeInterval(msgspec.Struct, frozen=True):
    """An interval of the timeline. The intervals of an analysis cover its time without gaps or overlaps."""

    start_us: int
    end_us: int
    category: TimeCategory
    stage: str = ""
    """In a transition: the stage of the slowest ranks. In lost time: ``interrupted``, or "" for steps."""
    epoch: int = -1
    """World of the steps, or the world that a transition leads to. -1: none."""
    ranks: int = 0
    """Number of ranks of the world. 0: unknown."""
    run: int = 0

    @property
    def duration_us(self) -> int:
        return self.end_us - self.start_us


class StepRecord(msgspec.Struct, frozen=True):
    """A step that was executed, whether or not it counts."""

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
    """The loss as text, if it was not finite."""


class UnnoticedInjection(msgspec.Struct, frozen=True):
    """An injected fault that caused no recorded fault."""

    at_us: int
    kind: str
    epoch: int = -1
    node: str = ""
    local_rank: int = -1
    step: int = -1
    words: str = ""


class FaultRecord(msgspec.Struct, frozen=True):
    at_us: int
    """Time of the fault: of its injection, or its first symptom, or its detection.
    The first that is known is used."""
    noticed_us: int
    epoch: int
    node: str = ""
    local_rank: int = -1
    kind: str = ""
    reason: str = ""
    injected: str = ""
    """Kind of the injection that caused it. Empty: none."""


class TransitionRecord(msgspec.Struct, frozen=True):
    """A transition from the steps of one world to those of the next: after faults, or for a resize."""

    category: TimeCategory
    """``RECOVERY``, ``RESIZE``, or ``STARTUP`` before the first step. With faults also ``ENDING``."""
    start_us: int
    """Time of the fault. Without a fault: the end of the last step."""
    end_us: int
    """Start of the next world's first step, plus its delay over a typical step.
    Without one: the end of the run."""
    resumed: bool
    epoch: int = -1
    """World that it left. -1: none."""
    next_epoch: int = -1
    how: str = ""
    reason: str = ""
    ranks: int = 0
    next_ranks: int = 0
    faults: tuple[FaultRecord, ...] = ()
    known_us: int | None = None
    """Time at which the last rank detected the fault. ``None``: no rank reported it."""
    stages: dict[str, float] = {}
    """Seconds of wall-clock time by the stage of the slowest ranks. Their sum is the transition's time."""
    steps_lost: int = 0
    """Completed steps that it undid."""
    lost_s: float = 0.0
    """Seconds of those steps and of the interrupted step."""
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
    """Totals of time in microseconds, or of capacity in rank-microseconds."""

    total: int
    by: dict[str, int]
    """Total of each category.
    Capacity also has ``missing``: ranks of the largest world that smaller worlds lack."""

    def share(self, name: str) -> float:
        return self.by.get(name, 0) / self.total if self.total else 0.0


class DurationStats(msgspec.Struct, frozen=True):
    count: int = 0
    sum_s: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0
    most_s: float = 0.0


class Unprotected(msgspec.Struct, frozen=True):
    """A period in which steps newer than the protected one lacked copies or were not saved."""

    start_us: int
    end_us: int
    """Time at which newer steps were protected again.
    If that is not recorded: the end of the job's last run."""
    step: int
    """Newest protected step at that time. -1: none."""
    left_out: int = 0
    """Number of saves that were skipped or failed."""
    lasts: bool = False
    """Whether no event records its end."""


class RunRecord(msgspec.Struct, frozen=True):
    """One run of the job, between a start and its end."""

    start_us: int
    end_us: int
    how: str = ""
    """``finished``, ``stopped``, ``job failed`` or ``failed``. Empty: no end is recorded."""
    words: str = ""


class Analysis(msgspec.Struct, frozen=True):
    """Analysis of a job's time, from its first start to its last end, or to its last event."""

    job: str
    start_us: int
    end_us: int
    runs: tuple[RunRecord, ...]
    wall: TimeTotals
    capacity: TimeTotals
    """Wall-clock time times the ranks of the largest world."""
    ranks: int
    """Ranks of the largest world."""
    worlds: int
    faults: int
    steps: int
    """Number of executed steps. A repeated step counts once per execution."""
    steps_counted: int
    steps_lost: int
    tokens: int | None
    """Tokens of the steps that count, as reported. The same holds for ``samples``."""
    samples: int | None
    ettr: float
    """Effective training time ratio: the share of time in steps that count."""
    goodput: float
    """Share of the capacity in steps that count.
    It is below ``ettr`` if worlds were smaller than the largest one."""
    mttr_s: float | None
    """Mean seconds from a fault to the next step, over recoveries that reached one.
    ``None``: none occurred."""
    mtbf_s: float | None
    """Seconds in which worlds ran steps, per interruption by faults. ``None``: none occurred."""
    step_s: DurationStats
    save_s: DurationStats
    restores: dict[str, int]
    """Number of restores of ranks, by mode."""
    restored_bytes: dict[str, int]
    """Bytes restored, by tier."""
    stages: tuple[StageStats, ...]
    recoveries: tuple[TransitionRecord, ...]
    warnings: tuple[str, ...] = ()
    timeline: tuple[TimeInterval, ...] = ()
    step_views: tuple[StepRecord, ...] = ()
    injections: tuple[UnnoticedInjection, ...] = ()
    """Injections that caused no recorded fault."""
    protected_step: int | None = None
    """Newest protected step, as its agents last reported. -1: no step. ``None``: no report."""
    unprotected: tuple[Unprotected, ...] = ()

    @property
    def unprotected_since_us(self) -> int | None:
        """Start of the current unprotected period. ``None``: newer saves are protected, or no agent reported."""
        return self.unprotected[-1].start_us if self.unprotected and self.unprotected[-1].lasts else None

    @property
    def unattributed_us(self) -> int:
        """Microseconds without a report: unknown time, and parts of transitions without a stage."""
        return sum(
            one.duration_us
            for one in self.timeline
            if one.category is TimeCategory.UNKNOWN or one.stage == STAGE_UNSTATED
        )

    @property
    def is_running(self) -> bool:
        """Whether no end of the last run is recorded."""
        return not self.runs or not self.runs[-1].how
