"""``on_durable`` is called for each durable step in order, and its errors stop nothing."""

import threading
from pathlib import Path

import pytest

from tests.support.jobs import state_at
from tieredckpt import Checkpointer, DurableStep
from tieredckpt.checkpointer import durable_callback

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
JOB = "tiered://told"


def train(folder, on_durable, *, steps=5, wait=True):
    with Checkpointer(
        JOB, durable=f"file://{folder}", durable_every=2, on_durable=on_durable, on_sigterm="ignore"
    ) as ckpt:
        for step in range(steps):
            assert ckpt.save(state_at(step), step).error is None
            assert not wait or ckpt.wait("durable")


def files_of(step: DurableStep):
    return Path(step.url.removeprefix("file://"))


def test_durable_steps_are_reported_in_order_with_their_folder(agent_dir, tmp_path):
    seen = []
    train(tmp_path / "durable", seen.append)
    assert [(one.job, one.step) for one in seen] == [("told", 0), ("told", 2), ("told", 4)]
    for one in seen:
        assert [path.name for path in files_of(one).glob("*.safetensors")] == ["000000.safetensors"]


def test_error_of_the_callback_is_logged_and_stops_nothing(agent_dir, tmp_path, caplog):
    seen = []

    def fail_once(step):
        seen.append(step.step)
        if step.step == 0:
            raise ZeroDivisionError("the tracker is away")

    train(tmp_path / "durable", fail_once)
    assert seen == [0, 2, 4]
    assert "told: on_durable raised an error for step 0" in caplog.text
    assert "the tracker is away" in caplog.text


def test_step_whose_upload_has_not_ended_at_close_is_a_warning(agent_dir, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_BANDWIDTH", "10KiB")
    seen = []
    train(tmp_path / "durable", seen.append, steps=1, wait=False)
    assert not seen
    assert "on_durable was not called for step 0" in caplog.text


def test_callback_that_does_not_return_does_not_block_close(agent_dir, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(durable_callback, "_CLOSE_S", 0.1)
    returned = threading.Event()
    train(tmp_path / "durable", lambda _: returned.wait(), steps=1)
    returned.set()
    assert "told: on_durable has not returned within" in caplog.text


def test_plain_checkpoint_of_a_disabled_package_is_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_ENABLED", "0")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", f"file://{tmp_path}/durable")
    seen = []
    train(tmp_path / "durable", seen.append, steps=3)
    assert [one.step for one in seen] == [0, 2]
    assert all((files_of(one) / ".metadata").exists() for one in seen)
