"""Eviction decisions for any set of slots."""

import dataclasses
import math
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peerstore.commit_protocol import committed_versions, newest_committed
from peerstore.shard_records import VersionId
from peerstore.store.slot_eviction import (
    BudgetExceeded,
    CreateSlot,
    EvictSlots,
    ReuseSlot,
    SlotLimits,
    SlotRequest,
    SlotsBusy,
    SlotUse,
    SlotView,
    abandoned_slots,
    choose_own_slot,
    choose_slot,
    evictable_slots,
    evictions_to_grow,
    size_class,
)

JOBS, PARTS = ["job", "other"], [0, 8]


def group(version, epoch=1, attempt=0):
    return VersionId(epoch, version, attempt, f"i{epoch}")


groups = st.builds(group, st.integers(0, 4), st.integers(1, 3), st.integers(0, 1))


@st.composite
def slot_views(draw):
    states = draw(st.lists(st.sampled_from(list(SlotUse)), max_size=10))
    return [
        SlotView(
            f"s{number}",
            state,
            draw(st.integers(0, 40)),
            draw(st.sampled_from(JOBS)),
            draw(st.sampled_from(PARTS)),
            draw(groups) if state is SlotUse.SEALED else None,
            draw(st.booleans()),
            draw(st.booleans()),
        )
        for number, state in enumerate(states)
    ]


wholes = st.dictionaries(st.sampled_from(JOBS), st.sets(groups, max_size=4))
limits = st.builds(SlotLimits, st.integers(1, 200), st.integers(1, 3), st.integers(0, 2))


def request(whole, *, job="job", part=0, size_bytes=10, limits=None, **fields):
    fields.setdefault("rollback_targets", newest_committed(whole))
    return SlotRequest(job, part, size_bytes, limits or ROOMY, whole, **fields)


def given_up(decision, slots):
    """Return the sealed slots that a decision evicts."""
    names = set(decision.drop) | ({decision.name} if isinstance(decision, ReuseSlot) else set())
    return [slot for slot in slots if slot.name in names and slot.use is SlotUse.SEALED]


def allocated_after(decision, slots, size_bytes):
    left = sum(slot.size_bytes for slot in slots if slot.name not in decision.drop)
    return left if isinstance(decision, ReuseSlot) else left + size_bytes


def check_nothing_needed_is_given_up(decision, slots, whole, job, epoch):
    for slot in given_up(decision, slots):
        newest = max(whole.get(slot.job, ()), default=None)
        assert not slot.busy
        superseded = newest is not None and slot.version_id < newest
        left_behind = slot.job == job and slot.version_id.epoch < epoch and slot.version_id not in whole.get(job, ())
        assert superseded or left_behind, (slot, newest)
        assert slot.version_id != newest


@given(slot_views(), wholes, limits, st.sampled_from(PARTS), st.integers(0, 60), st.integers(1, 4))
def test_chosen_slot_fits_and_evicts_nothing_needed(slots, whole, limits, part, size, epoch):
    decision = choose_slot(slots, request(whole, part=part, epoch=epoch, size_bytes=size, limits=limits))
    if isinstance(decision, SlotsBusy | BudgetExceeded):
        assert "part" in decision.reason
        return
    assert allocated_after(decision, slots, size) <= limits.budget_bytes
    check_nothing_needed_is_given_up(decision, slots, whole, "job", epoch)
    mine = [slot for slot in slots if (slot.job, slot.part) == ("job", part)]
    if isinstance(decision, CreateSlot):
        left = [slot for slot in mine if slot.name not in decision.drop]
        assert len(left) < max(limits.slots + limits.burst, len(mine))  # a replacement adds no slot
    else:
        chosen = next(slot for slot in slots if slot.name == decision.name)
        assert chosen.use is not SlotUse.LEASED
        assert decision.name not in decision.drop
        assert size <= chosen.size_bytes <= size + size // 4
        assert chosen.reusable
        assert chosen in mine or len(mine) < limits.slots + limits.burst
    assert all(slot.use is not SlotUse.LEASED for slot in slots if slot.name in decision.drop)


@given(slot_views(), wholes, limits, st.integers(0, 100), st.integers(1, 4), st.randoms())
def test_growing_a_slot_fits_and_evicts_nothing_needed(slots, whole, limits, size, epoch, random):
    leased = [slot for slot in slots if slot.use is SlotUse.LEASED]
    if not leased:
        return
    growing = random.choice(leased)
    asked = request(whole, job=growing.job, part=growing.part, epoch=epoch, size_bytes=size, limits=limits)
    decision = evictions_to_grow(slots, asked, growing=growing.name)
    if isinstance(decision, EvictSlots):
        rest = sum(s.size_bytes for s in slots if s.name not in decision.drop)
        assert rest + size <= limits.budget_bytes
        assert growing.name not in decision.drop
        check_nothing_needed_is_given_up(decision, slots, whole, growing.job, epoch)


