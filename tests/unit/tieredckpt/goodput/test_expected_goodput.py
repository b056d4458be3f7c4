"""Computed goodput: the published table, the formula, and properties for any numbers."""

import math

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.support.example_counts import examples
from tieredckpt.errors import UsageError
from tieredckpt.goodput.expected_goodput import (
    MTBF_PRESETS,
    CheckpointScheme,
    FaultCost,
    Mtbf,
    MtbfUnit,
    expected_goodput,
    expected_round_s,
    goodput_by_interval,
    has_best_interval,
    longest_recovery_s,
    restart_scheme,
    with_best_interval,
)


def goodput_formula(*, mtbf_s, interval_s, stall_s, recovery_s):
    """``T / (M e^{R/M} (e^{(T+d)/M} - 1))``: the goodput of a job with one kind of faults."""
    try:
        spent = mtbf_s * math.exp(recovery_s / mtbf_s) * math.expm1((interval_s + stall_s) / mtbf_s)
    except OverflowError:
        return 0.0
    return interval_s / spent


times = st.floats(0.01, 1e5)
shares = st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)).filter(lambda all_: sum(all_) > 0.01)


@st.composite
def schemes(draw):
    live, snapshot, durable = draw(shares)
    total = live + snapshot + durable
    step = draw(st.sampled_from([0.0, 0.5, 10.0]))
    interval = draw(st.integers(1, 2000)) * step if step else draw(times)
    stall = draw(st.floats(0, 100))
    kinds = [FaultCost(one / total, draw(st.floats(0, 1e4))) for one in (live, snapshot, durable)]
    kinds[1] = FaultCost(max(0.0, 1 - kinds[0].share - kinds[2].share), kinds[1].recovery_s)
    return CheckpointScheme(
        interval, stall, kinds[1], live=kinds[0], durable=kinds[2], durable_every=draw(st.integers(1, 300)), step_s=step
    )


@pytest.mark.parametrize(("gpus", "hours", "recovery_s"), [(2048, 24.7, 895), (16384, 3.1, 112), (98304, 31 / 60, 19)])
def test_llama_3s_failure_rate(gpus, hours, recovery_s):
    mtbf_s = MTBF_PRESETS["llama-3"].for_job(gpus, 8)
    assert mtbf_s / 3600 == pytest.approx(hours, rel=0.01)
    assert round(longest_recovery_s(mtbf_s, 0.99)) == recovery_s
    often = goodput_formula(mtbf_s=mtbf_s, interval_s=1e-3, stall_s=0, recovery_s=longest_recovery_s(mtbf_s, 0.99))
    assert often == pytest.approx(0.99, rel=1e-6)


def test_a_rate_is_of_a_gpu_a_node_or_the_job():
    assert Mtbf(800, MtbfUnit.GPU).for_job(16, 8) == 50
    assert Mtbf(800, MtbfUnit.NODE).for_job(16, 8) == 400
    assert Mtbf(800, MtbfUnit.JOB).for_job(16, 8) == 800


@given(mtbf=st.floats(1, 1e7), interval=times, stall=st.floats(0, 1e3), recovery=st.floats(0, 1e4))
def test_single_fault_kind_matches_the_formula(mtbf, interval, stall, recovery):
    plain = goodput_formula(mtbf_s=mtbf, interval_s=interval, stall_s=stall, recovery_s=recovery)
    assume(plain > 1e-12)
    assert expected_goodput(restart_scheme(interval, stall, recovery), mtbf) == pytest.approx(plain, rel=1e-7)
    # A durable save of every step equals memory that is never lost.
    durable = CheckpointScheme(interval, stall, FaultCost(0, 0), durable=FaultCost(1, recovery))
    assert expected_goodput(durable, mtbf) == pytest.approx(plain, rel=1e-7)


def test_lossless_recovery_costs_only_its_time():
    scheme = CheckpointScheme(600, 6, FaultCost(0, 0), live=FaultCost(1, 30))
    assert expected_goodput(scheme, 3000) == pytest.approx(600 / 606 * math.exp(-30 / 3000), rel=1e-12)


def test_a_live_fault_that_repeats_a_step_is_a_save_after_each():
    live = CheckpointScheme(600, 0, FaultCost(0, 0), live=FaultCost(1, 30), step_s=10)
    assert expected_goodput(live, 3000) == pytest.approx(
        goodput_formula(mtbf_s=3000, interval_s=10, stall_s=0, recovery_s=30), rel=1e-12
    )


