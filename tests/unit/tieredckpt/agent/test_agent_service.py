"""An agent's answers right after its start, while it verifies the shards of a previous agent."""

import contextlib
import threading

import pytest

from peerstore.daemon_process import ProcessIdentity, current_process
from peerstore.settings import StoreSettings
from peerstore.shard_records import ShardKey
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from peerstore.store.shards import ShardReader
from tests.support.local_nodes import wait_until
from tieredckpt.agent import drain
from tieredckpt.agent.agent_api import LAYOUT_BLOB_PREFIX
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.agent.durable_catalog import DurableCatalog
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import DurableRefusedError, UsageError
from tieredckpt.format.manifest import ShardMeta, encode_meta, pack_blob
from tieredckpt.format.shard_layout import Layout, encode_layout
from tieredckpt.resolve_step import Tier
from tieredckpt.settings import DurableSettings
from tieredckpt.testing import memory_node

SIZE = 1 << 20


@pytest.fixture
def arena(tmp_path):
    return TmpfsArena(tmp_path / "arena")


def leave_a_durable_step(arena):
    store = NodeStore(arena, StoreSettings(budget="64MiB"))
    try:
        store.claim("job", "incarnation")
        lease = store.lease(ShardKey("job", 3, 1, "incarnation", 0, 0), SIZE, 1, owner=current_process())
        meta = ShardMeta(layout="", item_sizes=(), table="", durable=True, saved_ns=0)
        store.seal(lease.id, SIZE, encode_meta(meta))
    finally:
        store.close()


def test_step_under_verification_is_awaited(arena, monkeypatch, tmp_path):
    leave_a_durable_step(arena)
    may_verify, real = threading.Event(), ShardReader.damaged_chunks

    def slow(self, *args):
        assert may_verify.wait(200)
        return real(self, *args)

    monkeypatch.setattr(ShardReader, "damaged_chunks", slow)
    store = NodeStore(arena, StoreSettings(budget="64MiB"))
    service = NodeAgentService(store)
    try:
        service.configure("job", DurableSettings(url=f"file://{tmp_path}/durable", on_busy="wait"))
        answers = []
        waiting = threading.Thread(target=lambda: answers.append(service.wait_durable("job", None, 0.0)))
        waiting.start()
        waiting.join(0.3)
        too_soon = not waiting.is_alive()
        may_verify.set()
        waiting.join()
        assert not too_soon
        assert answers[0] is not None, "the step was not known yet, so it seemed that there was none"
        assert answers[0].version_id.version == 3
    finally:
        service.close()
        store.close()


def seal(store, step, part, parts):
    lease = store.lease(ShardKey("job", step, 1, "incarnation", 0, part), SIZE, parts, owner=current_process())
    layout = Layout((), (), {})
    store.blobs.put("job", LAYOUT_BLOB_PREFIX + layout.digest, pack_blob(encode_layout(layout)))
    meta = ShardMeta(layout=layout.digest, item_sizes=(), table="", durable=True, saved_ns=0)
    store.seal(lease.id, SIZE, encode_meta(meta))


def test_incomplete_step_is_skipped_when_a_newer_one_is_durable(arena, tmp_path):
    store = NodeStore(arena, StoreSettings(budget="64MiB"))
    service = NodeAgentService(store)
    try:
        store.claim("job", "incarnation")
        service.configure("job", DurableSettings(url=f"file://{tmp_path}/durable"))
        seal(store, 3, 0, 2)
        assert service.wait_durable("job", None, 0.0).state in ("waiting", "running")
        wait_until(lambda: "other parts" in service.drain_status("job")[0].error)
        seal(store, 6, 0, 2)
        seal(store, 6, 1, 2)
        assert service.wait_durable("job", None, 20.0).state == "done"
        assert [view.state for view in service.drain_status("job")] == ["skipped", "done"]
    finally:
        service.close()
        store.close()


def test_single_node_reads_indexes_and_deletes_for_all(tmp_path, monkeypatch):
    """Four nodes, each with one part of three steps; one step is pinned."""
    count, looked, deleted = 4, [], []
    files, delete = DurableCatalog.shard_files, drain.delete_step

    def shard_files(catalog, group, **options):
        found = files(catalog, group, **options)
        looked.extend([group.version] * bool(found))
        return found

    monkeypatch.setattr(DurableCatalog, "shard_files", shard_files)
    monkeypatch.setattr(drain, "delete_step", lambda *what: deleted.append(what[2].version) or delete(*what))
    stores = [NodeStore(TmpfsArena(tmp_path / f"arena{n}"), StoreSettings(budget="64MiB")) for n in range(count)]
    services = [NodeAgentService(store) for store in stores]
    try:
        for number, (store, service) in enumerate(zip(stores, services, strict=True)):
            monkeypatch.setattr(service, "is_committer", lambda *_, first=number == 0: first)
            store.claim("job", "incarnation")
            service.configure("job", DurableSettings(url=f"file://{tmp_path}/durable", keep_last=1))
        for step in range(3):
            for part, store in enumerate(stores):
                seal(store, step, part, count)
            for service in services:
                assert service.wait_durable("job", None, 60.0).state == "done"
        assert looked == [0, 1, 2]
        assert deleted == [0, 1]
    finally:
        for one in (*services, *stores):
            one.close()


