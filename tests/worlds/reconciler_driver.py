"""A driver for tests that send events to a world one after the other."""

from __future__ import annotations

from typing import TypeVar

from elastic.world.next_world import initial_world, next_world
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import NodeJoined, NodeReady, NodeSealed, Tick, WorldAction, WorldEvent

A = TypeVar("A")


class ReconcilerDriver:
    def __init__(
        self, policy: ScalingPolicy, nodes: str = "", *, nproc: int = 2, spares: int = 0, requested_step=None
    ) -> None:
        """Form the first world from ``nodes``, one letter each: "abc" means three nodes."""
        self.policy, self.now_s = policy, 0.0
        self.world = initial_world(policy, nproc=nproc, now_s=0.0, requested_step=requested_step)
        self.actions: tuple[WorldAction, ...] = ()
        for node in nodes:
            self.send_event(NodeJoined(node, 1, nproc, spares=spares))
        for node in nodes:
            self.rank_ready(node, spares=spares)

    def send_event(self, event: WorldEvent, *, at_s: float | None = None) -> tuple[WorldAction, ...]:
        self.now_s = self.now_s if at_s is None else at_s
        self.world, self.actions = next_world(self.world, event, self.policy, self.now_s)
        return self.actions

    def rank_ready(self, *nodes: str, births: int | None = None, spares: int = 0, life: int | None = None) -> None:
        """Report all ranks of these nodes as ready, with all pending replacements done."""
        for node in nodes:
            member = self.world.members[node]
            spawned = member.spawn_count + len(member.pending_replacements) if births is None else births
            self.send_event(NodeReady(node, life or member.generation, spawned, self.world.epoch, spares))

    def step_sealed(self, *nodes: str) -> None:
        for node in nodes:
            self.send_event(NodeSealed(node, self.world.members[node].generation, self.world.epoch, 7))

    def node_joins(self, node: str, *, life: int = 1) -> None:
        self.send_event(NodeJoined(node, life, self.world.nproc))
        self.rank_ready(node)

    def tick(self) -> tuple[WorldAction, ...]:
        """Advance the time to the world's next tick, and send it."""
        assert self.world.next_tick_s is not None
        return self.send_event(Tick(), at_s=self.world.next_tick_s)

    def action_of(self, kind: type[A]) -> A:
        """Return the only action of this kind that followed from the last event."""
        (action,) = (action for action in self.actions if isinstance(action, kind))
        return action
