"""What survivors kept is saved in the new world: an ordinary save of the step they stood at.

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
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from peerstore.crashpoints import reach
from peerstore.errors import PeerStoreError
from tieredckpt.checkpointer import Checkpointer
from tieredckpt.errors import TieredCheckpointError
from tieredckpt.live.choosing import Choice, Cover, Held, Holding, Needed, Stand, choose, holdings_of, reached, tellers
from tieredckpt.live.keeping import Hydration, Keeper, Kept
from tieredckpt.resolve import resolve
from tieredckpt.settings import Settings, load_settings, override
from tieredckpt.state import archive
from tieredckpt.stored import StoredStep
from tieredckpt.tensors import dtype_name

log = logging.getLogger(__name__)

_PREFIX = "tieredckpt/live"
_PATIENCE = timedelta(minutes=5)
_MOST_TRIES = 3


class _Asked(msgspec.Struct, frozen=True):
    """What the first rank wants to know about a job, and what it knows."""

    reached: int
    tell: Mapping[int, str]
    """Ranks that are to say what they have."""


class _Told(msgspec.Struct, frozen=True):
    cover: Cover
    settings: dict[str, Any]


def hydrate(keeper: Keeper, store: torch.distributed.Store, rank: int, size: int) -> list[Hydration]:
    """Before a world's training begins, on all of its ranks: save the newest step that survivors have whole.

    What they have is kept until that is done, so that after another fault the next world can try again. Where it
    cannot be done nothing is lost but these steps: :class:`Hydration` says why.
    """
    meeting = _Meeting(store, rank, size)
    keeper.tries += 1
    if keeper.tries > _MOST_TRIES and keeper.kept:
        log.warning("what was kept of %s is given up after %d worlds", ", ".join(keeper.kept), _MOST_TRIES)
        keeper.drop()
    covers = {job: _cover_of(kept) for job, kept in keeper.kept.items()}
    asked = _asked(keeper, meeting, covers)
    found = []
    for job in sorted(asked):
        one = asked[job]
        if not one.tell:
            found.append(Hydration(job, "snapshot", -1, one.reached, "no survivor stood between two steps"))
            continue
        kept = keeper.kept.get(job)
        if rank in one.tell and kept is not None:
            meeting.say(f"{job}/{rank}", _Told(covers[job], dataclasses.asdict(kept.settings)))
        found.append(_hydrate(meeting, job, one, kept))
    for hydration in found if rank == 0 else ():
        log.info("%s", hydration)
    keeper.hydrations = {one.job: one for one in found}
    return found


def _asked(keeper: Keeper, meeting: _Meeting, covers: Mapping[str, Cover]) -> dict[str, _Asked]:
    """Who has what, by job: the first rank asks everybody, and says it to all."""
    holdings = {job: Holding(one.step, one.left, covers[job].digest) for job, one in keeper.kept.items()}
    meeting.say(f"stand/{meeting.rank}", Stand(keeper.left, holdings, keeper.reached))
    if meeting.rank == 0:
        stands = [meeting.hear(f"stand/{rank}", Stand) for rank in range(meeting.size)]
        held = holdings_of(stands)
        meeting.say("asked", {job: _Asked(step, tellers(held.get(job, {}))) for job, step in reached(stands).items()})
        meeting.held = held
    return meeting.hear("asked", dict[str, _Asked])


def _hydrate(meeting: _Meeting, job: str, asked: _Asked, kept: Kept | None) -> Hydration:
    told = {who: meeting.hear(f"{job}/{who}", _Told) for who in asked.tell} if meeting.rank == 0 else {}
    first = meeting.hear(f"{job}/{min(asked.tell)}", _Told)
    try:
        with Checkpointer(f"tiered://{job}", settings=_settings(first.settings), on_sigterm="ignore") as ckpt:
            ckpt._join(restoring=True)
            if meeting.rank == 0:
                covers = {asked.tell[who]: one.cover for who, one in told.items()}
                meeting.say(f"{job}/choice", _choice(ckpt, meeting.held[job], covers))
            choice = meeting.hear(f"{job}/choice", Choice)
            if choice.why:
                return Hydration(job, "snapshot", -1, asked.reached, choice.why)
            given = kept if kept is not None and kept.step == choice.step else None
            reach("live.chosen")
            ckpt._give(_Planner(given), choice.step)
            return Hydration(job, "live", choice.step, asked.reached)
    except (TieredCheckpointError, PeerStoreError, CheckpointException) as error:
        # Of a save, or of what is asked before it, all ranks hear together that it failed.
        return Hydration(job, "snapshot", -1, asked.reached, f"it could not be given: {error}")


def _choice(ckpt: Checkpointer, held: Mapping[int, Holding], covers: Mapping[str, Cover]) -> Choice:
    try:
        needed = _needed(ckpt)
    except (TieredCheckpointError, PeerStoreError) as error:
        return Choice(why=f"what is saved is not known: {error}")
    newest = max(one.left for one in held.values())
    return choose([one for one in held.values() if one.left == newest], covers, needed)


def _needed(ckpt: Checkpointer) -> Needed | None:
    """What the newest whole step has."""
    node, job = ckpt.session.node, ckpt.session.job
    seen = node.survey(job, fresh=True)
    bad = {view.group for view in seen.views if view.quarantined}
    candidates = [view.candidate for view in seen.views]
    chosen = resolve(candidates, quarantined=bad, unreachable=list(seen.unreachable)).chosen
    if chosen is None:
        return None
    step = StoredStep(node.describe(job, chosen.group))
    return Needed(chosen.group.version, frozenset(step.tensors), frozenset(step.objects))


def _settings(told: Mapping[str, Any]) -> Settings:
    """Those of who saved, but this node's own for its agent."""
    return override(load_settings(), **{section: told[section] for section in ("memory", "peer", "durable")})


def _cover_of(kept: Kept) -> Cover:
    held, objects = [], []
    for item in kept.plan.items:
        plan = item.tensor_data
        if plan is None:
            objects.append(item.index.fqn)
            continue
        dtype = dtype_name(plan.properties.dtype)
        held.append(Held(item.index.fqn, dtype, (*plan.size,), (*plan.chunk.offsets,), (*plan.chunk.sizes,)))
    return Cover(tuple(held), tuple(objects))


class _Planner(DefaultSavePlanner):
    """Plans what was kept, as it was planned in its own world; nothing, for a rank that has nothing."""

    def __init__(self, kept: Kept | None) -> None:
        super().__init__()
        self._values = {} if kept is None else kept.values
        self._kept_plan = SavePlan([], planner_data={}) if kept is None else kept.plan

    def create_local_plan(self) -> SavePlan:
        self.mappings = self._kept_plan.planner_data
        self.plan = self._kept_plan
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._values[write_item.index.fqn]
        return io.BytesIO(archive(value)) if write_item.type is WriteItemType.BYTE_IO else value


class _Meeting:
    """What the ranks of a world tell each other through their store."""

    def __init__(self, store: torch.distributed.Store, rank: int, size: int) -> None:
        self._store = store
        self.rank = rank
        self.size = size
        self.held: dict[str, dict[int, Holding]] = {}
        """For the first rank: who has something."""

    def say(self, name: str, message: object) -> None:
        packed = zlib.compress(msgspec.msgpack.encode(message), 1)
        self._store.set(f"{_PREFIX}/{name}", packed)  # type: ignore[arg-type]

    def hear(self, name: str, kind: Any) -> Any:
        self._store.wait([f"{_PREFIX}/{name}"], _PATIENCE)
        return msgspec.msgpack.decode(zlib.decompress(self._store.get(f"{_PREFIX}/{name}")), type=kind)
