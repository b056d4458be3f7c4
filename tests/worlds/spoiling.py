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
class Spoilt:
    """What is put in the place of one decision, and which invariant is to notice."""

    where: Any
    name: str
    instead: Any
    noticed: str
    """Part of what the violation says."""
    kinds: tuple[str, ...] = ()
    """What happens in the schedules that look for it, in this order; empty: anything."""


def _stop_at_once(turn: WorldTransition, ready: list[NodeMember], missed: list[NodeMember]) -> None:
    turn.stop_job("too few")


def _go_on_at_once(turn: WorldTransition, ready: list[NodeMember], missed: list[NodeMember]) -> None:
    if not next_world._form(turn, ready, at_least=1):
        _wait(turn, ready, missed)


def _turned_round(chosen: list[NodeMember], places: tuple[str, ...]) -> tuple[str, ...]:
    return _arranged(chosen, places)[::-1]


_wait, _arranged = next_world._wait, world_transition.keep_node_ranks

SPOILT = {
    "allow any size": Spoilt(
        ScalingPolicy,
        "largest_size_within",
        lambda policy, nodes: min(nodes, policy.max_replicas),
        "no size the policy allows",
    ),
    "grow at once": Spoilt(WorldTransition, "growth_allowed_s", property(lambda turn: turn.now_s), "the world grows"),
    "wait for nobody": Spoilt(next_world, "_wait", _go_on_at_once, "nobody has waited for a replacement"),
    "be impatient": Spoilt(
        next_world, "_is_past", lambda time_s, _: time_s is not None, "is sent away, and has had no"
    ),
    "stop at once": Spoilt(next_world, "_wait", _stop_at_once, "the job stops, although"),
    "count no restarts": Spoilt(
        WorldTransition, "count_restart", lambda *_: None, "does not come to rest", ("wait", "curse")
    ),
    "avoid nobody": Spoilt(WorldTransition, "avoided", lambda _: frozenset(), "have ranks again"),
    "turn round": Spoilt(world_transition, "keep_node_ranks", _turned_round, "change their order"),
    "take as long as it takes": Spoilt(next_world, "_first_to_leave_s", lambda _: math.inf, "a pause goes on after"),
    "never let go": Spoilt(
        WorldTransition,
        "release_node",
        lambda turn, member, *_, **__: turn.update_member(member),
        "is still in the job",
    ),
    "replace twice": Spoilt(
        next_world, "_is_replaced", lambda *_: False, "restarts, although only", ("wait", *["kill rank"] * 3)
    ),
    "never despair": Spoilt(
        WorldTransition, "fail_job", lambda *_: None, "the job goes on after", ("wait", *["final"] * 3)
    ),
    "forget the dead": Spoilt(WorldTransition, "remove_member", lambda *_: None, "dead or preempted"),
    "tick never": Spoilt(next_world, "_timers", lambda _: [], "nothing is left to happen"),
}


@contextlib.contextmanager
def spoilt_rule(name: str | None) -> Iterator[None]:
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
