"""What a worker asks for with a fault: the cheapest restart that its own history leaves some hope for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic.world.policy import ScalingPolicy
from integration.hyperpod.agent.words import RestartMode

OFFENDER = "elastic-repeat-offender"


def restart_mode(policy: ScalingPolicy, starts: Sequence[float], now: float, *, final: bool = False) -> RestartMode:
    """``starts``: when this process was started anew without being ended, by any clock that ``now`` is read from.

    Processes that have been through that too often are not trusted with another world: new ones are asked for. A fault
    that is ``final`` comes again in any process; how often the whole job may be tried is up to the operator.
    """
    if final:
        return RestartMode.JOB
    limit = policy.num_restart_before_full_job_restart
    lately = [at for at in starts if now - at < policy.eval_period_s]
    if limit is not None and len(lately) >= limit:
        return RestartMode.PROCESS
    return RestartMode.IN_PROCESS


def health_labels(policy: ScalingPolicy, faults: Sequence[float], now: float) -> Mapping[str, str]:
    """``faults``: when this rank, and no other one, was at fault. Too often in the period: its node is to be looked at.

    Empty while there is nothing to say.
    """
    lately = [at for at in faults if now - at < policy.eval_period_s]
    if len(lately) < policy.repeat_offender_faults:
        return {}
    return {OFFENDER: str(len(lately))}
