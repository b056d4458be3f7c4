"""Accelerate's state as steps: killed and started again, a training continues bit for bit."""

import os
import signal
import zlib
from pathlib import Path

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install tieredckpt[accelerate]")

from tests.support.accelerate_training import STEPS, URL, train
from tests.support.agents import agent_directory
from tests.support.crashes import crash_environ
from tests.support.local_nodes import wait_until
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


def directory_of_job(agent_dir):
    return Path(f"/dev/shm/tieredckpt-accelerate-{os.getuid()}-accelerate-{zlib.crc32(bytes(agent_dir)):08x}")


def flip_byte_of_step(step):
    with Checkpointer(URL) as ckpt:
        store = ckpt.session.agent.store
        for shard in store.list_shards("accelerate"):
            if shard.key.version == step:
                pin = store.pin(shard.key)
                flip_byte(pinned_file(pin), pin.record.size_bytes // 2)
                store.unpin(pin.id)


def first_step(run):
    (line,) = (line for line in run.lines if line.startswith("first "))
    return int(line.split()[1])


def states(run):
    """Return the digest of the state after each step of a run."""
    words = [line.split() for line in run.lines if line.startswith("state ")]
    return {int(step): digest for _, step, digest in words}


def complete_steps(**options):
    with Checkpointer(URL, on_sigterm="ignore", **options) as ckpt:
        return {one.step: one.is_complete for one in ckpt.steps()}


def losses(run):
    return {line for line in run.lines if line.startswith("loss ")}


def test_killed_training_continues_bit_equal(agent_dir, zygote, undisturbed):
    size = len(undisturbed)
    first = run_ranks(zygote, size, dict.fromkeys(range(size), 4))
    assert {one.status for one in first} == {-signal.SIGKILL}
    second = run_ranks(zygote, size)
    for before, after, whole in zip(first, second, undisturbed, strict=True):
        assert first_step(after) == 5
        assert losses(before) | losses(after) == losses(whole)
        assert len(losses(whole)) == STEPS
        assert after.result == whole.result
    assert not directory_of_job(agent_dir).exists()


def test_damaged_step_is_skipped_for_an_older_one(agent_dir, zygote, undisturbed):
    size = len(undisturbed)
    run_ranks(zygote, size, dict.fromkeys(range(size), 4))
    flip_byte_of_step(4)
    second = run_ranks(zygote, size)
    assert first_step(second[0]) == 4
    assert [one.result for one in second] == [one.result for one in undisturbed]


def test_accelerates_own_loader_reads_the_directory(agent_dir, zygote, tmp_path):
    directory_of_job(agent_dir).mkdir()
    (directory_of_job(agent_dir) / "left by a killed process").write_text("")
    run_ranks(zygote, 1)
    with Checkpointer(URL) as ckpt:
        assert ckpt.restore_directory(tmp_path / "state") == STEPS - 1
    names = {file.name for file in (tmp_path / "state").iterdir()}
    assert names == {"model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"}


def test_torn_step_is_not_used(agent_dir, zygote):
    running = zygote.start_world(2, train, environ={1: crash_environ("stage.half:4")})
    try:
        assert running[1].wait().status == -signal.SIGKILL
        running[0].kill()
        torn = running[0].wait(may_fail=True)  # its collectives fail, if that is noticed before it is killed
    finally:
        for one in running:
            one.kill_if_alive()
    assert complete_steps()[2]
    assert not complete_steps().get(3)
    second = run_ranks(zygote, 2)
    assert {one.lines[0] for one in second} == {f"first 3 {states(torn)[2]}"}


def test_sigterm_of_one_rank_saves_the_same_step_on_all_ranks(agent_dir, zygote, undisturbed):
    size = len(undisturbed)
    running = zygote.start_world(size, train, None, {"every": 100}, {size - 1: 3})
    try:
        first = [running[-1].wait()]
        assert first[0].status == -signal.SIGTERM
        for one in running[:-1]:
            one.kill(signal.SIGTERM)  # as a launcher does
            first.append(one.wait(may_fail=True))
    finally:
        for one in running:
            one.kill_if_alive()
    (step,) = {max(states(one)) for one in first}
    assert 3 <= step < STEPS
    assert complete_steps()[step]
    second = run_ranks(zygote, size, None, {"every": 100})
    assert first_step(second[0]) == step + 1
    assert [one.result for one in second] == [one.result for one in undisturbed]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_restores_the_same_bits(agent_dir, zygote, before, after):
    first = run_ranks(zygote, before, dict.fromkeys(range(before), 4))
    second = run_ranks(zygote, after)
    assert all(f"first 5 {states(first[0])[4]}" in one.lines for one in second)
    (warning,) = (line for line in second[0].lines if line.startswith("warning "))
    assert f"step 4 was saved by another number of processes: {before}, now {after}." in warning
    assert "Random numbers do not continue" in warning


def test_retention_keeps_the_newest_durable_steps(agent_dir, zygote, tmp_path):
    options = {"durable": f"file://{tmp_path}", "durable_every": 2, "keep_last": 2}
    run_ranks(zygote, 1, None, options)
    with Checkpointer(URL, on_sigterm="ignore", **options) as ckpt:
        assert ckpt.wait("durable")

        def kept():
            return [one.step for one in ckpt.steps() if "durable" in one.tiers]

        wait_until(lambda: len(kept()) == 2, "two durable steps are left (an upload may be skipped)")
        assert kept()[-1] == STEPS - 2
