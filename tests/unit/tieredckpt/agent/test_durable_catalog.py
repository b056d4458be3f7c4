import threading
from types import SimpleNamespace

import pytest

from peerstore.shard_records import VersionId
from tieredckpt.agent.durable_catalog import DurableCatalog, delete_step
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import DurableRefusedError, TierUnavailableError
from tieredckpt.format import object_keys
from tieredckpt.settings import DurableSettings


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
