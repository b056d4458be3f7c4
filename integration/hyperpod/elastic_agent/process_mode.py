"""Process-level restart mode: a ControlPlane that stops at a common step, saves, and exits.

What it says is SIGUSR1, and it says it to one pod after the other. All ranks stop at the step that the first of them
leads to, so most have sealed before their own agent was asked. One that ended then would be taken for one whose work is
done: an agent that nobody has asked to stop reports COMPLETED. Therefore a rank that has stopped waits until its own
agent has asked, too, and ends with status 0 only then; where that does not come it ends with an error, which agent and
operator take for what it is, a world that has to be started again.

The store in which the ranks meet lives in the first of them: it goes last, also at the end of all work. And only when
all have sealed is the last step whole: then the agents are told of it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from elastic.control.control_plane import Dismissed, NoticeKind, RankAssignment, RankProgress
from elastic.control.hang_detector import HangTimeouts
from elastic.errors import ControlPlaneUnavailableError, ElasticError, JobFailedError
from elastic.settings import abort_timeout_in, hang_limits_in
from elastic.workers.launch_environment import connect_store
from elastic.workers.store_control_plane import StoreControlPlane
from integration.hyperpod.elastic_agent.checkpoint_reporter import CheckpointReporter, agent_checkpoint_reporter
from integration.hyperpod.elastic_agent.environment import LaunchedWorker, launched_worker, stop_patience_s
from integration.hyperpod.elastic_agent.stop_signal import GroupSignalListener, agent_stop_signal

log = logging.getLogger(__name__)

_STORE_TIMEOUT = timedelta(minutes=5)
_EXIT_TIMEOUT_S = 30.0
"""How long the first rank keeps the store for others; who has not gone by then is not going to."""
_GONE = "gone"


class ProcessControlPlane(StoreControlPlane):
    """One rank's, for the one world that it is started for."""

    def __init__(
        self,
        worker: LaunchedWorker,
        asked: GroupSignalListener,
        patience_s: float,
        account: CheckpointReporter | None = None,
        limits: HangTimeouts | None = None,
    ) -> None:
        host, port = worker.master_address
        self._keeper = _server(host, port) if worker.assignment.rank == 0 else None
        # The agent starts the next world at once, with what the nodes have in memory: nothing has to become durable.
        super().__init__(
            lambda: connect_store(host, port),
            worker.assignment,
            last=False,
            limits=limits,
            leave_s=abort_timeout_in(),
        )
        self._asked = asked
        self._patience_s = patience_s
        self._account = account
        self._may_go = threading.Event()
        """The agent of this rank has asked for its end, or its pod has."""
        self._telling = threading.RLock()  # a signal's handler may interrupt who holds it
        self._told = self._gone = False
        self._completed: int | None = None
        asked.add_callback(self._agent_asks)

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        place = super().wait_for_assignment(timeout_s=timeout_s)
        if self._asked.received.is_set():  # before anybody could be told
            self._agent_asks()
        return place

    def request_change(
        self, want: NoticeKind, reason: str, *, deadline_s: float | None = None, nodes: int | None = None
    ) -> None:
        """The same wish comes by more than one way: by the agent's signal, and by whoever handles it in the script."""
        if deadline_s is not None:
            self._may_go.set()  # this pod is preempted, which its agent knows
        with self._telling:
            if self._gone or (self._told and want is NoticeKind.RESIZE and deadline_s is None):
                return
            super().request_change(want, reason, deadline_s=deadline_s, nodes=nodes)
            self._told = self._told or want is NoticeKind.RESIZE

    def report_progress(self, progress: RankProgress) -> None:
        super().report_progress(progress)
        self._completed = progress.step

    def report_finished(self) -> None:
        """Whoever is asked to stop after the last step of all would else wait for a word of this rank."""
        super().report_finished()
        if self._completed is not None:
            with contextlib.suppress(RuntimeError):
                self._say_pause(self._completed)

    def close(self) -> None:
        self._asked.remove_callback(self._agent_asks)
        if not self._closed and (self._finished or self._sealed):
            self._depart()
        super().close()

    def _agent_asks(self) -> None:
        self._may_go.set()
        try:
            self.request_change(NoticeKind.RESIZE, "the elastic agent asks for a graceful stop")
        except ElasticError as error:  # asked again when there is a world, or by who handles the signal
            log.info("%s", error)

    def _no_further(self) -> None:
        if self._sealed and not self._finished:
            self._depart()
            if not self._may_go.wait(self._patience_s):
                raise JobFailedError(
                    "all ranks have stopped at a common step for a change of the world, but for "
                    f"{self._patience_s:g} s the agent of this one was not asked to stop: ending with an error, so "
                    "that nobody takes this for the end of the work"
                )
            raise Dismissed("the elastic agent starts the next world")
        self._go()  # with nothing sealed, and nobody is to wait for it
        super()._no_further()

    # -- the store goes last ------------------------------------------------------------------------------------------

    def _depart(self) -> None:
        """This rank is done. Who keeps the store, and who keeps account, waits for all others to say so."""
        if not self._go():
            return
        if self._keeper is not None or self._account is not None:
            self._see_off()
        if self._account is not None:
            self._account.flush()

    def _go(self) -> bool:
        """From here on this rank does not need the store; whether it is the first time that this is said."""
        with self._telling:
            if self._gone:
                return False
            self._gone = True
        with contextlib.suppress(ControlPlaneUnavailableError):
            self.gather(_GONE, wait=False)
        return True

    def _see_off(self) -> None:
        if not self.has_gathered(_GONE, timeout_s=_EXIT_TIMEOUT_S):
            log.warning("not all ranks have left after %g s", _EXIT_TIMEOUT_S)


def process_control_plane(environ: Mapping[str, str]) -> ProcessControlPlane:
    """For a rank that the agent has started in process-level mode."""
    worker = launched_worker(environ)
    account = agent_checkpoint_reporter(environ)  # of all ranks: each of them is asked what it was told
    speaks = worker.assignment.local_rank == 0
    return ProcessControlPlane(
        worker, agent_stop_signal(), stop_patience_s(environ), account if speaks else None, hang_limits_in(environ)
    )


def _server(host: str, port: int) -> dist.TCPStore:
    """The one that ``init_process_group`` of the script itself has made, or will make, at the same place."""
    try:
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT, multi_tenant=True
        )
    except RuntimeError as error:
        raise ControlPlaneUnavailableError(f"no store can be kept at {host}:{port}: {error}") from error
