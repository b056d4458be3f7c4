"""How often a cluster fails. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

DAY_S = 86400.0


class Per(enum.Enum):
    """Of what a mean time between failures is said."""

    GPU = "gpu"
    NODE = "node"
    JOB = "job"


@dataclass(frozen=True)
class Mtbf:
    """A mean time between failures. What a job has many of fails that much more often."""

    seconds: float
    per: Per

    def of_job(self, gpus: int, gpus_per_node: int) -> float:
        """The mean time between failures, in seconds, of a job on so many GPUs."""
        if self.per is Per.JOB:
            return self.seconds
        return self.seconds / (gpus if self.per is Per.GPU else gpus / gpus_per_node)


PRESETS = {"llama-3": Mtbf(54 * DAY_S * 16384 / 419, Per.GPU)}
"""``llama-3``: 419 unexpected interruptions in 54 days on 16,384 GPUs ("The Llama 3 Herd of Models", table 5)."""
