"""The HyperPodPyTorchJob resource: its names, and a JobSpec parsed from it or written to it. Pure.

Errors name the resource's own fields.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from elastic.errors import PolicyError
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.elastic_policy import ELASTIC_POLICY_KEYS, RESTART_POLICY_KEYS, policy_from_keys

JOB_API_GROUP = "sagemaker.amazonaws.com"
JOB_API_VERSION = f"{JOB_API_GROUP}/v1"
JOB_PLURAL = "hyperpodpytorchjobs"
JOB_KIND = "HyperPodPyTorchJob"
_JOB_KINDS = (JOB_KIND, "HyperPodPytorchJob")
AGENT_PORT = 8080
"""Default port of HyperPod's elastic agent, which the operator calls."""

KUEUE_GROUP = "kueue.x-k8s.io"
QUEUE_LABEL = f"{KUEUE_GROUP}/queue-name"
PRIORITY_LABEL = f"{KUEUE_GROUP}/priority-class"

NODE_HEALTH_LABEL = "sagemaker.amazonaws.com/node-health-status"


class NodeHealth(enum.Enum):
    """Values of a node's health label, from best to worst."""

    SCHEDULABLE = "Schedulable"
    UNSCHEDULABLE = "Unschedulable"
    PENDING_REBOOT = "UnschedulablePendingReboot"
    PENDING_REPLACEMENT = "UnschedulablePendingReplacement"

    @property
    def severity(self) -> int:
        return list(NodeHealth).index(self)


class RestartMode(enum.Enum):
    """Extent of a restart after a fault, least first, in the spelling of the agent and its workers."""

    IN_PROCESS = "in_process_restart"
    """The processes remain and form a new world."""
    PROCESS = "process_level_restart"
    """The processes restart in the existing pods."""
    JOB = "job_level_restart"
    """Processes and pods restart."""

    @property
    def severity(self) -> int:
        return list(RestartMode).index(self)

    def at_least(self, other: RestartMode) -> RestartMode:
        return max(self, other, key=lambda mode: mode.severity)


FAULT_ON_MATCH = "faultOnMatch"
"""Key of a log rule that the agent reads and AWS's own models lack."""
_LOG_RULE_KEYS: Mapping[str, type] = {
    "name": str,
    "logPattern": str,
    "expectedRecurringFrequencyInSeconds": int,
    "expectedStartCutOffInSeconds": int,
    "metricEvaluationDataPoints": int,
    "metricThreshold": int,
    "operator": str,
    "stopPattern": str,
    FAULT_ON_MATCH: bool,
}
_LOG_RULE_OPERATORS = ("gt", "lt", "eq", "gteq", "lteq")


def log_rule_problems(rule: Mapping[str, Any]) -> list[str]:
    """Return all problems of one entry of ``logMonitoringConfiguration``."""
    wrong: list[str] = []
    for key, value in rule.items():
        kind = _LOG_RULE_KEYS.get(key)
        if kind is None:
            wrong.append(f"{key} is unknown")
        elif type(value) is not kind:
            wrong.append(f"{key} is {value!r}, must be {kind.__name__}")
    wrong += [f"{key} is missing" for key in ("name", "logPattern") if not rule.get(key)]
    if rule.get("operator", "gt") not in _LOG_RULE_OPERATORS:
        wrong.append(f"operator is none of {', '.join(_LOG_RULE_OPERATORS)}")
    return [f"log rule {rule.get('name', 'without a name')}: {problem}" for problem in wrong]


_CLEAN_POLICIES = ("All", "OnlyComplete", "None")
_UNLIMITED = {key: RESTART_POLICY_KEYS[key] for key in ("numRestartBeforeFullJobRestart", "maxFullJobRestarts")}
"""Limits that do not apply if the resource lacks them."""
_RUN_POLICY_NUMBERS = {
    "startupDeadlineSeconds": ("startup_deadline_s", 1),
    "activeDeadlineSeconds": ("active_deadline_s", 1),
    "faultDeadlineSeconds": ("fault_deadline_s", 1),
    "ttlSecondsAfterFinished": ("ttl_s", -1),
}
"""Field of :class:`JobSpec`, and the smallest value, of keys of ``runPolicy``."""


class JobSpecError(PolicyError):
    """Error of an invalid job resource."""


class ReplicaGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``replicaSpecs``."""

    name: str
    replicas: int
    max_replicas: int
    spares: int = 0
    template: Mapping[str, Any] = {}


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One job as its resource describes it, and the limits of its operator."""

    name: str
    groups: tuple[ReplicaGroup, ...]
    policy: ScalingPolicy
    nproc: str = "auto"
    elastic: bool = False
    log_rules: tuple[Mapping[str, Any], ...] = ()
    suspend: bool = False
    active_deadline_s: float | None = None
    startup_deadline_s: float | None = None
    fault_deadline_s: float | None = None
    clean_pod_policy: str = "All"
    ttl_s: int = 0

    agent_timeout_s: float = 30.0
    """Seconds of silence after which an agent with a rank counts as lost."""
    stop_timeout_s: float = 60.0
    """Seconds agents may take to stop, in addition to the timeout of a graceful stop."""
    start_timeout_s: float = 120.0
    """Seconds a started agent may take to report RUNNING."""
    master_port: int = 23456
    master_ports: int = 512
    """Number of ports from ``master_port``.

    Each world uses the next port, because the last one may still be in use.
    """

    @property
    def spares(self) -> int:
        return sum(group.spares for group in self.groups)


def parse_job_resource(resource: Mapping[str, Any], **ours: Any) -> JobSpec:
    """Parse a resource. ``ours`` sets fields of :class:`JobSpec` that no resource has.

    Raise :class:`JobSpecError` with all problems of the resource.
    """
    parser = _SpecParser()
    if resource.get("kind") not in _JOB_KINDS:
        raise JobSpecError(f"kind is {resource.get('kind')!r}, must be {JOB_KIND}")
    metadata, spec = parser.table(resource, "metadata"), parser.table(resource, "spec")
    run = parser.table(spec, "runPolicy")
    groups = tuple(parser.group(item) for item in parser.list_of_tables(spec, "replicaSpecs"))
    if not groups:
        parser.problems.append("replicaSpecs is empty, a job needs one")
    if len({group.name for group in groups}) < len(groups):
        parser.problems.append("replicaSpecs has a name twice")
    clean = run.get("cleanPodPolicy") or "All"
    if clean not in _CLEAN_POLICIES:
        parser.problems.append(f"cleanPodPolicy is {clean!r}, must be one of {', '.join(_CLEAN_POLICIES)}")
    retries = parser.number(run, "jobMaxRetryCount", least=0)
    numbers = {
        field: found
        for key, (field, least) in _RUN_POLICY_NUMBERS.items()
        if (found := parser.number(run, key, least=least)) is not None
    }
    log_rules = tuple(parser.rule(item) for item in parser.list_of_tables(run, "logMonitoringConfiguration"))
    elastic, restart = parser.table(spec, "elasticPolicy"), parser.table(run, "restartPolicy")
    if parser.problems:
        raise JobSpecError("impossible job: " + "; ".join(parser.problems))
    return JobSpec(
        name=str(metadata.get("name") or "job"),
        groups=groups,
        policy=_policy(groups, elastic, restart, retries),
        nproc=str(spec.get("nprocPerNode", "auto")),
        elastic=bool(elastic),
        suspend=bool(run.get("suspend")),
        clean_pod_policy=clean,
        log_rules=log_rules,
        **(numbers | ours),
    )


def _policy(
    groups: Sequence[ReplicaGroup], elastic: Mapping[str, Any], restart: Mapping[str, Any], retries: int | None
) -> ScalingPolicy:
    """Return the scaling policy. A limit missing in the resource means no limit."""
    replicas = sum(group.replicas for group in groups)
    most = sum(group.max_replicas for group in groups)
    sizes = {"minReplicas": replicas, "maxReplicas": most if elastic else replicas}
    if elastic.get("replicaDiscreteValues"):
        sizes = {}
    elastic_keys = {**sizes, **{key: value for key, value in elastic.items() if value is not None}}
    restart_keys = {key: value for key, value in restart.items() if value is not None}
    others: dict[str, Any] = {"job_max_retry_count": retries}
    others |= {name: None for key, name in _UNLIMITED.items() if key not in restart_keys}
    try:
        policy = policy_from_keys(elastic_keys, restart_keys, **others)
    except (TypeError, ValueError, OverflowError) as error:  # report every problem of the resource as a JobSpecError
        raise JobSpecError(str(error)) from error
    if policy.max_replicas > most:
        raise JobSpecError(f"maxReplicas is {policy.max_replicas}, but replicaSpecs allow {most} (their maxReplicas)")
    initial = policy.largest_size_within(replicas) or policy.smallest_size
    return msgspec.structs.replace(policy, replicas=initial)


