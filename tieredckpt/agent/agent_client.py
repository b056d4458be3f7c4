"""Client of the node agent's Unix socket. It starts an agent if none answers."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from peerstore import message_codec
from peerstore.client.agent_launcher import (
    WatchdogRegistry,
    connect_or_launch_agent,
    raise_if_agent_hangs,
    replace_hung_agent,
)
from peerstore.client.store_client import AgentConnector, Client
from peerstore.errors import AgentUnreachableError, PeerStoreError
from peerstore.membership.topology import PeerNode
from peerstore.settings import AgentPaths, JobPeersConfig
from peerstore.shard_records import ShardKey, VersionId
from peerstore.transport.unix import connect_to_agent
from tieredckpt.agent import agent_methods as methods
from tieredckpt.agent.agent_api import (
    BlobPage,
    ClusterStatus,
    DrainStatus,
    DurableCheck,
    KnownPeers,
    LayoutsPage,
    PieceLocations,
    ProtectionStatus,
    ReaderCredentials,
    ShardLocations,
    ShardReplication,
    StateNames,
    StepDescription,
    StepSummary,
    TensorSliceNeed,
    describe_step,
)
from tieredckpt.agent.agent_methods import (
    MAX_AGENT_WAIT_S,
    AddMetricsRequest,
    AgentJobRequest,
    ConfigureRequest,
    DropStepsRequest,
    EmptyRequest,
    JoinPeersRequest,
    ListStepsRequest,
    LoadEndedRequest,
    LoadStartedRequest,
    QuarantineRequest,
    ShardReplicationRequest,
    StepLayoutsRequest,
    StepNamesRequest,
    StepPartsRequest,
    StepPiecesRequest,
    StepRestoredRequest,
    StepSummaryRequest,
    UnquarantineRequest,
    WaitDurableRequest,
)
from tieredckpt.errors import errors_by_name
from tieredckpt.format.manifest import unpack_blob
from tieredckpt.gc_pause import gc_paused
from tieredckpt.memory_service_options import memory_service_arguments
from tieredckpt.settings import DurableSettings, Settings, is_local_rank_zero
from tieredckpt.step_inventory import StepInventory

log = logging.getLogger(__name__)

_ADOPTION_S = 660.0
_RETRY_S = 20.0
_DROP_S = 300.0
_SLACK_S = 1.0
"""Seconds the agent has for its response when the caller does not wait."""
_WAIT_AGAIN_S = 300.0
_HINT_S = 5.0
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "unknown")
agent_watchdogs = WatchdogRegistry()
"""Watchdogs of the agents that this process uses."""


class ClientStepReader:
    """A :class:`~tieredckpt.agent.agent_api.StepReader` behind the agent's socket."""

    def __init__(self, store: Client) -> None:
        self._store = store

    def describe(self, job: str, group: VersionId) -> StepDescription:
        return describe_step(self, job, group)

    def summary(self, job: str, group: VersionId) -> StepSummary:
        return self._store.run(methods.STEP_SUMMARY, StepSummaryRequest(job, group), timeout_s=_ADOPTION_S)

    def layouts(self, job: str, group: VersionId, layouts: Sequence[str], tables: Sequence[str]) -> LayoutsPage:
        request = StepLayoutsRequest(job, group, tuple(layouts), tuple(tables))
        return self._store.run(methods.STEP_LAYOUTS, request, timeout_s=_ADOPTION_S)

    def names(self, job: str, group: VersionId) -> StateNames:
        packed, digest = bytearray(), ""
        while True:
            request = StepNamesRequest(job, group, digest, len(packed))
            page: BlobPage = self._store.run(methods.STEP_NAMES, request, timeout_s=_ADOPTION_S)
            if page.digest != digest:
                digest = page.digest
                packed.clear()
            packed += page.data
            if len(packed) >= page.size_bytes or not page.data:
                with gc_paused():  # millions of new objects without reference cycles
                    return message_codec.decode_message(unpack_blob(bytes(packed)), StateNames)

    def pieces(
        self, job: str, group: VersionId, rank: int, needs: Sequence[TensorSliceNeed], objects: Sequence[str]
    ) -> PieceLocations:
        request = StepPiecesRequest(job, group, rank, tuple(needs), tuple(objects))
        return self._store.run(methods.STEP_PIECES, request, timeout_s=_ADOPTION_S)

    def parts(self, job: str, group: VersionId, parts: Sequence[int], *, item_sizes: bool = False) -> ShardLocations:
        request = StepPartsRequest(job, group, tuple(parts), item_sizes)
        return self._store.run(methods.STEP_PARTS, request, timeout_s=_ADOPTION_S)


