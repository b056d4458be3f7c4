"""TieredReader: DCP's StorageReader. Ranks vote on a step and read exactly the bytes they need.

How the ranks agree, inside DCP's own exchange of plans: every rank surveys its node, plans against the step it would
choose, has the bytes it needs verified, and votes for the steps it could load; the coordinator takes the newest that
everybody voted for. Reads are in global coordinates, so a rank can serve its plan from another step than it planned
against.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from peerstore import deadlines
from peerstore.errors import PeerStoreError
from peerstore.failpoints import failpoint
from peerstore.shard_records import VersionId
from tieredckpt.agent.agent_api import StateNames
from tieredckpt.dcp.plain_checkpoints import plain_reader, plain_steps
from tieredckpt.dcp.rank_group import PlanMessage, clear_plan_messages, received_plan_messages
from tieredckpt.dcp.tiered_writer import dcp_storage_meta
from tieredckpt.durable.object_store import ObjectNotFoundError
from tieredckpt.errors import (
    CheckpointDamagedError,
    CheckpointDeletedError,
    CheckpointLostError,
    CheckpointNotFoundError,
    CheckpointTornError,
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
from tieredckpt.resolve_step import (
    Candidate,
    Resolution,
    StepVerdict,
    Tier,
    describe_forgotten,
    elect_step,
    newer_steps,
    resolve_step,
    unrecognized_error,
)
from tieredckpt.restore.load_planner import LazyStateMetadata
from tieredckpt.restore.proof import LoadEvidence, RestoreProof, RestoreProver, load_planner_is_transparent
from tieredckpt.restore.read_executor import ReadExecutor, read_item_box
from tieredckpt.restore.step_index import RankReadPlan
from tieredckpt.restore.verified_reads import PinnedShards, ReadMismatchError, ShardCheck
from tieredckpt.session.session import Session, open_session
from tieredckpt.settings import Settings, load_settings, override_settings
from tieredckpt.tensors.state_dict import dtype_from_name

log = logging.getLogger(__name__)

_MAX_VOTES = 8
_SHOWN = 5
_DOCTOR = "`tieredckpt doctor` tries the store from here"
START_FRESH_HINT = "To start from nothing on purpose: restore(..., on_lost='start_fresh'), or another job name"
_REBUILD_S = 60.0
"""How long a load waits for a newer step that the other nodes are rebuilding, before it takes an older one."""


@dataclass(frozen=True)
class LoadVote:
    """The steps a rank could load, best first, and why not the others."""

    versions: tuple[VersionId, ...]
    refused: tuple[str, ...] = ()
    avoided: tuple[VersionId, ...] = ()
    """Those whose loads have ended their process on this rank's node: taken when there is no other."""
    plain: int | None = None
    """The plain DCP checkpoint that it found newer than every step."""


@dataclass(frozen=True)
class LoadDecision:
    version_id: VersionId
    ranks: int = 1
    """How many load it together."""


@dataclass
class RestoreReport:
    """What a load read, and from where; or why there was nothing to load, where there had been saves."""

    step: int
    """-1: nothing was loaded."""
    version_id: VersionId | None
    bytes_by_tier: dict[str, int]
    seconds: float = 0.0
    refused: tuple[str, ...] = ()
    """Steps that were newer but could not be used, and why."""
    bytes_by_node: dict[str, int] = field(default_factory=dict)
    """Of the peer tier's bytes, what came from which node."""
    mode: Literal["live", "snapshot", "torn", "lost", "damaged"] = "snapshot"
    """``live``: this step is what survivors of a fault had in their tensors. With step -1: ``torn``, no save ever came
    to be whole; ``lost`` or ``damaged``, and ``on_lost="start_fresh"``."""
    steps_redone: int | None = None
    """Steps that were completed before a fault and are done again; ``None`` where no fault came before this."""
    newer_steps: tuple[VersionId, ...] = ()
    """Complete newer steps of other branches, oldest first: the job left them behind and does them again."""
    proof: RestoreProof | None = None
    """What was compared with what the save recorded, after it was loaded; ``None`` where nothing was."""


