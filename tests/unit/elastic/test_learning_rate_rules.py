"""What a learning rate becomes, without an optimizer."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.batch_scaling.lr_rules import (
    AdamSqrtLRRule,
    ConstantLRRule,
    LinearLRRule,
    LRScale,
    LRTable,
    Rewarmup,
    ScaledAdam,
    SqrtLRRule,
    WarmupRamp,
    lr_factor,
)
from elastic.errors import PolicyError

GOLDEN = Path(__file__).parents[2] / "golden" / "hyperpod-recipes"


@pytest.mark.parametrize(
    ("law", "base", "new", "expected"),
    [
        ("constant", 128, 512, 1.0),
        ("linear", 128, 512, 4.0),
        ("linear", 512, 128, 0.25),
        ("sqrt", 128, 512, 2.0),
        ("sqrt", 512, 128, 0.5),
        ("linear", 96, 96, 1.0),
        ("sqrt", 7, 7, 1.0),
    ],
)
def test_factors(law, base, new, expected):
    assert lr_factor(law, base, new) == expected


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (("linear", 0, 8), "base batch is 0"),
        (("sqrt", 8, -8), "batch is -8"),
        (("sqrt", 8, 8.5), "batch is 8.5"),
        (("constant", True, 8), "base batch is True"),
        (("cube", 8, 8), "rule is 'cube': there are constant, linear and sqrt"),
    ],
)
def test_factors_that_are_none(asked, named):
    with pytest.raises(PolicyError) as wrong:
        lr_factor(*asked)
    assert named in str(wrong.value)


def test_rules():
    assert ConstantLRRule().scale(512, 64) == LRScale(1.0, 1.0)
    assert LinearLRRule(128).scale(512, 64) == LRScale(4.0, 1.0)
    assert SqrtLRRule(128).scale(512, 64) == LRScale(2.0, 1.0)
    assert AdamSqrtLRRule(128).scale(512, 64) == LRScale(2.0, 4.0)


@given(st.integers(1, 10**6), st.integers(1, 10**5))
def test_at_its_own_batch_no_rule_does_anything(batch, world):
    for rule in (ConstantLRRule(), LinearLRRule(batch), SqrtLRRule(batch), AdamSqrtLRRule(batch)):
        assert rule.scale(batch, world) == LRScale(1.0, 1.0)


def test_sizes_of_a_table_hold_until_the_next():
    table = LRTable({8: 1e-4, 64: 4e-4}, base=2e-4)
    assert [table.scale(128, world).lr for world in (8, 63, 64, 512)] == [0.5, 0.5, 2.0, 2.0]
    with pytest.raises(PolicyError, match="nothing about a world_size of 7: the smallest is 8"):
        table.scale(128, 7)


@pytest.mark.parametrize(
    ("rates", "base", "named"),
    [
        ({}, 1e-3, "rates is empty"),
        ({0: 1e-3}, 1e-3, "rates.0"),
        ({8: -1e-3}, 1e-3, "rates.8 is -0.001"),
        ({8: math.nan}, 1e-3, "rates.8 is nan"),
        ({8: 1e-3}, 0, "base is 0"),
        ({8: 1e-3}, math.inf, "base is inf"),
    ],
)
def test_tables_that_are_none(rates, base, named):
    with pytest.raises(PolicyError) as wrong:
        LRTable(rates, base)
    assert named in str(wrong.value)


def test_adam_for_four_times_the_batch():
    scaled = ScaledAdam(1e-3).for_batch_ratio(4)
    assert scaled.lr == 2e-3
    assert scaled.beta1 == pytest.approx(0.6, abs=1e-15)
    assert scaled.beta2 == pytest.approx(0.996, abs=1e-15)
    assert scaled.eps == 5e-9


def test_adam_for_the_same_batch_is_the_same_adam():
    adam = ScaledAdam(3e-4, 0.1, 0.95, 1e-8)
    assert 1 - (1 - 0.1) != 0.1
    assert adam.for_batch_ratio(1) == adam
    assert adam.for_batch_ratio(1.0) == adam


@given(st.floats(1e-6, 1.0), st.floats(0, 0.9999), st.floats(0, 0.99999), st.floats(1e-12, 1e-3), st.floats(0.01, 100))
def test_adam_forgets_as_much_for_each_sample(lr, beta1, beta2, eps, kappa):
    """The rule's invariants: what is averaged over, in samples, and the signal and noise of an update stay."""
    adam = ScaledAdam(lr, beta1, beta2, eps)
    if 1 - kappa * (1 - min(beta1, beta2)) < 0:
        with pytest.raises(PolicyError):
            adam.for_batch_ratio(kappa)
        return
    scaled = adam.for_batch_ratio(kappa)
    for before, after in ((beta1, scaled.beta1), (beta2, scaled.beta2)):
        assert 0 <= after < 1
        assert 1 - after == pytest.approx(kappa * (1 - before))
    assert scaled.lr**2 == pytest.approx(kappa * lr**2)
    assert scaled.lr * scaled.eps == pytest.approx(lr * eps)
    back = scaled.for_batch_ratio(1 / kappa)
    assert (back.lr, back.eps) == (pytest.approx(lr), pytest.approx(eps))
    assert (1 - back.beta1, 1 - back.beta2) == (pytest.approx(1 - beta1), pytest.approx(1 - beta2))


