"""Any event at any time, including impossible ones: the world stays in a valid state."""

from __future__ import annotations

import copy

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elastic.world.next_world import initial_world, next_world
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import (
    BreakWorld,
    EventBatch,
    FormWorld,
    HangDetected,
    JobStopRequested,
    NodeFinished,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReady,
    NodeSealed,
    NodesPreempted,
    PauseWorld,
    RankFault,
    RankLost,
    ResizeRequested,
    StepSealed,
    Tick,
    WorldAction,
    WorldEvent,
    WorldPhase,
    WorldState,
)
from elastic.world.world_transition import avoided_nodes
from tests.support.example_counts import examples

NODES = st.sampled_from("abcde")
LIVES = st.integers(1, 3)
BIRTHS = st.integers(0, 6)
EPOCHS = st.integers(-1, 4)
RANKS = st.integers(0, 1)

EVENTS = st.one_of(
    st.builds(NodeJoined, NODES, LIVES, st.sampled_from((2, 2, 2, 3)), BIRTHS, st.integers(0, 1)),
    st.builds(NodeReady, NODES, LIVES, BIRTHS, EPOCHS, st.integers(0, 1)),
    st.builds(NodeSealed, NODES, LIVES, EPOCHS),
    st.builds(StepSealed, EPOCHS),
    st.builds(NodeFinished, NODES, LIVES, EPOCHS),
    st.builds(NodeLost, NODES, LIVES, st.just("x")),
    st.builds(NodeLeft, NODES, LIVES),
    st.builds(RankLost, NODES, LIVES, BIRTHS, RANKS, st.just("x")),
    st.builds(RankFault, NODES, LIVES, EPOCHS, RANKS, st.just("x")),
    st.builds(HangDetected, EPOCHS, st.just("x"), st.sampled_from(("", "a", "b")), st.integers(-1, 2)),
    st.builds(NodesPreempted, st.tuples(NODES), st.floats(0, 500)),
    st.builds(ResizeRequested, st.none() | st.integers(0, 5)),
    st.builds(JobStopRequested, st.just("x"), st.none() | st.floats(0, 500)),
    st.builds(Tick),
)
POLICIES = st.sampled_from(
    [
        ScalingPolicy(min_replicas=1, max_replicas=3, scaling_timeout_s=0),
        ScalingPolicy(min_replicas=2, max_replicas=4, replica_increment_step=2, scaling_timeout_s=10),
        ScalingPolicy(min_replicas=1, max_replicas=5, replica_discrete_values=(1, 3, 5), graceful_shutdown_timeout_s=0),
        ScalingPolicy(max_replicas=2, num_restart_before_full_job_restart=0, faulty_scale_down_timeout_s=0),
    ]
)


class AnyWorld(RuleBasedStateMachine):
    @initialize(policy=POLICIES, nodes=st.integers(0, 5))
    def begin(self, policy, nodes):
        self.policy, self.now_s = policy, 0.0
        self.world = initial_world(policy, nproc=2, now_s=0.0)
        self.epoch, self.runs = -1, False
        for node in "abcde"[:nodes]:
            self.tell(NodeJoined(node, 1, 2))
            self.tell(NodeReady(node, 1, 2))

    @rule(event=EVENTS)
    def hear(self, event):
        self.tell(event)

    @rule(events=st.lists(EVENTS, max_size=4))
    def hear_several(self, events):
        self.tell(EventBatch(tuple(events)))

    @rule(data=st.data())
    def a_member_is_ready(self, data):
        if self.world.members:
            member = data.draw(st.sampled_from(sorted(self.world.members.values(), key=lambda one: one.node)))
            births = member.spawn_count + len(member.pending_replacements)
            self.tell(NodeReady(member.node, member.generation, births, self.world.epoch))

    @rule(seconds=st.sampled_from((0.1, 5.0, 40.0, 400.0)))
    def wait(self, seconds):
        self.now_s += seconds
        self.tell(Tick())

    @rule()
    def tick(self):
        if self.world.next_tick_s is not None:
            self.now_s = max(self.now_s, self.world.next_tick_s)
            self.tell(Tick())

    def tell(self, event: WorldEvent) -> None:
        before, kept = self.world, copy.deepcopy(self.world)
        event = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=WorldEvent)
        self.world, actions = next_world(before, event, self.policy, self.now_s)
        assert before == kept
        assert next_world(before, event, self.policy, self.now_s) == (self.world, actions)
        if before.phase.is_over:
            assert (self.world, actions) == (before, ())
        heard = event.events if isinstance(event, EventBatch) else (event,)
        self.ready = {one.node for one in before.members.values() if one.ready}
        self.ready |= {one.node for one in heard if isinstance(one, NodeReady)}
        for action in actions:
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(action), type=WorldAction) == action
            self.follow(action, before)

    def follow(self, action: WorldAction, before: WorldState) -> None:
        if isinstance(action, FormWorld):
            assert action.epoch == self.epoch + 1
            assert self.policy.allows(len(action.nodes))
            assert len(set(action.nodes)) == len(action.nodes)
            stay = [node for node in before.ranked_nodes if node in action.nodes]
            assert stay == [node for node in action.nodes if node in before.ranked_nodes]
            self.epoch, self.runs = action.epoch, True
            assert self.ready >= set(action.nodes), "its ranks have not come"
            if all(node not in before.members or before.members[node].epoch < 0 for node in action.nodes):
                left = {one.node for one in self.world.members.values() if one.epoch >= 0} - set(action.nodes)
                assert left <= avoided_nodes(self.world, self.policy, self.now_s), "who knows the job is left behind"
        elif isinstance(action, BreakWorld):
            assert (self.runs, action.epoch) == (True, self.epoch)
            self.runs = False
        elif isinstance(action, PauseWorld):
            assert (self.runs, action.epoch) == (True, self.epoch)
            assert action.deadline_s >= self.now_s

    @invariant()
    def it_is_one_that_can_be(self):
        world = self.world
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(world), type=WorldState) == world
        assert world.epoch == self.epoch
        assert {member.node for member in world.members.values() if member.has_ranks} <= set(world.ranked_nodes)
        assert all(world.departed.get(node, -1) < member.generation for node, member in world.members.items())
        assert world.next_tick_s is None or world.next_tick_s > self.now_s
        if world.phase.is_over:
            assert world.next_tick_s is None
        if world.phase is WorldPhase.RUNNING:
            assert self.policy.allows(world.size)
            assert all(node in world.members or node in world.finished_nodes for node in world.ranked_nodes)
            assert not any(member.ready for member in world.members.values() if member.has_ranks)
        if world.phase is WorldPhase.WAITING:
            assert world.next_tick_s is not None


TestAnyWorld = AnyWorld.TestCase
TestAnyWorld.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
