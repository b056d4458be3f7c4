import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.batch_scaling.batch_plan import BatchPlan
from elastic.errors import CursorError, PolicyError
from elastic.samples.sample_schedule import (
    ALLOWED_CHANGES,
    START_POSITION,
    DataPosition,
    SampleOrder,
    SampleSchedule,
)
from tests.support.batch_shares import even_share, position_after


@st.composite
def courses(draw):
    samples = draw(st.integers(1, 40))
    epoch_end = draw(st.sampled_from(["wrap", "drop", "short"]))
    batch = draw(st.integers(1, samples if epoch_end == "drop" else 60))
    return SampleSchedule(SampleOrder(samples, draw(st.integers(-5, 5))), batch, epoch_end)


def walked(course, steps):
    """Return the positions of each of ``steps`` steps and the position after them."""
    cursor, taken = 0, []
    for _ in range(steps):
        batch = course.batch_at(cursor)
        taken.append(range(batch.first, batch.first + batch.size))
        cursor = batch.end_cursor
    return taken, DataPosition(steps, cursor)


@pytest.mark.parametrize(
    ("epoch_end", "steps"),
    [
        ("wrap", [range(4), range(4, 8), range(8, 12), range(12, 16)]),
        ("drop", [range(4), range(4, 8), range(10, 14), range(14, 18)]),
        ("short", [range(4), range(4, 8), range(8, 10), range(10, 14)]),
    ],
)
def test_epoch_end_positions(epoch_end, steps):
    assert walked(SampleSchedule(SampleOrder(10, 1), 4, epoch_end), 4)[0] == steps


@given(courses(), st.integers(0, 50))
def test_consumed_samples_match_the_steps(course, steps):
    taken, place = walked(course, steps)
    positions = [position for batch in taken for position in batch]
    samples = course.order.samples
    said = [
        epoch * samples + first + number
        for epoch, first, size in course.consumed_by_epoch(place.cursor)
        for number in range(size)
    ]
    assert said == positions
    if course.epoch_end != "drop":
        assert positions == list(range(place.cursor))


@given(courses(), st.integers(0, 50))
def test_remaining_samples_of_an_epoch(course, steps):
    cursor = position_after(course, steps).cursor
    epoch = course.epoch_at(cursor)
    sizes = []
    while course.epoch_at(cursor) == epoch:
        batch = course.batch_at(cursor)
        sizes.append(batch.size)
        cursor = batch.end_cursor
    whole, short = course.remaining_in_epoch(position_after(course, steps).cursor, epoch + 1)
    assert sizes == [course.global_batch] * whole + [short] * bool(short)
    assert course.remaining_in_epoch(cursor, epoch + 1) == (0, 0)


def test_a_batch_may_be_larger_than_the_dataset():
    course = SampleSchedule(SampleOrder(3, 1), 8)
    batch = course.batch_at(8)
    assert (batch.first, batch.size, course.epoch_at(batch.first)) == (8, 8, 2)
    assert SampleSchedule(SampleOrder(3, 1), 8, "short").batch_at(3).size == 3


@pytest.mark.parametrize(
    ("batch", "epoch_end", "words"),
    [(0, "wrap", "at least 1"), (1, "cut", "known are wrap"), (11, "drop", "every sample out")],
)
def test_impossible_courses_are_refused(batch, epoch_end, words):
    with pytest.raises(PolicyError, match=words):
        SampleSchedule(SampleOrder(10, 1), batch, epoch_end)


@given(courses(), st.integers(0, 50))
def test_a_place_is_found_again(course, steps):
    place = position_after(course, steps)
    assert course.position_from_state(course.to_state(place)) == place


SAVED = SampleSchedule(SampleOrder(10, 1, "blocks:2"), 4)
OTHERS = {
    "samples": SampleSchedule(SampleOrder(12, 1, "blocks:2"), 4),
    "seed": SampleSchedule(SampleOrder(10, 2, "blocks:2"), 4),
    "shuffle": SampleSchedule(SampleOrder(10, 1), 4),
    "epoch_end": SampleSchedule(SampleOrder(10, 1, "blocks:2"), 4, "short"),
}


