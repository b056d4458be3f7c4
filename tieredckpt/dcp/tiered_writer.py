"""TieredWriter: DCP's StorageWriter over the node's memory tier, and its AsyncStager."""

from __future__ import annotations

import dataclasses
import logging
import os
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from peerstore.errors import PeerStoreError
from peerstore.shard_records import ShardKey, ShardRecord, VersionId
from tieredckpt.dcp.plain_checkpoints import plain_writer
from tieredckpt.dcp.rank_group import (
    PlanMessage,
    SaveRanks,
    agree_via_store,
    clear_plan_messages,
    current_save_ranks,
    decide_for_ranks,
    received_plan_messages,
)
from tieredckpt.dcp.slot_stager import SlotStager
from tieredckpt.errors import (
    MissingStepError,
    SaveFailedError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import StateTable
from tieredckpt.gc_pause import gc_paused
from tieredckpt.location import (
    Location,
    location_at_step,
    location_for_checkpoint_id,
    parse_location,
    reject_local_tiered_folder,
)
from tieredckpt.session.incarnation import CapturePoint, SaveDecision, SaveProblem, SaveProposal
from tieredckpt.session.save_job import ReportMetrics, SaveJob, SaveOptions
from tieredckpt.session.save_plan import (
    CachedWrites,
    PlannedSave,
    PlannedWrites,
    is_default_save_planner,
    plan_signature,
    state_table_for_planner,
    state_table_of_plans,
)
from tieredckpt.session.session import Session, StagedShard, open_session, session_if_open
from tieredckpt.settings import Settings, load_settings, override_settings
from tieredckpt.tensors.slot_copy import SlotWrite
from tieredckpt.tensors.state_dict import (
    state_fingerprint,
)

log = logging.getLogger(__name__)

_WINDOW_BYTES = 64 << 20
_NOWHERE = CapturePoint("", None, 0, None, -1)


@dataclasses.dataclass(frozen=True)
class SaveAssignment:
    """What all ranks of a save write for, and which part of it is this rank's."""

    decision: SaveDecision
    part: int


@dataclasses.dataclass(frozen=True)
class WriterOptions:
    """Options of a ``Checkpointer`` for the writer of one save."""

    seals: bool = True
    """``write_data`` seals what it wrote; otherwise the caller seals :attr:`TieredWriter.job`."""
    required: bool = False
    """Upload the step regardless of policy, and do not skip it for newer steps."""
    keep: bool = False
    """Do not evict the step for newer steps."""
    wait_s: float | None = None
    """Seconds to wait for a slot; ``None``: the setting ``memory.wait_s``."""
    report: ReportMetrics | None = None
    """Metrics function of a caller that counts failed saves; ``None``: the writer counts them."""


@dataclasses.dataclass
class _SaveCall:
    """One call of DCP's save, from ``set_up_storage_writer`` to ``finish``."""

    is_coordinator: bool = False
    collectives: bool = True
    rank: int = 0
    ranks: SaveRanks = dataclasses.field(default_factory=lambda: SaveRanks(()))
    plain: StorageWriter | None = None
    """DCP's own writer, while this package is switched off."""
    point: CapturePoint = _NOWHERE
    proposal: SaveProposal | None = None
    assignment: SaveAssignment | None = None
    plans: list[SavePlan] | None = None
    """All ranks' final plans, where this rank coordinates."""
    job: SaveJob | None = None
    """This rank's part, after the ranks have agreed on its key; ``None`` after an abort."""


class TieredWriter(SlotStager, StorageWriter):
    """Saves with ``dcp.save`` and ``dcp.async_save`` into this node's memory, and from there to the durable tier.

    ``target`` is ``tiered://JOB``, ``tiered://JOB/step-N`` or a job's name. A save returns when the shard is sealed:
    from then on it survives this process; the node agent makes it durable behind its back.

    A step behind one that the job has is a :class:`~tieredckpt.errors.UsageError`: a load without a step would pass
    over it. ``start_over``: unless this process has loaded or saved a step, the job's earlier steps stay behind.

    ``finite``: a state with NaN in it, or with infinities that were not there at this process's first save, is a
    :class:`~tieredckpt.errors.NonFiniteStateError`.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        step: int | None = None,
        *,
        durable: str | None = None,
        finite: bool = False,
        start_over: bool = False,
        settings: Settings | None = None,
        options: WriterOptions | None = None,
    ) -> None:
        super().__init__()
        self._finite = finite
        self._options = options or WriterOptions()
        self._starts_over = start_over
        settings = settings or load_settings()
        self.settings = settings if durable is None else override_settings(settings, durable={"url": durable})
        self._location = _to_save(location_at_step(parse_location(target), step))
        self._step_given = step
        self._call = _SaveCall()
        self.error: TieredCheckpointError | None = None
        """Why the last save did not happen, where it could not be raised (``use_collectives=False``)."""
        self.record: ShardRecord | None = None
        """What the last save sealed."""

    @property
    def job(self) -> SaveJob | None:
        """This rank's part of the last save; ``None`` if it has none."""
        return self._call.job

    @property
    def checkpoint_id(self) -> str:
        return str(self._location)

    @property
    def session(self) -> Session:
        return open_session(self._location.job, self.settings)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_call": _SaveCall()}

    # -- StorageWriter ----------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._location = _to_save(location_for_checkpoint_id(checkpoint_id, self._location, self._step_given))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).startswith("tiered:/")

    def storage_meta(self) -> StorageMeta:
        return dcp_storage_meta(self._location, None if self.job is None else self.job.key.version_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        reject_local_tiered_folder()
        self.error = self.record = None
        self._call = call = _SaveCall(
            is_coordinator, kwargs.get("use_collectives", True), kwargs.get("rank", 0), current_save_ranks()
        )
        if not self.settings.enabled:
            call.plain = plain_writer(self.settings.durable, self._location.job, self._step)
            call.plain.set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        call = self._call
        if call.plain is not None:
            return call.plain.prepare_local_plan(plan)
        call.proposal = self._propose(call)
        clear_plan_messages()
        return _with(plan, PlanMessage(call.proposal))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        call = self._call
        if call.plain is not None:
            return call.plain.prepare_global_plan(plans)
        if call.proposal is None:
            raise UsageError("prepare_global_plan was called before prepare_local_plan")
        if not call.collectives:
            self._agree_without_collectives(call, call.proposal)
            return plans
        proposals = received_plan_messages(SaveProposal) or [call.proposal]
        if len(proposals) != len(plans):
            raise SaveFailedError(
                f"{len(plans)} ranks have planned step {self._step} of {self._location.job} and {len(proposals)} have "
                "said what they write for: all of them have to save with a TieredWriter"
            )
        decision = decide_for_ranks(proposals)
        call.plans = plans if all(plan.usable for plan in plans) else None  # else the planner has them
        assignments = [SaveAssignment(decision, part) for part in range(len(plans))]
        call.assignment = assignments[call.rank]
        clear_plan_messages()
        return [_with(plan, PlanMessage(one)) for plan, one in zip(plans, assignments, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        call = self._call
        if call.plain is not None:
            self._end_staging()
            return call.plain.write_data(plan, planner)
        future: Future[list[WriteResult]] = Future()
        try:
            if self.error is not None:
                raise self.error
            with gc_paused():
                job = self._write(call, plan, planner)
                if self._options.seals:
                    self.record = job.seal()
                self._end_staging()
        except Exception as problem:
            self._leave_out()
            self._count_failure()
            error = _save_error(self._location, problem)
            if call.collectives and isinstance(problem, PeerStoreError):
                raise error from problem
            if call.collectives:
                raise
            # Without collectives a rank that raises leaves the others waiting at DCP's barrier.
            log.error("step %s of %s was not saved by this rank: %s", self._location.step, self._location.job, error)
            self.error = error
        except BaseException:
            self._leave_out()
            raise
        future.set_result([])
        return future

    def discard_written(self) -> None:
        """Release what was written and not sealed, and report that the step has no part of this rank."""
        if self.record is None:
            self._leave_out()

    def _leave_out(self) -> None:
        """This rank has no part of the step, which therefore is torn: what the others have of it is given up."""
        self._discard_staged()
        job, self._call.job = self._call.job, None
        if job is not None:
            job.abort()

    def _count_failure(self) -> None:
        session = session_if_open(self._location.job, self.settings)
        if self._options.report is None and session is not None:
            session.add_metrics(failed=1)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Only the coordinator, and only when every rank has written: the step is whole now."""
        call = self._call
        if call.plain is not None:
            call.plain.finish(metadata, results)
            return
        metadata.storage_data = {}
        metadata.storage_meta = self.storage_meta()
        if self.record is not None and call.collectives:
            self.session.report_complete(self.record.key.version_id)

    # -- inside -----------------------------------------------------------------------------------------------

    @property
    def _step(self) -> int:
        if self._location.step is None:
            raise MissingStepError(
                f"which step of {self._location.job} is this? Write TieredWriter({str(self._location)!r}, step=N) or "
                f"{self._location}/step-N"
            )
        return self._location.step

    def _propose(self, call: _SaveCall) -> SaveProposal:
        """What this rank says before a save; without collectives also why it cannot, for nobody may wait for it."""
        step = self._step
        try:
            owner = self.session.incarnation
            if self._handed_over is not None:
                owner.take_over(self._handed_over)
                self._handed_over = None
            self._leave_earlier_steps()
            call.point = self._point or owner.capture()
            proposal = self.session.propose(step, call.point)
            if call.rank == 0:
                self.session.check_step_order(step)
            self.session.check_durable()
            return proposal
        except (TieredCheckpointError, PeerStoreError) as error:
            if call.collectives:
                raise
            return SaveProposal(self._location.job, step, _NOWHERE, False, 0, 0, problem=SaveProblem.of(error))

    def _agree_without_collectives(self, call: _SaveCall, proposal: SaveProposal) -> None:
        """A rank that raises here would leave the others waiting at DCP's barrier: :meth:`write_data` does."""
        try:
            decision = agree_via_store(proposal, call.ranks)
            call.assignment = SaveAssignment(decision, call.ranks.part)
        except TieredCheckpointError as error:
            self.error = error
        except RuntimeError as error:  # of torch's stores
            self.error = TierUnavailableError(f"{self._location}: the ranks' store did not answer: {error}")

    def _assigned(self, call: _SaveCall) -> SaveAssignment:
        """As it has arrived for this save; nothing travels where a process saves alone."""
        arrived = received_plan_messages(SaveAssignment) if call.collectives else []
        clear_plan_messages()
        assignment = arrived[-1] if arrived else call.assignment
        if assignment is None or assignment.decision.job != self._location.job:
            raise SaveFailedError(
                f"step {self._step} of {self._location.job}: nothing arrived from the coordinator of this save. All "
                "ranks have to save with a TieredWriter, and DCP has to plan and write in one thread"
            )
        return assignment

    def _whole_table(self, call: _SaveCall, planner: SavePlanner) -> StateTable | None:
        """The names of the whole state, from whoever coordinates.

        With plan caching the plans that did not change arrive empty, and the planner has all of them.
        """
        plans, call.plans = call.plans, None
        if plans is None and call.is_coordinator and call.collectives:
            kept = getattr(planner, "global_plan", None)
            plans = kept if kept and all(plan.usable for plan in kept) else None
        return state_table_for_planner(planner, None if plans is None else state_table_of_plans(plans))

    def _write(self, call: _SaveCall, plan: SavePlan, planner: SavePlanner) -> SaveJob:
        """Copy this rank's tensors into a slot and remember the plan."""
        session = self.session
        assigned = self._assigned(call)
        decision, part = assigned.decision, assigned.part
        options = SaveOptions(self._becomes_durable(session), self._options.required, self._options.keep, self._finite)
        job = call.job = SaveJob(session, decision.key(part), options, self._options.report)
        session.adopt(decision, call.point)
        if part == 0:
            session.warn_memory_only()
        work = self._planned_writes(session, plan, planner)
        if not self.settings.memory.trust_objects:
            work.warn_unsafe_objects()
        if options.durable and self.settings.durable.on_busy == "wait":
            session.wait_for_drain(self.settings.durable.retry_s)
        staged = self._staged_for(job, work, decision.parts)
        table = work.planned.table if isinstance(work, CachedWrites) and decision.parts == 1 else None
        table = table or self._whole_table(call, planner)
        if isinstance(work, CachedWrites):
            session.cache_plan(dataclasses.replace(work.planned, part=part, table=table))
        else:
            self._remember(session, PlannedSave(staged.layout, part, decision.parts, table), plan, planner)
        job.describe(work.item_bytes(staged.layout), table)
        return job

    def _planned_writes(self, session: Session, plan: SavePlan, planner: SavePlanner) -> PlannedWrites:
        """Return this rank's writes; an earlier save with the same plan provides the layout."""
        if self._staged is None and is_default_save_planner(planner):
            planned = session.cached_plan(state_fingerprint(planner.state_dict))  # type: ignore[attr-defined]
            if planned is not None and planned.signature == plan_signature(plan):
                return CachedWrites(planned, plan, planner)
        return PlannedWrites(plan, planner, staged=self._staged is not None)

    def _staged_for(self, job: SaveJob, work: PlannedWrites, parts: int) -> StagedShard:
        """Return the slot that was staged before, or a new slot with all data of ``work``."""
        session, before = job.session, self._staged
        earlier = self._staged = self._under(session, before, job.key)
        staged = self._take_staged(work, job.key.part, parts)
        if staged is not None:
            self._staged = None
            job.use_staged(staged)
            return staged

        def fill(staged: StagedShard) -> None:
            self._fill(session, staged, work)
            if before is not None and earlier is None and not before.owner.is_alive:
                raise SaveFailedError(
                    f"{job.key}: the process that staged it has ended, and its slot may have been overwritten"
                )

        layout = work.layout(session.cached_layouts)
        wait_s = self.settings.memory.wait_s if self._options.wait_s is None else self._options.wait_s
        staged = job.stage(layout, parts, sum(map(len, work.item_bytes(layout))), fill, wait_s=wait_s)
        self._staged = None
        if earlier is not None:
            session.release_slot(earlier)
        return staged

    def _fill(self, session: Session, staged: StagedShard, work: PlannedWrites) -> None:
        """Copy window by window, so that a planner that makes new tensors never has many of them at once."""
        header = staged.layout.header_bytes
        window: list[SlotWrite] = []
        size = 0
        for entry in staged.layout.tensors:
            window.append(SlotWrite(work.tensor(entry), header + entry.start))
            size += entry.size_bytes
            if size >= _WINDOW_BYTES and not work.is_transparent:
                staged.memory.copy_in(window, session.copier)
                window, size = [], 0
        staged.memory.copy_in(window, session.copier)

    def _under(self, session: Session, staged: StagedShard | None, key: ShardKey) -> StagedShard | None:
        """The slot that was staged, as one of the incarnation that the save is for.

        ``None`` also where another rank's write has ended it: the state is still read from its memory, and is copied.
        """
        if staged is None or (staged.lease.key.epoch, staged.lease.key.incarnation) == (key.epoch, key.incarnation):
            return staged
        return session.relabel_slot(staged, key)

    def _remember(self, session: Session, planned: PlannedSave, plan: SavePlan, planner: SavePlanner) -> None:
        if is_default_save_planner(planner) and not any(item.tensor for item in planned.layout.items):
            known = tuple(state_fingerprint(planner.state_dict))  # type: ignore[attr-defined]
            planned = dataclasses.replace(planned, fingerprint=known, signature=plan_signature(plan))
        session.cache_plan(planned)

    def _becomes_durable(self, session: Session) -> bool:
        """Whether the step that is being written is wanted in the durable tier, too."""
        return self._options.required or session.wants_durable(self._step)


def dcp_storage_meta(location: Location, group: VersionId | None) -> StorageMeta:
    """What DCP's metadata says of where a step is; which attempt at it this is takes the place of DCP's random name."""
    name = group and f"{group.epoch}.{group.version}.{group.attempt}.{group.incarnation}"
    return StorageMeta(checkpoint_id=str(location), save_id=name)


def _save_error(location: Location, problem: Exception) -> TieredCheckpointError:
    if isinstance(problem, TieredCheckpointError):
        return problem
    if isinstance(problem, PeerStoreError):
        return SaveFailedError(str(problem))
    return SaveFailedError(f"step {location.step} of {location.job} was not saved: {problem!r}")


def _to_save(location: Location) -> Location:
    if location.cast:
        raise UsageError(f"{location}?cast=1 is for loading: what is saved keeps its types")
    if location.epoch is not None:
        raise UsageError(f"{location} names an epoch, which is for loading: a save gets the epoch of its own run")
    return location


def _with(plan: SavePlan, message: PlanMessage) -> SavePlan:
    return dataclasses.replace(plan, storage_data=message)
