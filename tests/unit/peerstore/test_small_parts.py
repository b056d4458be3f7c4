"""Frames, names, settings, owners and checksums: the parts that have no state."""

import contextlib
import os
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from peerstore import checksums, errors, message_codec
from peerstore.daemon_process import ProcessIdentity, current_process, process_identity, process_start_time
from peerstore.errors import AgentUnreachableError, InvalidNameError, ProtocolError, RequestError
from peerstore.message_codec import AgentHello, AgentRequest, AgentResponse
from peerstore.settings import AgentPaths, StoreSettings, default_agent_paths, parse_budget
from peerstore.shard_records import (
    Lease,
    PinResponse,
    ShardInfo,
    ShardKey,
    ShardRecord,
    VersionId,
    validate_blob_name,
    validate_incarnation,
    validate_job_name,
)
from tests.support.chunk_sums import chunk_checksums

# -- frames -----------------------------------------------------------------------------------------------------------

numbers = st.integers(0, (1 << 62) - 1)
names = st.text(max_size=20)
keys = st.builds(ShardKey, names, numbers, numbers, names, numbers, numbers)
records = st.builds(ShardRecord, keys, numbers, numbers, numbers, st.binary(), st.binary(), numbers)
messages = st.one_of(
    st.builds(AgentHello, numbers, names, names, names, names),
    keys,
    records,
    st.builds(Lease, names, keys, numbers, numbers, names, numbers, numbers, numbers),
    st.builds(PinResponse, names, records),
    st.builds(ShardInfo, keys, numbers, numbers, st.binary(), numbers, st.booleans()),
    st.builds(VersionId, numbers, numbers, numbers, names),
)


@contextlib.contextmanager
def pair():
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(10)
        there.settimeout(10)
        yield here, there


@given(messages)
def test_every_message_comes_back_as_it_went(message):
    with pair() as (here, there):
        message_codec.send_frame(here, message)
        assert message_codec.receive_frame(there, type(message)) == message


@given(names, messages)
def test_requests_and_responses_carry_any_message(word, message):
    with pair() as (here, there):
        for envelope in (AgentRequest, AgentResponse):
            message_codec.send_frame(here, envelope(word, message_codec.encode_raw_message(message)))
            got = message_codec.receive_frame(there, envelope)
            assert message_codec.decode_message(got.body, type(message)) == message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(data):
    for kind in (AgentHello, AgentRequest, AgentResponse, ShardKey, list[ShardInfo]):
        with contextlib.suppress(ProtocolError):
            message_codec.decode_message(data, kind)


def test_a_large_frame_crosses_in_pieces():
    with pair() as (here, there):
        data = os.urandom(5 << 20)
        sender = threading.Thread(target=message_codec.send_frame, args=(here, data))
        sender.start()
        assert message_codec.receive_frame(there, bytes) == data
        sender.join()


def test_a_message_above_the_limit_is_not_sent():
    with pair() as (here, there):
        with pytest.raises(ProtocolError, match="above the limit"):
            message_codec.send_frame(here, bytes(message_codec.MAX_FRAME_BYTES + 1))
        here.close()
        assert message_codec.receive_frame(there, bytes) is None


def test_the_end_between_frames_is_no_error_and_within_one_is():
    with pair() as (here, there):
        message_codec.send_frame(here, b"whole")
        here.sendall(b"\0\0\0\x09half")
        here.close()
        assert message_codec.receive_frame(there, bytes) == b"whole"
        with pytest.raises(AgentUnreachableError, match="ended after 4 of 9 bytes"):
            message_codec.receive_frame(there, bytes)


def test_a_frame_that_has_begun_must_end_in_time():
    with pair() as (here, there):
        here.sendall(b"\0\0\0\x09half")
        with pytest.raises(TimeoutError):
            message_codec.receive_frame(there, bytes, within_s=0.01)
        assert there.gettimeout() == 10, "the socket's own patience is as it was"


# -- names ------------------------------------------------------------------------------------------------------------


@given(st.text())
def test_a_name_that_is_let_in_is_a_file_name(text):
    for check in (validate_job_name, validate_incarnation, validate_blob_name):
        with contextlib.suppress(InvalidNameError):
            assert check(text) == text
            assert text.isascii()
            assert text
            assert not set(text) & set("/\0\n ")
            assert text not in (".", "..")
            assert len(text) <= 240


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "..a", "-", "x" * 128, "0"])
def test_job_names_that_are_fine(name):
    assert validate_job_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "...", "a/b", "a b", "ä", "x" * 129, "a\n", None, 7, b"a"])
