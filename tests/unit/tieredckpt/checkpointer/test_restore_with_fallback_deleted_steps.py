"""A restore whose steps are deleted one after the other while it reads them."""

from __future__ import annotations

import shutil

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.jobs import state_at
from tieredckpt import CheckpointDeletedError, Checkpointer
from tieredckpt.durable.filesystem_backends import DirectoryBackend
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

JOB = "tiered://fading"
STEPS = 12


@pytest.fixture
def durable(tmp_path):
    """A store with the steps of a job whose memory copies are gone."""
    url = f"file://{tmp_path}"
    with memory_node(), Checkpointer(JOB, durable=url, on_sigterm="ignore") as ckpt:
        for step in range(STEPS):
            assert ckpt.save(state_at(step), step).wait("durable")
    return url


@pytest.fixture
def delete_steps_on_read(tmp_path, monkeypatch):
    """Delete each of the first ``count`` steps whose shards are read, just before the read."""

    def start(count):
        deleted = set()
        get_range = DirectoryBackend.get_range

        def delete_and_read(backend, name, first, last):
            job, kind, step = name.split("/")[:3]
            if kind == "steps" and (step in deleted or len(deleted) < count):
                deleted.add(step)
                for manifest in (tmp_path / job / "manifests").glob(f"{step}.*"):
                    manifest.unlink()
                shutil.rmtree(tmp_path / job / kind / step, ignore_errors=True)
            return get_range(backend, name, first, last)

        monkeypatch.setattr(DirectoryBackend, "get_range", delete_and_read)

    return start


def test_restore_continues_with_an_older_step_after_deletions(durable, delete_steps_on_read):
    found = zeros_like_state(state_at(0))
    delete_steps_on_read(3)
    with memory_node(), Checkpointer(JOB, durable=durable, on_sigterm="ignore") as ckpt:
        assert ckpt.restore(found) == STEPS - 4
    assert_same_bits(state_at(STEPS - 4), found)


def test_exhausted_attempts_name_the_last_failure_and_its_cause(durable, delete_steps_on_read):
    delete_steps_on_read(STEPS)
    with (
        memory_node(),
        Checkpointer(JOB, durable=durable, on_sigterm="ignore") as ckpt,
        pytest.raises(CheckpointDeletedError, match=r"in 8 attempts.* step 4 of fading was deleted") as caught,
    ):
        ckpt.restore(zeros_like_state(state_at(0)))
    assert isinstance(caught.value.__cause__, CheckpointException)