@given(slot_views(), wholes, limits, st.sampled_from(PARTS), st.integers(0, 60))
def test_full_means_that_waiting_does_not_help(slots, whole, limits, part, size):
    """The budget is exceeded only if the newest complete versions alone leave too little room."""
    decision = choose_slot(slots, request(whole, part=part, epoch=1, size_bytes=size, limits=limits))
    keep = {job: max(found, default=None) for job, found in whole.items()}
    sealed = [s for s in slots if s.use is SlotUse.SEALED]
    fixed = sum(s.size_bytes for s in sealed if s.version_id == keep.get(s.job, math.nan))
    if isinstance(decision, BudgetExceeded):
        assert fixed + size > limits.budget_bytes
    if fixed + size > limits.budget_bytes:
        assert isinstance(decision, BudgetExceeded | SlotsBusy)


@given(slot_views(), wholes)
def test_only_versions_older_than_a_committed_one_are_evictable(slots, whole):
    found = evictable_slots(slots, request({}, rollback_targets=newest_committed(whole)))
    assert all(slot.version_id < max(whole[slot.job]) and not slot.busy for slot in found)
    assert [slot.version_id for slot in found] == sorted(slot.version_id for slot in found)
    for job, versions in whole.items():
        if versions:
            assert max(versions) not in {slot.version_id for slot in found if slot.job == job}
    assert {slot.job for slot in found} <= {job for job, versions in whole.items() if versions}


@given(slot_views(), wholes, st.integers(0, 4))
def test_only_past_incarnations_leave_something_behind(slots, whole, epoch):
    for slot in abandoned_slots(slots, request(whole, epoch=epoch)):
        assert slot.job == "job"
        assert slot.version_id.epoch < epoch
        assert slot.version_id not in whole.get("job", ())


@given(
    st.dictionaries(groups, st.sets(st.integers(0, 3)), max_size=5),
    st.dictionaries(groups, st.sets(st.integers(0, 3)), max_size=5),
    st.integers(1, 4),
)
@example({}, {group(1): set()}, 4)
def test_committed_means_all_parts_or_a_mark_without_later_loss(here, marked, count):
    parts = dict.fromkeys(here, count)
    found = committed_versions(here, parts, marked)
    for one in here.keys() | marked.keys():
        complete = len(here.get(one, ())) >= count
        vouched = one in marked and marked[one] <= set(here.get(one, ()))
        assert (one in found) == (complete or vouched)


def sealed(name, version, *, part=0, epoch=1, job="job", size=10, busy=False):
    return SlotView(name, SlotUse.SEALED, size, job, part, group(version, epoch), busy)


def free(name, *, part=0, job="job", size=10):
    return SlotView(name, SlotUse.FREE, size, job, part)


ROOMY = SlotLimits(1000, 2, 1)
WHOLE = {"job": {group(1), group(2)}}


@given(st.integers(0, 1 << 50))
def test_size_class_is_at_most_a_sixty_fourth_larger(size):
    assert size <= size_class(size) <= size + size // 64 + 1
    assert size_class(size_class(size)) == size_class(size)


@pytest.mark.parametrize(
    ("slots", "whole", "expected"),
    [
        ([], {}, CreateSlot()),
        ([free("a", size=11), free("b", size=30)], {}, ReuseSlot("a")),
        ([sealed("a", 1)], {"job": {group(1)}}, CreateSlot()),
        ([sealed("a", 1), sealed("b", 2)], {"job": {group(1), group(2)}}, ReuseSlot("a")),
        ([sealed("b", 2), sealed("a", 1)], {"job": {group(1), group(2)}}, ReuseSlot("a")),
        # the older one is held by an upload: an extra slot
        ([sealed("a", 1, busy=True), sealed("b", 2)], {"job": {group(2)}}, CreateSlot()),
        # another writer's free slot is not taken while this one may have its own
        ([free("a", part=8)], {}, CreateSlot()),
        # too small, too large, or perhaps still read: a new file replaces it
        ([free("a", size=9)], {}, CreateSlot(("a",))),
        ([free("a", size=13)], {}, CreateSlot(("a",))),
        ([dataclasses.replace(sealed("a", 1), reusable=False), sealed("b", 2)], WHOLE, CreateSlot(("a",))),
        # a rolled back incarnation writes lower numbers, and is still the newer one
        ([sealed("a", 9, epoch=1), sealed("b", 3, epoch=2)], {"job": {group(9, 1), group(3, 2)}}, ReuseSlot("a")),
    ],
)
def test_the_order_of_preference(slots, whole, expected):
    assert choose_slot(slots, request(whole, epoch=3)) == expected


