"""The elastic agent's environment: valid assignments are parsed, contradictions are refused."""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest

from elastic.errors import PolicyError
from integration.hyperpod.elastic_agent.environment import (
    ResumeFrom,
    SignalCoordination,
    launched_worker,
    resume_from,
    signal_coordination,
    stop_patience_s,
)
from tests.support.example_counts import examples

TOLD = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "2",
    "GROUP_WORLD_SIZE": "8",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "23456",
    "JOB_RESTART_COUNT": "3",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_assignment_is_read_from_the_agent_environment():
    found = launched_worker(TOLD)
    place = found.assignment
    assert (place.rank, place.world_size, place.node_rank, place.node_count) == (5, 8, 2, 4)
    assert (place.local_rank, place.local_world_size, place.store) == (1, 2, "10.0.0.1:23456")
    assert (place.restarts, place.reason) == (3, "started by HyperPod's agent after 3 faults")
    assert found.master_address == ("10.0.0.1", 23456)


def test_node_count_is_derived_although_the_agent_gives_the_rank_count():
    assert TOLD["GROUP_WORLD_SIZE"] == TOLD["WORLD_SIZE"]
    assert launched_worker(TOLD).assignment.node_count == 4


def test_addresses_of_the_newer_kind_are_put_in_brackets():
    assert launched_worker({**TOLD, "MASTER_ADDR": "fd00::1"}).assignment.store == "[fd00::1]:23456"


def test_torchrun_count_is_used_without_the_agents_count():
    told = {name: value for name, value in TOLD.items() if name != "JOB_RESTART_COUNT"}
    assert launched_worker(told).assignment.restarts == 2


def test_all_environment_problems_are_reported_at_once():
    with pytest.raises(PolicyError, match=r"WORLD_SIZE='many' is no count; .*GROUP_RANK is not set; MASTER_ADDR"):
        launched_worker({**TOLD, "WORLD_SIZE": "many", "MASTER_ADDR": ""} | {"GROUP_RANK": None})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "8"}, "RANK=8 of WORLD_SIZE=8"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 of LOCAL_WORLD_SIZE=2"),
        ({"WORLD_SIZE": "9"}, "WORLD_SIZE=9 in nodes of 2 ranks each"),
        ({"GROUP_RANK": "3"}, "RANK=5 as number 1 of node 3"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is no port"),
        ({"MASTER_PORT": "-1"}, "MASTER_PORT='-1' is no count"),
        ({"RANK": "٣"}, "is no count"),
        ({"RANK": "9" * 5000}, "is no count"),
    ],
)
def test_contradictory_environment_is_refused(changed, said):
    with pytest.raises(PolicyError) as error:
        launched_worker({**TOLD, **changed})
    assert said in str(error.value)


@hypothesis.given(st.dictionaries(st.sampled_from(sorted(TOLD)), st.text("0123456789-x ٣", max_size=4)))
@hypothesis.settings(max_examples=examples(80))
def test_any_environment_is_a_place_or_refused(changed):
    try:
        place = launched_worker({**TOLD, **changed}).assignment
    except PolicyError:
        return
    assert 0 <= place.rank < place.world_size == place.local_world_size * place.node_count
    assert 0 <= place.local_rank < place.local_world_size
    assert dataclasses.is_dataclass(launched_worker(TOLD))


@pytest.mark.parametrize(
    ("said", "means"),
    [
        (None, SignalCoordination.DISABLED),
        ("", SignalCoordination.DISABLED),
        ("disabled", SignalCoordination.DISABLED),
        ("Distributed ", SignalCoordination.DISTRIBUTED),
        ("everywhere", SignalCoordination.DISABLED),
    ],
)
def test_signals_are_used_only_when_the_job_enables_them(said, means):
    assert signal_coordination({} if said is None else {"HYPERPOD_SIGNAL_COORDINATION": said}) is means


def test_user_options_are_validated():
    assert stop_patience_s({}) == 120
    assert stop_patience_s({"ELASTIC_HYPERPOD_STOP_TIMEOUT_S": "2.5"}) == 2.5
    for wrong in ("soon", "-1", "nan", "inf"):
        with pytest.raises(PolicyError, match="not a number of seconds"):
            stop_patience_s({"ELASTIC_HYPERPOD_STOP_TIMEOUT_S": wrong})
    assert resume_from({}) is ResumeFrom.NEWEST
    assert resume_from({"ELASTIC_HYPERPOD_RESUME_FROM": "operator"}) is ResumeFrom.OPERATOR
    with pytest.raises(PolicyError, match="newest or operator"):
        resume_from({"ELASTIC_HYPERPOD_RESUME_FROM": "mine"})
