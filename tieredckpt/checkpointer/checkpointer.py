"""Checkpointer: save, seal, wait, restore, list and drop steps of a training loop."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from peerstore import deadlines
from peerstore.errors import PeerStoreError, UnavailableError
from peerstore.message_codec import from_json
from tieredckpt.agent.local_agents import warn_of_steps_elsewhere
from tieredckpt.agent.stopped_step import StopReport, describe_stop, newest_stop, report_last_stop
from tieredckpt.checkpointer.checkpoint_saver import CheckpointSaver
from tieredckpt.checkpointer.directory_steps import directory_state, restore_directory
from tieredckpt.checkpointer.durable_callback import DurableCallback, DurableStep
from tieredckpt.checkpointer.overlapped_copy import wait_for_overlapped_copies
from tieredckpt.checkpointer.preemption import PreemptionHandler, last_step_agreement
from tieredckpt.checkpointer.progress_hook import (
    ExpectedStep,
    SaveRestoreLog,
    check_restored_step,
    explain_expected,
    gather_expected_step,
    notify_progress_hook,
)
from tieredckpt.checkpointer.restore_with_fallback import CheckpointRestorer, OnLost
from tieredckpt.checkpointer.save_handle import (
    SaveHandle,
    SaveState,
    StepInfo,
    step_infos,
)
from tieredckpt.checkpointer.save_queue import SaveQueue
from tieredckpt.dcp.plain_checkpoints import plain_steps
from tieredckpt.dcp.rank_group import RankGroup, unwrap_save_error
from tieredckpt.dcp.restore_report import RestoreReport
from tieredckpt.durable.plain_objects import delete_plain_checkpoint
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import (
    JobTakenOverError,
    StoreBusyError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.gc_pause import gc_paused
from tieredckpt.live import abort_fence
from tieredckpt.live.boundary_recorder import BoundaryRecorder
from tieredckpt.location import check_step, parse_location
from tieredckpt.resolve_step import Candidate
from tieredckpt.session.session import Session, open_session, session_if_open
from tieredckpt.settings import Settings, load_settings, override_settings, require_plain_url
from tieredckpt.step_inventory import StepInventory
from tieredckpt.tensors.device import accelerator
from tieredckpt.tensors.state_dict import (
    StateDict,
    flatten_state,
    resolve_stateful,
)

log = logging.getLogger(__name__)

_SKIP_WARNING_S = 60.0
"""Minimum seconds between two warnings about skipped steps."""
_BYTES_BESIDE_TENSOR = 256
"""Additional bytes of a slot for each entry of the state, for alignment and small objects."""


class Checkpointer:
    """A training loop's interface to the tiers: save, restore, list and drop steps.

    ::

        with Checkpointer("tiered://llama-8b", durable="s3://bucket/llama", every=1, durable_every=200) as ckpt:
            step = ckpt.restore(state) + 1
            for step in range(step, total):
                train_one_step()
                ckpt.save(state, step)

    All ranks construct it, and call ``restore`` and ``save``, at the same points. ``state`` is the same as for
    ``dcp.save``: nested dicts of tensors, DTensors and Python objects, and ``Stateful`` objects. A failed save is
    reported in its :class:`SaveHandle` and in the metrics. It does not stop the training unless
    ``on_failure="raise"``.

    Rank 0 calls ``on_durable`` with a :class:`DurableStep` for each durable step, in a thread of its own. An
    experiment tracker can then refer to the step. :meth:`close` does not wait for uploads.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        durable: str | None = None,
        every: int | None = None,
        durable_every: int | None = None,
        keep_last: int | None = None,
        keep_every: int | None = None,
        on_busy: Literal["wait", "skip"] | None = None,
        on_failure: Literal["report", "raise"] = "report",
        on_durable: Callable[[DurableStep], object] | None = None,
        on_sigterm: Literal["save", "ignore"] = "save",
        grace_s: float = 25.0,
        trust_objects: bool | None = None,
        proof: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        settings: Settings | None = None,
    ) -> None:
        self._location = parse_location(target)
        if self._location.step is not None:
            raise UsageError(f"{self._location} names a step; a Checkpointer keeps all of them: {self._location.job}")
        if self._location.cast:
            raise UsageError(f"{target}: a Checkpointer restores what it saved; for a cast use TieredReader or load()")
        self.settings = _with_arguments(
            settings or load_settings(),
            durable={"url": durable, "every": durable_every, "keep_last": keep_last, "keep_every": keep_every},
            memory={"every": every, "on_busy": on_busy, "trust_objects": trust_objects, "proof": proof},
        )
        require_plain_url(self.settings)
        self._on_failure = on_failure
        self._ranks = RankGroup(process_group)
        self._restorer = CheckpointRestorer(self._location.job, self.settings, self._ranks)
        self._event_log = SaveRestoreLog()
        self._is_first = self._ranks.rank == 0
        self._durable_callback = (
            DurableCallback(self._location.job, self.settings.durable.url, on_durable)
            if on_durable is not None and self._is_first
            else None
        )
        self._queue = SaveQueue(
            self._location.job,
            self.settings,
            self._event_log,
            is_first=self._is_first,
            on_upload=self._durable_callback.add if self._durable_callback is not None else None,
        )
        self._boundaries = BoundaryRecorder(self._location.job, self.settings)
        self._saver = CheckpointSaver(
            self._location.job,
            self.settings,
            self._ranks,
            queue=self._queue,
            boundaries=self._boundaries,
            session=lambda: self.session,
        )
        self._closed = False
        self._first_save_checked = False
        """Whether the checks before the first save have passed on all ranks."""
        self._last_saved: SaveHandle | None = None
        self._due_saves = 0
        """Number of calls of :meth:`save` that were due."""
        self._skip_warned_at = -math.inf
        """Monotonic time of the last warning about a skipped step."""
        self.last_restore: RestoreReport | None = None
        """Report of the last :meth:`restore`: bytes read from each tier, or the reason why none were read."""
        agreement = last_step_agreement(self._location.job, self._ranks.rank, self._ranks.size)
        self._preemption = PreemptionHandler(self._flush, grace_s, agreement) if on_sigterm == "save" else None

    @property
    def job(self) -> str:
        """Name of the job whose steps this object saves and restores."""
        return self._location.job

    @property
    def session(self) -> Session:
        if self._closed and session_if_open(self._location.job, self.settings) is None:
            self._check_open()  # opening a session would start an agent
        return open_session(self._location.job, self.settings)

    def save(
        self, state: StateDict, step: int, *, force: bool = False, keep: bool = False, durable: bool = False
    ) -> SaveHandle:
        """Stage ``state`` as ``step``, and return as soon as the training may change it.

        ``keep``: retain the step in memory and in the durable tier until :meth:`drop` or ``tieredckpt unpin``. It does
        not count as one of the newest steps, and no later save evicts it. ``durable``: upload the step regardless of
        ``durable.every``, and do not skip it for a newer one. ``saved.wait("durable")`` waits for the upload. It raises
        :class:`SaveFailedError` if the step was evicted for newer saves while the store was unreachable. Without a
        durable tier ``durable`` raises :class:`UsageError`. With ``keep`` or ``durable`` the step is saved even if it
        is not due, and the save waits up to ``memory.wait_s`` for a slot. All ranks pass the same arguments.

        The first save checks the job:

        - :class:`UsageError`: an earlier run has a newer step and nothing was restored. Older steps cause a warning.
        - :class:`DurableRefusedError`: the durable tier accepts no object.
        - :class:`TierUnavailableError`: the durable tier does not answer and nothing was restored. With
          ``durable.on_unreachable="continue"`` this is a warning.

        A later save of an older step fails. A failed save does not stop the training, except that
        :class:`JobTakenOverError` is raised once another process with the job's name has begun to save.

        After SIGTERM all ranks agree on this step or the next one as the last. All of them save it and make it durable
        within the grace period. Then the signal goes to the handler that was installed before.
        """
        check_step(step)
        _check_state(state)
        self._check_open()
        if durable and not self.settings.durable.url:
            raise UsageError(
                f"save(durable=True): {self._location.job} has no durable tier for step {step}. Name one: "
                "Checkpointer(durable='s3://bucket/prefix'), or durable.url ($TIEREDCKPT_DURABLE_URL)"
            )
        self._boundaries.record(state, step)
        self._report_step_made()
        last = self._preemption is not None and self._preemption.is_last(step)
        if step % self.settings.memory.every and not (force or keep or durable or last):
            return SaveHandle(step, SaveState.NOT_DUE)
        self._check_first_save(step)
        began = time.perf_counter()
        try:
            with gc_paused():
                if self.settings.enabled:
                    wait_s = self.settings.memory.wait_s if keep or durable else None
                    saved = self._saver.save(state, step, durable=last or durable, keep=keep, wait_s=wait_s)
                else:
                    saved = self._saver.save_plain(state, step, durable=last or durable)
                    if self._durable_callback is not None and saved.state is SaveState.DURABLE:
                        self._durable_callback.call_plain(step)
        except StoreBusyError as error:
            # One warning a minute is enough: the agent reports the protected step, and the time since it is old.
            again = time.monotonic() - self._skip_warned_at < _SKIP_WARNING_S
            level = logging.DEBUG if again else logging.WARNING
            log.log(
                level,
                "step %d of %s was skipped: %s. Save less often (every=), wait for a slot (on_busy='wait'), or raise "
                "agent.burst_slots",
                *(step, self._location.job, error),
            )
            self._skip_warned_at = self._skip_warned_at if again else time.monotonic()
            saved = SaveHandle(step, SaveState.SKIPPED, error)
        except (TieredCheckpointError, CheckpointException, PeerStoreError) as failure:
            abort_fence.raise_if_aborted()  # the failure comes from the collectives of an aborted world
            saved = SaveHandle(step, SaveState.FAILED, unwrap_save_error(failure))
            log.error("step %d of %s was not saved: %s", step, self._location.job, saved.error)
        if self.settings.enabled:
            self._observe(saved, time.perf_counter() - began)
        self._last_saved = saved
        self._due_saves += saved.state is not SaveState.NOT_DUE
        self._event_log.record_save(saved, time.perf_counter() - began)
        if self._preemption is not None and last and self._preemption.requested:
            self._preemption.flush_and_exit()
        if saved.error is not None and (self._on_failure == "raise" or isinstance(saved.error, JobTakenOverError)):
            raise saved.error
        return saved

    def _check_first_save(self, step: int) -> None:
        """Raise on all ranks before the first save if the job's steps or the durable tier make saves useless."""
        if self._first_save_checked or not self.settings.enabled:
            return

        def check() -> None:
            with contextlib.suppress(TierUnavailableError, PeerStoreError):  # the save itself reports those
                self.session.newest_known_epoch()
                self.session.check_step_order(step)
                if self._ranks.rank == 0:
                    self.session.warn_unrestored(step)
            if session_if_open(self._location.job, self.settings) is not None:
                with contextlib.suppress(PeerStoreError):
                    self.session.durable.check(self.session.incarnation.newest_step)

        self._ranks.call_on_all(check)
        self._first_save_checked = True

    def seal(self, state: StateDict, step: int, *, durable: bool = False, timeout_s: float = 600.0) -> SaveHandle:
        """Seal ``step`` on every rank and wait for its replicas, before the ranks exit.

        All ranks call this with the state after ``step``. If it was every rank's last save, it is not saved again.
        ``durable``: wait for the durable tier too, if one is configured. Raise if the step does not become sealed, or
        durable. Missing replicas are only a warning, because a sealed shard outlives this process.
        """
        abort_fence.raise_if_aborted()
        _check_state(state)
        self._check_open()
        deadline = time.monotonic() + timeout_s
        if not self.settings.enabled:
            return self._saver.save_plain(state, check_step(step), durable=True)
        durable = durable and bool(self.settings.durable.url)
        with deadlines.timeout_scope(timeout_s):
            self._check_first_save(step)
            try:
                saved = self._saver.sealed_by_all(self._last_saved, step, timeout_s, durable=durable)
                if saved is None:
                    saved = self._last_saved = self._saver.save(
                        state, check_step(step), durable=durable, wait_s=timeout_s
                    )
                saved.wait(timeout_s=max(0.0, deadline - time.monotonic()))
                self._saver.wait_for_copies(saved, max(0.0, deadline - time.monotonic()))
            except PeerStoreError as error:
                raise TierUnavailableError(f"step {step} of {self._location.job}: {error}") from error
            except CheckpointException as failure:
                raise unwrap_save_error(failure) from failure
            if durable:
                saved.wait("durable", timeout_s=max(0.0, deadline - time.monotonic()))
        return saved

    def record_boundary(self, state: StateDict, step: int) -> None:
        """Record ``state`` as the state after ``step``; survivors of a fault can resume from it.

        Every :meth:`save` does this too, even if it is not due. Call this only for steps without a :meth:`save`.
        Survivors use the state only if it is unchanged.
        """
        check_step(step)
        _check_state(state)
        self._boundaries.record(state, step)
        self._report_step_made()

    def _report_step_made(self) -> None:
        """Report that the training has made a step after its load, whether or not the step is due."""
        session = session_if_open(self._location.job, self.settings)
        if session is not None:
            session.loads.report_survived()

    def _observe(self, saved: SaveHandle, blocked_s: float) -> None:
        """Report this call to the agent's metrics; a save with a job is counted when it seals or fails."""
        ended = {SaveState.SKIPPED: "skipped", SaveState.FAILED: "failed"}.get(saved.state)
        counts = {ended: 1.0} if ended and saved.job is None else {}
        # Without a session no agent is connected, and another attempt to start one would take as long again.
        session = session_if_open(self._location.job, self.settings)
        self._queue.submit(self._queue.report, session, blocked_seconds=blocked_s, **counts)

    def wait(self, tier: Literal["memory", "durable"] = "memory", *, timeout_s: float = 600.0) -> bool:
        """Wait for all saves to reach ``tier``; return ``False`` on a timeout or if some cannot reach it."""
        if not self.settings.enabled:
            return True
        deadline = time.monotonic() + timeout_s
        try:
            self._queue.finish_last(wait_s=timeout_s)
            if tier == "memory" or not self.settings.durable.url:
                return tier == "memory"
            left_s = max(0.0, deadline - time.monotonic())
            sealed = self.session.sealed_step  # other ranks may have saved a later step, which needs this rank's part
            before = sealed + 1 if sealed >= 0 else None
            view = self.session.agent.wait_durable(self._location.job, None, left_s, before=before)
        except (StoreBusyError, UnavailableError) as error:
            why = str(error)
        else:
            if view is None or view.state in ("done", "skipped"):
                return True
            why = f"step {view.version_id.version} is {view.state}{f': {view.error}' if view.error else ''}"
        log.warning("%s: not all saves are in the %s tier after %.1f s: %s", self._location.job, tier, timeout_s, why)
        return False

    def _flush(self, deadline_s: float) -> None:
        """Wait within the grace period of SIGTERM until the staged saves are sealed and durable."""
        self.wait("durable" if self.settings.durable.url else "memory", timeout_s=deadline_s)

    def restore(
        self,
        state: StateDict,
        step: int | None = None,
        *,
        strict: bool = True,
        on_lost: OnLost = "raise",
        exclude_from_proof: Collection[str] = (),
        timeout_s: float | None = None,
    ) -> int:
        """Fill ``state`` from the newest complete step, or from ``step``, and return the step restored.

        After a graceful stop of the job this is exactly the version that its ranks sealed, or an error: see
        :mod:`tieredckpt.agent.stopped_step`.

        Saved entries and ``state`` must match, or :class:`MismatchError` names the differences. ``strict=False``
        restores the entries that both have. A user's ``Stateful`` receives all entries that it saved, including those
        missing from its current ``state_dict()``.

        Return -1 only if every tier answered and no step was ever complete, so that training begins and nothing is
        lost. Then ``last_restore`` is ``None`` if nothing was ever saved. If saves were started and none became
        complete, its ``mode`` is ``"torn"``, and ``refused`` names the steps and their missing parts. With an explicit
        ``step`` this case raises :class:`CheckpointTornError`.

        A damaged step is reported, and the next older complete one is used. If no step is left:

        - :class:`CheckpointDamagedError` names the damaged steps.
        - :class:`CheckpointLostError` names the steps with parts on no node that answers, and these parts.
        - :class:`TierUnavailableError` names the tier that did not answer.

        With ``on_lost="start_fresh"`` the restore returns -1 in the first two cases.

        At the end the live state is compared with the saved one, and :class:`RestoreProofError` names the differences.
        ``exclude_from_proof`` names entries that may differ after a load. ``last_restore.proof`` reports what was
        compared. ``proof=False`` (or ``memory.proof``) disables the comparison.

        ``timeout_s``: seconds until :class:`TierUnavailableError` is raised because the agent, other nodes or the
        durable tier do not answer which steps exist. A read that has begun runs to completion.

        After an error ``state`` may be partly overwritten: do not train on it.
        """
        job = self._location.job
        _check_state(state)
        if step is not None:
            check_step(step)
        self._check_open()
        with self._event_log.record_restore() as outcome, deadlines.timeout_scope(timeout_s):
            expected = gather_expected_step(job, self._ranks.all_gather) if step is None else None
            if step is None and self.settings.enabled and (expected is None or not expected.is_required):
                expected = self._last_stop() or expected
            epoch = None
            if expected is not None and expected.is_required:
                step, epoch = expected.step, expected.epoch
            with explain_expected(expected):
                outcome.step = self._restore_any(
                    state, step, epoch, strict=strict, on_lost=on_lost, exclude_from_proof=exclude_from_proof
                )
            outcome.report = self.last_restore
            check_restored_step(job, expected, outcome.step)
            return outcome.step

    def save_directory(
        self,
        path: str | os.PathLike[str],
        step: int,
        *,
        keep: bool = False,
        durable: bool = False,
    ) -> SaveHandle:
        """Save all files below ``path`` as ``step``, as :meth:`save` does with ``force``.

        The files may change as soon as this returns. All ranks call this, each with its own directory or with one that
        they share: then each of them reads some of the files. Files of one name must be equal on all ranks. A step has
        the names and contents of files, not their owners, modes and times.
        """
        check_step(step)
        self._check_open()
        state = directory_state(self._ranks, Path(path).absolute())
        return self.save(state, step, force=True, keep=keep, durable=durable)

    def restore_directory(
        self,
        path: str | os.PathLike[str],
        step: int | None = None,
        *,
        overwrite: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Write the files of the newest complete step, or of ``step``, to ``path``; return the step.

        Like :meth:`restore`, for steps of :meth:`save_directory`. ``path`` appears with all files or not at all. If it
        exists and is not empty, it is replaced with ``overwrite``, and without it :class:`UsageError` is raised. Every
        node, or other place that no two ranks share, gets all files.
        """

        def restore(state: StateDict) -> int:
            return self.restore(state, step, timeout_s=timeout_s)

        self._check_open()
        return restore_directory(self._ranks, path, restore, overwrite=overwrite)

    def _last_stop(self) -> ExpectedStep | None:
        """Return the step that the last run sealed at its graceful stop, or ``None``; all ranks agree."""
        self._saver.join(restoring=True)
        agent, avoid_after = self.session.agent, self.session.settings.memory.avoid_after_crashed_loads
        mine = self._ranks.call_on_all(lambda: report_last_stop(agent, self._location.job, avoid_after=avoid_after))
        answers = self._ranks.all_gather(msgspec.json.encode(mine).decode())
        reports = [from_json(answer, StopReport) for answer in answers]
        stopped = newest_stop(reports)
        if stopped is None:
            return None
        source = describe_stop(stopped, reports)
        return ExpectedStep(stopped.step, source, is_required=True, epoch=stopped.epoch)

    def _restore_any(
        self,
        state: StateDict,
        step: int | None,
        epoch: int | None,
        *,
        strict: bool,
        on_lost: OnLost,
        exclude_from_proof: Collection[str],
    ) -> int:
        if not self.settings.enabled:
            return self._restorer.restore_plain(state, step)
        wait_for_overlapped_copies()
        self._saver.join(restoring=True)
        if self._ranks.rank == 0:
            self.session.durable.warn_memory_only()
        restored, report = self._restorer.restore(
            state, step, epoch, strict=strict, on_lost=on_lost, exclude_from_proof=exclude_from_proof
        )
        self.last_restore = report
        if restored >= 0:
            notify_progress_hook(self.session)
        else:
            self.session.loads.rewind_to(-1)
            if self._ranks.rank == 0:
                warn_of_steps_elsewhere(self._location.job, self.settings)
                self.session.add_metrics(**{f"begun_{'absent' if report is None else report.mode}": 1})
        self.prepare(state)
        return restored

    def prepare(self, state: StateDict) -> None:
        """Create, populate and register the memory of the next saves of ``state`` in the background.

        :meth:`restore` does the same. A save that begins before the memory is ready waits for its slot.
        """
        _check_state(state)
        self._check_open()
        if not self.settings.enabled:
            return
        own = shared = names = 0
        target: torch.device | None = None
        device = accelerator()
        for value in flatten_state(resolve_stateful(state)).values():
            tensor = value._local_tensor if isinstance(value, DTensor) else value
            names += 1
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                continue
            target = device.device_of(tensor) or target
            if isinstance(value, DTensor):
                own += tensor.nbytes
            else:
                shared += tensor.nbytes
        size = own + shared // self._ranks.size + names * _BYTES_BESIDE_TENSOR
        self.session.slots.prepare(self._ranks.rank, size, target)

    def steps(self) -> list[StepInfo]:
        """Return every step that this node can see, oldest first."""
        self._check_open()
        if not self.settings.enabled:
            found = plain_steps(self.settings.durable, self._location.job)
            return step_infos(StepInventory((), plain=found))
        return step_infos(self.session.list_steps(fresh=True))

    def loadable_versions(self) -> tuple[Candidate, ...]:
        """Return the versions that a restore could take, as this rank sees them, best first.

        All ranks call this. It waits for nodes that do not answer and raises without a version, as :meth:`restore`.
        """
        self._check_open()
        self._saver.join(restoring=True)
        return self._restorer.loadable_versions()

    def drop(self, step: int) -> bool:
        """Drop ``step`` in every tier and on every node, even if retained; return whether any of it existed.

        Its plain checkpoint is deleted too. While the package is disabled, only that is deleted.

        One rank calls this, and more may. :class:`TierUnavailableError` names nodes that did not answer and may still
        have the step. :class:`UsageError` is raised if steps of an abandoned branch would become the newest ones.
        """
        self._check_open()
        check_step(step)
        job = self._location.job
        if not self.settings.enabled:
            with contextlib.closing(open_store(self.settings.durable.url, self.settings.durable)) as store:
                return delete_plain_checkpoint(store, job, step)
        self._queue.finish_last(wait_s=self.settings.memory.wait_s)
        try:
            session = self.session
            seen = session.list_steps(fresh=True)
            groups = [view.version_id for view in seen.views if view.version_id.version == step]
            if groups:
                session.commits.drop_steps(groups)
        except PeerStoreError as error:
            raise TierUnavailableError(f"step {step} of {job}: {error}") from error
        is_plain = step in (*seen.plain, *seen.plain_incomplete) and delete_plain_checkpoint(
            session.durable.open(), job, step
        )
        return bool(groups) or is_plain

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"this Checkpointer of {self._location.job} is closed; make another one")

    def close(self) -> None:
        """Seal the staged saves and release the agent, which continues to upload without this process."""
        self._closed = True
        self._boundaries.release_tensors()
        self._queue.close()
        if self._durable_callback is not None:
            self._durable_callback.close()
        self._report_nothing_saved()
        session = session_if_open(self._location.job, self.settings)
        if session is not None:
            session.slots.wait_until_prepared()  # its threads could start an agent again later
        if session is not None:
            if self._is_first and self._last_saved is not None:  # replicas may have been added since the last save
                self._queue.report(session)
                self._queue.report_not_durable(session)
            session.stop_watching_agent()
        if self._preemption is not None:
            self._preemption.close()
        self._ranks.close()

    def _report_nothing_saved(self) -> None:
        """Log an error at the end if none of the saves succeeded."""
        saved = self._last_saved
        if self._due_saves and self._queue.last_sealed is None and saved is not None and saved.error is not None:
            log.error(
                "%s: none of the %d saves of rank %d succeeded, so this run cannot be restored. The last error: %s",
                *(self._location.job, self._due_saves, self._ranks.rank, saved.error),
            )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _with_arguments(settings: Settings, **sections: Mapping[str, Any]) -> Settings:
    """Return ``settings`` with these arguments.

    Without an argument for it, a ``durable.every`` that is not a multiple of ``memory.every`` becomes the same.
    """
    changes = {name: {k: v for k, v in values.items() if v is not None} for name, values in sections.items()}
    every = changes["memory"].get("every", settings.memory.every)
    follows = "every" not in changes["durable"] and isinstance(every, int)  # override_settings rejects other types
    if follows and every > 0 and settings.durable.every % every:
        changes["durable"]["every"] = every
    return override_settings(settings, **changes)


def _check_state(state: object) -> None:
    if not isinstance(state, Mapping):
        raise UsageError(
            f"The state is a {type(state).__name__}, and a dict is expected, for example "
            "{'model': model, 'optim': optimizer}"
        )
