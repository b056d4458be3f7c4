"""Who is in the next world, and in which order: as few as possible get another rank than they had."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from elastic.world.members import Member, World
from elastic.world.policy import ScalingPolicy


def limit(world: World, policy: ScalingPolicy) -> int:
    """The greatest size that is wanted."""
    return policy.at_most(policy.max_replicas if world.cap is None else world.cap)


def usable(world: World) -> list[Member]:
    """Who could be in the next world, as far as one knows."""
    return [member for member in world.members.values() if not member.leaving]


def best(members: Iterable[Member], world: World, avoid: Collection[str]) -> list[Member]:
    """Whom to take first: no offenders, who has a rank already, the lower ranks, who came first."""
    position = {node: number for number, node in enumerate(world.places)}

    def order(member: Member) -> tuple[bool, bool, int]:
        number = position[member.node] if member.placed else member.joined
        return member.node in avoid, not member.placed, number

    return sorted(members, key=order)


def arranged(chosen: Sequence[Member], places: Sequence[str]) -> tuple[str, ...]:
    """Who stays, or comes back, keeps its seat; who is new takes the seat of one who went, or the end."""
    nodes = [member.node for member in chosen]
    staying = set(nodes).intersection(places)
    new = iter([node for node in nodes if node not in staying])
    filled = (place if place in staying else next(new, None) for place in places)
    return (*(node for node in filled if node is not None), *new)


def witnesses(world: World) -> list[Member]:
    """Who was in the newest world that anybody here was in, or in an older one with somebody who was.

    What the job has in memory is found through them. A node that was in none knows of no other that keeps anything: a
    world of such nodes alone would begin anew.
    """
    here = usable(world)
    newest = max((member.epoch for member in here), default=-1)
    met = min((member.since for member in here if member.epoch == newest), default=-1)
    return [member for member in here if member.epoch >= max(met, 0)]


def expendable(world: World, count: int, avoid: Collection[str] = ()) -> tuple[str, ...]:
    """Whom to give back where the cluster leaves the choice: who has no rank, then offenders, then the last ranks."""
    standby = [member for member in usable(world) if not member.placed]
    placed = [member for member in usable(world) if member.placed]
    last_first = (*reversed(best(standby, world, avoid)), *reversed(best(placed, world, avoid)))
    return tuple(member.node for member in last_first[:count])
