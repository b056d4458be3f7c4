"""The node agent under a supervisor, and the steps in its memory when a job ends."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from elastic.control.child_processes import last_line, with_import_path
from elastic.control.run_directory import RunDirectory
from elastic.control.running_clock import since_boot
from elastic.world.world_state import SealedStep, StepHolders
from peerstore.client.agent_launcher import connect_or_launch_agent, replace_hung_agent, signal_agent, silence_of_agent
from peerstore.client.store_client import Client
from peerstore.errors import AgentUnreachableError, PeerStoreError, ShardNotFoundError
from peerstore.membership.topology import PeerNode
from peerstore.settings import AgentPaths
from peerstore.shard_records import JobStatus, ShardInfo, VersionId
from peerstore.store.slot_metadata import jobs_in_directory
from peerstore.transport.unix import connect_to_agent
from tieredckpt.agent import agent_methods as methods
from tieredckpt.agent.agent_api import DURABLE_SETTINGS_BLOB, ClusterNode
from tieredckpt.agent.agent_client import NodeAgentClient, agent_command, agent_watchdogs
from tieredckpt.agent.peer_config import DISCOVERY_WORLD, is_unreplicated, peer_secret
from tieredckpt.agent.stopped_step import StoppedStep, record_stopped_step
from tieredckpt.errors import CheckpointDamagedError, SettingsError, TieredCheckpointError
from tieredckpt.format.manifest import decode_meta
from tieredckpt.memory_service_options import jobs_in_use
from tieredckpt.resolve_step import Tier
from tieredckpt.settings import Settings, load_settings, override_settings
from tieredckpt.step_inventory import StepInventory

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_RETRY_S = 1.0


class MemoryTierProcess:
    """The node agent of one supervisor: start, restart, shutdown.

    An agent that already runs is used. An agent that was started here outlives a killed supervisor.

    While this object is open, it holds a connection to the agent, which would exit after a while without one. On a node
    outside the world no rank holds such a connection. The supervisor restarts the agent, not the ranks: it starts
    before them and they end with it.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        job: Path | None = None,
        *,
        stop: threading.Event | None = None,
    ) -> None:
        """Prepare the agent that ``environ`` configures.

        ``job`` is the job's own directory. An agent in it belongs to this job alone and ends with it, even if another
        process started the agent. ``stop`` ends the attempts to start the agent.
        """
        self._environ, self._job = environ, job
        self._stop = stop or threading.Event()
        self._since_ns = time.time_ns()
        self._owned_paths: AgentPaths | None = None
        """Paths of the agent to shut down when the job succeeds; ``None`` if it may serve other jobs."""
        self._paths: AgentPaths | None = None
        """Paths of the agent that this object holds a connection to and restarts."""
        self._on_offered: Callable[[PeerNode], None] | None = None

    def start(self, on_failure: Callable[[str], None] | None = None) -> None:
        """Start the agent of this node, and restart it whenever it dies.

        ``on_failure`` receives the reason if the agent's settings are wrong or several attempts in a row fail.
        """
        try:
            settings = load_settings(self._environ)
            if not (settings.enabled and settings.agent.embedded):
                return
            paths = settings.agent_place
            launch = partial(
                connect_or_launch_agent, paths, agent_command(settings), environ=with_import_path(self._environ)
            )
            try:
                connect_to_agent(paths.socket, named=paths.explicit).close()
            except PeerStoreError:
                self._owned_paths = paths
            if self._job is not None and self._job in paths.directory.parents:
                self._owned_paths = paths
                self._since_ns = 0  # all its shards belong to this job, also those sealed under an earlier supervisor

            def begin() -> None:
                launch().close()
                relaunch = self._reporting_launch(launch, on_failure)
                agent_watchdogs.acquire(paths, relaunch, partial(replace_hung_agent, paths))

            if self._start_with_retries(begin, on_failure):
                self._paths = paths
                self._accept_standby()
        except SettingsError as error:
            log.error("the node agent was not started: %s", error)
            if on_failure is not None:
                on_failure(f"its settings are wrong: {last_line(str(error))}")
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            log.warning("the node agent was not started: %s", error)

    def _start_with_retries(self, begin: Callable[[], None], on_failure: Callable[[str], None] | None) -> bool:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                begin()
            except (PeerStoreError, OSError) as error:
                log.warning("the node agent did not start (attempt %d of %d): %s", attempt, _ATTEMPTS, error)
                reason = last_line(str(error))
            else:
                return True
            if attempt < _ATTEMPTS and self._stop.wait(_RETRY_S):
                return False
        if on_failure is not None and not self._stop.is_set():
            on_failure(f"its node agent did not start in {_ATTEMPTS} attempts: {reason}")
        return False

    def _reporting_launch(
        self, launch: Callable[[], socket.socket], on_failure: Callable[[str], None] | None
    ) -> Callable[[], socket.socket]:
        """Return ``launch``, which reports the last of several failures in a row to ``on_failure``."""
        failures = 0

        def relaunch() -> socket.socket:
            nonlocal failures
            try:
                sock = launch()
            except (PeerStoreError, OSError) as error:
                failures += 1
                if failures <= _ATTEMPTS:
                    log.warning(
                        "the node agent has died and did not restart (%d of %d): %s", failures, _ATTEMPTS, error
                    )
                if failures == _ATTEMPTS and on_failure is not None and not self._stop.is_set():
                    on_failure(
                        f"its node agent died and did not restart in {_ATTEMPTS} attempts: {last_line(str(error))}"
                    )
                raise
            failures = 0
            self._accept_standby()
            return sock

        return relaunch

    def offer_memory(self, on_offered: Callable[[PeerNode], None]) -> None:
        """Let the agent accept replicas of the job's steps, from nodes that prove the job's ``peer.secret``.

        ``on_offered`` receives the agent's address, again after each restart of the agent.
        """
        self._on_offered = on_offered
        self._accept_standby()

    def _accept_standby(self) -> None:
        paths, on_offered = self._paths, self._on_offered
        if paths is None or on_offered is None:
            return
        try:
            peer = load_settings(self._environ).peer
            if peer.discovery != DISCOVERY_WORLD or is_unreplicated(peer) or not peer.secret:
                return
            request = methods.AcceptStandbyRequest(peer_secret(peer))
            with contextlib.closing(
                Client(partial(connect_to_agent, paths.socket, named=paths.explicit), retry_s=0.0)
            ) as client:
                node = client.run(methods.ACCEPT_STANDBY, request)
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            log.warning("the node agent does not accept replicas of the job: %s", error)
            return
        if node is not None:
            on_offered(node)

    def partition(self, seconds: float) -> None:
        """Isolate the agent from other nodes' agents for ``seconds``, unless other jobs use the agent as well."""
        paths = self._paths
        if paths is None or not self._environ.get("TIEREDCKPT_AGENT_DIRECTORY"):
            return
        try:
            with contextlib.closing(
                Client(partial(connect_to_agent, paths.socket, named=paths.explicit), retry_s=0.0)
            ) as client:
                client.run(methods.ISOLATE, methods.IsolateRequest(seconds))
        except PeerStoreError as error:
            log.warning("the node agent was not cut off: %s", error)

    def shut_down(self) -> None:
        """Free the memory of a job that succeeded, and stop the agent.

        Steps that the durable tier lacks remain in memory, and the agent continues to serve them until they expire. It
        also continues if a process uses it, or if it was not started for this job.
        """
        needed = self._paths is not None and not self._release_memory()
        self.close()
        if self._owned_paths is not None and not needed:
            signal_agent(self._owned_paths, signal.SIGTERM)
            self._owned_paths = None

    def _release_memory(self) -> bool:
        try:
            return release_job_memory(self._environ, self._since_ns)
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            log.warning("cannot release the checkpoints of this job from memory: %s", error)
            return True

    def close(self) -> None:
        """Close the connection to the agent. The agent continues to run while other processes use it."""
        paths, self._paths = self._paths, None
        if paths is not None:
            agent_watchdogs.release(paths)

    @property
    def kept_directory(self) -> Path | None:
        """Data directory of the agent that belongs to this job, or ``None`` if it has none."""
        return None if self._owned_paths is None else self._owned_paths.directory


