"""TieredWriter: DCP's AsyncStager and StorageWriter over the node's memory tier.

The first asynchronous save of a state does not know yet what this rank will have to write (that takes planning, which
happens later in the background), so it copies everything into private memory. From the second on, the tensors of the
last plan go into a leased slot; the staged state dict consists of views of it, and ``write_data`` finds every byte in
place.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
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
from tieredckpt.errors import (
    MissingStepError,
    SaveFailedError,
    StoreBusyError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.manifest import StateTable
from tieredckpt.format.shard_layout import TensorEntry
from tieredckpt.gc_pause import gc_paused
from tieredckpt.live import abort_fence
from tieredckpt.location import (
    Location,
    location_at_step,
    location_for_checkpoint_id,
    parse_location,
    reject_local_tiered_folder,
)
from tieredckpt.session.incarnation import CapturePoint, IncarnationHandover, SaveDecision, SaveProblem, SaveProposal
from tieredckpt.session.save_plan import (
    PlannedSave,
    PlannedWrites,
    is_default_save_planner,
    state_table_for_planner,
    state_table_of_plans,
)
from tieredckpt.session.session import Session, StagedShard, open_session
from tieredckpt.settings import Settings, load_settings, override_settings
from tieredckpt.tensors.slot_copy import SlotWrite
from tieredckpt.tensors.state_dict import (
    flatten_state,
    is_plain_tensor,
    local_tensor,
    private_copy,
    require_materialized,
    state_fingerprint,
    tensor_shards,
)

log = logging.getLogger(__name__)


class SlotStager:
    """The staging half of :class:`~tieredckpt.dcp.tiered_writer.TieredWriter`."""

    settings: Settings
    _starts_over = False
    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._staged: StagedShard | None = None
        self._point: CapturePoint | None = None
        """Where this job stood when the state that is staged was captured."""
        self._handed_over: IncarnationHandover | None = None
        """The trainer's owner, in a process that saves for it."""
        self._in_use = threading.Semaphore(1)
        self._holding = False

    @property
    @abc.abstractmethod
    def session(self) -> Session: ...

    @property
    def should_synchronize_after_execute(self) -> bool:
        """``stage`` returns when the copy is done: there is nothing to wait for afterwards."""
        return self._synchronize_after_execute

    def synchronize_staging(self) -> None:
        """Nothing to do, see above."""

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """A copy of ``state_dict`` that training may not change any more; waits for this writer's last save."""
        wait_s = self.settings.memory.wait_s
        if not self._in_use.acquire(timeout=wait_s):
            raise StoreBusyError(f"the last asynchronous save of this writer did not end within {wait_s:.0f} s")
        self._holding = True
        try:
            if not self.settings.enabled:
                return _private(state_dict)
            self.capture_point()
            with gc_paused():
                flat = flatten_state(state_dict)
                planned = self.session.cached_plan(state_fingerprint(flat))
                if planned is None or any(tensor_shards(one) for one in flat.values() if isinstance(one, torch.Tensor)):
                    return _private(state_dict)
                self._staged = self.session.lease_slot_before_step(planned, wait_s=wait_s)
                if self._staged is None:
                    return _private(state_dict)
                return self._stage_into(self._staged, planned, state_dict, flat)
        except BaseException:
            self._discard_staged()
            raise

    def capture_point(self) -> None:
        """The state that is saved next has just been staged, by this writer or by another stager."""
        if self.settings.enabled:
            self._leave_earlier_steps()
            self._point = self.session.incarnation.capture()

    def _leave_earlier_steps(self) -> None:
        if self._starts_over:
            self.session.start_over()

    def close(self) -> None:
        """Give back what was staged and never written."""
        self._discard_staged()

    def __getstate__(self) -> dict[str, Any]:
        """What a process that writes in the background needs; the slot is named, not copied, and is its from now on."""
        kept = {name: value for name, value in self.__dict__.items() if name not in ("_in_use", "_staged")}
        kept["_slot"] = None if self._staged is None else (self._staged.lease, self._staged.layout, self._staged.owner)
        kept["_holding"] = False
        if self.settings.enabled:
            self.session.report_continued()  # who saves there has loaded nothing
            self._leave_earlier_steps()
            kept["_handed_over"] = self.session.incarnation.hand_over()
        self._end_staging()
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        slot = state.pop("_slot")
        self.__dict__.update(state)
        self._in_use = threading.Semaphore(1)
        self._staged = None
        if slot is not None:
            self._staged = self.session.adopt_slot(*slot)

    # -- for the writer ---------------------------------------------------------------------------------------

    def _stage_into(
        self, staged: StagedShard, planned: PlannedSave, state_dict: STATE_DICT_TYPE, flat: Mapping[str, Any]
    ) -> STATE_DICT_TYPE:
        layout, memory, header = planned.layout, staged.memory, planned.layout.header_bytes
        pieces = [SlotWrite(local_tensor(flat, entry), header + entry.start) for entry in layout.tensors]
        memory.copy_in(pieces, self.session.copier)
        views = {
            entry.fqn: memory.shared_tensor(
                staged.lease.size_bytes, header + entry.start, piece.tensor.dtype, entry.box.sizes
            )
            for entry, piece in zip(layout.tensors, pieces, strict=True)
        }
        return _rebuilt(state_dict, "", views)

    def _take_staged(self, work: PlannedWrites, part: int, parts: int) -> StagedShard | None:
        """The slot that was staged, with everything of ``work`` in it; ``None`` when there is none that fits."""
        staged = self._staged
        if staged is None or (staged.lease.key.part, staged.lease.parts) != (part, parts):
            return None
        if work.layout([staged.layout]) is not staged.layout:
            return None
        moved = [entry for entry in staged.layout.tensors if not _in_place(staged, entry, work.tensor(entry))]
        header = staged.layout.header_bytes
        for entry in moved:
            staged.memory.copy_in(
                [SlotWrite(work.tensor(entry), header + entry.start)],
                self.session.copier,
            )
        return staged

    def _end_staging(self) -> None:
        self._staged = self._point = None
        if self._holding:
            self._holding = False
            self._in_use.release()

    def _discard_staged(self) -> None:
        staged = self._staged
        self._end_staging()
        if staged is not None:
            self.session.release_slot(staged)


