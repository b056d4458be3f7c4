"""TieredReader: DCP's StorageReader. Ranks vote on a step and read exactly the bytes they need.

The ranks agree within DCP's own exchange of plans. Every rank lists the steps of its node and plans against the step
that it prefers. The agent verifies the bytes that the rank needs. Then the rank votes for the steps that it can load,
and the coordinator chooses the newest step with the votes of all ranks. Reads are in global coordinates, so a rank can
read its plan from another step than it planned against.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from peerstore import deadlines
from peerstore.failpoints import failpoint
from peerstore.shard_records import VersionId
from tieredckpt.agent.agent_api import StateNames
from tieredckpt.dcp.load_vote import LoadDecision, LoadVote, elect
from tieredckpt.dcp.plain_checkpoints import plain_reader, plain_steps
from tieredckpt.dcp.rank_group import (
    PlanMessage,
    clear_plan_messages,
    dcp_call_world_size,
    join_agents_in_dcp_call,
    received_plan_messages,
)
from tieredckpt.dcp.restore_report import RestoreReport, abbreviate, describe_mismatches, describe_newer_steps
from tieredckpt.dcp.tiered_writer import dcp_storage_meta
from tieredckpt.durable.object_store import ObjectNotFoundError
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointDeletedError,
    CheckpointLostError,
    CheckpointNotFoundError,
    MismatchError,
    RestoreProofError,
    TieredCheckpointError,
    TierUnavailableError,
    UsageError,
)
from tieredckpt.format.shard_layout import check_nested_paths
from tieredckpt.format.slice_boxes import Box
from tieredckpt.gc_pause import gc_paused
from tieredckpt.location import Location, location_at_step, location_for_checkpoint_id, parse_location
from tieredckpt.resolve_step import Candidate, StepVerdict, Tier, describe_forgotten, newer_steps
from tieredckpt.restore.load_planner import LazyStateMetadata
from tieredckpt.restore.proof import LoadEvidence, RestoreProof, RestoreProver, load_planner_is_transparent
from tieredckpt.restore.read_executor import ReadExecutor, read_item_box
from tieredckpt.restore.step_index import RankReadPlan
from tieredckpt.restore.verified_reads import PinnedShards, ReadMismatchError, ShardCheck
from tieredckpt.session.session import Session, open_session
from tieredckpt.settings import Settings, load_settings, override_settings, require_plain_url
from tieredckpt.step_inventory import DOCTOR_HINT, LoadChoice, StepInventory
from tieredckpt.tensors.plain_tensors import dtype_from_name

log = logging.getLogger(__name__)

_MAX_VOTES = 8
_REBUILD_S = 60.0
"""Seconds that a load waits for a newer step that other nodes are rebuilding."""


class TieredReader(StorageReader):
    """Reader for ``dcp.load``: the newest complete step, or an explicit one, from the nearest copies.

    ``on_dtype_mismatch="cast"`` (or ``?cast=1`` behind the URL) converts tensors to the element types of the state, as
    DCP's own readers do silently. By default a different element type is an error.

    An object that is more than data raises :class:`~tieredckpt.errors.UntrustedObjectError`, because a load would run
    its code. ``trust_objects=True`` loads it anyway. The default is the setting ``memory.trust_objects``.
    """

    resumes_job = True
    """Whether the job resumes from the load; ``False`` for a caller that only reads."""

    def __init__(
        self,
        target: str | os.PathLike[str],
        step: int | None = None,
        *,
        durable: str | None = None,
        settings: Settings | None = None,
        on_dtype_mismatch: Literal["error", "cast"] = "error",
        trust_objects: bool | None = None,
    ) -> None:
        super().__init__()
        settings = settings or load_settings()
        self.settings = settings if durable is None else override_settings(settings, durable={"url": durable})
        require_plain_url(self.settings)
        self._location: Location = location_at_step(parse_location(target), step)
        self._step_given = step
        self._cast = on_dtype_mismatch == "cast"
        self._trust = self.settings.memory.trust_objects if trust_objects is None else trust_objects
        self._rank = 0
        self._steps: dict[VersionId, RankReadPlan] = {}
        self._unreadable: defaultdict[VersionId, set[int]] = defaultdict(set)
        """Parts in this node's memory that it cannot read for now."""
        self._undescribed: dict[VersionId, Exception] = {}
        self._order: list[Candidate] = []
        self._usable: list[Candidate] = []
        """Usable complete steps of all branches from the last list of steps."""
        self._unusable: set[VersionId] = set()
        """Steps of that list that turned out to be damaged or absent."""
        self._damaged: dict[VersionId, int] = {}
        """A damaged part in this node's memory for each step that has one."""
        self._avoided: Mapping[VersionId, int] = {}
        """Number of crashed loads on this node of steps that are avoided for it."""
        self._listed = False
        """Whether this load has listed the steps, so that a cached list is new enough for it."""
        self._described_step = -1
        self._refused: list[str] = []
        self._pinned: PinnedShards | None = None
        self._ready: VersionId | None = None
        """Step with verified and pinned pieces."""
        self._plain: tuple[int, StorageReader] | None = None
        """Step and reader of a plain DCP checkpoint that is newer than all other steps."""
        self._plain_readers: dict[int, StorageReader] = {}
        """Readers of plain checkpoints, reused because each reads the metadata once."""
        self.failed: dict[VersionId | int, str] = {}
        """Reasons by step that failed and is not tried again. A plain checkpoint has only a number."""
        self.tries_one_kind = False
        """Whether a load never skips a plain checkpoint for an older step, because the caller falls back."""
        self._needed: tuple[list[ReadItem], _Needs] = [], ([], [])
        """Items of the last vote, and the tensors and objects that they need."""
        self._voted = LoadVote(())
        self._decided: LoadDecision | None = None
        """Decision on this rank, for a load without other ranks."""
        self.epoch: int | None = None
        """Epoch of the incarnation that saved the step to load; ``None`` for any."""
        self.strict = False
        """Whether an entry of the step that no rank reads is an error."""
        self.selective_prefixes: tuple[str, ...] = ()
        """Prefixes of parts of the state that select their entries, for which ``strict`` does not apply."""
        self.awaited_s = 0.0
        """Seconds of work that :meth:`check_choice` would repeat because nodes with newer steps do not answer."""
        self.defers_proof = False
        """Whether the caller compares the live state with :attr:`evidence`, instead of the targets here."""
        self.verifies_while_reading = False
        """Whether shards are verified during the copy instead of before the vote.

        If they are damaged, the targets hold damaged bytes until another copy replaces them, or the load fails.
        """
        self.in_place: Callable[[str], bool] = lambda _: True
        """Function that returns whether only torch's own code handles an entry after the load.

        Then its target may be its live tensor.
        """
        self.evidence: LoadEvidence | None = None
        """Evidence of the last load."""
        self.error: TieredCheckpointError | None = None
        """Error of the last load on this rank."""
        self.report: RestoreReport | None = None
        """Report of the last load."""
        self.unused: tuple[str, ...] = ()
        """Entries of the step that no rank has read, on DCP's coordinator."""

    @property
    def checkpoint_id(self) -> str:
        return str(self._location)

    @property
    def session(self) -> Session:
        return open_session(self._location.job, self.settings)

    @property
    def restored_step(self) -> int:
        """Step that the last load read."""
        if self._plain is not None:
            return self._plain[0]
        if self.report is None:
            raise UsageError(f"{self._location} was not loaded")
        return self.report.step

    @property
    def chosen_step(self) -> int:
        """Step that :meth:`read_metadata` described."""
        return self._plain[0] if self._plain is not None else self._described_step

    @property
    def restored_names(self) -> tuple[str, ...]:
        """Names of all entries of the loaded step; empty for a plain checkpoint."""
        group = self.report.version_id if self.report is not None and self._plain is None else None
        step = self._steps.get(group) if group is not None else None
        return (*step.names.names, *step.names.objects) if step is not None else ()

    @property
    def saved_names(self) -> Collection[str]:
        """Names of all entries of the loaded step or plain checkpoint."""
        return self._plain[1].read_metadata().state_dict_metadata if self._plain is not None else self.restored_names

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._location = location_for_checkpoint_id(checkpoint_id, self._location, self._step_given)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).startswith("tiered:/")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the step that this rank prefers.

        After an error DCP calls this again with a rank, and would report only the text of a second error. So the second
        call returns empty metadata, and :meth:`set_up_storage_reader` raises the error.
        """
        if "rank" in kwargs and self.error is not None:
            return Metadata({})
        self.error = None
        try:
            if self.settings.enabled:
                join_agents_in_dcp_call(self, self._location.job, lambda: self.session, restoring=True)
            step = self._choose()
            while self._plain is not None:
                try:
                    return self._plain[1].read_metadata()
                except CheckpointDamagedError as error:
                    self.mark_failed(self._plain[0], error)
                    step = self._choose()
            step = step or self._steps[self._order[0].version_id]
            self._described_step = step.version_id.version
            with gc_paused():
                return _metadata(step, self._location)
        except TieredCheckpointError as error:
            self.error = error
            self._listed = False
            raise

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank", 0)
        self._listed = False  # from here on the load uses what it has listed
        if self.error is not None:
            raise self.error
        if self._plain:
            self._plain[1].set_up_storage_reader(metadata, is_coordinator)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        if self._plain:
            self._voted = LoadVote((), plain=self._plain[0])
            plan = self._plain[1].prepare_local_plan(plan)
        else:
            with gc_paused():
                self._needed = plan.items, _needs(plan)
                self._voted = self._vote(*self._needed[1])
        self._decided = None
        clear_plan_messages()
        return dataclasses.replace(plan, storage_data=PlanMessage(self._voted, stays=True))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        votes = received_plan_messages(LoadVote) or [self._voted]
        clear_plan_messages()
        if len(votes) != len(plans):
            raise UsageError(
                f"{self._location}: {len(votes)} of {len(plans)} ranks voted on the step. All ranks must load with a "
                "TieredReader"
            )
        if len({vote.plain for vote in votes}) > 1:
            raise TierUnavailableError(
                f"{self._location}: some ranks found a plain checkpoint newest and others did not: not all of them see "
                f"the same of the durable tier. {DOCTOR_HINT}"
            )
        if self._plain:
            return self._plain[1].prepare_global_plan(plans)
        decision = self._decided = LoadDecision(elect(votes, self._location), len(plans))
        step = self._read_plan(decision.version_id)
        if step is not None:
            requested = {item.storage_index.fqn for plan in plans for item in plan.items}
            # No rank reads a tensor without elements.
            nonempty = (fqn for fqn, shape in zip(step.names.names, step.names.shapes, strict=True) if math.prod(shape))
            unread = {*nonempty, *step.names.objects} - requested
            self.unused = tuple(sorted(name for name in unread if not name.startswith(self.selective_prefixes)))
            if self.strict and self.unused:
                raise MismatchError(
                    f"step {decision.version_id.version} of {self._location.job} has {len(self.unused)} entries "
                    f"without a place in the state: {abbreviate(self.unused)}. Add them, or leave them out with "
                    "strict=False"
                )
        return [dataclasses.replace(plan, storage_data=PlanMessage(decision)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._plain:
            done = self._plain[1].read_data(plan, planner)
            if self.resumes_job and self.settings.enabled:
                self.session.loads.rewind_to(self._plain[0], dcp_call_world_size())
            return done
        try:
            with gc_paused(), deadlines.no_deadline():
                self.report = self._read_step(plan, planner)
        except TieredCheckpointError as error:
            self.error = error
            raise
        finally:
            self._unpin()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def close(self) -> None:
        """Unpin the shards of a load that failed on another rank or between the ranks."""
        self._unpin()

    @property
    def tried(self) -> list[VersionId | int]:
        """Steps that the last load tried: the agreed one, or all that were voted on."""
        if self._plain is not None:
            return [self._plain[0]]
        if self._decided is not None:
            return [self._decided.version_id]
        return [candidate.version_id for candidate in self._order]

    def mark_failed(self, step: VersionId | int, error: object) -> None:
        """Do not try ``step`` again."""
        if step not in self.failed:
            number = step if isinstance(step, int) else step.version
            log.error("step %d of %s cannot be used: %s", number, self._location.job, error)
            self.failed[step] = f"step {number}: {error}"

    def check_choice(self) -> LoadChoice:
        """Return the step that a load would take; raise without such a step."""
        self._listed = False
        choice = self._list_choices()
        self.awaited_s = choice.repeated_s if choice.resolution.unreachable == (Tier.PEER,) else 0.0
        if choice.step < 0:
            raise choice.error(self._location, failed=self.failed.values())
        return choice

    def _list_choices(self) -> LoadChoice:
        """List the steps that this node sees, and return the choice among them."""
        step, epoch = self._location.step, self._location.epoch if self.epoch is None else self.epoch
        if self.settings.enabled:
            inventory = self.session.list_steps(fresh=not self._listed, patience_s=_REBUILD_S)
        else:
            inventory = StepInventory((), plain=plain_steps(self.settings.durable, self._location.job))
        self._listed = True
        choice = inventory.choose(
            step, epoch, avoid_after=self.settings.memory.avoid_after_crashed_loads, failed=self.failed
        )
        self._avoided = choice.avoided
        self._usable = [
            view.candidate
            for view in inventory.views
            if not (view.quarantined or view.version_id in self.failed or view.version_id in self._avoided)
        ]
        return choice

    def _choose(self) -> RankReadPlan | None:
        """Return the step that this rank prefers; ``None`` for a plain checkpoint."""
        choice = self._list_choices()
        resolution, plain = choice.resolution, choice.plain
        self._unpin()
        self._steps.clear()
        self._unreadable.clear()
        self._unusable.clear()
        self._damaged.clear()
        self._refused[:] = self.failed.values()
        self._plain = None
        self._decided = None
        self._order = []
        if plain is not None:
            durable = self.settings.durable
            if not durable.url:
                durable = self.session.list_steps().durable or durable
            if plain not in self._plain_readers:
                reader = plain_reader(durable, self._location.job, plain, trust_objects=self._trust)
                self._plain_readers[plain] = reader
            self._plain = plain, self._plain_readers[plain]
            return None
        if resolution.chosen is None:
            raise choice.error(self._location, failed=self.failed.values())
        for tier in resolution.unreachable:
            why, newest = resolution.reasons.get(tier, "no answer"), resolution.chosen.version_id.version
            log.warning(
                "%s: the %s tier is unavailable: %s. Step %d is the newest in the other tiers. %s",
                *(self._location, tier.value, why, newest, DOCTOR_HINT),
            )
        for group in resolution.lost:
            if group.version > resolution.chosen.version_id.version and not resolution.unreachable:
                self._refuse(group, CheckpointLostError(resolution.describe(group)))
        if choice.unreadable is not None:
            log.error("%s; step %d is restored", choice.unreadable, resolution.chosen.version_id.version)
            self._refused.append(str(choice.unreadable))
        forgotten = resolution.forgotten
        if forgotten is not None and forgotten.newest_committed.version > resolution.chosen.version_id.version:
            self._refuse(forgotten.newest_committed, CheckpointLostError(describe_forgotten(forgotten)))
        oldest = choice.newest_plain if self.tries_one_kind and choice.newest_plain is not None else -1
        self._order = [one for one in choice.loadable if one.version_id.version >= oldest][:_MAX_VOTES]
        for group, verdict in resolution.verdicts.items():
            if verdict is StepVerdict.AVOIDED:
                log.warning(
                    "%s: step %d is passed over: the last %d loads of it ended their process on this node. Step %d is "
                    "taken instead. Name the step to load it all the same; tieredckpt quarantine %s/step-%d --lift, or "
                    "an hour without such an end, has it taken again",
                    *(self._location.job, group.version, self._avoided[group], resolution.chosen.version_id.version),
                    *(self._location.job, group.version),
                )
        for candidate in self._order:
            step = self._read_plan(candidate.version_id)
            if step is not None:
                return step
        for candidate in self._order:
            self.mark_failed(candidate.version_id, self._undescribed[candidate.version_id])
        return self._choose()

    def _read_plan(self, group: VersionId) -> RankReadPlan | None:
        """Return the read plan of a step, or ``None`` if the step cannot be used."""
        if group not in self._steps:
            try:
                step = RankReadPlan(self.session.agent, self._location.job, group, self._unreadable[group])
                for dtype in step.names.dtypes:
                    dtype_from_name(dtype)
                self._steps[group] = step
            except (CheckpointDamagedError, CheckpointNotFoundError) as error:
                if isinstance(error, CheckpointNotFoundError) and group in self._damaged:
                    damage = f"part {self._damaged[group]} was damaged in memory, and no other copy was found"
                    error = CheckpointDamagedError(damage)
                self._refuse(group, error)
                self._undescribed[group] = error
                return None
        return self._steps[group]

    def _vote(self, needs: Sequence[tuple[str, Box]], objects: Sequence[str]) -> LoadVote:
        """Return the vote for all steps that this rank can load, the best of which is verified."""
        offered: list[VersionId] = []
        for candidate in self._order:
            group = candidate.version_id
            if offered:
                offered.append(group)  # only needed when another rank cannot load the first
            elif self._verify(group, needs, objects, by_agent=not self.verifies_while_reading):
                offered.append(group)
        failpoint("load.voted")
        return LoadVote(tuple(offered), tuple(self._refused), tuple(self._avoided))

    def _verify(
        self, group: VersionId, needs: Sequence[tuple[str, Box]], objects: Sequence[str], *, by_agent: bool
    ) -> bool:
        """Pin and verify the pieces of ``group`` that this rank needs; return whether all are readable.

        Without ``by_agent`` the copy verifies the tensors of shards that are read mostly.
        """
        for _ in range(len(Tier) + 1):
            step = self._read_plan(group)
            if step is None:
                return False
            try:
                ranges = step.plan(self._rank, needs, objects)
            except (CheckpointDamagedError, MismatchError) as error:
                self._refuse(group, error)
                return False
            if self._pinned is None or self._pinned.version_id != group:
                self._unpin()
                self._pinned = PinnedShards(self.session.agent.store, group)
            pinned = self._pinned
            near = {part: wanted for part, wanted in ranges.items() if step.tier(part) is Tier.MEMORY}
            if not by_agent:
                archives = step.archive_ranges(objects)
                near |= {part: archives.get(part, []) for part in step.whole_parts}
            found = {part: pinned.verify(step.shards[part], wanted) for part, wanted in near.items()}
            bad = {part: check for part, check in found.items() if check is not ShardCheck.GOOD}
            if not bad:
                self._ready = group
                return True
            self._discard_plan(step, bad)
        return False

    def _discard_plan(self, step: RankReadPlan, bad: Mapping[int, ShardCheck]) -> None:
        """Discard the read plan: the agent has dropped damaged shards, and another tier may have them."""
        group = step.version_id
        for part, check in bad.items():
            level = logging.ERROR if check is ShardCheck.DAMAGED else logging.WARNING
            log.log(level, "%s in memory: %s; looking for another copy", step.shards[part].key, check.value)
        self._unreadable[group] |= {part for part, check in bad.items() if check is ShardCheck.UNREADABLE}
        part, check = next(iter(bad.items()))
        self._refused.append(f"step {group.version}: part {part} in memory: {check.value}")
        damaged = [part for part, check in bad.items() if check is ShardCheck.DAMAGED]
        if damaged:
            self._damaged[group] = damaged[0]
        self._unpin()
        del self._steps[group]

    def _check_mismatch(self, step: RankReadPlan, pinned: PinnedShards, found: ReadMismatchError) -> None:
        """Let the agent check mismatched bytes, which are damaged in the slot or only in this copy."""
        shard = step.shards[found.part]
        check = pinned.verify(shard, found.ranges, again=True)
        if check is not ShardCheck.GOOD:
            self._discard_plan(step, {found.part: check})
            return
        log.error(
            "%s: %d chunks differed from their checksums when they were read, and are good in memory: the step is read "
            "again. Two entries that overlap in memory do this every time; else memory of this node is failing",
            *(shard.key, len(found.ranges)),
        )
        self._unpin()

    def _refuse(self, group: VersionId, error: Exception) -> None:
        log.error("step %d of %s cannot be used: %s", group.version, self._location.job, error)
        if isinstance(error, CheckpointDamagedError | CheckpointNotFoundError):
            self._unusable.add(group)
        self._refused.append(f"step {group.version}: {error}")

    def _unpin(self) -> bool:
        pinned, self._pinned = self._pinned, None
        self._ready = None
        return pinned.release() if pinned is not None else True

    def _receive_decision(self) -> LoadDecision:
        """Return the coordinator's decision for this load, from the plan's message."""
        decided = next(iter(received_plan_messages(LoadDecision)), self._decided)
        clear_plan_messages()
        if decided is None:
            raise UsageError(
                f"{self._location}: nothing arrived from the coordinator of this load. All ranks have to load with a "
                "TieredReader, and DCP has to plan and read in one thread"
            )
        self._decided = decided
        return decided

    def _read_step(self, plan: LoadPlan, planner: LoadPlanner) -> RestoreReport:
        began = time.perf_counter()
        session = self.session
        decision = self._receive_decision()
        group = decision.version_id
        items, needed = self._needed
        needs, objects = needed if plan.items is items else _needs(plan)
        planned = self._steps[group].pieces if group in self._steps else {}
        if any(need not in planned for need in needs):  # the planner changed the plan after the vote
            self._unpin()
        in_one_pass, interrupted = True, False
        while True:
            by_agent = not (in_one_pass and self.verifies_while_reading)
            if self._ready != group and not self._verify(group, needs, objects, by_agent=by_agent):
                raise CheckpointDamagedError(
                    f"step {group.version} of {self._location.job}: {'; '.join(self._refused)}"
                )
            step, pinned = self._steps[group], self._pinned
            assert pinned is not None  # noqa: S101 - _verify has pinned it
            cast = self._cast or self._location.cast
            proven = self.settings.memory.proof and (self.defers_proof or load_planner_is_transparent(planner))
            self.evidence = LoadEvidence(step, session.copier, self.in_place) if proven else None
            work = ReadExecutor(
                session,
                step,
                pinned,
                planner,
                cast=cast,
                trust=self._trust,
                evidence=self.evidence,
                verifies=in_one_pass and (proven or self.verifies_while_reading),
            )
            try:
                with session.loads.track(group, self._rank):
                    work.run(plan.items)
                    proof = None if self.defers_proof else self._prove(planner, pinned)
            except ReadMismatchError as mismatch:
                self._check_mismatch(step, pinned, mismatch)
                in_one_pass = False  # the agent verifies everything before the next copy
                continue
            except (CheckpointDamagedError, ObjectNotFoundError) as error:
                raise self._unusable_error(group, error) from error
            if self._unpin():
                break
            if interrupted:
                raise TierUnavailableError(f"the node agent went away twice while step {group.version} was read")
            interrupted = True
        seconds = time.perf_counter() - began
        if self.resumes_job:
            session.loads.report_restored(group, decision.ranks)
        else:
            # A later crash of a process that only reads does not count against the step.
            session.loads.report_survived(stepped=False)
        failpoint("load.done")
        session.add_metrics(
            loads=1, load_seconds=seconds, **{f"loaded_{t}_bytes": n for t, n in work.shards.bytes_by_tier.items()}
        )
        read = work.shards
        report = RestoreReport(
            group.version, group, dict(read.bytes_by_tier), seconds, tuple(self._refused), dict(read.bytes_by_node)
        )
        report.proof = proof
        usable = (one for one in self._usable if one.version_id not in self._unusable)
        report.newer_steps = tuple(one.version_id for one in newer_steps(usable, group))
        return report

    def describe_newer_steps(self) -> str:
        """Return which newer complete steps the last load leaves behind, and how to keep them; "" for none."""
        return "" if self.report is None else describe_newer_steps(self.session, self.report, self._usable)

    def _prove(self, planner: LoadPlanner, pinned: PinnedShards) -> RestoreProof | None:
        """Compare the filled targets with the evidence. Later changes of the state are not covered."""
        if self.evidence is None:
            return None
        began = time.perf_counter()
        with gc_paused():
            proof = RestoreProver(self.evidence, planner.resolve_tensor, pinned).run({})
        proof.seconds = time.perf_counter() - began
        step, self.evidence = self.evidence.step.version_id.version, None
        if proof.mismatched:
            raise RestoreProofError(describe_mismatches(self._location.job, step, self._rank, proof))
        return proof

    def _unusable_error(self, group: VersionId, error: Exception) -> TieredCheckpointError:
        """Return the error for a durable copy that is damaged or gone and was the last one."""
        session = self.session
        what = f"step {group.version} of {session.job}"
        if isinstance(error, ObjectNotFoundError):
            inventory = session.agent.list_steps(session.job, fresh=True)
            if Tier.DURABLE in inventory.unreachable:
                return TierUnavailableError(f"{what}: {error}. The store is unavailable, so the reason is unknown")
            if not any(view.version_id == group and view.durable for view in inventory.views):
                return CheckpointDeletedError(
                    f"{what} was deleted from the durable tier while it was read (retention: durable.keep_last, or "
                    "tieredckpt gc). Load again: newer steps are there"
                )
        session.agent.quarantine(session.job, group, str(error))
        return CheckpointDamagedError(f"{what} is quarantined on this node: {error}")


_Needs = tuple[list[tuple[str, Box]], list[str]]


def _needs(plan: LoadPlan) -> _Needs:
    """Return the pieces of tensors and the objects that a plan reads."""
    tensors = [(item.storage_index.fqn, read_item_box(item)) for item in plan.items if item.type is LoadItemType.TENSOR]
    return tensors, [item.storage_index.fqn for item in plan.items if item.type is LoadItemType.BYTE_IO]


def _metadata(step: RankReadPlan, location: Location) -> Metadata:
    """Return DCP's metadata of a stored step.

    Each tensor is one chunk, independent of the shards. Reads are in its own coordinates, so a rank plans only its own
    pieces and not those of all ranks.
    """
    meta = dcp_storage_meta(location, step.version_id)
    meta.load_id = secrets.token_hex(8)
    described = LazyStateMetadata(step.names)
    return Metadata(described, planner_data=_paths(step.names), storage_data={}, storage_meta=meta)  # type: ignore[arg-type]


def _paths(names: StateNames) -> dict[str, tuple[str | int, ...]] | None:
    if not names.split:
        return None
    known = names.paths or {}
    paths = {name: known.get(name) or tuple(name.split(".")) for name in (*names.names, *names.objects)}
    check_nested_paths(paths)
    return paths
