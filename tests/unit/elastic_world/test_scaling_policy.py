"""Sizes, limits, and HyperPod's own spellings."""

from __future__ import annotations

import pickle

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import PolicyError
from elastic.world.scaling_policy import ScalingPolicy


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [
        ({}, (1,)),
        ({"min_replicas": 2, "max_replicas": 5}, (2, 3, 4, 5)),
        ({"min_replicas": 2, "max_replicas": 8, "replica_increment_step": 2}, (2, 4, 6, 8)),
        ({"min_replicas": 2, "max_replicas": 9, "replica_increment_step": 3}, (2, 5, 8)),
        ({"min_replicas": 1, "max_replicas": 16, "replica_discrete_values": (1, 2, 4, 16)}, (1, 2, 4, 16)),
        ({"min_replicas": 1, "max_replicas": 8, "replica_discrete_values": (8, 2)}, (2, 8)),
        (
            {"min_replicas": 2, "max_replicas": 8, "replica_increment_step": 2, "replica_discrete_values": (2, 8)},
            (2, 8),
        ),
    ],
)
def test_sizes(fields, sizes):
    policy = ScalingPolicy(**fields)
    assert policy.sizes == sizes
    for nodes in range(20):
        assert policy.largest_size_within(nodes) == max((size for size in sizes if size <= nodes), default=0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"min_replicas": 0}, "min_replicas is 0, must be a whole number, 1 or more"),
        ({"min_replicas": 5, "max_replicas": 4}, "max_replicas is 4, less than min_replicas (5)"),
        ({"max_replicas": True}, "max_replicas is True"),
        ({"max_replicas": 2.0}, "max_replicas is 2.0"),
        ({"scaling_timeout_s": -1}, "scaling_timeout_s is -1, must be a number of seconds, 0 or more"),
        ({"scaling_timeout_s": float("nan")}, "scaling_timeout_s is nan"),
        ({"graceful_shutdown_timeout_s": float("inf")}, "graceful_shutdown_timeout_s is inf"),
        ({"faulty_scale_down_timeout_s": "30"}, "faulty_scale_down_timeout_s is '30'"),
        ({"scale_up_snooze_s": None}, "scale_up_snooze_s is None"),
        ({"eval_period_s": 0}, "eval_period_s is 0, must be a number of seconds, 1 or more"),
        ({"max_full_job_restarts": -1}, "max_full_job_restarts is -1, must be a whole number, 0 or more, or nothing"),
        ({"repeat_offender_faults": 0}, "repeat_offender_faults is 0"),
        ({"max_replicas": 4, "replica_discrete_values": (2, 8)}, "replica_discrete_values has 8, which is not between"),
        ({"max_replicas": 4, "replica_discrete_values": (2, 2)}, "names a size twice"),
        ({"max_replicas": 4, "replica_discrete_values": 2}, "replica_discrete_values is 2, must be a list"),
        ({"max_replicas": 4, "replica_discrete_values": (2, "4")}, "must be a list of whole numbers"),
        (
            {"max_replicas": 8, "replica_increment_step": 2, "replica_discrete_values": (1, 4)},
            "has 4, which replica_increment_step (2) does not reach from min_replicas (1): give one of the two",
        ),
        ({"max_replicas": 4, "replicas": 5}, "replicas is 5, which is none of the sizes allowed"),
        ({"max_replicas": 4, "replica_discrete_values": (2, 4), "replicas": 3}, "replicas is 3"),
        ({"max_replicas": 4, "replica_increment_step": 2, "replicas": 2}, "replicas is 2"),
    ],
)
def test_what_is_impossible_is_named(fields, said):
    with pytest.raises(PolicyError) as raised:
        ScalingPolicy(**fields)
    assert said in str(raised.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(PolicyError) as raised:
        ScalingPolicy(min_replicas=4, max_replicas=2, scaling_timeout_s=-1, eval_period_s=-1)
    for name in ("max_replicas is 2", "scaling_timeout_s is -1", "eval_period_s is -1"):
        assert name in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


CUSTOM_RESOURCE = {
    "minReplicas": 2,
    "maxReplicas": 8,
    "replicaIncrementStep": 2,
    "gracefulShutdownTimeoutInSeconds": 600,
    "scalingTimeoutInSeconds": 60,
    "faultyScaleDownTimeoutInSeconds": 30,
}
RESTART_POLICY = {
    "evalPeriodSeconds": 21600,
    "maxFullJobRestarts": 1,
    "numRestartBeforeFullJobRestart": 3,
    "maxNumRepeatOffendersToAvoid": 2,
    "scaleUpSnoozeTimeInSeconds": 120,
}


def test_a_custom_resource_says_the_same_in_its_own_words():
    assert ScalingPolicy.from_elastic_policy(CUSTOM_RESOURCE, RESTART_POLICY, replicas=4) == ScalingPolicy(
        min_replicas=2,
        max_replicas=8,
        replica_increment_step=2,
        graceful_shutdown_timeout_s=600,
        scaling_timeout_s=60,
        faulty_scale_down_timeout_s=30,
        eval_period_s=21600,
        max_full_job_restarts=1,
        num_restart_before_full_job_restart=3,
        max_num_repeat_offenders_to_avoid=2,
        scale_up_snooze_s=120,
        replicas=4,
    )


def test_a_recipe_says_the_same_in_its_own_words():
    recipe = {
        "is_elastic": False,
        "min_nodes": 1,
        "max_nodes": 16,
        "use_graceful_shutdown": True,
        "scaling_timeout": 600,
        "graceful_shutdown_timeout": 900,
        "faulty_timeout": 45,
    }
    scale_config = {1: {}, 2: {}, 3: {}, 4: {}, 6: {}, 8: {}, 16: {}}
    policy = ScalingPolicy.from_elastic_policy(recipe, replica_discrete_values=tuple(scale_config))
    assert policy.sizes == (1, 2, 3, 4, 6, 8, 16)
    assert (policy.scaling_timeout_s, policy.graceful_shutdown_timeout_s) == (600, 900)
    assert policy.faulty_scale_down_timeout_s == 45
    assert ScalingPolicy.from_elastic_policy(recipe | {"use_graceful_shutdown": False}).graceful_shutdown_timeout_s == 0


def test_a_list_of_sizes_says_the_least_and_the_greatest():
    policy = ScalingPolicy.from_elastic_policy({"replicaDiscreteValues": [2, 4, 8]})
    assert (policy.min_replicas, policy.max_replicas, policy.sizes) == (2, 8, (2, 4, 8))


def test_both_kinds_of_sizes_may_be_there_where_they_agree():
    both = {"minReplicas": 1, "maxReplicas": 8, "replicaIncrementStep": 1, "replicaDiscreteValues": [2, 4, 8]}
    assert ScalingPolicy.from_elastic_policy(both).sizes == (2, 4, 8)
    assert ScalingPolicy.from_elastic_policy(both | {"replicaDiscreteValues": []}).sizes == tuple(range(1, 9))
    assert ScalingPolicy.from_elastic_policy(both | {"replicaIncrementStep": None}).sizes == (2, 4, 8)


@pytest.mark.parametrize(
    ("elastic", "restart", "said"),
    [
        ({"minReplicas": 4, "maxReplicas": 2}, {}, "maxReplicas is 2, less than minReplicas (4)"),
        ({"min_nodes": "1"}, {}, "min_nodes is '1', must be a whole number"),
        ({"maxReplica": 4}, {}, "maxReplica is unknown; known are"),
        ({"maxReplicas": 4}, {"maxFullJobRestarts": 1}, "evalPeriodSeconds is missing"),
        ({"maxReplicas": 4}, {"evalPeriodSeconds": 0}, "evalPeriodSeconds is 0"),
        ({"maxReplicas": 4, "max_nodes": 4}, {}, "max_nodes and maxReplicas say the same thing"),
        ({"is_elastic": "yes"}, {}, "is_elastic is 'yes', must be true or false"),
        ({"replicaDiscreteValues": "2,4"}, {}, "replicaDiscreteValues is '2,4', must be a list"),
    ],
)
def test_what_is_impossible_is_named_as_it_was_written(elastic, restart, said):
    with pytest.raises(PolicyError) as raised:
        ScalingPolicy.from_elastic_policy(elastic, restart)
    assert said in str(raised.value)


def test_a_field_nobody_knows_is_named_beside_all_else():
    with pytest.raises(PolicyError, match=r"replica is unknown; minReplicas is 0"):
        ScalingPolicy.from_elastic_policy({"minReplicas": 0}, replica=3)


@given(
    st.dictionaries(
        st.sampled_from([*CUSTOM_RESOURCE, "replicaDiscreteValues", "min_nodes", "faulty_timeout", "is_elastic", "x"]),
        st.none()
        | st.integers(-2, 9)
        | st.floats()
        | st.text(max_size=2)
        | st.booleans()
        | st.lists(st.integers(0, 9)),
    ),
    st.dictionaries(st.sampled_from([*RESTART_POLICY, "y"]), st.none() | st.integers(-2, 9) | st.text(max_size=2)),
)
def test_anything_is_a_policy_or_a_policy_error(elastic, restart):
    try:
        policy = ScalingPolicy.from_elastic_policy(elastic, restart)
    except PolicyError:
        return
    assert policy.sizes
    assert msgspec.json.decode(msgspec.json.encode(policy), type=ScalingPolicy) == policy
