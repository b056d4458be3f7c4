"""HyperPod's own spellings of a scaling policy: the custom resource's, and the recipes'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

ELASTIC_POLICY = {
    "minReplicas": "min_replicas",
    "maxReplicas": "max_replicas",
    "replicaIncrementStep": "replica_increment_step",
    "replicaDiscreteValues": "replica_discrete_values",
    "scalingTimeoutInSeconds": "scaling_timeout_s",
    "gracefulShutdownTimeoutInSeconds": "graceful_shutdown_timeout_s",
    "faultyScaleDownTimeoutInSeconds": "faulty_scale_down_timeout_s",
}
"""``spec.elasticPolicy``."""

RECIPE = {
    "min_nodes": "min_replicas",
    "max_nodes": "max_replicas",
    "replica_increment_step": "replica_increment_step",
    "scaling_timeout": "scaling_timeout_s",
    "graceful_shutdown_timeout": "graceful_shutdown_timeout_s",
    "faulty_timeout": "faulty_scale_down_timeout_s",
}
"""``elastic_policy`` of a recipe."""

RESTART_POLICY = {
    "evalPeriodSeconds": "eval_period_s",
    "maxFullJobRestarts": "max_full_job_restarts",
    "numRestartBeforeFullJobRestart": "num_restart_before_full_job_restart",
    "maxNumRepeatOffendersToAvoid": "max_num_repeat_offenders_to_avoid",
    "scaleUpSnoozeTimeInSeconds": "scale_up_snooze_s",
}
"""``spec.runPolicy.restartPolicy``."""

_SWITCHES = ("is_elastic", "use_graceful_shutdown")


class Read(NamedTuple):
    fields: dict[str, Any]
    called: dict[str, str]
    """What each field was called."""
    problems: tuple[str, ...]
    """What could not be read."""


def read(elastic: Mapping[str, Any], restart: Mapping[str, Any]) -> Read:
    """What both say; a key that says nothing (null, an empty list) is as good as absent."""
    fields: dict[str, Any] = {}
    called: dict[str, str] = {}
    wrong: list[str] = []
    for given, known in ((elastic, ELASTIC_POLICY | RECIPE), (restart, RESTART_POLICY)):
        for key, value in given.items():
            if key in _SWITCHES and given is elastic:
                if not isinstance(value, bool):
                    wrong.append(f"{key} is {value!r}, must be true or false")
                continue
            if key not in known:
                wrong.append(f"{key} is unknown; known are {', '.join(sorted(known))}")
                continue
            if value is None or value == []:
                continue
            name = known[key]
            if name in fields:
                wrong.append(f"{key} and {called[name]} say the same thing: give one of the two")
            fields[name] = tuple(value) if isinstance(value, list) else value
            called[name] = key
    if restart and "evalPeriodSeconds" not in restart:
        wrong.append("evalPeriodSeconds is missing, a restart policy needs it")
    if elastic.get("use_graceful_shutdown") is False:
        fields["graceful_shutdown_timeout_s"] = 0.0
    return Read(fields | _ends(fields), called, tuple(wrong))


def _ends(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The least and the greatest size, where only the list of sizes says them."""
    sizes = fields.get("replica_discrete_values", ())
    if not isinstance(sizes, tuple) or not sizes or not all(isinstance(size, int) for size in sizes):
        return {}
    ends = {"min_replicas": min(sizes), "max_replicas": max(sizes)}
    return {name: value for name, value in ends.items() if name not in fields}
