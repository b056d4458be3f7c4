"""``elastic_event_detected()`` for scripts of HyperPod's agent package. The import has side effects.

::

    from integration.hyperpod.elastic_events import elastic_event_detected

    for step in range(first, total):
        if elastic_event_detected():
            save(step)
            sys.exit(0)
        train_one_step()

As in the agent's package, all ranks call it once a step, and it returns True on all ranks at the same step.
``HYPERPOD_SIGNAL_COORDINATION`` (``disabled``, the default, or ``distributed``) enables it. Unlike there, ranks
communicate only after a request, the script's own signal handlers still run, and its child processes survive the
signal. A stopped process exits with status 0 only after the request of its own agent.

As in the agent's package, and unlike the rest of this package, the import has side effects. Under an agent it starts to
listen for SIGUSR1, because data loaders start processes, and the signal may arrive, before the first call. It also
reports saves and restores to the agent.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys

from integration.hyperpod.elastic_agent.checkpoint_reporter import agent_checkpoint_reporter
from integration.hyperpod.elastic_agent.environment import (
    AgentMode,
    SignalCoordination,
    agent_mode,
    signal_coordination,
    stop_patience_s,
)
from integration.hyperpod.elastic_agent.stop_signal import GroupSignalListener, agent_stop_signal

__all__ = ["NOT_RELEASED", "elastic_event_detected"]

log = logging.getLogger(__name__)

NOT_RELEASED = 75
"""Exit status of a rank that stopped for a change of the world without a request of its own agent."""


class ExitAfterStop:
    """Exit status of this process after a stop."""

    def __init__(self, asked: GroupSignalListener, patience_s: float) -> None:
        self._asked = asked
        self._patience_s = patience_s
        self.stopped = False

    def status(self) -> int | None:
        """Wait for the agent's request. Return the status that replaces the script's, or None."""
        if not self.stopped or self._asked.received.wait(self._patience_s):
            return None
        log.error(
            "stopped for a change of the world, and after %g s the agent has still not stopped this rank. "
            "It ends with status %d, so that its exit does not count as the end of the job",
            *(self._patience_s, NOT_RELEASED),
        )
        return NOT_RELEASED

    def at_exit(self) -> None:
        """Exit with :meth:`status`, if any. Registered first, so it runs last."""
        status = self.status()
        if status is not None:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(status)


_leaving: list[ExitAfterStop] = []


def elastic_event_detected(sig: int = signal.SIGUSR1) -> bool:
    """Return whether the world will change, so that the script must save and exit.

    All ranks call it once a step, at its beginning. Only ``SIGUSR1`` is an elastic event. The first call waits for the
    first calls of all other ranks.
    """
    if sig != signal.SIGUSR1 or signal_coordination() is SignalCoordination.DISABLED:
        return False
    from elastic.workers.event_detector import elastic_event_detected as detected
    from elastic.workers.train_loop import current_world

    found = detected(sig)
    if found and current_world() is None:
        for exit_hook in _leaving:
            exit_hook.stopped = True
    return found


def _listen() -> None:
    if agent_mode() is AgentMode.PROCESS and not _leaving:
        _leaving.append(ExitAfterStop(agent_stop_signal(), stop_patience_s()))
        atexit.register(_leaving[0].at_exit)
        agent_checkpoint_reporter()


_listen()
