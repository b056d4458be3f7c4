"""Saves the survivors' live state of a broken world as a step before the next world trains.

All ranks of the world take part, before any of them trains. What they ask each other goes through the store that they
met at: only when somebody has something that is wanted there is more than one small message. A save in the new world
gives everything that a save gives: a check that nothing is missing, one writer for every replicated tensor, copies on
other nodes. And whoever restores finds it as the newest whole step, in whatever world.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from peerstore.errors import PeerStoreError
from peerstore.failpoints import failpoint
from peerstore.message_codec import from_msgpack
from tieredckpt.checkpointer.checkpointer import Checkpointer
from tieredckpt.errors import CheckpointDamagedError, TieredCheckpointError
from tieredckpt.live.survivor_choice import (
    ContentDigest,
    HeldSlice,
    RequiredNames,
    SurvivorChoice,
    SurvivorCoverage,
    SurvivorHolding,
    SurvivorReport,
    choose_survivor_step,
    coverage_reporters,
    diverging_replicas,
    holdings_by_job,
    ranks_to_compare,
    reached_steps,
    trusted_steps,
    why_off,
)
from tieredckpt.live.survivor_state import Hydration, RetainedState, SurvivorState
from tieredckpt.resolve_step import resolve_step
from tieredckpt.restore.step_index import StepIndex
from tieredckpt.settings import Settings, load_settings, override_settings
from tieredckpt.tensors.state_dict import archive_object, dtype_name

log = logging.getLogger(__name__)

_PREFIX = "tieredckpt/live"
_PATIENCE = timedelta(minutes=5)
_MOST_TRIES = 3
_MOST_BYTES = 256 << 20
"""Of one message: some hundred thousand tensors."""
TensorChecksum = Callable[[str, torch.Tensor, tuple[int, ...], tuple[int, ...]], int]
"""A checksum of a box of the tensor of that name: also its shape, and where the box begins."""


class _JobHoldings(msgspec.Struct, frozen=True):
    """What all ranks are told of a job."""

    reached: int
    holdings: Mapping[int, SurvivorHolding]
    """Who has something that may be wanted, by rank."""
    proven: int | None = None
    """No step after this one is believed."""
    off: str = ""
    """Why a survivor noted nothing."""


def hydrate_from_survivors(
    keeper: SurvivorState, store: torch.distributed.Store, rank: int, size: int, *, weigh: TensorChecksum
) -> list[Hydration]:
    """Before a world's training begins, on all of its ranks: save the newest step that survivors have whole.

    What they have is kept until that is done, so that after another fault the next world can try again. Where it
    cannot be done nothing is lost but these steps: :class:`Hydration` says why. Who says to have the same as another
    one is believed when both weigh the same.
    """
    meeting = _StoreExchange(store, rank, size)
    keeper.contribute_attempts += 1
    if keeper.contribute_attempts > _MOST_TRIES and keeper.retained:
        log.warning("what was kept of %s is given up after %d worlds", ", ".join(keeper.retained), _MOST_TRIES)
        keeper.clear()
    covers = {job: _cover_of(kept) for job, kept in keeper.retained.items()}
    asked = _asked(keeper, meeting, covers)
    found = [
        _hydrate(meeting, job, asked[job], keeper.retained.get(job), covers.get(job), weigh=weigh)
        for job in sorted(asked)
    ]
    for hydration in found if rank == 0 else ():
        log.log(logging.WARNING if hydration.failed else logging.INFO, "%s", hydration)
    keeper.hydrations = {one.job: one for one in found}
    return found


def _asked(
    keeper: SurvivorState, meeting: _StoreExchange, covers: Mapping[str, SurvivorCoverage]
) -> dict[str, _JobHoldings]:
    """Who has what, by job: the first rank hears everybody, and tells all."""
    holdings = {
        job: SurvivorHolding(one.step, one.world_epoch, covers[job].digest, one.has_all_names)
        for job, one in keeper.retained.items()
    }
    proved = keeper.trusted_steps if keeper.aborts_silently else None
    meeting.say(
        f"stand/{meeting.rank}",
        SurvivorReport(keeper.last_world_epoch, holdings, keeper.reached_steps, proved, keeper.why_not()),
    )
    if meeting.rank == 0:
        stands = meeting.hear_all([f"stand/{rank}" for rank in range(meeting.size)], SurvivorReport)
        held, most, off = holdings_by_job(stands), trusted_steps(stands), why_off(stands)
        said = {
            job: _JobHoldings(step, held.get(job, {}), most.get(job), off)
            for job, step in reached_steps(stands).items()
        }
        meeting.say("asked", said)
    return meeting.hear("asked", dict[str, _JobHoldings])


def _hydrate(
    meeting: _StoreExchange,
    job: str,
    asked: _JobHoldings,
    kept: RetainedState | None,
    cover: SurvivorCoverage | None,
    *,
    weigh: TensorChecksum,
) -> Hydration:
    if not asked.holdings:
        return Hydration(job, "snapshot", -1, asked.reached, asked.off or "no survivor stood between two steps")
    telling = coverage_reporters(asked.holdings)
    chooser = min(telling)  # a survivor: its node knows all tiers
    if meeting.rank in telling:
        meeting.say(f"{job}/{meeting.rank}", cover)
    replicas = [rank for ranks in ranks_to_compare(asked.holdings).values() for rank in ranks]
    if meeting.rank in replicas and kept is not None:
        meeting.say(f"{job}/content/{meeting.rank}", _content_of(kept, weigh))
    if meeting.rank == chooser and kept is not None:
        meeting.say(f"{job}/peer", {**dataclasses.asdict(kept.settings.peer), "secret": ""})
    settings = _settings(kept, meeting.hear(f"{job}/peer", dict[str, Any]))
    try:
        with Checkpointer(f"tiered://{job}", settings=settings, on_sigterm="ignore") as ckpt:
            ckpt._join(restoring=True)
            if meeting.rank == chooser:
                covers = meeting.hear_all([f"{job}/{rank}" for rank in telling], SurvivorCoverage)
                contents = meeting.hear_all([f"{job}/content/{rank}" for rank in replicas], ContentDigest)
                wrong = diverging_replicas(asked.holdings, dict(zip(replicas, contents, strict=True)))
                meeting.say(f"{job}/choice", _choice(ckpt, asked, covers, wrong))
            choice = meeting.hear(f"{job}/choice", SurvivorChoice)
            if choice.why:
                return Hydration(job, "snapshot", -1, asked.reached, choice.why)
            failpoint("live.chosen")
            held = asked.holdings.get(meeting.rank)
            ckpt._give(_Planner(kept if held is not None and held.step == choice.step else None), choice.step)
            return Hydration(job, "live", choice.step, asked.reached)
    except (TieredCheckpointError, PeerStoreError, CheckpointException) as error:
        # Of a save, and of what is asked before it, all ranks hear together that it failed.
        return Hydration(job, "snapshot", -1, asked.reached, f"it could not be given: {error}", failed=True)


def _choice(
    ckpt: Checkpointer, asked: _JobHoldings, covers: Sequence[SurvivorCoverage], wrong: Mapping[int, str]
) -> SurvivorChoice:
    needed, unknown = None, ""
    try:
        needed = _needed(ckpt)
    except (TieredCheckpointError, PeerStoreError) as error:
        unknown = str(error)
    known = {one.digest: one for one in covers}
    return choose_survivor_step(asked.holdings.values(), known, needed, unknown=unknown, most=asked.proven, wrong=wrong)


def _needed(ckpt: Checkpointer) -> RequiredNames | None:
    """What the newest whole step has."""
    node, job = ckpt.session.agent, ckpt.session.job
    seen = node.list_steps(job, fresh=True)
    bad = {view.version_id for view in seen.views if view.quarantined}
    candidates = [view.candidate for view in seen.views]
    chosen = resolve_step(candidates, quarantined=bad, unreachable=list(seen.unreachable)).chosen
    if chosen is None:
        return None
    step = StepIndex(node.describe_step(job, chosen.version_id))
    return RequiredNames(chosen.version_id.version, frozenset(step.tensors), frozenset(step.objects))


def _settings(kept: RetainedState | None, peer: Mapping[str, Any]) -> Settings:
    """Who saved goes on as before; who is new has its own secret, and everything else that nodes agree on from them."""
    if kept is not None:
        return kept.settings
    own = load_settings()
    return override_settings(own, peer={**peer, "secret": own.peer.secret})


def _cover_of(kept: RetainedState) -> SurvivorCoverage:
    held, objects = [], []
    for item in kept.plan.items:
        plan = item.tensor_data
        if plan is None:
            objects.append(item.index.fqn)
            continue
        dtype = dtype_name(plan.properties.dtype)
        held.append(HeldSlice(item.index.fqn, dtype, (*plan.size,), (*plan.chunk.offsets,), (*plan.chunk.sizes,)))
    return SurvivorCoverage(tuple(held), tuple(objects))


def _content_of(kept: RetainedState, weigh: TensorChecksum) -> ContentDigest:
    """Reads every byte of it once."""
    weights = []
    try:
        for item in kept.plan.items:
            plan = item.tensor_data
            if plan is not None and item.index.fqn in kept.replicated_names:
                name, value = item.index.fqn, kept.values[item.index.fqn]
                weights.append((name, weigh(name, value, (*plan.size,), (*plan.chunk.offsets,))))
    except RuntimeError as error:  # of a device that is broken
        return ContentDigest(why=str(error))
    return ContentDigest(xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(weights)))


class _Planner(DefaultSavePlanner):
    """Plans what was kept, as it was planned in its own world; nothing, for a rank that has nothing."""

    def __init__(self, kept: RetainedState | None) -> None:
        super().__init__()
        self._values = {} if kept is None else kept.values
        self._kept_plan = SavePlan([], planner_data={}) if kept is None else kept.plan

    def create_local_plan(self) -> SavePlan:
        self.mappings = self._kept_plan.planner_data
        self.plan = self._kept_plan
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._values[write_item.index.fqn]
        return io.BytesIO(archive_object(value)) if write_item.type is WriteItemType.BYTE_IO else value


class _StoreExchange:
    """What the ranks of a world tell each other through their store."""

    def __init__(self, store: torch.distributed.Store, rank: int, size: int) -> None:
        self._store = store
        self.rank = rank
        self.size = size

    def say(self, name: str, message: object) -> None:
        packed = zlib.compress(msgspec.msgpack.encode(message), 1)
        self._store.set(f"{_PREFIX}/{name}", packed)  # type: ignore[arg-type]

    def hear(self, name: str, kind: Any) -> Any:
        (heard,) = self.hear_all([name], kind)
        return heard

    def hear_all(self, names: Sequence[str], kind: Any) -> list[Any]:
        keys = [f"{_PREFIX}/{name}" for name in names]
        self._store.wait(keys, _PATIENCE)
        return [_unpacked(key, self._store.get(key), kind) for key in keys]


def _unpacked(key: str, packed: bytes, kind: Any) -> Any:
    """A message as it was said; what is damaged, or would be too large, is refused before there is room made for it."""
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(packed, _MOST_BYTES)
        if unpacking.unconsumed_tail:
            raise CheckpointDamagedError(f"{key}: more than {_MOST_BYTES >> 20} MiB")
        if not unpacking.eof:
            raise CheckpointDamagedError(f"{key}: it ends too early")
        return from_msgpack(plain, kind)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise CheckpointDamagedError(f"{key}: {error}") from error
