"""Steps that the drain uploads: table of states, order and displacement."""

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.stores import shard_key
from tieredckpt.agent import drain_steps
from tieredckpt.agent.agent_api import DrainState
from tieredckpt.agent.drain_steps import TRANSITIONS, DrainingStep, DrainSteps, summarize


def new_step(version, *, job="job", parts=1, **fields):
    return DrainingStep(job, shard_key(version).version_id, parts, None, **fields)


def with_steps(*steps):
    all_steps = DrainSteps()
    for step in steps:
        assert all_steps.add(step) is step
    return all_steps


def sealed(version, *, size=10, required=False, uploaded=False, **fields):
    step = new_step(version, **fields)
    step.add_sealed(shard_key(version), size, 1.0, required=required)
    if uploaded:
        step.done.add(shard_key(version))
    return step


def versions(steps):
    return [step.version_id.version for step in steps]


def test_drain_docstring_draws_the_transitions():
    drawn = re.findall(r"^    (\w+) *->(.*)$", drain_steps.__doc__, re.MULTILINE)
    assert {state: tuple(filter(None, after.replace(",", " ").split())) for state, after in drawn} == TRANSITIONS
    assert set(TRANSITIONS) == set(get_args(DrainState))


@given(st.lists(st.sampled_from(get_args(DrainState)), max_size=8))
def test_step_changes_only_as_drawn(states):
    step = new_step(1)
    for state in states:
        before = step.state
        if state == before or state in TRANSITIONS[before]:
            step.move(state, "why")
            assert (step.state, step.error) == (state, "why")
        else:
            with pytest.raises(ValueError, match=f"cannot become {state}: it is {before}"):
                step.move(state)
            assert step.state == before


def test_shard_sealed_during_the_upload_does_not_end_it():
    step = sealed(1)
    step.start()
    step.wait_until(20.0, "the store is away")
    assert step.not_before == 20.0
    step.start()
    step.add_sealed(shard_key(1, part=1), 5, 3.0, required=True)
    assert (step.state, step.not_before, step.sealed_at, step.required) == ("running", 0.0, 3.0, True)
    assert step.view.bytes_total == 15


def test_failed_step_waits_again_with_its_reason_once_a_part_is_sealed():
    step = new_step(1, state="failed", error="rejected")
    assert step.accepts_shards
    step.add_sealed(shard_key(1), 5, 3.0, required=False)
    assert (step.state, step.error) == ("waiting", "rejected")
    step.over = "another node failed"
    assert not step.accepts_shards


@pytest.mark.parametrize(
    ("required", "dropped", "state"),
    [(False, False, "skipped"), (True, False, "failed"), (True, True, "skipped"), (False, True, "skipped")],
)
def test_required_step_that_gives_way_fails(required, dropped, state):
    step = sealed(1, required=required)
    step.dropped = dropped
    step.give_up("no room")
    assert (step.state, step.error, step.over) == (state, "no room", "no room")


def test_uploads_to_another_store_do_not_count():
    step = sealed(1, uploaded=True)
    step.use_store("s3://a")
    step.done.add(shard_key(1))
    step.uploaded_at = step.checked_at = 5.0
    step.use_store("s3://a")
    assert step.is_uploaded_here
    step.use_store("s3://b")
    assert (step.is_uploaded_here, step.uploaded_at, step.checked_at) == (False, 0.0, 0.0)


def test_oldest_step_whose_time_has_come_is_next():
    later, third, second = sealed(1), sealed(3), sealed(2)
    later.not_before = 50.0
    steps = with_steps(later, third, second, new_step(0))
    assert steps.next_ready(10.0) is second
    for step in (second, third):
        step.start()
    assert steps.next_ready(10.0) is None
    assert steps.next_ready(50.0) is later
    assert steps.seconds_until_ready(10.0) == -10.0  # a step without a shard yet
    assert DrainSteps().seconds_until_ready(10.0) is None


def test_newer_step_displaces_only_waiting_steps_without_uploads():
    running, required, uploaded, plain = sealed(1), sealed(2, required=True), sealed(3, uploaded=True), sealed(4)
    running.start()
    newer, other = sealed(5), sealed(1, job="other")
    steps = with_steps(running, required, uploaded, plain, newer, sealed(6), other)
    assert steps.superseded_by(newer) == [plain]
    assert steps.incomplete_before(newer) == [uploaded]


def test_uploaded_shards_give_up_their_slots_first_and_required_steps_last():
    uploaded, required, plain = sealed(1, uploaded=True), sealed(2, required=True), sealed(3)
    assert with_steps(uploaded, required, plain).slots_to_free("job", last=False) == ([uploaded], None)
    uploaded.held = False
    assert with_steps(uploaded, required, plain).slots_to_free("job", last=False) == ([], plain)
    assert with_steps(required).slots_to_free("job", last=False) == ([], None)
    assert with_steps(required).slots_to_free("job", last=True) == ([], required)
    required.error = "the store is away"
    assert with_steps(required).slots_to_free("job", last=False) == ([], required)


@pytest.mark.parametrize(
    ("states", "reported"),
    [
        ("", None),
        ("done", 0),
        ("done failed", 1),
        ("failed done", 1),
        ("done failed waiting", 2),
        ("running failed done", 0),
        ("failed skipped", 0),
    ],
)
def test_one_status_for_several_steps(states, reported):
    found = summarize([new_step(number, state=state) for number, state in enumerate(states.split())])
    assert (None if found is None else found.version_id.version) == reported


def test_only_closed_steps_are_forgotten_the_oldest_first(monkeypatch):
    monkeypatch.setattr(drain_steps, "_MAX_CLOSED_STEPS", 2)
    steps = with_steps(
        *(new_step(number, state="done") for number in range(1, 5)), new_step(0), new_step(9, job="other")
    )
    steps.forget_closed("job")
    assert versions(steps.of_job("job")) == [0, 3, 4]
    assert versions(steps.of_job("job", before=4)) == [0, 3]
    assert versions(steps.of_job("job", shard_key(3).version_id)) == [3]
    assert versions(steps.of_job("other")) == [9]
