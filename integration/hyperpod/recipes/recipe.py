"""What a recipe says, in this system's terms. Values only; made by :mod:`integration.hyperpod.recipes.reading`."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.batch.recipes import ScaleConfig
from elastic.world.policy import ScalingPolicy


class Kind(enum.Enum):
    """Which of HyperPod's ways of training a recipe was written for."""

    ELASTIC = "elastic"
    CHECKPOINTLESS = "checkpointless"


@dataclass(frozen=True)
class Checkpoints:
    """Where steps are kept, and how often. Every step is in memory; a few are in the durable tier."""

    every: int = 1
    durable_every: int = 100
    durable: str = ""
    keep_last: int = 0

    def settings(self, recovery: Recovery) -> dict[str, Any]:
        """The tree of a ``$TIEREDCKPT_CONFIG`` file; what is as it would be anyway is left out."""
        durable: dict[str, Any] = {"every": self.durable_every}
        if self.durable:
            durable["url"] = self.durable
        if self.keep_last:
            durable["keep_last"] = self.keep_last
        memory: dict[str, Any] = {"every": self.every}
        if not recovery.live:
            memory["live"] = False
        return {"memory": memory, "peer": {"copies": recovery.copies}, "durable": durable}


@dataclass(frozen=True)
class Recovery:
    """What happens after a fault."""

    in_process: bool = True
    """Processes that survive are not started anew."""
    live: bool = True
    """Their state is given to those that come instead, before anything is read."""
    copies: int = 2
    """Of every shard in the memory of nodes."""


@dataclass(frozen=True)
class Training:
    """What a loop needs besides batch and learning rate; ``None`` where the recipe does not say."""

    method: str = "full"
    """``full`` or ``lora``."""
    lora: int | None = None
    """Rank of the adapters."""
    lora_alpha: float | None = None
    algorithm: str = "sft"
    """``sft``, ``dpo`` or ``pretrain``."""
    steps: int | None = None
    length: int | None = None
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    clip: float | None = None
    warmup: int | None = None
    min_rate: float | None = None


@dataclass(frozen=True)
class Ahead:
    """Batches prepared before they are needed."""

    batches: int
    directory: str = ""


@dataclass(frozen=True)
class Recipe:
    """One recipe, checked: everything in it can be, and fits together."""

    file: str
    """Its name."""
    name: str
    """Of the job."""
    title: str
    kind: Kind
    model: str
    """Name or path of the pretrained model; "" where others say it."""
    devices: int
    """Ranks of a node."""
    model_parallel: int
    """Ranks that share samples."""
    scale: ScaleConfig
    policy: ScalingPolicy
    elastic: bool
    """Whether the recipe itself switches elasticity on."""
    nodes: int
    """Where the job is not elastic."""
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    recovery: Recovery = field(default_factory=Recovery)
    training: Training = field(default_factory=Training)
    ahead: Ahead | None = None
    environ: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What is not as somebody who wrote it might expect."""
    left_alone: tuple[str, ...] = ()
    """Keys that are others', by their topmost name."""
