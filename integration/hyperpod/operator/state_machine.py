"""``decide_job``: the operator's state machine, one handler per phase. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import msgspec

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
from integration.hyperpod.operator.job_spec import JobSpec
from integration.hyperpod.operator.job_state import JobFault, JobPhase, JobState, TransitionCause
from integration.hyperpod.operator.observed_pods import AgentRestartMode, AgentState, ObservedJob, ObservedPod

_IDLE = {AgentState.INIT, AgentState.READY}
_RUNS = {AgentState.RUNNING, AgentState.COMPLETED}
_SPARE_UPDATE_TIMEOUT_S = 10.0
"""What a spare does not take in so long is left to ``/start``, which says the same."""


def accept_job(turn: DecisionBuilder) -> None:
    """The first look at a job."""
    turn.update_state(created_s=turn.now_s)
    turn.set_condition("Created", True, "JobCreated", f"job {turn.spec.name} was accepted")
    await_world_members(turn, TransitionCause.BEGIN)


def await_world_members(turn: DecisionBuilder, cause: TransitionCause, *, patience_s: float | None = None) -> None:
    """Jobs that are not elastic wait for all of them, however long it takes."""
    if patience_s is None:
        patience_s = turn.spec.policy.scaling_timeout_s
    deadline_s = turn.now_s + patience_s if turn.spec.elastic else None
    turn.enter_phase(JobPhase.FORMING, cause=cause, members=(), spares=(), deadline_s=deadline_s)


def handle_forming(turn: DecisionBuilder) -> None:
    if turn.spec.suspend:
        turn.enter_phase(JobPhase.SUSPENDED)
        return
    if turn.state.epoch == 0 and _adopt_running_world(turn):
        return
    there = rank_assignment.rank_candidates(turn)
    size = rank_assignment.startable_size(turn, len(there))
    if size:
        turn.set_condition("PodsRunning", True, "AgentsAnswer", f"{len(there)} agents wait, {size} get a rank")
        rank_assignment.assign_ranks(turn, there[:size], there[size:])
        turn.enter_phase(JobPhase.RANKS_ASSIGNED)
        return
    body = StopRequest(restart_mode=AgentRestartMode.PROCESS.value)
    turn.add_actions(*(StopAgent(pod.name, body) for pod in turn.active_pods if agent_state_of(pod) in _RUNS))


def handle_ranks_assigned(turn: DecisionBuilder) -> None:
    """``/update`` to processes that wait for their ranks, and to spares that take a place; then all start."""
    spares = [pod for pod in turn.member_pods if _is_still_spare(turn, pod)]
    waiting = [pod for pod in turn.member_pods if _wants_rank(turn, pod, {AgentState.INIT})]
    turn.add_actions(*(rank_assignment.update_action(turn, pod) for pod in (*waiting, *spares)))
    states = [agent_state_of(pod) for pod in turn.member_pods]
    if all(state is AgentState.READY for state in states) and not spares:
        turn.enter_phase(JobPhase.STARTING)
    elif any(state not in {*_IDLE, None} for state in states):
        turn.enter_phase(JobPhase.FORMING, previous_members=turn.state.members, members=(), spares=())
    elif turn.in_phase_s >= turn.spec.policy.restart_timeout_s and turn.observed.can_replace:
        late = tuple(pod.name for pod in turn.member_pods if agent_state_of(pod) is not AgentState.READY)
        turn.add_event("StartTimeout", f"not ready in time, replaced: {', '.join(late)}", warning=True)
        previous = turn.state.members
        turn.enter_phase(
            JobPhase.FORMING,
            previous_members=previous,
            members=(),
            spares=(),
            replaced_pods=(*turn.state.replaced_pods, *late),
        )


def update_spares(turn: DecisionBuilder) -> None:
    """Theirs come behind the last one; a spare that began anew has forgotten it. One may come after the world began."""
    kept = [name for name in turn.state.spares if name in turn.pods and name not in turn.state.replaced_pods]
    placed = {*turn.state.members, *kept}
    late = [pod.name for pod in rank_assignment.rank_candidates(turn) if pod.name not in placed]
    turn.update_state(spares=(*kept, *late[: max(0, turn.spec.spares - len(kept))]))
    spares = (turn.pods[name] for name in turn.state.spares if name in turn.pods)
    turn.add_actions(*(rank_assignment.update_action(turn, pod) for pod in spares if _wants_rank(turn, pod, _IDLE)))


def _wants_rank(turn: DecisionBuilder, pod: ObservedPod, states: set[AgentState]) -> bool:
    answer = pod.agent_status
    if answer is None or answer.restart_mode is not AgentRestartMode.IN_PROCESS or answer.version == turn.state.version:
        return False
    return answer.state in states


def _is_still_spare(turn: DecisionBuilder, pod: ObservedPod) -> bool:
    """It has a rank, and its processes, which stand at the barrier, were told of another one or of none."""
    spare = pod.agent_status is not None and pod.agent_status.spare
    return spare and turn.in_phase_s < _SPARE_UPDATE_TIMEOUT_S and _wants_rank(turn, pod, {AgentState.READY})


def _adopt_running_world(turn: DecisionBuilder) -> bool:
    """A world that runs already, of an operator that has not left its state: it is taken over as it is."""
    ranked = {}
    for pod in turn.active_pods:
        answer = pod.agent_status
        if answer is not None and answer.state in _RUNS and answer.rank is not None and answer.version:
            ranked[answer.rank, answer.version] = pod
    versions = {version for _, version in ranked}
    ranks = sorted(rank for rank, _ in ranked)
    everybody = len(ranks) + turn.spec.spares >= len(turn.active_pods)
    whole = len(versions) == 1 and ranks == list(range(len(ranks))) and everybody
    if not whole or not turn.spec.policy.allows(len(ranks)):
        return False
    (version,) = versions
    members = [ranked[rank, version] for rank in ranks]
    turn.enter_phase(
        JobPhase.RUNNING,
        epoch=max(1, rank_assignment.epoch_of_version(version)),
        version=version,
        members=tuple(pod.name for pod in members),
        master_addr=members[0].ip,
        started_s=turn.now_s,
    )
    turn.set_condition("Running", True, "Adopted", f"{len(members)} agents ran already")
    turn.add_event("Adopted", f"{len(members)} agents run already; they are left alone")
    return True


def handle_starting(turn: DecisionBuilder) -> None:
    """``/start`` again to whoever has not obeyed; the world runs when all say so."""
    for pod in turn.member_pods:
        if agent_state_of(pod) is AgentState.READY:
            turn.add_actions(rank_assignment.start_action(turn, pod))
    size = len(turn.state.members)
    if sum(agent_state_of(pod) in _RUNS and not turn.is_stale(pod) for pod in turn.member_pods) == size:
        _enter_running(turn)


def _enter_running(turn: DecisionBuilder) -> None:
    state, size = turn.state, len(turn.state.members)
    message = f"{size} agents run"
    reason = "Started"
    if state.fault is not None:
        took_ms = round(1000 * (turn.now_s - state.fault.at_s))
        reason, message = (
            "FaultRemediated",
            (f"The fault of reason {state.fault.reason} was remediated in {took_ms} milliseconds."),
        )
        turn.update_state(no_scale_up_until_s=turn.now_s + turn.spec.policy.scale_up_snooze_s)
    elif state.cause is TransitionCause.SCALE:
        reason, message = "Scaled", f"the job runs with {size} replicas now"
        scaling = msgspec.structs.replace(
            state.scaling, scaled_at_s=turn.now_s, updated_at_s=turn.now_s, consecutive_failures=0
        )
        turn.update_state(scaling=scaling)
    turn.set_condition("Running", True, reason, message)
    turn.add_event(reason, message)
    turn.enter_phase(
        JobPhase.RUNNING,
        started_s=turn.now_s if state.started_s is None else state.started_s,
        last_fault=state.fault or state.last_fault,
        fault=None,
        grow_since_s=None,
    )


def handle_running(turn: DecisionBuilder) -> None:
    states = [agent_state_of(pod) for pod in turn.member_pods]
    if len(states) == len(turn.state.members) and all(one is AgentState.COMPLETED for one in states):
        complete_job(turn)
        return
    if turn.spec.suspend:
        stop_gracefully(turn, TransitionCause.SUSPEND, "the job is suspended")
        return
    if not (_shrink_if_needed(turn) or _grow_if_possible(turn, finishing=AgentState.COMPLETED in states)):
        turn.add_actions(*(ReleasePod(pod.name, "not wanted any more") for pod in rank_assignment.surplus_pods(turn)))


def _shrink_if_needed(turn: DecisionBuilder) -> bool:
    """Less is admitted than runs, or members are preempted: the rest goes on without them, or with spares."""
    size, most = len(turn.state.members), rank_assignment.max_allowed_size(turn)
    leaving = [pod.name for pod in turn.member_pods if pod.terminating]
    if leaving:
        stop_gracefully(turn, TransitionCause.SCALE, f"preempted: {', '.join(leaving)}", target=min(size, most))
    elif most < size:
        stop_gracefully(turn, TransitionCause.SCALE, f"{turn.observed.capacity} replicas are admitted", target=most)
    return bool(leaving) or most < size


def _grow_if_possible(turn: DecisionBuilder, *, finishing: bool) -> bool:
    """Once more can have a rank for long enough, or all there can ever be."""
    size = rank_assignment.growable_size(turn)
    if finishing or turn.now_s < turn.state.no_scale_up_until_s or size <= len(turn.state.members):
        turn.update_state(grow_since_s=None)
        return False
    since = turn.now_s if turn.state.grow_since_s is None else turn.state.grow_since_s
    if size < rank_assignment.max_allowed_size(turn) and turn.now_s - since < turn.spec.policy.scaling_timeout_s:
        turn.update_state(grow_since_s=since)
        return False
    stop_gracefully(turn, TransitionCause.SCALE, f"{size} replicas can run", target=size)
    return True


_BUSY = {AgentState.RUNNING, AgentState.COMPLETED, AgentState.FAULTED}


def remediate_fault(turn: DecisionBuilder, fault: JobFault) -> None:
    """A fault: all are stopped. One that comes before an earlier one is remediated takes new processes."""
    before = turn.state
    mode = fault_detection.requested_restart_mode(turn.member_pods)
    if before.fault is not None or not before.members:
        mode = mode.at_least(AgentRestartMode.PROCESS)
    state, mode, beyond = fault_detection.count_restart(before, turn.spec.policy, mode, turn.now_s)
    turn.state = fault_detection.record_node_faults(state, turn.spec.policy, fault.nodes, turn.now_s)
    at_s = fault.at_s if before.fault is None else before.fault.at_s
    fault = msgspec.structs.replace(fault, mode=mode, at_s=at_s)
    turn.add_event(fault.reason, fault.message.strip() or fault.reason, warning=True)
    turn.set_condition("Running", False, fault.reason, fault.message.strip())
    turn.update_state(fault=fault, unexplained_since_s=None)
    if beyond:
        fail_job(turn, "RestartLimitExceeded", f"the job failed after {fault.reason}: more than {beyond}")
        return
    if before.cause is TransitionCause.SCALE and before.phase is not JobPhase.RUNNING:
        turn.update_state(
            scaling=msgspec.structs.replace(
                before.scaling, consecutive_failures=before.scaling.consecutive_failures + 1
            )
        )
    turn.add_event("Restarting", f"restart {turn.state.restarts}, {mode.value}")
    _stop(turn, TransitionCause.FAULT, mode, target=len(before.members) or before.target)
    mark_replaced(turn, [pod for pod in turn.observed.pods if mode is AgentRestartMode.JOB or _is_unusable(turn, pod)])


def explained(turn: DecisionBuilder, fault: JobFault) -> None:
    """The same fault, for the reason that it really had; machines that were blamed for it are not any more."""
    before = turn.state.fault
    wrongly = () if before is None else before.nodes
    offences = list(turn.state.node_faults)
    for one in reversed(turn.state.node_faults):
        if one.node in wrongly:
            offences.remove(one)
            break
    turn.state = fault_detection.record_node_faults(
        msgspec.structs.replace(turn.state, fault=fault, node_faults=tuple(offences)),
        turn.spec.policy, fault.nodes, turn.now_s,
    )  # fmt: skip
    turn.add_event(fault.reason, fault.message.strip() or fault.reason, warning=True)
    turn.set_condition("Running", False, fault.reason, fault.message.strip())


def stop_gracefully(turn: DecisionBuilder, cause: TransitionCause, why: str, *, target: int = 0) -> None:
    """Gracefully: ranks agree on a step, save, and end."""
    turn.add_event("Scaling" if cause is TransitionCause.SCALE else "Suspending", why)
    turn.set_condition("Running", False, cause.value, why)
    if cause is TransitionCause.SCALE:
        scaling = msgspec.structs.replace(
            turn.state.scaling,
            target=target,
            updated_at_s=turn.now_s,
            after_fault=any(pod.terminating for pod in turn.member_pods),
        )
        turn.update_state(scaling=scaling)
    _stop(turn, cause, fault_detection.requested_restart_mode(turn.member_pods), graceful=True, target=target)


def _stop(
    turn: DecisionBuilder, cause: TransitionCause, mode: AgentRestartMode, *, target: int, graceful: bool = False
) -> None:
    if mode is AgentRestartMode.JOB and not turn.observed.can_replace:
        mode = AgentRestartMode.PROCESS
    previous = turn.state.members or turn.state.previous_members
    turn.enter_phase(
        JobPhase.STOPPING,
        cause=cause,
        restart_mode=mode,
        graceful=graceful,
        stop_escalated=(),
        previous_members=previous,
        target=target,
    )


def _is_unusable(turn: DecisionBuilder, pod: ObservedPod) -> bool:
    ranked = pod.name in turn.state.members
    return bool(pod.node_health_problem) or (ranked and turn.is_lost(pod))


def mark_replaced(turn: DecisionBuilder, pods: Iterable[ObservedPod]) -> None:
    """These count no more, where others can be had."""
    if turn.observed.can_replace:
        names = [pod.name for pod in pods if pod.name not in turn.state.replaced_pods and not pod.terminating]
        turn.update_state(replaced_pods=(*turn.state.replaced_pods, *names))


def handle_stopping(turn: DecisionBuilder) -> None:
    """``/stop`` to whoever is not stopped; in time all wait again, or are given up."""
    mark_replaced(turn, [pod for pod in turn.active_pods if _is_unusable(turn, pod)])
    busy = [
        pod for pod in turn.observed.pods if pod.name not in turn.state.replaced_pods and _still_stopping(turn, pod)
    ]
    for pod in busy:
        if agent_state_of(pod) in _BUSY:
            turn.add_actions(StopAgent(pod.name, _stop_request(turn)))
    limit_s = turn.spec.stop_timeout_s + (turn.spec.policy.graceful_shutdown_timeout_s if turn.state.graceful else 0.0)
    if busy and turn.in_phase_s >= limit_s:
        _escalate_stop(turn, [pod for pod in busy if pod.name not in turn.state.stop_escalated])
    if busy and turn.in_phase_s >= limit_s + turn.spec.stop_timeout_s:
        turn.add_event("StopTimeout", f"did not stop: {', '.join(pod.name for pod in busy)}", warning=True)
        mark_replaced(turn, busy)
        busy = []
    if not busy:
        _stopped(turn)


def _still_stopping(turn: DecisionBuilder, pod: ObservedPod) -> bool:
    state = agent_state_of(pod)
    if state is None:
        return pod.name in turn.state.members and not turn.is_lost(pod)
    return state in _BUSY or state is AgentState.STOPPING


def _stop_request(turn: DecisionBuilder) -> StopRequest:
    """In-process agents know nothing of graceful stops: theirs is the barrier, whatever the reason."""
    state = turn.state
    if not state.graceful:
        return StopRequest(restart_mode=state.restart_mode.value)
    grace_s = math.ceil(turn.spec.policy.graceful_shutdown_timeout_s)
    return StopRequest(restart_mode=state.restart_mode.value, is_graceful=True, timeout=max(1, grace_s))


def _escalate_stop(turn: DecisionBuilder, pods: list[ObservedPod]) -> None:
    """Once, since every such word begins a restart of processes anew."""
    body = StopRequest(restart_mode=AgentRestartMode.PROCESS.value)
    told = [pod.name for pod in pods if agent_state_of(pod) is AgentState.STOPPING]
    turn.add_actions(*(StopAgent(name, body) for name in told))
    turn.update_state(stop_escalated=(*turn.state.stop_escalated, *told))


def _stopped(turn: DecisionBuilder) -> None:
    if turn.state.cause is TransitionCause.SUSPEND:
        turn.enter_phase(JobPhase.SUSPENDED, members=(), spares=())
        return
    policy = turn.spec.policy
    if turn.state.cause is TransitionCause.FAULT and turn.state.fault is not None:
        whole = turn.state.fault.mode is AgentRestartMode.JOB
        patience_s = max(policy.faulty_scale_down_timeout_s, policy.scaling_timeout_s if whole else 0.0)
        await_world_members(turn, TransitionCause.FAULT, patience_s=patience_s)
    else:
        await_world_members(turn, turn.state.cause)


_ENDS_WHEN_TOLD = set(AgentState) - {AgentState.STOPPING, AgentState.SHUTDOWN}
"""An agent that is stopping listens again when it has stopped."""


def complete_job(turn: DecisionBuilder) -> None:
    message = f"all {len(turn.state.members)} agents completed"
    turn.add_event("Completed", message)
    turn.set_condition("Running", False, "Completed", message)
    turn.set_condition("Succeeded", True, "Completed", message)
    turn.enter_phase(JobPhase.SUCCEEDED, ended_s=turn.now_s)


def fail_job(turn: DecisionBuilder, reason: str, message: str) -> None:
    turn.add_event(reason, message, warning=True)
    turn.set_condition("Running", False, reason, message)
    turn.set_condition("Failed", True, reason, message)
    turn.enter_phase(JobPhase.FAILED, ended_s=turn.now_s)


def exceeded_deadline(turn: DecisionBuilder) -> tuple[str, str] | None:
    """Which deadline has passed."""
    spec, state, now_s = turn.spec, turn.state, turn.now_s
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


def handle_ended(turn: DecisionBuilder) -> None:
    """Agents are told to end; those that do not in time hold a machine, and a queue's quota, for nothing."""
    turn.add_actions(*(ShutdownAgent(pod.name) for pod in turn.observed.pods if agent_state_of(pod) in _ENDS_WHEN_TOLD))
    grace_s = turn.spec.policy.graceful_shutdown_timeout_s if turn.state.graceful else 0.0
    if turn.in_phase_s >= grace_s + 2 * turn.spec.stop_timeout_s:
        stuck = (pod for pod in turn.active_pods if agent_state_of(pod) is not None)
        turn.add_actions(*(ReleasePod(pod.name, "the job has ended, and its agent does not") for pod in stuck))