class NodeAgentClient:
    """A :class:`~tieredckpt.agent.agent_api.NodeAgentAPI` behind the agent's socket."""

    def __init__(self, settings: Settings, job: str) -> None:
        place = settings.agent_place
        self.place = place
        command, environ = agent_command(settings), agent_environment()
        self._embedded = settings.agent.embedded
        self._connect_existing: AgentConnector = partial(connect_to_agent, place.socket, named=place.explicit)
        self._connector: AgentConnector = (
            partial(connect_or_launch_agent, place, command, environ=environ)
            if self._embedded
            else self._connect_existing
        )
        self._replace = partial(replace_hung_agent if self._embedded else raise_if_agent_hangs, place)
        self._watching = False
        if settings.enabled and self._embedded and is_local_rank_zero():
            warn_unless_in_memory(settings.agent_directory)
        self.store = _open_client(place, self._connector, job, self._replace)
        self.steps = ClientStepReader(self.store)

    def watch_agent(self) -> None:
        """Restart the agent when it dies and replace it when it hangs, from now on and also between calls.

        The process of this node that holds the lock does this.
        """
        if self._embedded and not self._watching:
            with contextlib.suppress(PeerStoreError, OSError):  # the next save retries
                agent_watchdogs.acquire(self.place, self._connector, self._replace)
                self._watching = True

    def stop_watching_agent(self) -> None:
        if self._watching:
            self._watching = False
            agent_watchdogs.release(self.place)

    def configure(self, job: str, durable: DurableSettings, *, check: DurableCheck = "none") -> None:
        self.store.run(methods.CONFIGURE, ConfigureRequest(job, durable, check))

    def check_durable(self, job: str) -> None:
        self.store.run(methods.CHECK_DURABLE, AgentJobRequest(job), timeout_s=_ADOPTION_S)

    def list_steps(self, job: str, *, fresh: bool = False, patience_s: float = 0.0) -> StepInventory:
        request = ListStepsRequest(job, fresh, patience_s)
        return self.store.run(methods.LIST_STEPS, request, timeout_s=patience_s + _ADOPTION_S)

    def quarantine(self, job: str, group: VersionId, reason: str) -> None:
        self.store.run(methods.QUARANTINE, QuarantineRequest(job, group, reason))

    def unquarantine(self, job: str, group: VersionId) -> None:
        self.store.run(methods.UNQUARANTINE, UnquarantineRequest(job, group))

    def drop_steps(
        self, job: str, groups: Sequence[VersionId], *, durable: bool = True, superseded: bool = False
    ) -> None:
        request = DropStepsRequest(job, tuple(groups), durable, superseded)
        self.store.run(methods.DROP_STEPS, request, timeout_s=_DROP_S)

    def report_load_started(self, job: str, group: VersionId, rank: int) -> None:
        self.store.run(methods.LOAD_STARTED, LoadStartedRequest(job, group, rank))

    def report_restored(self, job: str, group: VersionId, *, goes_on: bool) -> None:
        self.store.run(methods.STEP_RESTORED, StepRestoredRequest(job, group, goes_on=goes_on))

    def report_load_ended(self, job: str, *, stepped: bool) -> None:
        if stepped:
            self.store.run(methods.LOAD_ENDED, LoadEndedRequest(job, stepped), timeout_s=_HINT_S)
        else:  # a process that exits must not start an agent for this report
            self.store.notify(methods.LOAD_ENDED.name, LoadEndedRequest(job, stepped), timeout_s=_HINT_S)

    def drain_status(self, job: str) -> tuple[DrainStatus, ...]:
        return self.store.run(methods.DRAIN_STATUS, AgentJobRequest(job), timeout_s=_ADOPTION_S)

    def wait_durable(
        self, job: str, group: VersionId | None, timeout_s: float, *, before: int | None = None
    ) -> DrainStatus | None:
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.0, deadline - time.monotonic())
            request = WaitDurableRequest(job, group, min(remaining_s, MAX_AGENT_WAIT_S), before)
            status = self.store.run(methods.WAIT_DURABLE, request, within_s=max(_SLACK_S, request.timeout_s))
            if status is None or status.state not in ("waiting", "running") or remaining_s <= MAX_AGENT_WAIT_S:
                return status

    def join_peers(self, job: str, plan: JobPeersConfig) -> None:
        self.store.run(methods.JOIN, JoinPeersRequest(job, plan))

    def this_node(self) -> PeerNode | None:
        return self.store.run(methods.THIS_NODE, EmptyRequest())

    def known_peers(self, job: str) -> KnownPeers | None:
        return self.store.run(methods.KNOWN_PEERS, AgentJobRequest(job))

    def peer_credentials(self, job: str) -> ReaderCredentials | None:
        return self.store.run(methods.PEER_CREDENTIALS, AgentJobRequest(job))

    def cluster_status(self, job: str) -> ClusterStatus:
        return self.store.run(methods.CLUSTER, AgentJobRequest(job), timeout_s=_ADOPTION_S)

    def replication_status(
        self, key: ShardKey, *, copies: int = 0, domains: int = 0, timeout_s: float = 0.0
    ) -> ShardReplication:
        deadline = time.monotonic() + timeout_s
        while True:
            remaining_s = max(0.0, deadline - time.monotonic())
            request = ShardReplicationRequest(key, copies, domains, min(remaining_s, MAX_AGENT_WAIT_S))
            within_s = max(_SLACK_S, request.timeout_s)
            status: ShardReplication = self.store.run(methods.REPLICATION_STATUS, request, within_s=within_s)
            if remaining_s <= MAX_AGENT_WAIT_S or (status.copies >= copies and status.domains >= domains):
                return status

    def add_metrics(self, job: str, values: Mapping[str, float]) -> ProtectionStatus | None:
        request = AddMetricsRequest(job, dict(values))
        status: ProtectionStatus | None = self.store.notify(
            methods.OBSERVE.name,
            request,
            timeout_s=_HINT_S,
            seek=self._connect_existing,
            answer=ProtectionStatus | None,
        )
        return status

    def close(self) -> None:
        self.stop_watching_agent()
        self.store.close()


