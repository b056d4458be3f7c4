"""An agent's answers right after its start, when what another one left is still being verified."""

import threading

import pytest

from peerstore.arena import TmpfsArena
from peerstore.owners import myself
from peerstore.reading import Reading
from peerstore.records import ShardKey
from peerstore.settings import StoreSettings
from peerstore.store import NodeStore
from tieredckpt.agent.service import NodeService
from tieredckpt.manifest import ShardMeta, encode_meta
from tieredckpt.settings import DurableSettings

SIZE = 1 << 20


@pytest.fixture
def arena(tmp_path):
    return TmpfsArena(tmp_path / "arena")


def leave_a_durable_step(arena):
    store = NodeStore(arena, StoreSettings(budget="64MiB"))
    try:
        store.claim("job", "incarnation")
        lease = store.lease(ShardKey("job", 3, 1, "incarnation", 0, 0), SIZE, 1, owner=myself())
        meta = ShardMeta(layout="", item_sizes=(), table="", durable=True, saved_ns=0)
        store.seal(lease.id, SIZE, encode_meta(meta))
    finally:
        store.close()


def test_a_step_that_is_still_being_verified_is_not_nothing_to_wait_for(arena, monkeypatch, tmp_path):
    leave_a_durable_step(arena)
    may_verify, real = threading.Event(), Reading.damaged_chunks

    def slow(self, *args):
        assert may_verify.wait(10)
        return real(self, *args)

    monkeypatch.setattr(Reading, "damaged_chunks", slow)
    store = NodeStore(arena, StoreSettings(budget="64MiB"))
    service = NodeService(store)
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
        assert answers[0].group.version == 3
    finally:
        service.close()
        store.close()
