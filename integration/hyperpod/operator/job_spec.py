"""A HyperPodPyTorchJob resource as JobSpec. Errors name the resource's own fields. Pure."""

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
"""What the agent reads; the last one is not in AWS's own models."""
_UNLIMITED = {
    "numRestartBeforeFullJobRestart": "num_restart_before_full_job_restart",
    "maxFullJobRestarts": "max_full_job_restarts",
}
_MASTER_PORT = 23456


class JobSpecError(PolicyError):
    """A job's resource says what cannot be."""


class ReplicaGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One of ``replicaSpecs``."""

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
    """How long an agent that has a rank may be silent before it counts as lost."""
    stop_timeout_s: float = 60.0
    """How long agents may take to stop, beyond what a graceful stop is granted."""
    start_timeout_s: float = 120.0
    """How long agents that were started may take to say that they run."""
    master_port: int = _MASTER_PORT
    master_ports: int = 512
    """Each world meets at another port of this range: the last one's may be in use yet."""

    @property
    def spares(self) -> int:
        return sum(group.spares for group in self.groups)


def parse_job_resource(resource: Mapping[str, Any], **ours: Any) -> JobSpec:
    """From a resource; ``ours`` are fields of :class:`JobSpec` that no resource has."""
    reading = _SpecParser()
    if resource.get("kind") not in JOB_KINDS:
        raise JobSpecError(f"kind is {resource.get('kind')!r}, must be {JOB_KINDS[0]}")
    meta, spec = reading.table(resource, "metadata"), reading.table(resource, "spec")
    run = reading.table(spec, "runPolicy")
    groups = tuple(reading.group(one) for one in reading.list_of_tables(spec, "replicaSpecs"))
    if not groups:
        reading.problems.append("replicaSpecs is empty, a job needs one")
    if len({group.name for group in groups}) < len(groups):
        reading.problems.append("replicaSpecs has a name twice")
    clean = run.get("cleanPodPolicy") or "All"
    if clean not in _CLEAN_POLICIES:
        reading.problems.append(f"cleanPodPolicy is {clean!r}, must be one of {', '.join(_CLEAN_POLICIES)}")
    retries = reading.number(run, "jobMaxRetryCount", least=0)
    fields = {
        "log_rules": tuple(reading.rule(one) for one in reading.list_of_tables(run, "logMonitoringConfiguration")),
        "active_deadline_s": reading.number(run, "activeDeadlineSeconds", least=1),
        "startup_deadline_s": reading.number(run, "startupDeadlineSeconds", least=1),
        "fault_deadline_s": reading.number(run, "faultDeadlineSeconds", least=1),
        "ttl_s": reading.number(run, "ttlSecondsAfterFinished", least=-1) or 0,
    }
    elastic, restart = reading.table(spec, "elasticPolicy"), reading.table(run, "restartPolicy")
    if reading.problems:
        raise JobSpecError("impossible job: " + "; ".join(reading.problems))
    return JobSpec(
        name=str(meta.get("name") or "job"),
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
    """What is not limited in the resource has no limit."""
    replicas = sum(group.replicas for group in groups)
    most = sum(group.max_replicas for group in groups)
    sizes = {"minReplicas": replicas, "maxReplicas": most if elastic else replicas}
    if elastic.get("replicaDiscreteValues"):
        sizes = {}
    given = {**sizes, **{key: value for key, value in elastic.items() if value is not None}}
    told = {key: value for key, value in restart.items() if value is not None}
    others: dict[str, Any] = {"job_max_retry_count": retries}
    others |= {name: None for key, name in _UNLIMITED.items() if key not in told}
    try:
        policy = policy_from_keys(given, told, **others)
    except (PolicyError, TypeError, ValueError, OverflowError) as error:  # whoever wrote the resource is to be told
        raise JobSpecError(str(error)) from error
    if policy.max_replicas > most:
        raise JobSpecError(f"maxReplicas is {policy.max_replicas}, but replicaSpecs allow {most} (their maxReplicas)")
    begin = policy.largest_size_within(replicas) or policy.smallest_size
    return msgspec.structs.replace(policy, replicas=begin)


class _SpecParser:
    """Collects all that is wrong."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def table(self, where: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        found = where.get(key)
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            self.problems.append(f"{key} is {found!r}, must be a table")
            return {}
        return found

    def list_of_tables(self, where: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
        found = where.get(key) or []
        if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
            self.problems.append(f"{key} must be a list of tables")
            return []
        return found

    def number(self, where: Mapping[str, Any], key: str, *, least: int) -> int | None:
        found = where.get(key)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, int) or found < least:
            self.problems.append(f"{key} is {found!r}, must be a whole number, {least} or more")
            return None
        return found

    def group(self, one: Mapping[str, Any]) -> ReplicaGroup:
        replicas = self.number(one, "replicas", least=0) or 0
        most = self.number(one, "maxReplicas", least=0)
        if most is not None and most < replicas:
            self.problems.append(f"maxReplicas is {most}, less than replicas ({replicas})")
        if not one.get("name"):
            self.problems.append("a replica spec has no name")
        return ReplicaGroup(
            name=str(one.get("name", "")),
            replicas=replicas,
            max_replicas=replicas if most is None else most,
            spares=self.number(one, "spares", least=0) or 0,
            template=self.table(one, "template"),
        )

    def rule(self, one: Mapping[str, Any]) -> Mapping[str, Any]:
        unknown = [key for key in one if key not in _RULE_KEYS]
        if unknown:
            self.problems.append(f"a log rule has {', '.join(unknown)}, which nobody reads")
        missing = [key for key in ("name", "logPattern") if not one.get(key)]
        if missing:
            self.problems.append(f"a log rule has no {' and no '.join(missing)}")
        return {key: value for key, value in one.items() if value is not None}
