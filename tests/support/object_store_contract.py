"""Contract of every object store, as a test class to inherit next to an ``opener`` fixture."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from peerstore.rate_limiter import RateLimiter
from tests.support.journals import DictJournal
from tieredckpt.durable.object_store import ObjectExistsError, ObjectNotFoundError, UploadCancelledError
from tieredckpt.durable.retrying_store import RetryingStore
from tieredckpt.errors import CheckpointDamagedError, UsageError

MIB = 1 << 20
NAMES = [
    "a",
    "deep/er/still",
    "with space",
    "plus+and=comma,",
    "100%25#1?x&y",
    "große/Schritte",
    "step-7/.hidden",
    "~(x)!'*",
]
BAD_NAMES = ["", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/./b", "a\\b", "a\nb", "a\0b", "x" * 1025]


Opener = Callable[[RateLimiter], RetryingStore]


class ObjectStoreContract:
    @pytest.fixture
    def store(self, opener: Opener) -> Iterator[RetryingStore]:
        opened = opener(RateLimiter(0))
        yield opened
        opened.close()

    @pytest.fixture
    def cancel(self) -> threading.Event:
        return threading.Event()

    @pytest.fixture
    def stuck_store(self, opener: Opener, cancel: threading.Event) -> Iterator[RetryingStore]:
        """Open the same store with a limit that passes one slice and sets ``cancel`` at the next."""
        asked = itertools.count()

        def clock() -> float:
            if next(asked) == 2:
                cancel.set()
            return 0.0

        opened = opener(RateLimiter(1, clock=clock))
        yield opened
        opened.close()

    @pytest.mark.parametrize("name", NAMES)
    def test_object_round_trips(self, store: RetryingStore, name: str):
        data = random.Random(name).randbytes(70_001)
        store.put(name, data)
        assert store.get(name) == data
        assert [info.name for info in store.list("")] == [name]

    @pytest.mark.parametrize("size", [0, 1, 6 * MIB])
    def test_object_of_any_size_round_trips(self, store: RetryingStore, size: int):
        data = random.Random(size).randbytes(size)
        store.put("x", data)
        assert store.get("x") == data

    def test_put_replaces_the_object(self, store: RetryingStore):
        store.put("x", b"old and longer")
        store.put("x", b"new")
        assert store.get("x") == b"new"

    def test_absent_object_is_not_found(self, store: RetryingStore):
        with pytest.raises(ObjectNotFoundError, match="no/such"):
            store.get("no/such")
        with pytest.raises(ObjectNotFoundError, match="no/such"):
            store.get_ranges("no/such", [(0, 1)])

    def test_create_only_keeps_the_existing_object(self, store: RetryingStore):
        store.put("x", b"first", create_only=True)
        with pytest.raises(ObjectExistsError, match="x"):
            store.put("x", b"second", create_only=True)
        assert store.get("x") == b"first"

    def test_one_of_racing_creates_wins_where_enforced(self, store: RetryingStore):
        start = threading.Barrier(8)

        def create(number: int) -> bool:
            start.wait()
            try:
                store.put("manifest", b"writer %d" % number, create_only=True)
            except ObjectExistsError:
                return False
            return True

        enforced = store.capabilities().conditional_put
        with ThreadPoolExecutor(8) as pool:
            won = [number for number, result in enumerate(pool.map(create, range(8))) if result]
        assert store.get("manifest") in [b"writer %d" % number for number in won]
        if enforced:
            assert len(won) == 1

    def test_ranges_are_returned_in_order(self, store: RetryingStore):
        data = random.Random(1).randbytes(12 * MIB)
        store.put("x", data)
        ranges = [
            *((5, 9), (0, 4), (4, 5), (7, 7), (3, 8), (5, 9)),  # close, touching, empty, overlapping, repeated
            (11 * MIB, 12 * MIB),
            (len(data) - 1, len(data)),
            (MIB - 1, 11 * MIB + 1),  # longer than a part
        ]
        got = store.get_ranges("x", ranges)
        assert [bytes(each) for each in got] == [data[start:stop] for start, stop in ranges]
        assert store.get_ranges("x", []) == []

    @pytest.mark.parametrize("bad", [(0, 11), (10, 11), (5, 4 * MIB), (11, 12), (3 * MIB, 4 * MIB)])
    def test_range_behind_the_end_is_damage(self, store: RetryingStore, bad: tuple[int, int]):
        store.put("x", b"0123456789")
        with pytest.raises(CheckpointDamagedError, match="x"):
            store.get_ranges("x", [(0, 4), bad])

    def test_impossible_ranges_are_refused(self, store: RetryingStore):
        for bad in [(-1, 4), (4, 3)]:
            with pytest.raises(UsageError):
                store.get_ranges("x", [bad])

    def test_list_is_ordered_and_filtered_by_prefix(self, store: RetryingStore):
        names = ["b/2", "a/10", "a/1", "a/0/x", "ab", "a.txt", "a/2"]
        for name in names:
            store.put(name, name.encode())
        assert [info.name for info in store.list("")] == sorted(names)
        assert [info.name for info in store.list("a/1")] == ["a/1", "a/10"]
        assert [info.name for info in store.list("a/")] == ["a/0/x", "a/1", "a/10", "a/2"]
        assert list(store.list("c")) == []
        assert list(store.list("no/such/place/")) == []

    def test_list_reports_size_and_time(self, store: RetryingStore):
        before = time.time()
        store.put("x", b"12345")
        (info,) = store.list("x")
        assert info.size_bytes == 5
        assert abs(info.modified_s - before) < 3600

    def test_list_has_more_than_one_page(self, store: RetryingStore):
        count = 1001 if store.url.startswith("s3://") else 30
        names = [f"many/{i:04}" for i in range(count)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: store.put(name, b""), names))
        assert [info.name for info in store.list("many/")] == names
        store.delete(names)
        assert list(store.list("many/")) == []

    def test_delete_accepts_absent_names(self, store: RetryingStore):
        for name in ("a/1", "a/2", "b"):
            store.put(name, b"x")
        store.delete(["a/1", "no/such", "b"])
        store.delete(["a/1"])
        store.delete([])
        assert [info.name for info in store.list("")] == ["a/2"]

    def test_names_cannot_leave_the_url(self, store: RetryingStore, tmp_path: Path):
        for name in BAD_NAMES:
            for call in (
                lambda name=name: store.put(name, b""),
                lambda name=name: store.get(name),
                lambda name=name: store.get_ranges(name, [(0, 1)]),
                lambda name=name: store.delete([name]),
                lambda name=name: store.upload(name, tmp_path, 0, journal=DictJournal()),
            ):
                with pytest.raises(UsageError, match="not an object name"):
                    call()

    @pytest.mark.parametrize("size", [0, 1, 5 * MIB, 5 * MIB + 1, 12 * MIB])
    def test_upload_round_trips(self, store: RetryingStore, tmp_path: Path, size: int):
        data = random.Random(size).randbytes(size)
        source = tmp_path / "source"
        source.write_bytes(data + b"not this")
        journal, told = DictJournal(), []
        store.put("step/shard", b"what was there before")
        store.upload("step/shard", source, size, journal=journal, identity="1", progress=told.append)
        assert store.get("step/shard") == data
        assert sum(told) == size
        assert journal.entries == {}
        assert [info.name for info in store.list("")] == ["step/shard"]
        assert store.abort_stale_uploads("", older_than_s=0) == 0

    def test_short_source_is_refused(self, store: RetryingStore, tmp_path: Path):
        source = tmp_path / "source"
        source.write_bytes(b"123")
        with pytest.raises(UsageError, match="3 bytes"):
            store.upload("x", source, 4, journal=DictJournal())
        assert list(store.list("")) == []

    def test_cancelled_upload_creates_no_object_and_can_be_repeated(
        self, store: RetryingStore, stuck_store: RetryingStore, cancel: threading.Event, tmp_path: Path
    ):
        data = random.Random(2).randbytes(12 * MIB)
        source = tmp_path / "source"
        source.write_bytes(data)
        journal = DictJournal()
        store.put("x", b"old")
        with pytest.raises(UploadCancelledError):
            stuck_store.upload("x", source, len(data), journal=journal, identity="1", cancel=cancel)
        assert store.get("x") == b"old"
        assert [info.name for info in store.list("")] == ["x"]
        store.upload("x", source, len(data), journal=journal, identity="1")
        assert store.get("x") == data
        assert store.abort_stale_uploads("", older_than_s=0) == 0

    def test_upload_cancelled_before_its_start_creates_no_object(
        self, store: RetryingStore, cancel: threading.Event, tmp_path: Path
    ):
        cancel.set()
        source = tmp_path / "source"
        source.write_bytes(b"data")
        with pytest.raises(UploadCancelledError):
            store.upload("x", source, 4, journal=DictJournal(), cancel=cancel)
        assert list(store.list("")) == []

    def test_readers_see_the_old_or_the_new_object(self, store: RetryingStore):
        whole = [bytes([letter]) * 200_000 for letter in b"abcdefgh"]
        store.put("x", whole[0])
        with ThreadPoolExecutor(2) as pool:
            writing = pool.submit(lambda: [store.put("x", data) for data in whole])
            seen = {store.get("x") for _ in range(20)}
            writing.result()
        assert seen <= set(whole)
        assert store.get("x") == whole[-1]

    def test_store_is_usable_from_any_thread(self, store: RetryingStore):
        def roundtrip(number: int) -> bool:
            data = random.Random(number).randbytes(10_000 + number)
            store.put(f"thread/{number}", data)
            (part,) = store.get_ranges(f"thread/{number}", [(100, 9_000)])
            return store.get(f"thread/{number}") == data and bytes(part) == data[100:9_000]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(roundtrip, range(24)))

    def test_write_check_leaves_no_object(self, store: RetryingStore):
        store.check_writes()
        assert list(store.list("")) == []

    def test_capabilities_are_probed_once_and_leave_no_object(self, store: RetryingStore):
        found = store.capabilities()
        assert store.capabilities() is found
        assert list(store.list("")) == []
