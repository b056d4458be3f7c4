from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.durable.parts import (
    MAX_PART_BYTES,
    MAX_PARTS,
    MIN_PART_BYTES,
    Part,
    StoredPart,
    cut,
    part_size_for,
    reusable,
)
from tieredckpt.errors import UsageError

sizes = st.integers(0, MAX_PARTS * MAX_PART_BYTES)


@given(size=sizes, wanted=st.integers(1, 10 * MAX_PART_BYTES))
def test_part_size_is_what_s3_allows(size: int, wanted: int):
    part = part_size_for(size, wanted)
    assert MIN_PART_BYTES <= part <= MAX_PART_BYTES
    assert -(-size // part) <= MAX_PARTS


@given(size=st.integers(0, 100 << 30), wanted=st.integers(MIN_PART_BYTES, MAX_PART_BYTES))
def test_part_size_is_as_wanted_where_it_can_be(size: int, wanted: int):
    if -(-size // wanted) <= MAX_PARTS:
        assert part_size_for(size, wanted) <= max(wanted, -(-size // MAX_PARTS) + (1 << 20))
    if wanted * MAX_PARTS >= size + (MAX_PARTS << 20):
        assert part_size_for(size, wanted) == wanted


def test_more_than_an_object_can_hold_is_refused():
    with pytest.raises(UsageError, match="more ranks"):
        part_size_for(MAX_PARTS * MAX_PART_BYTES + 1, MIN_PART_BYTES)


@given(size=st.integers(0, 10_000), part=st.integers(1, 3_000))
def test_parts_cover_every_byte_once(size: int, part: int):
    parts = cut(size, part)
    assert [each.number for each in parts] == list(range(1, len(parts) + 1))
    assert [byte for each in parts for byte in range(each.start, each.stop)] == list(range(size))
    assert all(each.size_bytes == part for each in parts[:-1])


PARTS = cut(25, 10)


def checksum(part: Part) -> str:
    return f"sum-{part.number}"


@pytest.mark.parametrize(
    ("stored", "same_source", "kept"),
    [
        ([], True, []),
        ([StoredPart(1, 10, "e")], True, [1]),
        ([StoredPart(1, 10, "e")], False, []),
        ([StoredPart(1, 9, "e")], True, []),
        ([StoredPart(1, 10, "")], True, []),
        ([StoredPart(3, 5, "e")], True, [3]),
        ([StoredPart(4, 10, "e")], True, []),
        ([StoredPart(2, 10, "e", "sum-2")], False, [2]),
        ([StoredPart(2, 10, "e", "other")], True, []),
        ([StoredPart(1, 10, "e", "sum-1"), StoredPart(2, 10, "e"), StoredPart(3, 5, "e", "sum-1")], True, [1, 2]),
    ],
)
def test_which_parts_are_used_again(stored: list[StoredPart], same_source: bool, kept: list[int]):
    assert sorted(reusable(PARTS, stored, same_source=same_source, checksum=checksum)) == kept