def shut_down_left_agent(environ: Mapping[str, str], job: Path) -> None:
    """Shut down the job's own agent after a success, in place of a supervisor that was killed."""
    try:
        settings = load_settings(environ)
        paths = settings.agent_place
        if not (settings.enabled and settings.agent.embedded) or job not in paths.directory.parents:
            return
        try:
            connect_to_agent(paths.socket, named=paths.explicit).close()
        except PeerStoreError:  # the agent has exited, too
            return
        if release_job_memory(environ, 0):
            signal_agent(paths, signal.SIGTERM)
    except (TieredCheckpointError, PeerStoreError, OSError) as error:
        log.warning("the agent of a killed supervisor continues to run: %s", error)


_UPLOADED_S = 60.0
"""Seconds to wait for uploads when a job ends."""
_RELEASED_S = 15.0
"""Seconds that a node without ranks waits until the others have deleted the durable steps."""
_RANKS_LEFT_S = 5.0
"""Seconds that the agent may take to notice that this node's ranks have exited."""
_POLL_S = 0.1


class JobMemory(NamedTuple):
    """Versions of a job that one node holds in memory."""

    versions: Collection[VersionId]
    pinned: Collection[VersionId]
    used: bool
    """Whether a process uses the job's memory."""


def reason_to_keep(held: JobMemory, survey: StepInventory) -> str:
    """Return why this node must retain the job's memory, or "" if it may free it. Pure.

    Other nodes do not matter: this node may delete its shards of a step when that step, or a newer one, is durable.
    """
    if held.used:
        return "it has been started again"
    if held.pinned:
        return f"step {max(version_id.version for version_id in held.pinned)} is pinned"
    if survey.durable is None:
        return "it has no durable tier"
    if Tier.DURABLE in survey.unreachable:
        return f"the durable tier does not answer: {survey.unreachable[Tier.DURABLE]}"
    durable = max(
        (view.version_id.version for view in survey.views if view.durable and not view.quarantined), default=-1
    )
    newest = max((version_id.version for version_id in held.versions), default=-1)
    return f"step {newest} is not in the durable tier" if newest > durable else ""


