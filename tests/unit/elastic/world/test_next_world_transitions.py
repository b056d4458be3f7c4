"""Every kind of event in every phase: the next phase and the actions."""

from __future__ import annotations

import pytest

from elastic.world import world_state
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import (
    EventBatch,
    HangDetected,
    JobStopRequested,
    NodeFinished,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReady,
    NodeSealed,
    NodesPreempted,
    RankFault,
    RankLost,
    ResizeRequested,
    StepSealed,
    Tick,
    WorldState,
)
from tests.worlds.reconciler_driver import ReconcilerDriver

POLICY = ScalingPolicy(
    min_replicas=2,
    max_replicas=3,
    scaling_timeout_s=10,
    graceful_shutdown_timeout_s=60,
    faulty_scale_down_timeout_s=30,
    restart_timeout_s=100,
)


def _first() -> ReconcilerDriver:
    return ReconcilerDriver(POLICY, "b")


def _running() -> ReconcilerDriver:
    return ReconcilerDriver(POLICY, "abc")


def _broken() -> ReconcilerDriver:
    job = _running()
    job.send_event(RankFault("a", 1, 0, 0, "x"))
    return job


def _waiting() -> ReconcilerDriver:
    job = _running()
    job.send_event(NodeLost("a", 1, "x"))
    job.rank_ready("b", "c")
    return job


def _changing() -> ReconcilerDriver:
    job = _running()
    job.send_event(NodesPreempted(("c",), 1000.0))
    return job


def _stopping() -> ReconcilerDriver:
    job = _running()
    job.send_event(JobStopRequested("x"))
    return job


def _over() -> ReconcilerDriver:
    job = _stopping()
    job.step_sealed("a", "b", "c")
    return job


PHASES = {
    "no world yet": _first,
    "running": _running,
    "forming": _broken,
    "waiting": _waiting,
    "pausing": _changing,
    "stopping": _stopping,
    "over": _over,
}
EVENTS = {
    "node joined": NodeJoined("d", 1, 2),
    "node joined, other life": NodeJoined("b", 2, 2),
    "node ready": NodeReady("b", 1, 2, 0),
    "node sealed": NodeSealed("b", 1, 0),
    "step sealed": StepSealed(0),
    "node finished": NodeFinished("b", 1, 0),
    "node lost": NodeLost("b", 1, "x"),
    "node left": NodeLeft("b", 1),
    "rank lost": RankLost("b", 1, 2, 0, "x"),
    "rank fault": RankFault("b", 1, 0, 0, "x"),
    "hang of a rank": HangDetected(0, "x", "b", 1),
    "hang": HangDetected(0, "x"),
    "preempted": NodesPreempted(("b",), 500.0),
    "resize": ResizeRequested(2),
    "stop": JobStopRequested("y", 20.0),
    "tick": Tick(),
    "several": EventBatch((RankLost("b", 1, 2, 0, "x"), NodeLost("c", 1, "x"))),
}


def outcome(phase: str, event: world_state.WorldEvent) -> str:
    job = PHASES[phase]()
    job.send_event(event)
    return " ".join([job.world.phase.value, *(type(action).__name__ for action in job.actions)])


TABLE = {
    "step sealed": (
        "forming",
        "running",
        "forming",
        "waiting",
        "pausing",
        "pausing",
    ),
    "node joined": (
        "forming",
        "running",
        "forming",
        "waiting",
        "pausing",
        "pausing",
    ),
    "node joined, other life": (
        "forming",
        "forming BreakWorld",
        "forming",
        "waiting RequestNodes",
        "forming BreakWorld",
        "stopped BreakWorld StopJob",
    ),
    "node ready": (
        "forming",
        "forming BreakWorld",
        "forming",
        "waiting",
        "pausing",
        "pausing",
    ),
    "node sealed": (
        "forming",
        "forming BreakWorld",
        "forming",
        "waiting",
        "pausing",
        "pausing",
    ),
    "node finished": (
        "forming",
        "running",
        "forming",
        "waiting",
        "pausing",
        "pausing",
    ),
    "node lost": (
        "forming",
        "forming BreakWorld RequestNodes",
        "forming RequestNodes",
        "waiting RequestNodes",
        "forming BreakWorld RequestNodes",
        "stopped BreakWorld StopJob",
    ),
    "node left": (
        "forming",
        "forming BreakWorld RequestNodes",
        "forming RequestNodes",
        "waiting RequestNodes",
        "forming BreakWorld RequestNodes",
        "stopped BreakWorld StopJob",
    ),
    "rank lost": (
        "forming RespawnRanks",
        "forming BreakWorld RespawnRanks",
        "forming RespawnRanks",
        "forming RespawnRanks",
        "forming BreakWorld RespawnRanks",
        "stopped BreakWorld StopJob",
    ),
    "rank fault": (
        "forming",
        "forming BreakWorld",
        "forming",
        "waiting",
        "forming BreakWorld",
        "stopped BreakWorld StopJob",
    ),
    "hang of a rank": (
        "forming",
        "forming BreakWorld RespawnRanks",
        "forming",
        "waiting",
        "forming BreakWorld RespawnRanks",
        "stopped BreakWorld StopJob",
    ),
    "hang": (
        "forming",
        "forming BreakWorld",
        "forming",
        "waiting",
        "forming BreakWorld",
        "stopped BreakWorld StopJob",
    ),
    "preempted": (
        "forming ReleaseNode",
        "pausing PauseWorld",
        "forming",
        "waiting",
        "pausing",
        "pausing",
    ),
    "resize": (
        "forming",
        "pausing PauseWorld",
        "forming",
        "running FormWorld",
        "pausing",
        "pausing",
    ),
    "stop": (
        "stopped StopJob",
        "pausing PauseWorld",
        "stopped StopJob",
        "stopped StopJob",
        "pausing PauseWorld",
        "pausing PauseWorld",
    ),
    "tick": (
        "forming",
        "running",
        "forming",
        "waiting",
        "pausing",
        "pausing",
    ),
    "several": (
        "forming RespawnRanks",
        "forming BreakWorld RespawnRanks RequestNodes",
        "forming RespawnRanks RequestNodes",
        "waiting RespawnRanks RequestNodes",
        "forming BreakWorld RespawnRanks",
        "stopped BreakWorld StopJob",
    ),
}
"""One column per phase, in the order above; when the job is over, nothing follows from anything."""

CELLS = [(name, phase, TABLE[name][number]) for name in EVENTS for number, phase in enumerate(list(PHASES)[:-1])]


@pytest.mark.parametrize(("name", "phase", "expected"), CELLS, ids=lambda value: value.replace(" ", "-"))
def test_event_leads_to_the_listed_phase_and_actions(name, phase, expected):
    assert outcome(phase, EVENTS[name]) == expected


@pytest.mark.parametrize("name", EVENTS)
def test_nothing_follows_when_the_job_is_over(name):
    assert outcome("over", EVENTS[name]) == "stopped"


def test_the_table_has_every_kind_of_event():
    assert {type(event) for event in EVENTS.values()} == set(world_state.WorldEvent.__args__)


def test_departed_node_is_recorded_in_a_new_world_only():
    before = WorldState(nproc=1, departed={"a": 3})
    after = before.with_departed("a", 2).with_departed("b", 1)
    assert before.departed == {"a": 3}
    assert after.departed == {"a": 3, "b": 1}
