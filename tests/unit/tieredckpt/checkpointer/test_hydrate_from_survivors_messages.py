"""Messages between ranks through their store, and the choice of all ranks."""

from __future__ import annotations

import contextlib
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from tieredckpt.checkpointer import hydrate_from_survivors
from tieredckpt.errors import CheckpointDamagedError, TierUnavailableError
from tieredckpt.live.survivor_choice import SurvivorChoice, SurvivorHolding
from tieredckpt.live.survivor_state import RetainedState, SurvivorState
from tieredckpt.rank_error import RankError
from tieredckpt.settings import Settings

NAME = "stand/0"
SAID = {"step": 7, "names": ["weight", "bias"] * 100}
NO_PROBLEM = RankError()
PACKED = zlib.compress(msgspec.msgpack.encode([NO_PROBLEM, SAID]))


@pytest.fixture
def meeting():
    return hydrate_from_survivors._StoreExchange(dist.HashStore(), 0, 1)


def heard_of(meeting, packed: bytes):
    meeting._store.set(f"{hydrate_from_survivors._PREFIX}/{NAME}", packed)
    return meeting.receive(NAME, dict)


def test_message_round_trips(meeting):
    meeting.send(NAME, SAID)
    assert meeting.receive(NAME, dict) == SAID
    assert heard_of(meeting, PACKED) == SAID


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (PACKED[:-5], "ends too early"),
        (b"\x00" + PACKED[1:], "incorrect header"),
        (zlib.compress(b"\xc1"), "invalid"),
        (zlib.compress(msgspec.msgpack.encode([NO_PROBLEM, [1]])), "Expected `object`"),
        (zlib.compress(msgspec.msgpack.encode(SAID)), "Expected `array`"),
    ],
    ids=["torn", "no zlib", "no msgpack", "something else", "no envelope"],
)
def test_a_damaged_message_is_refused(meeting, packed, why):
    with pytest.raises(CheckpointDamagedError, match=f"(?i){NAME}: .*{why}"):
        heard_of(meeting, packed)


def test_oversized_message_is_refused_before_unpacking(meeting, monkeypatch):
    monkeypatch.setattr(hydrate_from_survivors, "_MOST_BYTES", 1 << 20)
    bomb = zlib.compress(bytes(64 << 20))
    assert len(bomb) < 1 << 20
    with pytest.raises(CheckpointDamagedError, match="more than 1 MiB"):
        heard_of(meeting, bomb)


def retained_state(tensor):
    plan = create_default_local_save_plan({"weight": tensor}, is_coordinator=True)
    return RetainedState(7, 0, {"weight": tensor}, plan, Settings(), replicated_names=frozenset({"weight"}))


def agreed_choice(tensors, newest=6):
    """Return the choices of ranks with these replicas of step 7, next to a checkpoint of step ``newest``."""
    store = dist.HashStore()
    holdings = {rank: SurvivorHolding(7, 0, "same") for rank in range(len(tensors))}
    known = hydrate_from_survivors._JobHoldings(7, holdings)

    def choose(wrong):
        if newest >= 7:
            return SurvivorChoice(why=f"step {newest} is a complete checkpoint")
        return SurvivorChoice(why=wrong[7]) if 7 in wrong else SurvivorChoice(7)

    def agree(rank):
        exchange = hydrate_from_survivors._StoreExchange(store, rank, len(tensors))
        return hydrate_from_survivors._agree_on_choice(
            exchange, "job", known, retained_state(tensors[rank]), (lambda: choose) if rank == 0 else None
        )

    with ThreadPoolExecutor(len(tensors)) as pool:
        return list(pool.map(agree, range(len(tensors))))


def test_replicas_with_the_same_contents_are_chosen():
    values = torch.arange(6.0).view(2, 3)
    assert agreed_choice([values, values.t().contiguous().t()]) == [SurvivorChoice(7)] * 2


def test_replicas_with_different_contents_are_not_chosen():
    values = torch.zeros(4096)
    other = values.clone()
    other[4095] = -0.0
    why = "ranks 0 and 1 do not hold the same parameters"
    assert agreed_choice([values, other]) == [SurvivorChoice(why=why)] * 2


def test_replicas_that_cannot_be_read_are_not_chosen():
    why = "rank 1: the elements of weight cannot be compared"
    assert agreed_choice([torch.zeros(3), torch.zeros(3, device="meta")]) == [SurvivorChoice(why=why)] * 2


def test_replicas_are_not_read_beside_a_checkpoint_of_their_step(monkeypatch):
    monkeypatch.setattr(hydrate_from_survivors, "_content_digest", lambda _: pytest.fail("tensors were read"))
    choice = SurvivorChoice(why="step 7 is a complete checkpoint")
    assert agreed_choice([torch.zeros(3), torch.zeros(3)], newest=7) == [choice] * 2


@pytest.mark.parametrize("fails_with", [{}, {7: "ranks 0 and 1 do not hold the same parameters"}])
def test_failed_choice_fails_on_all_ranks(fails_with, monkeypatch):
    """No rank waits for a choice that never comes."""
    monkeypatch.setattr(hydrate_from_survivors, "_PATIENCE", timedelta(seconds=20))
    ranks, store = 2, dist.HashStore()
    known = hydrate_from_survivors._JobHoldings(7, {rank: SurvivorHolding(7, 0, "same") for rank in range(ranks)})

    def choose(wrong):
        if wrong == fails_with:
            raise TierUnavailableError("the disk is gone")
        return SurvivorChoice(7)

    def agree(rank):
        exchange = hydrate_from_survivors._StoreExchange(store, rank, ranks)
        state = retained_state(torch.full((3,), float(rank)))
        with pytest.raises(TierUnavailableError, match="the disk is gone"):
            hydrate_from_survivors._agree_on_choice(
                exchange, "job", known, state, (lambda: choose) if rank == 0 else None
            )

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(agree, range(ranks)))


def test_damaged_report_is_an_error_on_all_ranks(monkeypatch):
    monkeypatch.setattr(hydrate_from_survivors, "_PATIENCE", timedelta(seconds=20))
    store = dist.HashStore()
    store.set(f"{hydrate_from_survivors._PREFIX}/stand/2", b"torn")

    def gather(rank):
        exchange = hydrate_from_survivors._StoreExchange(store, rank, 3)
        with pytest.raises(CheckpointDamagedError, match="stand/2"):
            hydrate_from_survivors._gather_holdings(SurvivorState(), exchange, {})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(gather, range(2)))


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo", "silent"])
def test_only_a_gloo_group_of_the_world_is_used(backend, monkeypatch):
    """Aborted collectives of other backends may end without an error."""
    dist.init_process_group("gloo" if backend == "silent" else backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        if backend == "silent":
            other = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(name=lambda: "silent"))
            monkeypatch.setattr(hydrate_from_survivors.dist, "group", SimpleNamespace(WORLD=other))
        with contextlib.closing(hydrate_from_survivors._ranks_before_training()) as ranks:
            assert (ranks._own_group is None) == (backend != "silent")
    finally:
        dist.destroy_process_group()
