"""A rank under HyperPod's elastic agent: its control plane in both restart modes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from integration.hyperpod.elastic_agent.environment import AgentMode, agent_mode
from integration.hyperpod.elastic_agent.worker_client import wait_rank

if TYPE_CHECKING:
    from elastic.control.control_plane import ControlPlane

__all__ = ["agent_control_plane", "wait_rank"]


def agent_control_plane(environ: Mapping[str, str]) -> ControlPlane | None:
    """Return the control plane of the agent that started this process, or None without an agent.

    :func:`elastic.run` calls it.
    """
    mode = agent_mode(environ)
    if mode is AgentMode.NONE:
        return None
    if mode is AgentMode.PROCESS:
        from integration.hyperpod.elastic_agent.process_mode import process_control_plane

        return process_control_plane(environ)
    from integration.hyperpod.elastic_agent.checkpoint_reporter import agent_checkpoint_reporter
    from integration.hyperpod.elastic_agent.in_process_mode import InProcessControlPlane
    from integration.hyperpod.elastic_agent.worker_client import this_agent_worker

    agent_checkpoint_reporter(environ)
    return InProcessControlPlane(this_agent_worker(environ))