def test_idle_committer_is_replaced(arena, tmp_path, monkeypatch):
    monkeypatch.setattr(drain, "_TAKE_OVER_S", 0.0)
    other = NodeStore(TmpfsArena(tmp_path / "other"), StoreSettings(budget="64MiB"))
    store = NodeStore(arena, StoreSettings(budget="64MiB"))
    services = [NodeAgentService(one) for one in (store, other)]
    try:
        for part, (one, service) in enumerate(zip((store, other), services, strict=True)):
            monkeypatch.setattr(service, "is_committer", lambda *_: False)
            one.claim("job", "incarnation")
            service.configure("job", DurableSettings(url=f"file://{tmp_path}/durable"))
            seal(one, 3, part, 2)
        assert services[0].wait_durable("job", None, 60.0).state == "done"
    finally:
        for one in (*services, store, other):
            one.close()


def test_durable_settings_are_stored_again_for_a_returning_expired_job(arena, tmp_path):
    durable = DurableSettings(url=f"file://{tmp_path}/durable")
    now = [0.0]
    store = NodeStore(arena, StoreSettings(budget="64MiB", job_ttl_s=10.0), clock=lambda: now[0])
    with contextlib.closing(store), contextlib.closing(NodeAgentService(store)) as service:
        for epoch in (1, 2):
            store.claim("job", "incarnation", at_least=epoch)
            service.configure("job", durable)
            assert service.durable.settings("job") == durable
            if epoch == 1:
                now[0] += 60.0
                store.sweep()
                assert store.jobs.names() == []
    store = NodeStore(arena, StoreSettings(budget="64MiB"))
    with contextlib.closing(store), contextlib.closing(NodeAgentService(store)) as service:
        assert service.durable.settings("job") == durable


class Opened:
    """Stores that are opened together or after a moment, and a list of the ones still open."""

    def __init__(self, parties):
        self._together = threading.Barrier(parties)
        self.began = threading.Event()
        self.open = []

    def __call__(self, url, settings):
        self.began.set()
        with contextlib.suppress(threading.BrokenBarrierError):
            self._together.wait(0.5)
        store = open_store(url, settings)
        close = store.close
        store.close = lambda: (self.open.remove(store), close())
        self.open.append(store)
        return store


def ask_for_catalog(service):
    with service.durable.catalog("job"):
        pass


def test_concurrent_callers_open_a_single_store(arena, tmp_path):
    opened = Opened(2)
    store = NodeStore(arena, StoreSettings(budget="64MiB"))
    service = NodeAgentService(store, open_durable=opened)
    with contextlib.closing(store):
        with contextlib.closing(service):
            service.configure("job", DurableSettings(url=f"file://{tmp_path}/durable"))
            asking = [threading.Thread(target=ask_for_catalog, args=(service,)) for _ in range(2)]
            for one in asking:
                one.start()
            for one in asking:
                one.join()
            assert len(opened.open) == 1
        assert opened.open == []


def test_store_opened_during_a_move_is_discarded(arena, tmp_path):
    opened = Opened(2)
    store = NodeStore(arena, StoreSettings(budget="64MiB"))
    service = NodeAgentService(store, open_durable=opened)
    with contextlib.closing(store), contextlib.closing(service):
        service.configure("job", DurableSettings(url=f"file://{tmp_path}/before"))
        asking = threading.Thread(target=ask_for_catalog, args=(service,))
        asking.start()
        assert opened.began.wait(200)
        service.configure("job", DurableSettings(url=f"file://{tmp_path}/after"))
        asking.join()
        with service.durable.catalog("job") as catalog:
            assert catalog.store.url == f"file://{tmp_path}/after"


@pytest.mark.parametrize(("url", "error"), [("gopher://x/y", UsageError), ("/proc/x", DurableRefusedError)])
def test_refused_durable_url_is_not_remembered(url, error):
    with memory_node() as service:
        with pytest.raises(error, match=r"durable\.url"):
            service.configure("job", DurableSettings(url=url), check="open")
        assert service.list_steps("job").unreachable == {}
        assert service.durable.settings("job").url == ""


def test_checked_durable_url_is_read_and_not_remembered(tmp_path):
    before, checked = (DurableSettings(url=f"file://{tmp_path}/{name}") for name in ("before", "checked"))
    with memory_node() as service:
        service.configure("job", before)
        for check in ("open", "write"):
            service.configure("job", checked, check=check)
            assert service.durable.settings("job") == before
            assert service.list_steps("job").durable == checked
        service.configure("job", checked)
        assert service.durable.settings("job") == checked


def test_settings_of_a_remembered_url_take_effect_when_they_are_checked(tmp_path):
    before, changed = (DurableSettings(url=f"file://{tmp_path}/durable", keep_last=number) for number in (1, 2))
    with memory_node() as service:
        service.configure("job", before)
        service.configure("job", changed, check="open")
        assert service.durable.settings("job") == changed


def test_checked_durable_url_is_read_while_a_process_that_named_it_runs(tmp_path):
    before, checked = (DurableSettings(url=f"file://{tmp_path}/{name}") for name in ("before", "checked"))
    running = current_process()
    ended = ProcessIdentity(running.pid, running.start_time + 1)
    with memory_node() as service:
        service.configure("job", before)
        service.configure("job", checked, check="open", owner=ended)
        assert service.list_steps("job").durable == before
        service.configure("job", checked, check="open", owner=running)
        service.configure("job", checked, check="open", owner=ended)
        assert service.list_steps("job").durable == checked
        service.configure("job", DurableSettings(), check="open", owner=running)
        assert service.list_steps("job").durable == before


def test_inventory_reports_a_durable_url_that_cannot_be_opened():
    with memory_node() as service:
        service.configure("job", DurableSettings(url="gopher://x/y"))
        assert "gopher" in service.list_steps("job").unreachable[Tier.DURABLE]