class _SpecParser:
    """Typed access to a resource's fields. Collects all problems."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def table(self, parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        value = parent.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.problems.append(f"{key} is {value!r}, must be a table")
            return {}
        return value

    def list_of_tables(self, parent: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
        value = parent.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            self.problems.append(f"{key} must be a list of tables")
            return []
        return value

    def number(self, parent: Mapping[str, Any], key: str, *, least: int) -> int | None:
        value = parent.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.problems.append(f"{key} is {value!r}, must be a whole number, {least} or more")
            return None
        return value

    def group(self, item: Mapping[str, Any]) -> ReplicaGroup:
        replicas = self.number(item, "replicas", least=0) or 0
        most = self.number(item, "maxReplicas", least=0)
        if most is not None and most < replicas:
            self.problems.append(f"maxReplicas is {most}, less than replicas ({replicas})")
        if not item.get("name"):
            self.problems.append("a replica spec has no name")
        return ReplicaGroup(
            name=str(item.get("name", "")),
            replicas=replicas,
            max_replicas=replicas if most is None else most,
            spares=self.number(item, "spares", least=0) or 0,
            template=self.table(item, "template"),
        )

    def rule(self, rule: Mapping[str, Any]) -> Mapping[str, Any]:
        known = {key: value for key, value in rule.items() if value is not None}
        self.problems += log_rule_problems(known)
        return known


def write_job_resource(
    spec: JobSpec, *, namespace: str = "default", labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the resource of ``spec``, from which :func:`parse_job_resource` reads the same job."""
    metadata: dict[str, Any] = {"name": spec.name, "namespace": namespace}
    if set_labels := {name: value for name, value in (labels or {}).items() if value}:
        metadata["labels"] = set_labels
    body: dict[str, Any] = {
        "nprocPerNode": spec.nproc,
        "replicaSpecs": [_written_group(group, elastic=spec.elastic) for group in spec.groups],
        "runPolicy": _written_run_policy(spec),
    }
    if spec.elastic:
        body["elasticPolicy"] = write_elastic_policy(spec.policy)
    return {"apiVersion": JOB_API_VERSION, "kind": JOB_KIND, "metadata": metadata, "spec": body}


def write_elastic_policy(policy: ScalingPolicy) -> dict[str, Any]:
    """Return ``elasticPolicy``, which :func:`~integration.hyperpod.elastic_policy.policy_from_keys` reads.

    Fractions of a second are rounded up.
    """
    if policy.replica_discrete_values:
        sizes: dict[str, Any] = {"replicaDiscreteValues": list(policy.sizes), "replicaIncrementStep": None}
    else:
        sizes = {"replicaDiscreteValues": None, "replicaIncrementStep": policy.replica_increment_step or 1}
    return _written(policy, ELASTIC_POLICY_KEYS, minReplicas=policy.smallest_size, **sizes)


def _written(values: msgspec.Struct, fields: Mapping[str, str], **others: Any) -> dict[str, Any]:
    """Return the keys of ``fields`` with their values, without those that are None."""
    found = {key: getattr(values, field) for key, field in fields.items()} | others
    whole = {key: math.ceil(value) if isinstance(value, float) else value for key, value in found.items()}
    return {key: value for key, value in whole.items() if value is not None}


def _written_group(group: ReplicaGroup, *, elastic: bool) -> dict[str, Any]:
    most = group.max_replicas if elastic or group.max_replicas != group.replicas else None
    keys = {"name": "name", "replicas": "replicas"}
    return _written(group, keys, maxReplicas=most, spares=group.spares or None, template=group.template)


def _written_run_policy(spec: JobSpec) -> dict[str, Any]:
    return {
        "cleanPodPolicy": spec.clean_pod_policy,
        "restartPolicy": _written(spec.policy, RESTART_POLICY_KEYS),
        **_written(spec.policy, {"jobMaxRetryCount": "job_max_retry_count"}),
        **_written(spec, {key: field for key, (field, _) in _RUN_POLICY_NUMBERS.items() if getattr(spec, field)}),
        **({"suspend": True} if spec.suspend else {}),
        **({"logMonitoringConfiguration": [dict(rule) for rule in spec.log_rules]} if spec.log_rules else {}),
    }
