"""Known defects of shipped systems, and users' pains, that concern save and load on one node.

Other tests cover the memory of several nodes, elastic worlds and samples (items 6, 10 and 11). They also cover the
parts of pains 1 to 5, 11, 12 and 14 that concern replicas, batches or recovery.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.bits import assert_same_bits, tensor_bytes, zeros_like_state
from tests.support.faults import ReplyWithStatus
from tests.support.jobs import CheckpointJob, durable_settings, state_at
from tests.support.s3 import BUCKET
from tests.support.scripts import run_script
from tests.support.stores import pinned_file
from tieredckpt import (
    CheckpointDamagedError,
    Checkpointer,
    CheckpointNotFoundError,
    TieredReader,
    TieredWriter,
    TierUnavailableError,
    save,
)
from tieredckpt.checkpointer.checkpointer import SaveState
from tieredckpt.errors import UsageError
from tieredckpt.format.manifest import decode_manifest
from tieredckpt.settings import DurableSettings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def durable(tmp_path):
    return DurableSettings(url=f"file://{tmp_path}/durable")


def stored(durable, name, pattern):
    return sorted(Path(durable.url.removeprefix("file://"), name).rglob(pattern))


def save_sharded(name, url, steps):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(60, dtype=torch.float32).view(12, 5)
    with Checkpointer(f"tiered://{name}", durable=url, on_sigterm="ignore") as ckpt:
        for step in range(steps):
            state = {"w": distribute_tensor(rows + step, mesh, [Shard(0)]), "step": step}
            ckpt.save(state, step).wait("durable" if url else "memory")
            dist.barrier()


def load_sharded(name, url):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.zeros(12, 5), mesh, [Shard(0)]), "step": -1}
    with Checkpointer(f"tiered://{name}", durable=url, on_sigterm="ignore") as ckpt:
        step = ckpt.restore(state)
    return step, state["step"], state["w"].full_tensor()


# -- 1, and pain 13: another world size is no checkpoint at all ---------------------------------------------------


@pytest.mark.parametrize("tier", ["memory", "durable"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 2)])
def test_1_another_world_size_finds_the_step_in_every_tier(agent_dir, durable, ranks, before, after, tier):
    job = CheckpointJob(agent_dir, durable)
    url = durable.url if tier == "durable" else None
    ranks.run(before, save_sharded, job.name, url, 2)
    if tier == "durable":
        job.lose_memory()
    for step, said, w in ranks.run(after, load_sharded, job.name, url):
        assert (step, said) == (1, 1)
        assert torch.equal(w, torch.arange(60, dtype=torch.float32).view(12, 5) + 1)


# -- 2: a short blob is a success with untouched tensors ----------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 100, 4096, 5000])
def test_2_a_short_shard_is_an_error_not_a_success(agent_dir, durable, keep):
    job = CheckpointJob(agent_dir, durable)
    job.save(0)
    job.lose_memory()
    (path,) = stored(durable, job.name, "*.safetensors")
    os.truncate(path, keep)
    with job.checkpointer() as ckpt, pytest.raises(CheckpointDamagedError):
        ckpt.restore(state_at(7))


def test_2_a_slot_cut_short_is_not_read_as_zeros(agent_dir):
    with Checkpointer("tiered://loop", on_sigterm="ignore") as ckpt:
        for step in range(2):
            ckpt.save(state_at(step), step).wait()
        newest = max(ckpt.session.agent.store.list_shards("loop"), key=lambda fact: fact.key.version)
        pin = ckpt.session.agent.store.pin(newest.key)
        ckpt.session.agent.store.unpin(pin.id)
        os.truncate(pinned_file(pin), 5000)
        found = zeros_like_state(state_at(0))
        assert ckpt.restore(found) == 0
        assert_same_bits(state_at(0), found)


# -- 3: every rank picks its own latest; errors become an empty list; one lost shard ends everything ---------------


def save_apart(name):
    """Damage rank 1's part of step 1, which only rank 1 can detect."""
    me = dist.get_rank()
    with Checkpointer(f"tiered://{name}", on_sigterm="ignore") as ckpt:
        for step in range(2):
            ckpt.save({f"own{me}": torch.full((1000,), 10.0 * step + me)}, step).wait()
        dist.barrier()
        if me == 1:
            store = ckpt.session.agent.store
            (bad,) = [f for f in store.list_shards(name) if f.key.version == 1 and f.key.part == 1]
            store.report_damage(bad.key, "lost by a test")
        dist.barrier()
        state = {f"own{me}": torch.zeros(1000)}
        return ckpt.restore(state), float(state[f"own{me}"][0])


