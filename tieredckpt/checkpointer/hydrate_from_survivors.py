"""Hydration after a fault: save the survivors' live state as a step before the next world trains.

All ranks of the new world take part, before any of them trains. They exchange messages through their rendezvous store,
and each rank sends only one small message if no survivor has a usable state. The state becomes an ordinary save of the
new world: complete, with one writer for every replicated tensor, and with replicas on other nodes. A restore in any
world finds it as the newest complete step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from peerstore.errors import PeerStoreError
from peerstore.failpoints import failpoint
from peerstore.message_codec import from_msgpack
from tieredckpt.dcp.rank_group import RankGroup
from tieredckpt.dcp.tiered_writer import TieredWriter
from tieredckpt.errors import CheckpointDamagedError, SaveFailedError, TieredCheckpointError
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
from tieredckpt.rank_error import RankError
from tieredckpt.restore.fingerprint import can_be_fingerprinted, fingerprints_by_device
from tieredckpt.session.agent_discovery import join_peer_agents
from tieredckpt.session.session import Session, open_session
from tieredckpt.settings import Settings, load_settings, override_settings
from tieredckpt.tensors.plain_tensors import dtype_name
from tieredckpt.tensors.state_dict import archive_object

log = logging.getLogger(__name__)

_PREFIX = "tieredckpt/live"
_PATIENCE = timedelta(minutes=5)
"""Maximum wait for the messages of other ranks."""
_MOST_TRIES = 3
"""Number of worlds that a state is retained for."""
_MOST_BYTES = 256 << 20
"""Maximum bytes of one message: some hundred thousand tensors."""


_Choose = Callable[[Mapping[int, str]], SurvivorChoice]
"""Returns the choice without the steps in its argument, which has the reason for each."""


class _JobHoldings(msgspec.Struct, frozen=True):
    """States of one job on all ranks, as rank 0 reports them."""

    reached: int
    """Last step that any rank completed in the last world."""
    holdings: Mapping[int, SurvivorHolding]
    """Usable state of each rank that has one, by rank."""
    proven: int | None = None
    """Newest step that survivors trust; ``None`` for any."""
    off: str = ""
    """Reason why a survivor recorded no state, or an empty string."""


def hydrate_from_survivors(
    state: SurvivorState, store: torch.distributed.Store, rank: int, size: int
) -> list[Hydration]:
    """Save the newest step that the survivors' states form, on all ranks before their world trains.

    The survivors retain their states until that succeeds, so that the next world can retry after another fault. If it
    fails, only these steps are lost, and :class:`Hydration` has the reason. Ranks with the same slices must have the
    same contents.
    """
    exchange = _StoreExchange(store, rank, size)
    state.contribute_attempts += 1
    if state.contribute_attempts > _MOST_TRIES and state.retained:
        log.warning(
            "the retained state of %s is discarded after %d failed attempts to save it",
            ", ".join(state.retained),
            _MOST_TRIES,
        )
        state.clear()
    coverages = {job: _coverage_of(retained) for job, retained in state.retained.items()}
    job_holdings = _gather_holdings(state, exchange, coverages)
    found = [
        _hydrate(exchange, job, job_holdings[job], state.retained.get(job), coverages.get(job))
        for job in sorted(job_holdings)
    ]
    for hydration in found if rank == 0 else ():
        log.log(logging.WARNING if hydration.failed else logging.INFO, "%s", hydration)
    state.hydrations = {one.job: one for one in found}
    return found


def _gather_holdings(
    state: SurvivorState, exchange: _StoreExchange, coverages: Mapping[str, SurvivorCoverage]
) -> dict[str, _JobHoldings]:
    """Return the states that all ranks have, by job: rank 0 collects them and sends them to all."""
    holdings = {
        job: SurvivorHolding(one.step, one.world_epoch, coverages[job].digest, one.has_all_names)
        for job, one in state.retained.items()
    }
    proved = state.trusted_steps if state.aborts_silently else None
    exchange.send(
        f"stand/{exchange.rank}",
        SurvivorReport(state.last_world_epoch, holdings, state.reached_steps, proved, state.why_not()),
    )
    if exchange.rank == 0:
        with exchange.answering("asked") as answer:
            reports = exchange.receive_all([f"stand/{rank}" for rank in range(exchange.size)], SurvivorReport)
            held, most, off = holdings_by_job(reports), trusted_steps(reports), why_off(reports)
            answer(
                {
                    job: _JobHoldings(step, held.get(job, {}), most.get(job), off)
                    for job, step in reached_steps(reports).items()
                }
            )
    return exchange.receive("asked", dict[str, _JobHoldings])


def _hydrate(
    exchange: _StoreExchange,
    job: str,
    job_holdings: _JobHoldings,
    retained: RetainedState | None,
    coverage: SurvivorCoverage | None,
) -> Hydration:
    if not job_holdings.holdings:
        return Hydration(
            job, "snapshot", -1, job_holdings.reached, job_holdings.off or "no survivor stood between two steps"
        )
    reporters = coverage_reporters(job_holdings.holdings)
    chooser = min(reporters)  # a survivor, because its node knows all tiers
    if exchange.rank in reporters:
        exchange.send(f"{job}/{exchange.rank}", coverage)
    if exchange.rank == chooser and retained is not None:
        exchange.send(f"{job}/peer", {**dataclasses.asdict(retained.settings.peer), "secret": ""})
    settings = _settings_for(retained, exchange.receive(f"{job}/peer", dict[str, Any]))
    try:
        with contextlib.closing(_ranks_before_training()) as ranks:
            session = ranks.call_on_all(lambda: open_session(job, settings))
            ranks.call_on_all(lambda: join_peer_agents(session, restoring=True))

            def prepare() -> _Choose:
                coverages = exchange.receive_all([f"{job}/{rank}" for rank in reporters], SurvivorCoverage)
                return partial(_choose, job_holdings, coverages, *_required_names(session))

            chooses = exchange.rank == chooser
            choice = _agree_on_choice(exchange, job, job_holdings, retained, prepare if chooses else None)
            if choice.why:
                return Hydration(job, "snapshot", -1, job_holdings.reached, choice.why)
            failpoint("live.chosen")
            held = job_holdings.holdings.get(exchange.rank)
            planner = _Planner(retained if held is not None and held.step == choice.step else None)
            _save(ranks, session, settings, planner, choice.step)
            return Hydration(job, "live", choice.step, job_holdings.reached)
    except (TieredCheckpointError, PeerStoreError, CheckpointException) as error:
        # These calls fail on all ranks together, so no rank waits for another one.
        return Hydration(
            job, "snapshot", -1, job_holdings.reached, f"the save of the survivors' state failed: {error}", failed=True
        )


def _ranks_before_training() -> RankGroup:
    """Return the ranks, on the world's own group if its backend for the CPU is gloo.

    No training uses that group yet, and a new one would cost more than all messages here. Aborted collectives of other
    backends may end without an error.
    """
    world = dist.group.WORLD
    with contextlib.suppress(RuntimeError):  # no backend for the CPU
        if world is not None and world._get_backend(torch.device("cpu")).name() == "gloo":
            return RankGroup(world)
    return RankGroup(None)


def _agree_on_choice(
    exchange: _StoreExchange,
    job: str,
    job_holdings: _JobHoldings,
    retained: RetainedState | None,
    prepare: Callable[[], _Choose] | None,
) -> SurvivorChoice:
    """Return the choice of the rank that has ``prepare``, or raise its error on all ranks.

    A choice reads no tensor if no step is newer than the newest checkpoint. Otherwise replicas are compared first.
    """
    choose: _Choose | None = None
    if prepare is not None:
        with exchange.answering(f"{job}/candidate") as answer:
            choose = prepare()
            answer(choose({}))
    candidate = exchange.receive(f"{job}/candidate", SurvivorChoice)
    replicas = [rank for ranks in ranks_to_compare(job_holdings.holdings).values() for rank in ranks]
    if candidate.why or not replicas:
        return candidate
    if exchange.rank in replicas and retained is not None:
        exchange.send(f"{job}/content/{exchange.rank}", _content_digest(retained))
    if choose is not None:
        with exchange.answering(f"{job}/choice") as answer:
            contents = exchange.receive_all([f"{job}/content/{rank}" for rank in replicas], ContentDigest)
            wrong = diverging_replicas(job_holdings.holdings, dict(zip(replicas, contents, strict=True)))
            answer(choose(wrong))
    return exchange.receive(f"{job}/choice", SurvivorChoice)


def _choose(
    job_holdings: _JobHoldings,
    coverages: Sequence[SurvivorCoverage],
    needed: RequiredNames | None,
    unknown: str,
    wrong: Mapping[int, str],
) -> SurvivorChoice:
    known = {one.digest: one for one in coverages}
    return choose_survivor_step(
        job_holdings.holdings.values(), known, needed, unknown=unknown, most=job_holdings.proven, wrong=wrong
    )


def _required_names(session: Session) -> tuple[RequiredNames | None, str]:
    """Return the names in the newest complete step, or ``None`` and the error that hides them, if any."""
    try:
        loadable = session.choose_step(session.list_steps(fresh=True)).loadable
        if not loadable:
            return None, ""
        newest = loadable[0].version_id
        found = session.agent.steps.names(session.job, newest)
    except (TieredCheckpointError, PeerStoreError) as error:
        return None, str(error)
    return RequiredNames(newest.version, frozenset(found.names), frozenset(found.objects)), ""


def _save(ranks: RankGroup, session: Session, settings: Settings, planner: _Planner, step: int) -> None:
    """Save the survivors' state as ``step`` with the planners of all ranks, and report it as complete."""
    ranks.call_on_all(session.newest_known_epoch)
    ranks.call_on_all(lambda: join_peer_agents(session))
    session.loads.rewind_to(step)  # the job leaves the branch of later sealed steps
    # New nodes do not know the durable tier, so their parts of the step would be missing there.
    in_memory = override_settings(settings, durable={"url": ""})
    writer = TieredWriter(session.job, step, finite=settings.memory.nonfinite == "refuse", settings=in_memory)
    ranks.call_dcp(dcp.save, {}, storage_writer=writer, planner=planner)
    if writer.record is None:
        raise writer.error or SaveFailedError(f"step {step} of {session.job} left no shard")
    session.commits.report_complete(writer.record.key.version_id)