_unreachable: dict[Path, float] = {}
"""Monotonic time at which this process last waited for a socket without an answer."""


def _open_client(place: AgentPaths, connector: AgentConnector, job: str, replace: Callable[[], bool]) -> Client:
    """Return a client. It waits for an agent only once, because a training loop retries with every save."""
    waited = time.monotonic() - _unreachable.get(place.socket, -math.inf) < _WAIT_AGAIN_S
    try:
        client = Client(
            connector, job=job, errors=errors_by_name(), retry_s=0.0 if waited else _RETRY_S, replace=replace
        )
    except AgentUnreachableError:
        _unreachable[place.socket] = time.monotonic()
        raise
    _unreachable.pop(place.socket, None)
    return client


def agent_command(settings: Settings, *, detach: bool = True, linger: bool = True) -> list[str]:
    """Return the command that starts an agent with these settings."""
    agent = settings.agent
    command = [sys.executable, "-m", "tieredckpt.agent", "--dir", str(settings.agent_directory)]
    command += ["--cluster-config", ""]  # these settings already include the cluster's
    command += ["--budget", agent.budget, "--slots-per-part", str(agent.slots_per_rank)]
    command += ["--burst-slots", str(agent.burst_slots), "--job-ttl-s", str(agent.job_ttl_s), "--http", agent.http]
    command += ["--node", agent.node, "--peers", agent.peers, "--labels", agent.labels]
    command += ["--interface", agent.interface, "--tls", agent.tls, "--transport", agent.transport]
    command += memory_service_arguments(agent.memory_service_options)
    if linger:
        command += ["--linger-s", str(agent.linger_s)]
    return command + (["--detach"] if detach else [])


def file_system_type(path: Path) -> str:
    """Return the type of the file system that ``path`` is on, as the kernel names it."""
    best, kind = -1, "unknown"
    real = path.resolve()
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            point, found = line.split()[1:3]
            if real.is_relative_to(point) and len(point) >= best:
                best, kind = len(point), found
    return kind


@functools.cache  # warn once per process
def warn_unless_in_memory(directory: Path) -> None:
    """Log a warning if the agent's directory is on a disk."""
    kind = file_system_type(directory)
    if kind not in _MEMORY_FILE_SYSTEMS:
        log.warning(
            "agent.directory %s is on %s and not on tmpfs, so that saves and restores have the speed of a disk. Use a "
            "directory below /dev/shm",
            *(directory, kind),
        )


def agent_environment() -> dict[str, str]:
    """Return the agent's environment.

    The agent runs in ``/``, so PYTHONPATH names this package's location.
    """
    root = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{known}" if known else root}
