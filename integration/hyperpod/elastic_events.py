"""``elastic_event_detected()`` for scripts written for HyperPod's agent package. Importing it has an effect.

::

    from integration.hyperpod.elastic_events import elastic_event_detected

    for step in range(first, total):
        if elastic_event_detected():
            save(step)
            sys.exit(0)
        train_one_step()

As there: all ranks ask once a step, all get True at the same step, and ``HYPERPOD_SIGNAL_COORDINATION`` (``disabled``,
which is the default, or ``distributed``) says whether anybody ever does. Different: nothing is exchanged while nothing
is wanted, handlers of the script are called as well, its child processes survive the signal, and a process that has
stopped ends with status 0 only when its own agent has asked for that.

As there, and as nowhere else in this package, importing it does something: under an agent, SIGUSR1 is listened to from
then on, because loaders start their processes, and the agent sends its signal, before a loop asks for the first time;
and what is saved and restored is accounted for with the agent.
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
"""The status of a rank that has stopped for a change of the world while its own agent was never asked to."""


class ExitAfterStop:
    """How this process ends once it was told to stop."""

    def __init__(self, asked: GroupSignalListener, patience_s: float) -> None:
        self._asked = asked
        self._patience_s = patience_s
        self.stopped = False

    def status(self) -> int | None:
        """Having waited for the agent: what to end with instead of what the script ends with, if anything."""
        if not self.stopped or self._asked.received.wait(self._patience_s):
            return None
        log.error(
            "stopped for a change of the world, and after %g s the agent of this rank was still not asked to stop: "
            "ending with status %d, so that nobody takes this for the end of the work",
            *(self._patience_s, NOT_RELEASED),
        )
        return NOT_RELEASED

    def at_exit(self) -> None:
        """Registered before everything that is to be closed first."""
        status = self.status()
        if status is not None:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(status)


_leaving: list[ExitAfterStop] = []


def elastic_event_detected(sig: int = signal.SIGUSR1) -> bool:
    """Called by all ranks once a step, at its beginning: whether the world is to change, so save and exit.

    Only ``SIGUSR1`` is an elastic event. The first call of a process waits for that of all others.
    """
    if sig != signal.SIGUSR1 or signal_coordination() is SignalCoordination.DISABLED:
        return False
    from elastic.workers.event_detector import elastic_event_detected as detected
    from elastic.workers.train_loop import current_world

    found = detected(sig)
    if found and current_world() is None:
        for one in _leaving:
            one.stopped = True
    return found


def _listen() -> None:
    if agent_mode() is AgentMode.PROCESS and not _leaving:
        _leaving.append(ExitAfterStop(agent_stop_signal(), stop_patience_s()))
        atexit.register(_leaving[0].at_exit)
        agent_checkpoint_reporter()


_listen()
