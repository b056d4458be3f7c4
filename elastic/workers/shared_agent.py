"""Steps of another launcher in this machine's agent, for jobs with simulated nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic.settings import shared_agent_directory
from peerstore.errors import PeerStoreError
from peerstore.store.slot_metadata import jobs_in_directory
from tieredckpt.agent.local_agents import list_agent_steps
from tieredckpt.checkpointer.progress_hook import ExpectedStep, use_progress_hook
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.session.session import Session
from tieredckpt.settings import load_settings

log = logging.getLogger(__name__)


class SharedAgentSteps:
    """A ``ProgressHook`` that reads the steps of the agent in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def expected_step(self, job: str) -> ExpectedStep | None:
        try:
            settings = load_settings()
            avoid_after = settings.memory.avoid_after_crashed_loads
            newest = list_agent_steps(job, settings, self._directory).choose(avoid_after=avoid_after).step
        except (PeerStoreError, TieredCheckpointError, OSError) as error:
            if job not in jobs_in_directory(self._directory):
                log.info("cannot list the steps of the agent in %s for job %s: %s", self._directory, job, error)
                return None
            return ExpectedStep(
                None, f"the agent in {self._directory} does not answer, and has {job!r} in its memory: {error}"
            )
        if newest < 0:
            return None
        where = f"step {newest} is in memory of the agent in {self._directory}, which simulated nodes do not use"
        return ExpectedStep(newest, f"{where}; elastic run without --simulate-nodes, or torchrun, resumes it")

    def on_sealed(self, session: Session) -> None:
        pass


@contextmanager
def expect_steps_of_shared_agent() -> Iterator[None]:
    """Within this block, fail a start from scratch if this machine's agent has or may have a step."""
    directory = shared_agent_directory()
    if not directory:
        yield
        return
    with use_progress_hook(SharedAgentSteps(Path(directory))):
        yield
