"""``elastic_event_detected()``: one answer for all ranks at a step; signal handlers remain."""

from __future__ import annotations

import signal
import threading

import pytest

from elastic.control.control_plane import NoticeKind
from elastic.testing import InMemoryCoordinator
from elastic.workers import launch_environment
from elastic.workers.event_detector import EventDetector, close_detectors, elastic_event_detected
from elastic.workers.store_control_plane import StoreControlPlane
from tests.support.control_planes import PATIENCE_S, start_all, wait_results
from tests.support.local_nodes import wait_until


@pytest.fixture
def alone(monkeypatch):
    """The process's own detector, in a world of one."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    planes = []
    make = launch_environment.single_process_control_plane
    monkeypatch.setattr(launch_environment, "single_process_control_plane", lambda: planes.append(make()) or planes[0])
    yield planes
    close_detectors()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_is_an_event_and_its_handler_is_called_too(alone, number):
    heard = []
    before = signal.signal(number, lambda *_: heard.append(number))
    try:
        assert signal.getsignal(number).__name__ == "<lambda>"  # an import changes nothing
        assert not any(elastic_event_detected(number) for _ in range(100))
        signal.raise_signal(number)
        assert wait_until(lambda: elastic_event_detected(number))
        assert elastic_event_detected()
        assert heard == [number]
        assert isinstance(alone[0], StoreControlPlane)
        close_detectors()
        assert signal.getsignal(number).__name__ == "<lambda>"
    finally:
        signal.signal(number, before)


def test_all_ranks_detect_the_event_at_the_same_step():
    plane = InMemoryCoordinator(3)
    detectors = wait_results(start_all(*(lambda s=seat: EventDetector(s) for seat in plane.planes)))
    meeting = threading.Barrier(3)

    def train(number):
        steps = 0
        while not detectors[number].is_detected():
            if steps == 16 and number == 1:
                plane.planes[1].request_change(NoticeKind.RESIZE, "SIGUSR1")
            meeting.wait(PATIENCE_S)
            steps += 1
        return steps

    steps = wait_results(start_all(*(lambda n=n: train(n) for n in range(3))))
    assert len(set(steps)) == 1
    assert steps[0] > 16
    for detector in detectors:
        detector.close()
    assert {seat.sealed_step for seat in plane.planes} == {steps[0]}
    assert plane.restarts == 0


def test_broken_world_is_detected_without_waiting():
    plane = InMemoryCoordinator(2)
    detectors = wait_results(start_all(*(lambda s=seat: EventDetector(s) for seat in plane.planes)))
    assert not detectors[0].is_detected()
    plane.lose_rank(plane.planes[1])
    assert wait_until(detectors[0].is_detected)
    for detector in detectors:
        detector.close()
