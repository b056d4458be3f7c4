"""A job that expires while a process trains it: the next save is as complete as the first."""

import pytest
import torch

from tieredckpt import Checkpointer
from tieredckpt.agent.agent_api import LAYOUT_BLOB_PREFIX, TABLE_BLOB_PREFIX
from tieredckpt.session.session import close_sessions
from tieredckpt.testing import memory_node


def state_at(step):
    return {"w": torch.full((1000,), float(step)), "n": step}


@pytest.fixture
def node():
    with memory_node() as one:
        yield one


def test_next_saved_step_is_readable(node):
    with Checkpointer("tiered://gone") as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(step), step).wait()
        node.store.versions.delete("gone")
        ckpt.save(state_at(3), 3).wait()
        ckpt.save(state_at(4), 4).wait()
        assert {name.rpartition(".")[0] + "." for name in node.store.blobs.list_names("gone")} >= {
            LAYOUT_BLOB_PREFIX,
            TABLE_BLOB_PREFIX,
        }
    close_sessions()
    with Checkpointer("tiered://gone") as ckpt:
        found = state_at(0)
        assert ckpt.restore(found) == 4
        assert torch.equal(found["w"], state_at(4)["w"])


def test_step_still_becomes_durable(node, tmp_path):
    with Checkpointer("tiered://gone", durable=f"file://{tmp_path}") as ckpt:
        ckpt.save(state_at(1), 1).wait("durable")
        node.store.versions.delete("gone")
        node.durable._forget("gone")  # like an agent that restarted
        ckpt.save(state_at(2), 2).wait("durable")
        assert [info.step for info in ckpt.steps() if "durable" in info.tiers] == [1, 2]


def test_shard_without_its_layout_is_not_sealed(node):
    with Checkpointer("tiered://gone") as ckpt:
        ckpt.save(state_at(1), 1).wait()
        for name in node.store.blobs.list_names("gone"):
            node.store.blobs.remove("gone", name)
        ckpt.save(state_at(2), 2).wait()
        pages = (LAYOUT_BLOB_PREFIX, TABLE_BLOB_PREFIX)
        assert len([name for name in node.store.blobs.list_names("gone") if name.startswith(pages)]) == 2
