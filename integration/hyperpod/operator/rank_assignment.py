"""World size, pod count, rank assignment, and the bodies of /start and /update. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from integration.hyperpod.job_resource import ReplicaGroup, RestartMode
from integration.hyperpod.operator import fault_detection
from integration.hyperpod.operator.decision import (
    DecisionBuilder,
    DesiredPods,
    StartAgent,
    StartRequest,
    UpdateAgent,
    agent_state_of,
)
from integration.hyperpod.operator.job_state import AssignedWorld, FormingPhase, JobPhase
from integration.hyperpod.operator.observed_pods import AgentState, ObservedPod


def max_allowed_size(builder: DecisionBuilder) -> int:
    """Return the largest size allowed now; 0 if fewer replicas are admitted than the smallest size."""
    limit, admitted = builder.spec.policy.max_replicas, builder.observed.capacity
    return builder.spec.policy.largest_size_within(limit if admitted is None else min(limit, admitted))


def rank_candidates(builder: DecisionBuilder) -> list[ObservedPod]:
    """Return the pods that may get a rank, best first.

    Pods on nodes to avoid come last. Otherwise members of the last world come first, by rank, then the oldest pods.
    """
    previous = {name: rank for rank, name in enumerate(builder.state.previous_members)}
    avoid = fault_detection.nodes_to_avoid(builder.state, builder.spec.policy, builder.now_s)
    usable = [pod for pod in builder.active_pods if not pod.node_health_problem and _is_waiting(pod)]
    return sorted(usable, key=lambda pod: (pod.node in avoid, previous.get(pod.name, len(previous))))


def _is_waiting(pod: ObservedPod) -> bool:
    """Return whether the agent can join a world.

    In-process agents become ready only after their processes receive their ranks and wait at the barrier.
    """
    if agent_state_of(pod) is AgentState.READY:
        return True
    in_process = pod.agent_status is not None and pod.agent_status.restart_mode is RestartMode.IN_PROCESS
    return in_process and agent_state_of(pod) is AgentState.INIT


def startable_size(builder: DecisionBuilder, phase: FormingPhase, candidates: int) -> int:
    """Return the size of a world to start now with this number of candidates; 0 to wait."""
    policy, allowed = builder.spec.policy, max_allowed_size(builder)
    target = policy.largest_size_within(min(phase.target or policy.initial_nodes, allowed))
    if not target:
        return 0
    if candidates >= target:
        larger = (
            0
            if builder.now_s < builder.state.no_scale_up_until_s
            else policy.largest_size_within(min(allowed, candidates - builder.spec.spares))
        )
        return max(target, larger)
    if phase.deadline_s is not None and builder.now_s >= phase.deadline_s:
        return policy.largest_size_within(min(candidates, allowed))
    return 0


def growable_size(builder: DecisionBuilder) -> int:
    """Return the size that the running world could have with the waiting pods."""
    members = set(builder.state.members)
    waiting = [pod for pod in rank_candidates(builder) if pod.name not in members]
    available = len(members) + len(waiting) - builder.spec.spares
    return builder.spec.policy.largest_size_within(min(max_allowed_size(builder), available))


def desired_pods(builder: DecisionBuilder) -> DesiredPods:
    """Return the desired number of pods. A lower number removes no pod; only an action does."""
    if builder.state.phase.is_final or builder.state.phase is JobPhase.SUSPENDED:
        return DesiredPods(dict.fromkeys((group.name for group in builder.spec.groups), 0))
    counts = replicas_by_group(builder.spec.groups, max_allowed_size(builder) or builder.spec.policy.smallest_size)
    for group in builder.spec.groups:
        counts[group.name] += group.spares
    return DesiredPods(counts, fault_detection.nodes_to_avoid(builder.state, builder.spec.policy, builder.now_s))


def replicas_by_group(groups: Sequence[ReplicaGroup], size: int) -> dict[str, int]:
    """Distribute ``size`` replicas over the replica specs.

    Each spec first receives its ``replicas``, then up to ``maxReplicas``. A larger size never reduces a spec's count.
    """
    counts, left = {}, size
    for group in groups:
        counts[group.name] = min(group.replicas, left)
        left -= counts[group.name]
    for group in groups:
        more = min(group.max_replicas - counts[group.name], left)
        counts[group.name] += more
        left -= more
    return counts


def surplus_pods(builder: DecisionBuilder) -> list[ObservedPod]:
    """Return pods beyond the desired number, newest first. Pods with a rank are never among them."""
    desired = desired_pods(builder).pods
    assigned = {*builder.state.members, *builder.state.spares}
    surplus: list[ObservedPod] = []
    first = builder.spec.groups[0].name
    for group, count in desired.items():
        group_pods = [pod for pod in builder.active_pods if (pod.group or first) == group]
        idle = [pod for pod in group_pods if pod.name not in assigned]
        surplus += idle[::-1][: max(0, len(group_pods) - count)]
    return surplus


_EPOCH_SEPARATOR = "+"


def keep_ranks(chosen: Sequence[str], previous: Sequence[str]) -> tuple[str, ...]:
    """Return the chosen pods by rank.

    Previous members retain their order. New pods fill the gaps, then the end.
    """
    staying = set(chosen).intersection(previous)
    new = iter([name for name in chosen if name not in staying])
    filled = (member if member in staying else next(new, None) for member in previous)
    return (*(name for name in filled if name is not None), *new)


def world_version(epoch: int, now_s: float) -> str:
    """Return a timestamp, like AWS's versions, followed by the epoch, which makes it unique."""
    moment = datetime.fromtimestamp(now_s, timezone.utc).isoformat(timespec="milliseconds")
    return f"{moment.replace('+00:00', 'Z')}{_EPOCH_SEPARATOR}{epoch}"


