"""Rules of production, each broken on purpose, to see that the simulation finds out.

``python -m tests.worlds --break 'grow at once'`` looks for the first schedule in which it shows.
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
    """What is put in the place of one decision, and which invariant is to notice."""

    where: Any
    name: str
    instead: Any
    noticed: str
    """Part of what the violation says."""
    kinds: tuple[str, ...] = ()
    """What happens in the schedules that look for it, in this order; empty: anything."""


def _stop_immediately(turn: WorldTransition, ready: list[NodeMember], missed: list[NodeMember]) -> None:
    turn.stop_job("too few")


def _resume_immediately(turn: WorldTransition, ready: list[NodeMember], missed: list[NodeMember]) -> None:
    if not next_world._form(turn, ready, at_least=1):
        _wait(turn, ready, missed)


def _reversed(chosen: list[NodeMember], places: tuple[str, ...]) -> tuple[str, ...]:
    return _arranged(chosen, places)[::-1]


_wait, _arranged = next_world._wait, world_transition.keep_node_ranks

SPOILT = {
    "allow any size": BrokenRule(
        ScalingPolicy,
        "largest_size_within",
        lambda policy, nodes: min(nodes, policy.max_replicas),
        "no size the policy allows",
    ),
    "grow at once": BrokenRule(
        WorldTransition, "growth_allowed_s", property(lambda turn: turn.now_s), "the world grows"
    ),
    "wait for nobody": BrokenRule(next_world, "_wait", _resume_immediately, "nobody has waited for a replacement"),
    "be impatient": BrokenRule(
        next_world, "_is_past", lambda time_s, _: time_s is not None, "is sent away, and has had no"
    ),
    "stop at once": BrokenRule(next_world, "_wait", _stop_immediately, "the job stops, although"),
    "count no restarts": BrokenRule(
        WorldTransition, "count_restart", lambda *_: None, "does not come to rest", ("wait", "curse")
    ),
    "avoid nobody": BrokenRule(WorldTransition, "avoided", lambda _: frozenset(), "have ranks again"),
    "turn round": BrokenRule(world_transition, "keep_node_ranks", _reversed, "change their order"),
    "take as long as it takes": BrokenRule(
        next_world, "_first_to_leave_s", lambda _: math.inf, "a pause goes on after"
    ),
    "never let go": BrokenRule(
        WorldTransition,
        "release_node",
        lambda turn, member, *_, **__: turn.update_member(member),
        "is still in the job",
    ),
    "replace twice": BrokenRule(
        next_world, "_is_replaced", lambda *_: False, "restarts, although only", ("wait", *["kill rank"] * 3)
    ),
    "never despair": BrokenRule(
        WorldTransition, "fail_job", lambda *_: None, "the job goes on after", ("wait", *["final"] * 3)
    ),
    "forget the dead": BrokenRule(WorldTransition, "remove_member", lambda *_: None, "dead or preempted"),
    "tick never": BrokenRule(next_world, "_timers", lambda _: [], "nothing is left to happen"),
}


@contextlib.contextmanager
def break_rule(name: str | None) -> Iterator[None]:
    """While the block runs, this rule does not hold; ``None`` breaks none."""
    if name is None:
        yield
        return
    rule = SPOILT[name]
    kept = vars(rule.where)[rule.name]
    setattr(rule.where, rule.name, rule.instead)
    try:
        yield
    finally:
        setattr(rule.where, rule.name, kept)
