"""Production rules, each broken on purpose to prove that the simulation detects it.

``python -m tests.worlds --break 'grow at once'`` prints the first schedule that fails.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elastic.world import next_world, world_transition
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import NodeMember
from elastic.world.world_transition import WorldTransition


@dataclass(frozen=True)
class BrokenRule:
    """A replacement for one decision, and the violation that must follow."""

    where: Any
    name: str
    instead: Any
    noticed: str
    """Part of the violation's message."""
    kinds: tuple[str, ...] = ()
    """Kinds of events in the schedules for this rule, in this order. Empty means any kinds."""


def _stop_immediately(turn: WorldTransition, ready: list[NodeMember], missed: list[NodeMember]) -> None:
    turn.stop_job("too few")


def _resume_immediately(turn: WorldTransition, ready: list[NodeMember], missed: list[NodeMember]) -> None:
    if not next_world._form(turn, ready, at_least=1):
        _wait(turn, ready, missed)


def _reversed(chosen: list[NodeMember], places: tuple[str, ...]) -> tuple[str, ...]:
    return _arranged(chosen, places)[::-1]


_wait, _arranged = next_world._wait, world_transition.keep_node_ranks

BROKEN = {
    "allow any size": BrokenRule(
        ScalingPolicy,
        "largest_size_within",
        lambda policy, nodes: min(nodes, policy.max_replicas),
        "not allowed by the policy",
    ),
    "grow at once": BrokenRule(
        WorldTransition, "growth_allowed_s", property(lambda turn: turn.now_s), "the world grows"
    ),
    "resume at once": BrokenRule(next_world, "_wait", _resume_immediately, "without waiting for a replacement"),
    "time out at once": BrokenRule(
        next_world, "_is_past", lambda time_s, _: time_s is not None, "is released before its timeout"
    ),
    "stop at once": BrokenRule(next_world, "_wait", _stop_immediately, "the job stops, although"),
    "count no restarts": BrokenRule(
        WorldTransition, "count_restart", lambda *_: None, "does not come to rest", ("wait", "break node")
    ),
    "avoid no offenders": BrokenRule(WorldTransition, "avoided", lambda _: frozenset(), "have ranks again"),
    "reverse the ranks": BrokenRule(world_transition, "keep_node_ranks", _reversed, "change their order"),
    "ignore preemption deadlines": BrokenRule(
        next_world, "_first_to_leave_s", lambda _: math.inf, "the pause ends after"
    ),
    "never release a node": BrokenRule(
        WorldTransition,
        "release_node",
        lambda turn, member, *_, **__: turn.update_member(member),
        "is still in the job",
    ),
    "replace twice": BrokenRule(
        next_world, "_is_replaced", lambda *_: False, "restarts, although only", ("wait", *["kill rank"] * 3)
    ),
    "never fail the job": BrokenRule(
        WorldTransition, "fail_job", lambda *_: None, "the job continues after", ("wait", *["final fault"] * 3)
    ),
    "keep dead members": BrokenRule(WorldTransition, "remove_member", lambda *_: None, "dead or preempted"),
    "never tick": BrokenRule(next_world, "_timers", lambda _: [], "no event is pending"),
}


@contextlib.contextmanager
def break_rule(name: str | None) -> Iterator[None]:
    """Break the named rule, or none for ``None``, while the block runs."""
    if name is None:
        yield
        return
    rule = BROKEN[name]
    original = vars(rule.where)[rule.name]
    setattr(rule.where, rule.name, rule.instead)
    try:
        yield
    finally:
        setattr(rule.where, rule.name, original)