def test_3_all_ranks_load_the_same_older_step_after_a_lost_shard(agent_dir, ranks):
    assert ranks.run(2, save_apart, "apart") == [(0, 0.0), (0, 1.0)]


def test_3_unreachable_tier_is_not_an_empty_one(agent_dir, rclone, rclone_proxy):
    settings = durable_settings(rclone, retry_s=0.3, timeout_s=1.0)
    settings = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": rclone_proxy.endpoint}})
    rclone_proxy.add_rule("GET", times=10**6).fail(ReplyWithStatus(503, "SlowDown"))
    with CheckpointJob(agent_dir, settings).checkpointer() as ckpt:
        with pytest.raises(TierUnavailableError):
            ckpt.restore(state_at(0))
        with pytest.raises(TierUnavailableError):
            ckpt.restore(state_at(0), step=3)


# -- 4: views with their whole storage; slow S3 delays the save; pickled metadata; names that lead elsewhere -------


def test_4_a_view_is_saved_at_its_own_size(agent_dir, durable):
    job = CheckpointJob(agent_dir, durable)
    base = torch.randn(1 << 20)
    with job.checkpointer() as ckpt:
        ckpt.save({"row": base[:10], "every other": base[::2][:10]}, 0).wait("durable")
    (shard,) = stored(durable, job.name, "*.safetensors")
    assert shard.stat().st_size < 10_000


def test_4_a_store_that_hangs_does_not_delay_a_save(agent_dir, rclone, rclone_proxy):
    settings = durable_settings(rclone, retry_s=30.0, timeout_s=5.0)
    settings = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": rclone_proxy.endpoint}})
    held = rclone_proxy.add_rule("PUT", r"\.safetensors").hold()
    job = CheckpointJob(agent_dir, settings)
    with job.checkpointer() as ckpt:
        ckpt.save(state_at(0), 0).wait()
        rclone_proxy.wait_for(lambda proxy: proxy.requests("PUT", r"\.safetensors"))
        # the upload stands still, and four more steps are saved and can be restored
        for step in range(1, 5):
            assert ckpt.save(state_at(step), step).wait() is SaveState.SEALED
        assert ckpt.restore(zeros_like_state(state_at(0))) == 4
        held.release()
        assert ckpt.wait("durable", timeout_s=60)


def test_4_metadata_is_data(agent_dir, durable):
    """A pickle in place of a manifest is reported as damage, and never executed."""
    job = CheckpointJob(agent_dir, durable)
    job.save(0, 1)
    job.lose_memory()
    marker = Path(durable.url.removeprefix("file://"), "ran")
    bomb = b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    for path in stored(durable, job.name, "000000000001*.manifest"):
        path.write_bytes(bomb)
    job.assert_restores(0, tiers={"durable"})
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../other", "..", "a/b", "/etc", "a\0b", "a\nb", "", "x" * 200])
def test_4_a_name_cannot_lead_elsewhere(agent_dir, name):
    for entry in (
        lambda: Checkpointer(name),
        lambda: Checkpointer(f"tiered://{name}"),
        lambda: TieredWriter(f"tiered://{name}", 1),
        lambda: TieredReader(f"tiered://{name}"),
        lambda: TieredWriter("tiered://fine", 1).reset(f"tiered://{name}"),
        lambda: TieredReader("tiered://fine").reset(f"tiered://{name}"),
    ):
        with pytest.raises(UsageError):
            entry()
    assert not agent_dir.exists()


# -- 5: step 0 is no step; a coordinator other than rank 0 ---------------------------------------------------------


def test_5_step_0_is_a_step(agent_dir, durable):
    job = CheckpointJob(agent_dir, durable)
    job.save(0)
    job.assert_restores(0, tiers={"memory"})
    job.assert_restores(0, tiers={"memory"}, named=0)
    job.lose_memory()
    job.assert_restores(0, tiers={"durable"})


def save_coordinated(name, rank):
    state = {"w": torch.full((100,), 5.0), f"own{dist.get_rank()}": torch.ones(3)}
    _save_state_dict(state, TieredWriter(f"tiered://{name}", 4), coordinator_rank=rank)


