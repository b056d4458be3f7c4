"""What a step has by name: an agent makes the list once, for all ranks of its node and however often they ask."""

import pytest

from peerstore.arena import TmpfsArena
from peerstore.owners import myself
from peerstore.records import Group, ShardKey
from peerstore.settings import StoreSettings
from peerstore.store import NodeStore
from tieredckpt.agent import service, step_map
from tieredckpt.agent.messages import LAYOUT, TABLE
from tieredckpt.agent.service import NodeService
from tieredckpt.boxes import Box
from tieredckpt.layout import TensorEntry, encode, lay_out
from tieredckpt.manifest import ShardMeta, StateTable, TableTensor, encode_meta, encode_table, pack

NAMES = [f"layer{number}.weight" for number in range(5)]
GROUP = Group(1, 3, 0, "incarnation")
TABLE_OF_ALL = StateTable(tuple(TableTensor(name, "float32", (4,)) for name in NAMES), (), described=True, split=True)


def seal(store, table):
    entries = [TensorEntry(name, "float32", (4,), Box((0,), (4,)), 4) for name in NAMES]
    layout = lay_out(entries, (), {name: tuple(name.split(".")) for name in NAMES})
    store.put_blob("job", LAYOUT + layout.digest, pack(encode(layout)))
    if table is not None:
        store.put_blob("job", TABLE + table.digest, pack(encode_table(table)))
    size = layout.size_bytes(())
    lease = store.lease(ShardKey("job", 3, 1, "incarnation", 0, 0), size, 1, owner=myself())
    store.seal(lease.id, size, encode_meta(ShardMeta(layout.digest, (), table=table.digest if table else "")))


@pytest.fixture
def store(tmp_path):
    store = NodeStore(TmpfsArena(tmp_path / "arena"), StoreSettings(budget="64MiB"))
    store.claim("job", "incarnation")
    yield store
    store.close()


@pytest.mark.parametrize("table", [TABLE_OF_ALL, None], ids=["table", "layouts"])
def test_eight_ranks_that_ask_what_there_is_have_it_made_once(store, table, monkeypatch):
    seal(store, table)
    made = {"decoded": [], "packed": []}
    decode, packed = service.decode_table, step_map.pack
    monkeypatch.setattr(service, "decode_table", lambda data: made["decoded"].append(data) or decode(data))
    monkeypatch.setattr(step_map, "pack", lambda data: made["packed"].append(data) or packed(data))
    agent = NodeService(store)
    try:
        pages = [agent.names_page("job", GROUP, "", 0) for _ in range(8)]
        found = [agent.pieces("job", GROUP, rank, [(NAMES[rank], (0,), (4,))], ()) for rank in range(len(NAMES))]
    finally:
        agent.close()
    assert {page.digest for page in pages} == {pages[0].digest}
    assert agent.names("job", GROUP).names == NAMES
    assert [len(said.pieces) for said in found] == [1] * len(NAMES)
    assert len(made["packed"]) == 1
    assert len(made["decoded"]) == (table is not None)
