"""Sizes and limits of a scaling policy."""

from __future__ import annotations

import pickle

import pytest

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
def test_impossible_policy_names_its_field(fields, said):
    with pytest.raises(PolicyError) as raised:
        ScalingPolicy(**fields)
    assert said in str(raised.value)


def test_all_policy_problems_are_reported_at_once():
    with pytest.raises(PolicyError) as raised:
        ScalingPolicy(min_replicas=4, max_replicas=2, scaling_timeout_s=-1, eval_period_s=-1)
    for name in ("max_replicas is 2", "scaling_timeout_s is -1", "eval_period_s is -1"):
        assert name in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
