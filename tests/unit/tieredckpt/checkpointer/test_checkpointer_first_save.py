"""What ``Checkpointer`` refuses before its first save."""

from __future__ import annotations

import pytest
import torch

from tieredckpt import Checkpointer
from tieredckpt.errors import DurableRefusedError, UsageError
from tieredckpt.testing import memory_node


@pytest.fixture
def node():
    with memory_node() as one:
        yield one


@pytest.fixture
def state():
    return {"weight": torch.arange(12.0)}


def test_restore_refuses_a_durable_directory_that_cannot_be_created(node, state):
    with (
        Checkpointer("tiered://job", durable="/proc/x") as ckpt,
        pytest.raises(DurableRefusedError, match=r"No step of job 'job' can become durable in durable\.url /proc/x"),
    ):
        ckpt.restore(state)


@pytest.mark.parametrize("directory", ["/proc/x", "/proc"])
def test_first_save_refuses_a_durable_directory_that_cannot_be_written(node, state, directory):
    with Checkpointer("tiered://job", durable=directory, durable_every=100) as ckpt:
        for step in range(2):
            with pytest.raises(DurableRefusedError, match="can become durable"):
                ckpt.save(state, step)
        with pytest.raises(DurableRefusedError, match="can become durable"):
            ckpt.seal(state, 2)
    assert node.store.list_shards("job") == []


def test_restore_reads_a_durable_directory_that_cannot_be_written(node, state):
    with Checkpointer("tiered://job", durable="/proc") as ckpt:
        assert ckpt.restore(state) == -1


def test_refused_durable_url_is_refused_again(node, state):
    with Checkpointer("tiered://job") as ckpt:
        assert ckpt.restore(state) == -1
    with Checkpointer("tiered://job", durable="gopher://x/y") as ckpt:
        for _ in range(2):
            with pytest.raises(UsageError, match="gopher"):
                ckpt.restore(state)
    with Checkpointer("tiered://job") as ckpt:
        assert ckpt.restore(state) == -1
