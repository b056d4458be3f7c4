"""Settings and state of a job as other modules read them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic.control.control_messages import ExitReason, NodeStatus, SizeRequest, WorldRecord, WorldSpec
from elastic.control.epoch_state import EpochState
from elastic.control.hang_detector import HangTimeouts
from elastic.coordinator.node_liveness import NodeRecord, is_superseded_generation
from elastic.coordinator.node_reports import LastCommittedStep
from elastic.world.scaling_policy import ScalingPolicy
from elastic.world.world_state import (
    NO_STEP_HOLDERS,
    FailJob,
    FinishJob,
    ReleaseNode,
    RequestedStep,
    SealedStep,
    StepHolders,
    StopJob,
    WorldState,
)
from peerstore.membership.topology import PeerNode


@dataclass(frozen=True)
class CoordinatorSettings:
    job: str
    policy: ScalingPolicy
    nproc: int
    store: str = ""
    """Address of an existing store, "" for a store on one node, ``rootless`` for a store on every node."""
    heartbeat_timeout_s: float = 10.0
    """Seconds without a report after which a connected node is lost."""
    reconnect_timeout_s: float = 2.0
    """Seconds that a disconnected supervisor has to reconnect."""
    rejoin_timeout_s: float = 5.0
    """Seconds that a restarted coordinator waits for further nodes after the first report."""
    hang: HangTimeouts = field(default_factory=HangTimeouts)
    local_nodes: int = 0
    """Number of nodes that the launcher starts. While fewer have joined, no message asks for more."""
    join_command: str = ""
    """Command line that starts another node, for messages."""
    requested_step: RequestedStep | None = None
    """The step that the first world restores."""
    holders: StepHolders = NO_STEP_HOLDERS
    """Nodes that have the newest step of an earlier run, or may have it. The first world waits for them."""


@dataclass(frozen=True)
class JobOutcome:
    """Outcome of the job. While ``exit`` is ``None``, the job has not ended."""

    exit: ExitReason | None = None
    reason: str = ""
    sealed_step: SealedStep | None = None
    """The step that the ranks sealed before the job was stopped."""
    failure: FailJob | None = None
    """Decision that ended the job with a failure."""

    @classmethod
    def of(cls, action: FinishJob | StopJob | FailJob) -> JobOutcome:
        """Return the outcome that a decision leads to."""
        return _OUTCOMES[type(action)](action)


_OUTCOMES: dict[type, Callable[[Any], JobOutcome]] = {
    FinishJob: lambda _: JobOutcome(ExitReason.FINISHED, "all ranks have finished"),
    StopJob: lambda action: JobOutcome(ExitReason.STOPPED, action.reason, action.sealed_step),
    FailJob: lambda action: (
        JobOutcome(ExitReason.NEVER_JOINED, action.reason, failure=action)
        if action.never_joined
        else JobOutcome(ExitReason.JOB_FAILED, f"{action.reason} ({action.attempts})", failure=action)
    ),
}


@dataclass(frozen=True)
class JobSnapshot:
    """State of a job between two decisions. Take a new one after each."""

    settings: CoordinatorSettings
    incarnation: str
    term: int
    """Term in which this coordinator leads, 0 without an election."""
    is_rejoining: bool
    """Whether this coordinator still collects reports and decides nothing."""
    world: WorldState
    nodes: Mapping[str, NodeRecord]
    world_spec: WorldSpec | None
    world_record: WorldRecord | None
    """Record of :attr:`world_spec` for nodes outside the world."""
    ranked: Collection[str]
    """Nodes of :attr:`world_spec`."""
    epoch_state: EpochState
    """Fault or pause of :attr:`world_spec`."""
    size_request: SizeRequest | None
    requested_nodes: int
    standby_peers: tuple[PeerNode, ...]
    """Agents of nodes outside the world that accept replicas."""
    released: Mapping[str, ReleaseNode]
    store_node: str
    is_rootless: bool
    outcome: JobOutcome
    last_committed_step: LastCommittedStep

    @property
    def allocated_epoch(self) -> int:
        """Epoch allocated for the incarnations of the newest world, 0 for none."""
        return 0 if self.world_record is None else self.world_record.incarnation_epoch

    def is_superseded(self, status: NodeStatus) -> bool:
        """Whether this generation of a supervisor is over."""
        return is_superseded_generation(self.world, status, is_rejoining=self.is_rejoining)
