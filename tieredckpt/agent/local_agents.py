"""Agents of this machine that have a job, found by their sockets.

Each simulated node has its own agent.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from peerstore.client.agent_launcher import MAX_IDLE_S, connect_or_launch_agent, silence_of_agent
from peerstore.client.store_client import Client
from peerstore.errors import AgentUnreachableError, PeerStoreError
from peerstore.settings import AgentPaths
from peerstore.shard_records import VersionId
from peerstore.store.slot_metadata import jobs_in_directory
from peerstore.transport.unix import connect_to_agent
from tieredckpt.agent.agent_client import NodeAgentClient, agent_command, agent_environment
from tieredckpt.errors import TieredCheckpointError, TierUnavailableError
from tieredckpt.memory_service_options import MEMORY_SERVICE_JOB, jobs_in_use
from tieredckpt.settings import Settings, override_settings, run_directory
from tieredckpt.step_inventory import StepInventory

log = logging.getLogger(__name__)

_READS_WITHOUT_NEWS = 3
"""Reads of the kernel's list that must show no new agent."""
_STILL_S = 0.25
"""Seconds without running after which the settings' own agent may hang."""


def find_agent_directory(settings: Settings, job: str | None) -> Path:
    """Return the directory of an agent of this machine that has ``job``, or any job for ``None``.

    The settings' agent comes first. Its directory is also returned if no agent has the job, or if it does not answer
    and has recorded the job. An agent with steps of ``job``, even one that does not answer, precedes an agent with only
    a process of it. Otherwise another agent that does not answer is returned only if no other one has ``job``, and an
    exited one only after these.
    """
    own = settings.agent_place.directory
    mine = _query_agent(own, still_s=_STILL_S)
    if _has_steps(mine, job) or (mine.silence and job is None):
        return own
    having = [found for found in (mine, *_query_agents(_other_directories(own))) if _has_job(found, job)]
    directories = [
        found.directory for found in sorted(having, key=lambda one: (not _has_steps(one, job), bool(one.silence)))
    ]
    if not directories and job is not None and job not in _recorded_jobs(own):
        directories = exited_agents_of_simulated_nodes(job)
    return next(iter(directories), own)


def other_agents_with_jobs(settings: Settings) -> list[AgentJobs]:
    """Return the other agents of this machine that have jobs, or recorded jobs and do not answer."""
    return [found for found in _query_agents(_other_directories(settings.agent_directory)) if found.jobs]


def exited_agents_of_simulated_nodes(job: str) -> list[Path]:
    """Return the directories of exited agents of simulated nodes that left steps of ``job`` in memory."""
    exited = set(run_directory().glob("*/*/agent")) - agent_directories()
    return sorted(directory for directory in exited if job in _recorded_jobs(directory))


def describe_exited_agent(directory: Path) -> str:
    """Return that an agent has exited, with the jobs whose steps it left in memory. Empty: it left none."""
    jobs = sorted(job for job in _recorded_jobs(directory) if job != MEMORY_SERVICE_JOB)
    return f"the agent in {directory} has exited and left steps of {', '.join(map(repr, jobs))} in memory" * bool(jobs)


def start_command(directory: Path) -> str:
    """Return the command that starts the agent of ``directory``."""
    return f"`tieredckpt agent --dir {shlex.quote(str(directory))} --detach`"


