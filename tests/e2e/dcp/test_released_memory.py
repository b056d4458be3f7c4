"""A restore reports when and why memory was released, and returns -1 only for a job without saves."""

import logging
import re
import signal
import time

import pytest
import torch

from peerstore.client.store_client import Client
from peerstore.transport.unix import connect_to_agent
from tests.support.agents import stop_agent
from tests.support.bits import assert_same_bits, zeros_like_state
from tieredckpt import Checkpointer, TieredReader
from tieredckpt.cli import main
from tieredckpt.errors import CheckpointLostError
from tieredckpt.session.session import close_sessions

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "tiered://short"


@pytest.fixture
def forgetful(agent_dir, monkeypatch):
    """Use an agent that expires a job one second after its last process has left."""
    monkeypatch.setenv("TIEREDCKPT_AGENT_JOB_TTL_S", "1")
    return agent_dir


def state_at(step):
    return {"w": torch.full((1000,), float(step)), "step": step}


def leave_and_be_forgotten(directory):
    close_sessions()
    client = Client(lambda: connect_to_agent(directory / "agent.sock"), retry_s=5.0)
    try:
        deadline = time.monotonic() + 60
        while client.status().jobs:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        client.close()


def test_restore_reports_when_and_why_memory_expired(forgetful, capsys):
    with Checkpointer(JOB) as ckpt:
        assert ckpt.restore(state_at(0)) == -1
        for step in (3, 4):
            ckpt.save(state_at(step), step).wait()
    leave_and_be_forgotten(forgetful)
    said = r"up to step 4, were deleted at 20[0-9-]+ [0-9:]+Z because no process had used it for 0\.0 hours"
    with Checkpointer(JOB) as ckpt, pytest.raises(CheckpointLostError, match=said):
        ckpt.restore(state_at(0))
    close_sessions()
    stop_agent(forgetful, signal.SIGKILL)
    with Checkpointer(JOB) as ckpt:  # a new agent has the record, too
        with pytest.raises(CheckpointLostError, match=said):
            ckpt.restore(state_at(0))
        with pytest.raises(CheckpointLostError, match=said):
            ckpt.restore(state_at(0), 4)
    assert main(["ls", "short"]) == 4
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))
    with Checkpointer("tiered://another") as ckpt:
        assert ckpt.restore(state_at(0)) == -1
    with Checkpointer(JOB) as ckpt:  # the caller allows it
        assert ckpt.restore(state_at(0), on_lost="start_fresh") == -1
        ckpt.save(state_at(1), 1).wait()
        found = zeros_like_state(state_at(1))
        assert ckpt.restore(found) == 1
        assert_same_bits(state_at(1), found)


def test_restore_of_an_older_durable_step_reports_the_expired_ones(forgetful, tmp_path, caplog):
    with Checkpointer(JOB, durable=f"file://{tmp_path}/store", durable_every=2) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step).wait("durable")
    leave_and_be_forgotten(forgetful)
    with Checkpointer(JOB, durable=f"file://{tmp_path}/store", durable_every=2) as ckpt:
        assert ckpt.restore(state_at(0)) == 2
        assert "up to step 3, were deleted at" in str(ckpt.last_restore.refused)
        assert "up to step 3, were deleted at" in caplog.text
        ckpt.save(state_at(3), 3).wait()
        assert ckpt.restore(state_at(0)) == 3
        assert not ckpt.last_restore.refused


def test_job_without_a_durable_tier_warns_at_its_start_and_end(agent_dir, caplog, tmp_path):
    caplog.set_level(logging.WARNING)
    with Checkpointer(JOB) as ckpt:
        ckpt.restore(state_at(0))
        assert "tiered://short has no durable tier" not in caplog.text
        (said,) = [one for one in caplog.messages if "no durable tier" in one]
        assert "24 hours after the job's last process" in said
        ckpt.save(state_at(7), 7).wait()
    close_sessions()
    assert len([one for one in caplog.messages if "no durable tier" in one]) == 1, "once"
    (said,) = [one for one in caplog.messages if "is in memory only, and forgotten at" in one]
    assert "step 7" in said
    caplog.clear()
    with Checkpointer("tiered://safe", durable=f"file://{tmp_path}/store") as ckpt:
        ckpt.restore(state_at(0))
        ckpt.save(state_at(7), 7).wait()
    close_sessions()
    assert "memory only" not in caplog.text


def test_reader_is_not_warned(agent_dir, caplog):
    with Checkpointer(JOB) as ckpt:
        ckpt.save(state_at(7), 7).wait()
    close_sessions()
    caplog.clear()
    TieredReader(JOB).read_metadata()
    close_sessions()
    assert "memory only" not in caplog.text