def release_job_memory(environ: Mapping[str, str], since_ns: int) -> bool:
    """Free the memory of every job that has sealed a shard since ``since_ns``, after its uploads.

    Return whether the agent can stop: no process uses it, and no steps remain in its memory.
    """
    agent = NodeAgentClient(override_settings(load_settings(environ), agent={"embedded": False}), "")
    deadline = time.monotonic() + _UPLOADED_S
    try:
        for status in jobs_in_use(agent.store.status().jobs):
            _release(agent, status.job, since_ns, deadline)
        return not jobs_in_use(agent.store.status().jobs)
    finally:
        agent.close()


def _release(agent: NodeAgentClient, job: str, since_ns: int, deadline: float) -> None:
    """Delete the job's versions if none must be retained."""
    shards = agent.store.list_shards(job)
    if any(shard.sealed_ns >= since_ns for shard in shards):
        _wait_while(lambda: _has_clients(agent, job), min(deadline, time.monotonic() + _RANKS_LEFT_S))
        _wait_while(lambda: bool(_unfinished_uploads(agent, job)) and not _has_clients(agent, job), deadline)
        memory = _job_memory(agent, job)
        late = _unfinished_uploads(agent, job)
        if not late and not _knows_durable_tier(agent, job, shards) and _wait_deleted_elsewhere(agent, job, memory):
            reason = ""
        else:
            survey = agent.list_steps(job, fresh=True)
            reason = reason_to_keep(memory, survey)
            durable = {view.version_id for view in survey.views if view.durable}
            late = [group for group in late if group not in durable]  # another node may have committed the step
            if reason and late:
                reason = "it is being uploaded still"
            if not reason and any(_is_first_part(shard) for shard in shards if shard.key.version_id in durable):
                _delete_everywhere(agent, job, sorted(durable & set(memory.versions)))
        if not reason:
            if late:
                steps = ", ".join(str(group.version) for group in late)
                log.warning("%s: the upload of step %s did not finish; a newer step is durable", job, steps)
            # By name: versions that another process saves from now on must survive.
            agent.store.versions.delete(job, sorted(memory.versions))
        elif memory.versions and not memory.used:
            log.warning("the checkpoints of %s remain in %s: %s", job, agent.place.directory, reason)