def handle_suspended(turn: DecisionBuilder) -> None:
    """No pod is kept; the job goes on where it was when it is asked to."""
    if turn.spec.suspend:
        turn.set_condition("Suspended", True, "Suspended", "the job is suspended")
        turn.add_actions(*(ReleasePod(pod.name, "the job is suspended") for pod in turn.active_pods))
        return
    turn.set_condition("Suspended", False, "Resumed", "the job goes on")
    deadline_s = turn.now_s + turn.spec.policy.scaling_timeout_s if turn.spec.elastic else None
    turn.enter_phase(JobPhase.FORMING, cause=TransitionCause.BEGIN, target=0, deadline_s=deadline_s)


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
_WITH_RANKS = {JobPhase.RANKS_ASSIGNED, JobPhase.STARTING, JobPhase.RUNNING}


def decide_job(spec: JobSpec, state: JobState, seen: ObservedJob, now_s: float) -> OperatorDecision:
    """What an operator does that sees this, remembers that, and is asked at ``now_s`` (seconds since 1970)."""
    turn = DecisionBuilder(spec, state, seen, now_s)
    if state.created_s is None:
        accept_job(turn)
    fault_detection.record_observations(turn)
    if not turn.state.phase.is_final:
        _handle_faults(turn)
    for _ in () if turn.waits else JobPhase:
        phase = turn.state.phase
        _PHASES[phase](turn)
        if turn.state.phase is phase:
            break
    if turn.state.phase in _WITH_RANKS and not turn.waits:
        update_spares(turn)
    if not turn.waits:
        turn.add_actions(*_side_actions(turn))
    return OperatorDecision(
        state=turn.state,
        actions=tuple(turn.actions),
        events=tuple(turn.events),
        wanted=rank_assignment.desired_pods(turn),
        finished=turn.state.phase.is_final and all(agent_state_of(pod) is None for pod in seen.pods),
    )


def _handle_faults(turn: DecisionBuilder) -> None:
    late = exceeded_deadline(turn)
    if late is not None:
        fail_job(turn, *late)
        return
    idle = (pod for pod in turn.active_pods if pod.name not in turn.state.members)
    mark_replaced(turn, (pod for pod in idle if pod.node_health_problem))
    found, better = fault_detection.detect_fault(turn), fault_detection.explain(turn)
    if found is not None:
        remediate_fault(turn, found)
    elif better is not None:
        explained(turn, better)


def _side_actions(turn: DecisionBuilder) -> list[OperatorAction]:
    """What goes on beside the world: pods on their way out, and those without a rank that do what only ranks do."""
    found: list[OperatorAction] = []
    if turn.observed.can_replace:
        why = turn.state.fault.reason if turn.state.fault is not None else "replaced"
        found += [ReplacePod(name, why) for name in turn.state.replaced_pods if name in turn.pods]
    if turn.state.phase in _WITH_RANKS:
        body = StopRequest(restart_mode=AgentRestartMode.PROCESS.value)
        idle = (pod for pod in turn.active_pods if pod.name not in turn.state.members)
        found += [StopAgent(pod.name, body) for pod in idle if agent_state_of(pod) in _BUSY]
    return found
