"""Random schedules of events in a small cluster, derived from a seed. Any event can be dropped."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import JobStopRequested, ResizeRequested
from tests.worlds.cluster import SimulatedCluster
from tests.worlds.simulated_supervisor import RankState, SimulatedSupervisor, Violation

_GAPS_S = (0.0, 0.0, 0.02, 0.5, 0.5, 2.0, 5.0, 5.0, 20.0, 60.0, 200.0)


@dataclass(frozen=True)
class ScheduledEvent:
    gap_s: float
    """Seconds before the event."""
    kind: str
    one: int = 0
    other: int = 0

    def __str__(self) -> str:
        return f"+{self.gap_s:g} s {self.kind} {self.one} {self.other}"


@dataclass(frozen=True)
class Schedule:
    seed: int
    policy: ScalingPolicy
    nodes: int
    nproc: int
    spares: int
    events: tuple[ScheduledEvent, ...]


@dataclass
class Finding:
    """A schedule that breaks an invariant."""

    schedule: Schedule
    violation: Violation

    def __str__(self) -> str:
        events = "\n".join(f"  {event}" for event in self.schedule.events)
        shape = f"{self.schedule.nodes} nodes of {self.schedule.nproc} + {self.schedule.spares}"
        return f"seed {self.schedule.seed}, {shape}, {self.schedule.policy}: {self.violation}\n{events}"


def policy_of(rng: random.Random) -> ScalingPolicy:
    least = rng.choice((1, 1, 2, 2, 3))
    most = least + rng.choice((0, 1, 2, 3, 4))
    kind = rng.choice(("any", "any", "step", "discrete"))
    each = rng.choice((None, 0, 1, 3, 10))
    sizes = tuple(sorted({least, most, rng.randint(least, most)})) if kind == "discrete" else ()
    return ScalingPolicy(
        min_replicas=least,
        max_replicas=most,
        replica_increment_step=2 if kind == "step" else None,
        replica_discrete_values=sizes,
        scaling_timeout_s=rng.choice((0.0, 5.0, 30.0)),
        graceful_shutdown_timeout_s=rng.choice((0.0, 3.0, 30.0, 30.0, 120.0)),
        faulty_scale_down_timeout_s=rng.choice((0.0, 3.0, 15.0, 60.0)),
        scale_up_snooze_s=rng.choice((0.0, 0.0, 60.0, 300.0)),
        restart_timeout_s=rng.choice((30.0, 60.0)),
        eval_period_s=rng.choice((60.0, 600.0, 3600.0)),
        num_restart_before_full_job_restart=each,
        max_full_job_restarts=rng.choice((0, 1, 3, 3)),
        job_max_retry_count=rng.choice((3, 10) if each is None else (None, None, None, 3, 10)),
        max_num_repeat_offenders_to_avoid=rng.choice((0, 1, 1, 2)),
        repeat_offender_faults=rng.choice((1, 2, 2, 3)),
        abort_timeout_s=rng.choice((5.0, 20.0, 300.0)),
    )


def schedule_of(seed: int, kinds: Sequence[str] = ()) -> Schedule:
    """Derive a schedule from a seed, with random events or with these kinds of events in this order."""
    rng = random.Random(seed)
    policy = policy_of(rng)
    nodes = max(1, policy.max_replicas + rng.choice((-2, -1, 0, 0, 1, 2)))
    weights = [weight for weight, _ in KINDS.values()]
    drawn = kinds or rng.choices(list(KINDS), weights, k=rng.randint(3, 12))
    events = [ScheduledEvent(30.0, "wait")] if rng.random() < 0.8 else []
    events += [
        ScheduledEvent(rng.choice(_GAPS_S), kind, rng.randrange(1 << 16), rng.randrange(1 << 16)) for kind in drawn
    ]
    return Schedule(seed, policy, nodes, rng.choice((1, 2, 2)), rng.choice((0, 0, 1)), tuple(events))


def run(schedule: Schedule, log: Callable[[str], None] | None = None) -> SimulatedCluster:
    """Run a schedule and check that the cluster comes to rest afterwards. Raises :class:`Violation`."""
    cluster = SimulatedCluster(
        schedule.seed, schedule.policy, nodes=schedule.nodes, nproc=schedule.nproc, spares=schedule.spares, log=log
    )
    for event in schedule.events:
        cluster.run(event.gap_s)
        cluster.log(f"== {event}")
        KINDS[event.kind][1](cluster, event)
    cluster.finish()
    return cluster


def find_violation(schedule: Schedule) -> Finding | None:
    try:
        run(schedule)
    except Violation as violation:
        return Finding(schedule, violation)
    except Exception as error:  # report every error with its seed
        return Finding(schedule, Violation(f"{type(error).__name__}: {error}"))
    return None


def shrink_finding(finding: Finding) -> Finding:
    """Drop events one after the other as long as the schedule still fails."""
    number = 0
    while number < len(finding.schedule.events):
        schedule = finding.schedule
        kept = schedule.events[:number] + schedule.events[number + 1 :]
        fewer = Schedule(schedule.seed, schedule.policy, schedule.nodes, schedule.nproc, schedule.spares, kept)
        found = find_violation(fewer)
        if found is None:
            number += 1
        else:
            finding, number = found, 0
    return finding


# -- kinds of events --------------------------------------------------------------------------------------------------


def _node_of(cluster: SimulatedCluster, event: ScheduledEvent, *, up: bool = True) -> SimulatedSupervisor | None:
    machines = [machine for machine in cluster.machines.values() if machine.up is up]
    return machines[event.one % len(machines)] if machines else None


def _kill_node(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    machine = _node_of(cluster, event)
    if machine is not None:
        cluster.kill(machine)
        if event.other % 2:
            cluster.run_after(1.0 + event.other % 40, lambda: cluster.boot(machine.node))


def _kill_rank(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    machine = _node_of(cluster, event)
    if machine is not None:
        cluster.judge.event_happened()
        machine.lose_rank(machine.ranks[event.other % cluster.nproc])


def _hang(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    machine = _node_of(cluster, event)
    if machine is not None:
        rank = machine.ranks[event.other % cluster.nproc]
        if rank.state is RankState.TRAINING:
            cluster.hang(machine, rank)


def _fault(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    machine = _node_of(cluster, event)
    if machine is not None:
        cluster.judge.event_happened()
        machine.report_fault(machine.ranks[event.other % cluster.nproc])


def _final_fault(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    """Report a rank's fault that a restart cannot fix."""
    machine = _node_of(cluster, event)
    if machine is not None:
        cluster.judge.event_happened()
        machine.report_fault(machine.ranks[event.other % cluster.nproc], final=True)


