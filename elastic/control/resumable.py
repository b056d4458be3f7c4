"""Which steps the next start goes on from: asked of the nodes' agents when a job has ended, whoever has died."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from elastic.control.running_clock import since_boot
from peerstore.errors import PeerStoreError
from tieredckpt.agent.memory_service.names import JOB
from tieredckpt.agent_node import AgentNode
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.node import Survey
from tieredckpt.resolve import resolve
from tieredckpt.settings import Settings, load_settings, override

log = logging.getLogger(__name__)


def resumable_steps(environs: Iterable[Mapping[str, str]], since_ns: int) -> dict[str, int]:
    """The newest whole step of every checkpointed job that has one, and was saved or loaded since then.

    ``environs`` are what supervisors on this machine were started with. Agents that do not answer add nothing.
    """
    found: dict[str, int] = {}
    for environ in environs:
        try:
            settings = load_settings(environ)
            if settings.enabled:
                for job, step in _on_node(settings, since_ns).items():
                    found[job] = max(step, found.get(job, -1))
        except (TieredCheckpointError, PeerStoreError, OSError) as error:
            log.info("which step is there was not asked of every node: %s", error)
    return found


def began_ns(boot_s: float, wall_ns: int, *, wall: Callable[[], int] = time.time_ns) -> int:
    """When a job began that did at these times, as clocks say that may have gone back meanwhile."""
    return min(wall_ns, wall() - int((since_boot() - boot_s) * 1e9))


def in_words(steps: Mapping[str, int]) -> str:
    """Empty where nobody knows of any."""
    if len(steps) == 1:
        return f"the last whole step is {next(iter(steps.values()))}"
    return ", ".join(f"the last whole step of {job} is {step}" for job, step in sorted(steps.items()))


def _on_node(settings: Settings, since_ns: int) -> dict[str, int]:
    agent = AgentNode(override(settings, agent={"embedded": False}), "")
    try:
        jobs = [one.job for one in agent.store.status().jobs if (one.versions or one.clients) and one.job != JOB]
        surveys = {job: agent.survey(job, fresh=True) for job in jobs}
    finally:
        agent.close()
    return {
        job: step
        for job, survey in surveys.items()
        if any(view.candidate.saved_ns >= since_ns for view in survey.views) and (step := newest(survey)) >= 0
    }


def newest(survey: Survey) -> int:
    """The step that a load which names none would choose; -1 for none."""
    chosen = resolve(
        [view.candidate for view in survey.views],
        quarantined={view.group for view in survey.views if view.quarantined},
        unreachable=survey.unreachable,
        once_whole=survey.once_whole,
        torn=survey.torn,
        forgotten=survey.forgotten,
    ).chosen
    return -1 if chosen is None else chosen.group.version
