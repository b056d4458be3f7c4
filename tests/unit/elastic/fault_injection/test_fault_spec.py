"""Fault specifications: validation, text form, and reproducible seeds."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.errors import PolicyError
from elastic.fault_injection import FaultInjection, FaultPlan, InjectionKind, InjectionPhase
from elastic.fault_injection.fault_spec import (
    NAN_PHASES,
    RankLocation,
    parse_injection,
    parse_injections,
    validated_injections,
)

placed = st.integers(0, 64)
kinds = st.sampled_from([kind for kind in InjectionKind if kind is not InjectionKind.NAN])
steps = st.builds(
    FaultInjection,
    kind=kinds,
    step=st.none() | placed,
    phase=st.sampled_from([phase for phase in InjectionPhase if not phase.is_between_steps]),
    rank=placed,
    local_rank=st.none() | placed,
    after_s=st.none() | st.floats(0, 1e6),
)


def words_of(one: FaultInjection) -> str:
    return " ".join(f"{name}={value}" for name, value in msgspec.to_builtins(one).items())


@given(st.lists(steps, max_size=6))
@settings(max_examples=30)
def test_formatted_injection_is_parsed_back(found):
    plan = validated_injections(tuple(found))
    assert parse_injections(FaultPlan(0, plan).encode()) == plan
    assert parse_injections("; ".join(map(words_of, plan))) == plan


def test_a_plan_may_be_in_a_file(tmp_path):
    faults = FaultPlan().at(step=30, rank=8).sigkill().then(phase="recovery", rank=0).segfault()
    (tmp_path / "plan").write_text(faults.encode())
    assert parse_injections(f"file:{tmp_path}/plan") == faults.injections
    assert [one.then for one in faults.injections] == [None, "0000"]
    with pytest.raises(PolicyError, match="cannot be read"):
        parse_injections(f"file:{tmp_path}/none")


@pytest.mark.parametrize(
    ("words", "kind", "field"),
    [
        ("step=-1 rank=1", "sigkill", "step=-1"),
        ("step=x rank=1", "sigkill", "step=x: must be a whole number"),
        ("step=1", "sigkill", "rank: say which rank"),
        ("step=1 rank=", "sigkill", "rank=: must be"),
        ("step=1 rank=1 rank=2", "sigkill", "rank occurs twice"),
        ("step=1 rnak=1", "sigkill", "'rnak=1'"),
        ("step rank=1", "sigkill", "'step'"),
        ("rank=1", "sigkil", "kind=sigkil: one of sigkill, "),
        ("rank=1", None, "kind is missing"),
        ("rank=1 phase=foward", "sigkill", "phase=foward: one of forward"),
        ("rank=1 phase=recovery step=3", "sigkill", "step=3: phase recovery is between steps"),
        ("rank=1 phase=optimizer", "nan", "phase=optimizer: nan is for forward, backward, allreduce"),
        ("rank=1 seconds=3", "sigkill", "seconds=3: sigkill lasts"),
        ("rank=1 seconds=-3", "slow", "seconds=-3.0: must be"),
        ("rank=1 seconds=inf", "slow", "seconds=inf: must be"),
        ("rank=1 times=0", "slow", "times=0"),
        ("rank=1 times=3", "partition", "times=3"),
        ("rank=1 name=a/b", "sigkill", "name='a/b'"),
        ("rank=1 name=a then=a", "sigkill", "then=a: it would wait for itself"),
    ],
)
def test_impossible_injection_names_its_field(words, kind, field):
    with pytest.raises(PolicyError) as error:
        parse_injection(words.split(), kind)
    assert field in str(error.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("rank=1 kind=sigkill name=a; rank=2 kind=sigkill name=a", "name=a: is there twice"),
        ("rank=1 kind=sigkill then=b; rank=2 kind=sigkill name=b", "then=b: no injection before"),
        ('[{"kind": "sigkill", "rnak": 1}]', "rnak"),
        ('[{"kind": "sigkill"', "ELASTIC_INJECT"),
    ],
)
def test_malformed_injection_plan_is_refused(text, what):
    with pytest.raises(PolicyError, match=what):
        parse_injections(text)


def test_injection_matches_the_current_location_of_its_rank():
    by_rank, by_node = (
        FaultInjection(kind=InjectionKind.OOM, rank=8),
        FaultInjection(kind=InjectionKind.OOM, node="n1", local_rank=0),
    )
    places = [RankLocation(0, "n0", 0), RankLocation(8, "n0", 1), RankLocation(16, "n1", 0), RankLocation(8, "n1", 1)]
    assert [by_rank.matches(place) for place in places] == [False, True, False, True]
    assert [by_node.matches(place) for place in places] == [False, False, True, False]


@given(st.integers(0, 2**32), st.integers(0, 60), st.integers(1, 9))
@settings(max_examples=30)
def test_a_seed_gives_the_same_faults_and_they_can_all_happen(seed, count, ranks):
    faults = FaultPlan(seed).random(count, ranks=ranks, kinds=tuple(InjectionKind), together=0.3)
    assert (
        faults.injections
        == FaultPlan(seed).random(count, ranks=ranks, kinds=tuple(InjectionKind), together=0.3).injections
    )
    assert len(faults.injections) == count
    assert parse_injections(faults.encode()) == faults.injections
    in_steps = [one.step for one in faults.injections if one.step is not None]
    assert in_steps == sorted(set(in_steps))
    for one in faults.injections:
        assert one.rank in range(ranks)
        assert one.effective_phase.is_between_steps == (one.step is None)
        assert one.kind is not InjectionKind.NAN or one.effective_phase in NAN_PHASES


def test_scattering_without_a_phase_that_can_be_is_refused():
    with pytest.raises(PolicyError, match="phases: none of them is one for nan"):
        FaultPlan(1).random(1, ranks=1, kinds=[InjectionKind.NAN], phases=[InjectionPhase.SAVE])
