"""Steps that a drain drops, and its reports, when stores are absent, slow or replaced."""

import contextlib
import threading

import pytest

from peerstore.daemon_process import current_process
from peerstore.errors import RequestError
from peerstore.settings import StoreSettings
from peerstore.shard_records import ShardKey, VersionId
from peerstore.store.arena import MemfdArena
from peerstore.store.node_store import NodeStore
from tests.support.local_nodes import JOB, local_nodes, wait_until
from tieredckpt.agent.agent_api import LAYOUT_BLOB_PREFIX
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.agent.durable_catalog import DurableCatalog
from tieredckpt.agent.durable_retention import DurableRetention
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.errors import DurableRefusedError, TierUnavailableError
from tieredckpt.format.manifest import ShardMeta, encode_meta, pack_blob
from tieredckpt.format.shard_layout import Layout, encode_layout
from tieredckpt.settings import DurableSettings

SIZE = 4096
LONG_S = 60.0


class Road:
    """The path to a store: it can be closed, and its uploads can be delayed."""

    def __init__(self):
        self.away = self.refuses = False
        self.waits = threading.Event()
        self.may_go = threading.Event()
        self.may_go.set()
        self.closed = []
        self.cancelled = 0

    def open(self, url, settings):
        if self.away:
            raise TierUnavailableError(f"{url} is away")
        if self.refuses:
            raise DurableRefusedError(f"{url} says no")
        return _Store(open_store(url, settings), self)


class _Store:
    def __init__(self, store, road):
        self._store, self._road = store, road

    def __getattr__(self, name):
        return getattr(self._store, name)

    def upload(self, name, *args, cancel, **more):
        self._road.waits.set()
        while not self._road.may_go.wait(0.01):
            if cancel.is_set():
                self._road.cancelled += 1
                break
        assert self._store.url not in self._road.closed, "closed under an upload"
        self._store.upload(name, *args, cancel=cancel, **more)

    def close(self):
        self._road.closed.append(self._store.url)
        self._store.close()


@pytest.fixture
def road():
    return Road()


@pytest.fixture
def node(road, tmp_path):
    """A node with a durable tier at the end of ``road``."""
    arena = MemfdArena()
    store = NodeStore(arena, StoreSettings(budget="64MiB"))
    with contextlib.closing(store), contextlib.closing(NodeAgentService(store, open_durable=road.open)) as service:
        store.claim(JOB, "incarnation")
        service.configure(JOB, durable_in(tmp_path))
        yield service
    arena.purge()


def durable_in(directory, **changes):
    return DurableSettings(url=f"file://{directory}/durable", **changes)


def group_of(step):
    return VersionId(1, step, 0, "incarnation")


def seal(store, step, part=0, parts=1, *, durable=False, required=False):
    lease = store.lease(ShardKey(JOB, step, 1, "incarnation", 0, part), SIZE, parts, owner=current_process())
    layout = Layout((), (), {})
    store.blobs.put(JOB, LAYOUT_BLOB_PREFIX + layout.digest, pack_blob(encode_layout(layout)))
    meta = ShardMeta(layout=layout.digest, item_sizes=(), table="", durable=durable, saved_ns=0, required=required)
    store.seal(lease.id, SIZE, encode_meta(meta))


def state_of(service, step):
    return next((view for view in service.drain_status(JOB) if view.version_id.version == step), None)


def stored(directory):
    return sorted(path.name for path in (directory / "durable").rglob("*") if path.is_file() and "000" in path.name)


# -- saves in memory go on ----------------------------------------------------------------------------------------


def test_oldest_required_step_is_dropped_when_no_other_can_be(node, road):
    road.away = True
    for step in (1, 2):
        seal(node.store, step, durable=True, required=True)
    wait_until(lambda: all("is away" in state_of(node, step).error for step in (1, 2)))
    for step in range(3, 9):
        seal(node.store, step)
    assert [state_of(node, step).state for step in (1, 2)] == ["failed", "waiting"]
    assert state_of(node, 1).error.startswith("saves in memory needed its slots; the store: ")
    assert node.drain.totals.errors >= 1