def _in_place(staged: StagedShard, entry: TensorEntry, tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is the very bytes of the slot; another process has them at another address."""
    start = staged.layout.header_bytes + entry.start
    if tensor.nbytes == 0:
        return True
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    return (
        storage.is_shared()
        and storage.nbytes() == staged.lease.size_bytes
        and tensor.storage_offset() * tensor.element_size() == start
    )


def _rebuilt(value: Any, name: str, views: Mapping[str, torch.Tensor]) -> Any:
    """``value`` with every tensor replaced: by its view, or by a mere shape when another rank writes it."""
    if isinstance(value, torch.Tensor):
        view = views.get(name)
        if type(value) is DTensor:
            local = view if view is not None else torch.empty_like(value._local_tensor, device="meta")
            return _like(value, local)
        return view if view is not None else torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, Mapping):
        return {key: _rebuilt(inner, f"{name}.{key}" if name else str(key), views) for key, inner in value.items()}
    if isinstance(value, list):
        return [_rebuilt(inner, f"{name}.{index}", views) for index, inner in enumerate(value)]
    return copy.deepcopy(value)


def _private(value: Any, name: str = "") -> Any:
    """A copy in this process's own memory; tensors take the room of their elements, whatever they are views of."""
    if type(value) is DTensor:
        return _like(value, _private(value._local_tensor, name))
    if isinstance(value, torch.Tensor):
        if is_plain_tensor(value):
            require_materialized(name, value)
        return private_copy(value)
    if isinstance(value, Mapping):
        return {key: _private(inner, f"{name}.{key}" if name else str(key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [_private(inner, f"{name}.{index}") for index, inner in enumerate(value)]
    return copy.deepcopy(value)


def _like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor of the same distribution over another local tensor, wherever that one lives."""
    return DTensor(local, tensor._spec, requires_grad=False)


_WINDOW_BYTES = 64 << 20
_NOWHERE = CapturePoint("", None, 0, None, -1)


@dataclasses.dataclass(frozen=True)
class SaveAssignment:
    """What all ranks of a save write for, and which part of it is this rank's."""

    decision: SaveDecision
    part: int


@dataclasses.dataclass(frozen=True)
class WrittenPart:
    """This rank's part of a save, in its slot: what a seal needs."""

    staged: StagedShard
    key: ShardKey
    items: list[bytes | memoryview]
    table: StateTable | None


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
    ) -> None:
        super().__init__()
        self._finite = finite
        self._starts_over = start_over
        settings = settings or load_settings()
        self.settings = settings if durable is None else override_settings(settings, durable={"url": durable})
        self._location = _to_save(location_at_step(parse_location(target), step))
        self._step_given = step
        self._coordinator = False
        self._collectives = True
        self._rank = 0
        self._saving = SaveRanks(())
        self._saved_at = _NOWHERE
        self._proposal: SaveProposal | None = None
        self._assignment: SaveAssignment | None = None
        self._table: StateTable | None = None
        self._key: ShardKey | None = None
        """What this rank is to write, once that is agreed."""
        self._plain: StorageWriter | None = None
        """DCP's own writer, while this package is switched off."""
        self.error: TieredCheckpointError | None = None
        """Why the last save did not happen, where it could not be raised (``use_collectives=False``)."""
        self.record: ShardRecord | None = None
        """What the last save sealed."""
        self.written: WrittenPart | None = None
        """What the last save wrote."""
        self.seals = True
        """``write_data`` seals what it wrote. Otherwise its caller seals :attr:`written`."""
        self.required = False
        """The step is to become durable whatever policy says, and is not left out for newer ones."""
        self.keep = False
        """The step is not given up for newer ones."""
        self.wait_s: float | None = None
        """How long a slot is waited for; as the settings say where nothing is said."""

    @property
    def checkpoint_id(self) -> str:
        return str(self._location)

    @property
    def session(self) -> Session:
        return open_session(self._location.job, self.settings)

    # -- StorageWriter ----------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._location = _to_save(location_for_checkpoint_id(checkpoint_id, self._location, self._step_given))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).startswith("tiered:/")

    def storage_meta(self) -> StorageMeta:
        return dcp_storage_meta(self._location, self.written.key.version_id if self.written is not None else None)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._plain = None
        reject_local_tiered_folder()
        if not self.settings.enabled:
            self._plain = plain_writer(self.settings.durable, self._location.job, self._step)
            self._plain.set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._coordinator = is_coordinator
        self._rank = kwargs.get("rank", 0)
        self._collectives = kwargs.get("use_collectives", True)
        self._saving = current_save_ranks()
        self._proposal = self._assignment = self._table = self._key = None
        self.error = self.record = self.written = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._plain is not None:
            return self._plain.prepare_local_plan(plan)
        self._proposal = self._propose()
        clear_plan_messages()
        return _with(plan, PlanMessage(self._proposal))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._plain is not None:
            return self._plain.prepare_global_plan(plans)
        if self._proposal is None:
            raise UsageError("prepare_global_plan was called before prepare_local_plan")
        if not self._collectives:
            self._agree_without_collectives(self._proposal)
            return plans
        proposals = received_plan_messages(SaveProposal) or [self._proposal]
        if len(proposals) != len(plans):
            raise SaveFailedError(
                f"{len(plans)} ranks have planned step {self._step} of {self._location.job} and {len(proposals)} have "
                "said what they write for: all of them have to save with a TieredWriter"
            )
        decision = decide_for_ranks(proposals)
        if all(plan.usable for plan in plans):  # else the planner has them, see _whole_table
            self._table = state_table_of_plans(plans)
        assignments = [SaveAssignment(decision, part) for part in range(len(plans))]
        self._assignment = assignments[self._rank]
        clear_plan_messages()
        return [_with(plan, PlanMessage(one)) for plan, one in zip(plans, assignments, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self._plain is not None:
            self._end_staging()
            return self._plain.write_data(plan, planner)
        future: Future[list[WriteResult]] = Future()
        try:
            if self.error is not None:
                raise self.error
            with gc_paused():
                began = time.perf_counter()
                self.written = self._write(plan, planner)
                if self.seals:
                    self.record = self._seal(self.written, time.perf_counter() - began)
                self._end_staging()
        except (TieredCheckpointError, PeerStoreError) as problem:
            self._leave_out()
            error = problem if isinstance(problem, TieredCheckpointError) else SaveFailedError(str(problem))
            if self._collectives and error is problem:
                raise
            if self._collectives:
                raise error from problem
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
        if self.written is not None and self.record is None:
            self._staged = self.written.staged
            self._leave_out()

    def _leave_out(self) -> None:
        """This rank has no part of the step, which therefore is torn: what the others have of it is given up."""
        self._discard_staged()
        self.written = None
        if self._key is not None:
            self.session.report_part_aborted(self._key)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Only the coordinator, and only when every rank has written: the step is whole now."""
        if self._plain is not None:
            self._plain.finish(metadata, results)
            return
        metadata.storage_data = {}
        metadata.storage_meta = self.storage_meta()
        if self.record is not None and self._collectives:
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

    def _propose(self) -> SaveProposal:
        """What this rank says before a save; without collectives also why it cannot, for nobody may wait for it."""
        step = self._step
        try:
            owner = self.session.incarnation
            if self._handed_over is not None:
                owner.take_over(self._handed_over)
                self._handed_over = None
            self._leave_earlier_steps()
            self._saved_at = self._point or owner.capture()
            proposal = self.session.propose(step, self._saved_at)
            if self._rank == 0:
                self.session.check_step_order(step)
            self.session.check_durable()
            return proposal
        except (TieredCheckpointError, PeerStoreError) as error:
            if self._collectives:
                raise
            return SaveProposal(self._location.job, step, _NOWHERE, False, 0, 0, problem=SaveProblem.of(error))

    def _agree_without_collectives(self, proposal: SaveProposal) -> None:
        """A rank that raises here would leave the others waiting at DCP's barrier: :meth:`write_data` does."""
        try:
            decision = agree_via_store(proposal, self._saving)
            self._assignment = SaveAssignment(decision, self._saving.part)
        except TieredCheckpointError as error:
            self.error = error
        except RuntimeError as error:  # of torch's stores
            self.error = TierUnavailableError(f"{self._location}: the ranks' store did not answer: {error}")

    def _assigned(self) -> SaveAssignment:
        """As it has arrived for this save; nothing travels where a process saves alone."""
        arrived = received_plan_messages(SaveAssignment) if self._collectives else []
        clear_plan_messages()
        assignment = arrived[-1] if arrived else self._assignment
        if assignment is None or assignment.decision.job != self._location.job:
            raise SaveFailedError(
                f"step {self._step} of {self._location.job}: nothing arrived from the coordinator of this save. All "
                "ranks have to save with a TieredWriter, and DCP has to plan and write in one thread"
            )
        return assignment

    def _whole_table(self, planner: SavePlanner) -> StateTable | None:
        """The names of the whole state, from whoever coordinates.

        With plan caching the plans that did not change arrive empty, and the planner has all of them.
        """
        if self._table is None and self._coordinator and self._collectives:
            plans = getattr(planner, "global_plan", None)
            if plans and all(plan.usable for plan in plans):
                self._table = state_table_of_plans(plans)
        return state_table_for_planner(planner, self._table)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> WrittenPart:
        """Copy this rank's tensors into a slot and remember the plan."""
        session = self.session
        assigned = self._assigned()
        decision, part = assigned.decision, assigned.part
        key = self._key = decision.key(part)
        session.adopt(decision, self._saved_at)
        if part == 0:
            session.warn_memory_only()
        wait_s = self.settings.memory.wait_s if self.wait_s is None else self.wait_s
        work = PlannedWrites(plan, planner, staged=self._staged is not None)
        if not self.settings.memory.trust_objects:
            work.warn_unsafe_objects()
        self._wait_for_durable(session)
        before = self._staged
        earlier = self._staged = self._under(session, before, key)
        staged = self._take_staged(work, part, decision.parts)
        if staged is None:
            layout = work.layout(session.cached_layouts)
            size = sum(map(len, work.item_bytes(layout)))
            staged = session.lease_slot(key, decision.parts, layout, size, wait_s=wait_s)
            with session.release_on_error(staged):
                self._fill(session, staged, work)
                abort_fence.raise_if_aborted()  # what was staged had been computed before anything was aborted
                if before is not None and earlier is None and not before.owner.is_alive:
                    raise SaveFailedError(
                        f"{key}: the process that staged it has ended, and what it had staged may be overwritten"
                    )
            if earlier is not None:
                session.release_slot(earlier)
        self._staged = staged
        table = self._whole_table(planner)
        self._remember(session, PlannedSave(staged.layout, part, decision.parts, table), planner)
        return WrittenPart(staged, key, work.item_bytes(staged.layout), table)

    def _seal(self, written: WrittenPart, copy_s: float) -> ShardRecord:
        began = time.perf_counter()
        session = self.session
        record = session.seal(
            *(written.staged, written.key, written.items),
            durable=self._becomes_durable(session),
            table=written.table,
            required=self.required,
            keep=self.keep,
            finite=self._finite,
        )
        session.add_metrics(
            saves=1,
            saved_bytes=record.size_bytes,
            copy_seconds=copy_s,
            seal_seconds=time.perf_counter() - began,
        )
        return record

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

    def _remember(self, session: Session, planned: PlannedSave, planner: SavePlanner) -> None:
        if is_default_save_planner(planner) and not any(item.tensor for item in planned.layout.items):
            known = tuple(state_fingerprint(planner.state_dict))  # type: ignore[attr-defined]
            planned = dataclasses.replace(planned, fingerprint=known)
        session.cache_plan(planned)

    def _wait_for_durable(self, session: Session) -> None:
        durable = self.settings.durable
        if durable.on_busy == "wait" and self._becomes_durable(session):
            session.wait_for_drain(durable.retry_s)

    def _becomes_durable(self, session: Session) -> bool:
        """Whether the step that is being written is wanted in the durable tier, too."""
        return self.required or session.wants_durable(self._step)


def dcp_storage_meta(location: Location, group: VersionId | None) -> StorageMeta:
    """What DCP's metadata says of where a step is; which attempt at it this is takes the place of DCP's random name."""
    name = group and f"{group.epoch}.{group.version}.{group.attempt}.{group.incarnation}"
    return StorageMeta(checkpoint_id=str(location), save_id=name)


def _to_save(location: Location) -> Location:
    if location.cast:
        raise UsageError(f"{location}?cast=1 is for loading: what is saved keeps its types")
    if location.epoch is not None:
        raise UsageError(f"{location} names an epoch, which is for loading: a save gets the epoch of its own run")
    return location


def _with(plan: SavePlan, message: PlanMessage) -> SavePlan:
    return dataclasses.replace(plan, storage_data=message)