def _settings_for(retained: RetainedState | None, peer: Mapping[str, Any]) -> Settings:
    """Return a survivor's own settings; a new rank uses a survivor's peer settings with its own secret."""
    if retained is not None:
        return retained.settings
    own = load_settings()
    return override_settings(own, peer={**peer, "secret": own.peer.secret})


def _coverage_of(retained: RetainedState) -> SurvivorCoverage:
    held, objects = [], []
    for item in retained.plan.items:
        plan = item.tensor_data
        if plan is None:
            objects.append(item.index.fqn)
            continue
        dtype = dtype_name(plan.properties.dtype)
        held.append(HeldSlice(item.index.fqn, dtype, (*plan.size,), (*plan.chunk.offsets,), (*plan.chunk.sizes,)))
    return SurvivorCoverage(tuple(held), tuple(objects))


def _content_digest(retained: RetainedState) -> ContentDigest:
    """Return a digest of the replicated tensors, which reads each of their bytes once, on their device."""
    names = [item.index.fqn for item in retained.plan.items if item.tensor_data is not None]
    names = [name for name in names if name in retained.replicated_names]
    tensors = [retained.values[name] for name in names]
    unreadable = next((name for name, one in zip(names, tensors, strict=True) if not can_be_fingerprinted(one)), None)
    if unreadable is not None:
        return ContentDigest(why=f"the elements of {unreadable} cannot be compared")
    try:
        found = fingerprints_by_device(tensors)
    except RuntimeError as error:  # raised by a broken device
        return ContentDigest(why=str(error))
    return ContentDigest(xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(list(zip(names, found, strict=True)))))


