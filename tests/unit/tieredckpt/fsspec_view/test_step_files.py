"""The cost of opening all files of a step."""

import io
import os
import time

import pytest
import torch

from peerstore.daemon_process import current_process
from peerstore.shard_records import ShardKey
from tieredckpt.agent.agent_api import LAYOUT_BLOB_PREFIX
from tieredckpt.format.manifest import ShardMeta, encode_meta, pack_blob
from tieredckpt.format.shard_layout import OBJECT_ITEM, ItemEntry, Layout, encode_layout
from tieredckpt.fsspec_view.step_files import _FRESH_S, JobStepFiles
from tieredckpt.testing import memory_node

PARTS = 20


@pytest.fixture
def node():
    with memory_node() as one:
        yield one


def archived(value):
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def save(store, step):
    """Save a step of many parts with one object in each."""
    store.claim("job", "incarnation")
    for part in range(PARTS):
        layout, data = Layout((), (ItemEntry(f"object{part}", OBJECT_ITEM),), {}), archived({"part": part})
        sizes = (len(data),)
        total = layout.size_bytes(sizes)
        lease = store.lease(ShardKey("job", step, 1, "incarnation", 0, part), total, PARTS, owner=current_process())
        fd = store.open_slot(lease.slot)
        os.pwrite(fd, layout.header(sizes) + data, 0)
        os.close(fd)
        store.blobs.put("job", LAYOUT_BLOB_PREFIX + layout.digest, pack_blob(encode_layout(layout)))
        store.seal(
            lease.id, total, encode_meta(ShardMeta(layout=layout.digest, item_sizes=sizes, table="", saved_ns=1))
        )


def test_step_is_described_once_for_all_its_files(node, monkeypatch):
    save(node.store, 1)
    steps, describe, described = JobStepFiles("job"), node.steps.describe, []
    monkeypatch.setattr(node.steps, "describe", lambda *what: described.append(what) or describe(*what))
    began = time.monotonic()
    with steps.open(1, ".metadata") as file:
        assert file.read()
    for part in range(PARTS):
        with steps.open(1, f"__{part}_0.distcp") as file:
            assert torch.load(file, weights_only=True) == {"part": part}
    assert 1 <= len(described) <= 1 + (time.monotonic() - began) / _FRESH_S
    with steps.open(1, ".metadata") as file:
        assert file.read()
    assert len(described) >= 2, "a load begins with what there is now"
