"""Checkpoint discovery: reports complete steps to the agent, and receives the step to resume from.

An agent serves one job: it counts the reports of all ranks under the last prefix it received. It forgets the reports of
a rank that introduces itself again. Therefore one rank of each node reports, for the first job that it restores or
saves, only steps that are complete on all ranks. It declares ``model_checkpoint: 1`` and reports each step once.

With the next start the operator sends the greatest step that any pod reported.
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
_REPLY_TIMEOUT_S = 30.0
_POLL_S = 1.0
_FLUSH_TIMEOUT_S = 5.0

OpenChannel = Callable[[], AgentChannel]


def expected_step_from_path(job: str, path: object, how: ResumeFrom) -> ExpectedStep | None:
    """Return the step of the agent's path, or None without a path.

    The path comes from the operator or from the report of an earlier rank.
    """
    if path is None or path == "":
        return None
    exactly = how is ResumeFrom.OPERATOR
    try:
        location = parse_location(path) if isinstance(path, str) else None
    except TieredCheckpointError:
        location = None
    if location is None or location.job != job or location.step is None:
        shown = str(path)[:200]
        return ExpectedStep(None, f"the agent was told to go on from {shown!r}, which is no step of this job", exactly)
    return ExpectedStep(location.step, f"the agent was told to go on from step {location.step} ({path})", exactly)


class CheckpointReporter:
    """Reports of one process to its agent.

    Any thread may call it; its own thread looks for complete steps.
    """

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
        """Whether no other node has ranks, so that only this node knows which steps are complete."""
        self._changed = threading.Condition()
        self._channel: AgentChannel | None = None
        self._job = ""
        self._lost = ""
        """Reason why the agent cannot be reached; "" while it can."""
        self._session: Session | None = None
        self._sealed_news = self._closed = False
        self._reported: int | None = None
        self._thread: threading.Thread | None = None

    def expected_step(self, job: str) -> ExpectedStep | None:
        if not self._reports_job(job):
            return None
        try:
            return expected_step_from_path(job, self._ask(), self._how)
        except ElasticError as error:
            self._lost = self._lost or str(error)
            return ExpectedStep(None, f"the agent did not report the job's progress ({error})")

    def on_sealed(self, session: Session) -> None:
        if self._speaks and not self._closed and self._job in ("", session.job):
            with self._changed:
                self._session, self._sealed_news = session, True
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="hyperpod-progress", daemon=True)
                    self._thread.start()
                self._changed.notify_all()

    def flush(self) -> None:
        """Report the newest complete step before the process exits. No step may be sealed afterwards."""
        session = self._session
        if session is not None:
            self._check_steps(session, ask=True, fresh=True)
        if self._channel is not None and not self._lost:
            try:
                self._channel.flush(_FLUSH_TIMEOUT_S)
            except ElasticError as error:
                log.warning("the agent may not have received the newest step: %s", error)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        polling = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._sealed_news or self._closed, _POLL_S if polling else None)
                session, self._sealed_news = self._session, False
                if self._closed or session is None:
                    return
            polling = self._check_steps(session, ask=self._alone()) < session.sealed_step and not self._lost

    def _check_steps(self, session: Session, *, ask: bool, fresh: bool = False) -> int:
        try:
            step = newest_complete_step(session, ask=ask, fresh=fresh)
        except (PeerStoreError, TieredCheckpointError, OSError) as error:
            log.debug("cannot determine the newest complete step of %s: %s", session.job, error)
            return -1
        with self._changed:
            if 0 <= step != self._reported and self._reports_job(session.job):
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
            log.warning("cannot report step %d to the agent: %s", step, error)

    def _ask(self) -> object:
        if self._channel is None or self._lost:
            raise ControlPlaneUnavailableError(self._lost)
        return self._channel.request(ipc.MSG_CHECKPOINT_GET, _REPLY_TIMEOUT_S).get("path")

    def _reports_job(self, job: str) -> bool:
        """Return whether ``job`` is the job that this process reports to the agent."""
        with self._changed:
            if not self._speaks:
                return False
            if not self._job:
                self._introduce(job)
            elif self._job != job:
                log.info("this process reports job %s to the agent and does not report %s", self._job, job)
            return self._job == job

    def _introduce(self, job: str) -> None:
        self._job = job
        try:
            self._channel = self._connect()
            prefix = str(Location(job))  # type: ignore[arg-type]
            self._channel.send(ipc.MSG_CHECKPOINT_INIT, prefix=prefix, checkpoint_types={CHECKPOINT_TYPE: 1})
        except ElasticError as error:
            self._lost = str(error)
            log.warning("cannot report the steps of job %s to the agent: %s", job, error)


_reporters: list[CheckpointReporter] = []
_exit_stack = contextlib.ExitStack()


def agent_checkpoint_reporter(environ: Mapping[str, str] = os.environ) -> CheckpointReporter | None:
    """Return the reporter of this process, or None without an agent.

    The first call installs it for all restores and saves.
    """
    if not _reporters and environ.get(AGENT_SOCKET_ENV):
        _reporters.append(
            CheckpointReporter(
                lambda: shared_agent_connection(environ).open_channel(ipc.CHECKPOINT_MESSAGES),
                how=resume_from(environ),
                speaks=environ.get("LOCAL_RANK", "0") == "0",
                alone=lambda: environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE"),
            )
        )
        _exit_stack.enter_context(use_progress_hook(_reporters[0]))
        _exit_stack.callback(_reporters[0].close)
        atexit.register(_exit_stack.close)
    return _reporters[0] if _reporters else None
