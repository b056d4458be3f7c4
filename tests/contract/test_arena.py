"""Contract of every arena. Cases of files on tmpfs are at the end."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from peerstore.errors import ArenaFullError, ShardDamagedError
from peerstore.sizes_and_durations import show_size
from peerstore.store.arena import Arena, FileMapping, MemfdArena, TmpfsArena, closing_fd
from tests.support.stores import flip_byte, store_directory


@pytest.fixture
def directory():
    with store_directory() as place:
        yield place


@pytest.fixture(params=["tmpfs", "memfd"])
def arena(request, directory):
    one: Arena = TmpfsArena(directory) if request.param == "tmpfs" else MemfdArena()
    yield one
    one.purge()


def write_at(path, data, start=0):
    with Path(path).open("r+b") as file:
        file.seek(start)
        file.write(data)


def read_file(path):
    return Path(path).read_bytes()


# -- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 1 << 20, 1 << 33])
def test_slot_has_exactly_the_requested_size(arena, size):
    arena.create("slot.a", size)
    assert arena.size("slot.a") == size
    assert arena.list_slots() == ["slot.a"]
    arena.remove("slot.a")
    arena.remove("slot.a")
    assert arena.list_slots() == []


def test_a_slot_is_opened_for_reading_or_for_writing_too(arena):
    arena.create("slot.a", 8192)
    with (
        closing_fd(arena.open("slot.a", writable=True)) as fd,
        FileMapping(fd, 8192, writable=True) as mapping,
        mapping.view as view,
    ):
        view[:5] = b"hello"
    with closing_fd(arena.open("slot.a")) as fd:
        assert os.pread(fd, 5, 0) == b"hello"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(fd, b"other", 0)
    assert read_file(arena.path("slot.a"))[:5] == b"hello"


def test_open_slot_stays_readable_after_removal(arena):
    arena.create("slot.a", 8192)
    write_at(arena.path("slot.a"), b"kept")
    with closing_fd(arena.open("slot.a")) as fd:
        arena.remove("slot.a")
        arena.create("slot.b", 8192)
        write_at(arena.path("slot.b"), b"next")
        assert os.pread(fd, 4, 0) == b"kept"
        assert os.fstat(fd).st_size == 8192
    assert arena.removed_in_use() == {}


def test_impossible_size_creates_no_slot(arena):
    arena.create("slot.b", 10)
    for size in (1 << 63, 1 << 64):
        with pytest.raises(ArenaFullError, match=show_size(size)):
            arena.create("slot.a", size)
    assert arena.list_slots() == ["slot.b"]
    assert arena.size("slot.b") == 10


def test_name_of_an_existing_slot_is_refused(arena):
    arena.create("slot.a", 10)
    write_at(arena.path("slot.a"), b"kept")
    with pytest.raises(FileExistsError):
        arena.create("slot.a", 20)
    assert read_file(arena.path("slot.a"))[:4] == b"kept"


def test_missing_slot_raises(arena):
    with pytest.raises(FileNotFoundError):
        arena.size("slot.a")


# -- notes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000])
@pytest.mark.parametrize("name", ["job.job", "blob.job/layout.a@b", "n" * 251, "f" * 251 + "/" + "n" * 251])
def test_slot_metadata_round_trips(arena, name, data):
    assert arena.get_metadata(name) is None
    arena.put_metadata(name, b"older")
    arena.put_metadata(name, data)
    assert arena.get_metadata(name) == data
    arena.remove_metadata(name)
    arena.remove_metadata(name)
    assert arena.get_metadata(name) is None


def test_metadata_files_are_listed_by_prefix_and_folder(arena):
    for name in ("job.b", "job.a", "seal.a", "blob.a/x", "blob.a/xy", "blob.a/z", "blob.ab/x"):
        arena.put_metadata(name, b"")
    assert arena.list_metadata("job.") == ["job.a", "job.b"]
    assert arena.list_metadata("") == ["job.a", "job.b", "seal.a"]
    assert arena.list_metadata("blob.a/") == ["blob.a/x", "blob.a/xy", "blob.a/z"]
    assert arena.list_metadata("blob.a/x") == ["blob.a/x", "blob.a/xy"]
    assert arena.list_metadata("blob.c/") == []


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "../a", "/a", "a//b", "a/../b", "a/b/c", "a\0", "a/", "n" * 252])
def test_names_that_leave_the_folder_are_refused(arena, name):
    for attempt in (
        lambda: arena.create(name, 1),
        lambda: arena.put_metadata(name, b""),
        lambda: arena.get_metadata(name),
        lambda: arena.remove_metadata(name),
        lambda: arena.path(name),
        lambda: arena.remove(name),
    ):
        with pytest.raises(ValueError, match="is not a valid name"):
            attempt()


def test_concurrent_writers_of_a_metadata_file_leave_one_complete_version(arena):
    """Readers always see one complete version, and no other file remains."""
    notes = [bytes([number]) * (1 << 14) for number in range(4)]
    seen, errors = set(), []
    start = threading.Barrier(len(notes) + 1)

    def put(data):
        try:
            start.wait()
            for _ in range(100):
                arena.put_metadata("blob.job/shared", data)
                arena.put_metadata("shared", data)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=put, args=(data,)) for data in notes]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        seen.add(arena.get_metadata("shared"))
    for thread in threads:
        thread.join()
    assert errors == []
    assert {arena.get_metadata("shared"), arena.get_metadata("blob.job/shared")} <= set(notes)
    assert seen <= {*notes, None}


def test_folder_is_recreated_while_others_write_into_it(arena):
    errors = []

    def churn(number):
        try:
            for _ in range(200):
                arena.put_metadata(f"blob.job/{number}", b"x")
                arena.remove_metadata(f"blob.job/{number}")
            arena.put_metadata(f"blob.job/{number}", b"last")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=churn, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(arena.list_metadata("blob.job/")) == 4


def test_purging_leaves_nothing(arena):
    arena.create("slot.a", 10)
    arena.put_metadata("blob.job/a", b"x")
    arena.purge()
    assert arena.get_metadata("blob.job/a") is None
    with pytest.raises(FileNotFoundError):
        arena.size("slot.a")


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 4, 11, 12, 400])
def test_flipped_byte_in_a_metadata_file_is_damage(directory, at):
    arena = TmpfsArena(directory)
    arena.put_metadata("job.job", b"x" * 500)
    flip_byte(directory / "notes" / "job.job", at)
    with pytest.raises(ShardDamagedError, match=r"job\.job is damaged"):
        arena.get_metadata("job.job")


@pytest.mark.parametrize("size", [0, 3, 11, 12, 100])
def test_short_metadata_file_is_damage(directory, size):
    arena = TmpfsArena(directory)
    arena.put_metadata("job.job", b"x" * 500)
    os.truncate(directory / "notes" / "job.job", size)
    with pytest.raises(ShardDamagedError):
        arena.get_metadata("job.job")


def write_foreign_files(place):
    """Create all kinds of foreign entries in a directory."""
    (place / "a folder").mkdir()
    (place / "slot.folder").mkdir()
    (place / ".hidden").write_bytes(b"x")
    (place / "with space").write_bytes(b"x")
    (place / "slot.link").symlink_to("/etc/passwd")
    (place / "slot.broken").symlink_to("nowhere")
    os.mkfifo(place / "job.fifo")
    return sorted(path.name for path in place.iterdir())


def test_foreign_files_are_neither_listed_nor_changed(directory):
    arena = TmpfsArena(directory)
    left = write_foreign_files(directory / "slots"), write_foreign_files(directory / "notes")
    arena.create("slot.a", 10)
    arena.put_metadata("job.a", b"x")
    again = TmpfsArena(directory)
    assert (again.list_slots(), again.list_metadata("")) == (["slot.a"], ["job.a"])
    again.remove("slot.a")
    again.remove_metadata("job.a")
    found = [sorted(path.name for path in (directory / place).iterdir()) for place in ("slots", "notes")]
    assert found == list(left)


@pytest.mark.parametrize("name", ["slot.folder", "slot.link", "slot.broken", "job.fifo"])
def test_reading_a_non_file_is_damage_and_does_not_block(directory, name):
    arena = TmpfsArena(directory)
    write_foreign_files(directory / "notes")
    with pytest.raises(ShardDamagedError):
        arena.get_metadata(name)


def test_oversized_metadata_file_is_not_read(directory):
    arena = TmpfsArena(directory)
    with (directory / "notes" / "job.job").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ShardDamagedError, match="at most"):
        arena.get_metadata("job.job")


def test_partial_metadata_files_of_a_killed_process_are_removed(directory):
    TmpfsArena(directory)
    (directory / "fresh" / "0123").write_bytes(b"half")
    TmpfsArena(directory)
    assert list((directory / "fresh").iterdir()) == []


def test_pages_reserved_for_other_slots_count_as_used(directory):
    arena = TmpfsArena(directory)
    place = os.statvfs(directory)
    free = place.f_bavail * place.f_frsize
    arena.create("slot.a", free * 2 // 3)
    with pytest.raises(ArenaFullError, match=r"reserved for other slots\. Enlarge it"):
        arena.create("slot.b", free * 2 // 3)
    assert arena.list_slots() == ["slot.a"]
    assert arena.size("slot.a") == free * 2 // 3


def test_arena_is_private_to_its_user(directory):
    arena = TmpfsArena(directory)
    arena.create("slot.a", 10)
    arena.put_metadata("job.a", b"x")
    arena.put_metadata("blob.a/b", b"x")
    for path in [*directory.iterdir(), directory / "folders" / "blob.a"]:
        assert path.stat().st_mode & 0o077 == 0, path
    for path in (arena.path("slot.a"), directory / "notes" / "job.a", directory / "folders" / "blob.a" / "b"):
        assert Path(path).stat().st_mode & 0o777 == 0o600, path


def test_path_of_a_removed_slot_is_absent(arena):
    """A writer with an old path must not write into the slot created afterwards."""
    arena.create("old", 4096)
    path = arena.path("old")
    arena.remove("old")
    for number in range(8):
        arena.create(f"new{number}", 4096)
    with pytest.raises((OSError, ValueError)), closing_fd(os.open(path, os.O_RDWR)) as fd:
        FileMapping(fd, 4096, writable=True)