def settings_of_newest_agent(job: str, settings: Settings) -> Settings:
    """Return the settings with the agent of this machine that has the newest complete step of ``job``.

    An earlier run with simulated nodes leaves an agent for each node. The settings' own agent is used unless one of
    these has a newer step. A configured directory is not changed, and agents in configured directories are never used.
    Exited agents that left steps of the job are started. Raise :class:`TierUnavailableError` if an agent has the job
    and does not answer or cannot be started: its steps may be the newest.
    """
    if settings.agent.directory or not settings.enabled:
        return settings
    own = settings.agent_place.directory
    _start_exited_agents(job, settings)
    simulated = [place for place in _other_directories(own) if place.is_relative_to(run_directory())]
    others: list[Path] = []
    for each in _query_agents(simulated):
        if each.silence and job in each.jobs:
            raise _unknown_steps(job, each.directory, each.silence)
        if each.silence:
            log.warning("%s: the steps of another agent are unknown: %s", job, each.silence)
        elif job in each.jobs:
            others.append(each.directory)
    if not others:
        return settings
    found: dict[Path, StepInventory] = {}
    try:
        if _has_agent(settings):
            found[own] = list_agent_steps(job, settings, own)
    except (PeerStoreError, TieredCheckpointError, OSError) as error:
        log.warning("%s: the agent in %s cannot list its steps, and no other agent is used: %s", job, own, error)
        return settings
    for place in others:
        try:
            found[place] = list_agent_steps(job, settings, place)
        except (PeerStoreError, TieredCheckpointError, OSError) as error:
            raise _unknown_steps(job, place, str(error)) from error
    newest = _newest_version(found.values(), settings)
    if newest is None:
        return settings
    holder = next(place for place, survey in found.items() if newest in {view.version_id for view in survey.views})
    if holder == own:
        return settings
    log.warning("%s: step %d is in memory of the agent in %s, which is used from here on", job, newest.version, holder)
    named = override_settings(settings, agent={"directory": str(holder)})
    node = _node_name(named)
    return override_settings(named, agent={"node": node}) if node and not settings.agent.node else named


def warn_of_steps_elsewhere(job: str, settings: Settings) -> None:
    """Warn if an agent outside the configured directory has a complete step of ``job``."""
    if not settings.agent.directory:
        return
    for each in _query_agents(_other_directories(settings.agent_directory)):
        place = each.directory
        if job not in each.jobs:
            continue
        if each.silence:
            log.warning("%s starts without a checkpoint. %s, and has %r in its memory", job, each.silence, job)
            continue
        try:
            newest = _newest_version([list_agent_steps(job, settings, place)], settings)
        except (PeerStoreError, TieredCheckpointError, OSError) as error:
            log.info("%s: the steps in memory of the agent in %s are unknown: %s", job, place, error)
            continue
        if newest is not None:
            log.warning(
                "%s starts without a checkpoint. The agent in %s has step %d of it, but agent.directory is %s. Set "
                "TIEREDCKPT_AGENT_DIRECTORY=%s to restore that step",
                *(job, place, newest.version, settings.agent_directory, place),
            )


def _start_exited_agents(job: str, settings: Settings) -> None:
    """Start the exited agents of simulated nodes that left steps of ``job``."""
    for directory in exited_agents_of_simulated_nodes(job):
        if not settings.agent.embedded:
            raise TierUnavailableError(
                f"{job}: the newest step is unknown, because {describe_exited_agent(directory)} and agent.embedded is "
                f"off. Start it with {start_command(directory)}"
            )
        node = settings.agent.node or directory.parent.name
        exited = override_settings(settings, agent={"directory": str(directory), "node": node})
        try:
            connect_or_launch_agent(exited.agent_place, agent_command(exited), environ=agent_environment()).close()
        except (PeerStoreError, OSError) as error:
            raise _unknown_steps(
                job, directory, f"the agent in {directory} has exited and cannot be started: {error}"
            ) from error


def _has_agent(settings: Settings) -> bool:
    """Return whether the settings' agent runs; start it if an earlier one has left slots behind."""
    place = settings.agent_place
    try:
        connect_to_agent(place.socket).close()
    except AgentUnreachableError:
        left = place.directory / "slots"
        if not (settings.agent.embedded and left.is_dir() and any(left.iterdir())):
            return False
        connect_or_launch_agent(place, agent_command(settings), environ=agent_environment()).close()
    return True


def list_agent_steps(job: str, settings: Settings, directory: Path) -> StepInventory:
    """Return the steps that the agent in ``directory`` knows, without starting it or waiting for it."""
    connect_to_agent(AgentPaths(directory).socket).close()  # fails at once, while a client would retry
    agent = NodeAgentClient(override_settings(settings, agent={"directory": str(directory), "embedded": False}), "")
    try:
        return agent.list_steps(job, fresh=True)
    finally:
        agent.close()


