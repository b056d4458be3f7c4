"""Goodput: how much of a job's time was, or will be, work that stays. Pure; never imports torch."""

from tieredckpt.goodput.analysis import analyse
from tieredckpt.goodput.model import Analysis, Category, Interval, Recovery, StageStats, StepView, Totals

__all__ = ["Analysis", "Category", "Interval", "Recovery", "StageStats", "StepView", "Totals", "analyse"]
