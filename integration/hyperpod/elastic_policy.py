"""HyperPod's spellings of a scaling policy: a job's ``elasticPolicy``, a recipe's ``elastic_policy``.

``elastic run --policy`` finds :func:`read_policy_file` through the entry points ``elastic.policy_readers``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic.errors import PolicyError
from elastic.world.scaling_policy import PolicyFields, ScalingPolicy

ELASTIC_POLICY_KEYS = {
    "minReplicas": "min_replicas",
    "maxReplicas": "max_replicas",
    "replicaIncrementStep": "replica_increment_step",
    "replicaDiscreteValues": "replica_discrete_values",
    "scalingTimeoutInSeconds": "scaling_timeout_s",
    "gracefulShutdownTimeoutInSeconds": "graceful_shutdown_timeout_s",
    "faultyScaleDownTimeoutInSeconds": "faulty_scale_down_timeout_s",
}
"""Keys of ``spec.elasticPolicy``."""

RECIPE_POLICY_KEYS = {
    "min_nodes": "min_replicas",
    "max_nodes": "max_replicas",
    "replica_increment_step": "replica_increment_step",
    "scaling_timeout": "scaling_timeout_s",
    "graceful_shutdown_timeout": "graceful_shutdown_timeout_s",
    "faulty_timeout": "faulty_scale_down_timeout_s",
}
"""Keys of a recipe's ``elastic_policy``."""

RESTART_POLICY_KEYS = {
    "evalPeriodSeconds": "eval_period_s",
    "numRestartBeforeFullJobRestart": "num_restart_before_full_job_restart",
    "maxFullJobRestarts": "max_full_job_restarts",
    "maxNumRepeatOffendersToAvoid": "max_num_repeat_offenders_to_avoid",
    "scaleUpSnoozeTimeInSeconds": "scale_up_snooze_s",
}
"""Keys of ``spec.runPolicy.restartPolicy``."""

_SWITCHES = ("is_elastic", "use_graceful_shutdown")


_PARTS = ("elasticPolicy", "restartPolicy")


def read_policy_file(tree: Mapping[str, Any]) -> PolicyFields:
    """Return the fields of a file with ``elasticPolicy``, ``restartPolicy``, or both.

    Raise :class:`~elastic.errors.PolicyError` for any other key, which would have no effect.
    """
    wrong = [f"{name} stands beside {' and '.join(_PARTS)}, and would not be read" for name in tree.keys() - _PARTS]
    parts = [tree.get(name) or {} for name in _PARTS]
    wrong += [
        f"{name} is {part!r}, must be names and values"
        for name, part in zip(_PARTS, parts, strict=True)
        if not isinstance(part, dict)
    ]
    if wrong:
        raise PolicyError("; ".join(sorted(wrong)))
    read = read_policy_fields(*parts)
    usual = {field: key for key, field in (ELASTIC_POLICY_KEYS | RESTART_POLICY_KEYS).items()}
    return read._replace(spelled=usual | read.spelled)


def policy_from_keys(
    elastic: Mapping[str, Any], restart: Mapping[str, Any] | None = None, **others: Any
) -> ScalingPolicy:
    """Return the policy of a job or of a recipe.

    ``elastic`` is the job's ``elasticPolicy`` or the recipe's ``elastic_policy``, ``restart`` its ``restartPolicy``.

    ``others`` are fields that neither of the two has. A recipe's ``scale_config`` is a list of sizes:
    ``replica_discrete_values=tuple(scale_config)``. The caller decides whether the job is elastic (``is_elastic``).
    """
    return ScalingPolicy.from_fields(read_policy_fields(elastic, restart or {}), **others)


def read_policy_fields(elastic: Mapping[str, Any], restart: Mapping[str, Any]) -> PolicyFields:
    """Return the fields of both. A key whose value is null or an empty list counts as absent."""
    fields: dict[str, Any] = {}
    called: dict[str, str] = {}
    wrong: list[str] = []
    for section, known in ((elastic, ELASTIC_POLICY_KEYS | RECIPE_POLICY_KEYS), (restart, RESTART_POLICY_KEYS)):
        for key, value in section.items():
            if key in _SWITCHES and section is elastic:
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
    return PolicyFields(fields | _ends(fields), called, tuple(wrong))


def _ends(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the smallest and the largest size if only the list of sizes defines them."""
    sizes = fields.get("replica_discrete_values", ())
    if not isinstance(sizes, tuple) or not sizes or not all(isinstance(size, int) for size in sizes):
        return {}
    ends = {"min_replicas": min(sizes), "max_replicas": max(sizes)}
    return {name: value for name, value in ends.items() if name not in fields}
