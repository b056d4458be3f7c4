"""A successful job releases its memory only if its newest step is in the durable tier."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from elastic.supervisor.memory_tier import MemoryTierProcess
from tests.support.agents import agent_directory, agent_pid, wait_process_ended
from tests.support.local_nodes import wait_until
from tieredckpt import Checkpointer
from tieredckpt.agent.agent_client import NodeAgentClient
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import settings_from_mapping

pytestmark = pytest.mark.e2e
JOB = "tiered://given-back"


@contextlib.contextmanager
def node():
    """Yield a supervisor's node agent and the settings of a rank on that node."""
    with agent_directory() as directory:
        environ = {
            "TIEREDCKPT_AGENT_DIRECTORY": str(directory),
            "TIEREDCKPT_AGENT_BUDGET": "64MiB",
            "TIEREDCKPT_AGENT_LINGER_S": "3600",
        }
        with contextlib.closing(MemoryTierProcess(environ, directory.parent)) as agent:
            agent.start()
            yield agent, directory, settings_from_mapping({"agent": {"directory": str(directory), "budget": "64MiB"}})


def state_of(step):
    return {"w": torch.full((1000,), float(step)), "step": step}


def train(settings, url, steps, *, durable, **last):
    """Run ``steps`` in a process and upload the steps in ``durable``."""
    with Checkpointer(JOB, durable=url, durable_every=10**6, settings=settings) as ckpt:
        assert ckpt.restore(state_of(0)) == steps.start - 1
        for step in steps:
            saved = ckpt.save(state_of(step), step, durable=step in durable, **(last if step == steps[-1] else {}))
            saved.wait("durable" if step in durable else "memory", timeout_s=60)
    close_sessions()


def slot_files(directory):
    return list((directory / "slots").iterdir())


def end_job(agent, directory):
    """End the successful job and return the slot files that remain in memory, which the agent serves."""
    pid = agent_pid(directory)
    agent.shut_down()
    if slot_files(directory):
        assert agent.kept_directory == directory
        assert agent_pid(directory) == pid
    else:
        wait_process_ended(pid)
    return slot_files(directory)


def test_durable_steps_are_released(tmp_path):
    with node() as (agent, directory, settings):
        train(settings, str(tmp_path), range(4), durable={3})
        assert slot_files(directory)
        assert end_job(agent, directory) == []


def test_memory_of_an_external_agent_is_released_and_the_agent_stays(tmp_path):
    with node() as (first, directory, settings), contextlib.closing(MemoryTierProcess(first._environ)) as agent:
        agent.start()
        train(settings, str(tmp_path), range(4), durable={3})
        agent.shut_down()
        with contextlib.closing(NodeAgentClient(settings, "")) as asked:
            assert asked.store.status().arena.sealed_bytes == 0
        assert agent_pid(directory) is not None


def test_memory_of_an_earlier_supervisor_is_released(tmp_path):
    """The first supervisor was killed, and nothing was saved under its successor."""
    with node() as (killed, directory, settings):
        train(settings, str(tmp_path), range(4), durable={3})
        with contextlib.closing(MemoryTierProcess(killed._environ, directory.parent)) as agent:
            agent.start()
            assert end_job(agent, directory) == []


def test_step_held_only_in_memory_is_kept(tmp_path, caplog):
    with node() as (agent, directory, settings):
        train(settings, str(tmp_path), range(5), durable={3})
        assert end_job(agent, directory)
    assert f"the checkpoints of given-back remain in {directory}: step 4 is not in the durable tier" in caplog.text


def test_memory_is_kept_without_a_durable_tier():
    with node() as (agent, directory, settings):
        with Checkpointer(JOB, settings=settings) as ckpt:
            ckpt.save(state_of(0), 0).wait()
        close_sessions()
        assert end_job(agent, directory)


def test_pinned_step_is_kept(tmp_path, caplog):
    with node() as (agent, directory, settings):
        train(settings, str(tmp_path), range(4), durable={3}, keep=True)
        assert end_job(agent, directory)
    assert "pinned" in caplog.text


def test_unreachable_durable_tier_keeps_the_memory(tmp_path):
    folder = tmp_path / "durable"
    with node() as (agent, directory, settings):
        train(settings, str(folder), range(4), durable={3})
        folder.rename(tmp_path / "away")
        folder.touch()
        assert end_job(agent, directory)


def test_pending_upload_is_awaited(tmp_path, monkeypatch):
    with node() as (agent, directory, settings):
        with Checkpointer(JOB, durable=str(tmp_path), durable_every=1, settings=settings) as ckpt:
            ckpt.save(state_of(0), 0)
        close_sessions()
        assert end_job(agent, directory) == []
    assert list(tmp_path.rglob("*"))


def test_restarted_job_keeps_its_memory(tmp_path):
    """The job is running again while the agent waits for uploads, and it saves a newer step."""
    with node() as (agent, directory, settings):
        train(settings, str(tmp_path), range(4), durable={3})
        with Checkpointer(JOB, durable=str(tmp_path), durable_every=10**6, settings=settings) as ckpt:
            assert ckpt.restore(state_of(0)) == 3
            ending = threading.Thread(target=agent.shut_down)
            ending.start()
            ckpt.save(state_of(4), 4).wait()
            ending.join()
            pid = agent_pid(directory)
            assert pid is not None, "the agent is still in use"
            assert ckpt.save(state_of(5), 5).wait().name == "SEALED"
        close_sessions()
        wait_until(lambda: slot_files(directory), "the memory is kept")
