"""How large a world may be, how long what is waited for, and how often it may break: HyperPod's words, in seconds.

Sizes count nodes: a replica is a node's worth of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from elastic.world import foreign, limits

_LEAVE_HANG_S = 4.0


class ScalingPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What :func:`elastic.world.decide.decide` keeps to. Impossible ones cannot be made."""

    min_replicas: int = 1
    max_replicas: int = 1
    replica_increment_step: int | None = None
    """Sizes are ``min_replicas + k * step``; one node at a time where neither this nor discrete values are given."""
    replica_discrete_values: tuple[int, ...] = ()
    """Or exactly these."""
    replicas: int | None = None
    """So many are waited for at the start; ``max_replicas`` where it is not given."""

    scaling_timeout_s: float = 60.0
    """How long nodes are collected before the world grows, or is begun with fewer than are wanted."""
    graceful_shutdown_timeout_s: float = 600.0
    """How long ranks may take to reach a common step and to seal; then they are ended."""
    faulty_scale_down_timeout_s: float = 30.0
    """How long a replacement is waited for after a fault, before the world becomes smaller."""
    scale_up_snooze_s: float = 0.0
    """How long a world that a fault has made smaller does not grow."""
    restart_timeout_s: float = 300.0
    """How long the ranks of a node may take to be ready; then they are started anew, and the next time given up."""
    leave_timeout_s: float = 10.0
    """Seconds that a live process may take to leave a broken world.

    Then another process replaces it. After a hang the limit is 4 s at most. No longer than ``restart_timeout_s``, the
    limit of the new process.
    """
    startup_timeout_s: float | None = None
    """How long the first world may take to begin."""

    eval_period_s: float = 3600.0
    """The time within which restarts and offences are counted."""
    num_restart_before_full_job_restart: int | None = 10
    """So many restarts in the period keep the healthy processes; with the next one all are started anew."""
    max_full_job_restarts: int | None = 3
    """So many times all processes are started anew in the period; then the job gives up."""
    job_max_retry_count: int | None = None
    """So many restarts in the whole life of the job."""
    max_num_repeat_offenders_to_avoid: int = 1
    """So many nodes at the most that were to blame for several faults have no rank while others can be had."""
    repeat_offender_faults: int = 2
    """So many faults in the period make a repeated offender."""

    def __post_init__(self) -> None:
        limits.refuse(limits.problems(msgspec.structs.asdict(self)))

    @property
    def wanted(self) -> int:
        """The size to begin with."""
        return self.replicas or self.max_replicas

    @property
    def leave_s(self) -> float:
        return min(self.leave_timeout_s, self.restart_timeout_s)

    @property
    def leave_hang_s(self) -> float:
        """The same after a hang: every other rank has waited for so long that the abort wakes it at once."""
        return min(self.leave_s, _LEAVE_HANG_S)

    def allows(self, size: int) -> bool:
        return self.at_most(size) == size

    def at_most(self, nodes: int) -> int:
        """The greatest size that so many nodes allow; 0 when there is none."""
        nodes = min(nodes, self.max_replicas)
        if self.replica_discrete_values:
            return max((size for size in self.replica_discrete_values if size <= nodes), default=0)
        if nodes < self.min_replicas:
            return 0
        return nodes - (nodes - self.min_replicas) % (self.replica_increment_step or 1)

    @property
    def least(self) -> int:
        """The smallest size there is."""
        return min(self.replica_discrete_values, default=self.min_replicas)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size in range(self.min_replicas, self.max_replicas + 1) if self.allows(size))

    @classmethod
    def from_elastic_policy(
        cls, elastic: Mapping[str, Any], restart: Mapping[str, Any] | None = None, **others: Any
    ) -> ScalingPolicy:
        """From a job's ``elasticPolicy`` and ``runPolicy.restartPolicy``, or a recipe's ``elastic_policy``.

        ``others`` are fields of this class that neither of the two has; a recipe's ``scale_config`` is a list of sizes:
        ``replica_discrete_values=tuple(scale_config)``. Whether the job is elastic at all (``is_elastic``) is up to who
        asks for a policy.
        """
        fields, called, unread = foreign.read(elastic, restart or {})
        unknown = tuple(f"{name} is unknown" for name in others if name not in cls.__struct_fields__)
        fields |= others
        all_fields = msgspec.structs.asdict(cls()) | fields
        limits.refuse(unread + unknown + limits.problems(all_fields, called))
        return cls(**fields)
