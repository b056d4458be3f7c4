"""What a node's agent has in memory of a job that has succeeded: given back where the durable tier has it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from peerstore.records import Group, JobStatus
from tieredckpt.agent.memory_service.names import JOB
from tieredckpt.agent_node import AgentNode
from tieredckpt.node import Survey
from tieredckpt.resolve import Tier
from tieredckpt.settings import load_settings, override

log = logging.getLogger(__name__)

_UPLOADED_S = 60.0
"""How long uploads are waited for."""
_GOODBYE_S = 5.0
"""By then the agent has noticed that this node's ranks have ended."""
_LOOK_S = 0.1


class Held(NamedTuple):
    """What one node has of a job."""

    groups: Collection[Group]
    pinned: Collection[Group]
    used: bool
    """A process takes part in the job again."""


def why_kept(held: Held, survey: Survey) -> str:
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
    durable = max((view.group.version for view in survey.views if view.durable and not view.quarantined), default=-1)
    newest = max((group.version for group in held.groups), default=-1)
    return f"step {newest} is not in the durable tier" if newest > durable else ""


def release(environ: Mapping[str, str], since_ns: int) -> bool:
    """Of every job that has saved since then. Whether nobody needs the agent any more."""
    agent = AgentNode(override(load_settings(environ), agent={"embedded": False}), "")
    deadline = time.monotonic() + _UPLOADED_S
    try:
        jobs = [one for one in agent.store.status().jobs if one.job != JOB and (one.versions or one.clients)]
        return all(_release(agent, one.job, since_ns, deadline) for one in jobs)
    finally:
        agent.close()


def _release(agent: AgentNode, job: str, since_ns: int, deadline: float) -> bool:
    """Whether nobody takes part in it."""
    facts = agent.store.inventory(job)
    if any(fact.sealed_ns >= since_ns for fact in facts):
        _wait_while(lambda: _is_used(agent, job), min(deadline, time.monotonic() + _GOODBYE_S))
        _wait_while(lambda: _is_uploading(agent, job) and not _is_used(agent, job), deadline)
        held = _held(agent, job)
        if _is_uploading(agent, job):
            why = "it is being uploaded still"
        else:
            why = why_kept(held, agent.survey(job, fresh=True))
        if not why:
            # By name: what somebody saves from here on is not among them.
            agent.store.forget(job, sorted(held.groups))
        elif held.groups and not held.used:
            log.warning("what is in memory of %s stays in %s: %s", job, agent.place.directory, why)
    return not _is_used(agent, job)


def _wait_while(holds: Callable[[], bool], deadline: float) -> None:
    while holds() and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _is_uploading(agent: AgentNode, job: str) -> bool:
    return any(one.state in ("waiting", "running") for one in agent.drains(job))


def _held(agent: AgentNode, job: str) -> Held:
    groups = {fact.key.group for fact in agent.store.inventory(job)}
    return Held(groups, groups & agent.store.kept(job), _is_used(agent, job))


def _is_used(agent: AgentNode, job: str) -> bool:
    return any(one.clients for one in _of(agent, job))


def _of(agent: AgentNode, job: str) -> list[JobStatus]:
    return [one for one in agent.store.status().jobs if one.job == job]
