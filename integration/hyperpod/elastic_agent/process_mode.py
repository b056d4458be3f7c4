"""Process-level restart mode: a ControlPlane that stops at a common step, saves, and exits.

The agent requests a stop by SIGUSR1, one pod after the other. All ranks stop at a common step after the first signal,
so most ranks seal before the signal of their own agent. An early exit would look like the end of the work: an agent
without a stop request reports COMPLETED. Therefore a stopped rank waits for the stop request of its own agent and only
then exits with status 0. Without the request it exits with an error, and the agent and the operator restart the world.

Rank 0 serves the ranks' store, so it exits last, also at the end of all work. The last step is complete only after all
ranks seal it. The agents receive it then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from elastic.control.control_plane import ControlNotice, Dismissed, NoticeKind, RankAssignment, RankProgress
from elastic.control.epoch_state import BrokenCallback
from elastic.control.hang_detector import HangTimeouts
from elastic.errors import ControlPlaneUnavailableError, ElasticError, JobFailedError
from elastic.settings import abort_timeout_in, hang_limits_in
from elastic.workers.launch_environment import connect_store
from elastic.workers.store_control_plane import StoreControlPlane
from elastic.world.world_state import ErrorPosition, SealedStep
from integration.hyperpod.elastic_agent.checkpoint_reporter import CheckpointReporter, agent_checkpoint_reporter
from integration.hyperpod.elastic_agent.environment import LaunchedWorker, launched_worker, stop_patience_s
from integration.hyperpod.elastic_agent.stop_signal import GroupSignalListener, agent_stop_signal

log = logging.getLogger(__name__)

_STORE_TIMEOUT = timedelta(minutes=5)
_EXIT_TIMEOUT_S = 30.0
"""Seconds that rank 0 serves the store while other ranks exit."""


class ProcessControlPlane:
    """Control plane of one rank for its only world, over the store that rank 0 serves."""

    def __init__(
        self,
        worker: LaunchedWorker,
        asked: GroupSignalListener,
        patience_s: float,
        reporter: CheckpointReporter | None = None,
        limits: HangTimeouts | None = None,
    ) -> None:
        host, port = worker.master_address
        self._store_server = _server(host, port) if worker.assignment.rank == 0 else None
        # The agent starts the next world immediately from the nodes' memory: nothing must become durable.
        self._plane = StoreControlPlane(
            lambda: connect_store(host, port),
            worker.assignment,
            last=False,
            limits=limits,
            leave_s=abort_timeout_in(),
        )
        self._asked = asked
        self._patience_s = patience_s
        self._reporter = reporter
        self._may_exit = threading.Event()
        """Set once the agent of this rank requests its stop, or its pod is preempted."""
        self._request_lock = threading.RLock()  # a signal handler may interrupt its holder
        self._is_assigned = self._sealed = self._finished = self._closed = False
        self._requested = self._departed = False
        self._completed: int | None = None
        asked.add_callback(self._agent_asks)

    @property
    def restarts_processes(self) -> bool:
        return True

    def wait_for_assignment(self, *, timeout_s: float | None = None) -> RankAssignment:
        """Return the assignment in the started world.

        The second call raises the reason why no other world follows.
        """
        if self._is_assigned:
            self._end_world()
        place = self._plane.wait_for_assignment(timeout_s=timeout_s)
        self._is_assigned = True
        if self._asked.received.is_set():  # the signal came before the world formed
            self._agent_asks()
        return place

    def notice(self) -> ControlNotice | None:
        return self._plane.notice()

    def agree_on_step(self, step: int, *, timeout_s: float | None = None) -> int:
        return self._plane.agree_on_step(step, timeout_s=timeout_s)

    def report_sealed(self, step: int, *, checkpoint: SealedStep | None = None, timeout_s: float | None = None) -> None:
        self._plane.report_sealed(step, checkpoint=checkpoint, timeout_s=timeout_s)
        self._sealed = True

    def report_progress(self, progress: RankProgress) -> None:
        self._plane.report_progress(progress)
        self._completed = progress.step

    def report_fault(self, reason: str, *, final: bool = False, position: ErrorPosition | None = None) -> None:
        self._plane.report_fault(reason, final=final, position=position)

    def request_change(
        self, want: NoticeKind, reason: str, *, deadline_s: float | None = None, nodes: int | None = None
    ) -> None:
        """Request a change once.

        The same request may come from the agent's signal and from the script's handler.
        """
        if deadline_s is not None:
            self._may_exit.set()  # this pod is preempted, and its agent knows
        with self._request_lock:
            if self._departed or (self._requested and want is NoticeKind.RESIZE and deadline_s is None):
                return
            self._plane.request_change(want, reason, deadline_s=deadline_s, nodes=nodes)
            self._requested = self._requested or want is NoticeKind.RESIZE

    def on_broken(self, call: BrokenCallback) -> None:
        self._plane.on_broken(call)

    def report_finished(self) -> None:
        """Report the end of the work, and a pause at the last step.

        A rank that receives a stop request after the last step would otherwise wait for this rank.
        """
        self._plane.report_finished()
        self._finished = True
        if self._completed is not None:
            with contextlib.suppress(ControlPlaneUnavailableError):
                self._plane.report_pause(self._completed)

    def close(self) -> None:
        self._asked.remove_callback(self._agent_asks)
        if not self._closed and (self._finished or self._sealed):
            self._depart()
        self._closed = True
        self._plane.close()

    def _agent_asks(self) -> None:
        self._may_exit.set()
        try:
            self.request_change(NoticeKind.RESIZE, "the elastic agent asks for a graceful stop")
        except ElasticError as error:  # repeated when a world exists, or by the script's signal handler
            log.info("%s", error)

    def _end_world(self) -> None:
        """Raise the reason why no other world follows in this process."""
        if self._sealed and not self._finished:
            self._depart()
            if not self._may_exit.wait(self._patience_s):
                raise JobFailedError(
                    "all ranks have stopped at a common step for a change of the world. After "
                    f"{self._patience_s:g} s the agent has still not stopped this rank. It ends with an error, so that "
                    "its exit does not count as the end of the job"
                )
            raise Dismissed("the elastic agent starts the next world")
        self._leave_store(wait_s=None)  # nothing is sealed, so no rank must wait for this one
        self._plane.wait_for_assignment()

    def _depart(self) -> None:
        """Leave the store in order, and report the last step, which is complete once all ranks have left."""
        is_last = self._store_server is not None or self._reporter is not None
        if self._leave_store(wait_s=_EXIT_TIMEOUT_S if is_last else None) and self._reporter is not None:
            self._reporter.flush()

    def _leave_store(self, *, wait_s: float | None) -> bool:
        with self._request_lock:
            self._departed = True
        return self._plane.depart(wait_s=wait_s)


def process_control_plane(environ: Mapping[str, str]) -> ProcessControlPlane:
    """Return the control plane of a rank that an agent in process mode started."""
    worker = launched_worker(environ)
    reporter = agent_checkpoint_reporter(environ)  # for all ranks: each reads its expected step
    reports = worker.assignment.local_rank == 0
    return ProcessControlPlane(
        worker, agent_stop_signal(), stop_patience_s(environ), reporter if reports else None, hang_limits_in(environ)
    )


def _server(host: str, port: int) -> dist.TCPStore:
    """Serve the store at the address that the script's own ``init_process_group`` uses, too."""
    try:
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT, multi_tenant=True
        )
    except RuntimeError as error:
        raise ControlPlaneUnavailableError(f"no store can be kept at {host}:{port}: {error}") from error