def test_optional_step_is_dropped_first(node, road):
    road.away = True
    seal(node.store, 1, durable=True, required=True)
    seal(node.store, 2, durable=True)
    wait_until(lambda: all("is away" in state_of(node, step).error for step in (1, 2)))
    for step in range(3, 9):
        seal(node.store, step)
    assert [state_of(node, step).state for step in (1, 2)] == ["waiting", "skipped"]


def test_dropped_step_is_reported_to_waiters(node, road):
    road.away = True
    for step in (1, 2):
        seal(node.store, step, durable=True, required=True)
    wait_until(lambda: all("is away" in state_of(node, step).error for step in (1, 2)))
    told = []
    waiting = threading.Thread(target=lambda: told.append(node.wait_durable(JOB, group_of(1), LONG_S)))
    waiting.start()
    for step in (3, 4):
        seal(node.store, step)
    waiting.join()
    assert [view.state for view in told] == ["failed"]
    node.drain.cancel_steps(JOB, [group_of(2)])
    assert node.wait_durable(JOB, None, 0.0).state == "failed", "nothing newer makes up for it"
    road.away = False
    seal(node.store, 5, durable=True)
    assert node.wait_durable(JOB, group_of(5), LONG_S).state == "done"
    assert node.wait_durable(JOB, None, 0.0).state == "done"


def test_required_step_is_not_dropped_while_the_store_works(node, road):
    road.may_go.clear()
    seal(node.store, 1, durable=True)
    assert road.waits.wait(LONG_S)
    seal(node.store, 2, durable=True, required=True)
    seal(node.store, 3)
    assert not node.drain.free_a_slot(JOB, last=False)
    assert state_of(node, 2).state == "waiting"
    seal(node.store, 4)
    assert state_of(node, 2).state == "failed", "a save that does not wait is not refused"
    road.may_go.set()
    assert node.wait_durable(JOB, group_of(1), LONG_S).state == "done"


def test_wait_for_earlier_steps_ignores_the_step_that_lacks_a_part(node):
    """The first rank of a node has saved step 2, and the second one waits before its save of step 2."""
    for part in range(2):
        seal(node.store, 1, part, 2, durable=True)
    assert node.wait_durable(JOB, group_of(1), LONG_S).state == "done"
    seal(node.store, 2, 0, 2, durable=True)
    assert node.wait_durable(JOB, None, LONG_S, before=2).state == "done"
    assert node.wait_durable(JOB, None, 0.0).state == "waiting"


def test_late_parts_do_not_revive_a_dropped_step(node, road):
    road.away = True
    seal(node.store, 1, 0, 2, durable=True, required=True)
    seal(node.store, 2, 0, 2, durable=True, required=True)
    wait_until(lambda: all("is away" in state_of(node, step).error for step in (1, 2)))
    assert node.drain.free_a_slot(JOB, last=True)
    seal(node.store, 1, 1, 2, durable=True, required=True)
    assert state_of(node, 1).state == "failed"


def test_incomplete_required_step_fails(node, road):
    road.may_go.clear()
    seal(node.store, 1, 0, 2, durable=True, required=True)
    assert road.waits.wait(LONG_S)
    node.store.versions.abort_part(JOB, group_of(1), 1)
    assert node.wait_durable(JOB, group_of(1), LONG_S).error == "a rank aborted its part"
    assert state_of(node, 1).state == "failed"


def test_a_running_upload_that_does_not_end_refuses_no_save(node, road):
    """With default slots: one for the upload, one for the newest complete step, one for the save."""
    road.may_go.clear()
    for part in range(2):
        seal(node.store, 1, part, 2, durable=True)
    assert road.waits.wait(LONG_S)
    for step in range(2, 12):
        for part in range(2):
            seal(node.store, step, part, 2, durable=not step % 4)
    assert state_of(node, 1).state == "running"
    road.may_go.set()
    assert node.wait_durable(JOB, group_of(1), LONG_S).state == "done"


