"""DCP's StorageWriter over the node's memory tier."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from peerstore.records import Group, ShardRecord
from tieredckpt.copying import Piece
from tieredckpt.errors import MissingStepError, TieredCheckpointError, UsageError
from tieredckpt.location import Location, check_step, parse_location
from tieredckpt.plain import plain_writer
from tieredckpt.planned import LocalNote, PlannedSave, PlanNote, Work, is_default, table_of
from tieredckpt.quiet import collector_paused
from tieredckpt.session import Incarnation, Session, Staged, open_session
from tieredckpt.settings import Settings, load_settings, override
from tieredckpt.stager import Stager
from tieredckpt.state import fingerprint

log = logging.getLogger(__name__)

_WINDOW_BYTES = 64 << 20


class TieredWriter(Stager, StorageWriter):
    """Saves with ``dcp.save`` and ``dcp.async_save`` into this node's memory, and from there to the durable tier.

    ``target`` is ``tiered://JOB``, ``tiered://JOB/step-N`` or a job's name. A save returns when the shard is sealed:
    from then on it survives this process; the node agent makes it durable behind its back.
    """

    def __init__(
        self,
        target: str | os.PathLike[str],
        step: int | None = None,
        *,
        durable: str | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__()
        settings = settings or load_settings()
        self.settings = settings if durable is None else override(settings, durable={"url": durable})
        self._location = at_step(parse_location(target), step)
        self._coordinator = False
        self._collectives = True
        self._rank = 0
        self._plain: StorageWriter | None = None
        """DCP's own writer, while this package is switched off."""
        self.error: TieredCheckpointError | None = None
        """Why the last save did not happen, where it could not be raised (``use_collectives=False``)."""
        self.record: ShardRecord | None = None
        """What the last save sealed."""

    @property
    def checkpoint_id(self) -> str:
        return str(self._location)

    @property
    def session(self) -> Session:
        return open_session(self._location.job, self.settings)

    # -- StorageWriter ----------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._location = at_step(parse_location(checkpoint_id), None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).startswith("tiered:/")

    def storage_meta(self) -> StorageMeta:
        return storage_meta(self._location, self.record.key.group if self.record is not None else None)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._plain = None
        if not self.settings.enabled:
            self._plain = plain_writer(self.settings.durable, self._location.job, self._step)
            self._plain.set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._coordinator = is_coordinator
        self._rank = kwargs.get("rank", 0)
        self._collectives = kwargs.get("use_collectives", True)
        self.error = self.record = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._plain is not None:
            return self._plain.prepare_local_plan(plan)
        return _with_note(plan, LocalNote(self.session.known_epoch()))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if self._plain is not None:
            return self._plain.prepare_global_plan(plans)
        session = self.session
        if not self._collectives:
            parts = dist.get_world_size() if dist.is_initialized() else 1
            incarnation = _agree_incarnation(session, parts)
            return [_with_note(plans[0], PlanNote(session.job, incarnation.epoch, incarnation.name, self._rank, parts))]
        known = [plan.storage_data.known_epoch for plan in plans if isinstance(plan.storage_data, LocalNote)]
        incarnation = session.begin_incarnation(known, len(plans))
        # With plan caching the plans that did not change arrive empty; the table of the first save still holds.
        table = table_of(plans) if all(plan.usable for plan in plans) else None
        whole = session.committed
        return [
            _with_note(
                plan,
                PlanNote(
                    session.job,
                    incarnation.epoch,
                    incarnation.name,
                    part,
                    len(plans),
                    table if part == self._rank else None,
                    whole,
                    self._step,
                ),
            )
            for part, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        if self._plain is not None:
            self._end_staging()
            return self._plain.write_data(plan, planner)
        future: Future[list[WriteResult]] = Future()
        try:
            with collector_paused():
                self.record = self._write(plan, planner)
        except TieredCheckpointError as error:
            self._discard_staged()
            if self._collectives:
                raise
            # Without collectives a rank that raises leaves the others waiting at DCP's barrier.
            log.error("step %s of %s was not saved by this rank: %s", self._location.step, self._location.job, error)
            self.error = error
        except BaseException:
            self._discard_staged()
            raise
        future.set_result([])
        return future

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

    def _write(self, plan: SavePlan, planner: SavePlanner) -> ShardRecord:
        began = time.perf_counter()
        session = self.session
        note = self._note(plan, session)
        work = Work(plan, planner)
        key = session.next_key(self._step, note.part)
        self._wait_for_durable(session)
        earlier, staged = self._staged, self._take_staged(work)
        if staged is None:
            layout = work.layout(session.layouts)
            size = sum(map(len, work.item_bytes(layout)))
            staged = session.stage(key, note.parts, layout, size, wait_s=self.settings.memory.wait_s)
            with session.abandoned_on_error(staged):
                self._fill(session, staged, work)
            if earlier is not None:
                session.abandon(earlier)
        self._staged = staged
        copied = time.perf_counter()
        items = work.item_bytes(staged.layout)
        record = session.seal(staged, key, items, durable=self._becomes_durable(session), table=note.table)
        self._end_staging()
        if self._collectives:
            session.unfinished.append(record.key.group)
        self._remember(session, staged, note, planner)
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
                staged.memory.fill(window, session.copier, warm_bytes=staged.lease.warm_bytes)
                window, size = [], 0
        staged.memory.fill(window, session.copier, warm_bytes=staged.lease.warm_bytes)

    def _note(self, plan: SavePlan, session: Session) -> PlanNote:
        note = plan.storage_data
        if not isinstance(note, PlanNote):
            raise UsageError(
                "the plan lost what this writer's coordinator put into SavePlan.storage_data: a planner's finish_plan "
                "has to keep it, and a planner class with plan caching must not be shared with another kind of writer"
            )
        if note.job == session.job:
            session.adopt(Incarnation(note.epoch, note.incarnation), note.parts)
            if note.whole is not None:
                session.commit(note.whole)
            if note.step == self._step:
                session.forget_unfinished()
        elif session.incarnation is None or session.parts != note.parts:
            # A cached plan that was made for another job: the same parts, but not this job's incarnation.
            session.adopt(_agree_incarnation(session, note.parts), note.parts)
        return note

    def _remember(self, session: Session, staged: Staged, note: PlanNote, planner: SavePlanner) -> None:
        known = None
        if is_default(planner) and not any(item.tensor for item in staged.layout.items):
            known = tuple(fingerprint(planner.state_dict))  # type: ignore[attr-defined]
        session.remember(PlannedSave(staged.layout, note.part, note.parts, note.table, known))

    def _wait_for_durable(self, session: Session) -> None:
        durable = self.settings.durable
        if durable.on_busy == "wait" and self._becomes_durable(session):
            session.wait_drained(durable.retry_s)

    def _becomes_durable(self, session: Session) -> bool:
        """Whether the step that is being written is wanted in the durable tier, too."""
        return session.is_durable(self._step)


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
    return Location(location.job, step)


def _with_note(plan: SavePlan, note: object) -> SavePlan:
    return dataclasses.replace(plan, storage_data=note)


def _agree_incarnation(session: Session, parts: int) -> Incarnation:
    """One incarnation for all ranks without a collective: whoever first writes the store's key decides."""
    if session.incarnation is not None and session.parts == parts:
        return session.incarnation
    proposal = session.begin_incarnation([session.known_epoch()], parts)
    if not dist.is_initialized():
        return proposal
    store = dist.distributed_c10d._get_default_store()
    name = f"tieredckpt/{session.job}/{parts}/incarnation"
    agreed = store.compare_set(name, "", f"{proposal.epoch} {proposal.name}").decode()
    epoch, _, incarnation = agreed.partition(" ")
    session.incarnation = Incarnation(int(epoch), incarnation)
    return session.incarnation
