"""Accelerate's state as steps: killed and started again, a training continues bit for bit."""

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install tieredckpt[accelerate]")

from tests.support.accelerate_training import STEPS, URL, train
from tests.support.agents import agent_directory
from tests.support.stores import flip_byte, pinned_file
from tieredckpt import Checkpointer

pytestmark = pytest.mark.e2e


def run_ranks(zygote, size, *args, environ=None):
    return zygote.run_ranks(size, train, *args, environ=environ)


@pytest.fixture(scope="module", params=[1, 2])
def undisturbed(request, zygote):
    with agent_directory() as directory:
        environ = {"TIEREDCKPT_AGENT_DIRECTORY": str(directory), "TIEREDCKPT_AGENT_BUDGET": "1GiB"}
        return run_ranks(zygote, request.param, environ=dict.fromkeys(range(request.param), environ))


def directory_of_job():
    return Path(f"/dev/shm/tieredckpt-accelerate-{os.getuid()}-accelerate")


def flip_byte_of_step(step):
    with Checkpointer(URL) as ckpt:
        store = ckpt.session.agent.store
        for shard in store.list_shards("accelerate"):
            if shard.key.version == step:
                pin = store.pin(shard.key)
                flip_byte(pinned_file(pin), pin.record.size_bytes // 2)
                store.unpin(pin.id)


def losses(run):
    return {line for line in run.lines if line.startswith("loss ")}


def test_killed_training_continues_bit_equal(agent_dir, zygote, undisturbed):
    size = len(undisturbed)
    first = run_ranks(zygote, size, dict.fromkeys(range(size), 4))
    assert {one.status for one in first} == {-signal.SIGKILL}
    second = run_ranks(zygote, size)
    for before, after, whole in zip(first, second, undisturbed, strict=True):
        assert after.lines[0] == "first 5"
        assert losses(before) | losses(after) == losses(whole)
        assert len(losses(whole)) == STEPS
        assert after.result == whole.result
    assert not directory_of_job().exists()


def test_damaged_step_is_skipped_for_an_older_one(agent_dir, zygote, undisturbed):
    size = len(undisturbed)
    run_ranks(zygote, size, dict.fromkeys(range(size), 4))
    flip_byte_of_step(4)
    second = run_ranks(zygote, size)
    assert second[0].lines[0] == "first 4"
    assert [one.result for one in second] == [one.result for one in undisturbed]


def test_accelerates_own_loader_reads_the_directory(agent_dir, zygote, tmp_path):
    directory_of_job().mkdir()
    (directory_of_job() / "left by a killed process").write_text("")
    run_ranks(zygote, 1)
    with Checkpointer(URL) as ckpt:
        assert ckpt.restore_directory(tmp_path / "state") == STEPS - 1
    names = {file.name for file in (tmp_path / "state").iterdir()}
    assert names == {"model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"}