def test_several_old_versions_are_evicted_when_needed():
    slots = [sealed("a", 1, job="old", size=30), sealed("b", 2, job="old", size=30), sealed("c", 3, job="old", size=30)]
    whole = {"old": {group(3)}}
    decision = choose_slot(slots, request(whole, epoch=1, size_bytes=60, limits=SlotLimits(100, 2, 1)))
    assert decision == CreateSlot(("a", "b"))


def test_unfinished_versions_of_the_running_incarnation_stay():
    slots = [sealed("a", 1, epoch=2), sealed("b", 2, epoch=2), sealed("c", 3, epoch=2)]
    assert isinstance(choose_slot(slots, request({}, epoch=2)), SlotsBusy)
    assert choose_slot(slots, request({}, epoch=3)) == ReuseSlot("a")


@pytest.mark.parametrize(
    ("slots", "whole", "said"),
    [
        ([SlotView("a", SlotUse.LEASED, 10, "job", 0)] * 3, {}, "being written"),
        ([sealed("a", 1, busy=True)] * 3, {"job": {group(2)}}, "being read or uploaded"),
        ([sealed("a", 1)] * 3, {}, "no version is complete yet"),
        ([sealed("a", 1)] * 3, {"job": {group(1)}}, "the newest complete one"),
        ([sealed("a", 2)] * 3, {"job": {group(1)}}, "not complete yet"),
        ([SlotView("a", SlotUse.SEALED, 10, "job", 0, None, True)] * 3, {}, "deleted, being read"),
        ([SlotView("a", SlotUse.LEASED, 995, "x", 0), free("b", size=0)], {}, "free, but the budget is used up"),
    ],
)
def test_refusal_names_its_cause(slots, whole, said):
    decision = choose_slot(slots, request(whole, epoch=1))
    assert isinstance(decision, SlotsBusy)
    assert said in decision.reason


@given(slot_views(), wholes, st.dictionaries(st.sampled_from(JOBS), groups), limits, st.integers(1, 4))
@example(
    [SlotView("s0", SlotUse.SEALED, 10, "job", 8, group(1))], {}, {"job": group(1)}, SlotLimits(15, 2, 0), 2
)  # this node has no report that the version is complete
def test_replicated_version_is_never_evicted(slots, whole, rollback_targets, limits, epoch):
    asked = request(whole, epoch=epoch, limits=limits, rollback_targets=rollback_targets)
    decision = choose_slot(slots, asked)
    if isinstance(decision, ReuseSlot | CreateSlot):
        assert not [slot for slot in given_up(decision, slots) if slot.version_id == rollback_targets.get(slot.job)]


# -- budgets ----------------------------------------------------------------------------------------------------------


def advised(refused):
    """Return the budget that a refusal suggests, or ``None``."""
    said = re.search(r"raise the budget to .* \(([0-9]+) bytes\)", refused.reason)
    if said:
        assert f"`tieredckpt agent restart --budget {said[1]}`" in refused.reason
    return int(said[1]) if said else None


