"""Hang detection among ranks over a store, in simulated time: judges, verdicts, cost."""

from __future__ import annotations

import pytest

from elastic.control.control_plane import RankProgress
from elastic.control.hang_detector import HangTimeouts, StepTimes
from elastic.workers.peer_hang_detector import FIRST_HEARTBEAT, IDLE_HEARTBEATS, PeerHangDetector, RankHeartbeats

SHORT = HangTimeouts(step_s=30.0, first_s=100.0, silent_s=20.0)


class CountedStore:
    """A store that counts requests and keys."""

    def __init__(self, size: int) -> None:
        self.keys = [f"beat/{rank}" for rank in range(size)]
        self.held = dict.fromkeys(self.keys, FIRST_HEARTBEAT.encode())
        self.requests = self.most_keys = 0

    def set(self, key: str, value: str) -> None:
        self.requests += 1
        self.held[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self.held[key]

    def multi_get(self, keys):
        self.requests += 1
        self.most_keys = max(self.most_keys, len(keys))
        return [self.held[key] for key in keys]


class World:
    """Ranks that send a heartbeat once a second, except stopped ranks."""

    def __init__(self, size: int, limits: HangTimeouts = SHORT) -> None:
        self.store = CountedStore(size)
        self.now = 0.0
        self.stopped: set[int] = set()
        self.over: set[int] = set()
        self.steps = [-1] * size
        self.free: set[int] = set()
        self.ranks = [
            RankHeartbeats(self.store, self.store.keys, rank, lambda: PeerHangDetector(3, size, limits, StepTimes()))
            for rank in range(size)
        ]
        self.told: list[tuple[int, str]] = []

    def pass_by(self, seconds: int, *, moving: set[int] = frozenset()) -> list[tuple[int, str]]:
        for _ in range(seconds):
            self.now += 1.0
            for rank, one in enumerate(self.ranks):
                if rank in self.stopped:
                    continue
                self.steps[rank] += rank in moving
                said = RankProgress(self.steps[rank], idle=rank in self.free)
                found = one.beat(said, self.now, over=rank in self.over)
                if found is not None:
                    self.told.append((rank, found))
        return self.told


def all_of(world):
    return set(range(len(world.ranks)))


def test_no_rank_is_blamed_while_all_progress():
    world = World(8)
    assert world.pass_by(1000, moving=all_of(world)) == []


def test_rank_behind_all_others_is_named():
    world = World(9)
    world.pass_by(10, moving=all_of(world))
    world.pass_by(1, moving=all_of(world) - {8})
    ((judge, reason),) = world.pass_by(40)
    assert judge == 0
    assert reason.startswith("rank 8: no rank has got on for 31 s")


def test_stopped_rank_is_found_by_its_silence_before_the_first_step():
    world = World(9)
    world.stopped = {8}
    ((_, reason),) = world.pass_by(60)
    assert reason.startswith("rank 8: no rank has got on for")
    assert "its process does not answer" in reason


@pytest.mark.parametrize("stopped", [{0}, {0, 1}, {0, 1, 2, 3}])
def test_stopped_detector_is_judged_by_the_next_rank(stopped):
    world = World(9)
    world.pass_by(10, moving=all_of(world))
    world.stopped = set(stopped)
    told = world.pass_by(120)
    named = ", ".join(map(str, sorted(stopped)))
    assert [judge for judge, _ in told] == [len(stopped)]
    assert told[0][1].startswith(f"rank{'s' if len(stopped) > 1 else ''} {named}: ")


def test_suspended_detector_blames_no_rank_when_it_resumes():
    world = World(4)
    world.pass_by(10, moving=all_of(world))
    world.stopped = all_of(world)  # a suspended job
    world.now += 100_000
    world.stopped = set()
    assert world.pass_by(3) == []
    assert world.pass_by(100, moving=all_of(world)) == []


def test_finished_rank_is_neither_silent_nor_a_delay():
    world = World(3)
    world.pass_by(10, moving=all_of(world))
    world.over = {0, 2}
    world.pass_by(1)
    world.stopped = {0, 2}  # their processes have ended
    assert world.pass_by(500) == []


def test_rank_outside_of_its_steps_is_not_late_but_may_be_stopped():
    world = World(3)
    world.free = {0, 1, 2}
    assert world.pass_by(500) == []
    world.stopped = {1}
    assert {reason[:7] for _, reason in world.pass_by(60)} == {"rank 1:"}  # the next rank takes over as judge


def test_off_is_off():
    world = World(3, HangTimeouts(0.0, 0.0))
    world.stopped = {2}
    assert world.pass_by(5000) == []


@pytest.mark.parametrize("size", [2, 64, 5000])
def test_store_requests_of_a_rank_do_not_grow_with_the_world(size):
    """Count the requests of the judge and of another rank in ten beats, idle and moving."""
    asked = {}
    for rank in (0, size - 1):
        for moving in (False, True):
            store = CountedStore(size)
            one = RankHeartbeats(store, store.keys, rank, lambda: PeerHangDetector(0, size, SHORT, StepTimes()))
            for beat in range(10):
                one.beat(RankProgress(beat if moving else 7), float(beat))
            asked[rank > 0, moving] = store.requests
            assert store.most_keys <= 1024
    assert asked == {(False, False): 12, (False, True): 20, (True, False): 4, (True, True): 12}


def test_stopped_rank_is_found_in_a_large_world_read_in_parts():
    world = World(3000)
    world.stopped = {2999}
    found = world.pass_by(60)
    assert [reason[:10] for _, reason in found] == ["rank 2999:"]


def test_idle_rank_still_sends_heartbeats():
    store = CountedStore(2)
    one = RankHeartbeats(store, store.keys, 1, None)
    words = []
    for beat in range(2 * IDLE_HEARTBEATS):
        one.beat(RankProgress(7), float(beat))
        words.append(store.held["beat/1"])
    assert len(set(words)) == 2


@pytest.mark.parametrize("word", [b"", b"1 2 3", b"1 x 0 0", b"\xff" * 9, b"9" * 10_000, b"1 " + b"9" * 5000 + b" 0 0"])
def test_malformed_heartbeat_does_not_count(word):
    world = World(3)
    world.pass_by(3)
    world.stopped = {1}
    world.store.held["beat/1"] = word
    assert {reason[:7] for _, reason in world.pass_by(60)} == {"rank 1:"}