def _knows_durable_tier(agent: NodeAgentClient, job: str, shards: Collection[ShardInfo]) -> bool:
    """Return whether ranks of this node have saved shards, or have configured a durable tier."""
    try:
        agent.store.blobs.get(job, DURABLE_SETTINGS_BLOB)
    except ShardNotFoundError:
        return any(not shard.holders for shard in shards)
    return True


def _wait_deleted_elsewhere(agent: NodeAgentClient, job: str, memory: JobMemory) -> bool:
    """Wait until another node has deleted all versions of ``memory``, and return whether that happened.

    The wait ends early if no other node answers, or none of them will delete anything. Pinned versions and those in use
    remain.
    """
    if memory.used or memory.pinned or not memory.versions:
        return False

    def is_pending() -> bool:
        if not _job_memory(agent, job).versions:
            return False
        status = agent.cluster_status(job)
        others = [one for one in status.nodes if one.node.id != status.this_node and not one.unreachable]
        return bool(others) and may_be_freed(others)

    _wait_while(is_pending, time.monotonic() + _RELEASED_S)
    return not _job_memory(agent, job).versions


def may_be_freed(nodes: Iterable[ClusterNode]) -> bool:
    """Return whether the nodes that wrote the newest step may delete it. Pure.

    A node deletes its shards only if its newest step is durable.
    """
    written = [shard for node in nodes for shard in node.shards if not shard.holders]
    newest = max((shard.key.version_id for shard in written), default=None)
    return newest is None or any(_is_to_be_durable(one) for one in written if one.key.version_id == newest)


def _is_to_be_durable(shard: ShardInfo) -> bool:
    try:
        return decode_meta(shard.meta).durable
    except CheckpointDamagedError:  # unknown
        return True


def _is_first_part(shard: ShardInfo) -> bool:
    """Return whether the shard is a version's first part, written on this node. One node has it."""
    return shard.key.part == 0 and not shard.holders


def _delete_everywhere(agent: NodeAgentClient, job: str, versions: Sequence[VersionId]) -> None:
    """Delete durable versions from all nodes, and older ones from nodes with replicas only."""
    try:
        agent.drop_steps(job, versions, durable=False, superseded=True)
    except (TieredCheckpointError, PeerStoreError) as error:  # other nodes have exited, with or without these versions
        log.info("%s", error)


def record_stop(environ: Mapping[str, str], sealed: SealedStep) -> None:
    """Record with this node's agent the step that the ranks sealed before the job was stopped."""
    try:
        settings = load_settings(environ)
        if settings.enabled:
            agent = NodeAgentClient(override_settings(settings, agent={"embedded": False}), "")
            with contextlib.closing(agent):
                record_stopped_step(agent, sealed.job, StoppedStep(sealed.epoch, sealed.step))
    except (TieredCheckpointError, PeerStoreError, OSError) as error:
        log.warning(
            "the agent of this node did not record that job %s was stopped after step %d: %s. The next run finds the "
            "record only on the other nodes",
            *(sealed.job, sealed.step, error),
        )


def _wait_while(condition: Callable[[], bool], deadline: float) -> None:
    while condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _unfinished_uploads(agent: NodeAgentClient, job: str) -> list[VersionId]:
    return sorted(one.version_id for one in agent.drain_status(job) if one.state in ("waiting", "running"))


def _job_memory(agent: NodeAgentClient, job: str) -> JobMemory:
    versions = {shard.key.version_id for shard in agent.store.list_shards(job)}
    return JobMemory(versions, versions & agent.store.versions.retained(job), _has_clients(agent, job))


def _has_clients(agent: NodeAgentClient, job: str) -> bool:
    return any(status.clients for status in _job_statuses(agent, job))


