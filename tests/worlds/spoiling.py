"""Rules of production, each broken on purpose, to see that the simulation finds out.

``python -m tests.worlds --break 'grow at once'`` looks for the first schedule in which it shows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elastic.world import choosing, happenings, settling
from elastic.world.members import Member
from elastic.world.policy import ScalingPolicy
from elastic.world.turn import Turn


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


def _stop_at_once(turn: Turn, ready: list[Member], missed: list[Member]) -> None:
    turn.stop("too few")


def _go_on_at_once(turn: Turn, ready: list[Member], missed: list[Member]) -> None:
    if not settling._form(turn, ready, at_least=1):
        _wait(turn, ready, missed)


def _turned_round(chosen: list[Member], places: tuple[str, ...]) -> tuple[str, ...]:
    return _arranged(chosen, places)[::-1]


_wait, _arranged = settling._wait, choosing.arranged

SPOILT = {
    "allow any size": Spoilt(
        ScalingPolicy, "at_most", lambda policy, nodes: min(nodes, policy.max_replicas), "no size the policy allows"
    ),
    "grow at once": Spoilt(Turn, "may_grow_s", property(lambda turn: turn.now_s), "the world grows"),
    "wait for nobody": Spoilt(settling, "_wait", _go_on_at_once, "nobody has waited for a replacement"),
    "be impatient": Spoilt(settling, "_is_past", lambda time_s, _: time_s is not None, "is sent away, and has had no"),
    "stop at once": Spoilt(settling, "_wait", _stop_at_once, "the job stops, although"),
    "count no restarts": Spoilt(Turn, "count", lambda *_: None, "does not come to rest", ("wait", "curse")),
    "avoid nobody": Spoilt(Turn, "avoided", lambda _: frozenset(), "have ranks again"),
    "turn round": Spoilt(choosing, "arranged", _turned_round, "change their order"),
    "take as long as it takes": Spoilt(settling, "_first_to_leave_s", lambda _: math.inf, "a pause goes on after"),
    "never let go": Spoilt(Turn, "release", lambda turn, member, *_, **__: turn.put(member), "is still in the job"),
    "replace twice": Spoilt(
        happenings, "_is_replaced", lambda *_: False, "restarts, although only", ("wait", *["kill rank"] * 3)
    ),
    "never despair": Spoilt(Turn, "give_up", lambda *_: None, "the job goes on after", ("wait", *["final"] * 3)),
    "forget the dead": Spoilt(Turn, "drop", lambda *_: None, "dead or asked back"),
    "tick never": Spoilt(settling, "_timers", lambda _: [], "nothing is left to happen"),
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
