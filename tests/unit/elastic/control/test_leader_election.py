"""Leader election: the decisions of one candidate, and that two leaders never act at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from elastic.control.leader_election import (
    LEADER_RECORD_ENTRY_POINTS,
    UNKNOWN_HOLDER,
    LeaderElection,
    LeaderRecord,
    LeaderRecordWrite,
    is_leader_url,
    open_leader_record,
)
from elastic.errors import PolicyError
from tests.support.example_counts import examples

pytestmark = pytest.mark.slow

DURATION_S = 15.0
replace = msgspec.structs.replace


class Store:
    """A record that changes only for a writer that has read its current version."""

    def __init__(self) -> None:
        self.record: LeaderRecord | None = None
        self._versions = itertools.count(1)

    def write(self, write: LeaderRecordWrite) -> LeaderRecord | None:
        if (self.record and self.record.version) != (write.over and write.over.version):
            return None
        self.record = replace(write.record, version=str(next(self._versions)))
        return self.record


@dataclass
class Player:
    """A candidate and its connection to the store."""

    election: LeaderElection
    store: Store
    offset_s: float = 0.0
    under_way: list[LeaderRecordWrite] = field(default_factory=list)
    """Writes that their sender has abandoned and that have not arrived yet."""

    def turn(self, now: float, *, fate: str = "answered") -> None:
        election, mine = self.election, now + self.offset_s
        if election.must_read:
            if fate == "answered":
                election.saw(self.store.record, mine)
            return
        write = election.wanted(mine)
        if write is None:
            if not election.term:
                election.must_read = True
            return
        if fate == "answered":
            election.wrote(write, self.store.write(write), mine, mine)
        elif fate == "slowly":  # the write takes 2 s
            election.wrote(write, self.store.write(write), mine - 2.0, mine)
        else:
            if fate == "answer lost":
                self.store.write(write)
            elif fate == "late":
                self.under_way.append(write)
            election.unanswered()


def player(store: Store, me: str, *, terms: Callable[[], int] | None = None, **more) -> Player:
    count = itertools.count(100)
    return Player(LeaderElection(me, f"{me}:1", DURATION_S, terms or (lambda: next(count)), **more), store)


def lead(one: Player, now: float) -> float:
    """Run until the candidate leads, and return the time."""
    for _ in range(100):
        one.turn(now)
        if one.election.acts(now + one.offset_s):
            return now
        now += 1.0
    raise AssertionError(one.election)


def run(players: list[Player], now: float, seconds: float, **fates: str) -> float:
    for _ in range(int(seconds)):
        for one in players:
            one.turn(now, fate=fates.get(one.election.me, "answered"))
        now += 1.0
    return now


def test_recreated_record_is_treated_as_held():
    store = Store()
    one = player(store, "a")
    one.turn(0.0)
    one.turn(0.0)
    assert store.record.holder == UNKNOWN_HOLDER
    assert lead(one, 0.0) >= DURATION_S


def test_free_record_is_taken_at_once():
    store = Store()
    store.record = LeaderRecord(term=4, epoch=9, version="x")
    one = player(store, "a")
    assert lead(one, 0.0) == 1.0
    assert (one.election.term, one.election.epoch) == (5, 9)


def test_leader_that_stops_renewing_is_replaced_in_a_later_term():
    store, (a, b) = Store(), (None, None)
    a, b = player(store, "a"), player(store, "b")
    now = run([a, b], 0.0, 40)
    assert (a.election.acts(now), b.election.acts(now)) == (True, False)
    assert b.election.follows == "a"
    first = a.election.term
    now = run([b], now, 30)
    assert not a.election.acts(now)
    assert b.election.acts(now)
    assert b.election.term == first + 1
    a.turn(now)
    a.turn(now)
    assert "b leads" in a.election.lost


@pytest.mark.parametrize("fate", ["answer lost", "request lost"])
def test_unanswered_renewal_does_not_lose_the_lead(fate):
    store = Store()
    a, b = player(store, "a"), player(store, "b")
    now = run([a, b], 0.0, 40)
    term = a.election.term
    for number in range(60):
        write_due = a.election.wanted(now) is not None
        a.turn(now, fate=fate if write_due and number % 11 < 3 else "answered")
        b.turn(now)
        assert a.election.acts(now)
        now += 1.0
    assert (a.election.term, a.election.lost) == (term, "")


def test_partitioned_leader_stops_before_its_successor_acts():
    store = Store()
    a, b = player(store, "a"), player(store, "b")
    now = run([a, b], 0.0, 40)
    acting = []
    for _ in range(40):
        a.turn(now, fate="request lost")
        b.turn(now)
        acting.append((a.election.acts(now), b.election.acts(now)))
        now += 1.0
    assert (True, True) not in acting
    assert acting[-1] == (False, True)


def test_suspended_leader_resumes_its_term_if_the_record_is_unchanged():
    store = Store()
    a = player(store, "a")
    now = lead(a, 0.0)
    term = a.election.term
    now += 3600.0
    assert not a.election.acts(now)
    a.turn(now)
    assert a.election.acts(now)
    assert a.election.term == term


def test_deleted_record_is_recreated_at_once_only_by_its_holder():
    store = Store()
    a, b = player(store, "a"), player(store, "b")
    now = run([a, b], 0.0, 40)
    term = a.election.term
    store.record = None
    now = run([a], now, 10)
    assert (a.election.term, store.record.holder) == (term, "a")
    store.record = None
    b.turn(now)
    b.turn(now)
    b.turn(now)
    assert store.record.holder == UNKNOWN_HOLDER  # b was first
    acting = []
    for _ in range(40):
        a.turn(now)
        b.turn(now)
        acting.append((a.election.acts(now), b.election.acts(now)))
        now += 1.0
    assert (True, True) not in acting
    assert any(one != (False, False) for one in acting)
    assert a.election.term != b.election.term


def test_leader_that_saw_a_higher_term_steps_down_and_leads_above_it():
    """A newcomer with a late clock created the deleted record again."""
    store = Store()
    one = player(store, "b", terms=lambda: 1)
    now = lead(one, 0.0)
    assert one.election.term == 2
    one.election.heard = 7
    one.turn(now)
    assert not one.election.acts(now)
    assert (store.record.holder, store.record.term) == ("", 7)
    now = lead(one, now)
    assert one.election.term == 8


def test_leaving_leader_releases_its_lead():
    store = Store()
    a, b = player(store, "a"), player(store, "b")
    now = run([a, b], 0.0, 40)
    a.election.epoch = 12
    a.election.leaving = True
    a.turn(now)
    assert (store.record.holder, store.record.epoch) == ("", 12)
    now = run([b], now, 4)
    assert b.election.acts(now)
    assert b.election.epoch == 12


@pytest.mark.parametrize(
    ("over", "since", "taken"), [("stopped", 0, True), ("stopped", 3, False), ("finished", 0, False)]
)
def test_ended_job_is_restarted_only_by_a_newcomer_unless_it_finished(over, since, taken):
    store = Store()
    store.record = LeaderRecord(term=5, over=over, version="x")
    one = player(store, "a", since=since)
    now = run([one], 0.0, 40)
    assert one.election.acts(now) is taken
    assert store.record.over == ("" if taken else over)


def test_successor_of_an_ended_holder_does_not_wait():
    store = Store()
    first = player(store, "a")
    now = lead(first, 0.0)
    again = player(store, "a")
    assert lead(again, now) <= now + 2
    assert again.election.term == first.election.term + 1
    first.turn(now + 6)
    first.turn(now + 6)
    assert not first.election.acts(now + 6)


@pytest.mark.parametrize(
    "url",
    ["nobody:///x", "file:///x?lease=soon", "file:///x?lease=0.1", "file:///x?held=3", "file://host/x", "file:///"],
)
def test_record_url_without_a_place_is_refused(url):
    assert is_leader_url(url)
    with pytest.raises(PolicyError):
        open_leader_record(url)


def of_tests(parts, duration_s):
    return parts.path, duration_s


def test_another_package_brings_its_place_by_the_scheme_of_its_urls():
    found = [
        EntryPoint("etcd", f"{__name__}:of_tests", LEADER_RECORD_ENTRY_POINTS),
        EntryPoint("broken", "no_such_package:place", LEADER_RECORD_ENTRY_POINTS),
    ]
    assert open_leader_record("etcd://host/job?lease=4.5", found) == ("/job", 4.5)
    with pytest.raises(PolicyError, match="which knows broken://, cannot be loaded"):
        open_leader_record("broken://host/job", found)
    assert "kubernetes" in {entry.name for entry in entry_points(group=LEADER_RECORD_ENTRY_POINTS)}


NAMES = ("a", "b", "c")


class Elections(RuleBasedStateMachine):
    """Candidates with unrelated clocks, a record that any process may delete, a lossy network."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.store, self.lives = 1000.0, Store(), itertools.count()
        self.players = {name: self.new(name, 1000.0 * number) for number, name in enumerate(NAMES)}
        self.retired: list[Player] = []
        self.led: dict[int, str] = {}

    def new(self, name: str, offset_s: float) -> Player:
        election = LeaderElection(f"{name}{next(self.lives)}", f"{name}:1", DURATION_S, lambda: int(self.now * 1000))
        return Player(election, self.store, offset_s)

    @rule(name=st.sampled_from(NAMES), fate=st.sampled_from(
        ("answered", "answered", "answered", "slowly", "answer lost", "request lost", "late")))  # fmt: skip
    def turn(self, name, fate):
        self.players[name].turn(self.now, fate=fate)

    @rule(seconds=st.sampled_from((0.1, 1.0, 3.0, 12.0, 14.9, 15.1, 600.0)))
    def wait(self, seconds):
        self.now += seconds

    @rule(seconds=st.integers(1, 40), stopped=st.sets(st.sampled_from(NAMES)))
    def run_well(self, seconds, stopped):
        """Run every candidate that is not stopped, and answer its requests."""
        for _ in range(seconds):
            self.now += 1.0
            for name, one in self.players.items():
                if name not in stopped:
                    one.turn(self.now)
            self.one_at_a_time()

    @rule(name=st.sampled_from(NAMES))
    def arrive_late(self, name):
        for one in (self.players[name], *self.retired):
            while one.under_way:
                self.store.write(one.under_way.pop(0))

    @rule()
    def delete(self):
        self.store.record = None

    @rule(name=st.sampled_from(NAMES))
    def replace_by_a_newcomer(self, name):
        """The old one may only be stopped: it is looked at for as long as it could act."""
        before = self.players[name]
        self.retired.append(before)
        self.players[name] = self.new(name, before.offset_s)

    @rule(name=st.sampled_from(NAMES))
    def end_and_start_again(self, name):
        """Under the same name, as its supervisor does that has seen it end."""
        before = self.players[name]
        election = before.election
        self.players[name] = Player(
            LeaderElection(election.me, election.address, DURATION_S, election.new_term), self.store, before.offset_s,
            before.under_way,
        )  # fmt: skip

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name):
        self.players[name].election.leaving = True

    @rule(name=st.sampled_from(NAMES), epoch=st.integers(0, 9))
    def note(self, name, epoch):
        election = self.players[name].election
        election.epoch = max(election.epoch, epoch)

    @rule(number=st.integers(0, 9))
    def go_on(self, number):
        if self.retired:
            self.retired[number % len(self.retired)].turn(self.now)

    @invariant()
    def one_at_a_time(self):
        acting = [one for one in (*self.players.values(), *self.retired) if one.election.acts(self.now + one.offset_s)]
        assert len(acting) <= 1, [one.election for one in acting]
        for one in acting:
            term = one.election.term
            assert self.led.setdefault(term, one.election.me) == one.election.me, "two have led in one term"

    def teardown(self):
        """Run without further faults: a candidate leads and knows the highest recorded epoch."""
        newcomer = self.new("d", 50.0)
        self.players = {"d": newcomer}
        for _ in range(40):
            self.now += 1.0
            newcomer.turn(self.now)
            self.one_at_a_time()
        assert newcomer.election.acts(self.now + 50.0)


Elections.TestCase.settings = settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
TestElections = Elections.TestCase


@pytest.mark.parametrize("broken", ["no margin in time", "no wait for a new record", "no wait for a holder"])
def test_the_machine_finds_rules_that_are_broken(broken, monkeypatch):
    def taking(self, now):
        seen = self.seen
        if broken == "no wait for a new record" and seen is None:
            return LeaderRecordWrite(LeaderRecord(self.me, self.new_term(), duration_s=self.duration_s), None)
        if broken == "no wait for a holder" and seen is not None:
            return LeaderRecordWrite(
                LeaderRecord(self.me, seen.term + 1, self.address, seen.epoch, self.duration_s), seen
            )
        return real(self, now)

    real = LeaderElection._plan_takeover
    monkeypatch.setattr(LeaderElection, "_plan_takeover", taking)
    if broken == "no margin in time":
        monkeypatch.setattr(LeaderElection, "margin_s", property(lambda self: -5.0))
        monkeypatch.setattr(LeaderElection, "next_at", lambda self, now: now)

    class Broken(Elections):
        pass

    Broken.TestCase.settings = settings(
        max_examples=1000, stateful_step_count=40, deadline=None, database=None, report_multiple_bugs=False,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        Broken.TestCase("runTest").runTest()
