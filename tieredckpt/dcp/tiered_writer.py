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
    join_agents_in_dcp_call,
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
from tieredckpt.rank_error import RankError
from tieredckpt.session.incarnation import CapturePoint, SaveDecision, SaveProposal
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
from tieredckpt.session.session import Session, open_session, session_if_open
from tieredckpt.session.slot_pool import StagedShard
from tieredckpt.settings import Settings, load_settings, override_settings, require_plain_url
from tieredckpt.tensors.slot_copy import SlotWrite
from tieredckpt.tensors.state_dict import (
    state_fingerprint,
)

log = logging.getLogger(__name__)

_WINDOW_BYTES = 64 << 20
_NO_POINT = CapturePoint("", None, 0, None, -1)


@dataclasses.dataclass(frozen=True)
class SaveAssignment:
    """Decision of all ranks of a save, and this rank's part."""

    decision: SaveDecision
    part: int


@dataclasses.dataclass(frozen=True)
class WriterOptions:
    """Options of a ``Checkpointer`` for the writer of one save."""

    seals: bool = True
    """Whether ``write_data`` seals the shard; otherwise the caller seals :attr:`TieredWriter.job`."""
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
    """DCP's own writer, while this package is disabled."""
    point: CapturePoint = _NO_POINT
    proposal: SaveProposal | None = None
    assignment: SaveAssignment | None = None
    plans: list[SavePlan] | None = None
    """Final plans of all ranks, on DCP's coordinator."""
    job: SaveJob | None = None
    """This rank's part, after the ranks have agreed on its key; ``None`` after an abort."""


