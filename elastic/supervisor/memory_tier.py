"""The memory tier's node agent under a supervisor, and the steps that agents still hold when a job ends."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from elastic.control.child_processes import last_line, with_import_path
from elastic.control.run_directory import RunDirectory
from elastic.control.running_clock import since_boot
from elastic.world.world_state import SealedStep
from peerstore.errors import PeerStoreError
from peerstore.membership.topology import PeerNode
from peerstore.server.agent_launcher import connect_or_launch_agent, replace_hung_agent, signal_agent
from peerstore.server.store_client import Client, connect_to_agent
from peerstore.settings import AgentPaths
from peerstore.shard_records import JobStatus, VersionId
from tieredckpt.agent.agent_api import AcceptStandbyRequest, IsolateRequest, StepInventory
from tieredckpt.agent.agent_client import NodeAgentClient, agent_command, agent_watchdogs
from tieredckpt.agent.local_agents import newest_version
from tieredckpt.agent.peer_config import DISCOVERY_WORLD, is_unreplicated, peer_secret
from tieredckpt.agent.stopped_step import StoppedStep, record_stopped_step
from tieredckpt.errors import SettingsError, TieredCheckpointError
from tieredckpt.memory_service_options import MEMORY_SERVICE_JOB
from tieredckpt.resolve_step import Tier
from tieredckpt.settings import Settings, load_settings, override_settings

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_RETRY_S = 1.0


class MemoryTierProcess:
    """An agent that answers already is used. One that was started here outlives the supervisor that is killed.

    While this is open, a connection tells the agent that it is needed: a node that waits outside the world has nobody
    else who does, and an agent that nobody needs leaves after a while. It is looked after here, and by no rank: this
    begins before them, and they end with it.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        job: Path | None = None,
        *,
        stop: threading.Event | None = None,
    ) -> None:
        """An agent in ``job``, the job's own directory, is for nobody else: it ends with it, whoever started it.

        ``stop`` ends the attempts to start it.
        """
        self._environ, self._job = environ, job
        self._stop = stop or threading.Event()
        self._began_ns = time.time_ns()
        self._mine: AgentPaths | None = None
        self._place: AgentPaths | None = None
        """Of the agent that is looked after."""
        self._on_offered: Callable[[PeerNode], None] | None = None

    def start(self, on_failure: Callable[[str], None] | None = None) -> None:
        """Start the agent of this node, now and whenever it has died.

        ``on_failure`` receives the reason if its settings are wrong or several attempts in a row fail.
        """
        try:
            settings = load_settings(self._environ)
            if not (settings.enabled and settings.agent.embedded):
                return
            place = settings.agent_place
            launch = partial(
                connect_or_launch_agent, place, agent_command(settings), environ=with_import_path(self._environ)
            )
            try:
                connect_to_agent(place.socket, named=place.explicit).close()
            except PeerStoreError:
                self._mine = place
            if self._job is not None and self._job in place.directory.parents:
                self._mine = place
                self._began_ns = 0  # all it has is of this job, also what was sealed under an earlier supervisor

            def begin() -> None:
                launch().close()
                relaunch = self._relaunching(launch, on_failure)
                agent_watchdogs.acquire(place, relaunch, partial(replace_hung_agent, place))

            if self._started(begin, on_failure):
                self._place = place
                self._offer()
        except SettingsError as error:
            log.error("the node agent was not started: %s", error)
            if on_failure is not None:
                on_failure(f"its settings are wrong: {last_line(str(error))}")
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            log.warning("the node agent was not started: %s", error)

    def _started(self, begin: Callable[[], None], on_failure: Callable[[str], None] | None) -> bool:
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

    def _relaunching(
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
            self._offer()
            return sock

        return relaunch

    def offer_memory(self, on_offered: Callable[[PeerNode], None]) -> None:
        """Let the agent accept replicas of the job's steps, from nodes that prove the job's ``peer.secret``.

        ``on_offered`` receives the agent's address, again after each restart of the agent.
        """
        self._on_offered = on_offered
        self._offer()

    def _offer(self) -> None:
        place, on_offered = self._place, self._on_offered
        if place is None or on_offered is None:
            return
        try:
            peer = load_settings(self._environ).peer
            if peer.discovery != DISCOVERY_WORLD or is_unreplicated(peer) or not peer.secret:
                return
            request = AcceptStandbyRequest(peer_secret(peer))
            with contextlib.closing(
                Client(partial(connect_to_agent, place.socket, named=place.explicit), retry_s=0.0)
            ) as client:
                node = client.call("accept_standby", request, PeerNode | None)
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            log.warning("the node agent does not accept replicas of the job: %s", error)
            return
        if node is not None:
            on_offered(node)

    def partition(self, seconds: float) -> None:
        """Have it reach no other node's agent for so long. One that other jobs use as well is left alone."""
        place = self._place
        if place is None or not self._environ.get("TIEREDCKPT_AGENT_DIRECTORY"):
            return
        try:
            with contextlib.closing(
                Client(partial(connect_to_agent, place.socket, named=place.explicit), retry_s=0.0)
            ) as client:
                client.call("isolate", IsolateRequest(seconds), type(None))
        except PeerStoreError as error:
            log.warning("the node agent was not cut off: %s", error)

    def shut_down(self) -> None:
        """The job has succeeded: what the durable tier has of it need not be in memory, and nobody needs the agent."""
        needed = self._place is not None and not self._released()
        self.close()
        if self._mine is not None and not needed:
            signal_agent(self._mine, signal.SIGTERM)
            self._mine = None

    def _released(self) -> bool:
        try:
            return release_job_memory(self._environ, self._began_ns)
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            log.warning("what is in memory of this job stays there: %s", error)
            return True

    def close(self) -> None:
        """Whoever else needs the agent says so."""
        place, self._place = self._place, None
        if place is not None:
            agent_watchdogs.release(place)

    @property
    def kept_directory(self) -> Path | None:
        """Where an agent that was started here keeps what it has."""
        return None if self._mine is None else self._mine.directory


def shut_down_left_agent(environ: Mapping[str, str], job: Path) -> None:
    """Shut down the job's own agent that a killed supervisor left, as its supervisor would after a success."""
    try:
        settings = load_settings(environ)
        place = settings.agent_place
        if not (settings.enabled and settings.agent.embedded) or job not in place.directory.parents:
            return
        try:
            connect_to_agent(place.socket, named=place.explicit).close()
        except PeerStoreError:  # it has ended, too
            return
        if release_job_memory(environ, 0):
            signal_agent(place, signal.SIGTERM)
    except (TieredCheckpointError, PeerStoreError, OSError) as error:
        log.warning("the agent of a killed supervisor continues to run: %s", error)


_UPLOADED_S = 60.0
"""How long uploads are waited for."""
_GOODBYE_S = 5.0
"""By then the agent has noticed that this node's ranks have ended."""
_LOOK_S = 0.1


class JobMemory(NamedTuple):
    """What one node has of a job."""

    versions: Collection[VersionId]
    pinned: Collection[VersionId]
    used: bool
    """A process takes part in the job again."""


def reason_to_keep(held: JobMemory, survey: StepInventory) -> str:
    """Why the job's memory on this node stays; "" where nothing of it is needed. Pure.

    What other nodes have is not asked: this node's part of a step may go when that step, or a newer one, is durable.
    """
    if held.used:
        return "it has been started again"
    if held.pinned:
        return f"step {max(group.version for group in held.pinned)} is pinned"
    if survey.durable is None:
        return "it has no durable tier"
    if Tier.DURABLE in survey.unreachable:
        return f"the durable tier could not be asked: {survey.unreachable[Tier.DURABLE]}"
    durable = max(
        (view.version_id.version for view in survey.views if view.durable and not view.quarantined), default=-1
    )
    newest = max((group.version for group in held.versions), default=-1)
    return f"step {newest} is not in the durable tier" if newest > durable else ""


def release_job_memory(environ: Mapping[str, str], since_ns: int) -> bool:
    """Of every job that has saved since then. Whether nobody needs the agent any more."""
    agent = NodeAgentClient(override_settings(load_settings(environ), agent={"embedded": False}), "")
    deadline = time.monotonic() + _UPLOADED_S
    try:
        jobs = [
            one for one in agent.store.status().jobs if one.job != MEMORY_SERVICE_JOB and (one.versions or one.clients)
        ]
        return all(_release(agent, one.job, since_ns, deadline) for one in jobs)
    finally:
        agent.close()


def _release(agent: NodeAgentClient, job: str, since_ns: int, deadline: float) -> bool:
    """Whether nobody takes part in it."""
    facts = agent.store.list_shards(job)
    if any(fact.sealed_ns >= since_ns for fact in facts):
        _wait_while(lambda: _is_used(agent, job), min(deadline, time.monotonic() + _GOODBYE_S))
        _wait_while(lambda: _is_uploading(agent, job) and not _is_used(agent, job), deadline)
        held = _held(agent, job)
        if _is_uploading(agent, job):
            why = "it is being uploaded still"
        else:
            why = reason_to_keep(held, agent.list_steps(job, fresh=True))
        if not why:
            # By name: what somebody saves from here on is not among them.
            agent.store.delete_versions(job, sorted(held.versions))
        elif held.versions and not held.used:
            log.warning("the checkpoints of %s stay in memory in %s: %s", job, agent.place.directory, why)
    return not _is_used(agent, job)


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


def _wait_while(holds: Callable[[], bool], deadline: float) -> None:
    while holds() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _is_uploading(agent: NodeAgentClient, job: str) -> bool:
    return any(one.state in ("waiting", "running") for one in agent.drain_status(job))


def _held(agent: NodeAgentClient, job: str) -> JobMemory:
    groups = {fact.key.version_id for fact in agent.store.list_shards(job)}
    return JobMemory(groups, groups & agent.store.retained(job), _is_used(agent, job))


def _is_used(agent: NodeAgentClient, job: str) -> bool:
    return any(one.clients for one in _of(agent, job))


def _of(agent: NodeAgentClient, job: str) -> list[JobStatus]:
    return [one for one in agent.store.status().jobs if one.job == job]


def resumable_steps(environs: Iterable[Mapping[str, str]], since_ns: int, run: RunDirectory) -> dict[str, int]:
    """Return the newest complete step of each checkpointed job that the elastic job of ``run`` resumes from.

    Those are the jobs that saved or loaded a step since ``since_ns``. If there is none, they are the jobs of agents
    that no other elastic job uses, and the one that has the name of the elastic job. ``environs`` are the environments
    of the supervisors of this machine. Agents that do not answer add nothing.
    """
    found: dict[str, int] = {}
    earlier: dict[str, int] = {}
    for environ in environs:
        try:
            settings = load_settings(environ)
            if not settings.enabled:
                continue
            is_own = run.directory in settings.agent_place.directory.parents
            for job, (step, recent) in _on_node(settings, since_ns).items():
                if recent:
                    found[job] = max(step, found.get(job, -1))
                elif is_own or job == run.job:
                    earlier[job] = max(step, earlier.get(job, -1))
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            log.info("which step is there was not asked of every node: %s", error)
    return found or earlier


def newest_step_holders(environs: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """Return the nodes of this machine whose agents hold the newest complete step of a job, by node name.

    ``environs`` are the environments of the nodes' supervisors. Without an agent that answers the result is empty.
    """
    steps: dict[str, dict[str, int]] = {}
    for node, environ in environs.items():
        try:
            settings = load_settings(environ)
            if not settings.enabled:
                continue
            connect_to_agent(settings.agent_place.socket).close()  # a client would retry for seconds
            steps[node] = {job: step for job, (step, _) in _on_node(settings, 0).items()}
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            log.info("the steps in memory of node %s are unknown: %s", node, error)
    newest: dict[str, int] = {}
    for held in steps.values():
        for job, step in held.items():
            newest[job] = max(step, newest.get(job, -1))
    return tuple(node for node, held in steps.items() if held and all(held.get(job) == newest[job] for job in newest))


def began_ns(boot_s: float, wall_ns: int, *, wall: Callable[[], int] = time.time_ns) -> int:
    """When a job began that did at these times, as clocks say that may have gone back meanwhile."""
    return min(wall_ns, wall() - int((since_boot() - boot_s) * 1e9))


def describe_resumable(steps: Mapping[str, int]) -> str:
    """Return the steps in words; empty for none."""
    if len(steps) == 1:
        return f"step {next(iter(steps.values()))}"
    return ", ".join(f"step {step} of {job}" for job, step in sorted(steps.items()))


def _on_node(settings: Settings, since_ns: int) -> dict[str, tuple[int, bool]]:
    """Return the newest complete step of every job, and whether the job saved or loaded one since then."""
    agent = NodeAgentClient(override_settings(settings, agent={"embedded": False}), "")
    try:
        jobs = [
            one.job
            for one in agent.store.status().jobs
            if (one.versions or one.clients) and one.job != MEMORY_SERVICE_JOB
        ]
        surveys = {job: agent.list_steps(job, fresh=True) for job in jobs}
    finally:
        agent.close()
    return {
        job: (step, any(view.candidate.saved_ns >= since_ns for view in survey.views))
        for job, survey in surveys.items()
        if (step := newest_restorable_step(survey)) >= 0
    }


def newest_restorable_step(survey: StepInventory) -> int:
    """The step that a load which names none would choose; -1 for none."""
    chosen = newest_version(survey)
    return -1 if chosen is None else chosen.version