def _wrong_loss(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    machine = _node_of(cluster, event)
    if machine is not None:
        cluster.report_wrong_loss(machine)


def _preempt(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    machines = [machine.node for machine in cluster.machines.values() if machine.up]
    if machines:
        first = event.one % len(machines)
        count = 1 + event.other % 2
        cluster.preempt(tuple(machines[first : first + count]), (0.5, 5.0, 40.0, 150.0)[event.other // 2 % 4])


def _join(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    if len(cluster.machines) < 9:
        cluster.boot()


def _return(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    machine = _node_of(cluster, event, up=False)
    if machine is not None:
        cluster.boot(machine.node)


def _resize(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    cluster.judge.event_happened(fault=False)
    cluster.post(ResizeRequested((None, 1, 2, 3, 4)[event.one % 5]))


def _stop(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    cluster.post(JobStopRequested("a person", cluster.now_s + 20.0 if event.one % 2 else None))


def _restart_coordinator(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    cluster.restart_coordinator()


def _break_node(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    """Make every process fail that one machine starts from now on."""
    machine = _node_of(cluster, event)
    if machine is not None and not cluster.broken:
        cluster.broken.add(machine.node)
        cluster.judge.event_happened()
        machine.lose_rank(machine.ranks[0])


def _finish(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    cluster.all_finish()


def _wait(cluster: SimulatedCluster, event: ScheduledEvent) -> None:
    pass


KINDS: dict[str, tuple[int, Callable[[SimulatedCluster, ScheduledEvent], None]]] = {
    "kill node": (5, _kill_node),
    "kill rank": (5, _kill_rank),
    "hang": (3, _hang),
    "fault": (3, _fault),
    "final fault": (0.3, _final_fault),
    "wrong loss": (2, _wrong_loss),
    "preempt": (4, _preempt),
    "join": (3, _join),
    "return": (3, _return),
    "resize": (1, _resize),
    "stop": (0.2, _stop),
    "restart coordinator": (1, _restart_coordinator),
    "break node": (0.5, _break_node),
    "finish": (0.3, _finish),
    "wait": (2, _wait),
}
