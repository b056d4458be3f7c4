"""The operator with agents that do anything AWS's tables allow, at any time and in any order.

Agents complete while the job is scaled, restart, fall silent and receive calls a cycle late. Operators are killed
before and after they store a decision. The tests assert the invariants of every cycle and the final state.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from integration.hyperpod.operator import (
    JobPhase,
    JobState,
    OperatorDecision,
    StartAgent,
    StopAgent,
    StoppingPhase,
    parse_job_resource,
)
from integration.hyperpod.operator.job_state import CurrentPhase
from tests.support.example_counts import examples
from tests.support.fake_hyperpod_agents import (
    COMPLETED,
    FAULTED,
    READY,
    RUNNING,
    FakeHyperPodAgent,
    FakeHyperPodCluster,
)

_WHICH = st.integers(0, 7)


class Jobs(RuleBasedStateMachine):
    @initialize(
        in_process=st.booleans(),
        can_replace=st.booleans(),
        elastic=st.booleans(),
        spares=st.integers(0, 2),
        most=st.integers(1, 4),
        least=st.integers(1, 4),
        step=st.sampled_from([None, 2]),
        full_after=st.sampled_from([None, 0, 2]),
    )
    def begin(self, in_process, can_replace, elastic, spares, most, least, step, full_after) -> None:
        least = min(least, most)
        group = {"name": "pods", "replicas": least, "maxReplicas": most, "spares": spares}
        policy = {
            "minReplicas": least, "maxReplicas": most, "replicaIncrementStep": step, "scalingTimeoutInSeconds": 5,
            "gracefulShutdownTimeoutInSeconds": 10, "faultyScaleDownTimeoutInSeconds": 5,
        }  # fmt: skip
        restart = {"evalPeriodSeconds": 3600, "numRestartBeforeFullJobRestart": full_after}
        spec = {
            "replicaSpecs": [group],
            "elasticPolicy": policy if elastic else None,
            "runPolicy": {"restartPolicy": restart},
        }
        job = parse_job_resource(
            {"kind": "HyperPodPyTorchJob", "spec": spec}, agent_timeout_s=4.0, stop_timeout_s=6.0, start_timeout_s=10.0
        )
        self.cluster = FakeHyperPodCluster(job, in_process=in_process, can_replace=can_replace)
        self.worlds: dict[str, Any] = {}
        self.late = False
        self.it_runs()

    # -- what happens ---------------------------------------------------------------------------------------------

    @rule(count=st.sampled_from([1, 2, 3, 12]), late=st.booleans())
    def time_passes(self, count, late) -> None:
        self.late = self.late or late
        for _ in range(count):
            before = {one.name: one.state for one in self.cluster.live_agents if not one.silent}
            phase = self.cluster.state.current
            self.judge(self.cluster.run_cycle(late=late), before, phase)

    @rule(which=_WHICH)
    def an_operator_is_killed_before_it_did_anything(self, which) -> None:
        decision = self.cluster.decide()
        self.cluster.state = msgspec.json.decode(msgspec.json.encode(decision.state), type=JobState)

    @rule()
    def it_runs(self) -> None:
        """Let time pass until the job runs or has ended."""
        for _ in range(30):
            if self.cluster.state.phase in {JobPhase.RUNNING, JobPhase.SUCCEEDED, JobPhase.FAILED}:
                break
            self.time_passes(1, late=False)

    @rule()
    def an_operator_is_killed_before_it_stored_anything(self) -> None:
        self.cluster.decide()

    @rule(which=_WHICH)
    def processes_fail(self, which) -> None:
        self.one(which).fail()

    @rule(which=_WHICH)
    def processes_finish(self, which) -> None:
        self.one(which).complete()

    @rule()
    def all_finish_the_moment_the_size_changes(self) -> None:
        """The first SIGUSR1 makes all ranks of a distributed job leave: their agents report COMPLETED."""
        if isinstance(phase := self.cluster.state.current, StoppingPhase) and phase.graceful:
            for one in self.cluster.live_agents:
                one.complete()

    @rule(which=_WHICH, silent=st.booleans())
    def an_agent_is_silent_or_speaks_again(self, which, silent) -> None:
        self.one(which).silent = silent

    @rule(which=_WHICH)
    def a_pod_is_gone(self, which) -> None:
        self.one(which).gone = True

    @rule(which=_WHICH)
    def an_agent_begins_anew(self, which) -> None:
        self.one(which).restart()

    @rule(which=_WHICH, word=st.sampled_from(["", "Unschedulable"]))
    def a_machine_is_bad_or_good_again(self, which, word) -> None:
        self.one(which).node_fault = word

    @rule(which=_WHICH)
    def a_pod_is_asked_back(self, which) -> None:
        self.one(which).leaving = True

    @rule(which=_WHICH, stuck=st.booleans())
    def an_agent_does_not_stop(self, which, stuck) -> None:
        self.one(which).stuck = stuck

    @rule(capacity=st.sampled_from([None, 0, 1, 2, 3]))
    def so_many_are_admitted(self, capacity) -> None:
        self.cluster.capacity = capacity

    @rule(room=st.sampled_from([None, 1, 2, 3]))
    def so_many_find_a_machine(self, room) -> None:
        self.cluster.room = room

    @rule(suspend=st.booleans())
    def a_person_suspends_it_or_resumes(self, suspend) -> None:
        self.cluster.spec = msgspec.structs.replace(self.cluster.spec, suspend=suspend)

    def one(self, which: int) -> Any:
        alive = self.cluster.live_agents
        if not alive:
            self.cluster.run_cycle()
            alive = self.cluster.live_agents
        return alive[which % len(alive)] if alive else FakeHyperPodAgent("nobody")

    # -- what must hold -------------------------------------------------------------------------------------------

    def judge(self, decision: OperatorDecision, before: dict[str, Any], phase: CurrentPhase) -> None:
        told: dict[str, list[str]] = {}
        for action in decision.actions:
            told.setdefault(action.pod, []).append(type(action).__name__)
            if isinstance(action, StartAgent):
                assert before[action.pod] is READY, "only who is ready is started"
                self.world_of(action)
            if isinstance(action, StopAgent) and before[action.pod] not in {RUNNING, COMPLETED, FAULTED}:
                assert isinstance(phase, StoppingPhase), "only who does something is stopped"
                assert action.pod not in phase.escalated, "it was asked once"
        assert all(len(words) == len(set(words)) for words in told.values())

    def world_of(self, start: StartAgent) -> None:
        """Check that all starts of a world agree, and that no two worlds share an address."""
        body = start.body
        world = self.worlds.setdefault(
            body.version, {"ranks": {}, "what": (body.nnodes, body.fault_count, body.master_addr, body.master_port)}
        )
        assert world["what"] == (body.nnodes, body.fault_count, body.master_addr, body.master_port)
        assert world["ranks"].setdefault(body.rank, start.pod) == start.pod
        assert self.cluster.spec.policy.allows(body.nnodes)
        assert 0 <= body.rank < body.nnodes
        counts = [one["what"][1] for one in self.worlds.values()]
        assert len(counts) == len(set(counts))

    @invariant()
    def agents_are_asked_for_nothing_impossible(self) -> None:
        """This holds while calls arrive before the next cycle."""
        if getattr(self, "cluster", None) is not None and not self.late:
            for one in self.cluster.agents.values():
                hasty = [word for word in one.ignored if word != "stopping -> stopping"]
                assert not hasty, f"{one.name} was told what it cannot do: {hasty}"

    @invariant()
    def the_state_can_be_stored(self) -> None:
        if getattr(self, "cluster", None) is not None:
            state = self.cluster.state
            assert msgspec.json.decode(msgspec.json.encode(state), type=JobState) == state

    # -- where it ends --------------------------------------------------------------------------------------------

    def finishes(self) -> bool:
        """Return whether some agents of the world have completed while others still run."""
        states = {one.state for one in self.cluster.members}
        return self.cluster.state.phase is JobPhase.RUNNING and states == {RUNNING, COMPLETED}

    def teardown(self) -> None:
        """Without further events a job runs at its largest allowed size and then completes."""
        cluster = getattr(self, "cluster", None)
        if cluster is None:
            return
        cluster.capacity = cluster.room = None
        cluster.spec = msgspec.structs.replace(cluster.spec, suspend=False)
        for one in cluster.live_agents:
            one.silent, one.stuck, one.node_fault, one.gone = False, False, "", one.gone or one.leaving
        policy = cluster.spec.policy
        most = policy.largest_size_within(policy.max_replicas)
        cluster.run_until(lambda: cluster.state.phase.is_final or cluster.is_running(most) or self.finishes())
        for _ in range(40):
            if cluster.state.phase is JobPhase.RUNNING:
                for one in cluster.members:
                    one.complete()
            cluster.run_cycle()
        assert cluster.state.phase in {JobPhase.SUCCEEDED, JobPhase.FAILED}
        assert cluster.decision is not None
        assert cluster.decision.finished
        assert not cluster.live_agents


def test_job_survives_random_agents():
    run_state_machine_as_test(Jobs, settings=settings(max_examples=examples(60), stateful_step_count=25, deadline=None))


@pytest.mark.nightly
def test_job_survives_random_agents_in_long_runs():
    run_state_machine_as_test(Jobs, settings=settings(max_examples=4000, stateful_step_count=60, deadline=None))