class TieredWriter(SlotStager, StorageWriter):
    """Writer for ``dcp.save`` and ``dcp.async_save`` into this node's memory and the durable tier.

    ``target`` is ``tiered://JOB``, ``tiered://JOB/step-N`` or a job's name. A save returns when the shard is sealed.
    The shard then survives this process. The node agent copies it to other nodes and uploads it in the background.

    A step behind an existing one raises :class:`~tieredckpt.errors.UsageError`, because a load without a step would
    skip it. ``start_over``: abandon the job's earlier steps, unless this process has loaded or saved a step.

    ``finite``: raise :class:`~tieredckpt.errors.NonFiniteStateError` for a state with NaN, or with infinities that this
    process's first save did not have.
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
        require_plain_url(self.settings)
        self._location = _check_save_location(location_at_step(parse_location(target), step))
        self._step_given = step
        self._call = _SaveCall()
        self.error: TieredCheckpointError | None = None
        """Error of the last save if it could not be raised (``use_collectives=False``)."""
        self.record: ShardRecord | None = None
        """Record of the shard that the last save sealed."""

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

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._location = _check_save_location(
                location_for_checkpoint_id(checkpoint_id, self._location, self._step_given)
            )

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
        if call.collectives:
            join_agents_in_dcp_call(self, self._location.job, lambda: self.session, restoring=False)
        call.proposal = self._propose(call)
        clear_plan_messages()
        return _with_message(plan, PlanMessage(call.proposal))

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
                f"{len(proposals)} of {len(plans)} ranks sent a proposal for step {self._step} of "
                f"{self._location.job}. All ranks must save with a TieredWriter"
            )
        decision = decide_for_ranks(proposals)
        call.plans = plans if all(plan.usable for plan in plans) else None  # otherwise the planner has cached them
        assignments = [SaveAssignment(decision, part) for part in range(len(plans))]
        call.assignment = assignments[call.rank]
        clear_plan_messages()
        return [_with_message(plan, PlanMessage(one)) for plan, one in zip(plans, assignments, strict=True)]

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
            self._abort_part()
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
            self._abort_part()
            raise
        future.set_result([])
        return future

    def discard_written(self) -> None:
        """Abort this rank's part unless it is sealed."""
        if self.record is None:
            self._abort_part()

    def _abort_part(self) -> None:
        """Abort this rank's part, so the step can never be complete and all nodes drop their parts."""
        self._discard_staged()
        job, self._call.job = self._call.job, None
        if job is not None:
            job.abort()

    def _count_failure(self) -> None:
        session = session_if_open(self._location.job, self.settings)
        if self._options.report is None and session is not None:
            session.add_metrics(failed=1)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Report the step as complete. DCP's coordinator calls this after every rank has written."""
        call = self._call
        if call.plain is not None:
            call.plain.finish(metadata, results)
            return
        metadata.storage_data = {}
        metadata.storage_meta = self.storage_meta()
        if self.record is not None and call.collectives:
            self.session.commits.report_complete(self.record.key.version_id)

    @property
    def _step(self) -> int:
        if self._location.step is None:
            raise MissingStepError(
                f"which step of {self._location.job} is this? Write TieredWriter({str(self._location)!r}, step=N) or "
                f"{self._location}/step-N"
            )
        return self._location.step

    def _propose(self, call: _SaveCall) -> SaveProposal:
        """Return this rank's proposal; without collectives it carries an error, so no rank waits for it."""
        step = self._step
        try:
            tracker = self.session.incarnation
            if self._handed_over is not None:
                tracker.take_over(self._handed_over)
                self._handed_over = None
            self._abandon_earlier_steps()
            call.point = self._point or tracker.capture()
            proposal = self.session.propose(step, call.point)
            if call.rank == 0:
                self.session.check_step_order(step)
            self.session.durable.check(self.session.incarnation.newest_step)
            return proposal
        except (TieredCheckpointError, PeerStoreError) as error:
            if call.collectives:
                raise
            return SaveProposal(self._location.job, step, _NO_POINT, False, 0, 0, problem=RankError.of(error))

    def _agree_without_collectives(self, call: _SaveCall, proposal: SaveProposal) -> None:
        """Agree through the store. An error is stored for :meth:`write_data`, because DCP's barrier follows."""
        try:
            decision = agree_via_store(proposal, call.ranks)
            call.assignment = SaveAssignment(decision, call.ranks.part)
        except TieredCheckpointError as error:
            self.error = error
        except RuntimeError as error:  # raised by torch's stores
            self.error = TierUnavailableError(f"{self._location}: the ranks' store did not answer: {error}")

    def _receive_assignment(self, call: _SaveCall) -> SaveAssignment:
        """Return the assignment from the coordinator, or this rank's own if it saves without others."""
        arrived = received_plan_messages(SaveAssignment) if call.collectives else []
        clear_plan_messages()
        assignment = arrived[-1] if arrived else call.assignment
        if assignment is None or assignment.decision.job != self._location.job:
            raise SaveFailedError(
                f"step {self._step} of {self._location.job}: nothing arrived from the coordinator of this save. All "
                "ranks have to save with a TieredWriter, and DCP has to plan and write in one thread"
            )
        return assignment

    def _collect_table(self, call: _SaveCall, planner: SavePlanner) -> StateTable | None:
        """Return the table of the whole state on DCP's coordinator, otherwise ``None``.

        With plan caching unchanged plans arrive empty, and the planner has all of them.
        """
        plans, call.plans = call.plans, None
        if plans is None and call.is_coordinator and call.collectives:
            cached = getattr(planner, "global_plan", None)
            plans = cached if cached and all(plan.usable for plan in cached) else None
        return state_table_for_planner(planner, None if plans is None else state_table_of_plans(plans))

    def _write(self, call: _SaveCall, plan: SavePlan, planner: SavePlanner) -> SaveJob:
        """Copy this rank's tensors into a slot and cache the plan."""
        session = self.session
        assigned = self._receive_assignment(call)
        decision, part = assigned.decision, assigned.part
        options = SaveOptions(self._becomes_durable(session), self._options.required, self._options.keep, self._finite)
        job = call.job = SaveJob(session, decision.key(part), options, self._options.report)
        session.adopt(decision, call.point)
        if part == 0:
            session.durable.warn_memory_only()
        work = self._planned_writes(session, plan, planner)
        if not self.settings.memory.trust_objects:
            work.warn_unsafe_objects()
        if options.durable and self.settings.durable.on_busy == "wait":
            session.durable.wait_for_drain(job.key.version, self.settings.durable.retry_s)
        staged = self._slot_for(job, work, decision.parts)
        table = work.planned.table if isinstance(work, CachedWrites) and decision.parts == 1 else None
        table = table or self._collect_table(call, planner)
        if isinstance(work, CachedWrites):
            session.plans.add(dataclasses.replace(work.planned, part=part, table=table))
        else:
            self._cache_plan(session, PlannedSave(staged.layout, part, decision.parts, table), plan, planner)
        job.describe(work.item_bytes(staged.layout), table)
        return job

    def _planned_writes(self, session: Session, plan: SavePlan, planner: SavePlanner) -> PlannedWrites:
        """Return this rank's writes; an earlier save with the same plan provides the layout."""
        if self._staged is None and is_default_save_planner(planner):
            planned = session.plans.find(state_fingerprint(planner.state_dict))  # type: ignore[attr-defined]
            if planned is not None and planned.signature == plan_signature(plan):
                return CachedWrites(planned, plan, planner)
        return PlannedWrites(plan, planner, staged=self._staged is not None)

    def _slot_for(self, job: SaveJob, work: PlannedWrites, parts: int) -> StagedShard:
        """Return the slot that was staged before, or a new slot with all data of ``work``."""
        session, before = job.session, self._staged
        earlier = self._staged = self._relabel(session, before, job.key)
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

        layout = work.layout(session.plans.layouts)
        wait_s = self.settings.memory.wait_s if self._options.wait_s is None else self._options.wait_s
        staged = job.stage(layout, parts, sum(map(len, work.item_bytes(layout))), fill, wait_s=wait_s)
        self._staged = None
        if earlier is not None:
            session.slots.release(earlier)
        return staged

    def _fill(self, session: Session, staged: StagedShard, work: PlannedWrites) -> None:
        """Copy in windows, so that a planner that creates new tensors never has many of them at once."""
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

    def _relabel(self, session: Session, staged: StagedShard | None, key: ShardKey) -> StagedShard | None:
        """Return the staged slot, moved to the incarnation of ``key``.

        Return ``None`` if no slot is staged, or if another rank's write has ended its lease. Then the state is copied
        from the mapped memory into a new slot.
        """
        if staged is None or (staged.lease.key.epoch, staged.lease.key.incarnation) == (key.epoch, key.incarnation):
            return staged
        return session.slots.relabel(staged, key)

    def _cache_plan(self, session: Session, planned: PlannedSave, plan: SavePlan, planner: SavePlanner) -> None:
        if is_default_save_planner(planner) and not any(item.tensor for item in planned.layout.items):
            fingerprint = tuple(state_fingerprint(planner.state_dict))  # type: ignore[attr-defined]
            planned = dataclasses.replace(planned, fingerprint=fingerprint, signature=plan_signature(plan))
        session.plans.add(planned)

    def _becomes_durable(self, session: Session) -> bool:
        """Return whether this save uploads the step to the durable tier."""
        return self._options.required or session.durable.wants(self._step)


def dcp_storage_meta(location: Location, group: VersionId | None) -> StorageMeta:
    """Return DCP's storage metadata of a step; the attempt's name replaces DCP's random name."""
    name = group and f"{group.epoch}.{group.version}.{group.attempt}.{group.incarnation}"
    return StorageMeta(checkpoint_id=str(location), save_id=name)


def _save_error(location: Location, problem: Exception) -> TieredCheckpointError:
    if isinstance(problem, TieredCheckpointError):
        return problem
    if isinstance(problem, PeerStoreError):
        return SaveFailedError(str(problem))
    return SaveFailedError(f"step {location.step} of {location.job} was not saved: {problem!r}")


def _check_save_location(location: Location) -> Location:
    if location.cast:
        raise UsageError(f"{location}?cast=1 is for loads: a save does not convert types")
    if location.epoch is not None:
        raise UsageError(f"{location} names an epoch, which is for loads: a save gets the epoch of its own run")
    return location


def _with_message(plan: SavePlan, message: PlanMessage) -> SavePlan:
    return dataclasses.replace(plan, storage_data=message)