def load_anywhere(name):
    state = {"w": torch.zeros(100), "own0": torch.zeros(3), "own2": torch.zeros(3)}
    reader = TieredReader(f"tiered://{name}")
    dcp.load(state, storage_reader=reader)
    return reader.restored_step, float(state["w"].mean()), float(state["own2"].mean())


@pytest.mark.parametrize("coordinator", [0, 2])
def test_5_any_rank_may_coordinate(agent_dir, ranks, coordinator):
    ranks.run(3, save_coordinated, "led", coordinator)
    assert ranks.run(2, load_anywhere, "led") == [(4, 5.0, 1.0)] * 2


# -- 7: fp8 differs after the round trip; every rank must make the same calls --------------------------------------


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"])
def test_7_fp8_round_trips_bit_for_bit_through_every_tier(agent_dir, durable, dtype):
    every_byte = torch.arange(256, dtype=torch.int64).to(torch.uint8).view(getattr(torch, dtype))
    job = CheckpointJob(agent_dir, durable)
    for lost in (False, True):
        with job.checkpointer() as ckpt:
            if not lost:
                ckpt.save({"t": every_byte}, 0).wait("durable")
            found = {"t": torch.zeros(256, dtype=torch.uint8).view(every_byte.dtype)}
            assert ckpt.restore(found) == 0
            assert tensor_bytes(found["t"]) == bytes(range(256))
        job.lose_memory()


def save_unevenly(name):
    """Rank 1 saves an extra name, and lists the steps when no other rank does."""
    me = dist.get_rank()
    state = {"w": torch.ones(10)} | ({"extra": torch.full((7,), 3.0)} if me == 1 else {})
    with Checkpointer(f"tiered://{name}", on_sigterm="ignore") as ckpt:
        for step in range(3):
            if me == 1:
                ckpt.steps()
            ckpt.save(state, step).wait()
    return me


