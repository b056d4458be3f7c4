"""Draining n durable steps costs n times one step: existing steps are not listed each time."""

import contextlib
import threading

import pytest

from peerstore.daemon_process import current_process
from peerstore.settings import StoreSettings
from peerstore.shard_records import ShardKey, VersionId
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from tieredckpt.agent.agent_api import LAYOUT_BLOB_PREFIX
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.agent.durable_catalog import DurableCatalog, delete_step
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.format import object_keys
from tieredckpt.format.manifest import ShardMeta, encode_meta, pack_blob
from tieredckpt.format.shard_layout import Layout, encode_layout
from tieredckpt.settings import DurableSettings

SIZE = 4096


class Counted:
    """A store that counts the names in its listings."""

    def __init__(self, store):
        self._store = store
        self.listed = 0

    def __getattr__(self, name):
        return getattr(self._store, name)

    def list(self, prefix, **options):
        found = list(self._store.list(prefix, **options))
        self.listed += len(found)
        return found


class Node:
    """A node whose agent saves steps of one small part and makes them durable."""

    def __init__(self, directory, durable):
        self.opened = []
        self.store = NodeStore(TmpfsArena(directory), StoreSettings(budget="64MiB"))
        self.service = NodeAgentService(self.store, open_durable=self._open)
        self.store.claim("job", "incarnation")
        self.service.configure("job", durable)
        self._over = threading.Semaphore(0)
        finish = self.service.drain._finish

        def to_its_end(*args, **named):
            finish(*args, **named)
            self._over.release()

        self.service.drain._finish = to_its_end

    def _open(self, url, settings):
        self.opened.append(Counted(open_store(url, settings)))
        return self.opened[-1]

    @property
    def listed(self):
        return sum(store.listed for store in self.opened)

    def save(self, *steps):
        layout = Layout((), (), {})
        for step in steps:
            lease = self.store.lease(key_of(step), SIZE, 1, owner=current_process())
            self.store.blobs.put("job", LAYOUT_BLOB_PREFIX + layout.digest, pack_blob(encode_layout(layout)))
            meta = ShardMeta(layout=layout.digest, item_sizes=(), table="", durable=True, saved_ns=0)
            self.store.seal(lease.id, SIZE, encode_meta(meta))
            view = self.service.wait_durable("job", group_of(step), 60.0)
            assert view is not None
            assert view.state == "done", view
            assert self._over.acquire(timeout=60), "retention did not end"

    def close(self):
        self.service.close()
        self.store.close()


def key_of(step):
    return ShardKey("job", step, 1, "incarnation", 0, 0)


def group_of(step):
    return VersionId(1, step, 0, "incarnation")


@pytest.fixture
def nodes(tmp_path):
    """Nodes of one job by name, each with its own agent, and a shared durable tier."""
    with contextlib.ExitStack() as cleanup:

        def start(name, **changes):
            durable = DurableSettings(url=f"file://{tmp_path}/durable", **changes)
            node = Node(tmp_path / name, durable)
            cleanup.callback(node.close)
            return node

        yield start


@pytest.fixture
def outside(tmp_path):
    """The same durable tier as a process outside the job sees it."""
    url = f"file://{tmp_path}/durable"
    with contextlib.closing(open_store(url, DurableSettings(url=url))) as store:
        yield DurableCatalog(store, "job")


def there(catalog):
    return sorted(group.version for group in catalog.listing(fresh=True).manifests)


@pytest.mark.parametrize("steps", [100, pytest.param(200, marks=pytest.mark.nightly)])
def test_drain_of_n_steps_does_not_list_n_times(nodes, outside, steps):
    node = nodes("a")
    node.save(*range(steps))
    assert there(outside) == list(range(steps))
    assert node.listed <= 5 * steps


@pytest.mark.parametrize("steps", [120, pytest.param(200, marks=pytest.mark.nightly)])
def test_retention_lists_only_retained_steps(nodes, outside, steps):
    node = nodes("a", keep_last=3, keep_every=50)
    node.save(*range(steps))
    assert there(outside) == sorted({*range(0, steps, 50), *range(steps - 3, steps)})
    assert node.listed <= 20 * steps


def test_restarted_agent_lists_existing_steps(nodes, outside):
    first = nodes("a", keep_last=3)
    first.save(*range(5))
    first.close()
    nodes("b", keep_last=3).save(5, 6)
    assert there(outside) == [4, 5, 6]


def test_alternating_committers_list_consistently(nodes, outside):
    a, b = nodes("a", keep_last=3), nodes("b", keep_last=3)
    for step in range(0, 20, 2):
        a.save(step)
        b.save(step + 1)
        assert len(there(outside)) <= 6, "a node passed over what the other one committed"
        assert there(outside)[-3:] == list(range(max(0, step - 1), step + 2))
    a.save(*range(20, 24))
    assert there(outside) == [21, 22, 23]


def test_steps_deleted_by_others_do_not_count_as_kept(nodes, outside):
    node = nodes("a", keep_last=3)
    node.save(*range(10))
    assert there(outside) == [7, 8, 9]
    for step in (8, 9):
        delete_step(outside, "job", group_of(step))
    node.save(10)
    assert there(outside) == [7, 10]
    node.save(11, 12)
    assert there(outside) == [10, 11, 12]


def test_steps_quarantined_by_others_do_not_count_as_kept(nodes, outside):
    node = nodes("a", keep_last=2)
    node.save(*range(4))
    outside.quarantine(group_of(3), "bad")
    node.save(4)
    assert there(outside) == [2, 3, 4], "a good step was deleted for the sake of a bad one"
    node.save(5)
    assert there(outside) == [4, 5]


def test_step_pinned_by_others_is_kept(nodes, outside):
    node = nodes("a", keep_last=2)
    node.save(*range(4))
    outside.keep(group_of(2), kept=True)
    node.save(4, 5)
    assert there(outside) == [2, 4, 5]
    outside.keep(group_of(2), kept=False)
    node.save(6)
    assert there(outside) == [5, 6]


def test_a_step_that_another_node_committed_is_not_committed_again(nodes, outside):
    a, b = nodes("a"), nodes("b")
    b.save(0)  # this lists the existing steps
    a.save(1)
    before = outside.store.get(object_keys.manifest_key("job", group_of(1), None))
    b.save(1)
    assert outside.store.get(object_keys.manifest_key("job", group_of(1), None)) == before
    assert b.listed <= 20
