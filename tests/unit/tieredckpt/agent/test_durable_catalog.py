import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest

from peerstore.shard_records import VersionId
from tieredckpt.agent.durable_catalog import DurableCatalog, delete_orphaned_step, delete_step, find_orphaned_steps
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import DurableRefusedError, TierUnavailableError
from tieredckpt.format import object_keys
from tieredckpt.settings import DurableSettings


class EndsAtDelete:
    """A store whose process ends before one of its deletions, as if killed."""

    def __init__(self, store, before):
        self._store, self._left = store, before
        self.url, self.get, self.list = store.url, store.get, store.list

    def delete(self, names):
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt
        self._store.delete(names)


class Away:
    """A store that is unavailable until the test changes it, and that counts requests."""

    def __init__(self, store, error=TierUnavailableError):
        self._store, self._error = store, error
        self.url = store.url
        self.asked = 0
        self.patience_s = []
        self.back = False

    def list(self, prefix, *, patience_s):
        self.asked += 1
        self.patience_s.append(patience_s)
        if not self.back:
            raise self._error("away")
        return self._store.list(prefix)


class HeldListing:
    """A store whose listings of manifests end only once the test allows it, and that counts them."""

    def __init__(self, store):
        self._store, self.url = store, store.url
        self.count = 0
        self.began, self.may_end = threading.Event(), threading.Event()

    def list(self, prefix, *, patience_s):
        found = list(self._store.list(prefix))
        if prefix == object_keys.manifest_prefix("job"):
            self.count += 1
            self.began.set()
            assert self.may_end.wait(20)
        return found


@pytest.fixture
def directory(tmp_path):
    url = f"file://{tmp_path}"
    store = open_store(url, DurableSettings(url=url))
    yield store
    store.close()


@pytest.mark.parametrize("error", [TierUnavailableError, DurableRefusedError])
def test_ranks_of_a_node_share_a_failed_listing(directory, error):
    store, now = Away(directory, error), [100.0]
    catalog = DurableCatalog(store, "job", clock=lambda: now[0])
    failures = []

    def ask():
        with pytest.raises(error, match="away"):
            catalog.listing()
        failures.append(1)

    ranks = [threading.Thread(target=ask) for _ in range(8)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(failures) == 8
    assert store.asked == 1
    store.back = True
    now[0] += 6
    assert catalog.listing().manifests == {}


def test_fresh_listings_at_the_same_time_begin_after_their_calls(directory):
    store, called, threads = HeldListing(directory), threading.Semaphore(0), set()

    def clock():
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            called.release()
        return time.monotonic()

    catalog, group = DurableCatalog(store, "job", clock=clock), VersionId(1, 7, 0, "a")
    with ThreadPoolExecutor(8) as ranks:
        first = ranks.submit(catalog.listing, fresh=True)
        assert store.began.wait(20)
        directory.put(object_keys.manifest_key("job", group, None), b"no manifest is read")
        others = [ranks.submit(catalog.listing, fresh=True) for _ in range(7)]
        for _ in range(8):
            assert called.acquire(timeout=20)
        store.may_end.set()
        assert list(first.result().manifests) == []
        assert [list(other.result().manifests) for other in others] == [[group]] * 7
        assert store.count == 2
        catalog.listing()
        assert store.count == 2
        catalog.listing(fresh=True)
        assert store.count == 3


def test_a_listing_has_an_end(directory):
    store = Away(directory)
    store.back = True
    DurableCatalog(store, "job").listing()
    assert max(store.patience_s) <= 60


def test_many_deletions_need_no_full_listing_each(directory, monkeypatch):
    catalog, groups = DurableCatalog(directory, "job"), [VersionId(1, step, 0, "a") for step in range(300)]
    for group in groups:
        directory.put(object_keys.manifest_key("job", group, None), b"no manifest is read")
        directory.put(object_keys.quarantine_key("job", group), b"so no manifest is read")
    before = catalog.listing()
    monkeypatch.setattr(catalog, "manifest", lambda group: SimpleNamespace(shards=()))
    kept = []
    for group in groups[:200]:
        delete_step(catalog, "job", group)
        kept.append(catalog._listing.listing.manifests)
    assert len({id(one) for one in kept}) == 1, "copied once, because somebody was given it"
    assert len(before.manifests) == 300, "who was given a listing has it as it was"
    after = catalog.listing()
    assert sorted(after.manifests) == groups[200:]
    assert after.quarantined == {*groups[200:]}
    catalog.mark_deleted(groups[200])
    assert groups[200] in after.manifests
    assert sorted(catalog.listing().manifests) == groups[201:]


@pytest.mark.parametrize("before", [1, 2, 3, 4])
@pytest.mark.parametrize("of_orphan", [False, True])
def test_interrupted_deletion_leaves_nothing_that_gc_does_not_find(directory, monkeypatch, before, of_orphan):
    group = VersionId(1, 7, 0, "a")
    marks = [mark("job", group) for mark in (object_keys.keep_key, object_keys.release_key, object_keys.quarantine_key)]
    shards = [object_keys.shards_prefix("job", group) + name for name in ("000000.safetensors", "000000.index")]
    manifest = object_keys.manifest_key("job", group, None)
    for name in (*marks, *shards, *([] if of_orphan else [manifest])):
        directory.put(name, b"1")
    monkeypatch.setattr(DurableCatalog, "manifest", lambda self, group: SimpleNamespace(shards=()))
    ended = DurableCatalog(EndsAtDelete(directory, before), "job")
    with suppress(KeyboardInterrupt):
        if of_orphan:
            delete_orphaned_step(ended, "job", find_orphaned_steps(ended, "job", spread=False)[0])
        else:
            delete_step(ended, "job", group)
    catalog = DurableCatalog(directory, "job")
    for found in catalog.listing(fresh=True).manifests:
        delete_step(catalog, "job", found)
    for orphan in find_orphaned_steps(catalog, "job", spread=False):
        names = [info.name for info in directory.list("job/")]
        assert marks[-1] in names or shards[-1] not in names, "its manifest could be rebuilt without the mark"
        delete_orphaned_step(catalog, "job", orphan)
    assert [info.name for info in directory.list("job/")] == []
