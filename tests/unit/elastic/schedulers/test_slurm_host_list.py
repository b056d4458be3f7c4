"""Slurm's host lists: compressed names are expanded after their number is checked."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.errors import PolicyError
from elastic.schedulers.slurm import parse_host_list

LETTERS = st.text("abnxyz-._", min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,7],gpu-[01-04]x", ["n1", "n2", "n3", "n7", "gpu-01x", "gpu-02x", "gpu-03x", "gpu-04x"]),
        ("rack[1-2]n[01,10]", ["rack1n01", "rack1n10", "rack2n01", "rack2n10"]),
        ("[1-2]", ["1", "2"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("a,b[2],c", ["a", "b2", "c"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_a_list(text, names):
    assert parse_host_list(text) == tuple(names)


@pytest.mark.parametrize(
    "text",
    ["", ",", "n1,", ",n1", "n[", "n]", "n[1", "n[]", "n[1-]", "n[-1]", "n[1--2]", "n[1,]", "n[[1]]", "n[a-b]",
     "n1 n2", "n[1-2-3]", "n[\uff11]", "n[" + "9" * 19 + "]", "n[1],,n[2]"],
)  # fmt: skip
def test_invalid_host_list_is_refused(text):
    with pytest.raises(PolicyError, match="is no host list"):
        parse_host_list(text)


def test_a_range_that_counts_backwards_is_refused():
    with pytest.raises(PolicyError, match="3-1 counts backwards"):
        parse_host_list("n[3-1]")


@pytest.mark.parametrize(
    "text", ["n[0-999999999999999999]", "a[1-9999]b[1-9999]c[1-9999]", "a[1-5],b[1-6]", "a," * 10 + "a"]
)
def test_oversized_host_list_is_refused_before_expansion(text):
    with pytest.raises(PolicyError, match="a job has 10 nodes at the most"):
        parse_host_list(text, most=10)


@st.composite
def pieces(draw):
    """Draw a name with ranges: its compressed form and the names it means."""
    written, meant = "", [""]
    for _ in range(draw(st.integers(1, 3))):
        word = draw(LETTERS)
        ranges = draw(st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 4), st.integers(1, 5)), max_size=3))
        written += word
        meant = [name + word for name in meant]
        if ranges:
            written += "[" + ",".join(_written(*one) for one in ranges) + "]"
            numbers = [str(n).zfill(width) for first, more, width in ranges for n in range(first, first + more + 1)]
            meant = [name + number for name, number in itertools.product(meant, numbers)]
    return written, meant


def _written(first, more, width):
    low = str(first).zfill(width)
    return low if not more else f"{low}-{first + more:0{len(low)}d}"


@given(st.lists(pieces(), min_size=1, max_size=3))
def test_compressed_host_list_is_expanded(items):
    text = ",".join(written for written, _ in items)
    names = [name for _, meant in items for name in meant]
    assert parse_host_list(text, most=len(names)) == tuple(names)
    with pytest.raises(PolicyError, match="at the most"):
        parse_host_list(text, most=len(names) - 1)


@given(st.text("n019[],- x", max_size=30))
def test_any_text_is_a_list_or_is_refused(text):
    try:
        names = parse_host_list(text, most=1000)
    except PolicyError:
        return
    assert 1 <= len(names) <= 1000
    assert all(names)
