"""Checkpointer: save, seal, wait, restore, list and drop steps of a training loop."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, TypeVar

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.tensor import DTensor

from peerstore import deadlines
from peerstore.errors import PeerStoreError, UnavailableError
from peerstore.message_codec import from_json
from peerstore.shard_records import ShardKey
from tieredckpt.agent.local_agents import warn_of_steps_elsewhere
from tieredckpt.agent.stopped_step import StopReport, describe_stop, newest_stop, report_last_stop
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
    await_copies,
    describe_replication,
    step_infos,
)
from tieredckpt.checkpointer.save_queue import SaveQueue
from tieredckpt.dcp.plain_checkpoints import plain_steps, plain_writer
from tieredckpt.dcp.rank_group import RankGroup, unwrap_save_error
from tieredckpt.dcp.tiered_reader import RestoreReport
from tieredckpt.dcp.tiered_writer import TieredWriter, WriterOptions
from tieredckpt.errors import (
    SaveFailedError,
    StoreBusyError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.gc_pause import gc_paused
from tieredckpt.live import abort_fence
from tieredckpt.live.boundary_recorder import BoundaryRecorder
from tieredckpt.location import check_step, parse_location
from tieredckpt.session.agent_discovery import join_peer_agents, join_standby_nodes
from tieredckpt.session.save_job import SaveJob, SaveOptions
from tieredckpt.session.session import Session, open_session, session_if_open
from tieredckpt.settings import Settings, load_settings, override_settings
from tieredckpt.tensors.device import accelerator
from tieredckpt.tensors.state_dict import (
    StateDict,
    flatten_state,
    resolve_stateful,
)

log = logging.getLogger(__name__)

_SAY_S = 60.0
_BYTES_BESIDE_TENSOR = 256
"""Room in a slot beside each tensor, for alignment and small objects."""
_SEALING_S = 2.0
"""A seal ends in less, where the node keeps up; a save that may be skipped waits no longer for the one before it."""
T = TypeVar("T")


class _SealVote(msgspec.Struct, frozen=True):
    """What a rank tells the others before a step is sealed."""

    good: bool
    """Its last save was of that step, and is sealed."""
    attempts: int
    """How often it has tried."""


class Checkpointer:
    """Keeps a training loop's state in the tiers.

    ::

        with Checkpointer("tiered://llama-8b", durable="s3://bucket/llama", every=1, durable_every=200) as ckpt:
            step = ckpt.restore(state) + 1
            for step in range(step, total):
                train_one_step()
                ckpt.save(state, step)

    All ranks construct it, and call ``restore`` and ``save``, at the same points. ``state`` is what ``dcp.save`` takes:
    nested dicts of tensors, DTensors and Python objects, and ``Stateful`` objects. A save that fails is reported in
    its :class:`SaveHandle` and in the metrics; it does not end the training unless ``on_failure="raise"``.
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
        self._on_failure = on_failure
        self._together = RankGroup(process_group)
        self._restoring = CheckpointRestorer(self._location.job, self.settings, self._together)
        self._recorded = SaveRestoreLog()
        self._is_first = self._together.rank == 0
        self._queue = SaveQueue(self._location.job, self.settings, self._recorded, is_first=self._is_first)
        self._noter = BoundaryRecorder(self._location.job, self.settings)
        self._planned_before = False
        self._joined = False
        self._closed = False
        self._may_save = False
        """The checks before the first save have passed on all ranks."""
        self._asked_to_join: set[bool] = set()
        """For restoring, for saving."""
        self._part = 0
        """Which part of a step this rank wrote last."""
        self._last_saved: SaveHandle | None = None
        self._tried_saves = 0
        """Calls of save that were due."""
        self._skip_said = -math.inf
        """When it was last said that a step was skipped."""
        self.last_restore: RestoreReport | None = None
        """What :meth:`restore` read, and from which tiers; why it read nothing, where there had been saves."""
        self._preemption = PreemptionHandler(self._flush, grace_s) if on_sigterm == "save" else None
        self._last_step = last_step_agreement(self._location.job, self._together.rank, self._together.size)

    @property
    def session(self) -> Session:
        if self._closed and session_if_open(self._location.job, self.settings) is None:
            self._check_open()  # a session that is opened has an agent started
        return open_session(self._location.job, self.settings)

    @property
    def _wants_finite(self) -> bool:
        return self.settings.memory.nonfinite == "refuse"

    def _join(self, *, restoring: bool = False) -> None:
        """Once before the first restore and once before the first save: have the job's nodes know each other."""
        if restoring in self._asked_to_join:
            return
        self._all_do(lambda: self.session)  # who has no agent to tell others about would have them wait in the store
        self._joined = self._all_do(lambda: join_peer_agents(self.session, restoring=restoring))
        self._asked_to_join.add(restoring)

    def _all_do(self, call: Callable[[], T]) -> T:
        """What ``call`` gives, once all ranks have called it; where one has an error, all of them raise and quote it.

        So nobody asks a node for its copies before it knows the job, nor waits for a rank that is not coming.
        """
        error: TieredCheckpointError | None = None
        try:
            found = call()
        except (TieredCheckpointError, PeerStoreError) as problem:
            error = problem if isinstance(problem, TieredCheckpointError) else TierUnavailableError(str(problem))
        answers = enumerate(self._together.all_gather(str(error) if error is not None else ""))
        problems = [text if text.startswith("rank ") else f"rank {rank}: {text}" for rank, text in answers if text]
        if error is not None:
            raise error
        if problems:
            raise TierUnavailableError("; ".join(dict.fromkeys(problems)))
        return found

    # -- saving -----------------------------------------------------------------------------------------------

    def save(
        self, state: StateDict, step: int, *, force: bool = False, keep: bool = False, durable: bool = False
    ) -> SaveHandle:
        """Stage ``state`` as ``step``; returns as soon as the training may change it again.

        ``keep``: the step stays, in memory and in the durable tier, until :meth:`drop` or ``tieredckpt unpin``: it
        counts towards no number of newest ones, and no save takes its room (one that finds none says so). ``durable``:
        the step becomes durable whatever ``durable.every`` says, and is not left out when a newer one is there first;
        ``saved.wait("durable")`` says when, and raises :class:`SaveFailedError` where it had to give way to saves in
        memory, which go on while the store is away. :class:`UsageError` where there is no durable tier. With either one
        the step is saved also when it is not due, and waits up to ``memory.wait_s`` for a slot. All ranks say the same.

        The first save raises :class:`UsageError` where the job has a newer step of an earlier run and nothing was
        restored, :class:`DurableRefusedError` where the durable tier takes no object, and
        :class:`TierUnavailableError` where it does not answer and nothing was restored
        (``durable.on_unreachable="continue"``: a warning). A later save of an older step fails.

        After SIGTERM all ranks agree on a step, this one or the next, as the last: it is saved by all of them, made
        durable within the grace period, and the signal is delivered to whoever got it.
        """
        check_step(step)
        _check_state(state)
        self._check_open()
        if durable and not self.settings.durable.url:
            raise UsageError(
                f"save(durable=True): {self._location.job} has no durable tier to keep step {step} in. Name one: "
                "Checkpointer(durable='s3://bucket/prefix'), or durable.url ($TIEREDCKPT_DURABLE_URL)"
            )
        self._noter.record(state, step)
        self._came_further()
        last = self._is_last(step)
        if step % self.settings.memory.every and not (force or keep or durable or last):
            return SaveHandle(step, SaveState.NOT_DUE)
        self._check_first_save(step)
        began = time.perf_counter()
        try:
            with gc_paused():
                if self.settings.enabled:
                    wait_s = self.settings.memory.wait_s if keep or durable else None
                    saved = self._save(state, step, durable=last or durable, keep=keep, wait_s=wait_s)
                else:
                    saved = self._save_plain(state, step, durable=last or durable)
        except StoreBusyError as error:
            # Once a minute: the agent says up to which step the job is protected, and since when not.
            again = time.monotonic() - self._skip_said < _SAY_S
            level = logging.DEBUG if again else logging.WARNING
            log.log(
                level,
                "step %d of %s was skipped: %s. Save less often (every=), wait for a slot (on_busy='wait'), or raise "
                "agent.burst_slots",
                *(step, self._location.job, error),
            )
            self._skip_said = self._skip_said if again else time.monotonic()
            saved = SaveHandle(step, SaveState.SKIPPED, error)
        except (TieredCheckpointError, CheckpointException, PeerStoreError) as failure:
            abort_fence.raise_if_aborted()  # of a broken world, in whose collectives it failed
            saved = SaveHandle(step, SaveState.FAILED, unwrap_save_error(failure))
            log.error("step %d of %s was not saved: %s", step, self._location.job, saved.error)
        if self.settings.enabled:
            self._observe(saved, time.perf_counter() - began)
        self._last_saved = saved
        self._tried_saves += saved.state is not SaveState.NOT_DUE
        self._recorded.record_save(saved, time.perf_counter() - began)
        if self._preemption is not None and last and self._preemption.requested:
            self._preemption.flush_and_exit()
        if saved.error is not None and self._on_failure == "raise":
            raise saved.error
        return saved

    def _check_first_save(self, step: int) -> None:
        """Raise on all ranks before the first save where saving cannot have the result that the caller expects."""
        if self._may_save or not self.settings.enabled:
            return

        def check() -> None:
            with contextlib.suppress(TierUnavailableError, PeerStoreError):  # the save itself reports those
                self.session.newest_known_epoch()
                self.session.check_step_order(step)
            if session_if_open(self._location.job, self.settings) is not None:
                with contextlib.suppress(PeerStoreError):
                    self.session.check_durable()

        self._all_do(check)
        self._may_save = True

    def _is_last(self, step: int) -> bool:
        """Whether all ranks save ``step`` and then some of them, or all, have to go."""
        if self._preemption is None or not self._preemption.active:
            return False
        told = self._preemption.requested
        return told if self._last_step is None else self._last_step.is_last(step, told=told)

    def _save(
        self, state: StateDict, step: int, *, durable: bool, keep: bool = False, wait_s: float | None = None
    ) -> SaveHandle:
        if wait_s is None:
            wait_s = self.settings.memory.wait_s if self.settings.memory.on_busy == "wait" else 0.0
        if not self._planned_before:
            return self._save_first(state, step, durable=durable, keep=keep)
        session = self.session
        self._joined = join_standby_nodes(session) or self._joined
        if session.agents_are_isolated:
            return self._save_first(state, step, durable=durable, keep=keep, wait_s=wait_s)
        knowing = session.incarnation.agreed_rank_count
        if knowing is not None and knowing < self._together.size:
            raise SaveFailedError(
                f"{knowing} of the {self._together.size} ranks of this checkpointer have loaded or saved a step of "
                f"{self._location.job} without the others, which do not know what the job goes on from. Restore on all "
                "ranks; to look at an old step use a process of its own, and for a part of the state another job"
            )
        required = durable and bool(self.settings.durable.url)
        wanted = required or session.wants_durable(step)
        key: ShardKey | None = None
        try:
            found = self._queue.planned(session, state)
            if found is not None:
                key = session.incarnation.next_key(step, found.planned.part)
                self._queue.finish_last(wait_s=max(wait_s, _SEALING_S))
                session.check_step_order(step)  # once it is known what was sealed last
                if self._joined:
                    self._queue.require_copies(session)
                if wanted and self.settings.durable.on_busy == "wait":
                    session.wait_for_drain(self.settings.durable.retry_s)
                options = SaveOptions(wanted, required=required, keep=keep, finite=self._wants_finite)
                job = self._queue.stage(session, found, key, options, wait_s=wait_s)
        except BaseException:
            self._leave_out(session, key, step)
            raise
        if found is None:
            return self._save_first(state, step, durable=durable, keep=keep)
        return self._seal_later(job)

    def _seal_later(self, job: SaveJob) -> SaveHandle:
        self._queue.start_seal(job)
        return SaveHandle(job.key.version, SaveState.STAGED, job=job, has_replicas=self._joined)

    def _leave_out(self, session: Session, key: ShardKey | None, step: int) -> None:
        """In the background: what the other ranks have of this step can never be whole."""
        if session.incarnation.part_count < 2 or session.incarnation.current is None or not self._planned_before:
            return
        # Also where it is not known yet what would have been written: the next try has the others' number then.
        self._queue.submit(session.report_part_aborted, key or session.incarnation.next_key(step, self._part))

    def seal(self, state: StateDict, step: int, *, durable: bool = False, timeout_s: float = 600.0) -> SaveHandle:
        """Have ``step`` safe on every rank before all of them leave: sealed, and with its copies on other nodes.

        All ranks call it with the state that ``step`` left. Where every rank's last save was that one nothing is saved
        again. ``durable``: also in the durable tier, where there is one. Copies that do not come in time are warned of
        (what is sealed outlives this process all the same); raises when the step is not sealed, or not durable.
        """
        abort_fence.raise_if_aborted()
        _check_state(state)
        self._check_open()
        deadline = time.monotonic() + timeout_s
        if not self.settings.enabled:
            return self._save_plain(state, check_step(step), durable=True)
        durable = durable and bool(self.settings.durable.url)
        with deadlines.timeout_scope(timeout_s):
            self._check_first_save(step)
            try:
                saved = self._sealed_by_all(step, timeout_s, durable=durable)
                if saved is None:
                    saved = self._last_saved = self._save(state, check_step(step), durable=durable, wait_s=timeout_s)
                saved.wait(timeout_s=max(0.0, deadline - time.monotonic()))
                self._copied(saved, max(0.0, deadline - time.monotonic()))
            except PeerStoreError as error:
                raise TierUnavailableError(f"step {step} of {self._location.job}: {error}") from error
            except CheckpointException as failure:
                raise unwrap_save_error(failure) from failure
            if durable:
                saved.wait("durable", timeout_s=max(0.0, deadline - time.monotonic()))
        return saved

    def _sealed_by_all(self, step: int, timeout_s: float, *, durable: bool) -> SaveHandle | None:
        """The last save, where it was of this step and came to its end on every rank."""
        saved = self._last_saved
        good = saved is not None and saved.step == step and not (durable and not saved.becomes_durable)
        if good and saved is not None:
            try:
                good = saved.wait(timeout_s=timeout_s) in (SaveState.SEALED, SaveState.COPIED, SaveState.DURABLE)
            except (TieredCheckpointError, PeerStoreError):  # it is saved again
                good = False
        session = self.session
        mine = _SealVote(bool(good), session.incarnation.attempts_at(step))
        answers = [
            from_json(answer, _SealVote) for answer in self._together.all_gather(msgspec.json.encode(mine).decode())
        ]
        if all(answer.good for answer in answers):
            return saved
        # Some may have tried more often than others, and parts of different attempts make no step.
        session.align_attempts(step, max(answer.attempts for answer in answers), self._together.rank)
        return None

    def _copied(self, saved: SaveHandle, timeout_s: float) -> None:
        """Wait for the copies of what was sealed last."""
        last = self._queue.last_sealed
        if last is None or not self._joined:
            return
        found = await_copies(self.session, last, timeout_s)
        if found.missing_copies:
            said = describe_replication(found)
            log.warning("step %d of %s has %s after %.0f s", saved.step, self._location.job, said, timeout_s)

    def _save_first(
        self, state: StateDict, step: int, *, durable: bool, keep: bool, wait_s: float | None = None
    ) -> SaveHandle:
        """Through DCP's planning, with its collectives: a state that was not planned before, or every one where nobody
        but the ranks could tell the agents that a step is whole.
        """
        self._all_ready(self._noter.names, step)
        self._join()
        options = WriterOptions(
            # Agents that do not know each other learn from DCP that all ranks have sealed.
            seals=self.session.agents_are_isolated,
            required=durable and bool(self.settings.durable.url),
            keep=keep,
            wait_s=wait_s,
            report=partial(self._queue.report, self.session),
        )
        writer = TieredWriter(
            self._location.job, step, finite=self._wants_finite, settings=self.settings, options=options
        )
        try:
            self._together.call_dcp(dcp.save, state, storage_writer=writer)
        except CheckpointException as failure:
            writer.discard_written()
            error = unwrap_save_error(failure)
            raise error if wait_s is not None and isinstance(error, StoreBusyError) else failure from None
        except BaseException:
            writer.discard_written()
            raise
        job = writer.job
        if job is None:
            raise writer.error or SaveFailedError(f"step {step} of {self._location.job} left no shard")
        self._planned_before = True
        self._part = job.key.part
        if writer.record is None:
            return self._seal_later(job)
        self._queue.add_sealed(job, writer.record)
        return SaveHandle(step, SaveState.SEALED, job=job, has_replicas=self._joined)

    def record_boundary(self, state: StateDict, step: int) -> None:
        """``state`` is what ``step`` has left: where a fault finds it unchanged, survivors can go on from it.

        Every :meth:`save` does this also, whether it is due or not; needed only by who does not call it at every step.
        """
        check_step(step)
        _check_state(state)
        self._noter.record(state, step)
        self._came_further()

    def _give(self, planner: SavePlanner, step: int) -> None:
        """Save as ``step`` what the planners of all ranks have kept of it, and know it to be whole."""
        self._all_ready()
        self._join()
        self.session.rewind_to(step)  # what was sealed of later steps is of a past that the job leaves
        # In the durable tier some nodes' part of it would be missing: new ones do not know where that is.
        settings = override_settings(self.settings, durable={"url": ""})
        writer = TieredWriter(self._location.job, step, finite=self._wants_finite, settings=settings)
        self._together.call_dcp(dcp.save, {}, storage_writer=writer, planner=planner)
        if writer.record is None:
            raise writer.error or SaveFailedError(f"step {step} of {self._location.job} left no shard")
        self.session.report_complete(writer.record.key.version_id)

    def _all_ready(self, names: str = "", step: int | None = None) -> None:
        """Before a collective: a rank that cannot reach its node must not leave the others waiting in it.

        ``names``: a digest of what this rank's state has; where all have the same, each of them knows what there is.
        """
        problem = ""
        try:
            self._queue.finish_last(wait_s=self.settings.memory.wait_s)
            if self._joined:
                self._queue.require_copies(self.session)
            self.session.newest_known_epoch()
            if step is not None:
                self.session.check_step_order(step)
        except (TieredCheckpointError, PeerStoreError) as error:
            problem = f"rank {self._together.rank}: {error}"
        answers = [text.partition(" ") for text in self._together.all_gather(f"{names} {problem}")]
        if names and all(named == names for named, _, _ in answers):
            self._noter.mark_names_complete()
        problems = [text for _, _, text in answers if text]
        if problems:
            raise SaveFailedError("; ".join(problems))

    def _save_plain(self, state: StateDict, step: int, *, durable: bool) -> SaveHandle:
        if step % self.settings.durable.every and not durable:
            return SaveHandle(step, SaveState.NOT_DUE)
        writer = plain_writer(self.settings.durable, self._location.job, step)
        self._together.call_dcp(dcp.save, state, storage_writer=writer)
        return SaveHandle(step, SaveState.DURABLE)

    def _came_further(self) -> None:
        """To the step after the one that was loaded, whether it is due to be saved or not."""
        session = session_if_open(self._location.job, self.settings)
        if session is not None:
            session.report_load_survived()

    def _observe(self, saved: SaveHandle, blocked_s: float) -> None:
        """What this call knows; a save that got as far as its seal is counted by whoever seals it."""
        ended = {SaveState.SKIPPED: "skipped", SaveState.FAILED: "failed"}.get(saved.state)
        counts = {ended: 1.0} if ended and saved.job is None else {}
        # Without a session there is no agent to tell, and asking for one again takes as long as before.
        session = session_if_open(self._location.job, self.settings)
        self._queue.submit(self._queue.report, session, blocked_seconds=blocked_s, **counts)

    # -- waiting ----------------------------------------------------------------------------------------------

    def wait(self, tier: Literal["memory", "durable"] = "memory", *, timeout_s: float = 600.0) -> bool:
        """Until all saves so far have reached ``tier``; False when the time was not enough or some cannot get there."""
        if not self.settings.enabled:
            return True
        deadline = time.monotonic() + timeout_s
        try:
            self._queue.finish_last(wait_s=timeout_s)
            if tier == "memory" or not self.settings.durable.url:
                return tier == "memory"
            left_s = max(0.0, deadline - time.monotonic())
            view = self.session.agent.wait_durable(self._location.job, None, left_s)
        except (StoreBusyError, UnavailableError) as error:
            why = str(error)
        else:
            if view is None or view.state in ("done", "skipped"):
                return True
            why = f"step {view.version_id.version} is {view.state}{f': {view.error}' if view.error else ''}"
        log.warning("%s: not all saves are in the %s tier after %.1f s: %s", self._location.job, tier, timeout_s, why)
        return False

    def _flush(self, deadline_s: float) -> None:
        """What SIGTERM leaves time for: seal what is staged, and make it durable."""
        self.wait("durable" if self.settings.durable.url else "memory", timeout_s=deadline_s)

    # -- restoring --------------------------------------------------------------------------------------------

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
        """Fill ``state`` from the newest whole step (or ``step``) and return which one it was.

        After a graceful stop of the job that is exactly the version that its ranks sealed, or an error: see
        :mod:`tieredckpt.agent.stopped_step`.

        Every entry that was saved has to have a place in ``state``, and the other way round: else
        :class:`MismatchError` names them, and ``strict=False`` restores what both have. A ``Stateful`` of your own is
        given all it saved, also what it has no place for yet.

        Returns -1 only when every tier was asked and no step was ever whole: nothing is lost, and training begins.
        ``last_restore`` is ``None`` then where nothing was ever saved. Where saves were begun and none came to be whole
        its ``mode`` is ``"torn"``, and ``refused`` names the steps and the parts they lack; a ``step`` that is named is
        a ``CheckpointTornError`` then. A damaged step is reported and the next older whole one is used. Where there is
        none: ``CheckpointDamagedError`` and ``CheckpointLostError`` (there were whole steps, and parts of them are on
        no node that answers) name the steps and what is missing of them, ``TierUnavailableError`` the tier that could
        not be asked. ``on_lost="start_fresh"`` starts from nothing in the first two cases.

        At the end ``state`` is asked what it is made of now, and that is compared with what was saved:
        :class:`RestoreProofError` names what differs. ``exclude_from_proof`` names what may differ in ``state`` after a
        load; ``last_restore.proof`` says what was compared. ``proof=False`` (or ``memory.proof``) turns it off.

        ``timeout_s``: when it is not known by then what there is, because the agent, other nodes or the durable tier do
        not answer, that is a ``TierUnavailableError`` too. What is being read then is read to its end.

        After an error ``state`` may hold parts of what was being read: do not train on it.
        """
        job = self._location.job
        _check_state(state)
        if step is not None:
            check_step(step)
        self._check_open()
        with self._recorded.record_restore() as told, deadlines.timeout_scope(timeout_s):
            expected = gather_expected_step(job, self._together.all_gather) if step is None else None
            if step is None and self.settings.enabled and (expected is None or not expected.is_required):
                expected = self._last_stop() or expected
            epoch = None
            if expected is not None and expected.is_required:
                step, epoch = expected.step, expected.epoch
            with explain_expected(expected):
                told.step = self._restore_any(
                    state, step, epoch, strict=strict, on_lost=on_lost, exclude_from_proof=exclude_from_proof
                )
            told.report = self.last_restore
            check_restored_step(job, expected, told.step)
            return told.step

    def _last_stop(self) -> ExpectedStep | None:
        """Return the step that the last run sealed when it was stopped; all ranks get the same one."""
        self._join(restoring=True)
        mine = self._all_do(lambda: report_last_stop(self.session.agent, self._location.job))
        told = self._together.all_gather(msgspec.json.encode(mine).decode())
        reports = [from_json(one, StopReport) for one in told]
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
            return self._restoring.restore_plain(state, step)
        wait_for_overlapped_copies()
        self._join(restoring=True)
        if self._together.rank == 0:
            self.session.warn_memory_only()
        restored, report = self._restoring.restore(
            state, step, epoch, strict=strict, on_lost=on_lost, exclude_from_proof=exclude_from_proof
        )
        self.last_restore = report
        if restored >= 0:
            notify_progress_hook(self.session)
        else:
            self.session.rewind_to(-1)
            if self._together.rank == 0:
                warn_of_steps_elsewhere(self._location.job, self.settings)
                self.session.add_metrics(**{f"begun_{'absent' if report is None else report.mode}": 1})
        self.prepare(state)
        return restored

    def prepare(self, state: StateDict) -> None:
        """Make, populate and register the memory of the next saves of ``state`` in the background.

        :meth:`restore` does the same. A save that comes before the memory is ready waits for the slot that it needs.
        """
        _check_state(state)
        self._check_open()
        if not self.settings.enabled:
            return
        own = shared = names = 0
        place: torch.device | None = None
        device = accelerator()
        for value in flatten_state(resolve_stateful(state)).values():
            tensor = value._local_tensor if isinstance(value, DTensor) else value
            names += 1
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                continue
            place = device.device_of(tensor) or place
            if isinstance(value, DTensor):
                own += tensor.nbytes
            else:
                shared += tensor.nbytes
        size = own + shared // self._together.size + names * _BYTES_BESIDE_TENSOR
        self.session.prepare_slots(self._together.rank, size, place)

    # -- the rest ---------------------------------------------------------------------------------------------

    def steps(self) -> list[StepInfo]:
        """Every step this node can see, oldest first."""
        self._check_open()
        if not self.settings.enabled:
            found = plain_steps(self.settings.durable, self._location.job)
            return [StepInfo(step, ("durable",), is_complete=True) for step in found]
        return step_infos(self.session.agent.list_steps(self._location.job, fresh=True))

    def drop(self, step: int) -> bool:
        """Give up ``step``, kept or not, in every tier and on every node; whether there was something of it.

        One rank calls it; more than one may. :class:`TierUnavailableError` names who could not be told and may still
        have it, :class:`UsageError` says where steps that the job has left would be taken for its newest ones.
        """
        self._check_open()
        check_step(step)
        if not self.settings.enabled:
            raise UsageError("drop() gives up steps in memory and their durable copies, not plain checkpoints")
        job = self._location.job
        self._queue.finish_last(wait_s=self.settings.memory.wait_s)
        try:
            session = self.session
            views = session.agent.list_steps(job, fresh=True).views
            groups = [view.version_id for view in views if view.version_id.version == step]
            if groups:
                session.drop_steps(groups)
        except PeerStoreError as error:
            raise TierUnavailableError(f"step {step} of {job}: {error}") from error
        return bool(groups)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"this Checkpointer of {self._location.job} is closed; make another one")

    def close(self) -> None:
        """Seal what is staged and let go of the agent; what is draining goes on without this process."""
        self._closed = True
        self._noter.release_tensors()
        self._queue.close()
        self._report_nothing_saved()
        session = session_if_open(self._location.job, self.settings)
        if session is not None:
            session.wait_until_prepared()  # a thread that came later might start an agent again
        if session is not None:
            if self._is_first and self._last_saved is not None:  # copies may have come since the last save
                self._queue.report(session)
                self._queue.report_not_durable(session)
            session.stop_watching_agent()
        if self._preemption is not None:
            self._preemption.close()
        self._together.close()

    def _report_nothing_saved(self) -> None:
        """Warn at the end where none of the saves succeeded."""
        saved = self._last_saved
        if self._tried_saves and self._queue.last_sealed is None and saved is not None and saved.error is not None:
            log.error(
                "%s: none of the %d saves of rank %d succeeded, so this run cannot be restored. The last error: %s",
                *(self._location.job, self._tried_saves, self._together.rank, saved.error),
            )

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _with_arguments(settings: Settings, **sections: Mapping[str, Any]) -> Settings:
    """``settings`` with the arguments that were given; steps become durable no more often than they are saved."""
    changes = {name: {k: v for k, v in values.items() if v is not None} for name, values in sections.items()}
    every = changes["memory"].get("every", settings.memory.every)
    follows = "every" not in changes["durable"] and isinstance(every, int)  # override_settings refuses all others
    if follows and every > 0 and settings.durable.every % every:
        changes["durable"]["every"] = every
    return override_settings(settings, **changes)


def _check_state(state: object) -> None:
    if not isinstance(state, Mapping):
        raise UsageError(
            f"The state is a {type(state).__name__}, and a dict is expected, for example "
            "{'model': model, 'optim': optimizer}"
        )
