"""What follows from an event: the next world, and what is to be done. Pure: the same in, the same out.

On a loss, in this order: a spare takes the place (a warm process of the node, a node that stands by), a process is
started anew where it was, a replacement is waited for, the world becomes smaller, the job stops. A change that was
wanted (more nodes, nodes asked back) first lets all ranks come to one step and seal.

The job's memory is found through the nodes that were in a world before. So one of them at least is in the next, and
is waited for while its ranks are started anew, also where others are ready; unless all of them are to be avoided.
"""

from __future__ import annotations

from elastic.world.actions import Action
from elastic.world.events import Event
from elastic.world.happenings import happen
from elastic.world.members import World
from elastic.world.policy import ScalingPolicy
from elastic.world.rebuilding import rebuilt
from elastic.world.settling import settle
from elastic.world.turn import Turn

__all__ = ["begun", "decide", "rebuilt"]


def begun(policy: ScalingPolicy, *, nproc: int, now_s: float) -> World:
    """A job nobody has joined yet."""
    return World(nproc=nproc, began_s=now_s, goal=policy.wanted)


def decide(world: World, event: Event, policy: ScalingPolicy, now_s: float) -> tuple[World, tuple[Action, ...]]:
    """What follows from ``event``, and from time having passed since the last one.

    ``now_s`` is any clock that does not go back; all times in events, actions and the world are on it. The world that
    was given is as good as before.
    """
    turn = Turn(world, policy, now_s)
    happen(turn, event)
    if not world.phase.over:
        settle(turn)
    return turn.world, tuple(turn.actions)
