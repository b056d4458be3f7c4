"""A step's names: an agent builds the list once for all ranks and requests of its node."""

import pytest

from peerstore.daemon_process import current_process
from peerstore.settings import StoreSettings
from peerstore.shard_records import ShardKey, VersionId
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from tieredckpt.agent import node_step_reader, step_locator
from tieredckpt.agent.agent_api import LAYOUT_BLOB_PREFIX, TABLE_BLOB_PREFIX
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.format.manifest import ShardMeta, StateTable, TableTensor, encode_meta, encode_table, pack_blob
from tieredckpt.format.shard_layout import TensorEntry, build_layout, encode_layout
from tieredckpt.format.slice_boxes import Box

NAMES = [f"layer{number}.weight" for number in range(5)]
GROUP = VersionId(1, 3, 0, "incarnation")
TABLE_OF_ALL = StateTable(tuple(TableTensor(name, "float32", (4,)) for name in NAMES), (), described=True, split=True)


def seal(store, table):
    entries = [TensorEntry(name, "float32", (4,), Box((0,), (4,)), 4) for name in NAMES]
    layout = build_layout(entries, (), {name: tuple(name.split(".")) for name in NAMES})
    store.blobs.put("job", LAYOUT_BLOB_PREFIX + layout.digest, pack_blob(encode_layout(layout)))
    if table is not None:
        store.blobs.put("job", TABLE_BLOB_PREFIX + table.digest, pack_blob(encode_table(table)))
    size = layout.size_bytes(())
    lease = store.lease(ShardKey("job", 3, 1, "incarnation", 0, 0), size, 1, owner=current_process())
    store.seal(lease.id, size, encode_meta(ShardMeta(layout.digest, (), table=table.digest if table else "")))


@pytest.fixture
def store(tmp_path):
    store = NodeStore(TmpfsArena(tmp_path / "arena"), StoreSettings(budget="64MiB"))
    store.claim("job", "incarnation")
    yield store
    store.close()


@pytest.mark.parametrize("table", [TABLE_OF_ALL, None], ids=["table", "layouts"])
def test_step_names_are_built_once_for_eight_ranks(store, table, monkeypatch):
    seal(store, table)
    made = {"decoded": [], "packed": []}
    decode, packed = node_step_reader.decode_table, step_locator.pack_blob
    monkeypatch.setattr(node_step_reader, "decode_table", lambda data: made["decoded"].append(data) or decode(data))
    monkeypatch.setattr(step_locator, "pack_blob", lambda data: made["packed"].append(data) or packed(data))
    agent = NodeAgentService(store)
    try:
        pages = [agent.steps.names_page("job", GROUP, "", 0) for _ in range(8)]
        found = [agent.steps.pieces("job", GROUP, rank, [(NAMES[rank], (0,), (4,))], ()) for rank in range(len(NAMES))]
    finally:
        agent.close()
    assert {page.digest for page in pages} == {pages[0].digest}
    assert agent.steps.names("job", GROUP).names == NAMES
    assert [len(said.pieces) for said in found] == [1] * len(NAMES)
    assert len(made["packed"]) == 1
    assert len(made["decoded"]) == (table is not None)
