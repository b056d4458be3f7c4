"""The state of an epoch: its current change, its common step, and the callbacks of a fault."""

from __future__ import annotations

import queue
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elastic.control.control_plane import ControlNotice, NoticeKind
from elastic.control.epoch_state import (
    BrokenCallbacks,
    EpochChange,
    EpochMessage,
    EpochState,
    common_checkpoint,
    common_step,
)
from elastic.world.world_state import SealedStep
from tests.support.local_nodes import wait_until

STEPS = st.none() | st.integers(-1, 9)
PAUSES = st.sampled_from([NoticeKind.RESIZE, NoticeKind.STOP])
FAULT = ControlNotice(3, NoticeKind.RESTART, "lost")


@given(st.lists(STEPS))
def test_common_step_is_the_greatest_once_all_reported(steps):
    known = [step for step in steps if step is not None]
    assert common_step(steps) == (max(known) if steps and len(known) == len(steps) else None)


def test_checkpoint_is_common_only_if_all_report_the_same():
    one, other = SealedStep("job", 4, 1), SealedStep("job", 4, 2)
    assert common_checkpoint([one, one]) == one
    assert [common_checkpoint(steps) for steps in ([], [one, None], [one, other], [None])] == [None] * 4


class EpochChanges(RuleBasedStateMachine):
    """Random changes and reports of an epoch with three ranks, compared with a record of all of them."""

    @initialize()
    def start(self):
        self.state, self.now = EpochState(3), 0.0
        self.faults, self.pauses = [], []
        self.steps: list[int | None] = [None] * 3
        self.targets = set()

    @rule(kind=PAUSES, limit_s=st.none() | st.floats(0, 9))
    def pause(self, kind, limit_s):
        until = None if limit_s is None else self.now + limit_s
        if not self.faults:
            self.pauses.append((kind, until))
        self.state = self.state.change(kind, kind.value, until)

    @rule(reason=st.sampled_from(["lost", "hangs"]))
    def fault(self, reason):
        self.faults.append(reason)
        self.state = self.state.change(NoticeKind.RESTART, reason, self.now + 5.0)

    @rule(rank=st.integers(0, 2), step=st.integers(0, 9))
    def report(self, rank, step):
        if self.steps[rank] is None:
            self.steps[rank] = step
        self.state = self.state.agree(self.steps)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def first_fault_holds(self):
        assert self.state.is_broken == bool(self.faults)
        if self.faults:
            assert self.state.reason == self.faults[0]

    @invariant()
    def newest_pause_has_the_earliest_deadline(self):
        notice = self.state.notice(self.now)
        if self.faults or not self.pauses:
            assert (notice is None) == (not self.faults)
            return
        limits = [until for _, until in self.pauses if until is not None]
        assert notice.kind is self.pauses[-1][0]
        assert self.state.is_stopping == (notice.kind is NoticeKind.STOP)
        assert notice.deadline_s == (max(0.0, min(limits) - self.now) if limits else None)

    @invariant()
    def target_never_changes_and_is_reached_by_no_rank_before(self):
        self.targets |= {self.state.target} - {None}
        assert len(self.targets) <= 1
        assert all(None not in self.steps and max(self.steps) == target for target in self.targets)


TestEpochChanges = EpochChanges.TestCase


@pytest.fixture
def heard():
    return queue.SimpleQueue()


def test_callbacks_run_once_per_broken_epoch(heard):
    callbacks = BrokenCallbacks()
    callbacks.add(heard.put, None)
    callbacks.run(ControlNotice(3, NoticeKind.RESIZE, "grow"))
    for notice in (FAULT, FAULT, ControlNotice(4, NoticeKind.RESTART, "again")):
        callbacks.run(notice)
    assert {heard.get().epoch, heard.get().epoch} == {3, 4}
    assert heard.empty()


@pytest.mark.parametrize("has_run", [True, False], ids=["after the others", "before the others"])
def test_late_callback_runs_alone(heard, has_run):
    callbacks, early = BrokenCallbacks(), queue.SimpleQueue()
    callbacks.add(early.put, None)
    if has_run:
        callbacks.run(FAULT)
    callbacks.add(heard.put, FAULT)
    assert (heard.get(), early.get()) == (FAULT, FAULT)
    wait_until(lambda: not [one for one in threading.enumerate() if one.name == "elastic-broken"])
    assert heard.empty()
    assert early.empty()


def test_callback_may_wait_for_its_owner():
    lock, called = threading.Lock(), threading.Event()

    def abort(notice: ControlNotice) -> None:
        with lock:
            called.set()

    callbacks = BrokenCallbacks()
    with lock:
        callbacks.add(abort, None)
        callbacks.run(FAULT)
    assert called.wait(60)


CHANGES = st.none() | st.tuples(
    st.sampled_from([NoticeKind.RESIZE, NoticeKind.STOP, NoticeKind.RESTART]), st.none() | st.integers(0, 9)
)


@given(st.integers(-1, 9), CHANGES, CHANGES, st.none() | st.integers(-1, 9), st.integers(0, 9), st.integers(0, 1000))
def test_message_keeps_the_state_on_another_clock(epoch, broken, pause, target, now, received_at):
    def on_clock(change, shift):
        if change is None:
            return None
        kind, until = change
        return EpochChange(kind, "a change", None if until is None else max(until, now) + shift)

    sent, found = (
        EpochState(epoch, on_clock(broken, shift), on_clock(pause, shift), target) for shift in (0, received_at - now)
    )
    message = EpochMessage.of(sent, now)
    assert message.received(received_at) == found
    assert message.without_times() == EpochMessage.of(sent, now + 5).without_times()
