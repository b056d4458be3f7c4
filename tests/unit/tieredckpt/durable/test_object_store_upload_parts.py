from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.durable.object_store import (
    MAX_UPLOAD_PART_BYTES,
    MAX_UPLOAD_PARTS,
    MIN_UPLOAD_PART_BYTES,
    UploadedPart,
    UploadPart,
    part_size_for,
    reusable_parts,
    split_upload,
)
from tieredckpt.errors import UsageError

sizes = st.integers(0, MAX_UPLOAD_PARTS * MAX_UPLOAD_PART_BYTES)


@given(size=sizes, wanted=st.integers(1, 10 * MAX_UPLOAD_PART_BYTES))
def test_part_size_is_within_the_s3_limits(size: int, wanted: int):
    part = part_size_for(size, wanted)
    assert MIN_UPLOAD_PART_BYTES <= part <= MAX_UPLOAD_PART_BYTES
    assert -(-size // part) <= MAX_UPLOAD_PARTS


@given(size=st.integers(0, 100 << 30), wanted=st.integers(MIN_UPLOAD_PART_BYTES, MAX_UPLOAD_PART_BYTES))
def test_part_size_is_the_configured_one_where_possible(size: int, wanted: int):
    if -(-size // wanted) <= MAX_UPLOAD_PARTS:
        assert part_size_for(size, wanted) <= max(wanted, -(-size // MAX_UPLOAD_PARTS) + (1 << 20))
    if wanted * MAX_UPLOAD_PARTS >= size + (MAX_UPLOAD_PARTS << 20):
        assert part_size_for(size, wanted) == wanted


def test_more_than_an_object_can_hold_is_refused():
    with pytest.raises(UsageError, match="more ranks"):
        part_size_for(MAX_UPLOAD_PARTS * MAX_UPLOAD_PART_BYTES + 1, MIN_UPLOAD_PART_BYTES)


@given(size=st.integers(0, 10_000), part=st.integers(1, 3_000))
def test_parts_cover_every_byte_once(size: int, part: int):
    parts = split_upload(size, part)
    assert [each.number for each in parts] == list(range(1, len(parts) + 1))
    assert [byte for each in parts for byte in range(each.start, each.stop)] == list(range(size))
    assert all(each.size_bytes == part for each in parts[:-1])


PARTS = split_upload(25, 10)


def checksum(part: UploadPart) -> str:
    return f"sum-{part.number}"


@pytest.mark.parametrize(
    ("stored", "same_source", "kept"),
    [
        ([], True, []),
        ([UploadedPart(1, 10, "e")], True, [1]),
        ([UploadedPart(1, 10, "e")], False, []),
        ([UploadedPart(1, 9, "e")], True, []),
        ([UploadedPart(1, 10, "")], True, []),
        ([UploadedPart(3, 5, "e")], True, [3]),
        ([UploadedPart(4, 10, "e")], True, []),
        ([UploadedPart(2, 10, "e", "sum-2")], False, [2]),
        ([UploadedPart(2, 10, "e", "other")], True, []),
        ([UploadedPart(1, 10, "e", "sum-1"), UploadedPart(2, 10, "e"), UploadedPart(3, 5, "e", "sum-1")], True, [1, 2]),
    ],
)
def test_which_parts_are_used_again(stored: list[UploadedPart], same_source: bool, kept: list[int]):
    assert sorted(reusable_parts(PARTS, stored, same_source=same_source, checksum=checksum)) == kept
