"""What became of a job's time: from its ledger to intervals, and from those to numbers. Pure; never imports torch."""

from tieredckpt.goodput.analysis import analyse
from tieredckpt.goodput.model import Analysis, Category, Interval, Recovery, StageStats, StepView, Totals

__all__ = ["Analysis", "Category", "Interval", "Recovery", "StageStats", "StepView", "Totals", "analyse"]
