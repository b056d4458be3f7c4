"""The records of a preempted run and the picture drawn from them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from benchmarks.preempted.picture import Curve, Kind, Mark, Panel, picture, ticks
from benchmarks.preempted.story import by_size, gaps_of, repeated, steps_of, worlds_of

BEGAN = 1000.0


def world(epoch, ranks, at, *, first, of=None):
    more = {"first": first, "reason": f"reason {epoch}", "tiers": {"memory": 3}}
    return [
        {"what": "world", "at": BEGAN + at + rank, "epoch": epoch, "rank": rank, "size": of or ranks, **more}
        for rank in range(ranks)
    ]


def step(number, epoch, ranks, at, *, of=None, loss=1.0):
    more = {"step": number, "tokens": 8, "loss": loss.hex()}
    return [
        {"what": "step", "at": BEGAN + at, "epoch": epoch, "rank": rank, "size": of or ranks, **more}
        for rank in range(ranks)
    ]


def test_last_run_of_a_repeated_step_counts_and_incomplete_steps_do_not():
    lines = [
        *world(0, 2, 0.0, first=0),
        *step(0, 0, 2, 1.0),
        *step(1, 0, 2, 2.0),
        *step(2, 0, 1, 3.0, of=2),  # the other rank was killed
        *world(1, 1, 6.0, first=1, of=2),  # this was never a complete world either
        *world(2, 1, 7.0, first=1),
        *step(1, 2, 1, 9.0, loss=2.0),
        *step(2, 2, 1, 10.0),
    ]
    steps, worlds = steps_of(lines, BEGAN), worlds_of(lines, BEGAN)
    assert [(one.step, one.epoch, one.size, one.at_s, float.fromhex(one.loss)) for one in steps] == [
        (0, 0, 2, 1.0, 1.0),
        (1, 2, 1, 9.0, 2.0),
        (2, 2, 1, 10.0, 1.0),
    ]
    assert [(one.epoch, one.size, one.at_s, one.first, one.tiers) for one in worlds] == [
        (0, 2, 1.0, 0, {"memory": 6}),
        (2, 1, 7.0, 1, {"memory": 3}),
    ]
    assert repeated(lines) == [1, 2]
    longest, other = gaps_of(steps, worlds)
    assert (longest.seconds, longest.after, longest.of, other.of) == (8.0, 0, "reason 2", "")
    assert by_size(steps) == {1: {"steps": 1, "tokens_per_s": 8.0}}


def test_ranks_that_learnt_something_else_are_seen():
    with pytest.raises(ValueError, match="do not agree on the loss of step 3"):
        steps_of([*step(3, 0, 1, 1.0, of=2), *step(3, 0, 2, 1.0, loss=1.5)[1:]], BEGAN)


@pytest.mark.parametrize(
    ("top", "whole", "expected"),
    [
        (4.6, True, [0, 1, 2, 3, 4]),
        (1.5, True, [0, 1]),
        (1.0, False, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (11000.0, False, [0, 2000, 4000, 6000, 8000, 10000]),
    ],
)
def test_numbers_on_an_axis(top, whole, expected):
    assert ticks(top, whole=whole) == pytest.approx(expected)


def test_picture_is_complete_and_stays_inside_its_area():
    curves = (Curve("a < b", "#123456", [(0, 0), (50, 7), (100, 9)]), Curve("c", "#654321", [(0, 1)], dashed=True))
    panels = (Panel("one & two", curves), Panel("three", curves, top=4.0, whole=True))
    drawn = picture("title", panels, [Mark(50.0, "k", "n1 <k>")], [Kind("k", "#abcdef", "M0 0H1")], 100.0)
    root = ET.fromstring(drawn)
    said = ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]
    for text in ("title", "one & two", "three", "a < b", "c", "k", "100", "time since the first world began (s)"):
        assert text in said
    assert "50.0 s: n1 <k>" in "".join(root.itertext())
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        for x, y in re.findall(r"([-0-9.]+),([-0-9.]+)", line.attrib["points"]):
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height