def _job_statuses(agent: NodeAgentClient, job: str) -> list[JobStatus]:
    return [status for status in agent.store.status().jobs if status.job == job]


class ResumableSteps(NamedTuple):
    """Newest complete step of each checkpointed job, and the number of agents that may have a newer one."""

    by_job: dict[str, int]
    unanswered: int = 0

    def __str__(self) -> str:
        several = len(self.by_job) > 1
        steps = ", ".join(f"step {step}{f' of {job}' * several}" for job, step in sorted(self.by_job.items()))
        if not steps or not self.unanswered:
            return steps
        return f"{steps} or a later one ({self.unanswered} of this machine's agents did not answer)"


def resumable_steps(environs: Iterable[Mapping[str, str]], since_ns: int, run: RunDirectory) -> ResumableSteps:
    """Return the newest complete step by checkpointed job, for the jobs that ``run`` resumes from.

    Those are the jobs that saved or loaded a step since ``since_ns``. Without any, they are the jobs of the run's own
    agents, and the job with the name of the run. ``environs`` are the environments of this machine's supervisors.
    """
    found: dict[str, int] = {}
    earlier: dict[str, int] = {}
    unanswered = 0
    for environ in environs:
        has_jobs = False
        try:
            settings = load_settings(environ)
            if not settings.enabled:
                continue
            is_own = run.directory in settings.agent_place.directory.parents
            has_jobs = bool(jobs_in_directory(settings.agent_directory))
            for job, (step, recent) in _newest_steps(settings, since_ns).items():
                if recent:
                    found[job] = max(step, found.get(job, -1))
                elif is_own or job == run.job:
                    earlier[job] = max(step, earlier.get(job, -1))
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            unanswered += has_jobs
            log.info("the steps of an agent are unknown: %s", error)
    return ResumableSteps(found or earlier, unanswered)


def newest_step_holders(environs: Mapping[str, Mapping[str, str]]) -> StepHolders:
    """Return the nodes of this machine whose agents have, or may have, the newest complete step.

    ``environs`` are the environments of the nodes' supervisors, by node name.
    """
    steps: dict[str, dict[str, int]] = {}
    unknown: list[str] = []
    for node, environ in environs.items():
        try:
            settings = load_settings(environ)
            if not settings.enabled:
                continue
            if jobs_in_directory(settings.agent_directory):
                unknown.append(node)
            steps[node] = {job: step for job, (step, _) in _newest_steps(settings, 0).items()}
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            log.info("the steps in memory of node %s are unknown: %s", node, error)
    newest: dict[str, int] = {}
    for held in steps.values():
        for job, step in held.items():
            newest[job] = max(step, newest.get(job, -1))
    return StepHolders(
        tuple(node for node, held in steps.items() if held and all(held.get(job) == newest[job] for job in newest)),
        tuple(node for node in unknown if node not in steps),
    )


def began_ns(boot_s: float, wall_ns: int, *, wall: Callable[[], int] = time.time_ns) -> int:
    """Return the wall-clock time in nanoseconds at which a job began.

    ``boot_s`` and ``wall_ns`` are its start by the boot clock and by the wall clock. The earlier result wins, as the
    wall clock may have been set back since.
    """
    return min(wall_ns, wall() - int((since_boot() - boot_s) * 1e9))


def _newest_steps(settings: Settings, since_ns: int) -> dict[str, tuple[int, bool]]:
    """Return each job's newest restorable step, and whether it saved or loaded one since ``since_ns``.

    A dead or stopped agent is an error at once, while a client would retry for seconds.
    """
    if silence := silence_of_agent(settings.agent_place):
        raise AgentUnreachableError(silence)
    agent = NodeAgentClient(override_settings(settings, agent={"embedded": False}), "")
    try:
        jobs = [status.job for status in jobs_in_use(agent.store.status().jobs)]
        surveys = {job: agent.list_steps(job, fresh=True) for job in jobs}
    finally:
        agent.close()
    return {
        job: (step, any(view.candidate.saved_ns >= since_ns for view in survey.views))
        for job, survey in surveys.items()
        if (step := survey.choose(avoid_after=settings.memory.avoid_after_crashed_loads).step) >= 0
    }
