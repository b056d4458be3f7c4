"""Uses that ``Checkpointer`` refuses before its first save."""

from __future__ import annotations

import pytest
import torch

from tieredckpt import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.errors import DurableRefusedError, TierUnavailableError, UsageError
from tieredckpt.session.durable_tier import DurableTier
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import AgentSettings, Settings
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


def test_first_save_without_a_restore_refuses_a_step_behind_an_earlier_run(node, state):
    with Checkpointer("tiered://job") as ckpt:
        for step in range(10):
            ckpt.save(state, step).wait()
    close_sessions()
    with Checkpointer("tiered://job") as ckpt:
        for step in range(2):
            with pytest.raises(UsageError, match="behind step 9 of an earlier run"):
                ckpt.save(state, step)
        assert ckpt.restore(state) == 9
        assert ckpt.save(state, 10).wait() is SaveState.SEALED


def test_unavailable_durable_tier_does_not_hide_steps_of_an_earlier_run(node, state, monkeypatch):
    with Checkpointer("tiered://job") as ckpt:
        ckpt.save(state, 9).wait()
    close_sessions()

    def is_away(tier, newest_step):
        raise TierUnavailableError("the store is away")

    monkeypatch.setattr(DurableTier, "check", is_away)
    with Checkpointer("tiered://job") as ckpt, pytest.raises(UsageError, match="behind step 9 of an earlier run"):
        ckpt.save(state, 0)


def test_first_save_without_a_restore_refuses_a_step_behind_a_durable_one(state, tmp_path):
    with memory_node(), Checkpointer("tiered://job", durable=str(tmp_path), durable_every=1) as ckpt:
        ckpt.save(state, 9).wait("durable")
    with (
        memory_node(),
        Checkpointer("tiered://job", durable=str(tmp_path)) as ckpt,
        pytest.raises(UsageError, match="use another job name"),
    ):
        ckpt.save(state, 0)


def test_first_save_without_a_restore_after_an_earlier_run_warns(node, state, caplog):
    with Checkpointer("tiered://job") as ckpt:
        ckpt.save(state, 4).wait()
    assert "nothing was restored" not in caplog.text
    close_sessions()
    with Checkpointer("tiered://job") as ckpt:
        ckpt.save(state, 5).wait()
        assert "has step 4 of an earlier run, and nothing was restored before the save of step 5" in caplog.text
        assert ckpt.restore(state) == 5
    close_sessions()
    caplog.clear()
    with Checkpointer("tiered://job") as ckpt:
        assert ckpt.restore(state) == 5
        ckpt.save(state, 6).wait()
    assert "nothing was restored" not in caplog.text


def test_save_behind_the_newest_step_of_this_run_fails(node, state):
    with Checkpointer("tiered://job") as ckpt:
        for step in (5, 6):
            ckpt.save(state, step).wait()
        for step in (3, 4):
            saved = ckpt.save(state, step)
            assert saved.state is SaveState.FAILED
            assert isinstance(saved.error, UsageError)
            assert "behind step 6, which this run saved" in str(saved.error)
        assert ckpt.save(state, 7).wait() is SaveState.SEALED
        assert ckpt.restore(state) == 7


def test_save_behind_an_earlier_step_that_was_restored(node, state):
    with Checkpointer("tiered://job", settings=Settings(agent=AgentSettings(slots_per_rank=4))) as ckpt:
        for step in range(3):
            ckpt.save(state, step, keep=True).wait()
        assert ckpt.restore(state, 0) == 0
        assert ckpt.save(state, 1).wait() is SaveState.SEALED
        assert ckpt.restore(state) == 1