def epoch_of_version(version: str | None) -> int:
    """Return the epoch of a version; 0 if another kind of operator made it."""
    number = (version or "").rpartition(_EPOCH_SEPARATOR)[2]
    return int(number) if number.isdecimal() else 0


def assign_ranks(
    builder: DecisionBuilder, chosen: Sequence[ObservedPod], waiting: Sequence[ObservedPod]
) -> AssignedWorld:
    """Return a new world of ``chosen``, and count it. The first of the ``waiting`` pods become its spares."""
    members = keep_ranks([pod.name for pod in chosen], builder.state.previous_members)
    epoch = builder.state.epoch + 1
    port = builder.spec.master_port + epoch % builder.spec.master_ports
    builder.update_state(epoch=epoch)
    return AssignedWorld(
        version=world_version(epoch, builder.now_s),
        members=members,
        spares=tuple(pod.name for pod in waiting[: builder.spec.spares]),
        master_addr=builder.pods[members[0]].ip,
        master_port=str(port),
    )


def start_action(builder: DecisionBuilder, pod: ObservedPod) -> StartAgent:
    return StartAgent(pod.name, _start_request(builder, pod))


def update_action(builder: DecisionBuilder, pod: ObservedPod) -> UpdateAgent:
    return UpdateAgent(pod.name, _start_request(builder, pod))


def _start_request(builder: DecisionBuilder, pod: ObservedPod) -> StartRequest:
    world = builder.state.world
    ranked = (*world.members, *world.spares)
    ips = [(rank, builder.pods.get(name)) for rank, name in enumerate(world.members)]
    return StartRequest(
        rank=ranked.index(pod.name),
        nnodes=len(world.members),
        fault_count=builder.state.epoch - 1,
        master_addr=world.master_addr,
        master_port=world.master_port,
        version=world.version,
        rank_ips=tuple({"rank": rank, "ip": pod_of_rank.ip} for rank, pod_of_rank in ips if pod_of_rank is not None),
        worker_data=_worker_data(builder),
        spare=pod.name in world.spares,
        progress=dict(builder.state.progress),
        log_rules=builder.spec.log_rules or None,
    )


def _worker_data(builder: DecisionBuilder) -> list[object] | None:
    """Return the data of all members' workers. Every worker receives it with its rank."""
    data: list[object] = []
    for pod in builder.member_pods:
        data += pod.agent_status.worker_data if pod.agent_status is not None else ()
    return data or None