def test_job_names_that_are_not(name):
    with pytest.raises(InvalidNameError, match="1 to 128 letters"):
        validate_job_name(name)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("30%", 300), ("100%", 1000), ("0.5%", 5), (" 64 GiB ", 64 << 30), ("1.5k", 1536), ("2GB", 2 * 10**9), ("7", 7)],
)
def test_budgets(text, expected):
    assert parse_budget(text, memory_bytes=1000) == expected


@pytest.mark.parametrize("text", ["", "much", "-1", "1e9", "0%", "100.1%", "5 %%", "1GiBs", "nan", "٣GiB"])
def test_budgets_that_are_none(text):
    with pytest.raises(RequestError, match="budget"):
        parse_budget(text, memory_bytes=1000)


def test_a_share_is_of_what_this_process_may_use():
    assert 0 < parse_budget("50%") <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget": "x"},
        {"budget": "0"},
        {"slots_per_part": 0},
        {"burst_slots": -1},
        {"lease_grace_s": float("inf")},
        {"job_ttl_s": float("nan")},
        {"job_ttl_s": -1.0},
    ],
)
def test_settings_that_contradict_themselves_name_the_key(wrong):
    (name,) = wrong
    with pytest.raises(RequestError, match=name):
        StoreSettings(**wrong)


def test_where_an_agent_lives(tmp_path):
    assert default_agent_paths({"PEERSTORE_DIR": str(tmp_path)}) == AgentPaths(tmp_path, explicit=True)
    assert str(default_agent_paths({}).directory).endswith(f"peerstore-{os.getuid()}")
    place = AgentPaths(tmp_path)
    assert {path.parent for path in (place.socket, place.lock, place.launch_lock, place.log)} == {tmp_path}


# -- owners -----------------------------------------------------------------------------------------------------------


def test_a_process_is_alive_until_it_ends_also_as_a_zombie():
    assert current_process().is_alive
    child = subprocess.Popen(["sleep", "60"])
    owner = process_identity(child.pid)
    assert owner.is_alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not owner.is_alive, "a zombie counts as alive"
    child.wait()
    assert not owner.is_alive
    assert process_start_time(child.pid) == -1


def test_a_number_given_to_a_later_process_is_another_owner():
    assert not ProcessIdentity(os.getpid(), current_process().start_time - 1).is_alive
    assert current_process() != ProcessIdentity(os.getpid(), 0)


def test_a_process_nobody_here_can_see_counts_as_alive():
    assert process_identity(0).is_alive


# -- checksums --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as one:
        yield one


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000, 12345])
def test_files_and_memory_hash_the_same(tmp_path, pool, size):
    data = os.urandom(size)
    path = tmp_path / "file"
    path.write_bytes(data + b"more")
    expected = b"".join(xxhash.xxh3_64_digest(data[i : i + 100])[::-1] for i in range(0, size, 100))
    assert checksums.mismatched_chunks(memoryview(data), expected, chunk_bytes=100) == ()
    with path.open("rb") as file:
        fd = file.fileno()
        assert checksums.file_checksums(fd, size, chunk_bytes=100, pool=pool) == expected
        count = checksums.chunk_count(size, 100)
        assert (
            checksums.file_mismatched_chunks(fd, size, expected, chunks=range(count), chunk_bytes=100, pool=pool) == ()
        )


def test_flipped_bytes_are_found_in_their_chunks(tmp_path, pool):
    data = bytearray(os.urandom(70 << 20))
    sums = chunk_checksums(memoryview(data))
    for at in (0, 33 << 20, (70 << 20) - 1):
        data[at] ^= 1
    path = tmp_path / "file"
    path.write_bytes(data)
    with path.open("rb") as file:
        fd = file.fileno()
        found = [
            checksums.file_mismatched_chunks(fd, len(data), sums, chunks=chunks, pool=pool)
            for chunks in (range(70), range(1, 69), range(34, 69), range(69, 70))
        ]
    assert found == [(0, 33, 69), (33,), (), (69,)]
    assert checksums.mismatched_chunks(memoryview(data), sums) == (0, 33, 69)


def test_a_file_that_is_too_short_is_an_error(tmp_path, pool):
    path = tmp_path / "file"
    path.write_bytes(bytes(150))
    with path.open("rb") as file, pytest.raises(OSError, match="ends at byte 150, 200 were expected"):
        checksums.file_checksums(file.fileno(), 200, chunk_bytes=100, pool=pool)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_errors_cross_the_wire_by_name():
    known = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(known) > 10
    for kind in known:
        assert type(errors.error_from_wire(kind.__name__, "why")) is kind
    strange = errors.error_from_wire("OSError", "why")
    assert (type(strange), str(strange)) == (errors.PeerStoreError, "OSError: why")
