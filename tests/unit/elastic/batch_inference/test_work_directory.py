"""Leases expire by observation, and the first output of a chunk stays."""

import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.batch_inference.chunk_plan import plan_chunks
from elastic.batch_inference.work_directory import (
    ClaimRecord,
    LeaseObserver,
    LeaseOwner,
    WorkDirectory,
    chunk_footer,
    complete_lines,
)
from elastic.errors import ChunkDamagedError, PolicyError


@pytest.fixture
def work(tmp_path):
    (tmp_path / "input").write_bytes(b"1\n2\n3\n")
    directory = WorkDirectory(tmp_path / "work")
    directory.begin(plan_chunks(tmp_path / "input", "m:f", {}, 2))
    return directory


@pytest.fixture
def owner():
    return LeaseOwner.this_process()


def finish(work, lease, *lines):
    body = b"".join(line + b"\n" for line in lines)
    with work.part_file(lease).open("xb+", buffering=0) as part:
        part.write(body + chunk_footer(body))
        return work.finish_chunk(lease, part.fileno())


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans()), min_size=1))
def test_lease_expires_only_after_the_same_contents_for_its_duration(steps):
    observer, now, counter, unchanged_s = LeaseObserver(8.0), 0.0, 0, None
    for seconds, is_renewed in steps:
        now += seconds
        counter += is_renewed
        unchanged_s = 0.0 if is_renewed or unchanged_s is None else unchanged_s + seconds
        expected = unchanged_s >= 8.0
        if abs(unchanged_s - 8.0) > 1e-6:
            assert observer.has_expired(0, 0, b"%d" % counter, now) == expected
        else:
            observer.has_expired(0, 0, b"%d" % counter, now)


def test_lease_of_another_number_starts_a_new_observation():
    observer = LeaseObserver(1.0)
    assert not observer.has_expired(3, 0, b"x", 0.0)
    assert observer.has_expired(3, 0, b"x", 1.0)
    assert not observer.has_expired(3, 1, b"x", 1.0)


def test_exactly_one_process_gets_a_lease(work, owner):
    lease = work.claim(0, 0, owner)
    assert work.claim(0, 0, owner) is None
    assert work.claims() == {0: 0}
    assert not lease.was_taken()
    assert work.claim(0, 1, owner) is not None
    assert lease.was_taken()


def test_renewal_changes_the_contents(work, owner):
    lease = work.claim(0, 0, owner)
    first = work.read_claim(0, 0)
    lease.renew()
    second = work.read_claim(0, 0)
    assert first.raw != second.raw
    lease.begin_input(1)
    lease.end()
    lease.renew()  # after the end: nothing changes
    last = work.read_claim(0, 0)
    assert (last.owner, last.current, last.is_held) == (owner, 1, False)


@pytest.mark.parametrize("raw", [b"", b"{", b"{}\n1 2 held", b'{"machine": 1}\n\n'])
def test_unreadable_claim_is_held_by_an_unknown_owner(raw):
    assert ClaimRecord.parse(raw) == ClaimRecord(None, -1, True, raw)


def test_exited_owner_is_detected_on_its_machine(owner):
    program = (
        "import msgspec, sys; from elastic.batch_inference.work_directory import LeaseOwner;"
        "sys.stdout.buffer.write(msgspec.json.encode(LeaseOwner.this_process()))"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    exited = msgspec.json.decode(out, type=LeaseOwner)
    assert exited.has_exited()
    assert not owner.has_exited()
    assert not msgspec.structs.replace(exited, machine="another").has_exited()
    assert msgspec.structs.replace(owner, started="0").has_exited()  # the process id was reused


def test_second_output_of_a_chunk_is_dropped(work, owner):
    late, taken = work.claim(0, 0, owner), work.claim(0, 1, owner)
    assert finish(work, taken, b'0"first"', b"0[]")
    assert not finish(work, late, b'0"late"', b"0[]")
    assert work.read_done(0, work.plan().chunks[0]) == ([b'"first"', b"[]"], 0)
    assert list((work.path / "parts").iterdir()) == []


def test_late_output_after_the_end_of_the_job_is_dropped(work, owner):
    late = work.claim(0, 0, owner)
    body = b"01\n02\n"
    with work.part_file(late).open("xb+", buffering=0) as part:
        part.write(body + chunk_footer(body))
        work.finish({"inputs": 3, "failed": 0, "chunks": 2})
        assert not work.finish_chunk(late, part.fileno())
    assert sorted(path.name for path in work.path.iterdir()) == ["plan.json", "result.json"]
    assert work.done() == set()
    assert work.claims() == {}
    assert work.claim(1, 0, owner) is None
    assert work.result() == {"inputs": 3, "failed": 0, "chunks": 2}


def test_finished_chunk_is_not_claimed(work, owner):
    assert finish(work, work.claim(1, 0, owner), b"11")
    assert work.done() == {1}
    assert work.claim(1, 1, owner) is None
    assert not work.read_claim(1, 1).is_held


def test_failed_lines_are_counted(work, owner):
    finish(work, work.claim(0, 0, owner), b'0{"error": 1}', b'1{"error": {}}')
    assert work.read_done(0, work.plan().chunks[0]) == ([b'{"error": 1}', b'{"error": {}}'], 1)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-20], lambda data: data[2:], lambda data: b"", lambda data: b"#"]
)
def test_damaged_chunk_is_an_error(work, owner, damage):
    finish(work, work.claim(0, 0, owner), b'0"#"', b"0[]")
    file = work.path / "done" / "00000000"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ChunkDamagedError, match="computed again"):
        work.read_done(0, work.plan().chunks[0])


@pytest.mark.parametrize("name", ["plan.json", "result.json"])
def test_damaged_job_file_is_an_error(work, name):
    (work.path / name).write_bytes(b"{")
    with pytest.raises(ChunkDamagedError, match="is damaged"):
        work.plan() if name == "plan.json" else work.result()


def test_successor_salvages_complete_lines_and_counts_losses(work, owner):
    for number, (part, current) in enumerate([(b"01\n02", 1), (b"01\n0{", 1), (b"", 0)]):
        lease = work.claim(0, number, owner)
        lease.begin_input(current)
        work.part_file(lease).write_bytes(part)
    successor = work.claim(0, 3, owner)
    lines, losses = work.salvage(successor, 2)
    assert lines == [b"01"]
    assert losses == {1: 2, 0: 1}


def test_ended_lease_is_not_a_loss(work, owner):
    lease = work.claim(0, 0, owner)
    lease.begin_input(0)
    lease.end()
    assert work.salvage(work.claim(0, 1, owner), 2).losses == {}


def test_complete_lines_end_at_damage():
    assert complete_lines(b'0{"a": 1}\n1[]\n\0\0\0\n0[]\n') == [b'0{"a": 1}', b"1[]"]
    assert complete_lines(b"01\n0{\n02\n") == [b"01"]
    assert complete_lines(b"01\n#12ab\n") == [b"01"]


def test_another_job_in_the_directory_is_an_error(work, tmp_path):
    with pytest.raises(PolicyError, match="the function was 'm:f' and is 'm:g'"):
        work.begin(plan_chunks(tmp_path / "input", "m:g", {}, 2))
    work.begin(plan_chunks(tmp_path / "input", "m:f", {}, 2))
