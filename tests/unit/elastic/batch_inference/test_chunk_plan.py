"""Chunks cover every input once, in order, at any chunk size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.batch_inference.chunk_plan import ChunkPlan, changed_part, cut_chunks, plan_chunks, read_chunk
from elastic.errors import JobFailedError, PolicyError

# All ways in which a line may look: blank, of spaces, with carriage returns, with separators that are not b"\n".
LINES = st.lists(st.sampled_from([b"", b"  ", b"\r", b'{"a": 1}', b"[2]\r", b"3\x0b4", b"5\x1c6", "\u2028é".encode()]))


@given(lines=LINES, chunk_size=st.integers(1, 5), ends=st.booleans())
def test_chunks_contain_each_input_once_in_order(tmp_path_factory, lines, chunk_size, ends):
    path = tmp_path_factory.mktemp("input") / "input.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n" * ends)
    plan = plan_chunks(path, "m:f", {}, chunk_size)
    found = [line for chunk in plan.chunks for line in read_chunk(path, chunk)]
    expected = [(number, text) for number, text in enumerate(path.read_bytes().split(b"\n"), 1) if text.strip()]
    assert found == expected
    assert plan.inputs == len(expected)
    assert [chunk.inputs for chunk in plan.chunks[:-1]] == [chunk_size] * (len(plan.chunks) - 1)
    assert all(1 <= chunk.inputs <= chunk_size for chunk in plan.chunks)


@given(lines=LINES, chunk_size=st.integers(1, 5))
def test_chunks_are_consecutive_byte_ranges(lines, chunk_size):
    with_ends = [line + b"\n" for line in lines]
    chunks = list(cut_chunks(with_ends, chunk_size))
    assert [chunk.start for chunk in chunks] == [0, *(chunk.stop for chunk in chunks)][: len(chunks)]
    if chunks:
        assert chunks[-1].stop == sum(map(len, with_ends))


def test_changed_input_is_an_error(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_bytes(b"1\n2\n3\n")
    plan = plan_chunks(path, "m:f", {}, 2)
    path.write_bytes(b"1\n2\n4\n")
    assert [line.text for line in read_chunk(path, plan.chunks[0])] == [b"1", b"2"]
    with pytest.raises(JobFailedError, match="bytes 4 to 6 differ"):
        read_chunk(path, plan.chunks[1])


def test_missing_input_is_an_error(tmp_path):
    with pytest.raises(PolicyError, match="No such file"):
        plan_chunks(tmp_path / "absent", "m:f", {}, 1)


def test_changed_part_names_the_first_difference(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_bytes(b"1\n")
    plan = plan_chunks(path, "m:f", {"a": 1}, 2)
    assert changed_part(plan, plan_chunks(path, "m:f", {"a": 1}, 2)) == ""
    assert "function" in changed_part(plan, ChunkPlan("m:g", {"a": 1}, 2, plan.chunks))
    assert "options" in changed_part(plan, ChunkPlan("m:f", {}, 2, plan.chunks))
    assert "chunk size" in changed_part(plan, ChunkPlan("m:f", {"a": 1}, 3, plan.chunks))
    assert "other bytes" in changed_part(plan, ChunkPlan("m:f", {"a": 1}, 2, []))
