"""Checkpoint discovery: reports the newest committed step to the agent, and receives the step to resume from.

An agent has room for one job (it counts what all its ranks say under the name it heard last), and forgets what it was
told when a rank introduces itself again. Therefore one rank of each node speaks, of the first job that it restores or
saves, and of nothing but steps that are whole on all ranks: it says ``model_checkpoint: 1`` and names each step once.

The operator gives the greatest step that any pod has reported back with the next start.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping

from elastic.errors import ControlPlaneUnavailableError, ElasticError
from integration.hyperpod.elastic_agent import ipc
from integration.hyperpod.elastic_agent.environment import AGENT_SOCKET_ENV, ResumeFrom, resume_from
from integration.hyperpod.elastic_agent.ipc import AgentChannel, shared_agent_connection
from peerstore.errors import PeerStoreError
from tieredckpt.checkpointer.progress_hook import ExpectedStep, newest_complete_step, use_progress_hook
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.location import Location, parse_location
from tieredckpt.session.session import Session

log = logging.getLogger(__name__)

CHECKPOINT_TYPE = "model_checkpoint"
_ANSWER_S = 30.0
_POLL_S = 1.0
_FLUSH_S = 5.0

OpenChannel = Callable[[], AgentChannel]


def expected_step_from_path(job: str, path: object, how: ResumeFrom) -> ExpectedStep | None:
    """What the path means that the agent has given; it is the operator's, or what a rank before this one reported."""
    if path is None or path == "":
        return None
    exactly = how is ResumeFrom.OPERATOR
    try:
        found = parse_location(path) if isinstance(path, str) else None
    except TieredCheckpointError:
        found = None
    if found is None or found.job != job or found.step is None:
        shown = str(path)[:200]
        return ExpectedStep(None, f"the agent was told to go on from {shown!r}, which is no step of this job", exactly)
    return ExpectedStep(found.step, f"the agent was told to go on from step {found.step} ({path})", exactly)


class CheckpointReporter:
    """One process's account with its agent. Told by any thread; what there is to look at is looked at by its own."""

    def __init__(
        self,
        connect: OpenChannel,
        *,
        how: ResumeFrom = ResumeFrom.NEWEST,
        speaks: bool = True,
        alone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._connect = connect
        self._how = how
        self._speaks = speaks
        self._alone = alone
        """No other node has ranks: only the node itself knows which steps are whole."""
        self._changed = threading.Condition()
        self._channel: AgentChannel | None = None
        self._job = ""
        self._lost = ""
        """Why the agent cannot be spoken to; "" while it can."""
        self._session: Session | None = None
        self._news = self._closed = False
        self._reported: int | None = None
        self._thread: threading.Thread | None = None

    # -- Overseer -----------------------------------------------------------------------------------------------------

    def expected_step(self, job: str) -> ExpectedStep | None:
        if not self._introduced(job):
            return None
        try:
            return expected_step_from_path(job, self._ask(), self._how)
        except ElasticError as error:
            self._lost = self._lost or str(error)
            return ExpectedStep(None, f"the agent could not be asked for the job's progress ({error})")

    def on_sealed(self, session: Session) -> None:
        if self._speaks and not self._closed and self._job in ("", session.job):
            with self._changed:
                self._session, self._news = session, True
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="hyperpod-progress", daemon=True)
                    self._thread.start()
                self._changed.notify_all()

    # -- what is said -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Nothing more will be sealed: have the agent know the newest whole step before this process ends."""
        session = self._session
        if session is not None:
            self._look(session, ask=True, fresh=True)
        if self._channel is not None and not self._lost:
            try:
                self._channel.flush(_FLUSH_S)
            except ElasticError as error:
                log.warning("the agent may not have heard of the newest step: %s", error)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        waits = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._news or self._closed, _POLL_S if waits else None)
                session, self._news = self._session, False
                if self._closed or session is None:
                    return
            waits = self._look(session, ask=self._alone()) < session.sealed_step and not self._lost

    def _look(self, session: Session, *, ask: bool, fresh: bool = False) -> int:
        try:
            step = newest_complete_step(session, ask=ask, fresh=fresh)
        except (PeerStoreError, TieredCheckpointError, OSError) as error:
            log.debug("not known which step of %s is whole: %s", session.job, error)
            return -1
        with self._changed:
            if 0 <= step != self._reported and self._introduced(session.job):
                self._report(session.job, step)
        return step

    def _report(self, job: str, step: int) -> None:
        path = str(Location(job, step))  # type: ignore[arg-type]
        try:
            if self._channel is not None and not self._lost:
                self._channel.send(ipc.MSG_CHECKPOINT_UPDATE, step=step, path=path, checkpoint_type=CHECKPOINT_TYPE)
                self._reported = step
        except ElasticError as error:
            self._lost = str(error)
            log.warning("the agent does not hear of step %d: %s", step, error)

    def _ask(self) -> object:
        if self._channel is None or self._lost:
            raise ControlPlaneUnavailableError(self._lost)
        return self._channel.request(ipc.MSG_CHECKPOINT_GET, _ANSWER_S).get("path")

    def _introduced(self, job: str) -> bool:
        """Whether the agent keeps account of ``job``, because this is the first one it hears of."""
        with self._changed:
            if not self._speaks:
                return False
            if not self._job:
                self._introduce(job)
            elif self._job != job:
                log.info("the agent keeps account of %s; it is not told of %s", self._job, job)
            return self._job == job

    def _introduce(self, job: str) -> None:
        self._job = job
        try:
            self._channel = self._connect()
            prefix = str(Location(job))  # type: ignore[arg-type]
            self._channel.send(ipc.MSG_CHECKPOINT_INIT, prefix=prefix, checkpoint_types={CHECKPOINT_TYPE: 1})
        except ElasticError as error:
            self._lost = str(error)
            log.warning("the agent keeps no account of %s: %s", job, error)


_ours: list[CheckpointReporter] = []
_until_the_end = contextlib.ExitStack()


def agent_checkpoint_reporter(environ: Mapping[str, str] = os.environ) -> CheckpointReporter | None:
    """This process's, from the first call on, for everything that is restored and saved; ``None`` without an agent."""
    if not _ours and environ.get(AGENT_SOCKET_ENV):
        _ours.append(
            CheckpointReporter(
                lambda: shared_agent_connection(environ).open_channel(ipc.CHECKPOINT_MESSAGES),
                how=resume_from(environ),
                speaks=environ.get("LOCAL_RANK", "0") == "0",
                alone=lambda: environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE"),
            )
        )
        _until_the_end.enter_context(use_progress_hook(_ours[0]))
        _until_the_end.callback(_ours[0].close)
        atexit.register(_until_the_end.close)
    return _ours[0] if _ours else None
