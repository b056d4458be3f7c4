"""``decide_job``, the operator's state machine: one handler per phase returns the next phase. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

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
from integration.hyperpod.operator.job_state import (
    AssignedWorld,
    CurrentPhase,
    FailedPhase,
    FormingPhase,
    JobFault,
    JobPhase,
    JobState,
    RankedPhase,
    RanksAssignedPhase,
    RunningPhase,
    StartingPhase,
    StoppingPhase,
    SucceededPhase,
    SuspendedPhase,
    TransitionCause,
)
from integration.hyperpod.operator.observed_pods import AgentState, ObservedJob, ObservedPod

_IDLE_STATES = {AgentState.INIT, AgentState.READY}
_RUNNING_STATES = {AgentState.RUNNING, AgentState.COMPLETED}
_SPARE_UPDATE_TIMEOUT_S = 10.0
"""Seconds a spare may take to apply ``/update``. After that, ``/start`` carries the same data."""


def accept_job(builder: DecisionBuilder) -> FormingPhase:
    """Accept a new job and wait for its first world."""
    builder.update_state(created_s=builder.now_s)
    builder.set_condition("Created", True, "JobCreated", f"job {builder.spec.name} was accepted")
    return await_world_members(builder, TransitionCause.BEGIN)


def await_world_members(
    builder: DecisionBuilder, cause: TransitionCause, *, target: int = 0, patience_s: float | None = None
) -> FormingPhase:
    """Wait for members of the next world.

    A job that is not elastic waits for all of them, without a deadline.
    """
    if patience_s is None:
        patience_s = builder.spec.policy.scaling_timeout_s
    deadline_s = builder.now_s + patience_s if builder.spec.elastic else None
    return FormingPhase(since_s=builder.now_s, cause=cause, target=target, deadline_s=deadline_s)


def handle_forming(builder: DecisionBuilder, phase: FormingPhase) -> CurrentPhase:
    if builder.spec.suspend:
        return SuspendedPhase(since_s=builder.now_s)
    if builder.state.epoch == 0 and (adopted := _adopt_running_world(builder)) is not None:
        return adopted
    candidates = rank_assignment.rank_candidates(builder)
    size = rank_assignment.startable_size(builder, phase, len(candidates))
    if size:
        builder.set_condition("PodsRunning", True, "AgentsAnswer", f"{len(candidates)} agents wait, {size} get a rank")
        world = rank_assignment.assign_ranks(builder, candidates[:size], candidates[size:])
        return RanksAssignedPhase(since_s=builder.now_s, world=world, forming=phase)
    body = StopRequest(restart_mode=RestartMode.PROCESS.value)
    builder.add_actions(
        *(StopAgent(pod.name, body) for pod in builder.active_pods if agent_state_of(pod) in _RUNNING_STATES)
    )
    return phase


def handle_ranks_assigned(builder: DecisionBuilder, phase: RanksAssignedPhase) -> CurrentPhase:
    """Send ``/update`` to agents without a rank and spares that become members; then start all."""
    spares = [pod for pod in builder.member_pods if _is_still_spare(builder, pod)]
    waiting = [pod for pod in builder.member_pods if _wants_rank(builder, pod, {AgentState.INIT})]
    builder.add_actions(*(rank_assignment.update_action(builder, pod) for pod in (*waiting, *spares)))
    states = [agent_state_of(pod) for pod in builder.member_pods]
    if all(state is AgentState.READY for state in states) and not spares:
        return StartingPhase(since_s=builder.now_s, world=phase.world, cause=phase.cause)
    if any(state not in {*_IDLE_STATES, None} for state in states):
        return _form_again(builder, phase)
    if builder.in_phase_s >= builder.spec.policy.restart_timeout_s and builder.observed.can_replace:
        late = tuple(pod.name for pod in builder.member_pods if agent_state_of(pod) is not AgentState.READY)
        builder.add_event("StartTimeout", f"not ready in time, replaced: {', '.join(late)}", warning=True)
        builder.update_state(replaced_pods=(*builder.state.replaced_pods, *late))
        return _form_again(builder, phase)
    return phase


def _form_again(builder: DecisionBuilder, phase: RanksAssignedPhase) -> FormingPhase:
    """Return the phase in which these ranks were assigned. Its deadline still applies."""
    builder.update_state(previous_members=phase.world.members)
    return msgspec.structs.replace(phase.forming, since_s=builder.now_s)


def update_spares(builder: DecisionBuilder) -> None:
    """Assign ranks after the last member to spares.

    A restarted spare has lost its rank and receives it again. A spare may join after the world began.
    """
    existing = [
        name for name in builder.state.spares if name in builder.pods and name not in builder.state.replaced_pods
    ]
    assigned = {*builder.state.members, *existing}
    late = [pod.name for pod in rank_assignment.rank_candidates(builder) if pod.name not in assigned]
    builder.update_world(spares=(*existing, *late[: max(0, builder.spec.spares - len(existing))]))
    spares = (builder.pods[name] for name in builder.state.spares if name in builder.pods)
    builder.add_actions(
        *(rank_assignment.update_action(builder, pod) for pod in spares if _wants_rank(builder, pod, _IDLE_STATES))
    )


def _wants_rank(builder: DecisionBuilder, pod: ObservedPod, states: set[AgentState]) -> bool:
    status = pod.agent_status
    if (
        status is None
        or status.restart_mode is not RestartMode.IN_PROCESS
        or status.version == builder.state.world.version
    ):
        return False
    return status.state in states


def _is_still_spare(builder: DecisionBuilder, pod: ObservedPod) -> bool:
    """Return whether a former spare still has its old rank, or none, at the barrier."""
    spare = pod.agent_status is not None and pod.agent_status.spare
    return spare and builder.in_phase_s < _SPARE_UPDATE_TIMEOUT_S and _wants_rank(builder, pod, {AgentState.READY})


def _adopt_running_world(builder: DecisionBuilder) -> RunningPhase | None:
    """Return the phase of a running world whose operator left no state, or None without one."""
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
        return None
    (version,) = versions
    members = [ranked[rank, version] for rank in ranks]
    builder.update_state(epoch=max(1, rank_assignment.epoch_of_version(version)), started_s=builder.now_s)
    builder.set_condition("Running", True, "Adopted", f"{len(members)} agents ran already")
    builder.add_event("Adopted", f"{len(members)} agents run already; they are left alone")
    world = AssignedWorld(version=version, members=tuple(pod.name for pod in members), master_addr=members[0].ip)
    return RunningPhase(since_s=builder.now_s, world=world)


def handle_starting(builder: DecisionBuilder, phase: StartingPhase) -> CurrentPhase:
    """Send ``/start`` to ready agents until all members run."""
    for pod in builder.member_pods:
        if agent_state_of(pod) is AgentState.READY:
            builder.add_actions(rank_assignment.start_action(builder, pod))
    ran = [pod for pod in builder.member_pods if agent_state_of(pod) in _RUNNING_STATES and not builder.is_stale(pod)]
    return _running(builder, phase) if len(ran) == len(phase.world.members) else phase


def _running(builder: DecisionBuilder, phase: StartingPhase) -> RunningPhase:
    state, size = builder.state, len(phase.world.members)
    message = f"{size} agents run"
    reason = "Started"
    if state.fault is not None:
        took_ms = round(1000 * (builder.now_s - state.fault.at_s))
        reason, message = (
            "FaultRemediated",
            (f"The fault of reason {state.fault.reason} was remediated in {took_ms} milliseconds."),
        )
        builder.update_state(no_scale_up_until_s=builder.now_s + builder.spec.policy.scale_up_snooze_s)
    elif phase.cause is TransitionCause.SCALE:
        reason, message = "Scaled", f"the job runs with {size} replicas now"
        scaling = msgspec.structs.replace(
            state.scaling, scaled_at_s=builder.now_s, updated_at_s=builder.now_s, consecutive_failures=0
        )
        builder.update_state(scaling=scaling)
    builder.set_condition("Running", True, reason, message)
    builder.add_event(reason, message)
    builder.update_state(
        started_s=builder.now_s if state.started_s is None else state.started_s,
        last_fault=state.fault or state.last_fault,
        fault=None,
    )
    return RunningPhase(since_s=builder.now_s, world=phase.world)


def handle_running(builder: DecisionBuilder, phase: RunningPhase) -> CurrentPhase:
    states = [agent_state_of(pod) for pod in builder.member_pods]
    if len(states) == len(phase.world.members) and all(state is AgentState.COMPLETED for state in states):
        return complete_job(builder, phase)
    if builder.spec.suspend:
        return stop_gracefully(builder, TransitionCause.SUSPEND, "the job is suspended")
    shrunk = _shrink_if_needed(builder)
    if shrunk is not None:
        return shrunk
    following = _grow_if_possible(builder, phase, finishing=AgentState.COMPLETED in states)
    if isinstance(following, RunningPhase):
        builder.add_actions(
            *(ReleasePod(pod.name, "not wanted any more") for pod in rank_assignment.surplus_pods(builder))
        )
    return following


def _shrink_if_needed(builder: DecisionBuilder) -> StoppingPhase | None:
    """Return the stop of a world with preempted members or too many replicas, or None if it can continue.

    The job continues with the other members, or with spares.
    """
    size, allowed = len(builder.state.members), rank_assignment.max_allowed_size(builder)
    leaving = [pod.name for pod in builder.member_pods if pod.terminating]
    if leaving:
        why = f"preempted: {', '.join(leaving)}"
        return stop_gracefully(builder, TransitionCause.SCALE, why, target=min(size, allowed))
    if allowed < size:
        why = f"{builder.observed.capacity} replicas are admitted"
        return stop_gracefully(builder, TransitionCause.SCALE, why, target=allowed)
    return None


def _grow_if_possible(
    builder: DecisionBuilder, phase: RunningPhase, *, finishing: bool
) -> RunningPhase | StoppingPhase:
    """Stop the world to grow it if a larger size was possible for ``scaling_timeout_s``.

    It grows at once to the maximum.
    """
    size = rank_assignment.growable_size(builder)
    if finishing or builder.now_s < builder.state.no_scale_up_until_s or size <= len(phase.world.members):
        return msgspec.structs.replace(phase, grow_since_s=None)
    since = builder.now_s if phase.grow_since_s is None else phase.grow_since_s
    if (
        size < rank_assignment.max_allowed_size(builder)
        and builder.now_s - since < builder.spec.policy.scaling_timeout_s
    ):
        return msgspec.structs.replace(phase, grow_since_s=since)
    return stop_gracefully(builder, TransitionCause.SCALE, f"{size} replicas can run", target=size)


_BeforeRunning = FormingPhase | RanksAssignedPhase | StartingPhase
_BUSY_STATES = {AgentState.RUNNING, AgentState.COMPLETED, AgentState.FAULTED}


def remediate_fault(builder: DecisionBuilder, fault: JobFault) -> CurrentPhase:
    """Stop all members after a fault.

    A second fault before the first one is remediated restarts the processes.
    """
    before = builder.state
    phase = before.current
    mode = fault_detection.requested_restart_mode(builder.member_pods)
    if before.fault is not None or not before.members:
        mode = mode.at_least(RestartMode.PROCESS)
    state, mode, beyond = fault_detection.count_restart(before, builder.spec.policy, mode, builder.now_s)
    builder.state = fault_detection.record_node_faults(state, builder.spec.policy, fault.nodes, builder.now_s)
    at_s = fault.at_s if before.fault is None else before.fault.at_s
    fault = msgspec.structs.replace(fault, mode=mode, at_s=at_s)
    builder.add_event(fault.reason, fault.message.strip() or fault.reason, warning=True)
    builder.set_condition("Running", False, fault.reason, fault.message.strip())
    builder.update_state(fault=fault)
    if beyond:
        return fail_job(builder, "RestartLimitExceeded", f"the job failed after {fault.reason}: more than {beyond}")
    if isinstance(phase, _BeforeRunning) and phase.cause is TransitionCause.SCALE:
        builder.update_state(
            scaling=msgspec.structs.replace(
                before.scaling, consecutive_failures=before.scaling.consecutive_failures + 1
            )
        )
    builder.add_event("Restarting", f"restart {builder.state.restarts}, {mode.value}")
    mark_replaced(
        builder, [pod for pod in builder.observed.pods if mode is RestartMode.JOB or _is_unusable(builder, pod)]
    )
    target = phase.target if isinstance(phase, FormingPhase) else len(before.members)
    return _stop(builder, TransitionCause.FAULT, mode, target=target)


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


def stop_gracefully(builder: DecisionBuilder, cause: TransitionCause, why: str, *, target: int = 0) -> StoppingPhase:
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
    mode = fault_detection.requested_restart_mode(builder.member_pods)
    return _stop(builder, cause, mode, graceful=True, target=target)


def _stop(
    builder: DecisionBuilder, cause: TransitionCause, mode: RestartMode, *, target: int, graceful: bool = False
) -> StoppingPhase:
    if mode is RestartMode.JOB and not builder.observed.can_replace:
        mode = RestartMode.PROCESS
    builder.update_state(previous_members=builder.state.members or builder.state.previous_members)
    return StoppingPhase(
        since_s=builder.now_s,
        world=builder.state.world,
        cause=cause,
        mode=mode,
        target=target,
        graceful=graceful,
    )


def _is_unusable(builder: DecisionBuilder, pod: ObservedPod) -> bool:
    ranked = pod.name in builder.state.members
    return bool(pod.node_health_problem) or (ranked and builder.is_lost(pod))


def mark_replaced(builder: DecisionBuilder, pods: Iterable[ObservedPod]) -> None:
    """Exclude these pods from the job if replacements can be created."""
    if builder.observed.can_replace:
        names = [pod.name for pod in pods if pod.name not in builder.state.replaced_pods and not pod.terminating]
        builder.update_state(replaced_pods=(*builder.state.replaced_pods, *names))


def handle_stopping(builder: DecisionBuilder, phase: StoppingPhase) -> CurrentPhase:
    """Send ``/stop`` to busy agents until all wait. Replace the pods that do not stop in time."""
    mark_replaced(builder, [pod for pod in builder.active_pods if _is_unusable(builder, pod)])
    busy = [
        pod
        for pod in builder.observed.pods
        if pod.name not in builder.state.replaced_pods and _still_stopping(builder, pod)
    ]
    for pod in busy:
        if agent_state_of(pod) in _BUSY_STATES:
            builder.add_actions(StopAgent(pod.name, _stop_request(builder, phase)))
    limit_s = builder.spec.stop_timeout_s + (builder.spec.policy.graceful_shutdown_timeout_s if phase.graceful else 0.0)
    if busy and builder.in_phase_s >= limit_s:
        phase = _escalate_stop(builder, phase, [pod for pod in busy if pod.name not in phase.escalated])
    if busy and builder.in_phase_s >= limit_s + builder.spec.stop_timeout_s:
        builder.add_event("StopTimeout", f"did not stop: {', '.join(pod.name for pod in busy)}", warning=True)
        mark_replaced(builder, busy)
        busy = []
    return phase if busy else _after_stop(builder, phase)


def _still_stopping(builder: DecisionBuilder, pod: ObservedPod) -> bool:
    state = agent_state_of(pod)
    if state is None:
        return pod.name in builder.state.members and not builder.is_lost(pod)
    return state in _BUSY_STATES or state is AgentState.STOPPING


def _stop_request(builder: DecisionBuilder, phase: StoppingPhase) -> StopRequest:
    """Return the body of ``/stop``. In-process agents ignore a graceful stop: they stop at their barrier."""
    if not phase.graceful:
        return StopRequest(restart_mode=phase.mode.value)
    grace_s = math.ceil(builder.spec.policy.graceful_shutdown_timeout_s)
    return StopRequest(restart_mode=phase.mode.value, is_graceful=True, timeout=max(1, grace_s))


def _escalate_stop(builder: DecisionBuilder, phase: StoppingPhase, pods: list[ObservedPod]) -> StoppingPhase:
    """Request a restart of the processes, once per pod: each request restarts them again."""
    body = StopRequest(restart_mode=RestartMode.PROCESS.value)
    names = [pod.name for pod in pods if agent_state_of(pod) is AgentState.STOPPING]
    builder.add_actions(*(StopAgent(name, body) for name in names))
    return msgspec.structs.replace(phase, escalated=(*phase.escalated, *names))


def _after_stop(builder: DecisionBuilder, phase: StoppingPhase) -> FormingPhase | SuspendedPhase:
    if phase.cause is TransitionCause.SUSPEND:
        return SuspendedPhase(since_s=builder.now_s)
    policy, patience_s = builder.spec.policy, None
    if phase.cause is TransitionCause.FAULT and builder.state.fault is not None:
        whole_job = builder.state.fault.mode is RestartMode.JOB
        patience_s = max(policy.faulty_scale_down_timeout_s, policy.scaling_timeout_s if whole_job else 0.0)
    return await_world_members(builder, phase.cause, target=phase.target, patience_s=patience_s)


_SHUTDOWN_STATES = set(AgentState) - {AgentState.STOPPING, AgentState.SHUTDOWN}
"""States in which an agent obeys ``/shutdown``. A stopping agent obeys it after the stop."""


def complete_job(builder: DecisionBuilder, phase: RunningPhase) -> SucceededPhase:
    message = f"all {len(phase.world.members)} agents completed"
    builder.add_event("Completed", message)
    builder.set_condition("Running", False, "Completed", message)
    builder.set_condition("Succeeded", True, "Completed", message)
    builder.update_state(ended_s=builder.now_s)
    return SucceededPhase(since_s=builder.now_s, world=phase.world)


def fail_job(builder: DecisionBuilder, reason: str, message: str) -> FailedPhase:
    builder.add_event(reason, message, warning=True)
    builder.set_condition("Running", False, reason, message)
    builder.set_condition("Failed", True, reason, message)
    builder.update_state(ended_s=builder.now_s)
    phase = builder.state.current
    graceful = isinstance(phase, StoppingPhase) and phase.graceful
    return FailedPhase(since_s=builder.now_s, world=builder.state.world, graceful=graceful)


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


def handle_ended(builder: DecisionBuilder, phase: SucceededPhase | FailedPhase) -> CurrentPhase:
    """Shut the agents down.

    Release the pods of agents that do not exit: they hold a machine and queue quota.
    """
    builder.add_actions(
        *(ShutdownAgent(pod.name) for pod in builder.observed.pods if agent_state_of(pod) in _SHUTDOWN_STATES)
    )
    graceful = isinstance(phase, FailedPhase) and phase.graceful
    grace_s = builder.spec.policy.graceful_shutdown_timeout_s if graceful else 0.0
    if builder.in_phase_s >= grace_s + 2 * builder.spec.stop_timeout_s:
        stuck = (pod for pod in builder.active_pods if agent_state_of(pod) is not None)
        builder.add_actions(*(ReleasePod(pod.name, "the job has ended, and its agent does not") for pod in stuck))
    return phase


def handle_suspended(builder: DecisionBuilder, phase: SuspendedPhase) -> CurrentPhase:
    """Release all pods while the job is suspended, and form a world when it resumes."""
    if builder.spec.suspend:
        builder.set_condition("Suspended", True, "Suspended", "the job is suspended")
        builder.add_actions(*(ReleasePod(pod.name, "the job is suspended") for pod in builder.active_pods))
        return phase
    builder.set_condition("Suspended", False, "Resumed", "the job goes on")
    return await_world_members(builder, TransitionCause.BEGIN)


def _handle(builder: DecisionBuilder, phase: CurrentPhase) -> CurrentPhase:
    """Return the phase that follows, or the same one with its new data."""
    match phase:
        case FormingPhase():
            return handle_forming(builder, phase)
        case RanksAssignedPhase():
            return handle_ranks_assigned(builder, phase)
        case StartingPhase():
            return handle_starting(builder, phase)
        case RunningPhase():
            return handle_running(builder, phase)
        case StoppingPhase():
            return handle_stopping(builder, phase)
        case SuspendedPhase():
            return handle_suspended(builder, phase)
        case SucceededPhase() | FailedPhase():
            return handle_ended(builder, phase)


def decide_job(spec: JobSpec, state: JobState, seen: ObservedJob, now_s: float) -> OperatorDecision:
    """Return the operator's decision for these observations at ``now_s`` (seconds since 1970).

    ``state`` is the state of the last decision, ``JobState()`` for a new job.
    """
    builder = DecisionBuilder(spec, state, seen, now_s)
    if state.created_s is None:
        builder.update_state(current=accept_job(builder))
    fault_detection.record_observations(builder)
    if not builder.state.phase.is_final:
        builder.update_state(current=_handle_faults(builder))
    for _ in () if builder.waits else JobPhase:
        phase = builder.state.phase
        builder.update_state(current=_handle(builder, builder.state.current))
        if builder.state.phase is phase:
            break
    if isinstance(builder.state.current, RankedPhase) and not builder.waits:
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


def _handle_faults(builder: DecisionBuilder) -> CurrentPhase:
    """Return the phase after faults and deadlines: the same one without any."""
    deadline = exceeded_deadline(builder)
    if deadline is not None:
        return fail_job(builder, *deadline)
    idle = (pod for pod in builder.active_pods if pod.name not in builder.state.members)
    mark_replaced(builder, (pod for pod in idle if pod.node_health_problem))
    fault, explained = fault_detection.detect_fault(builder), fault_detection.explain(builder)
    if fault is not None:
        return remediate_fault(builder, fault)
    if explained is not None:
        correct_fault_reason(builder, explained)
    return builder.state.current


def _side_actions(builder: DecisionBuilder) -> list[OperatorAction]:
    """Return removals of replaced pods and stops of busy agents without a rank."""
    actions: list[OperatorAction] = []
    if builder.observed.can_replace:
        reason = builder.state.fault.reason if builder.state.fault is not None else "replaced"
        actions += [ReplacePod(name, reason) for name in builder.state.replaced_pods if name in builder.pods]
    if isinstance(builder.state.current, RankedPhase):
        body = StopRequest(restart_mode=RestartMode.PROCESS.value)
        idle = (pod for pod in builder.active_pods if pod.name not in builder.state.members)
        actions += [StopAgent(pod.name, body) for pod in idle if agent_state_of(pod) in _BUSY_STATES]
    return actions
