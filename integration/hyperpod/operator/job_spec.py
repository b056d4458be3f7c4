"""Parser of a HyperPodPyTorchJob resource into a JobSpec. Errors name the resource's own fields. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from elastic.errors import PolicyError
from elastic.world.scaling_policy import ScalingPolicy
from integration.hyperpod.elastic_policy import policy_from_keys

JOB_KINDS = ("HyperPodPyTorchJob", "HyperPodPytorchJob")
_CLEAN_POLICIES = ("All", "OnlyComplete", "None")
_RULE_KEYS = (
    "name", "logPattern", "expectedStartCutOffInSeconds", "expectedRecurringFrequencyInSeconds", "stopPattern",
    "metricThreshold", "operator", "metricEvaluationDataPoints", "faultOnMatch",
)  # fmt: skip
"""Keys of a log rule that the agent reads. AWS's own models lack the last one."""
_UNLIMITED = {
    "numRestartBeforeFullJobRestart": "num_restart_before_full_job_restart",
    "maxFullJobRestarts": "max_full_job_restarts",
}
_MASTER_PORT = 23456


class JobSpecError(PolicyError):
    """Error of an invalid job resource."""


class ReplicaGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``replicaSpecs``."""

    name: str
    replicas: int
    max_replicas: int
    spares: int = 0
    template: Mapping[str, Any] = {}


class JobSpec(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
):
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
    master_port: int = _MASTER_PORT
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
    if resource.get("kind") not in JOB_KINDS:
        raise JobSpecError(f"kind is {resource.get('kind')!r}, must be {JOB_KINDS[0]}")
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
    fields = {
        "log_rules": tuple(parser.rule(item) for item in parser.list_of_tables(run, "logMonitoringConfiguration")),
        "active_deadline_s": parser.number(run, "activeDeadlineSeconds", least=1),
        "startup_deadline_s": parser.number(run, "startupDeadlineSeconds", least=1),
        "fault_deadline_s": parser.number(run, "faultDeadlineSeconds", least=1),
        "ttl_s": parser.number(run, "ttlSecondsAfterFinished", least=-1) or 0,
    }
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
        **(fields | ours),
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
    except (
        PolicyError,
        TypeError,
        ValueError,
        OverflowError,
    ) as error:  # report every problem of the resource as a JobSpecError
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
        unknown = [key for key in rule if key not in _RULE_KEYS]
        if unknown:
            self.problems.append(f"a log rule has {', '.join(unknown)}, which nobody reads")
        missing = [key for key in ("name", "logPattern") if not rule.get(key)]
        if missing:
            self.problems.append(f"a log rule has no {' and no '.join(missing)}")
        return {key: value for key, value in rule.items() if value is not None}
