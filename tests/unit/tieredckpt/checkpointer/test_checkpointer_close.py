"""Reports of failed uploads and failed saves by ``Checkpointer``."""

from __future__ import annotations

import logging

import pytest
import torch

from tieredckpt import Checkpointer
from tieredckpt.testing import memory_node


@pytest.fixture
def state():
    return {"weight": torch.arange(12.0)}


def reports(caplog, text):
    return [one.getMessage() for one in caplog.records if text in one.getMessage() and "checkpointer" in one.name]


def test_failed_uploads_are_reported_at_the_first_one_and_at_the_end(state, tmp_path, caplog):
    folder = tmp_path / "durable"
    with memory_node() as node, Checkpointer("tiered://job", durable=str(folder), durable_every=1) as ckpt:
        ckpt.save(state, 0).wait()
        assert ckpt.wait("durable")
        folder.rename(tmp_path / "away")
        folder.write_bytes(b"")  # nothing can be created below it now
        for step in range(1, 5):
            ckpt.save(state, step).wait()
            ckpt.wait("durable")
        assert "step 4 does not become durable" in node.protection("job").upload_problem
    assert len(reports(caplog, "Training continues")) == 1
    (said,) = reports(caplog, "steps were uploaded to")
    assert said.startswith(f"job: 1 of the last 5 steps were uploaded to {folder}. Step 4: uploading")


def test_durable_steps_are_not_reported(state, tmp_path, caplog):
    with memory_node(), Checkpointer("tiered://job", durable=str(tmp_path / "durable"), durable_every=1) as ckpt:
        for step in range(3):
            ckpt.save(state, step).wait("durable")
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


def test_run_without_a_successful_save_is_reported_at_the_end(caplog):
    with memory_node(budget="1MiB"), Checkpointer("tiered://job") as ckpt:
        for step in range(3):
            assert not ckpt.save({"weight": torch.zeros(1 << 20)}, step).ok
    (said,) = reports(caplog, "none of the 3 saves of rank 0 succeeded")
    assert "the memory budget is 1.0 MiB" in said
    assert "TIEREDCKPT_AGENT_BUDGET" in said


def test_run_with_a_successful_save_is_not_reported_at_the_end(state, caplog):
    with memory_node(budget="1MiB"), Checkpointer("tiered://job") as ckpt:
        ckpt.save(state, 0).wait()
        assert not ckpt.save({"weight": torch.zeros(1 << 20)}, 1).ok
    assert not reports(caplog, "saves of rank 0 succeeded")
