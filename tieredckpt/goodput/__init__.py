"""Goodput: the share of a job's time that produced lasting work, measured or predicted.

Pure, no torch.
"""

from tieredckpt.goodput.analysis import analyse
from tieredckpt.goodput.analysis_result import (
    Analysis,
    StageStats,
    StepRecord,
    TimeCategory,
    TimeInterval,
    TimeTotals,
    TransitionRecord,
)

__all__ = [
    "Analysis",
    "StageStats",
    "StepRecord",
    "TimeCategory",
    "TimeInterval",
    "TimeTotals",
    "TransitionRecord",
    "analyse",
]