@pytest.mark.parametrize(("beta1", "beta2", "named"), [(0.9, 0.999, "beta1 is 0.9"), (0.99, 0.95, "beta2 is 0.95")])
def test_a_batch_too_large_for_a_beta_is_named_with_its_limit(beta1, beta2, named):
    with pytest.raises(PolicyError) as wrong:
        ScaledAdam(1e-3, beta1, beta2).for_batch_ratio(32)
    assert named in str(wrong.value)
    assert f"up to {10 if beta1 == 0.9 else 20} times" in str(wrong.value)


def test_a_batch_just_small_enough_for_a_beta():
    assert ScaledAdam(1e-3, 0.9).for_batch_ratio(10).beta1 == pytest.approx(0, abs=1e-12)
    assert 1 - 20 * (1 - 0.95) < 0
    assert ScaledAdam(1e-3, 0.95).for_batch_ratio(20).beta1 == 0


@pytest.mark.parametrize("kappa", [0, -1, math.nan, math.inf])
def test_no_batch_is_so_many_times_another(kappa):
    with pytest.raises(PolicyError, match="kappa is"):
        ScaledAdam(1e-3).for_batch_ratio(kappa)


def factors(ramp, count):
    found = []
    for _ in range(count):
        found.append(ramp.factor)
        ramp = ramp.next()
    return found


def test_up_in_equal_steps_and_then_exactly_there():
    ramp = WarmupRamp(1.0).towards(2.0, Rewarmup(steps=3))
    assert factors(ramp, 6) == [1.25, 1.5, 1.75, 2.0, 2.0, 2.0]


def test_down_at_once():
    """A learning rate for more samples than there are is never gone on with."""
    assert factors(WarmupRamp(2.0).towards(1.0, Rewarmup(steps=3)), 2) == [1.0, 1.0]


def test_from_a_part_of_the_new_one():
    assert factors(WarmupRamp(2.0).towards(1.0, Rewarmup(steps=3, start=0.0)), 4) == [0.25, 0.5, 0.75, 1.0]
    assert factors(WarmupRamp(1.0).towards(2.0, Rewarmup(steps=1, start=0.5)), 3) == [1.5, 2.0, 2.0]
    assert WarmupRamp(1.0).towards(2.0, Rewarmup(steps=9, start=1.0)).is_warming_up is False


def test_a_change_on_the_way_up_goes_on_from_there():
    ramp = WarmupRamp(1.0).towards(2.0, Rewarmup(steps=3)).next()
    assert ramp.factor == 1.5
    assert factors(ramp.towards(4.0, Rewarmup(steps=1)), 3) == [2.75, 4.0, 4.0]
    assert factors(ramp.towards(1.25, Rewarmup(steps=1)), 2) == [1.25, 1.25]


def test_no_change_is_no_new_ramp():
    ramp = WarmupRamp(1.0).towards(2.0, Rewarmup(steps=3)).next()
    assert ramp.towards(2.0, Rewarmup(steps=50)) is ramp


@given(
    st.floats(0.01, 100),
    st.floats(0.01, 100),
    st.integers(0, 20),
    st.none() | st.floats(0, 1),
    st.integers(0, 25),
)
def test_on_the_way_up_it_only_rises_and_survives_json(old, new, steps, start, done):
    ramp = WarmupRamp(old).towards(new, Rewarmup(steps, start))
    way = factors(ramp, steps + 2)
    assert way == sorted(way)
    assert way[-2:] == [new, new]
    for _ in range(done):
        ramp = ramp.next()
    again = WarmupRamp.from_state_dict(json.loads(json.dumps(ramp.state_dict())))
    assert factors(again, 30) == factors(ramp, 30)


@pytest.mark.parametrize("state", [{}, {"target": 1.0}, {"target": None, "start": 1, "steps": 0, "done": 0}])
def test_a_state_that_is_none(state):
    with pytest.raises(PolicyError, match="no state of a learning rate rule"):
        WarmupRamp.from_state_dict(state)


@pytest.mark.parametrize("asked", [{"steps": -1}, {"steps": 1.5}, {"steps": 1, "start": 1.5}, {"start": math.nan}])
def test_a_rewarming_that_is_none(asked):
    with pytest.raises(PolicyError, match="rewarm"):
        Rewarmup(**asked)


def test_rules_and_plans_need_no_torch():
    code = "import sys; import elastic.batch_scaling.lr_rules; import elastic.cli.plan\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