class Node:
    """One job's writers on a node, which save versions: a lease, possible growth, and a seal."""

    def __init__(self, budget, sizes, grown, others=()):
        self.limits = SlotLimits(budget, 2, 1)
        self.sizes, self.grown = sizes, grown
        self.slots = list(others)
        self.whole = {other.job: {other.version_id} for other in others}
        self.made = 0

    def run(self, versions):
        """Return the first refusal, or ``None``."""
        for version in range(1, versions + 1):
            for part in range(len(self.sizes)):
                refused = self.save(version, part)
                if refused is not None:
                    return refused
            self.whole.setdefault("job", set()).add(group(version))
        return None

    def save(self, version, part):
        asked = request(self.whole, part=part, limits=self.limits, epoch=1, writers=len(self.sizes))

        def sized(size):
            return dataclasses.replace(asked, size_bytes=size)

        size, decision = self.either(self.sizes[part], lambda size: choose_slot(self.slots, sized(size)))
        if isinstance(decision, SlotsBusy | BudgetExceeded):
            return decision
        leased = self.take(decision, size, part)
        if self.grown[part] > leased.size_bytes:
            name = leased.name
            size, decision = self.either(
                self.grown[part], lambda size: evictions_to_grow(self.slots, sized(size), growing=name)
            )
            if isinstance(decision, SlotsBusy | BudgetExceeded):
                return decision
            larger = self.take(CreateSlot(decision.drop), size, part)
            self.slots = [slot for slot in self.slots if slot.name != name]
            leased = larger
        self.replace(leased, dataclasses.replace(leased, use=SlotUse.SEALED, version_id=group(version)))
        return None

    def either(self, size, decide):
        """Round up the size as the store does, or return the exact size."""
        for tried in (size_class(size), size):
            decision = decide(tried)
            if not isinstance(decision, SlotsBusy | BudgetExceeded):
                break
        return tried, decision

    def take(self, decision, size, part):
        self.slots = [slot for slot in self.slots if slot.name not in decision.drop]
        if isinstance(decision, ReuseSlot):
            old = next(slot for slot in self.slots if slot.name == decision.name)
            leased = dataclasses.replace(old, use=SlotUse.LEASED, job="job", part=part, version_id=None)
            self.replace(old, leased)
        else:
            self.made += 1
            leased = SlotView(f"new{self.made}", SlotUse.LEASED, size, "job", part)
            self.slots.append(leased)
        assert sum(slot.size_bytes for slot in self.slots) <= self.limits.budget_bytes
        return leased

    def replace(self, old, new):
        self.slots = [new if slot is old else slot for slot in self.slots]


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 9000)), min_size=1, max_size=4),
    st.lists(st.integers(1, 3000), max_size=2),
    st.integers(1, 20_000),
)
@example([(48_234_496, 0)], [], 40_000_000)
@example([(100, 250)], [], 120)
@example([(100, 0), (900, 0)], [50], 700)
@example([(129, 0), (129, 0)], [], 129)
@example([(1, 769), (3745, 4545)], [], 1)
@example([(1, 1072), (3326, 3547)], [1528], 1)
@example([(1, 1397), (4728, 5809)], [136, 413], 1)
def test_suggested_budget_is_sufficient(writers, others, budget):
    """The first refused save succeeds with the budget it names, and so do all later saves.

    Writers that differ may each name another budget once. If slots grow, each may name one for the grown size too. One
    of them may name a third, because a grown version stays while the next slot grows.
    """
    sizes, grown = [size for size, _ in writers], [more for _, more in writers]
    beside = [SlotView(f"o{n}", SlotUse.SEALED, size, f"o{n}", 0, group(1)) for n, size in enumerate(others)]
    alike, grows = len({*writers}) == 1, any(more > size for size, more in writers)
    for attempt in range(2 * len(writers) + 2 if grows else len(writers) + 1):
        refused = Node(budget, sizes, grown, beside).run(5)
        if refused is None:
            break
        number = advised(refused)
        assert number is not None, refused
        assert budget < number <= 4 * len(writers) * size_class(max(*sizes, *grown)) + sum(others)
        if alike and not grows:
            assert attempt == 0, "the first number was too small"
        budget = number
    assert refused is None


def test_blocked_writer_is_refused_with_a_sufficient_budget():
    """Two writers and room for three slots: the second writer finds none, however long it waits."""
    slots = [sealed("a", 1), sealed("b", 1, part=8), SlotView("c", SlotUse.LEASED, 10, "job", 0)]
    asked = request({"job": {group(1)}}, part=8, epoch=1, limits=SlotLimits(30, 2, 1), writers=2)
    decision = choose_slot(slots, asked)
    assert isinstance(decision, SlotsBusy)
    assert advised(decision) == 40
    assert choose_slot(slots, dataclasses.replace(asked, limits=SlotLimits(40, 2, 1))) == CreateSlot()


@given(slot_views(), wholes, limits, st.integers(1, 60), st.integers(0, 4), st.sampled_from(PARTS))
def test_own_slots_decide_as_all_slots_do(slots, whole, limits, size, version, part):
    asked = request(whole, part=part, size_bytes=size, limits=limits, version=version, epoch=3)
    seen = [slot for slot in slots if slot.use is SlotUse.FREE or (slot.job, slot.part) == ("job", part)]
    alone = choose_own_slot(seen, asked, allocated_bytes=sum(slot.size_bytes for slot in slots))
    assert alone is None or alone == choose_slot(slots, asked)
