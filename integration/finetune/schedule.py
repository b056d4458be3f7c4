"""The learning rate of a step. A function of its number alone: nothing has to be kept, or restored."""

from __future__ import annotations

import math

from integration.finetune.job import Shape


def rate_at(step: int, total: int, *, peak: float, shape: Shape, warmup: int = 0, least: float = 0.0) -> float:
    """Up to ``peak`` in ``warmup`` steps, then down to ``least``, which the step after the last would have."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if shape == "constant":
        return peak
    length = max(1, total - warmup)
    part = min(1.0, (step - warmup) / length)
    if shape == "linear":
        return least + (peak - least) * (1 - part)
    return least + (peak - least) * (1 + math.cos(math.pi * part)) / 2
