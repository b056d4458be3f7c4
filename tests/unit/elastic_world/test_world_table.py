"""Every kind of event in every phase: which phase follows, and what is done."""

from __future__ import annotations

import pytest

from elastic.world import events
from elastic.world.events import (
    CapacityAskedBack,
    CapacityOffered,
    Hang,
    NodeFinished,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeReady,
    NodeSealed,
    Offender,
    RankFault,
    RankLost,
    ResizeAsked,
    Several,
    StopAsked,
    Tick,
)
from elastic.world.policy import ScalingPolicy
from tests.worlds.told import Told

POLICY = ScalingPolicy(
    min_replicas=2,
    max_replicas=3,
    scaling_timeout_s=10,
    graceful_shutdown_timeout_s=60,
    faulty_scale_down_timeout_s=30,
    restart_timeout_s=100,
)


def _first() -> Told:
    return Told(POLICY, "b")


def _running() -> Told:
    return Told(POLICY, "abc")


def _broken() -> Told:
    job = _running()
    job.tell(RankFault("a", 1, 0, 0, "x"))
    return job


def _waiting() -> Told:
    job = _running()
    job.tell(NodeLost("a", 1, "x"))
    job.ready("b", "c")
    return job


def _changing() -> Told:
    job = _running()
    job.tell(CapacityAskedBack(("c",), 1000.0))
    return job


def _stopping() -> Told:
    job = _running()
    job.tell(StopAsked("x"))
    return job


def _over() -> Told:
    job = _stopping()
    job.sealed("a", "b", "c")
    return job


PHASES = {
    "no world yet": _first,
    "running": _running,
    "forming": _broken,
    "waiting": _waiting,
    "changing": _changing,
    "stopping": _stopping,
    "over": _over,
}
EVENTS = {
    "node joined": NodeJoined("d", 1, 2),
    "node joined, other life": NodeJoined("b", 2, 2),
    "node ready": NodeReady("b", 1, 2, 0),
    "node sealed": NodeSealed("b", 1, 0),
    "node finished": NodeFinished("b", 1, 0),
    "node lost": NodeLost("b", 1, "x"),
    "node left": NodeLeft("b", 1),
    "rank lost": RankLost("b", 1, 2, 0, "x"),
    "rank fault": RankFault("b", 1, 0, 0, "x"),
    "hang of a rank": Hang(0, "x", "b", 1),
    "hang": Hang(0, "x"),
    "offender": Offender("b", "x"),
    "offered": CapacityOffered(1),
    "asked back": CapacityAskedBack(("b",), 500.0),
    "resize": ResizeAsked(2),
    "stop": StopAsked("y", 20.0),
    "tick": Tick(),
    "several": Several((RankLost("b", 1, 2, 0, "x"), NodeLost("c", 1, "x"))),
}


def outcome(phase: str, event: events.Event) -> str:
    job = PHASES[phase]()
    job.tell(event)
    return " ".join([job.world.phase.value, *(type(action).__name__ for action in job.actions)])


TABLE = {
    "node joined": (
        "forming",
        "running",
        "forming",
        "waiting",
        "changing",
        "changing",
    ),
    "node joined, other life": (
        "forming",
        "forming Break",
        "forming",
        "waiting Ask",
        "forming Break",
        "stopped Break Stop",
    ),
    "node ready": (
        "forming",
        "forming Break",
        "forming",
        "waiting",
        "changing",
        "changing",
    ),
    "node sealed": (
        "forming",
        "forming Break",
        "forming",
        "waiting",
        "changing",
        "changing",
    ),
    "node finished": (
        "forming",
        "running",
        "forming",
        "waiting",
        "changing",
        "changing",
    ),
    "node lost": (
        "forming",
        "forming Break Ask",
        "forming Ask",
        "waiting Ask",
        "forming Break Ask",
        "stopped Break Stop",
    ),
    "node left": (
        "forming",
        "forming Break Ask",
        "forming Ask",
        "waiting Ask",
        "forming Break Ask",
        "stopped Break Stop",
    ),
    "rank lost": (
        "forming Respawn",
        "forming Break Respawn",
        "forming Respawn",
        "forming Respawn",
        "forming Break Respawn",
        "stopped Break Stop",
    ),
    "rank fault": (
        "forming",
        "forming Break",
        "forming",
        "waiting",
        "forming Break",
        "stopped Break Stop",
    ),
    "hang of a rank": (
        "forming",
        "forming Break Respawn",
        "forming",
        "waiting",
        "forming Break Respawn",
        "stopped Break Stop",
    ),
    "hang": (
        "forming",
        "forming Break",
        "forming",
        "waiting",
        "forming Break",
        "stopped Break Stop",
    ),
    "offender": (
        "forming",
        "running",
        "forming",
        "waiting",
        "changing",
        "changing",
    ),
    "offered": (
        "forming Ask",
        "running",
        "forming",
        "waiting Ask",
        "changing Ask",
        "changing",
    ),
    "asked back": (
        "forming Release",
        "changing Pause",
        "forming",
        "waiting",
        "changing",
        "changing",
    ),
    "resize": (
        "forming",
        "changing Pause",
        "forming",
        "running Form",
        "changing",
        "changing",
    ),
    "stop": (
        "stopped Stop",
        "changing Pause",
        "stopped Stop",
        "stopped Stop",
        "changing Pause",
        "changing Pause",
    ),
    "tick": (
        "forming",
        "running",
        "forming",
        "waiting",
        "changing",
        "changing",
    ),
    "several": (
        "forming Respawn",
        "forming Break Respawn Ask",
        "forming Respawn Ask",
        "waiting Respawn Ask",
        "forming Break Respawn",
        "stopped Break Stop",
    ),
}
"""One column per phase, in the order above; when the job is over, nothing follows from anything."""

CELLS = [(name, phase, TABLE[name][number]) for name in EVENTS for number, phase in enumerate(list(PHASES)[:-1])]


@pytest.mark.parametrize(("name", "phase", "expected"), CELLS, ids=lambda value: value.replace(" ", "-"))
def test_what_follows(name, phase, expected):
    assert outcome(phase, EVENTS[name]) == expected


@pytest.mark.parametrize("name", EVENTS)
def test_nothing_follows_when_the_job_is_over(name):
    assert outcome("over", EVENTS[name]) == "stopped"


def test_the_table_has_every_kind_of_event():
    assert {type(event) for event in EVENTS.values()} == set(events.Event.__args__)
