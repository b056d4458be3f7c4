"""Chart elements: ticks, bins, thinned curves, and formatted numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.goodput.html_report.elements import (
    LinearScale,
    TimeBins,
    axis_time_text,
    downsampled,
    duration_text,
    html_table,
    percent_text,
    quantile,
    round_ticks,
    round_up_tick,
    run_time_text,
    si_text,
    time_ticks,
)

values = st.floats(-1e9, 1e9)


@given(values, values, st.integers(1, 12))
def test_ticks_are_inside_and_few(low, high, most):
    low, high = min(low, high), max(low, high)
    room = (high - low) * 1e-6
    ticks = round_ticks(low, high, most)
    assert len(ticks) <= most + 1
    assert all(low - room <= tick <= high + room for tick in ticks)


@given(st.floats(0, 1e10))
def test_points_of_time_are_few(seconds):
    ticks = time_ticks(seconds)
    assert ticks[0] == 0
    assert len(ticks) <= 10
    assert ticks[-1] <= seconds * (1 + 1e-6)


@given(st.floats(1e-9, 1e12))
def test_rounded_tick_is_above_the_value(value):
    assert value * (1 - 1e-6) <= round_up_tick(value) <= 3 * value


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.floats(0, 1e6)), max_size=20), st.integers(1, 50)
)
def test_bins_keep_every_amount(pieces, count):
    bins = TimeBins(0.0, 100.0, count)
    for a, b, there in pieces:
        bins.add(min(a, b) / 10, max(a, b) / 10, there)
    assert sum(bins.sums) == pytest.approx(sum(there for a, b, there in pieces if a != b), rel=1e-6, abs=1e-3)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(-5, 5)), min_size=1, max_size=300), st.integers(2, 60))
def test_thinning_keeps_the_peaks(points, most):
    points = sorted(points)
    kept = downsampled(points, most)
    assert len(kept) <= max(most, 2)
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert {min(y for _, y in kept), max(y for _, y in kept)} == {min(y for _, y in points), max(y for _, y in points)}


def test_scale_of_a_single_value_is_constant():
    assert LinearScale(3, 3, 10, 20)(3) == 10
    assert LinearScale(0, 10, 10, 20)(5) == 15
    assert LinearScale(0, 10, 20, 10)(10) == 10


def test_quantiles_are_values():
    assert [quantile([4, 1, 3, 2], share) for share in (0, 0.5, 0.51, 0.99)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (percent_text(0.99312), "99.31 %"),
        (percent_text(0.5), "50.0 %"),
        (percent_text(1.0), "100 %"),
        (percent_text(0.0), "0 %"),
        (percent_text(0.0004), "0.04 %"),
        (percent_text(0.000001), "< 0.01 %"),
        (duration_text(0.0123), "12.3 ms"),
        (duration_text(75.24), "75.2 s"),
        (duration_text(0), "0 s"),
        (duration_text(119), "119 s"),
        (duration_text(5400), "1 h 30 min"),
        (duration_text(90061), "1 d 1 h"),
        (run_time_text(59.96), "1:00.0"),
        (run_time_text(3661.2), "1:01:01"),
        (run_time_text(90061), "1 d 01:01:01"),
        (run_time_text(-5), "-0:05.0"),
        (axis_time_text(86400.0), "1 d"),
        (axis_time_text(129600.0), "1 d 12:00"),
        (axis_time_text(60.0), "1:00"),
        (si_text(1040.3), "1,040"),
        (si_text(9999), "9,999"),
        (si_text(1_570_000_000), "1.57 G"),
        (si_text(999_999), "1 M"),
        (si_text(0.0875), "0.0875"),
    ],
)
def test_numbers_for_people(shown, expected):
    assert shown == expected


def test_only_prose_columns_break_inside_words():
    table = html_table(("what", "steps lost", "message"), [("process", "1", "/a/long/path")], right=("steps lost",))
    assert "<td>process</td>" in table
    assert '<td class="prose">/a/long/path</td>' in table
