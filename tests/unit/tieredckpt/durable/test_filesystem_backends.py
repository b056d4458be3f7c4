"""Behavior of a directory as a durable tier, beyond the contract."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.journals import DictJournal
from tieredckpt.durable.object_store import ObjectNotFoundError
from tieredckpt.durable.retrying_store import RetryingStore, open_store
from tieredckpt.errors import DurableRefusedError
from tieredckpt.settings import DurableSettings


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def store(root: Path) -> Iterator[RetryingStore]:
    with_retries = open_store(str(root), DurableSettings(retry_s=0.5))
    yield with_retries
    with_retries.close()


def test_nothing_is_made_by_looking(store: RetryingStore, root: Path):
    assert list(store.list("")) == []
    with pytest.raises(ObjectNotFoundError):
        store.get("a/b")
    assert not root.exists()


def test_staged_files_of_a_killed_writer_are_hidden_and_removed(store: RetryingStore, root: Path):
    store.put("a/x", b"1")
    left = [root / "a" / f".{name}.{'0' * 16}.staged" for name in ("y", "kept", "new")]
    for path in left:
        path.write_bytes(b"half")
        os.utime(path, (0, 0))
    os.utime(left[2])
    assert [info.name for info in store.list("")] == ["a/x"]
    assert store.abort_stale_uploads("b/", older_than_s=0) == 0
    assert store.abort_stale_uploads("a/", older_than_s=3600, keep=["a/kept"]) == 1
    assert sorted(root.rglob("*.staged")) == sorted(left[1:])


def test_directories_go_with_their_last_object(store: RetryingStore, root: Path):
    store.put("a/b/x", b"1")
    store.put("a/y", b"1")
    store.delete(["a/b/x"])
    assert sorted(path.name for path in root.iterdir()) == ["a"]
    assert [path.name for path in (root / "a").iterdir()] == ["y"]
    store.delete(["a/y"])
    assert list(root.iterdir()) == []


def test_dangling_link_is_not_a_directory(store: RetryingStore, root: Path):
    root.mkdir()
    (root / "a").symlink_to(root / "nowhere")
    with pytest.raises(DurableRefusedError, match="a/b"):
        store.put("a/b", b"1")


def test_concurrent_writers_and_deleters_do_not_conflict(store: RetryingStore):
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait()
        for _ in range(100):
            store.put(f"deep/er/{number}", b"x")
            store.delete([f"deep/er/{number}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert list(store.list("")) == []


def test_folder_is_not_an_object(store: RetryingStore):
    store.put("a/b", b"1")
    with pytest.raises(ObjectNotFoundError):
        store.get("a")
    with pytest.raises(ObjectNotFoundError):
        store.get("a/b/c")
    for name in ("a", "a/b/c"):
        with pytest.raises(DurableRefusedError, match=name):
            store.put(name, b"2")
    assert [info.name for info in store.list("")] == ["a/b"]


def test_a_failed_write_leaves_nothing(store: RetryingStore, root: Path, tmp_path: Path):
    store.put("a/b", b"1")
    source = tmp_path / "source"
    source.write_bytes(b"data")
    with pytest.raises(DurableRefusedError):
        store.upload("a", source, 4, journal=DictJournal())
    assert [path.name for path in root.rglob("*")] == ["a", "b"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_no_permission_is_a_refusal(store: RetryingStore, root: Path):
    root.mkdir(mode=0o500)
    with pytest.raises(DurableRefusedError, match=r"[Pp]ermission"):
        store.put("x", b"1")


def test_root_check_makes_the_directory_only_for_writing(store: RetryingStore, root: Path):
    store.check_root()
    assert list(root.parent.iterdir()) == []
    store.check_writes()
    assert list(root.iterdir()) == []
    store.check_writes()


def test_write_checks_of_several_ranks_do_not_disturb_each_other(root: Path):
    stores = [open_store(str(root / "a" / "b"), DurableSettings()) for _ in range(8)]
    with ThreadPoolExecutor(len(stores)) as ranks:
        for _ in range(50):
            list(ranks.map(RetryingStore.check_writes, stores))
            shutil.rmtree(root / "a")
    for store in stores:
        store.close()


@pytest.mark.parametrize("check", [RetryingStore.check_root, RetryingStore.check_writes])
def test_checks_refuse_a_directory_that_cannot_be_created(check):
    store = open_store("/proc/x/y", DurableSettings())
    with pytest.raises(DurableRefusedError, match="/proc/x"):
        check(store)
    store.close()


def test_write_check_refuses_a_directory_that_takes_no_file():
    store = open_store("/proc", DurableSettings())
    store.check_root()
    with pytest.raises(DurableRefusedError, match=r"writing file:///proc/\.probe-"):
        store.check_writes()
    store.close()


def test_root_check_refuses_a_file(store: RetryingStore, root: Path):
    root.write_bytes(b"")
    with pytest.raises(DurableRefusedError, match="Not a directory"):
        store.check_root()
