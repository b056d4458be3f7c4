"""World size, pod count, rank assignment, and the bodies of /start and /update. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from integration.hyperpod.operator import fault_detection
from integration.hyperpod.operator.decision import (
    DecisionBuilder,
    DesiredPods,
    StartAgent,
    StartRequest,
    UpdateAgent,
    agent_state_of,
)
from integration.hyperpod.operator.job_spec import ReplicaGroup
from integration.hyperpod.operator.job_state import JobPhase
from integration.hyperpod.operator.observed_pods import AgentRestartMode, AgentState, ObservedPod


def max_allowed_size(turn: DecisionBuilder) -> int:
    """The greatest size that is allowed now; 0 when less is admitted than the least there can be."""
    most, admitted = turn.spec.policy.max_replicas, turn.observed.capacity
    return turn.spec.policy.largest_size_within(most if admitted is None else min(most, admitted))


def rank_candidates(turn: DecisionBuilder) -> list[ObservedPod]:
    """Who could have a rank, best first: no repeated offenders, who had a rank, the lower ranks, who came first."""
    previous = {name: member for member, name in enumerate(turn.state.previous_members)}
    avoid = fault_detection.nodes_to_avoid(turn.state, turn.spec.policy, turn.now_s)
    usable = [pod for pod in turn.active_pods if not pod.node_health_problem and _is_waiting(pod)]
    return sorted(usable, key=lambda pod: (pod.node in avoid, previous.get(pod.name, len(previous))))


def _is_waiting(pod: ObservedPod) -> bool:
    """In-process agents are not ready before their processes know their ranks and wait at the barrier."""
    if agent_state_of(pod) is AgentState.READY:
        return True
    in_process = pod.agent_status is not None and pod.agent_status.restart_mode is AgentRestartMode.IN_PROCESS
    return in_process and agent_state_of(pod) is AgentState.INIT


def startable_size(turn: DecisionBuilder, there: int) -> int:
    """With how many of ``there`` candidates the world begins now; 0 to wait."""
    state, policy, most = turn.state, turn.spec.policy, max_allowed_size(turn)
    target = policy.largest_size_within(min(state.target or policy.initial_nodes, most))
    if not target:
        return 0
    if there >= target:
        beyond = (
            0
            if turn.now_s < state.no_scale_up_until_s
            else policy.largest_size_within(min(most, there - turn.spec.spares))
        )
        return max(target, beyond)
    if state.deadline_s is not None and turn.now_s >= state.deadline_s:
        return policy.largest_size_within(min(there, most))
    return 0


def growable_size(turn: DecisionBuilder) -> int:
    """How large a running world could be with the pods that wait beside it."""
    members = set(turn.state.members)
    waiting = [pod for pod in rank_candidates(turn) if pod.name not in members]
    there = len(members) + len(waiting) - turn.spec.spares
    return turn.spec.policy.largest_size_within(min(max_allowed_size(turn), there))


def desired_pods(turn: DecisionBuilder) -> DesiredPods:
    """So many there should be; nobody takes a pod away because of it, only because of an action."""
    if turn.state.phase.is_final or turn.state.phase is JobPhase.SUSPENDED:
        return DesiredPods(dict.fromkeys((group.name for group in turn.spec.groups), 0))
    counts = replicas_by_group(turn.spec.groups, max_allowed_size(turn) or turn.spec.policy.smallest_size)
    for group in turn.spec.groups:
        counts[group.name] += group.spares
    return DesiredPods(counts, fault_detection.nodes_to_avoid(turn.state, turn.spec.policy, turn.now_s))


def replicas_by_group(groups: Sequence[ReplicaGroup], size: int) -> dict[str, int]:
    """How many of so many replicas are whose: first what each spec begins with, then what it may grow to.

    With a greater size no spec has fewer of them.
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


def surplus_pods(turn: DecisionBuilder) -> list[ObservedPod]:
    """Pods that nobody wants: none with a rank, and of the others those that came last."""
    wants = desired_pods(turn).pods
    placed = {*turn.state.members, *turn.state.spares}
    found: list[ObservedPod] = []
    first = turn.spec.groups[0].name
    for group, count in wants.items():
        here = [pod for pod in turn.active_pods if (pod.group or first) == group]
        idle = [pod for pod in here if pod.name not in placed]
        found += idle[::-1][: max(0, len(here) - count)]
    return found


_MARK = "+"


def keep_ranks(chosen: Sequence[str], previous: Sequence[str]) -> tuple[str, ...]:
    """Who had a seat keeps it; who is new takes the seat of one who went, or the end."""
    staying = set(chosen).intersection(previous)
    new = iter([name for name in chosen if name not in staying])
    filled = (member if member in staying else next(new, None) for member in previous)
    return (*(name for name in filled if name is not None), *new)


def world_version(epoch: int, now_s: float) -> str:
    """A moment, as AWS's versions are; with the world's number, so that no two are the same."""
    moment = datetime.fromtimestamp(now_s, timezone.utc).isoformat(timespec="milliseconds")
    return f"{moment.replace('+00:00', 'Z')}{_MARK}{epoch}"


def epoch_of_version(version: str | None) -> int:
    """The world's number; 0 for a version that no operator of this kind has made."""
    number = (version or "").rpartition(_MARK)[2]
    return int(number) if number.isdecimal() else 0


def assign_ranks(turn: DecisionBuilder, chosen: Sequence[ObservedPod], waiting: Sequence[ObservedPod]) -> None:
    """A new world of ``chosen``; the first of those who wait are its spares."""
    members = keep_ranks([pod.name for pod in chosen], turn.state.previous_members)
    epoch = turn.state.epoch + 1
    port = turn.spec.master_port + epoch % turn.spec.master_ports
    turn.update_state(
        epoch=epoch,
        version=world_version(epoch, turn.now_s),
        members=members,
        spares=tuple(pod.name for pod in waiting[: turn.spec.spares]),
        master_addr=turn.pods[members[0]].ip,
        master_port=str(port),
    )


def start_action(turn: DecisionBuilder, pod: ObservedPod) -> StartAgent:
    return StartAgent(pod.name, _start_request(turn, pod))


def update_action(turn: DecisionBuilder, pod: ObservedPod) -> UpdateAgent:
    return UpdateAgent(pod.name, _start_request(turn, pod))


def _start_request(turn: DecisionBuilder, pod: ObservedPod) -> StartRequest:
    state = turn.state
    everybody = (*state.members, *state.spares)
    ips = [(rank, turn.pods.get(name)) for rank, name in enumerate(state.members)]
    return StartRequest(
        rank=everybody.index(pod.name),
        nnodes=len(state.members),
        fault_count=state.epoch - 1,
        master_addr=state.master_addr,
        master_port=state.master_port,
        version=state.version,
        rank_ips=tuple({"rank": rank, "ip": each.ip} for rank, each in ips if each is not None),
        worker_data=_worker_data(turn),
        spare=pod.name in state.spares,
        progress=dict(state.progress),
        log_rules=turn.spec.log_rules or None,
    )


def _worker_data(turn: DecisionBuilder) -> list[object] | None:
    """What workers have told their agents, of all of them: every worker gets it back with its rank."""
    found: list[object] = []
    for pod in turn.member_pods:
        found += pod.agent_status.worker_data if pod.agent_status is not None else ()
    return found or None
