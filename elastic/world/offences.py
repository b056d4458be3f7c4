"""Who was to blame for faults, who is avoided for it, and how often a job may break before it gives up."""

from __future__ import annotations

from collections import Counter

from elastic.world.members import Offence, World
from elastic.world.policy import ScalingPolicy


def remembered(offences: tuple[Offence, ...], policy: ScalingPolicy, now_s: float) -> tuple[Offence, ...]:
    return tuple(offence for offence in offences if now_s < offence.at_s + policy.eval_period_s)


def avoided(world: World, policy: ScalingPolicy, now_s: float) -> frozenset[str]:
    """Nodes that get no rank as long as others can be had: the worst of them, and those somebody outside has named."""
    if not world.offences:
        return world.marked
    counts = Counter(offence.node for offence in remembered(world.offences, policy, now_s))
    latest = {offence.node: offence.at_s for offence in world.offences}
    worst = sorted(
        (node for node, count in counts.items() if count >= policy.repeat_offender_faults and node not in world.marked),
        key=lambda node: (-counts[node], -latest[node], node),
    )
    return world.marked.union(worst[: policy.max_num_repeat_offenders_to_avoid])


def exhausted(world: World, policy: ScalingPolicy) -> str:
    """Which limit the restarts so far are beyond, in words; "" for none. Counts are those of the period."""
    most, full = policy.job_max_retry_count, policy.max_full_job_restarts
    if most is not None and world.restarts > most:
        return f"{most} restarts in all (job_max_retry_count)"
    if full is not None and len(world.full_restarts_s) > full:
        each = policy.num_restart_before_full_job_restart
        return (
            f"{full} restarts of all processes (max_full_job_restarts), each after {each} other restarts "
            f"(num_restart_before_full_job_restart), within {policy.eval_period_s:g} s (eval_period_s)"
        )
    return ""
