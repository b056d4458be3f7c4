"""A process that does not leave a broken world in time ends, and its log names the stage."""

from __future__ import annotations

import ctypes
import threading

import pytest

from elastic.control.control_plane import ControlNotice, LeaveStage, NoticeKind
from elastic.workers.leave_deadline import LeaveDeadline
from tests.support.control_planes import PATIENCE_S
from tests.support.control_simulation import ControlSimulation
from tests.support.local_nodes import wait_until


class Plane:
    def on_broken(self, call):
        self.tell = call


@pytest.fixture
def plane():
    return Plane()


@pytest.fixture
def ended():
    return threading.Event()


@pytest.fixture
def deadline(plane, ended):
    one = LeaveDeadline(plane, ended.set, native_timer=False)
    yield one
    one.left()


def broken(epoch: int, deadline_s: float | None) -> ControlNotice:
    return ControlNotice(epoch, NoticeKind.RESTART, "rank 1 was lost", deadline_s)


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "elastic-leave"]


def test_late_process_ends_and_logs_its_stage(plane, deadline, ended, caplog, capfd):
    deadline.enter(4)
    deadline.at(LeaveStage.TRAIN)
    plane.tell(broken(4, 0.01))
    assert ended.wait(PATIENCE_S)
    for one in threads():
        one.join(PATIENCE_S)
    assert "world 4 is broken (rank 1 was lost)" in caplog.text
    assert ": the train function. The process exits" in caplog.text


def test_abort_step_that_does_not_return_is_logged(plane, deadline, ended, caplog):
    deadline.enter(4)
    with deadline.aborting("groups"):
        plane.tell(broken(4, 0.01))
        assert ended.wait(PATIENCE_S)
        for one in threads():
            one.join(PATIENCE_S)
    assert "entering the world (the abort step 'groups' has not returned)" in caplog.text


def _holds_the_lock(say):
    """Native code takes the interpreter's lock after the notice and keeps it."""
    plane = Plane()
    deadline = LeaveDeadline(plane)
    deadline.enter(4)
    plane.tell(broken(4, 1.0))
    say("holds")
    ctypes.PyDLL(None).pause()


def test_native_code_that_keeps_the_interpreter_lock_is_ended_by_a_timer(zygote):
    running = zygote.start(_holds_the_lock)
    wait_until(lambda: running.has_ended)
    assert running.lines() == ["holds"]
    with pytest.raises(AssertionError):  # it ended with an error
        running.wait()


def _leaves_in_time(say):
    plane = Plane()
    deadline = LeaveDeadline(plane)
    deadline.enter(4)
    plane.tell(broken(4, 0.5))
    deadline.left()
    threading.Event().wait(1.5)
    return "alive"


def test_timer_is_cancelled_when_the_world_is_left(zygote):
    assert zygote.start(_leaves_in_time).wait().result == "alive"


def test_process_that_leaves_in_time_is_not_ended(plane, deadline, ended):
    deadline.enter(4)
    plane.tell(broken(4, PATIENCE_S))
    (waits,) = threads()
    deadline.left()
    waits.join(PATIENCE_S)
    assert not waits.is_alive()
    assert not ended.is_set()


@pytest.mark.parametrize("notice", [broken(3, 0.0), broken(4, None)], ids=["an older world", "no deadline"])
def test_notice_that_sets_no_deadline(plane, deadline, ended, notice):
    deadline.enter(4)
    plane.tell(notice)
    assert threads() == []
    assert not ended.is_set()


def test_second_notice_of_an_epoch_starts_no_second_deadline(plane, deadline):
    deadline.enter(4)
    plane.tell(broken(4, PATIENCE_S))
    plane.tell(broken(4, PATIENCE_S))
    assert len(threads()) == 1


def test_ranks_receive_the_time_left_to_leave_a_broken_world():
    table = ControlSimulation(2)
    table.run_without_faults(15)
    given = []
    for node in table.nodes.values():
        for rank in node.ranks.values():
            rank.apply_desired = given.append
    table.fault(0)
    table.run_without_faults(2)
    left_s = [one.epoch_state.broken.within_s for one in given if one.epoch_state.broken is not None]
    assert left_s
    assert all(0 < one <= table.desk.snapshot().settings.policy.abort_limit_s for one in left_s)