def load_only(name):
    reader = TieredReader(f"tiered://{name}")
    state = {"extra": torch.zeros(7)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return float(state["extra"].mean())


def test_7_ranks_need_not_hold_or_load_the_same(agent_dir, ranks):
    ranks.run(3, save_unevenly, "uneven")
    assert load_only("uneven") == 3.0


# -- 8: bytes, not capacity; whole means whole ---------------------------------------------------------------------


def test_8_upload_has_the_size_of_the_data_and_not_of_the_slot(agent_dir, durable):
    job = CheckpointJob(agent_dir, durable)
    with job.checkpointer() as ckpt:
        ckpt.save({"w": torch.ones(1 << 20)}, 0).wait("durable")
        ckpt.save({"w": torch.ones(10)}, 1).wait("durable")  # into a slot with a far larger capacity
        slots = sum(path.stat().st_size for path in (agent_dir / "slots").iterdir())
    (shard,) = [path for path in stored(durable, job.name, "*.safetensors") if "000000000001" in str(path)]
    assert shard.stat().st_size == 4096 + 40 < slots
    (manifest,) = stored(durable, job.name, "000000000001*.manifest")
    assert decode_manifest(manifest.read_bytes()).shards[0].size_bytes == 4096 + 40


def save_one_part(name, url):
    with Checkpointer(f"tiered://{name}", durable=url, on_sigterm="ignore") as ckpt:
        ckpt.save({f"own{dist.get_rank()}": torch.ones(10)}, 0).wait("durable")
        dist.barrier()
        if dist.get_rank() == 0:
            ckpt.save({"own0": torch.ones(10)}, 1, force=True).wait()  # rank 1 never reaches this step
            infos = {info.step: info.is_complete for info in ckpt.steps()}
            state = {"own0": torch.zeros(10), "own1": torch.zeros(10)}
            reader = TieredReader(f"tiered://{name}")
            dcp.load(state, storage_reader=reader, no_dist=True)
            return infos, reader.restored_step
    return None


def test_8_step_with_one_of_two_parts_is_incomplete(agent_dir, durable, ranks):
    job = CheckpointJob(agent_dir, durable)
    infos, restored = ranks.run(2, save_one_part, job.name, durable.url)[0]
    assert infos == {0: True, 1: False}
    assert restored == 0
    assert len(stored(durable, job.name, "*.manifest")) == 1


# -- 9: the nearer copy wins over the newer one --------------------------------------------------------------------


def test_9_newer_step_wins_in_any_tier(agent_dir, durable):
    job = CheckpointJob(agent_dir, durable)
    job.save(0, 1, 2)
    job.lose_memory()
    save(f"tiered://{job.name}", state_at(1), 1)  # an older step in memory than in the durable tier
    job.assert_restores(2, tiers={"durable"})
    job.save(3, durable=False, durable_every=100)
    job.assert_restores(3, tiers={"memory"})


# -- pains --------------------------------------------------------------------------------------------------------


def test_pain_6_memory_is_bounded_and_known_beforehand(agent_dir, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGET", "8MiB")
    with Checkpointer("tiered://loop", on_sigterm="ignore") as ckpt:
        for step in range(20):
            assert ckpt.save(state_at(step), step).wait() is SaveState.SEALED
            assert sum(path.stat().st_size for path in (agent_dir / "slots").iterdir()) <= 8 << 20
        too_much = ckpt.save({"w": torch.zeros(4 << 20)}, 20)
        assert "budget" in str(too_much.error)
        assert ckpt.restore(zeros_like_state(state_at(0))) == 19


def test_pain_7_failed_save_keeps_training_and_the_last_step(agent_dir, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_AGENT_BUDGET", "8MiB")
    with Checkpointer("tiered://loop", on_sigterm="ignore") as ckpt:
        ckpt.save(state_at(0), 0).wait()
        for step in range(1, 4):
            assert not ckpt.save({"w": torch.zeros(4 << 20)}, step).ok
        assert ckpt.restore(zeros_like_state(state_at(0))) == 0
        assert ckpt.save(state_at(4), 4).wait() is SaveState.SEALED


def test_pain_8_restore_from_s3_is_one_manifest_and_ranged_reads(agent_dir, rclone, rclone_proxy):
    settings = durable_settings(rclone)
    settings = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": rclone_proxy.endpoint}})
    job = CheckpointJob(agent_dir, settings)
    job.save(*range(6))
    job.lose_memory()
    before = len(rclone_proxy.requests("GET", ""))
    job.assert_restores(5, tiers={"durable"})
    asked = rclone_proxy.requests("GET", "")[before:]
    lists = [one for one in asked if "list-type" in str(one)]
    manifests = [one for one in asked if ".manifest" in str(one) and "list-type" not in str(one)]
    assert len(manifests) == 1
    assert len(lists) <= 4
    assert len(asked) <= 8
    assert BUCKET in str(asked)


def test_pain_9_saved_state_is_the_state_at_the_call(agent_dir):
    writer = TieredWriter("tiered://loop", 0)
    state = {"w": torch.zeros(1 << 20)}
    for step in range(4):
        state["w"].fill_(step)
        future = dcp.async_save(state, checkpoint_id=f"tiered://loop/step-{step}", storage_writer=writer, no_dist=True)
        state["w"].fill_(-1)
        future.result()
        found = {"w": torch.zeros(1 << 20)}
        dcp.load(found, storage_reader=TieredReader("tiered://loop"), no_dist=True)
        assert torch.equal(found["w"], torch.full((1 << 20,), float(step)))
    writer.close()


NOTICE = """
import os, signal, torch
from tieredckpt import Checkpointer
state = {{"w": torch.zeros(1000)}}
with Checkpointer("tiered://loop", every=50, durable="{url}", durable_every=1000) as ckpt:
    for step in range(1, 10**6):
        state["w"].fill_(step)
        ckpt.save(state, step)
        if step == 60:
            os.kill(os.getpid(), signal.SIGTERM)
"""


def test_pain_10_a_preemption_notice_becomes_a_durable_step(agent_dir, durable, tmp_path):
    done = run_script(tmp_path, NOTICE.format(url=durable.url))
    assert done.returncode == -signal.SIGTERM, done.stderr
    job = CheckpointJob(agent_dir, durable, "loop")
    job.lose_memory()
    with job.checkpointer() as ckpt:
        found = {"w": torch.zeros(1000)}
        assert ckpt.restore(found) == 61
        assert float(found["w"][0]) == 61


def test_absence_is_reported_only_when_every_tier_answered(agent_dir, durable):
    with CheckpointJob(agent_dir, durable).checkpointer() as ckpt:
        assert ckpt.restore(state_at(3)) == -1
        with pytest.raises(CheckpointNotFoundError):
            ckpt.restore(state_at(3), step=3)
