"""What follows from an event: the next world, and what is to be done. Pure: the same in, the same out."""

from __future__ import annotations

from collections.abc import Iterable

from elastic.world.actions import Action
from elastic.world.events import Event, NodeReport
from elastic.world.members import World
from elastic.world.policy import ScalingPolicy

Decision = tuple[World, tuple[Action, ...]]


def begun(policy: ScalingPolicy, *, nproc: int, now_s: float) -> World:
    """A job nobody has joined yet."""
    raise NotImplementedError


def decide(world: World, event: Event, policy: ScalingPolicy, now_s: float) -> Decision:
    """What follows from ``event``, and from time having passed since the last one."""
    raise NotImplementedError


def rebuilt(reports: Iterable[NodeReport], policy: ScalingPolicy, *, nproc: int, now_s: float) -> Decision:
    """The world as its supervisors know it, for a coordinator that has forgotten it."""
    raise NotImplementedError