# -- on several nodes ---------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path):
    """Two nodes with a durable tier: their services, and each node's path to the tier."""
    with contextlib.ExitStack() as cleanup:
        both = cleanup.enter_context(local_nodes("n1", "n2", copies=1))
        roads, services = [Road(), Road()], []
        for one, road in zip(both, roads, strict=True):
            service = NodeAgentService(one.store, open_durable=road.open, node_peers=one.node_peers)
            services.append(cleanup.enter_context(contextlib.closing(service)))
            one.store.claim(JOB, "incarnation")
            service.configure(JOB, durable_in(tmp_path))
        yield services, roads


def test_drop_on_one_node_is_reported_to_others_at_once(two):
    (first, second), roads = two
    roads[1].away = True
    for number, service in enumerate((first, second)):
        seal(service.store, 1, number, 2, durable=True, required=True)
    wait_until(lambda: "other parts" in state_of(first, 1).error)
    wait_until(lambda: "is away" in state_of(second, 1).error)
    told = []
    waiting = threading.Thread(target=lambda: told.append(first.wait_durable(JOB, group_of(1), LONG_S)))
    waiting.start()
    assert second.drain.free_a_slot(JOB, last=True)
    waiting.join(LONG_S / 4)
    assert [view.state for view in told] == ["failed"]
    assert told[0].error == f"node n2: {state_of(second, 1).error}"


def test_upload_of_a_step_dropped_elsewhere_is_canceled(two):
    (first, second), roads = two
    roads[0].may_go.clear()
    roads[1].away = True
    for number, service in enumerate((first, second)):
        seal(service.store, 1, number, 2, durable=True, required=True)
    assert roads[0].waits.wait(LONG_S)
    wait_until(lambda: "is away" in state_of(second, 1).error)
    assert second.drain.free_a_slot(JOB, last=True)
    assert first.wait_durable(JOB, group_of(1), LONG_S / 4).state == "failed"
    assert roads[0].cancelled == 1


def test_part_sealed_after_its_step_was_dropped_elsewhere_is_not_uploaded(two):
    (first, second), roads = two
    roads[1].away = True
    seal(second.store, 1, 1, 2, durable=True, required=True)
    wait_until(lambda: "is away" in state_of(second, 1).error)
    assert second.drain.free_a_slot(JOB, last=True)
    wait_until(lambda: state_of(first, 1) is not None, "it has been told")
    seal(first.store, 1, 0, 2, durable=True, required=True)
    assert first.wait_durable(JOB, group_of(1), LONG_S / 4).state == "failed"
    assert not roads[0].waits.is_set()


def test_store_refusal_on_one_node_is_reported_to_others(two):
    (first, second), roads = two
    roads[1].refuses = True
    for number, service in enumerate((first, second)):
        seal(service.store, 1, number, 2, durable=True, required=True)
    found = first.wait_durable(JOB, group_of(1), LONG_S / 4)
    assert (found.state, "node n2: " in found.error, "says no" in found.error) == ("failed", True, True)


def test_reports_about_unknown_steps_are_bounded(node):
    for step in range(200):
        node.store.listeners.on_not_durable(JOB, group_of(step), "node n2: no")
    assert len(node.drain_status(JOB)) <= 32


# -- what is dropped stays away -----------------------------------------------------------------------------------


def test_upload_of_a_deleted_step_is_canceled(node, road, tmp_path):
    road.may_go.clear()
    seal(node.store, 1, durable=True)
    assert road.waits.wait(LONG_S)
    node.drop_steps(JOB, [group_of(1)])
    assert road.cancelled == 1
    road.may_go.set()
    assert state_of(node, 1).state == "skipped"
    assert stored(tmp_path) == []