class TieredReader(StorageReader):
    """Loads with ``dcp.load``: the newest whole step (or the one named), from the nearest good copies.

    ``on_dtype_mismatch="cast"`` (or ``?cast=1`` behind the URL) fills tensors of another element type than was saved,
    as DCP's own readers do silently; by default that is an error.

    An object that is more than data is an :class:`~tieredckpt.errors.UntrustedObjectError`, because loading it runs
    what its bytes say. ``trust_objects=True`` loads it all the same; by default ``memory.trust_objects`` decides.
    """

    resumes_job = True
    """Whether the job goes on from what is loaded; ``False`` for who only looks at it."""

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
        self._location: Location = location_at_step(parse_location(target), step)
        self._step_given = step
        self._cast = on_dtype_mismatch == "cast"
        self._trust = self.settings.memory.trust_objects if trust_objects is None else trust_objects
        self._rank = 0
        self._steps: dict[VersionId, RankReadPlan] = {}
        self._unreadable: defaultdict[VersionId, set[int]] = defaultdict(set)
        """Parts that this node's memory has and cannot read for now."""
        self._unread: TieredCheckpointError | None = None
        """What to report of newer steps that this release cannot read."""
        self._undescribed: dict[VersionId, Exception] = {}
        self._order: list[Candidate] = []
        self._usable: list[Candidate] = []
        """The complete steps of all branches that the last survey found usable."""
        self._reluctant: dict[VersionId, int] = {}
        """Steps whose loads have ended their process on this node, and how many times."""
        self._described_step = -1
        self._refused: list[str] = []
        self._pinned: PinnedShards | None = None
        self._ready: VersionId | None = None
        """The step whose pieces were verified and are pinned."""
        self._plain: tuple[int, StorageReader] | None = None
        """A plain DCP checkpoint that is newer than everything else, and DCP's own reader of it."""
        self._plain_readers: dict[int, StorageReader] = {}
        """Readers of plain checkpoints, which read the metadata once."""
        self.failed: dict[VersionId | int, str] = {}
        """Steps that failed and why: this reader does not try them again. A plain checkpoint has only a number."""
        self.tries_one_kind = False
        """Whether the caller falls back itself: a load does not pass over a plain checkpoint to an older step."""
        self._needed: tuple[list[ReadItem], _Needs] = [], ([], [])
        """The items of the last vote, and the tensors and objects that they need."""
        self._voted = LoadVote(())
        self._decided: LoadDecision | None = None
        """What this rank has decided for all, where nothing travels between ranks."""
        self.epoch: int | None = None
        """Of the incarnation that saved the step to load; ``None``: any."""
        self.fresh = False
        """Ask every node and the durable tier again, instead of taking an answer of a few seconds ago."""
        self.strict = False
        """An entry that the step has and no rank asks for is an error."""
        self.selective_prefixes: tuple[str, ...] = ()
        """Prefixes of entries of which the state itself says which it takes."""
        self.peers_pending = False
        """Whether :meth:`describe_choice` found less than there was, and nodes that may have it do not answer now."""
        self.defers_proof = False
        """Whoever loads compares the live state himself, with :attr:`evidence`; else the targets are compared."""
        self.verifies_while_reading = False
        """Compare shards with their checksums while they are copied, and not before the vote: where they are damaged,
        the targets hold some of it when the load takes another copy, or fails."""
        self.in_place: Callable[[str], bool] = lambda _: True
        """Whether only torch's own code takes an entry over after the load: its target may be its live tensor."""
        self.evidence: LoadEvidence | None = None
        """What the last load brought can be told by."""
        self.error: TieredCheckpointError | None = None
        """Why the last load failed on this rank."""
        self.report: RestoreReport | None = None
        """What the last load did."""
        self.unused: tuple[str, ...] = ()
        """What the step has and no rank asked for; known to the coordinator."""

    @property
    def checkpoint_id(self) -> str:
        return str(self._location)

    @property
    def session(self) -> Session:
        return open_session(self._location.job, self.settings)

    @property
    def restored_step(self) -> int:
        """The step the last load read."""
        if self._plain is not None:
            return self._plain[0]
        if self.report is None:
            raise UsageError(f"{self._location} was not loaded")
        return self.report.step

    @property
    def chosen_step(self) -> int:
        """The step that :meth:`read_metadata` described."""
        return self._plain[0] if self._plain is not None else self._described_step

    @property
    def restored_names(self) -> tuple[str, ...]:
        """All that the step has that the last load read; nothing, where that was a plain checkpoint."""
        group = self.report.version_id if self.report is not None and self._plain is None else None
        step = self._steps.get(group) if group is not None else None
        return (*step.names.names, *step.names.objects) if step is not None else ()

    # -- StorageReader ----------------------------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._location = location_for_checkpoint_id(checkpoint_id, self._location, self._step_given)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).startswith("tiered:/")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the step this rank would choose.

        DCP asks a second time, naming the rank, when the first answer was an error, and would then report only its
        text. That second answer is empty, and the error itself is raised by :meth:`set_up_storage_reader`.
        """
        if "rank" in kwargs and self.error is not None:
            return Metadata({})
        self.error = None
        try:
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
            raise

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._rank = kwargs.get("rank", 0)
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
                f"{self._location}: {len(plans)} ranks load and {len(votes)} have said what they could. All of them "
                "have to load with a TieredReader"
            )
        if len({vote.plain for vote in votes}) > 1:
            raise TierUnavailableError(
                f"{self._location}: some ranks found a plain checkpoint newest and others did not: not all of them see "
                f"the same of the durable tier. {_DOCTOR}"
            )
        if self._plain:
            return self._plain[1].prepare_global_plan(plans)
        decision = self._decided = LoadDecision(_agree(votes, self._location), len(plans))
        step = self._described(decision.version_id)
        if step is not None:
            asked = {item.storage_index.fqn for plan in plans for item in plan.items}
            # A tensor without elements is asked for by nobody.
            held = (fqn for fqn, shape in zip(step.names.names, step.names.shapes, strict=True) if math.prod(shape))
            left = {*held, *step.names.objects} - asked
            self.unused = tuple(sorted(name for name in left if not name.startswith(self.selective_prefixes)))
            if self.strict and self.unused:
                raise MismatchError(
                    f"step {decision.version_id.version} of {self._location.job} has {len(self.unused)} entries "
                    f"without a place in the state: {abbreviate(self.unused)}. Add them, or leave them out with "
                    "strict=False"
                )
        return [dataclasses.replace(plan, storage_data=PlanMessage(decision)) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._plain:
            return self._plain[1].read_data(plan, planner)
        try:
            with gc_paused(), deadlines.no_deadline():
                self.report = self._read(plan, planner)
        except TieredCheckpointError as error:
            self.error = error
            raise
        finally:
            self._let_go()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def close(self) -> None:
        """Give up what a load that failed on another rank, or between the ranks, has left pinned here."""
        self._let_go()

    # -- choosing ---------------------------------------------------------------------------------------------

    @property
    def tried(self) -> list[VersionId | int]:
        """The steps that the last load tried: the one that the ranks agreed on, or all that they voted on."""
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

    def _nothing_left(self, resolution: Resolution) -> TieredCheckpointError:
        if self.failed and not resolution.unreachable:
            return CheckpointDamagedError(
                f"no step of {self._location} can be used: {'; '.join(self.failed.values())}. {START_FRESH_HINT}"
            )
        return no_step_error(self._location, resolution)

    def describe_choice(self) -> str:
        """What would be loaded, in words; raises what a load would raise when there is nothing."""
        resolution, plain = self._survey()
        chosen, known = resolution.chosen, resolution.newest_known_complete
        found_all = chosen is not None and (known is None or chosen.version_id >= known)
        self.peers_pending = not found_all and resolution.unreachable == (Tier.PEER,)
        if plain is not None:
            return f"step {plain} (plain)"
        if resolution.chosen is None:
            raise self._nothing_left(resolution)
        return f"step {resolution.chosen.version_id.version}"

    def _survey(self) -> tuple[Resolution, int | None]:
        """What could be loaded right now, as this node sees it; or the plain checkpoint that is newer."""
        job, step = self._location.job, self._location.step
        if not self.settings.enabled:
            return Resolution(None, {}), self._newest_plain(plain_steps(self.settings.durable, job))
        seen = self.session.agent.list_steps(job, fresh=self.fresh, patience_s=_REBUILD_S)
        epoch = self._location.epoch if self.epoch is None else self.epoch
        candidates = [view.candidate for view in seen.views]
        bad = {view.version_id for view in seen.views if view.quarantined or view.version_id in self.failed}
        limit = self.settings.memory.avoid_after_crashed_loads
        often = {view.version_id: view.crashed_loads for view in seen.views if limit and view.crashed_loads >= limit}
        self._reluctant = often if step is None else {}
        usable = (view for view in seen.views if view.version_id not in bad and view.version_id not in self._reluctant)
        self._usable = [view.candidate for view in usable]
        found = resolve_step(
            candidates,
            step=step,
            epoch=epoch,
            quarantined=bad,
            reluctant=self._reluctant,
            unreachable=seen.unreachable,
            once_whole=seen.once_whole,
            torn=seen.torn,
            forgotten=seen.forgotten,
        )
        plain = self._newest_plain(seen.plain) if epoch is None else None
        newest = max(
            found.chosen.version_id.version if found.chosen is not None else -1, -1 if plain is None else plain
        )
        slots = (one for one in seen.unrecognized if epoch is None or one.key is None or one.key.epoch == epoch)
        problem = unrecognized_error(job, slots, candidates, newest=newest, step=step, quarantined=bad)
        if problem is not None and newest < 0:
            raise problem
        self._unread = problem
        if plain is not None and (found.chosen is None or found.chosen.version_id.version < plain):
            return found, plain
        if plain is not None and self.tries_one_kind:
            newer = tuple(one for one in found.alternatives if one.version_id.version >= plain)
            return dataclasses.replace(found, alternatives=newer), None
        return found, None

    def _newest_plain(self, steps: Iterable[int]) -> int | None:
        step = self._location.step
        return max((one for one in steps if step in (None, one) and one not in self.failed), default=None)

    def _choose(self) -> RankReadPlan | None:
        """The step this rank would load; ``None`` when that is a plain checkpoint."""
        resolution, plain = self._survey()
        self._let_go()
        self._steps.clear()
        self._unreadable.clear()
        self._refused[:] = self.failed.values()
        self._plain = None
        self._decided = None
        self._order = []
        if plain is not None:
            durable = self.settings.durable
            if not durable.url:
                durable = self.session.agent.list_steps(self._location.job).durable or durable
            if plain not in self._plain_readers:
                reader = plain_reader(durable, self._location.job, plain, trust_objects=self._trust)
                self._plain_readers[plain] = reader
            self._plain = plain, self._plain_readers[plain]
            return None
        if resolution.chosen is None:
            raise self._nothing_left(resolution)
        for tier in resolution.unreachable:
            why, newest = resolution.reasons.get(tier, "no answer"), resolution.chosen.version_id.version
            log.warning(
                "%s: the %s tier could not be asked: %s. Step %d is the newest in the others. %s",
                *(self._location, tier.value, why, newest, _DOCTOR),
            )
        for group in resolution.lost:
            if group.version > resolution.chosen.version_id.version and not resolution.unreachable:
                self._refuse(group, CheckpointLostError(resolution.describe(group)))
        if self._unread is not None:
            log.error("%s; step %d is restored", self._unread, resolution.chosen.version_id.version)
            self._refused.append(str(self._unread))
        forgotten = resolution.forgotten
        if forgotten is not None and forgotten.newest_committed.version > resolution.chosen.version_id.version:
            self._refuse(forgotten.newest_committed, CheckpointLostError(describe_forgotten(forgotten)))
        self._order = [resolution.chosen, *resolution.alternatives][:_MAX_VOTES]
        for group, verdict in resolution.verdicts.items():
            if verdict is StepVerdict.AVOIDED:
                log.warning(
                    "%s: step %d is passed over: the last %d loads of it ended their process on this node. Step %d is "
                    "taken instead. Name the step to load it all the same; tieredckpt quarantine %s/step-%d --lift, or "
                    "an hour without such an end, has it taken again",
                    *(self._location.job, group.version, self._reluctant[group], resolution.chosen.version_id.version),
                    *(self._location.job, group.version),
                )
        for candidate in self._order:
            step = self._described(candidate.version_id)
            if step is not None:
                return step
        for candidate in self._order:
            self.mark_failed(candidate.version_id, self._undescribed[candidate.version_id])
        return self._choose()

    def _described(self, group: VersionId) -> RankReadPlan | None:
        """The step in full, or ``None`` when it cannot be used after all."""
        if group not in self._steps:
            try:
                step = RankReadPlan(self.session.agent, self._location.job, group, self._unreadable[group])
                for dtype in step.names.dtypes:
                    dtype_from_name(dtype)
                self._steps[group] = step
            except (CheckpointDamagedError, CheckpointNotFoundError) as error:
                self._refuse(group, error)
                self._undescribed[group] = error
                return None
        return self._steps[group]

    def _vote(self, needs: Sequence[tuple[str, Box]], objects: Sequence[str]) -> LoadVote:
        """Every step this rank could load; the best one is verified before it is offered."""
        offered: list[VersionId] = []
        for candidate in self._order:
            group = candidate.version_id
            if offered:
                offered.append(group)  # only needed when another rank cannot load the first
            elif self._verified(group, needs, objects, by_agent=not self.verifies_while_reading):
                offered.append(group)
        failpoint("load.voted")
        return LoadVote(tuple(offered), tuple(self._refused), tuple(self._reluctant))

    def _verified(
        self, group: VersionId, needs: Sequence[tuple[str, Box]], objects: Sequence[str], *, by_agent: bool
    ) -> bool:
        """Whether everything this rank needs of ``group`` is there, and good where it is near.

        Without ``by_agent`` the tensors of shards that are read whole are left to the copy.
        """
        for _ in range(len(Tier) + 1):
            step = self._described(group)
            if step is None:
                return False
            try:
                ranges = step.plan(self._rank, needs, objects)
            except (CheckpointDamagedError, MismatchError) as error:
                self._refuse(group, error)
                return False
            if self._pinned is None or self._pinned.version_id != group:
                self._let_go()
                self._pinned = PinnedShards(self.session.agent.store, group)
            pinned = self._pinned
            near = {part: wanted for part, wanted in ranges.items() if step.tier(part) is Tier.MEMORY}
            if not by_agent:
                archives = step.archive_ranges(objects)
                near |= {part: archives.get(part, []) for part in step.whole_parts}
            found = {part: pinned.verify(step.shards[part], wanted) for part, wanted in near.items()}
            bad = {part: what for part, what in found.items() if what is not ShardCheck.GOOD}
            if not bad:
                self._ready = group
                return True
            self._look_elsewhere(step, bad)
        return False

    def _look_elsewhere(self, step: RankReadPlan, bad: Mapping[int, ShardCheck]) -> None:
        """Have the step described again: the agent has dropped what was damaged, and another tier may have it."""
        group = step.version_id
        for part, what in bad.items():
            level = logging.ERROR if what is ShardCheck.DAMAGED else logging.WARNING
            log.log(level, "%s in memory: %s; looking for another copy", step.shards[part].key, what.value)
        self._unreadable[group] |= {part for part, what in bad.items() if what is ShardCheck.UNREADABLE}
        part, what = next(iter(bad.items()))
        self._refused.append(f"step {group.version}: part {part} in memory: {what.value}")
        self._let_go()
        del self._steps[group]

    def _reject(self, step: RankReadPlan, pinned: PinnedShards, found: ReadMismatchError) -> None:
        """Have the agent look at bytes that differed here: they differ in the slot, or only on their way."""
        shard = step.shards[found.part]
        check = pinned.verify(shard, found.ranges, again=True)
        if check is not ShardCheck.GOOD:
            self._look_elsewhere(step, {found.part: check})
            return
        log.error(
            "%s: %d chunks differed from their checksums when they were read, and are good in memory: the step is read "
            "again. Two entries that overlap in memory do this every time; else memory of this node is failing",
            *(shard.key, len(found.ranges)),
        )
        self._let_go()

    def _refuse(self, group: VersionId, error: Exception) -> None:
        log.error("step %d of %s cannot be used: %s", group.version, self._location.job, error)
        self._refused.append(f"step {group.version}: {error}")

    def _let_go(self) -> bool:
        pinned, self._pinned = self._pinned, None
        self._ready = None
        return pinned.release() if pinned is not None else True

    # -- reading ----------------------------------------------------------------------------------------------

    def _decision(self) -> LoadDecision:
        """As it has arrived for this load, whatever the planner made of the plan that it came with."""
        decided = next(iter(received_plan_messages(LoadDecision)), self._decided)
        clear_plan_messages()
        if decided is None:
            raise UsageError(
                f"{self._location}: nothing arrived from the coordinator of this load. All ranks have to load with a "
                "TieredReader, and DCP has to plan and read in one thread"
            )
        self._decided = decided
        return decided

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> RestoreReport:
        began = time.perf_counter()
        session = self.session
        decision = self._decision()
        group = decision.version_id
        items, needed = self._needed
        needs, objects = needed if plan.items is items else _needs(plan)
        planned = self._steps[group].pieces if group in self._steps else {}
        if any(need not in planned for need in needs):  # the planner changed the plan after the vote
            self._let_go()
        in_one_pass, interrupted = True, False
        while True:
            by_agent = not (in_one_pass and self.verifies_while_reading)
            if self._ready != group and not self._verified(group, needs, objects, by_agent=by_agent):
                raise CheckpointDamagedError(
                    f"step {group.version} of {self._location.job}: {'; '.join(self._refused)}"
                )
            step, pinned = self._steps[group], self._pinned
            assert pinned is not None  # noqa: S101 - _verified made it
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
                with session.track_load(group, self._rank):
                    work.run(plan.items)
                    proof = None if self.defers_proof else self._prove(planner, pinned)
            except ReadMismatchError as mismatch:
                self._reject(step, pinned, mismatch)
                in_one_pass = False  # from here on the agent compares everything first
                continue
            except (CheckpointDamagedError, ObjectNotFoundError) as error:
                raise self._unusable(group, error) from error
            if self._let_go():
                break
            if interrupted:
                raise TierUnavailableError(f"the node agent went away twice while step {group.version} was read")
            interrupted = True
        seconds = time.perf_counter() - began
        if self.resumes_job:
            session.report_restored(group, decision.ranks)
        else:
            session.report_load_survived(stepped=False)  # what becomes of who only looks says nothing of the step
        failpoint("load.done")
        session.add_metrics(
            loads=1, load_seconds=seconds, **{f"loaded_{t}_bytes": n for t, n in work.bytes_by_tier.items()}
        )
        report = RestoreReport(
            group.version, group, dict(work.bytes_by_tier), seconds, tuple(self._refused), dict(work.bytes_by_node)
        )
        report.proof = proof
        report.newer_steps = tuple(one.version_id for one in newer_steps(self._usable, group))
        return report

    def describe_newer_steps(self) -> str:
        """Return which newer complete steps the restored one leaves behind, and how to keep them; "" for none."""
        report, job = self.report, self._location.job
        if report is None or not report.newer_steps:
            return ""
        newest = report.newer_steps[-1]
        tiers = next(one.found.values() for one in self._usable if one.version_id == newest)
        found = {tier for where in tiers for tier in where}
        places = ["this node's memory"] * (Tier.MEMORY in found)
        try:
            described = self.session.agent.describe_step(job, newest)
        except (TieredCheckpointError, PeerStoreError) as error:
            log.debug("%s: the agent did not describe step %d: %s", job, newest.version, error)
            places += ["the memory of other nodes"] * (Tier.PEER in found)
        else:
            nodes = sorted({source.node for sources in described.sources.values() for source in sources})
            places += [f"the memory of {abbreviate(nodes)}"] if nodes else []
            found |= {tier for where in described.found.values() for tier in where}
        places += ["the durable tier"] * (Tier.DURABLE in found)
        epochs = sorted({one.epoch for one in report.newer_steps})
        branches = [
            f"step{'s' * (len(steps) > 1)} {abbreviate([str(step) for step in steps])} of epoch {epoch}"
            for epoch in epochs
            for steps in [sorted({one.version for one in report.newer_steps if one.epoch == epoch}, reverse=True)]
        ]
        again = newest.version - report.step
        return (
            f"{job}: step {report.step} was restored, which leaves complete newer steps behind: "
            f"{'; '.join(branches)} (step {newest.version}: {', '.join(places) or 'unknown tier'}). The job does "
            f"{again} step{'s' * (again > 1)} again. To keep step {newest.version}: tieredckpt pin {job} "
            f"{newest.version}@{newest.epoch}. To continue from it: elastic run --resume-from "
            f"{newest.version}@{newest.epoch}"
        )

    def _prove(self, planner: LoadPlanner, pinned: PinnedShards) -> RestoreProof | None:
        """Compare what is in the targets, once all of them are filled. What becomes of them later is not seen here."""
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

    def _unusable(self, group: VersionId, error: Exception) -> TieredCheckpointError:
        """What was near has been verified: it is the durable copy that is damaged, and it was the last one."""
        session = self.session
        what = f"step {group.version} of {session.job}"
        if isinstance(error, ObjectNotFoundError):
            seen = session.agent.list_steps(session.job, fresh=True)
            if Tier.DURABLE in seen.unreachable:
                return TierUnavailableError(f"{what}: {error}, and the store cannot be asked why")
            if not any(view.version_id == group and view.durable for view in seen.views):
                return CheckpointDeletedError(
                    f"{what} was deleted from the durable tier while it was read (retention: durable.keep_last, or "
                    "tieredckpt gc). Load again: newer steps are there"
                )
        session.agent.quarantine(session.job, group, str(error))
        return CheckpointDamagedError(f"{what} is quarantined on this node: {error}")


def describe_mismatches(job: str, step: int, rank: int, proof: RestoreProof) -> str:
    """What is to be said of entries that are not what was saved, where there are some."""
    if not proof.mismatched:
        return ""
    told = abbreviate([f"{name} ({what})" if what else name for name, what in proof.mismatched.items()])
    count = "1 entry is" if len(proof.mismatched) == 1 else f"{len(proof.mismatched)} entries are"
    return (
        f"step {step} of {job} was restored, and on rank {rank} {count} not what was saved: "
        f"{told}. Do not train on it. Two entries with the same memory, or a load_state_dict() that leaves something "
        "out, say so every time; where another restore is good, memory was damaged on the way. To go on without this "
        "check: TIEREDCKPT_MEMORY_PROOF=0, or Checkpointer(..., proof=False)"
    )


def abbreviate(names: Sequence[str]) -> str:
    """The first few of many names."""
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


_Needs = tuple[list[tuple[str, Box]], list[str]]


def _needs(plan: LoadPlan) -> _Needs:
    """The pieces of tensors and the objects a plan asks for."""
    tensors = [(item.storage_index.fqn, read_item_box(item)) for item in plan.items if item.type is LoadItemType.TENSOR]
    return tensors, [item.storage_index.fqn for item in plan.items if item.type is LoadItemType.BYTE_IO]


def _agree(votes: Sequence[LoadVote], location: Location) -> VersionId:
    """The newest step that every rank can load."""
    reluctant = {group for vote in votes for group in vote.avoided}
    chosen = elect_step([vote.versions for vote in votes], reluctant=reluctant)
    if chosen is None:
        reasons = sorted({reason for vote in votes for reason in vote.refused})
        raise CheckpointDamagedError(
            f"{location}: no step can be loaded by all ranks: {'; '.join(reasons) or 'no votes'}"
        )
    return chosen


def no_step_error(location: Location, resolution: Resolution) -> TieredCheckpointError:
    """Why there is nothing to load: unreachable, damaged, lost, torn and absent are five answers."""
    if resolution.unreachable:
        return TierUnavailableError(
            f"{location}: nothing to load in the tiers that answered, and the {', '.join(resolution.unreachable)} tier "
            f"could not be asked, so it is not known whether there is a checkpoint ({resolution.explain()}). {_DOCTOR}"
        )
    purpose = f"To look at them: tieredckpt ls {location.job}. {START_FRESH_HINT}"
    if resolution.damaged:
        return CheckpointDamagedError(
            f"{location}: there were checkpoints, and none of them can be used ({resolution.explain()}). {purpose}"
        )
    if resolution.lost:
        return CheckpointLostError(
            f"{location}: there were whole steps, and no node that answers has all of one any more "
            f"({resolution.explain()}). Bring back the nodes that are missing. {purpose}"
        )
    if resolution.forgotten is not None:
        return CheckpointLostError(
            f"{location}: {resolution.explain()}. A durable tier (durable=, durable.url) keeps steps beyond that. "
            f"{START_FRESH_HINT}"
        )
    if resolution.torn:
        return CheckpointTornError(
            f"{location}: step {resolution.torn[-1].version} was begun and never came to be whole, as far as anybody "
            f"knows ({resolution.explain()}). What is missing was not sealed before its rank ended, or is on nodes "
            f"that are not in the job any more. To look at it: tieredckpt ls {location.job}"
        )
    return CheckpointNotFoundError(f"{location}: no whole step to load ({resolution.explain()})")


def _metadata(step: RankReadPlan, location: Location) -> Metadata:
    """DCP's view of a stored step.

    Each tensor is one chunk, however it is cut in the shards: reads are in its own coordinates, so that a rank plans
    its own pieces and not all that every rank wrote.
    """
    meta = dcp_storage_meta(location, step.version_id)
    meta.load_id = secrets.token_hex(8)
    described = LazyStateMetadata(step.names)
    return Metadata(described, planner_data=_paths(step.names), storage_data={}, storage_meta=meta)  # type: ignore[arg-type]


def _paths(names: StateNames) -> dict[str, tuple[str | int, ...]] | None:
    if not names.split:
        return None
    given = names.paths or {}
    paths = {name: given.get(name) or tuple(name.split(".")) for name in (*names.names, *names.objects)}
    check_nested_paths(paths)
    return paths
