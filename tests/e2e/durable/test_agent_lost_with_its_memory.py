"""A process finds durable steps after its agent was lost with its memory."""

from __future__ import annotations

import shutil
import signal

import pytest
import torch
import torch.distributed.checkpoint

import tieredckpt
from tests.support.agents import stop_agent
from tests.support.bits import assert_same_bits
from tieredckpt import Checkpointer
from tieredckpt.session.session import close_sessions

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]

JOB = "memory-lost"


@pytest.fixture
def lose_agent(agent_dir, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(agent_dir))

    def lose():
        stop_agent(agent_dir, signal.SIGKILL)
        shutil.rmtree(agent_dir)

    yield lose
    close_sessions()
    stop_agent(agent_dir)


def values(step):
    return {"w": torch.full((5,), float(step))}


def test_next_checkpointer_of_the_process_restores_the_durable_step(lose_agent, tmp_path):
    with Checkpointer(JOB, durable=str(tmp_path)) as ckpt:
        ckpt.save(values(3), 3, durable=True).wait("durable")
    lose_agent()
    state = values(0)
    with Checkpointer(JOB, durable=str(tmp_path)) as ckpt:
        assert ckpt.restore(state) == 3
        assert_same_bits(state, values(3))


def test_open_checkpointer_restores_and_continues_after_the_durable_step(lose_agent, tmp_path):
    with Checkpointer(JOB, durable=str(tmp_path)) as ckpt:
        ckpt.save(values(3), 3, durable=True).wait("durable")
        epoch = ckpt.session.newest_known_epoch()
        lose_agent()
        assert [step.step for step in ckpt.steps()] == [3]
        lose_agent()
        state = values(0)
        assert ckpt.restore(state) == 3
        assert_same_bits(state, values(3))
        lose_agent()
        ckpt.save(values(4), 4).wait()
        assert ckpt.session.newest_known_epoch() >= epoch
        assert [step.step for step in ckpt.steps()] == [3, 4]


def test_load_by_url_finds_the_durable_step(lose_agent, tmp_path, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", str(tmp_path))
    with Checkpointer(JOB) as ckpt:
        ckpt.save(values(3), 3, durable=True).wait("durable")
    lose_agent()
    assert_same_bits(tieredckpt.load(f"tiered://{JOB}"), values(3))
    lose_agent()
    state = values(0)
    with tieredckpt.enable_urls():
        torch.distributed.checkpoint.load(state, checkpoint_id=f"tiered://{JOB}")
    assert_same_bits(state, values(3))
