"""All ranks of an epoch stop after the same step, whenever the notice reaches them."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.control.control_plane import ControlNotice, NoticeKind
from elastic.errors import ControlPlaneUnavailableError
from elastic.testing import InMemoryCoordinator
from elastic.workers.step_barrier import BoundaryDecision, NoticeWatcher, SignalRequest, StepBarrier
from tests.support.control_planes import PATIENCE_S, start_all, wait_all_assigned, wait_results


class Lockstep:
    """Ranks that meet in a collective in every step, so that none is more than one step ahead."""

    def __init__(self, size, steps):
        self.plane = InMemoryCoordinator(size)
        places = wait_all_assigned(self.plane.planes)
        self.gates = [StepBarrier(seat, place.epoch) for seat, place in zip(self.plane.planes, places, strict=True)]
        self.meeting = threading.Barrier(size)
        self.steps = steps

    def train(self, number, act):
        """Return the number of completed steps and the end; ``act`` runs inside every step."""
        gate, completed = self.gates[number], 0
        while completed < self.steps:
            way = gate.pass_boundary(completed)
            if way is not BoundaryDecision.CONTINUE:
                return completed, way
            act(number, completed)
            self.meeting.wait(PATIENCE_S)
            completed += 1
        return completed, None

    def run(self, act):
        ended = threading.Event()

        def look():  # like the watcher thread of each rank
            while not ended.wait(0.001):
                for gate in self.gates:
                    gate.poll()

        beside = threading.Thread(target=look)
        beside.start()
        found = wait_results(start_all(*(lambda n=n: self.train(n, act) for n in range(len(self.gates)))))
        ended.set()
        beside.join()
        for gate in self.gates:
            gate.close()
        for seat in self.plane.planes:
            seat.close()
        return found


@settings(max_examples=20)
@given(size=st.sampled_from([1, 2, 3, 8]), asker=st.integers(0, 7), at=st.integers(0, 9))
def test_ranks_in_lockstep_pause_at_the_same_step(size, asker, at):
    job = Lockstep(size, 30)
    asked = threading.Event()

    def act(number, step):
        if step == at and number == asker % size:
            job.plane.resize(size)
            asked.set()

    ways = job.run(act)
    assert asked.is_set()
    assert len(set(ways)) == 1
    completed, way = ways[0]
    assert way is BoundaryDecision.PAUSE
    assert completed > at


def test_rank_inside_a_step_reports_at_once():
    job = Lockstep(2, 5)
    inside, waits = threading.Event(), threading.Event()

    def act(number, step):
        if step == 1 and number == 1:  # it has not received the notice when the other rank stands at the boundary
            inside.set()
            assert waits.wait(PATIENCE_S)

    def others():
        assert inside.wait(PATIENCE_S)
        job.plane.resize(2)
        assert job.plane.wait_for(lambda: job.plane.planes[1].paused_step is not None, PATIENCE_S)
        waits.set()

    asking = threading.Thread(target=others)
    asking.start()
    assert job.run(act) == [(2, BoundaryDecision.PAUSE)] * 2
    asking.join()
    assert job.plane.planes[1].paused_step == 2


@pytest.fixture
def two():
    plane = InMemoryCoordinator(2)
    places = wait_all_assigned(plane.planes)
    gates = [StepBarrier(seat, place.epoch, retry_s=0.01) for seat, place in zip(plane.planes, places, strict=True)]
    yield plane, gates
    for seat in plane.planes:
        seat.close()
    for gate in gates:
        gate.close()


def test_loading_rank_pauses_at_its_loaded_step(two):
    plane, gates = two
    plane.resize(2)
    gates[1].poll()
    assert wait_results(start_all(*(lambda g=gate: g.pass_boundary(7) for gate in gates))) == [
        BoundaryDecision.PAUSE,
        BoundaryDecision.PAUSE,
    ]


def test_barrier_without_a_notice_does_not_stop(two):
    _, gates = two
    assert [gates[0].pass_boundary(step) for step in range(1000)] == [BoundaryDecision.CONTINUE] * 1000


def test_a_loss_while_others_pause_ends_their_wait(two):
    plane, gates = two
    plane.resize(2)
    waiting = start_all(lambda: gates[0].pass_boundary(3))
    plane.lose_rank(plane.planes[1])
    assert wait_results(waiting) == [BoundaryDecision.ABORT]
    assert "rank 1 was lost" in gates[0].broken_reason


def test_a_broken_world_is_left_at_the_next_boundary(two):
    plane, gates = two
    plane.restart("the loss is not finite")
    assert gates[0].pass_boundary(1) is BoundaryDecision.ABORT
    assert gates[0].broken_reason == "the loss is not finite"
    assert gates[0].wait_broken(0.0)


def test_notice_of_another_epoch_is_ignored(two):
    _, gates = two
    gates[0].mark_broken(ControlNotice(gates[0].epoch - 1, NoticeKind.RESTART, "long ago"))
    assert gates[0].pass_boundary(0) is BoundaryDecision.CONTINUE
    assert not gates[0].wait_broken(0.0)


def test_unavailable_control_plane_is_retried(two):
    plane, gates = two
    pause, failures = (
        plane.planes[0].agree_on_step,
        iter([ControlPlaneUnavailableError("away"), ControlPlaneUnavailableError("still away")]),
    )

    def away(step, *, timeout_s=None):
        for error in failures:
            raise error
        return pause(step, timeout_s=timeout_s)

    plane.planes[0].agree_on_step = away
    plane.resize(2)
    gates[1].poll()
    assert wait_results(start_all(*(lambda g=gate: g.pass_boundary(4) for gate in gates))) == [
        BoundaryDecision.PAUSE,
        BoundaryDecision.PAUSE,
    ]


def test_urgent_stop_keeps_its_target_step(two):
    plane, gates = two
    plane.resize(1)
    first = start_all(lambda: gates[0].pass_boundary(4))
    plane.stop("now all of it")
    assert gates[1].pass_boundary(3) is BoundaryDecision.CONTINUE
    assert gates[1].pass_boundary(4) is BoundaryDecision.PAUSE
    assert wait_results(first) == [BoundaryDecision.PAUSE]


def test_repeated_request_is_logged_once_per_cause(two, caplog):
    plane, _ = two
    tried = threading.Semaphore(0)
    failures = iter(["away"] * 5 + ["still away"] * 5)

    def away(kind, reason, *, deadline_s=None):
        tried.release()
        if failure := next(failures, ""):
            raise ControlPlaneUnavailableError(failure)

    plane.planes[0].request_change = away
    watch = NoticeWatcher(plane.planes[0], lambda _notice: None)
    watch.enqueue(SignalRequest(NoticeKind.RESIZE, "SIGTERM"))
    for _ in range(11):
        assert tried.acquire(timeout=PATIENCE_S)
    watch.close()
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == ["away", "still away"]
