"""A rank under HyperPod's elastic agent: what it hears from it, and what it tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from integration.hyperpod.agent.modes import Mode, mode_of
from integration.hyperpod.agent.worker import wait_rank

if TYPE_CHECKING:
    from elastic.control.plane import ControlPlane

__all__ = ["plane", "wait_rank"]


def plane(environ: Mapping[str, str]) -> ControlPlane | None:
    """How :func:`elastic.run` finds the agent that started this process; ``None`` where none did."""
    mode = mode_of(environ)
    if mode is Mode.NONE:
        return None
    if mode is Mode.PROCESS:
        from integration.hyperpod.process_plane import process_plane

        return process_plane(environ)
    from integration.hyperpod.agent.in_process import AgentPlane
    from integration.hyperpod.agent.worker import this_worker
    from integration.hyperpod.progress import agents_account

    agents_account(environ)
    return AgentPlane(this_worker(environ))