@pytest.mark.parametrize("name", ALLOWED_CHANGES)
def test_cursor_of_other_samples_is_refused_unless_allowed(name):
    state = SAVED.to_state(DataPosition(3, 12))
    with pytest.raises(CursorError, match=f"{name} was .* and is .*allow_changes=\\('{name}',\\)"):
        OTHERS[name].position_from_state(state)
    with pytest.raises(CursorError):
        OTHERS[name].position_from_state(state, allow_changes=[other for other in ALLOWED_CHANGES if other != name])
    # A changed order starts at the next full epoch; any other change keeps the place.
    expected = {"samples": 24, "seed": 20, "shuffle": 20, "epoch_end": 12}[name]
    assert OTHERS[name].position_from_state(state, allow_changes=[name]) == (3, expected)
    assert OTHERS[name].position_from_state(SAVED.to_state(START_POSITION), allow_changes=[name]) == START_POSITION


def test_resized_batch_continues_at_the_same_sample():
    other = SampleSchedule(SAVED.order, 5)
    assert other.position_from_state(SAVED.to_state(DataPosition(3, 12))) == (3, 12)
    dropping = SampleSchedule(SampleOrder(10, 1), 4, "drop")
    assert SampleSchedule(dropping.order, 7, "drop").position_from_state(dropping.to_state(DataPosition(1, 4))) == (
        1,
        10,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": 2},
        {"version": None},
        {"cursor": -1},
        {"cursor": 1.5},
        {"cursor": True},
        {"step": "3"},
        {"samples": 0},
        {"seed": None},
        {"shuffle": 4},
        {"epoch_end": None},
    ],
)
def test_invalid_cursor_is_refused(wrong):
    with pytest.raises(CursorError):
        SAVED.position_from_state({**SAVED.to_state(START_POSITION), **wrong}, allow_changes=ALLOWED_CHANGES)


@pytest.mark.parametrize("missing", ["version", "step", "cursor", "samples", "seed", "shuffle", "epoch_end"])
def test_a_cursor_has_everything(missing):
    state = SAVED.to_state(START_POSITION)
    del state[missing]
    with pytest.raises(CursorError):
        SAVED.position_from_state(state, allow_changes=ALLOWED_CHANGES)


@given(st.integers(1, 50), st.none() | st.integers(1, 9), st.integers(1, 12), st.data())
def test_the_shares_of_a_plan_cover_any_batch_once(batch, microbatch, world, data):
    plan = BatchPlan(batch, world, microbatch=microbatch, max_microbatch=microbatch, allow_idle=True)
    samples = data.draw(st.integers(1, batch))
    all_ranks = [one for rank in range(world) for one in plan.for_rank(rank).microbatches_of(samples)]
    assert [one.first + offset for one in all_ranks for offset in range(one.samples)] == list(range(samples))
    assert [one.id for one in all_ranks] == list(range(len(all_ranks)))
    if microbatch:
        assert all_ranks == list(even_share(batch, microbatch).microbatches_of(samples))


def test_a_plan_that_keeps_all_ranks_busy_still_has_short_batches():
    shares = [BatchPlan(8, 4, max_microbatch=2).for_rank(rank) for rank in range(4)]
    assert [share.microbatches_of(8) for share in shares] == [((0, 0, 2),), ((1, 2, 2),), ((2, 4, 2),), ((3, 6, 2),)]
    assert [share.microbatches_of(3) for share in shares] == [((0, 0, 1),), ((1, 1, 1),), ((2, 2, 1),), ()]


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_outside_the_plan_is_refused(rank):
    with pytest.raises(PolicyError, match="world_size is 2"):
        even_share(8, 2, rank, 2)
