"""HyperPod's spellings of a scaling policy."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import PolicyError
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.elastic_policy import policy_from_keys

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


def test_custom_resource_maps_to_the_policy():
    assert policy_from_keys(CUSTOM_RESOURCE, RESTART_POLICY, replicas=4) == ScalingPolicy(
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


def test_recipe_maps_to_the_policy():
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
    policy = policy_from_keys(recipe, replica_discrete_values=tuple(scale_config))
    assert policy.sizes == (1, 2, 3, 4, 6, 8, 16)
    assert (policy.scaling_timeout_s, policy.graceful_shutdown_timeout_s) == (600, 900)
    assert policy.faulty_scale_down_timeout_s == 45
    assert policy_from_keys(recipe | {"use_graceful_shutdown": False}).graceful_shutdown_timeout_s == 0


def test_discrete_sizes_set_the_minimum_and_maximum():
    policy = policy_from_keys({"replicaDiscreteValues": [2, 4, 8]})
    assert (policy.min_replicas, policy.max_replicas, policy.sizes) == (2, 8, (2, 4, 8))


def test_both_kinds_of_sizes_may_be_there_where_they_agree():
    both = {"minReplicas": 1, "maxReplicas": 8, "replicaIncrementStep": 1, "replicaDiscreteValues": [2, 4, 8]}
    assert policy_from_keys(both).sizes == (2, 4, 8)
    assert policy_from_keys(both | {"replicaDiscreteValues": []}).sizes == tuple(range(1, 9))
    assert policy_from_keys(both | {"replicaIncrementStep": None}).sizes == (2, 4, 8)


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
def test_invalid_value_is_named_by_its_original_key(elastic, restart, said):
    with pytest.raises(PolicyError) as raised:
        policy_from_keys(elastic, restart)
    assert said in str(raised.value)


def test_unknown_field_is_named_with_all_other_problems():
    with pytest.raises(PolicyError, match=r"replica is unknown; minReplicas is 0"):
        policy_from_keys({"minReplicas": 0}, replica=3)


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
        policy = policy_from_keys(elastic, restart)
    except PolicyError:
        return
    assert policy.sizes
    assert msgspec.json.decode(msgspec.json.encode(policy), type=ScalingPolicy) == policy