def test_fault_kinds_of_equal_cost_count_as_one():
    mixed = CheckpointScheme(600, 6, FaultCost(0.4, 30), durable=FaultCost(0.6, 30), durable_every=1)
    assert expected_goodput(mixed, 3000) == pytest.approx(expected_goodput(restart_scheme(600, 6, 30), 3000), rel=1e-12)


@pytest.mark.parametrize("interval_s", [1.0, 3.0])
def test_nearly_impossible_fault_costs_no_time(interval_s):
    almost_never = CheckpointScheme(
        interval_s, 0, FaultCost(0, 0), live=FaultCost(1, 0), durable=FaultCost(5e-324, 0), durable_every=1
    )
    assert expected_round_s(almost_never, 2.0) == pytest.approx(interval_s)


@pytest.mark.parametrize("recovery_s", [710.0, 800.0])
def test_recovery_that_no_fault_needs_costs_nothing(recovery_s):
    scheme = CheckpointScheme(1.0, 0.0, FaultCost(0.0, recovery_s), live=FaultCost(1.0, 0.0))
    assert expected_round_s(scheme, 1.0) == pytest.approx(1.0)


@given(schemes(), st.floats(1, 1e7))
def test_goodput_is_a_share(scheme, mtbf):
    worth = expected_goodput(scheme, mtbf)
    assert 0 <= worth <= 1 + 1e-9
    assert worth <= scheme.interval_s / (scheme.interval_s + scheme.stall_s) + 1e-9
    assert expected_round_s(scheme, mtbf) >= scheme.round_s * (1 - 1e-9)


@given(schemes(), st.floats(1, 1e7), st.floats(1.01, 100))
def test_rarer_faults_never_hurt(scheme, mtbf, factor):
    assert expected_goodput(scheme, mtbf * factor) >= expected_goodput(scheme, mtbf) * (1 - 1e-9)


@given(
    mtbf=st.floats(1, 1e7), interval=times, stall=st.floats(0, 1e3), recovery=st.floats(0, 1e4), more=st.floats(0, 1e4)
)
def test_longer_recoveries_never_help(mtbf, interval, stall, recovery, more):
    slower = expected_goodput(restart_scheme(interval, stall, recovery + more), mtbf)
    assert slower <= expected_goodput(restart_scheme(interval, stall, recovery), mtbf) * (1 + 1e-9)


@settings(max_examples=examples(40))
@example(CheckpointScheme(60, 1, FaultCost(1e-9, 30), live=FaultCost(1 - 1e-9, 30)), 1e4, 2.0)
@given(schemes(), st.floats(1e3, 1e6), st.floats(0.01, 100))
def test_no_interval_is_better_than_the_best(scheme, mtbf, factor):
    assume(has_best_interval(scheme) and scheme.stall_s > 1e-3)
    top = with_best_interval(scheme, mtbf)
    worth = expected_goodput(top, mtbf)
    assume(worth > 1e-6)
    assume(top.interval_s * max(1.0, factor) < 1e6 * mtbf)  # beyond it the numbers have too few digits
    assert worth >= expected_goodput(scheme.with_interval(top.interval_s * factor), mtbf) * (1 - 1e-6)
    assert worth >= max(one for _, one in goodput_by_interval(top, mtbf)) * (1 - 1e-6)


def test_the_best_interval_is_youngs_where_faults_are_rare():
    assert with_best_interval(restart_scheme(60, 2, 30), 1e6).interval_s == pytest.approx(
        math.sqrt(2 * 2 * 1e6), rel=0.01
    )


def test_nothing_is_best_where_saving_or_not_saving_is_free():
    assert not has_best_interval(restart_scheme(60, 0, 30))
    assert not has_best_interval(CheckpointScheme(60, 1, FaultCost(0, 0), live=FaultCost(1, 1)))
    assert has_best_interval(restart_scheme(60, 1, 30))


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval_s": 0},
        {"interval_s": math.nan},
        {"stall_s": -1},
        {"snapshot": FaultCost(0.5, 1)},
        {"snapshot": FaultCost(1, math.inf)},
        {"durable_every": 0},
        {"step_s": 7.0},
    ],
)
def test_invalid_scheme_is_refused(wrong):
    with pytest.raises(UsageError, match=r"interval|stall|snapshot|durable|shares"):
        CheckpointScheme(**({"interval_s": 60, "stall_s": 1, "snapshot": FaultCost(1, 1)} | wrong))
