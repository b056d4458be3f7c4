"""The coordinator allocates the epochs of incarnations, and a later world has the greater one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elastic.control.control_messages import RankPhase
from elastic.world.world_state import SealedStep
from peerstore.shard_records import EPOCHS_PER_WORLD, ShardKey
from tests.support.control_simulation import ControlSimulation, SimulatedRank
from tests.support.example_counts import examples
from tieredckpt.session.incarnation import IncarnationTracker, decide_save, use_world_epoch


def world_epochs(table: ControlSimulation) -> list[int]:
    """Return the incarnation epoch allocated for each world, in world order."""
    found = {place.epoch: place.incarnation_epoch for place in table.assignments}
    return [found[epoch] for epoch in sorted(found)]


def test_each_world_has_epochs_above_those_of_the_world_before():
    table = ControlSimulation(3)
    table.clock_offset_s = -table.now  # a clock at the epoch
    for loss in (table.lose_rank, table.lose_rank, table.resize):
        table.run_without_faults(20)
        loss(1)
    table.run_without_faults(20)
    epochs = world_epochs(table)
    assert len(epochs) == 4
    assert all(later >= before + EPOCHS_PER_WORLD for before, later in itertools.pairwise(epochs))


@pytest.mark.parametrize("remembers", [True, False])
def test_coordinator_with_a_late_clock_learns_the_epochs_from_nodes(remembers):
    table = ControlSimulation(3)
    table.run_without_faults(15)
    table.clock_offset_s = -500.0
    table.restart_coordinator(remembers=remembers)
    table.lose_rank(0)
    table.run_without_faults(40)
    before, later = world_epochs(table)
    assert later == before + EPOCHS_PER_WORLD


def test_nodes_outside_the_world_know_its_epochs():
    table = ControlSimulation(3)
    table.run_without_faults(15)
    table.resize(1)
    table.run_without_faults(30)
    (inside,) = table.desk.snapshot().world.ranked_nodes
    newest = table.desk.snapshot().world_spec.incarnation_epoch
    table.clock_offset_s = -900.0
    table.restart_coordinator(remembers=False)
    table.lose_node(int(inside.removeprefix("n")))
    table.run_without_faults(120)
    assert table.desk.snapshot().world_spec.incarnation_epoch > newest


def test_new_coordinator_exceeds_the_number_of_an_unreachable_world():
    table = ControlSimulation(1)
    table.run_without_faults(15)
    table.disconnect_node(0)
    table.restart_coordinator(remembers=False)
    table.add()
    for _ in range(40):
        table.exchange_all()
        table.advance(1.0)
    first, second = (node.seats.world.epoch for node in table.nodes.values())
    assert second > first
    table.run_without_faults(40)
    table.check_one_world()
    assert table.desk.snapshot().world.epoch > second


class History(RuleBasedStateMachine):
    """Random worlds and saves of their ranks under coordinators that restart."""

    @initialize(nodes=st.integers(1, 4))
    def begin(self, nodes):
        self.table = ControlSimulation(nodes)
        self.table.run_without_faults(15)
        self.trackers: dict[SimulatedRank, IncarnationTracker] = {}
        self.entered: dict[SimulatedRank, int] = {}
        self.known: dict[str, int] = {}
        self.incarnations: list[tuple[int, int, str]] = []
        """The world, number and name of each, in the order of their first saves."""
        self.newest_sealed: SealedStep | None = None
        self.judged = 0
        self.names = itertools.count()

    @rule(number=st.integers(0, 11))
    def lose_rank(self, number):
        self.table.lose_rank(number)

    @rule(number=st.integers(0, 11))
    def lose_node(self, number):
        if len(self.table.nodes) > 1:
            self.table.lose_node(number)

    @rule(number=st.integers(0, 11))
    def cut(self, number):
        self.table.disconnect_node(number)

    @rule(number=st.integers(0, 11))
    def drain(self, number):
        self.table.preempt_node(number)

    @rule()
    def heal(self):
        self.table.heal_all()

    @rule()
    def add(self):
        if len(self.table.nodes) < 6:
            self.table.add()

    @rule(nodes=st.integers(1, 6))
    def resize(self, nodes):
        self.table.resize(nodes)

    @rule()
    def restart_coordinator(self):
        self.table.restart_coordinator()

    @rule(turns=st.integers(0, 12))
    def stop(self, turns):
        self.table.stop()
        self.exchange(turns)

    @rule()
    def replace_coordinator_by_one_that_knows_nothing(self):
        self.table.restart_coordinator(remembers=False)

    @rule(turns=st.integers(1, 12))
    def exchange(self, turns):
        for _ in range(turns):
            self.table.exchange_all()
            self.table.advance(1.0)

    @rule(number=st.integers(0, 11))
    def deliver(self, number):
        self.table.exchange_node(number)

    @rule(rewinds=st.booleans(), turns=st.integers(6, 20))
    def save_later(self, rewinds, turns):
        self.exchange(turns)
        self.save(rewinds)

    @rule(nodes=st.integers(1, 3), turns=st.integers(6, 9))
    def restart_coordinator_during_a_resize(self, nodes, turns):
        self.table.resize(nodes)
        self.exchange(turns)
        self.table.restart_coordinator()
        self.exchange(8)

    @rule(rewinds=st.booleans())
    def save(self, rewinds):
        """Save on all ranks of one world by :func:`decide_save`; ``rewinds``: after another restore."""
        inside = [
            one for node in self.table.nodes.values() for one in node.ranks.values() if one.stand is RankPhase.IN_WORLD
        ]
        world = max((one.epoch for one in inside), default=-1)
        ranks = [one for one in inside if one.epoch == world]
        if world < 0 or len(ranks) < self.table.sizes[world]:
            return
        places = [place for place in self.table.assignments if place.epoch == world]
        step, proposals = max(one.step for one in ranks), []
        for one in ranks:
            tracker = self.trackers.setdefault(one, IncarnationTracker("job"))
            if self.entered.get(one) != world:
                self.entered[one] = world
                tracker.leave_world()
            if rewinds:
                tracker.rewind_to(step - 1)
            with use_world_epoch(places[0].incarnation_epoch):
                proposals.append(tracker.propose(step, tracker.capture(), self.known.get(one.node, 0), None))
        decision = decide_save(proposals, f"i{next(self.names)}", self.table.clock_ms)
        number, name = decision.incarnation
        for part, one in enumerate(ranks):
            self.trackers[one].adopt(decision, proposals[part].point)
            self.trackers[one].record_sealed(ShardKey("job", step, number, name, decision.attempt, part))
            self.known[one.node] = max(number, self.known.get(one.node, 0))
        if (world, number, name) not in self.incarnations:
            self.incarnations.append((world, number, name))

    @invariant()
    def incarnations_are_one_sequence(self):
        by_world = sorted(self.incarnations, key=lambda one: one[0])  # a world without a connection may save later
        numbers = [number for _, number, _ in by_world]
        assert len(set(numbers)) == len(numbers), f"two incarnations share a number: {self.incarnations}"
        assert numbers == sorted(numbers), f"a later incarnation has the smaller number: {self.incarnations}"

    @invariant()
    def a_named_step_is_the_one_sealed_last(self):
        """A world restores by name the step that the last sealing world sealed at its end."""
        new, self.judged = self.table.assignments[self.judged :], len(self.table.assignments)
        for place in new:
            sealed = [epoch for epoch in self.table.targets if epoch < place.epoch]
            if place.resume_from is not None:
                assert place.resume_from == SealedStep("job", self.table.targets[max(sealed)], max(sealed) + 1)

    @invariant()
    def a_graceful_stop_or_transition_loses_nothing(self):
        """The step that the next world or run restores includes every step of that world's ranks."""
        named = {place.resume_from for place in self.table.assignments} | self.table.stopped_at
        for sealed in named - {None}:
            world = sealed.epoch - 1
            assert sealed.step == self.table.targets[world]
            assert sealed.step >= self.table.reached[world]


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=examples(250), stateful_step_count=25, deadline=None)
