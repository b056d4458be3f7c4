"""Progress reports of ranks, by which hangs are found: only real steps count."""

from __future__ import annotations

import pytest

from elastic.control.control_plane import RankProgress
from elastic.testing import InMemoryCoordinator
from elastic.workers.event_detector import EventDetector
from elastic.workers.step_barrier import StepBarrier
from elastic.workers.world_handle import World


@pytest.fixture
def seat():
    (seat,) = InMemoryCoordinator(1).planes
    yield seat
    seat.close()


@pytest.fixture
def world(seat):
    place = seat.wait_for_assignment()
    gate = StepBarrier(seat, place.epoch)
    yield World(place, seat, gate)
    gate.close()


def test_progress_before_the_first_step_is_not_a_step(seat, world):
    """The rank compiles, restores and evaluates: a step has a limit of ten minutes, this an hour."""
    with world.pause_watchdog():
        assert seat.last_progress == RankProgress(-1, idle=True)
    assert seat.last_progress == RankProgress(-1)
    steps = world.steps(100, 102)
    next(steps)
    with world.pause_watchdog():
        pass
    assert seat.last_progress == RankProgress(-1)
    next(steps)
    assert seat.last_progress == RankProgress(101, has_sealed=True)


def test_loop_with_its_own_count_progresses_with_each_step(seat, world):
    """A loop without reports was treated as hung after an hour."""
    assert not world.event_detected()
    assert seat.last_progress is None or seat.last_progress.step == -1
    assert not world.event_detected()
    assert seat.last_progress == RankProgress(1, has_sealed=True)
    with world.pause_watchdog():
        assert seat.last_progress == RankProgress(1, idle=True, has_sealed=True)
    assert not world.event_detected()
    assert seat.last_progress == RankProgress(2, has_sealed=True)


def test_world_left_before_its_first_step_reports_no_step(seat, world):
    world.run_cleanups()
    assert seat.last_progress == RankProgress(-1)


@pytest.mark.parametrize(("set_to", "free"), [("", True), ("60", False), ("auto", False)])
def test_external_loop_is_idle_without_a_hang_timeout(seat, monkeypatch, set_to, free):
    """It cannot report that it evaluates, but a stopped process is detected nevertheless."""
    monkeypatch.setenv("ELASTIC_HANG_TIMEOUT", set_to)
    detector = EventDetector(seat)
    assert not detector.is_detected()
    assert seat.last_progress == RankProgress(-1, idle=free)
    assert not detector.is_detected()
    assert seat.last_progress == RankProgress(1, idle=free, has_sealed=True)
    detector.close()