def _newest_version(inventories: Iterable[StepInventory], settings: Settings) -> VersionId | None:
    """Return the version that a restore would choose from all inventories, or ``None``."""
    merged = functools.reduce(StepInventory.merge, inventories, StepInventory(()))
    return merged.choose(avoid_after=settings.memory.avoid_after_crashed_loads).version_id


def _node_name(settings: Settings) -> str:
    agent = NodeAgentClient(override_settings(settings, agent={"embedded": False}), "")
    try:
        node = agent.this_node()
    except (PeerStoreError, TieredCheckpointError, OSError):
        return ""
    finally:
        agent.close()
    return "" if node is None else node.id


def agent_directories() -> set[Path]:
    """Return the directories in which agents seem to listen, from the kernel's list of Unix sockets.

    A read can miss a socket while others close. So the list is read until several reads in a row show no new agent.
    """
    found, same = _listed_agent_directories(), 0
    while same < _READS_WITHOUT_NEWS:
        more = _listed_agent_directories()
        same = same + 1 if more <= found else 0
        found |= more
    return found


def _listed_agent_directories() -> set[Path]:
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]
    except OSError:
        return set()
    paths = (Path(fields[7]) for line in lines if len(fields := line.split(None, 7)) == 8)
    return {path.parent for path in paths if path.is_absolute() and path.name == AgentPaths(path.parent).socket.name}


def _other_directories(own: Path) -> list[Path]:
    return sorted(agent_directories() - {own})


def _jobs_of(place: AgentPaths) -> dict[str, bool]:
    """Return the jobs that an agent has steps or processes of, and whether it has steps."""
    with contextlib.closing(Client(lambda: connect_to_agent(place.socket), retry_s=0.0)) as client:
        jobs = client.status().jobs
    return {one.job: one.versions > 0 for one in jobs_in_use(jobs)}


class AgentJobs(NamedTuple):
    """The jobs of one agent of this machine."""

    directory: Path
    jobs: Mapping[str, bool]
    """The agent's jobs, and whether it has steps of them. From its directory if it does not answer."""
    silence: str
    """Why the agent does not answer, or an empty string."""


def _has_job(agent: AgentJobs, job: str | None) -> bool:
    """Return whether the agent has ``job``; ``None`` means any job of an agent that answers."""
    return job in agent.jobs if job is not None else bool(agent.jobs) and not agent.silence


def _has_steps(agent: AgentJobs, job: str | None) -> bool:
    """Return whether the agent has steps of ``job``; ``None`` means any job of an agent that answers."""
    return _has_job(agent, job) and (job is None or agent.jobs[job])


def _query_agents(places: Sequence[Path]) -> list[AgentJobs]:
    """Query all agents at the same time."""
    if not places:
        return []
    with ThreadPoolExecutor(len(places)) as queries:
        return list(queries.map(_query_agent, places))


def _query_agent(directory: Path, *, still_s: float = MAX_IDLE_S) -> AgentJobs:
    """Query an agent. If it does not run for ``still_s`` seconds, it counts as silent."""
    place = AgentPaths(directory)
    try:
        silence = silence_of_agent(place, still_s=still_s)
        if not silence:
            return AgentJobs(directory, _jobs_of(place), "")
    except AgentUnreachableError as error:
        if directory not in agent_directories():  # it has stopped meanwhile
            return AgentJobs(directory, {}, "")
        silence = str(error)
    except (PeerStoreError, OSError) as error:  # an agent of another user or another release
        silence = f"the agent in {directory} does not answer: {error}"
    return AgentJobs(directory, dict.fromkeys(_recorded_jobs(directory), True), silence)


def _recorded_jobs(directory: Path) -> Collection[str]:
    """Return the jobs that an agent's directory records; none if it belongs to another user."""
    try:
        return jobs_in_directory(directory)
    except PermissionError:
        return ()


def _unknown_steps(job: str, directory: Path, reason: str) -> TierUnavailableError:
    return TierUnavailableError(
        f"{job}: {reason}. It has {job!r} in its memory, so the newest step is unknown. Let it continue, or run "
        f"`tieredckpt agent restart --dir {shlex.quote(str(directory))}`"
    )
