"""A load reports an unreadable step as deleted, lost or damaged."""

import pytest

from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.jobs import CheckpointJob, state_at
from tests.support.local_nodes import wait_until
from tieredckpt import CheckpointDamagedError
from tieredckpt.agent.durable_catalog import DurableCatalog, delete_step
from tieredckpt.durable.retrying_store import open_store
from tieredckpt.restore.read_executor import ReadExecutor
from tieredckpt.settings import DurableSettings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def job(agent_dir, tmp_path):
    job = CheckpointJob(agent_dir, DurableSettings(url=f"file://{tmp_path}/durable"))
    job.save(1, 2)
    job.lose_memory()
    return job


@pytest.fixture
def marks(job, tmp_path):
    return lambda: list((tmp_path / "durable" / job.name / "manifests").glob("*.quarantine"))


def before_reading(monkeypatch, act):
    """Call ``act`` once, after a load has planned its reads and before the first read."""
    run = ReadExecutor.run

    def late(reading, items):
        monkeypatch.setattr(ReadExecutor, "run", run)
        act(reading)
        run(reading, items)

    monkeypatch.setattr(ReadExecutor, "run", late)


def test_a_step_that_retention_deletes_under_a_slow_reader_is_not_damaged(job, marks, monkeypatch):
    def delete(reading):
        durable = job.settings.durable
        delete_step(DurableCatalog(open_store(durable.url, durable), job.name), job.name, reading._step.version_id)

    before_reading(monkeypatch, delete)
    with job.checkpointer() as ckpt:
        found = zeros_like_state(state_at(0))
        assert ckpt.restore(found) == 1, "the load must choose again among the remaining steps"
        assert_same_bits(state_at(1), found)
        assert [info.quarantined for info in ckpt.steps()] == [""]
    assert not marks()


def test_object_lost_under_its_manifest_is_damage(job, marks, monkeypatch, tmp_path):
    def lose(reading):
        for shard in reading._step.shards.values():
            (tmp_path / "durable" / job.name / shard.object.removeprefix(f"{job.name}/")).unlink()

    before_reading(monkeypatch, lose)
    with job.checkpointer() as ckpt:
        assert ckpt.restore(zeros_like_state(state_at(0))) == 1
        assert [bool(info.quarantined) for info in ckpt.steps()] == [False, True]
    assert not marks(), "the reader wrote a mark to the durable tier"


def test_damage_is_marked_in_the_store_by_the_next_durable_save(job, marks, tmp_path):
    (shard,) = (tmp_path / "durable" / job.name / "steps" / f"{2:012d}").rglob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[5000] ^= 4
    shard.write_bytes(data)
    job.assert_restores(1, tiers={"durable"})
    assert not marks()
    job.save(3)
    wait_until(marks, "a mark")  # a step is durable before the agent checks the older ones
    assert [mark.name[:12] for mark in marks()] == [f"{2:012d}"]
    job.lose_memory()
    with job.checkpointer() as ckpt:
        assert [info.quarantined for info in ckpt.steps()] == ["", "marked in the durable tier", ""]
        with pytest.raises(CheckpointDamagedError):
            ckpt.restore(zeros_like_state(state_at(0)), 2)
