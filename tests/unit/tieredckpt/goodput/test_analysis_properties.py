"""Analyses of any event log: all time is attributed, and the order of events is irrelevant."""

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.event_logs import START
from tieredckpt.event_log import event_types as ev
from tieredckpt.event_log.log_reader import parse_event_files
from tieredckpt.goodput import Analysis, TimeCategory, analyse
from tieredckpt.goodput.analysis import TimeClaim, TimeLabel, resolve_claims

moments = st.integers(0, 40).map(lambda n: START + n / 4)
times = st.integers(0, 12).map(lambda n: n / 4)
epochs = st.integers(0, 4)
ranks = st.integers(0, 3)
whos = st.sampled_from(["coordinator", "rank"])
maybe = st.none() | st.integers(0, 5)

events = st.one_of(
    st.builds(ev.ProcessBegan, moments, st.just("job"), whos, again=st.booleans()),
    st.builds(ev.ProcessEnded, moments, st.just("job"), whos, st.sampled_from(["finished", "stopped", "job failed"])),
    st.builds(ev.WorldFormed, moments, epochs, st.integers(1, 4), how=st.sampled_from(["start", "restart", "grow"])),
    st.builds(ev.FaultEvent, moments, epochs, node=st.sampled_from(["", "n0"]), since=st.none() | moments),
    st.builds(ev.FaultInjected, moments, st.just("kill"), epoch=st.integers(-1, 4)),
    st.builds(ev.StopRequested, moments, epochs, st.sampled_from(["resize", "stop"])),
    st.builds(ev.StageEvent, epochs, ranks, st.sampled_from([*ev.STAGES, "of tomorrow"]), moments, times),
    st.builds(ev.StepEvent, epochs, ranks, st.integers(0, 20), moments, times, tokens=maybe),
    st.builds(ev.SaveEvent, ranks, st.integers(0, 20), st.just("staged"), moments, times, epochs),
    st.builds(ev.RestoreEvent, ranks, st.integers(-1, 20), st.just("snapshot"), moments, times, epoch=epochs),
)
ledgers = st.lists(events, min_size=1, max_size=40)


@given(ledgers)
def test_intervals_cover_the_entire_run(told):
    found = analyse(told)
    assert found.timeline == () or (found.timeline[0].start_us, found.timeline[-1].end_us) == (
        found.start_us,
        found.end_us,
    )
    assert all(before.end_us == after.start_us for before, after in pairwise(found.timeline))
    assert all(one.duration_us > 0 for one in found.timeline)
    assert sum(found.wall.by.values()) == found.wall.total == found.end_us - found.start_us
    assert sum(found.capacity.by.values()) == found.capacity.total == found.wall.total * found.ranks
    assert 0 <= found.goodput <= found.ettr <= 1
    assert found.steps == found.steps_counted + found.steps_lost == len(found.step_views)


@given(ledgers)
def test_each_step_number_counts_at_most_once(told):
    found = analyse(told)
    counted = [one.step for one in found.step_views if one.counts]
    assert counted == sorted(set(counted))


@given(ledgers, st.randoms(use_true_random=False))
def test_the_order_of_events_does_not_matter(told, chance):
    shuffled = list(told)
    chance.shuffle(shuffled)
    assert analyse(shuffled) == analyse(told)


@given(ledgers, st.integers(1, 4), st.randoms(use_true_random=False))
def test_file_split_and_truncated_lines_do_not_matter(told, number, chance: random.Random):
    lines = [msgspec.json.encode(event) + b"\n" for event in told]
    chance.shuffle(lines)
    torn = msgspec.json.encode(told[0])[:-3]
    files = {f"f{n}.jsonl": b"".join(lines[n::number]) + torn for n in range(number)}
    assert analyse(parse_event_files(files).events) == analyse(told)


@given(ledgers)
def test_recovery_time_is_the_sum_of_its_stages(told):
    for one in analyse(told).recoveries:
        assert sum(one.stages.values()) == pytest.approx(one.seconds) or one.seconds == 0
        assert one.start_us <= one.end_us


@given(ledgers)
@settings(max_examples=30)
def test_an_analysis_can_be_sent(told):
    found = analyse(told)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Analysis) == found


labels = st.builds(TimeLabel, st.sampled_from(TimeCategory), st.sampled_from(["", "a"]))
claims = st.lists(
    st.builds(TimeClaim, st.integers(-5, 25), st.integers(-5, 25), st.integers(0, 3), labels), max_size=12
)


@given(claims)
def test_strongest_valid_claim_colors_the_interval(wanted):
    rest = TimeLabel(TimeCategory.UNKNOWN, "rest")
    painted = resolve_claims(wanted, 0, 20, rest)
    for moment in range(20):
        holding = sorted(
            (one.weight, max(one.start, 0), min(one.end, 20), one.label)
            for one in wanted
            if one.start <= moment < one.end
        )
        (found,) = [one.label for one in painted if one.start <= moment < one.end]
        assert found == (holding[0][3] if holding else rest)
    assert all(before.label != after.label for before, after in pairwise(painted))
