"""Which durable steps may be deleted."""

from hypothesis import given
from hypothesis import strategies as st

from peerstore.shard_records import VersionId
from tieredckpt.agent.retention import expired_steps
from tieredckpt.resolve_step import Candidate, resolve_step


def group(step, epoch=1, attempt=0):
    return VersionId(epoch, step, attempt, f"i{epoch}")


def gone(*steps, bases=None, **policy):
    whole = {step if isinstance(step, VersionId) else group(step): None for step in steps}
    return [
        g.version if g.epoch == 1 and not g.attempt else g for g in expired_steps({**whole, **(bases or {})}, **policy)
    ]


def test_zero_keeps_all():
    assert gone(1, 2, 3, keep_last=0) == []
    assert gone(1, 2, 3, keep_last=0, keep_every=2) == []


def test_newest_steps_stay_and_the_rest_expires_oldest_first():
    assert gone(30, 10, 20, 40, keep_last=2) == [10, 20]
    assert gone(1, 2, 3, keep_last=3) == gone(1, 2, 3, keep_last=99) == []
    assert gone(keep_last=1) == []


def test_round_steps_stay():
    assert gone(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, keep_last=2, keep_every=4) == [1, 2, 3, 5, 6, 7]


def test_two_attempts_at_a_step_count_once():
    again = group(3, epoch=2)
    assert gone(2, 3, again, keep_last=2) == []
    assert gone(2, 3, again, 4, 5, keep_last=2) == [2, 3, again]


def test_quarantined_step_does_not_count_and_expires_with_adjacent_steps():
    assert gone(1, 2, 3, keep_last=2, quarantined=[group(3)]) == []
    assert gone(1, 2, 3, keep_last=1, quarantined=[group(3)]) == [1]
    assert gone(1, 2, 3, 4, keep_last=1, quarantined=[group(2)], keep_every=2) == [1, 2, 3]
    assert gone(1, 2, keep_last=1, quarantined=[group(1), group(2)]) == []


def test_steps_of_a_new_branch_are_kept_despite_lower_numbers():
    """Twelve steps were saved, the job returned to 9 and saved 10 again: that step is the newest."""
    new = group(10, epoch=2)
    assert gone(8, 9, 10, 11, 12, bases={new: 9}, keep_last=1) == [8, 9]
    assert gone(8, 9, 10, 11, 12, bases={new: 9}, keep_last=2) == [8]
    newer = group(13, epoch=2)
    assert gone(8, 9, 10, 11, 12, bases={new: 9, newer: 9}, keep_last=1) == [8, 9, 10, new, 11, 12]


@st.composite
def histories(draw):
    """Draw up to three incarnations; each starts from a step or an unknown one and saves later steps."""
    whole = {}
    for epoch in (1, 2, 3):
        base = draw(st.none() | st.integers(-1, 6))
        for step in draw(st.lists(st.integers(0 if base is None else max(base, 0), 8), max_size=4)):
            whole[group(step, epoch, draw(st.integers(0, 1)))] = base
    return whole


@given(histories(), st.integers(0, 4), st.integers(0, 4), st.data())
def test_step_chosen_by_a_restore_is_never_deleted(whole, keep_last, keep_every, data):
    quarantined = data.draw(st.sets(st.sampled_from(sorted(whole)), max_size=3)) if whole else set()
    deleted = expired_steps(whole, keep_last=keep_last, keep_every=keep_every, quarantined=quarantined)

    def choice(groups):
        found = resolve_step([Candidate(g, 0, {}, whole[g]) for g in groups], quarantined=quarantined)
        return found.chosen.version_id if found.chosen else None

    left = [g for g in whole if g not in deleted]
    assert choice(left) == choice(whole)
    assert sorted(set(left) | set(deleted)) == sorted(whole)
    # any interrupted deletion, oldest first, leaves the same choice
    for done in range(len(deleted)):
        assert choice([g for g in whole if g not in deleted[:done]]) == choice(whole)
