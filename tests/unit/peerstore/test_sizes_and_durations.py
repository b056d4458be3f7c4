"""Sizes and durations as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerstore.errors import RequestError
from peerstore.settings import parse_budget
from peerstore.sizes_and_durations import parse_size, show_count, show_seconds, show_size

SIZES = [
    ("0", 0),
    ("123", 123),
    ("1k", 1 << 10),
    ("1KB", 1000),
    ("1KiB", 1 << 10),
    ("1Ki", 1 << 10),
    ("64MiB", 64 << 20),
    ("64mib", 64 << 20),
    ("1.5G", 3 << 29),
    ("0.5 TB", 5 * 10**11),
    (" 2 GB ", 2 * 10**9),
    ("9007199254740993", 9007199254740993),  # a float cannot hold it
]


@pytest.mark.parametrize(("text", "size"), SIZES)
def test_sizes(text, size):
    assert parse_size(text) == size
    if 0 < size < 1 << 53:
        assert parse_budget(text) == size  # the same words mean the same everywhere


def test_a_number_is_itself():
    assert parse_size(4096) == 4096


@pytest.mark.parametrize(
    "text",
    [
        "",
        "MiB",
        "-1",
        "+1",
        "1e9",
        "0x10",
        "1 2",
        "1EiB",
        "1MiBs",
        "\u0661",
        "1\u212a",
        "1,5G",
        "1.",
        ".5",
        "nan",
        "inf",
    ],
)
def test_invalid_sizes_are_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)
    with pytest.raises(RequestError, match="is not a size"):
        parse_budget(text)


@pytest.mark.parametrize("text", ["9" * 400, "9" * 5000, "8388608T"])
def test_sizes_no_machine_has(text):
    with pytest.raises(ValueError, match="more than any machine"):
        parse_size(text)
    with pytest.raises(RequestError, match="more than any machine"):
        parse_budget(text)
    with pytest.raises(ValueError):
        parse_size(-1)


@pytest.mark.parametrize(("share", "of"), [("50%", 500), ("100%", 1000), ("0.1%", 1)])
def test_a_budget_may_be_a_share(share, of):
    assert parse_budget(share, memory_bytes=1000) == of


@pytest.mark.parametrize("share", ["0%", "100.1%", "101%", "-5%", "%"])
def test_invalid_shares_are_refused(share):
    with pytest.raises(RequestError):
        parse_budget(share, memory_bytes=1000)


@given(
    st.text(max_size=10)
    | st.from_regex("\\A\\s*[0-9.]{1,4}\\s*[kKmMgGtT\u0130\u0131\u212a]?[iI\u0130\u0131]?[bB%]?\\s*\\Z")
)
def test_any_text_is_a_size_or_refused(text):
    try:
        size = parse_size(text)
    except ValueError:
        return
    assert 0 <= size < 1 << 63
    if size:  # a budget of nothing is refused
        assert abs(parse_budget(text) - size) <= size * 1e-12


@given(st.integers(0, 1 << 50))
def test_a_size_is_shown_in_its_order_of_magnitude(size):
    shown = show_size(size)
    number, unit = shown.split(" ")
    low = float(number)
    assert low < 1024.05 or unit == "PiB"
    assert abs(parse_size(shown.replace(" ", "")) - size) <= max(0.5, size * 0.06)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0.0 ms"),
        (0.0123, "12.3 ms"),
        (0.5, "500 ms"),
        (1.25, "1.25 s"),
        (59.999, "60.00 s"),
        (90, "1.5 min"),
        (86400, "24.0 h"),
    ],
)
def test_times(seconds, shown):
    assert show_seconds(seconds) == shown


@pytest.mark.parametrize(("number", "shown"), [(0, "0 steps are"), (1, "1 step is"), (2, "2 steps are")])
def test_counts(number, shown):
    assert show_count(number, "step is", "steps are") == shown


@pytest.mark.parametrize(("number", "shown"), [(1, "1 step"), (2, "2 steps"), (12345, "12,345 steps")])
def test_counts_of_regular_nouns(number, shown):
    assert show_count(number, "step") == shown