def test_step_deleted_on_another_node_does_not_return(tmp_path):
    """Each of two nodes has a part; one uploads its part while the other drops the step."""
    with contextlib.ExitStack() as cleanup:
        both = cleanup.enter_context(local_nodes("n1", "n2", copies=1))
        roads = {one.name: Road() for one in both}
        services = {}
        for number, one in enumerate(both):
            service = NodeAgentService(one.store, open_durable=roads[one.name].open, node_peers=one.node_peers)
            services[one.name] = cleanup.enter_context(contextlib.closing(service))
            one.store.claim(JOB, "incarnation")
            service.configure(JOB, durable_in(tmp_path))
            roads["n2"].may_go.clear()
            seal(one.store, 1, number, 2, durable=True)
        wait_until(lambda: "other parts" in state_of(services["n1"], 1).error)
        assert roads["n2"].waits.wait(LONG_S)
        services["n1"].drop_steps(JOB, [group_of(1)])
        roads["n2"].may_go.set()
        assert services["n2"].wait_durable(JOB, None, LONG_S).state == "skipped"
        wait_until(lambda: stored(tmp_path) == [], "nothing of it stays")
        assert services["n2"].list_steps(JOB, fresh=True).views == ()


def test_step_deleted_during_its_commit_is_removed(node, road, tmp_path, monkeypatch):
    commit, entered, may_end = DurableCatalog.commit, threading.Event(), threading.Event()

    def slowly(catalog, manifest, base):
        commit(catalog, manifest, base)
        entered.set()
        assert may_end.wait(LONG_S)

    monkeypatch.setattr(DurableCatalog, "commit", slowly)
    seal(node.store, 1, durable=True)
    assert entered.wait(LONG_S)
    node.store.versions.delete(JOB, [group_of(1)])  # like a drop on another node
    may_end.set()
    assert node.wait_durable(JOB, group_of(1), LONG_S).state == "skipped"
    wait_until(lambda: stored(tmp_path) == [], "it is taken back")


# -- other settings -----------------------------------------------------------------------------------------------


def test_upload_continues_in_its_store_while_settings_change(node, road, tmp_path):
    road.may_go.clear()
    seal(node.store, 1, durable=True)
    assert road.waits.wait(LONG_S)
    node.configure(JOB, durable_in(tmp_path, keep_last=3))
    assert road.closed == []
    assert road.cancelled == 0
    road.may_go.set()
    assert node.wait_durable(JOB, group_of(1), LONG_S).state == "done"
    wait_until(lambda: len(road.closed) == 1, "nobody uses it any more")


def test_upload_restarts_in_the_new_durable_tier(node, road, tmp_path):
    road.may_go.clear()
    for part in range(2):
        seal(node.store, 1, part, 2, durable=True)
    assert road.waits.wait(LONG_S)
    node.configure(JOB, durable_in(tmp_path / "new"))
    wait_until(lambda: road.cancelled)
    road.may_go.set()
    assert node.wait_durable(JOB, group_of(1), LONG_S).state == "done"
    assert [name for name in stored(tmp_path) if name.endswith(".manifest")] == []
    assert len([name for name in stored(tmp_path / "new") if name.endswith(".safetensors")]) == 2


def test_upload_to_another_store_does_not_count(node, road, tmp_path):
    seal(node.store, 1, 0, 2, durable=True)
    wait_until(lambda: "other parts" in state_of(node, 1).error)
    node.configure(JOB, durable_in(tmp_path / "new"))
    seal(node.store, 1, 1, 2, durable=True)
    assert node.wait_durable(JOB, group_of(1), LONG_S).state == "done"
    assert len([name for name in stored(tmp_path / "new") if name.endswith(".safetensors")]) == 2


@pytest.mark.parametrize("error", [RuntimeError("a defect"), RequestError("refused")])
def test_failed_deletion_of_old_steps_does_not_end_the_drain(node, monkeypatch, error):
    def refuse(*_):
        raise error

    monkeypatch.setattr(DurableRetention, "exchange_marks", refuse)
    for step in (1, 2):
        seal(node.store, step, durable=True)
        assert node.wait_durable(JOB, group_of(step), LONG_S).state == "done"