class _Planner(DefaultSavePlanner):
    """Planner that returns the plan of a retained state, or an empty plan for a rank without one."""

    def __init__(self, retained: RetainedState | None) -> None:
        super().__init__()
        self._values = {} if retained is None else retained.values
        self._retained_plan = SavePlan([], planner_data={}) if retained is None else retained.plan

    def create_local_plan(self) -> SavePlan:
        self.mappings = self._retained_plan.planner_data
        self.plan = self._retained_plan
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value = self._values[write_item.index.fqn]
        return io.BytesIO(archive_object(value)) if write_item.type is WriteItemType.BYTE_IO else value


_NIL = msgspec.Raw(msgspec.msgpack.encode(None))


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """A message, or the error of the rank that should have sent it."""

    problem: RankError
    body: msgspec.Raw


class _StoreExchange:
    """Messages between the ranks of a world through their store."""

    def __init__(self, store: torch.distributed.Store, rank: int, size: int) -> None:
        self._store = store
        self.rank = rank
        self.size = size

    def send(self, name: str, message: object) -> None:
        self._set(name, _Message(RankError(), msgspec.Raw(msgspec.msgpack.encode(message))))

    @contextlib.contextmanager
    def answering(self, name: str) -> Iterator[Callable[[object], None]]:
        """Yield the function that sends the message ``name``; its receivers raise an error of the block."""
        try:
            yield partial(self.send, name)
        except Exception as error:
            self._set(name, _Message(RankError.of(error), _NIL))
            raise

    def _set(self, name: str, message: _Message) -> None:
        packed = zlib.compress(msgspec.msgpack.encode(message), 1)
        self._store.set(f"{_PREFIX}/{name}", packed)  # type: ignore[arg-type]

    def receive(self, name: str, kind: Any) -> Any:
        (message,) = self.receive_all([name], kind)
        return message

    def receive_all(self, names: Sequence[str], kind: Any) -> list[Any]:
        keys = [f"{_PREFIX}/{name}" for name in names]
        self._store.wait(keys, _PATIENCE)
        return [_unpack(key, self._store.get(key), kind) for key in keys]


def _unpack(key: str, packed: bytes, kind: Any) -> Any:
    """Return a message; raise :class:`CheckpointDamagedError` if it is damaged or too large to unpack."""
    unpacking = zlib.decompressobj()
    try:
        plain = unpacking.decompress(packed, _MOST_BYTES)
        if unpacking.unconsumed_tail:
            raise CheckpointDamagedError(f"{key}: more than {_MOST_BYTES >> 20} MiB")
        if not unpacking.eof:
            raise CheckpointDamagedError(f"{key}: it ends too early")
        message = from_msgpack(plain, _Message)
        if message.problem.message:
            raise message.problem.error()
        return from_msgpack(bytes(message.body), kind)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise CheckpointDamagedError(f"{key}: {error}") from error
