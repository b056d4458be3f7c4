"""Which job a command is about, and one look at it through this node's agent."""

from __future__ import annotations

from peerstore.errors import AgentUnreachableError
from tieredckpt.agent.memory_service.names import JOB
from tieredckpt.agent_node import AgentNode
from tieredckpt.cli.sight import Sight
from tieredckpt.errors import CheckpointNotFoundError, UsageError
from tieredckpt.location import parse_location


def agent_of(sight: Sight) -> AgentNode:
    """The agent, or an error: what only it can know is not known without it."""
    if sight.agent is None:
        raise AgentUnreachableError(f"{sight.why_no_agent}, and only it can tell")
    return sight.agent


def job_names(sight: Sight) -> list[str]:
    """The jobs that this node's agent keeps something for."""
    known = agent_of(sight).store.status().jobs
    return sorted(one.job for one in known if (one.versions or one.clients) and one.job != JOB)


def the_job(sight: Sight, named: str | None) -> str:
    """The job somebody means who named ``named``, or none: then there must be exactly one."""
    known = job_names(sight)
    if named is not None:
        job = str(parse_location(named).job)
        if job not in known and not agent_of(sight).cluster(job).roster:  # it may have nodes, and nothing here
            there = f"it has {', '.join(known)}" if known else "it has none"
            raise CheckpointNotFoundError(f"this node's agent keeps nothing for a job {job}: {there}")
        return job
    if not known:
        raise CheckpointNotFoundError("this node's agent has no job")
    if len(known) > 1:
        raise UsageError(f"this node's agent has several jobs, name one: {', '.join(known)}")
    return known[0]
