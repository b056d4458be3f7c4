"""``decide_job``: the operator's state machine, one handler per phase. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import msgspec

from integration.hyperpod.job_resource import JobSpec, RestartMode
from integration.hyperpod.operator import fault_detection, rank_assignment
from integration.hyperpod.operator.decision import (
    DecisionBuilder,
    OperatorAction,
    OperatorDecision,
    ReleasePod,
    ReplacePod,
    ShutdownAgent,
    StopAgent,
    StopRequest,
    agent_state_of,
)
from integration.hyperpod.operator.job_state import JobFault, JobPhase, JobState, TransitionCause
from integration.hyperpod.operator.observed_pods import AgentState, ObservedJob, ObservedPod

_IDLE_STATES = {AgentState.INIT, AgentState.READY}
_RUNNING_STATES = {AgentState.RUNNING, AgentState.COMPLETED}
_SPARE_UPDATE_TIMEOUT_S = 10.0
"""Seconds a spare may take to apply ``/update``. After that, ``/start`` carries the same data."""


def accept_job(builder: DecisionBuilder) -> None:
    """Accept a new job and wait for its first world."""
    builder.update_state(created_s=builder.now_s)
    builder.set_condition("Created", True, "JobCreated", f"job {builder.spec.name} was accepted")
    await_world_members(builder, TransitionCause.BEGIN)


def await_world_members(builder: DecisionBuilder, cause: TransitionCause, *, patience_s: float | None = None) -> None:
    """Wait for members of the next world.

    A job that is not elastic waits for all of them, without a deadline.
    """
    if patience_s is None:
        patience_s = builder.spec.policy.scaling_timeout_s
    deadline_s = builder.now_s + patience_s if builder.spec.elastic else None
    builder.enter_phase(JobPhase.FORMING, cause=cause, members=(), spares=(), deadline_s=deadline_s)


def handle_forming(builder: DecisionBuilder) -> None:
    if builder.spec.suspend:
        builder.enter_phase(JobPhase.SUSPENDED)
        return
    if builder.state.epoch == 0 and _adopt_running_world(builder):
        return
    candidates = rank_assignment.rank_candidates(builder)
    size = rank_assignment.startable_size(builder, len(candidates))
    if size:
        builder.set_condition("PodsRunning", True, "AgentsAnswer", f"{len(candidates)} agents wait, {size} get a rank")
        rank_assignment.assign_ranks(builder, candidates[:size], candidates[size:])
        builder.enter_phase(JobPhase.RANKS_ASSIGNED)
        return
    body = StopRequest(restart_mode=RestartMode.PROCESS.value)
    builder.add_actions(
        *(StopAgent(pod.name, body) for pod in builder.active_pods if agent_state_of(pod) in _RUNNING_STATES)
    )


def handle_ranks_assigned(builder: DecisionBuilder) -> None:
    """Send ``/update`` to agents without a rank and spares that become members; then start all."""
    spares = [pod for pod in builder.member_pods if _is_still_spare(builder, pod)]
    waiting = [pod for pod in builder.member_pods if _wants_rank(builder, pod, {AgentState.INIT})]
    builder.add_actions(*(rank_assignment.update_action(builder, pod) for pod in (*waiting, *spares)))
    states = [agent_state_of(pod) for pod in builder.member_pods]
    if all(state is AgentState.READY for state in states) and not spares:
        builder.enter_phase(JobPhase.STARTING)
    elif any(state not in {*_IDLE_STATES, None} for state in states):
        builder.enter_phase(JobPhase.FORMING, previous_members=builder.state.members, members=(), spares=())
    elif builder.in_phase_s >= builder.spec.policy.restart_timeout_s and builder.observed.can_replace:
        late = tuple(pod.name for pod in builder.member_pods if agent_state_of(pod) is not AgentState.READY)
        builder.add_event("StartTimeout", f"not ready in time, replaced: {', '.join(late)}", warning=True)
        previous = builder.state.members
        builder.enter_phase(
            JobPhase.FORMING,
            previous_members=previous,
            members=(),
            spares=(),
            replaced_pods=(*builder.state.replaced_pods, *late),
        )


def update_spares(builder: DecisionBuilder) -> None:
    """Assign ranks after the last member to spares.

    A restarted spare has lost its rank and receives it again. A spare may join after the world began.
    """
    existing = [
        name for name in builder.state.spares if name in builder.pods and name not in builder.state.replaced_pods
    ]
    assigned = {*builder.state.members, *existing}
    late = [pod.name for pod in rank_assignment.rank_candidates(builder) if pod.name not in assigned]
    builder.update_state(spares=(*existing, *late[: max(0, builder.spec.spares - len(existing))]))
    spares = (builder.pods[name] for name in builder.state.spares if name in builder.pods)
    builder.add_actions(
        *(rank_assignment.update_action(builder, pod) for pod in spares if _wants_rank(builder, pod, _IDLE_STATES))
    )


def _wants_rank(builder: DecisionBuilder, pod: ObservedPod, states: set[AgentState]) -> bool:
    status = pod.agent_status
    if status is None or status.restart_mode is not RestartMode.IN_PROCESS or status.version == builder.state.version:
        return False
    return status.state in states


def _is_still_spare(builder: DecisionBuilder, pod: ObservedPod) -> bool:
    """Return whether a former spare still has its old rank, or none, at the barrier."""
    spare = pod.agent_status is not None and pod.agent_status.spare
    return spare and builder.in_phase_s < _SPARE_UPDATE_TIMEOUT_S and _wants_rank(builder, pod, {AgentState.READY})


def _adopt_running_world(builder: DecisionBuilder) -> bool:
    """Adopt a running world if its operator left no state. Return whether it did."""
    ranked = {}
    for pod in builder.active_pods:
        status = pod.agent_status
        if status is not None and status.state in _RUNNING_STATES and status.rank is not None and status.version:
            ranked[status.rank, status.version] = pod
    versions = {version for _, version in ranked}
    ranks = sorted(rank for rank, _ in ranked)
    complete = len(ranks) + builder.spec.spares >= len(builder.active_pods)
    whole = len(versions) == 1 and ranks == list(range(len(ranks))) and complete
    if not whole or not builder.spec.policy.allows(len(ranks)):
        return False
    (version,) = versions
    members = [ranked[rank, version] for rank in ranks]
    builder.enter_phase(
        JobPhase.RUNNING,
        epoch=max(1, rank_assignment.epoch_of_version(version)),
        version=version,
        members=tuple(pod.name for pod in members),
        master_addr=members[0].ip,
        started_s=builder.now_s,
    )
    builder.set_condition("Running", True, "Adopted", f"{len(members)} agents ran already")
    builder.add_event("Adopted", f"{len(members)} agents run already; they are left alone")
    return True


def handle_starting(builder: DecisionBuilder) -> None:
    """Send ``/start`` to ready agents until all members run."""
    for pod in builder.member_pods:
        if agent_state_of(pod) is AgentState.READY:
            builder.add_actions(rank_assignment.start_action(builder, pod))
    size = len(builder.state.members)
    if sum(agent_state_of(pod) in _RUNNING_STATES and not builder.is_stale(pod) for pod in builder.member_pods) == size:
        _enter_running(builder)


def _enter_running(builder: DecisionBuilder) -> None:
    state, size = builder.state, len(builder.state.members)
    message = f"{size} agents run"
    reason = "Started"
    if state.fault is not None:
        took_ms = round(1000 * (builder.now_s - state.fault.at_s))
        reason, message = (
            "FaultRemediated",
            (f"The fault of reason {state.fault.reason} was remediated in {took_ms} milliseconds."),
        )
        builder.update_state(no_scale_up_until_s=builder.now_s + builder.spec.policy.scale_up_snooze_s)
    elif state.cause is TransitionCause.SCALE:
        reason, message = "Scaled", f"the job runs with {size} replicas now"
        scaling = msgspec.structs.replace(
            state.scaling, scaled_at_s=builder.now_s, updated_at_s=builder.now_s, consecutive_failures=0
        )
        builder.update_state(scaling=scaling)
    builder.set_condition("Running", True, reason, message)
    builder.add_event(reason, message)
    builder.enter_phase(
        JobPhase.RUNNING,
        started_s=builder.now_s if state.started_s is None else state.started_s,
        last_fault=state.fault or state.last_fault,
        fault=None,
        grow_since_s=None,
    )


def handle_running(builder: DecisionBuilder) -> None:
    states = [agent_state_of(pod) for pod in builder.member_pods]
    if len(states) == len(builder.state.members) and all(state is AgentState.COMPLETED for state in states):
        complete_job(builder)
        return
    if builder.spec.suspend:
        stop_gracefully(builder, TransitionCause.SUSPEND, "the job is suspended")
        return
    if not (_shrink_if_needed(builder) or _grow_if_possible(builder, finishing=AgentState.COMPLETED in states)):
        builder.add_actions(
            *(ReleasePod(pod.name, "not wanted any more") for pod in rank_assignment.surplus_pods(builder))
        )


def _shrink_if_needed(builder: DecisionBuilder) -> bool:
    """Stop the world if members are preempted or fewer replicas are admitted. Return whether it did.

    The job continues with the other members, or with spares.
    """
    size, allowed = len(builder.state.members), rank_assignment.max_allowed_size(builder)
    leaving = [pod.name for pod in builder.member_pods if pod.terminating]
    if leaving:
        stop_gracefully(builder, TransitionCause.SCALE, f"preempted: {', '.join(leaving)}", target=min(size, allowed))
    elif allowed < size:
        stop_gracefully(
            builder, TransitionCause.SCALE, f"{builder.observed.capacity} replicas are admitted", target=allowed
        )
    return bool(leaving) or allowed < size


def _grow_if_possible(builder: DecisionBuilder, *, finishing: bool) -> bool:
    """Stop the world to grow it, and return whether it did.

    It grows if the larger size was possible for ``scaling_timeout_s``, or at once if it is the maximum.
    """
    size = rank_assignment.growable_size(builder)
    if finishing or builder.now_s < builder.state.no_scale_up_until_s or size <= len(builder.state.members):
        builder.update_state(grow_since_s=None)
        return False
    since = builder.now_s if builder.state.grow_since_s is None else builder.state.grow_since_s
    if (
        size < rank_assignment.max_allowed_size(builder)
        and builder.now_s - since < builder.spec.policy.scaling_timeout_s
    ):
        builder.update_state(grow_since_s=since)
        return False
    stop_gracefully(builder, TransitionCause.SCALE, f"{size} replicas can run", target=size)
    return True


_BUSY_STATES = {AgentState.RUNNING, AgentState.COMPLETED, AgentState.FAULTED}


def remediate_fault(builder: DecisionBuilder, fault: JobFault) -> None:
    """Stop all members after a fault.

    A second fault before the first one is remediated restarts the processes.
    """
    before = builder.state
    mode = fault_detection.requested_restart_mode(builder.member_pods)
    if before.fault is not None or not before.members:
        mode = mode.at_least(RestartMode.PROCESS)
    state, mode, beyond = fault_detection.count_restart(before, builder.spec.policy, mode, builder.now_s)
    builder.state = fault_detection.record_node_faults(state, builder.spec.policy, fault.nodes, builder.now_s)
    at_s = fault.at_s if before.fault is None else before.fault.at_s
    fault = msgspec.structs.replace(fault, mode=mode, at_s=at_s)
    builder.add_event(fault.reason, fault.message.strip() or fault.reason, warning=True)
    builder.set_condition("Running", False, fault.reason, fault.message.strip())
    builder.update_state(fault=fault, unexplained_since_s=None)
    if beyond:
        fail_job(builder, "RestartLimitExceeded", f"the job failed after {fault.reason}: more than {beyond}")
        return
    if before.cause is TransitionCause.SCALE and before.phase is not JobPhase.RUNNING:
        builder.update_state(
            scaling=msgspec.structs.replace(
                before.scaling, consecutive_failures=before.scaling.consecutive_failures + 1
            )
        )
    builder.add_event("Restarting", f"restart {builder.state.restarts}, {mode.value}")
    _stop(builder, TransitionCause.FAULT, mode, target=len(before.members) or before.target)
    mark_replaced(
        builder, [pod for pod in builder.observed.pods if mode is RestartMode.JOB or _is_unusable(builder, pod)]
    )


def correct_fault_reason(builder: DecisionBuilder, fault: JobFault) -> None:
    """Replace the reason of the current fault. Nodes wrongly blamed for it lose their last fault."""
    before = builder.state.fault
    wrong_nodes = () if before is None else before.nodes
    offences = list(builder.state.node_faults)
    for offence in reversed(builder.state.node_faults):
        if offence.node in wrong_nodes:
            offences.remove(offence)
            break
    builder.state = fault_detection.record_node_faults(
        msgspec.structs.replace(builder.state, fault=fault, node_faults=tuple(offences)),
        builder.spec.policy, fault.nodes, builder.now_s,
    )  # fmt: skip
    builder.add_event(fault.reason, fault.message.strip() or fault.reason, warning=True)
    builder.set_condition("Running", False, fault.reason, fault.message.strip())


def stop_gracefully(builder: DecisionBuilder, cause: TransitionCause, why: str, *, target: int = 0) -> None:
    """Stop the world gracefully: the ranks agree on a step, save it, and exit."""
    builder.add_event("Scaling" if cause is TransitionCause.SCALE else "Suspending", why)
    builder.set_condition("Running", False, cause.value, why)
    if cause is TransitionCause.SCALE:
        scaling = msgspec.structs.replace(
            builder.state.scaling,
            target=target,
            updated_at_s=builder.now_s,
            after_fault=any(pod.terminating for pod in builder.member_pods),
        )
        builder.update_state(scaling=scaling)
    _stop(builder, cause, fault_detection.requested_restart_mode(builder.member_pods), graceful=True, target=target)


def _stop(
    builder: DecisionBuilder, cause: TransitionCause, mode: RestartMode, *, target: int, graceful: bool = False
) -> None:
    if mode is RestartMode.JOB and not builder.observed.can_replace:
        mode = RestartMode.PROCESS
    previous = builder.state.members or builder.state.previous_members
    builder.enter_phase(
        JobPhase.STOPPING,
        cause=cause,
        restart_mode=mode,
        graceful=graceful,
        stop_escalated=(),
        previous_members=previous,
        target=target,
    )


def _is_unusable(builder: DecisionBuilder, pod: ObservedPod) -> bool:
    ranked = pod.name in builder.state.members
    return bool(pod.node_health_problem) or (ranked and builder.is_lost(pod))


def mark_replaced(builder: DecisionBuilder, pods: Iterable[ObservedPod]) -> None:
    """Exclude these pods from the job if replacements can be created."""
    if builder.observed.can_replace:
        names = [pod.name for pod in pods if pod.name not in builder.state.replaced_pods and not pod.terminating]
        builder.update_state(replaced_pods=(*builder.state.replaced_pods, *names))


def handle_stopping(builder: DecisionBuilder) -> None:
    """Send ``/stop`` to busy agents until all wait. Replace the pods that do not stop in time."""
    mark_replaced(builder, [pod for pod in builder.active_pods if _is_unusable(builder, pod)])
    busy = [
        pod
        for pod in builder.observed.pods
        if pod.name not in builder.state.replaced_pods and _still_stopping(builder, pod)
    ]
    for pod in busy:
        if agent_state_of(pod) in _BUSY_STATES:
            builder.add_actions(StopAgent(pod.name, _stop_request(builder)))
    limit_s = builder.spec.stop_timeout_s + (
        builder.spec.policy.graceful_shutdown_timeout_s if builder.state.graceful else 0.0
    )
    if busy and builder.in_phase_s >= limit_s:
        _escalate_stop(builder, [pod for pod in busy if pod.name not in builder.state.stop_escalated])
    if busy and builder.in_phase_s >= limit_s + builder.spec.stop_timeout_s:
        builder.add_event("StopTimeout", f"did not stop: {', '.join(pod.name for pod in busy)}", warning=True)
        mark_replaced(builder, busy)
        busy = []
    if not busy:
        _finish_stop(builder)


def _still_stopping(builder: DecisionBuilder, pod: ObservedPod) -> bool:
    state = agent_state_of(pod)
    if state is None:
        return pod.name in builder.state.members and not builder.is_lost(pod)
    return state in _BUSY_STATES or state is AgentState.STOPPING


def _stop_request(builder: DecisionBuilder) -> StopRequest:
    """Return the body of ``/stop``. In-process agents ignore a graceful stop: they stop at their barrier."""
    state = builder.state
    if not state.graceful:
        return StopRequest(restart_mode=state.restart_mode.value)
    grace_s = math.ceil(builder.spec.policy.graceful_shutdown_timeout_s)
    return StopRequest(restart_mode=state.restart_mode.value, is_graceful=True, timeout=max(1, grace_s))


def _escalate_stop(builder: DecisionBuilder, pods: list[ObservedPod]) -> None:
    """Request a restart of the processes, once per pod: each request restarts them again."""
    body = StopRequest(restart_mode=RestartMode.PROCESS.value)
    names = [pod.name for pod in pods if agent_state_of(pod) is AgentState.STOPPING]
    builder.add_actions(*(StopAgent(name, body) for name in names))
    builder.update_state(stop_escalated=(*builder.state.stop_escalated, *names))


def _finish_stop(builder: DecisionBuilder) -> None:
    if builder.state.cause is TransitionCause.SUSPEND:
        builder.enter_phase(JobPhase.SUSPENDED, members=(), spares=())
        return
    policy = builder.spec.policy
    if builder.state.cause is TransitionCause.FAULT and builder.state.fault is not None:
        whole_job = builder.state.fault.mode is RestartMode.JOB
        patience_s = max(policy.faulty_scale_down_timeout_s, policy.scaling_timeout_s if whole_job else 0.0)
        await_world_members(builder, TransitionCause.FAULT, patience_s=patience_s)
    else:
        await_world_members(builder, builder.state.cause)


_SHUTDOWN_STATES = set(AgentState) - {AgentState.STOPPING, AgentState.SHUTDOWN}
"""States in which an agent obeys ``/shutdown``. A stopping agent obeys it after the stop."""


def complete_job(builder: DecisionBuilder) -> None:
    message = f"all {len(builder.state.members)} agents completed"
    builder.add_event("Completed", message)
    builder.set_condition("Running", False, "Completed", message)
    builder.set_condition("Succeeded", True, "Completed", message)
    builder.enter_phase(JobPhase.SUCCEEDED, ended_s=builder.now_s)


def fail_job(builder: DecisionBuilder, reason: str, message: str) -> None:
    builder.add_event(reason, message, warning=True)
    builder.set_condition("Running", False, reason, message)
    builder.set_condition("Failed", True, reason, message)
    builder.enter_phase(JobPhase.FAILED, ended_s=builder.now_s)


def exceeded_deadline(builder: DecisionBuilder) -> tuple[str, str] | None:
    """Return reason and message of the exceeded deadline, or None."""
    spec, state, now_s = builder.spec, builder.state, builder.now_s
    created_s = now_s if state.created_s is None else state.created_s
    if spec.active_deadline_s is not None and now_s - created_s >= spec.active_deadline_s:
        return "DeadlineExceeded", f"active for {spec.active_deadline_s:g} s (activeDeadlineSeconds)"
    startup_s = spec.startup_deadline_s
    starts = state.started_s is None and state.admitted_s is not None
    if starts and startup_s is not None and now_s - (state.admitted_s or 0.0) >= startup_s:
        return "StartupDeadlineExceeded", f"not running after {startup_s:g} s (startupDeadlineSeconds)"
    fault_s = spec.fault_deadline_s
    if state.fault is not None and fault_s is not None and now_s - state.fault.at_s >= fault_s:
        why = f"the fault of reason {state.fault.reason} was not remediated"
        return "FaultDeadlineExceeded", f"{why} within {fault_s:g} s (faultDeadlineSeconds)"
    return None


def handle_ended(builder: DecisionBuilder) -> None:
    """Shut the agents down.

    Release the pods of agents that do not exit: they hold a machine and queue quota.
    """
    builder.add_actions(
        *(ShutdownAgent(pod.name) for pod in builder.observed.pods if agent_state_of(pod) in _SHUTDOWN_STATES)
    )
    grace_s = builder.spec.policy.graceful_shutdown_timeout_s if builder.state.graceful else 0.0
    if builder.in_phase_s >= grace_s + 2 * builder.spec.stop_timeout_s:
        stuck = (pod for pod in builder.active_pods if agent_state_of(pod) is not None)
        builder.add_actions(*(ReleasePod(pod.name, "the job has ended, and its agent does not") for pod in stuck))


def handle_suspended(builder: DecisionBuilder) -> None:
    """Release all pods while the job is suspended, and form a world when it resumes."""
    if builder.spec.suspend:
        builder.set_condition("Suspended", True, "Suspended", "the job is suspended")
        builder.add_actions(*(ReleasePod(pod.name, "the job is suspended") for pod in builder.active_pods))
        return
    builder.set_condition("Suspended", False, "Resumed", "the job goes on")
    deadline_s = builder.now_s + builder.spec.policy.scaling_timeout_s if builder.spec.elastic else None
    builder.enter_phase(JobPhase.FORMING, cause=TransitionCause.BEGIN, target=0, deadline_s=deadline_s)


_PHASES: Mapping[JobPhase, Callable[[DecisionBuilder], None]] = {
    JobPhase.FORMING: handle_forming,
    JobPhase.RANKS_ASSIGNED: handle_ranks_assigned,
    JobPhase.STARTING: handle_starting,
    JobPhase.RUNNING: handle_running,
    JobPhase.STOPPING: handle_stopping,
    JobPhase.SUSPENDED: handle_suspended,
    JobPhase.SUCCEEDED: handle_ended,
    JobPhase.FAILED: handle_ended,
}
_RANKED_PHASES = {JobPhase.RANKS_ASSIGNED, JobPhase.STARTING, JobPhase.RUNNING}


def decide_job(spec: JobSpec, state: JobState, seen: ObservedJob, now_s: float) -> OperatorDecision:
    """Return the operator's decision for these observations at ``now_s`` (seconds since 1970).

    ``state`` is the state of the last decision, ``JobState()`` for a new job.
    """
    builder = DecisionBuilder(spec, state, seen, now_s)
    if state.created_s is None:
        accept_job(builder)
    fault_detection.record_observations(builder)
    if not builder.state.phase.is_final:
        _handle_faults(builder)
    for _ in () if builder.waits else JobPhase:
        phase = builder.state.phase
        _PHASES[phase](builder)
        if builder.state.phase is phase:
            break
    if builder.state.phase in _RANKED_PHASES and not builder.waits:
        update_spares(builder)
    if not builder.waits:
        builder.add_actions(*_side_actions(builder))
    return OperatorDecision(
        state=builder.state,
        actions=tuple(builder.actions),
        events=tuple(builder.events),
        wanted=rank_assignment.desired_pods(builder),
        finished=builder.state.phase.is_final and all(agent_state_of(pod) is None for pod in seen.pods),
    )


def _handle_faults(builder: DecisionBuilder) -> None:
    deadline = exceeded_deadline(builder)
    if deadline is not None:
        fail_job(builder, *deadline)
        return
    idle = (pod for pod in builder.active_pods if pod.name not in builder.state.members)
    mark_replaced(builder, (pod for pod in idle if pod.node_health_problem))
    fault, explained = fault_detection.detect_fault(builder), fault_detection.explain(builder)
    if fault is not None:
        remediate_fault(builder, fault)
    elif explained is not None:
        correct_fault_reason(builder, explained)


def _side_actions(builder: DecisionBuilder) -> list[OperatorAction]:
    """Return removals of replaced pods and stops of busy agents without a rank."""
    actions: list[OperatorAction] = []
    if builder.observed.can_replace:
        reason = builder.state.fault.reason if builder.state.fault is not None else "replaced"
        actions += [ReplacePod(name, reason) for name in builder.state.replaced_pods if name in builder.pods]
    if builder.state.phase in _RANKED_PHASES:
        body = StopRequest(restart_mode=RestartMode.PROCESS.value)
        idle = (pod for pod in builder.active_pods if pod.name not in builder.state.members)
        actions += [StopAgent(pod.name, body) for pod in idle if agent_state_of(pod) in _BUSY_STATES]
    return actions
