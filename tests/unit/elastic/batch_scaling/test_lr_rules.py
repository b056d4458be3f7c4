"""Learning rate rules without an optimizer."""

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
    SqrtLRRule,
    WarmupRamp,
    lr_factor,
    scaled_beta,
    validated_kappa,
)
from elastic.errors import PolicyError

GOLDEN = Path(__file__).parents[3] / "golden" / "hyperpod-recipes"


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
def test_invalid_lr_factors_are_refused(asked, named):
    with pytest.raises(PolicyError) as wrong:
        lr_factor(*asked)
    assert named in str(wrong.value)


def test_rules():
    assert ConstantLRRule().scale(512, 64) == LRScale(1.0, 1.0)
    assert LinearLRRule(128).scale(512, 64) == LRScale(4.0, 1.0)
    assert SqrtLRRule(128).scale(512, 64) == LRScale(2.0, 1.0)
    assert AdamSqrtLRRule(128).scale(512, 64) == LRScale(2.0, 4.0)


@given(st.integers(1, 10**6), st.integers(1, 10**5))
def test_rules_have_no_effect_at_their_own_batch(batch, world):
    for rule in (ConstantLRRule(), LinearLRRule(batch), SqrtLRRule(batch), AdamSqrtLRRule(batch)):
        assert rule.scale(batch, world) == LRScale(1.0, 1.0)


def test_sizes_of_a_table_hold_until_the_next():
    table = LRTable({8: 1e-4, 64: 4e-4}, base=2e-4)
    assert [table.scale(128, world).lr for world in (8, 63, 64, 512)] == [0.5, 0.5, 2.0, 2.0]
    with pytest.raises(PolicyError, match="no entry for a world_size of 7: the smallest is 8"):
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
def test_invalid_lr_tables_are_refused(rates, base, named):
    with pytest.raises(PolicyError) as wrong:
        LRTable(rates, base)
    assert named in str(wrong.value)


def test_scaled_beta_of_a_batch_four_times_as_large():
    assert scaled_beta("beta1", 0.9, 4) == pytest.approx(0.6, abs=1e-15)
    assert scaled_beta("beta2", 0.999, 4) == pytest.approx(0.996, abs=1e-15)


def test_scaled_beta_of_the_same_batch_is_the_same_beta():
    assert 1 - (1 - 0.1) != 0.1
    assert scaled_beta("beta1", 0.1, 1) == scaled_beta("beta1", 0.1, 1.0) == 0.1


@given(st.floats(0, 0.9999), st.floats(0.01, 100))
def test_scaled_beta_averages_over_the_same_number_of_samples(beta, kappa):
    if 1 - kappa * (1 - beta) < 0:
        with pytest.raises(PolicyError):
            scaled_beta("beta1", beta, kappa)
        return
    scaled = scaled_beta("beta1", beta, kappa)
    assert 0 <= scaled < 1
    assert 1 - scaled == pytest.approx(kappa * (1 - beta))
    assert 1 - scaled_beta("beta1", scaled, 1 / kappa) == pytest.approx(1 - beta)


@pytest.mark.parametrize(("name", "beta", "limit"), [("beta1", 0.9, 10), ("beta2", 0.95, 20)])
def test_a_batch_too_large_for_a_beta_is_named_with_its_limit(name, beta, limit):
    with pytest.raises(PolicyError, match=f"{name} is {beta}.*up to {limit} times"):
        scaled_beta(name, beta, 32)


def test_a_batch_just_small_enough_for_a_beta():
    assert scaled_beta("beta1", 0.9, 10) == pytest.approx(0, abs=1e-12)
    assert 1 - 20 * (1 - 0.95) < 0
    assert scaled_beta("beta1", 0.95, 20) == 0


@pytest.mark.parametrize("kappa", [0, -1, math.nan, math.inf])
def test_invalid_kappa_is_refused(kappa):
    with pytest.raises(PolicyError, match="kappa is"):
        validated_kappa(kappa)


def factors(ramp, count):
    found = []
    for _ in range(count):
        found.append(ramp.factor)
        ramp = ramp.next()
    return found


def test_warmup_has_equal_steps_and_ends_exactly_at_its_target():
    ramp = WarmupRamp(1.0).towards(2.0, Rewarmup(steps=3))
    assert factors(ramp, 6) == [1.25, 1.5, 1.75, 2.0, 2.0, 2.0]


def test_down_at_once():
    """A smaller batch takes effect at once: its rate is never exceeded."""
    assert factors(WarmupRamp(2.0).towards(1.0, Rewarmup(steps=3)), 2) == [1.0, 1.0]


def test_rewarmup_starts_from_a_fraction_of_the_new_factor():
    assert factors(WarmupRamp(2.0).towards(1.0, Rewarmup(steps=3, start=0.0)), 4) == [0.25, 0.5, 0.75, 1.0]
    assert factors(WarmupRamp(1.0).towards(2.0, Rewarmup(steps=1, start=0.5)), 3) == [1.5, 2.0, 2.0]
    assert WarmupRamp(1.0).towards(2.0, Rewarmup(steps=9, start=1.0)).is_warming_up is False


def test_change_during_warmup_continues_from_the_current_factor():
    ramp = WarmupRamp(1.0).towards(2.0, Rewarmup(steps=3)).next()
    assert ramp.factor == 1.5
    assert factors(ramp.towards(4.0, Rewarmup(steps=1)), 3) == [2.75, 4.0, 4.0]
    assert factors(ramp.towards(1.25, Rewarmup(steps=1)), 2) == [1.25, 1.25]


def test_unchanged_batch_starts_no_new_ramp():
    ramp = WarmupRamp(1.0).towards(2.0, Rewarmup(steps=3)).next()
    assert ramp.towards(2.0, Rewarmup(steps=50)) is ramp


@given(
    st.floats(0.01, 100),
    st.floats(0.01, 100),
    st.integers(0, 20),
    st.none() | st.floats(0, 1),
    st.integers(0, 25),
)
def test_warmup_rises_monotonically_and_survives_json(old, new, steps, start, done):
    ramp = WarmupRamp(old).towards(new, Rewarmup(steps, start))
    way = factors(ramp, steps + 2)
    assert way == sorted(way)
    assert way[-2:] == [new, new]
    for _ in range(done):
        ramp = ramp.next()
    again = WarmupRamp.from_state_dict(json.loads(json.dumps(ramp.state_dict())))
    assert factors(again, 30) == factors(ramp, 30)


@pytest.mark.parametrize("state", [{}, {"target": 1.0}, {"target": None, "start": 1, "steps": 0, "done": 0}])
def test_invalid_warmup_state_is_refused(state):
    with pytest.raises(PolicyError, match="not the state of a learning rate rule"):
        WarmupRamp.from_state_dict(state)


@pytest.mark.parametrize("asked", [{"steps": -1}, {"steps": 1.5}, {"steps": 1, "start": 1.5}, {"start": math.nan}])
def test_invalid_rewarmup_is_refused(asked):
    with pytest.raises(PolicyError, match="rewarm"):
        Rewarmup(**asked)


def test_rules_and_plans_need_no_torch():
    code = "import sys; import elastic.batch_scaling.lr_rules; import elastic.cli.plan\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=200).returncode == 0
