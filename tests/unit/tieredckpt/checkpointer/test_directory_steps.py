"""Listing a directory, and which rank saves which file."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieredckpt.checkpointer.directory_steps import (
    FileIdentity,
    assign_files,
    directory_state,
    list_directory,
    restore_directory,
)
from tieredckpt.dcp.rank_group import RankGroup
from tieredckpt.errors import CheckpointDamagedError, MismatchError, SaveFailedError, UsageError

identities = st.builds(
    FileIdentity, st.sampled_from("abcdef"), st.integers(0, 100), st.integers(0, 1), st.integers(0, 1)
)


@pytest.fixture
def alone():
    return RankGroup(None)


def restored(alone, path, files, **options):
    """Restore ``files``, bytes by name, into ``path``."""

    def restore(state):
        from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

        tensors = {name: torch.tensor(list(data), dtype=torch.uint8) for name, data in files.items()}
        properties = TensorProperties(dtype=torch.uint8)
        state["directory"].before_restore(
            {name: TensorStorageMetadata(properties, value.size(), []) for name, value in tensors.items()}
        )
        state["directory"].load_state_dict(tensors)
        return 5

    return restore_directory(alone, path, restore, **{"overwrite": False, **options})


def tree(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in Path(path).rglob("*") if file.is_file()}


def test_listing_has_files_and_directories_with_a_slash(tmp_path):
    (tmp_path / "sub" / "empty").mkdir(parents=True)
    (tmp_path / "sub" / "a.bin").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "sub" / "a.bin")
    assert {file.name: file.size for file in list_directory(tmp_path)} == {
        "./": 0,
        "link": 5,
        "sub/": 0,
        "sub/a.bin": 5,
        "sub/empty/": 0,
    }


@pytest.mark.parametrize("kind", ["absent", "file", "socket", "link to a directory", "broken link", "not UTF-8"])
def test_listing_refuses_files_that_no_step_can_contain(tmp_path, kind):
    path = tmp_path / "d"
    if kind == "file":
        path.write_text("")
    elif kind != "absent":
        path.mkdir()
    server = socket.socket(socket.AF_UNIX)
    if kind == "socket":
        server.bind(str(path / "s"))
    elif kind == "link to a directory":
        (path / "l").symlink_to(tmp_path)
    elif kind == "broken link":
        (path / "l").symlink_to(tmp_path / "nothing")
    elif kind == "not UTF-8":
        (path / os.fsdecode(b"\xff")).write_text("")
    with server, pytest.raises((UsageError, FileNotFoundError)):
        list_directory(path)


@given(st.lists(st.lists(identities, unique_by=lambda file: file.name), min_size=1, max_size=4))
def test_each_name_is_saved_once_by_a_rank_that_has_it(listings):
    files = assign_files(listings)
    saved = [file.name for mine in files.by_rank for file in mine]
    assert sorted(saved) == sorted({file.name for listing in listings for file in listing})
    for listing, mine in zip(listings, files.by_rank, strict=True):
        assert set(mine) <= set(listing)
    for name in set(saved):
        different = {file for listing in listings for file in listing if file.name == name}
        assert (name in files.differing) == (len(different) > 1)
        if len(different) > 1:
            assert len(files.differing[name]) == len(different)


def test_ranks_with_one_directory_share_its_bytes():
    listing = [FileIdentity(f"{number}", 10, 0, number) for number in range(8)]
    files = assign_files([listing] * 4)
    assert [sum(file.size for file in mine) for mine in files.by_rank] == [20] * 4


def test_file_that_grows_or_changes_during_the_save_fails_it(alone, tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"1")
    listed = list_directory(tmp_path)
    (tmp_path / "a").write_bytes(b"22")
    monkeypatch.setattr("tieredckpt.checkpointer.directory_steps.list_directory", lambda _: listed)
    with pytest.raises(SaveFailedError, match="changed during the save"):
        directory_state(alone, tmp_path)


def test_restored_directory_has_all_files(alone, tmp_path):
    files = {"./": b"", "sub/": b"", "sub/a": b"12", "b": b"", "c.bin": bytes(range(256))}
    assert restored(alone, tmp_path / "new" / "d", files) == 5
    assert tree(tmp_path / "new" / "d") == {"sub/a": b"12", "b": b"", "c.bin": bytes(range(256))}
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "d"]


@pytest.mark.parametrize("name", ["../a", "/a", "a/../../b", "a//b", "", "a\0b", ".", "..", "a/./b"])
def test_hostile_names_are_damage_and_write_nothing(alone, tmp_path, name):
    with pytest.raises(CheckpointDamagedError, match="not a path below"):
        restored(alone, tmp_path / "x" / "d", {"./": b"", name: b"1"})
    assert list(tmp_path.rglob("*")) == [tmp_path / "x"]


def test_step_of_another_state_is_a_mismatch(alone, tmp_path):
    with pytest.raises(MismatchError, match="not a directory"):
        restored(alone, tmp_path / "d", {"model": b""})
    assert not list(tmp_path.iterdir())


def test_used_directory_is_kept_or_replaced(alone, tmp_path):
    path = tmp_path / "d"
    path.mkdir()
    restored(alone, path, {"./": b"", "a": b"1"})
    with pytest.raises(UsageError, match="not empty"):
        restored(alone, path, {"./": b"", "b": b"2"})
    assert tree(path) == {"a": b"1"}
    restored(alone, path, {"./": b"", "b": b"2"}, overwrite=True)
    assert tree(path) == {"b": b"2"}
    assert list(tmp_path.iterdir()) == [path]


def test_failed_restore_leaves_the_directory_as_it_was(alone, tmp_path):
    path = tmp_path / "d"
    restored(alone, path, {"./": b"", "a": b"1"})
    with pytest.raises(UsageError, match=r"Not a directory|File exists"):
        restored(alone, path, {"./": b"", "b": b"", "b/c": b""}, overwrite=True)
    assert tree(path) == {"a": b"1"}
    assert list(tmp_path.iterdir()) == [path]
