"""DCP's StorageWriter over the node's memory tier."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from peerstore.errors import PeerStoreError
from peerstore.records import Group, ShardKey, ShardRecord
from tieredckpt.agreement import (
    Enclosed,
    SavingRanks,
    agree_through_store,
    decide_for_all,
    expect_messages,
    received,
    saving_ranks,
)
from tieredckpt.copying import Piece
from tieredckpt.errors import (
    MissingStepError,
    SaveFailedError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.incarnation import CapturePoint, SaveDecision, SaveProposal
from tieredckpt.live import fence
from tieredckpt.location import Location, check_step, parse_location, refuse_local_copy
from tieredckpt.manifest import StateTable
from tieredckpt.plain import plain_writer
from tieredckpt.planned import PlannedSave, Work, is_default, said_by, table_of
from tieredckpt.quiet import collector_paused
from tieredckpt.session import Session, Staged, open_session
from tieredckpt.settings import Settings, load_settings, override
from tieredckpt.stager import Stager
from tieredckpt.state import fingerprint

log = logging.getLogger(__name__)

_WINDOW_BYTES = 64 << 20
_NOWHERE = CapturePoint("", None, 0, None, -1)


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What all ranks of a save write for, and which part of it is this rank's."""

    decision: SaveDecision
    part: int


class TieredWriter(Stager, StorageWriter):
    """Saves with ``dcp.save`` and ``dcp.async_save`` into this node's memory, and from there to the durable tier.

    ``target`` is ``tiered://JOB``, ``tiered://JOB/step-N`` or a job's name. A save returns when the shard is sealed:
    from then on it survives this process; the node agent makes it durable behind its back.

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
        settings: Settings | None = None,
    ) -> None:
        super().__init__()
        self._finite = finite
        settings = settings or load_settings()
        self.settings = settings if durable is None else override(settings, durable={"url": durable})
        self._location = _to_save(at_step(parse_location(target), step))
        self._step_given = step
        self._coordinator = False
        self._collectives = True
        self._rank = 0
        self._saving = SavingRanks(())
        self._saved_at = _NOWHERE
        self._proposal: SaveProposal | None = None
        self._assignment: Assignment | None = None
        self._table: StateTable | None = None
        self._key: ShardKey | None = None
        """What this rank is to write, once that is agreed."""
        self._plain: StorageWriter | None = None
        """DCP's own writer, while this package is switched off."""
        self.error: TieredCheckpointError | None = None
        """Why the last save did not happen, where it could not be raised (``use_collectives=False``)."""
        self.record: ShardRecord | None = None
        """What the last save sealed."""
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
            self._location = _to_save(moved_to(checkpoint_id, self._location, self._step_given))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).startswith("tiered:/")

    def storage_meta(self) -> StorageMeta:
        return storage_meta(self._location, self.record.key.group if self.record is not None else None)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._plain = None
        refuse_local_copy()
        if not self.settings.enabled:
            self._plain = plain_writer(self.settings.durable, self._location.job, self._step)
            self._plain.set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._coordinator = is_coordinator
        self._rank = kwargs.get("rank", 0)
        self._collectives = kwargs.get("use_collectives", True)
        self._saving = saving_ranks()
        self._proposal = self._assignment = self._table = self._key = None
        self.error = self.record = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._plain is not None:
            return self._plain.prepare_local_plan(plan)
        self._proposal = self._propose()
        expect_messages()
        return _with(plan, Enclosed(self._proposal))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._plain is not None:
            return self._plain.prepare_global_plan(plans)
        if self._proposal is None:
            raise UsageError("prepare_global_plan was called before prepare_local_plan")
        if not self._collectives:
            self._agree_without_collectives(self._proposal)
            return plans
        proposals = received(SaveProposal) or [self._proposal]
        if len(proposals) != len(plans):
            raise SaveFailedError(
                f"{len(plans)} ranks have planned step {self._step} of {self._location.job} and {len(proposals)} have "
                "said what they write for: all of them have to save with a TieredWriter"
            )
        decision = decide_for_all(proposals)
        if all(plan.usable for plan in plans):  # else the planner has them, see _whole_table
            self._table = table_of(plans)
        assignments = [Assignment(decision, part) for part in range(len(plans))]
        self._assignment = assignments[self._rank]
        expect_messages()
        return [_with(plan, Enclosed(one)) for plan, one in zip(plans, assignments, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self._plain is not None:
            self._end_staging()
            return self._plain.write_data(plan, planner)
        future: Future[list[WriteResult]] = Future()
        try:
            if self.error is not None:
                raise self.error
            with collector_paused():
                self.record = self._write(plan, planner)
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

    def _leave_out(self) -> None:
        """This rank has no part of the step, which therefore is torn: what the others have of it is given up."""
        self._discard_staged()
        if self._key is not None:
            self.session.left_out(self._key)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Only the coordinator, and only when every rank has written: the step is whole now."""
        if self._plain is not None:
            self._plain.finish(metadata, results)
            return
        metadata.storage_data = {}
        metadata.storage_meta = self.storage_meta()
        if self.record is not None and self._collectives:
            self.session.commit(self.record.key.group)

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
            owner = self.session.owner
            if self._handed_over is not None:
                owner.take_over(self._handed_over)
                self._handed_over = None
            self._saved_at = self._point or owner.capture()
            return self.session.propose(step, self._saved_at)
        except (TieredCheckpointError, PeerStoreError) as error:
            if self._collectives:
                raise
            return SaveProposal(self._location.job, step, _NOWHERE, False, 0, 0, problem=str(error))

    def _agree_without_collectives(self, proposal: SaveProposal) -> None:
        """A rank that raises here would leave the others waiting at DCP's barrier: :meth:`write_data` does."""
        try:
            decision = agree_through_store(proposal, self._saving)
            self._assignment = Assignment(decision, self._saving.part)
        except TieredCheckpointError as error:
            self.error = error
        except RuntimeError as error:  # of torch's stores
            self.error = TierUnavailableError(f"{self._location}: the ranks' store did not answer: {error}")

    def _assigned(self) -> Assignment:
        """As it has arrived for this save; nothing travels where a process saves alone."""
        arrived = received(Assignment) if self._collectives else []
        expect_messages()
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
                self._table = table_of(plans)
        return said_by(planner, self._table)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> ShardRecord:
        began = time.perf_counter()
        session = self.session
        assigned = self._assigned()
        decision, part = assigned.decision, assigned.part
        key = self._key = decision.key(part)
        session.adopt(decision, self._saved_at)
        if part == 0:
            session.say_memory_only()
        wait_s = self.settings.memory.wait_s if self.wait_s is None else self.wait_s
        work = Work(plan, planner, staged=self._staged is not None)
        if not self.settings.memory.trust_objects:
            work.warn_of_objects()
        self._wait_for_durable(session)
        before = self._staged
        earlier = self._staged = self._under(session, before, key)
        staged = self._take_staged(work, part, decision.parts)
        if staged is None:
            layout = work.layout(session.layouts)
            size = sum(map(len, work.item_bytes(layout)))
            staged = session.stage(key, decision.parts, layout, size, wait_s=wait_s)
            with session.abandoned_on_error(staged):
                self._fill(session, staged, work)
                fence.ask()  # what was staged had been computed before anything was aborted
                if before is not None and earlier is None and not before.owner.alive:
                    raise SaveFailedError(
                        f"{key}: the process that staged it has ended, and what it had staged may be overwritten"
                    )
            if earlier is not None:
                session.abandon(earlier)
        self._staged = staged
        copied, table = time.perf_counter(), self._whole_table(planner)
        items = work.item_bytes(staged.layout)
        record = session.seal(
            staged,
            key,
            items,
            durable=self._becomes_durable(session),
            table=table,
            required=self.required,
            keep=self.keep,
            finite=self._finite,
        )
        self._end_staging()
        self._remember(session, PlannedSave(staged.layout, part, decision.parts, table), planner)
        session.observe(
            saves=1,
            saved_bytes=record.size_bytes,
            copy_seconds=copied - began,
            seal_seconds=time.perf_counter() - copied,
        )
        return record

    def _fill(self, session: Session, staged: Staged, work: Work) -> None:
        """Copy window by window, so that a planner that makes new tensors never has many of them at once."""
        header = staged.layout.header_bytes
        window: list[Piece] = []
        size = 0
        for entry in staged.layout.tensors:
            window.append(Piece(work.tensor(entry), header + entry.start))
            size += entry.size_bytes
            if size >= _WINDOW_BYTES and not work.keeps:
                staged.memory.fill(window, session.copier)
                window, size = [], 0
        staged.memory.fill(window, session.copier)

    def _under(self, session: Session, staged: Staged | None, key: ShardKey) -> Staged | None:
        """The slot that was staged, as one of the incarnation that the save is for.

        ``None`` also where another rank's write has ended it: the state is still read from its memory, and is copied.
        """
        if staged is None or (staged.lease.key.epoch, staged.lease.key.incarnation) == (key.epoch, key.incarnation):
            return staged
        return session.carry_over(staged, key)

    def _remember(self, session: Session, planned: PlannedSave, planner: SavePlanner) -> None:
        if is_default(planner) and not any(item.tensor for item in planned.layout.items):
            known = tuple(fingerprint(planner.state_dict))  # type: ignore[attr-defined]
            planned = dataclasses.replace(planned, fingerprint=known)
        session.remember(planned)

    def _wait_for_durable(self, session: Session) -> None:
        durable = self.settings.durable
        if durable.on_busy == "wait" and self._becomes_durable(session):
            session.wait_drained(durable.retry_s)

    def _becomes_durable(self, session: Session) -> bool:
        """Whether the step that is being written is wanted in the durable tier, too."""
        return self.required or session.is_durable(self._step)


def storage_meta(location: Location, group: Group | None) -> StorageMeta:
    """What DCP's metadata says of where a step is; which attempt at it this is takes the place of DCP's random name."""
    name = group and f"{group.epoch}.{group.version}.{group.attempt}.{group.incarnation}"
    return StorageMeta(checkpoint_id=str(location), save_id=name)


def at_step(location: Location, step: int | None) -> Location:
    """``location`` with its step named, unless it names another one already."""
    if step is None:
        return location
    check_step(step)
    if location.step not in (None, step):
        raise UsageError(f"{location} and step={step} name different steps")
    return dataclasses.replace(location, step=step)


def _to_save(location: Location) -> Location:
    if location.cast:
        raise UsageError(f"{location}?cast=1 is for loading: what is saved keeps its types")
    return location


def moved_to(checkpoint_id: str | os.PathLike[str], location: Location, step: int | None) -> Location:
    """What ``checkpoint_id`` names. Where it names no step, the writer or reader keeps the one that it was given."""
    given = parse_location(checkpoint_id)
    if given.step is not None:
        return given
    if step is None and given.job == location.job:
        step = location.step
    return dataclasses.replace(given, step=step)


def _with(plan: SavePlan, message: Enclosed) -> SavePlan:
    return dataclasses.replace(plan, storage_data=message)
