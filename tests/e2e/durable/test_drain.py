"""Uploads to the durable tier and restores from it: a directory, and real S3 servers."""

import json
import signal
import urllib.error

import pytest
import torch
from safetensors.torch import load as load_safetensors

from tests.support.agent_http import get_text
from tests.support.agents import stop_agent
from tests.support.bits import assert_same_bits, tensor_bytes, zeros_like_state
from tests.support.faults import FlipResponseBit, Hang, ReplyWithStatus
from tests.support.jobs import CheckpointJob, durable_settings, list_objects, state_at
from tests.support.s3 import BUCKET
from tieredckpt import CheckpointDamagedError, Checkpointer, CheckpointNotFoundError, TierUnavailableError, save
from tieredckpt.checkpointer.save_handle import SaveState
from tieredckpt.errors import FormatVersionError, SaveFailedError
from tieredckpt.format.manifest import decode_manifest
from tieredckpt.session.incarnation import Incarnation, SaveDecision
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def directory(tmp_path):
    return DurableSettings(url=f"file://{tmp_path}/durable")


@pytest.fixture(params=["directory", "rclone", "moto"])
def durable(request):
    """Return a durable tier of each kind."""
    if request.param == "directory":
        return request.getfixturevalue("directory")
    return durable_settings(request.getfixturevalue(request.param))


def test_a_lost_node_restores_from_the_durable_tier(agent_dir, durable):
    job = CheckpointJob(agent_dir, durable)
    job.save(0, 1, 2)
    job.assert_restores(2, tiers={"memory"})
    job.lose_memory()
    job.assert_restores(2, tiers={"durable"})


def test_newest_step_wins_in_any_tier(agent_dir, directory):
    job = CheckpointJob(agent_dir, directory)
    job.save(0, 1)
    job.save(2, durable_every=100, durable=False)
    job.assert_restores(2, tiers={"memory"})
    job.lose_memory()
    job.assert_restores(1, tiers={"durable"})
    job.save(2, durable=True)
    job.lose_memory()
    save(f"tiered://{job.name}", state_at(1), 1)  # an older step in memory than in the durable tier
    job.assert_restores(2, tiers={"durable"})


def test_restore_sends_few_store_requests(agent_dir, rclone, rclone_proxy):
    """One manifest, two listings for any number of steps and shards, and only the needed bytes."""
    settings = durable_settings(rclone, on_busy="wait")
    behind = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": rclone_proxy.endpoint}})
    job = CheckpointJob(agent_dir, behind)
    job.save(*range(6))
    job.lose_memory()
    rclone_proxy.clear()
    with job.checkpointer() as ckpt:
        wanted = {"nested": {"half": torch.zeros(33, dtype=torch.bfloat16)}}
        assert ckpt.restore(wanted, strict=False) == 5
        assert_same_bits(state_at(5)["nested"]["half"], wanted["nested"]["half"])
    asked = rclone_proxy.requests()
    assert len([one for one in asked if "list-type" in one.query]) == 2
    assert len([one for one in asked if one.path.endswith(".manifest")]) == 1
    # this server answers a range with status 200, so the client requests the first range twice
    (span,) = {one.headers["range"] for one in asked if one.path.endswith(".safetensors")}
    start, stop = (int(number) for number in span.removeprefix("bytes=").split("-"))
    assert stop + 1 - start <= 1 << 20, "more than the one chunk that holds the tensor"
    assert len(asked) <= 5


def test_run_after_a_lost_node_has_the_newest_incarnation(agent_dir, directory):
    """An agent with an empty memory must not start to count incarnations at zero."""
    job = CheckpointJob(agent_dir, directory)
    job.save(0, 1)
    close_sessions()
    job.assert_restores(1, tiers={"memory"})
    job.save(2)  # the second incarnation records that it started from step 1
    job.lose_memory()
    with job.checkpointer() as ckpt:
        assert ckpt.restore(zeros_like_state(state_at(0))) == 2
        ckpt.save(state_at(3), 3).wait("durable")
    job.lose_memory()
    job.assert_restores(3, tiers={"durable"})
    job.lose_memory()
    job.save(4)  # without a restore first
    job.lose_memory()
    job.assert_restores(4, tiers={"durable"})


def test_run_started_without_the_store_has_the_newest_incarnation(agent_dir, rclone, rclone_proxy):
    settings = durable_settings(rclone, retry_s=0.5, timeout_s=1.0)
    behind = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": rclone_proxy.endpoint}})
    job = CheckpointJob(agent_dir, behind)
    job.save(0, 1)
    close_sessions()
    job.assert_restores(1, tiers={"memory"})
    job.save(2)
    job.lose_memory()
    rclone_proxy.add_rule("GET", times=10**6).fail(ReplyWithStatus(503, "SlowDown"))
    job.save(3, durable=False)
    rclone_proxy.clear()
    job.assert_restores(3, tiers={"memory"})


def test_only_the_steps_of_the_policy_are_drained(agent_dir, directory, tmp_path):
    job = CheckpointJob(agent_dir, directory)
    with job.checkpointer(every=1, durable_every=3) as ckpt:
        for step in range(7):
            ckpt.save(state_at(step), step).wait()
            assert ckpt.wait("durable")
    manifests = (tmp_path / "durable" / job.name / "manifests").iterdir()
    assert [int(path.name.split(".")[0]) for path in sorted(manifests)] == [0, 3, 6]


def test_a_shard_in_the_bucket_is_a_safetensors_file(agent_dir, rclone):
    settings = durable_settings(rclone)
    job = CheckpointJob(agent_dir, settings)
    job.save(5)
    (name,) = [n for n in list_objects(rclone, settings) if n.endswith(".safetensors")]
    with rclone.client() as client:
        data = client.get_object(Bucket=BUCKET, Key=f"{settings.url.rpartition('/')[2]}/{name}")["Body"].read()
    found = load_safetensors(data)
    assert tensor_bytes(found["w"]) == tensor_bytes(state_at(5)["w"])


def test_drain_continues_after_the_trainer_ends(agent_dir, directory, zygote):
    job = CheckpointJob(agent_dir, directory)
    zygote.run(save_and_leave, job.name, directory.url)
    with job.checkpointer() as ckpt:
        assert ckpt.wait("durable", timeout_s=30)
    job.lose_memory()
    job.assert_restores(3, tiers={"durable"})


def save_and_leave(say, name, url):
    with Checkpointer(f"tiered://{name}", durable=url) as ckpt:
        ckpt.save(state_at(3), 3).wait()


def test_first_durable_step_can_be_awaited(agent_dir, directory):
    job = CheckpointJob(agent_dir, directory)
    with job.checkpointer() as ckpt:
        saved = ckpt.save(state_at(0), 0)
        assert saved.wait("durable", timeout_s=30) is SaveState.DURABLE


def test_step_spread_over_tiers_is_restored(agent_dir, directory, ranks):
    """Part 1 is lost from memory and comes from the durable tier; part 0 of the same step is in memory."""
    job = CheckpointJob(agent_dir, directory)
    ranks.run(2, save_own, job.name, directory.url)
    with job.checkpointer() as ckpt:
        store = ckpt.session.agent.store
        for fact in store.list_shards(job.name):
            if fact.key.part == 1:
                store.report_damage(fact.key, "lost by a test")
    assert ranks.run(2, load_all, job.name, directory.url) == [(4, {"memory", "durable"})] * 2


def save_own(name, url):
    import torch.distributed as dist

    me = dist.get_rank()
    with Checkpointer(f"tiered://{name}", durable=url) as ckpt:
        ckpt.save({f"own{me}": torch.full((100_000,), float(me + 4))}, 4).wait("durable")


def load_all(name, url):
    with Checkpointer(f"tiered://{name}", durable=url) as ckpt:
        state = {"own0": torch.zeros(100_000), "own1": torch.zeros(100_000)}
        step = ckpt.restore(state)
        assert (float(state["own0"].mean()), float(state["own1"].mean())) == (4.0, 5.0)
        return step, set(ckpt.last_restore.bytes_by_tier)


def test_part_lost_in_every_tier_selects_the_older_step(agent_dir, directory, tmp_path, ranks):
    job = CheckpointJob(agent_dir, directory)
    ranks.run(2, save_own, job.name, directory.url)
    job.lose_memory()
    (victim,) = (tmp_path / "durable" / job.name / "steps").rglob("000001.safetensors")
    victim.unlink()
    with job.checkpointer() as ckpt, pytest.raises((CheckpointDamagedError, CheckpointNotFoundError)):
        ckpt.restore({"own1": torch.zeros(100_000)}, strict=False)


def test_replicated_tensors_are_stored_once(agent_dir, directory, tmp_path, ranks):
    job = CheckpointJob(agent_dir, directory)
    ranks.run(3, save_replicated, job.name, directory.url)
    stored = sum(path.stat().st_size for path in (tmp_path / "durable").rglob("*.safetensors"))
    assert stored < 2 * 400_000 * 1.2  # two steps, for any number of ranks


def save_replicated(name, url):
    with Checkpointer(f"tiered://{name}", durable=url) as ckpt:
        for step in range(2):
            ckpt.save({"w": torch.full((100_000,), float(step))}, 0 if step == 0 else 10**6).wait()
        ckpt.wait("durable")


# -- a slow, unreachable or refusing store ------------------------------------------------------------------------


def proxied_url(proxy, server, **changes):
    return durable_settings(server, **({"retry_s": 20.0, "timeout_s": 2.0} | changes)), proxy.endpoint


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(ReplyWithStatus(500, "InternalError"), id="500", marks=pytest.mark.nightly),
        pytest.param(ReplyWithStatus(503, "SlowDown"), id="503"),
        pytest.param(Hang(), id="hang"),
    ],
)
def test_drain_completes_after_the_store_recovers(agent_dir, rclone, rclone_proxy, fault):
    settings, endpoint = proxied_url(rclone_proxy, rclone)
    settings = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": endpoint}})
    rclone_proxy.add_rule("PUT", r"\.safetensors").fail(fault)
    rclone_proxy.add_rule("PUT", r"\.manifest").fail(fault)
    job = CheckpointJob(agent_dir, settings)
    job.save(0)
    job.lose_memory()
    rclone_proxy.add_rule("GET", r"\.safetensors").fail(fault)
    job.assert_restores(0, tiers={"durable"})


def test_unreachable_store_is_unknown_and_not_empty(agent_dir, rclone, rclone_proxy):
    settings, endpoint = proxied_url(rclone_proxy, rclone, retry_s=0.5, timeout_s=1.0)
    settings = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": endpoint}})
    rclone_proxy.add_rule("GET", times=10**6).fail(ReplyWithStatus(503, "SlowDown"))
    with (
        CheckpointJob(agent_dir, settings).checkpointer() as ckpt,
        pytest.raises(TierUnavailableError, match="Whether a checkpoint exists is unknown"),
    ):
        ckpt.restore(state_at(0))


def test_memory_restores_while_the_store_is_unreachable(agent_dir, rclone, rclone_proxy):
    settings, endpoint = proxied_url(rclone_proxy, rclone, retry_s=0.5, timeout_s=1.0)
    settings = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": endpoint}})
    rclone_proxy.add_rule("PUT", times=10**6).fail(ReplyWithStatus(503, "SlowDown"))
    rclone_proxy.add_rule("GET", times=10**6).fail(ReplyWithStatus(503, "SlowDown"))
    job = CheckpointJob(agent_dir, settings)
    job.save(0, 1, 2, 3, durable=False)
    job.assert_restores(3, tiers={"memory"})


def test_refused_credentials_fail_the_drain_not_the_training(agent_dir, rclone, rclone_proxy):
    settings, endpoint = proxied_url(rclone_proxy, rclone)
    job = CheckpointJob(
        agent_dir, DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": endpoint}})
    )
    with job.checkpointer() as ckpt:
        ckpt.save(state_at(0), 0).wait("durable", timeout_s=60)
        for method in ("PUT", "POST"):
            rclone_proxy.add_rule(method, times=10**6).fail(ReplyWithStatus(403, "SignatureDoesNotMatch"))
        for step in range(1, 5):
            assert ckpt.save(state_at(step), step).wait() is SaveState.SEALED
        assert not ckpt.wait("durable", timeout_s=20)
        failed = [view for view in ckpt.session.agent.drain_status(job.name) if view.state == "failed"]
        assert failed
        assert "403" in failed[-1].error or "credentials" in failed[-1].error.lower()
        assert ckpt.restore(zeros_like_state(state_at(0))) == 4


def test_a_slow_store_skips_steps_and_keeps_the_newest(agent_dir, rclone, rclone_proxy):
    settings, endpoint = proxied_url(rclone_proxy, rclone)
    settings = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": endpoint}})
    held = rclone_proxy.add_rule("PUT", r"000000000000/.*\.safetensors").hold()
    job = CheckpointJob(agent_dir, settings)
    with job.checkpointer() as ckpt:
        ckpt.save(state_at(0), 0).wait()
        rclone_proxy.wait_for(lambda proxy: proxy.requests("PUT", r"\.safetensors"))
        for step in range(1, 5):
            assert ckpt.save(state_at(step), step).wait() is SaveState.SEALED
        held.release()
        ckpt.wait("durable", timeout_s=30)
        states = {view.version_id.version: view.state for view in ckpt.session.agent.drain_status(job.name)}
    assert states[0] == "done"
    assert states[4] == "done"
    assert "skipped" in states.values()
    job.lose_memory()
    job.assert_restores(4, tiers={"durable"})


def unreachable_store(proxy, server, on_busy):
    """Return a store that fails every request until the proxy is cleared."""
    settings, endpoint = proxied_url(proxy, server, retry_s=1.0, timeout_s=1.0, on_busy=on_busy)
    for method in ("GET", "PUT"):
        proxy.add_rule(method, times=10**6).fail(ReplyWithStatus(503, "SlowDown"))
    return DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": endpoint}})


@pytest.mark.parametrize("on_busy", [pytest.param("skip", marks=pytest.mark.nightly), "wait"])
def test_memory_saves_continue_while_due_steps_cannot_be_uploaded(agent_dir, rclone, rclone_proxy, on_busy):
    job = CheckpointJob(agent_dir, unreachable_store(rclone_proxy, rclone, on_busy))
    with job.checkpointer(durable_every=5) as ckpt:
        saved = [ckpt.save(state_at(step), step).wait() for step in range(1, 18)]
        assert saved == [SaveState.SEALED] * len(saved)
        assert ckpt.restore(zeros_like_state(state_at(0))) == 17
        gave_way = [view for view in ckpt.session.agent.drain_status(job.name) if view.state == "skipped"]
        assert gave_way
        why = ("saves in memory needed its slots", *["a newer one is ready"] * (on_busy == "skip"))
        assert all(view.error.startswith(why) for view in gave_way)
        rclone_proxy.clear()
        assert ckpt.save(state_at(20), 20).wait("durable", timeout_s=60) is SaveState.DURABLE
    job.lose_memory()
    job.assert_restores(20, tiers={"durable"})


@pytest.mark.parametrize("on_busy", ["skip", pytest.param("wait", marks=pytest.mark.nightly)])
def test_memory_saves_continue_while_required_steps_cannot_be_uploaded(agent_dir, rclone, rclone_proxy, on_busy):
    job = CheckpointJob(agent_dir, unreachable_store(rclone_proxy, rclone, on_busy))
    with job.checkpointer(durable_every=100) as ckpt:
        asked = [ckpt.save(state_at(step), step, durable=True) for step in (1, 2)]
        assert [saved.wait() for saved in asked] == [SaveState.SEALED] * 2
        saved = [ckpt.save(state_at(step), step).wait() for step in range(3, 12)]
        assert saved == [SaveState.SEALED] * len(saved)
        assert ckpt.restore(zeros_like_state(state_at(0))) == 11
        states = {view.version_id.version: view.state for view in ckpt.session.agent.drain_status(job.name)}
        (given_up,) = [step for step, state in states.items() if state == "failed"]
        with pytest.raises(
            SaveFailedError, match=f"step {given_up} did not become durable: saves in memory needed its slots"
        ):
            asked[given_up - 1].wait("durable", timeout_s=60)
        assert "not durable (saves in memory needed its slots" in asked[given_up - 1].durability
        rclone_proxy.clear()
        (other,) = {1, 2} - {given_up}
        assert asked[other - 1].wait("durable", timeout_s=60) is SaveState.DURABLE


def test_waiting_policy_makes_every_durable_step_durable(agent_dir, directory, tmp_path):
    settings = DurableSettings(**{**vars(directory), "on_busy": "wait"})
    job = CheckpointJob(agent_dir, settings)
    with job.checkpointer() as ckpt:
        for step in range(6):
            ckpt.save(state_at(step), step)
        assert ckpt.wait("durable")
    manifests = (tmp_path / "durable" / job.name / "manifests").iterdir()
    assert len(list(manifests)) == 6


# -- damage -------------------------------------------------------------------------------------------------------


def corrupt(path, at=5000):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def shard_of(tmp_path, job, step):
    (path,) = (tmp_path / "durable" / job.name / "steps" / f"{step:012d}").rglob("*.safetensors")
    return path


def test_bit_flipped_in_the_store_selects_the_older_step_and_quarantines(agent_dir, directory, tmp_path):
    job = CheckpointJob(agent_dir, directory)
    job.save(0, 1)
    job.lose_memory()
    corrupt(shard_of(tmp_path, job, 1))
    job.assert_restores(0, tiers={"durable"})
    with job.checkpointer() as ckpt:
        infos = {info.step: info for info in ckpt.steps()}
    assert "are not what was saved" in infos[1].quarantined


@pytest.mark.parametrize("harm", ["short", "gone"])
def test_short_or_missing_shard_selects_the_older_step(agent_dir, directory, tmp_path, harm):
    job = CheckpointJob(agent_dir, directory)
    job.save(0, 1)
    job.lose_memory()
    path = shard_of(tmp_path, job, 1)
    if harm == "short":
        path.write_bytes(path.read_bytes()[:-10])
    else:
        path.unlink()
    job.assert_restores(0, tiers={"durable"})


def test_damaged_manifest_selects_the_older_step(agent_dir, directory, tmp_path):
    job = CheckpointJob(agent_dir, directory)
    job.save(0, 1)
    job.lose_memory()
    (newest,) = (tmp_path / "durable" / job.name / "manifests").glob("000000000001*")
    corrupt(newest, 20)
    job.assert_restores(0, tiers={"durable"})


def test_manifest_of_a_newer_format_is_refused(agent_dir, directory, tmp_path):
    import msgspec
    import xxhash
    import zstandard

    job = CheckpointJob(agent_dir, directory)
    job.save(0)
    job.lose_memory()
    (path,) = (tmp_path / "durable" / job.name / "manifests").iterdir()
    data = path.read_bytes()
    inner = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(data[4:-8]))
    packed = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(inner | {"format": 99}))
    path.write_bytes(b"TCKP" + packed + xxhash.xxh3_64_digest(packed))
    with pytest.raises(FormatVersionError, match="format 99"):
        decode_manifest(path.read_bytes())
    with job.checkpointer() as ckpt, pytest.raises(FormatVersionError, match=r"step 0 of .*format 99.*newer release"):
        ckpt.restore(state_at(0))


def test_bytes_changed_in_transit_are_read_again(agent_dir, rclone, rclone_proxy):
    settings, endpoint = proxied_url(rclone_proxy, rclone)
    settings = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": endpoint}})
    job = CheckpointJob(agent_dir, settings)
    job.save(0)
    job.lose_memory()
    rclone_proxy.add_rule("GET", r"\.safetensors").fail(FlipResponseBit(5000))
    job.assert_restores(0, tiers={"durable"})


def test_damage_in_memory_is_healed_from_the_durable_copy_of_the_same_step(agent_dir, directory):
    job = CheckpointJob(agent_dir, directory)
    job.save(0, 1)
    (slot,) = [
        agent_dir / "slots" / note.name.removeprefix("seal.")
        for note in (agent_dir / "notes").glob("seal.*")
        if b"version\x01" in note.read_bytes()
    ]
    corrupt(slot)
    job.assert_restores(1, tiers={"durable"})


# -- retention and deletion ---------------------------------------------------------------------------------------


def test_retention_keeps_the_newest_and_every_nth_step(agent_dir, directory, tmp_path):
    job = CheckpointJob(agent_dir, DurableSettings(**{**vars(directory), "keep_last": 2, "keep_every": 4}))
    with job.checkpointer() as ckpt:
        for step in range(10):
            ckpt.save(state_at(step), step).wait("durable")
        ckpt.wait("durable")
    stop_agent(agent_dir)  # a graceful stop finishes the pending deletions
    left = sorted(int(p.name.split(".")[0]) for p in (tmp_path / "durable" / job.name / "manifests").iterdir())
    assert left == [0, 4, 8, 9]
    steps = sorted(
        int(p.name) for p in (tmp_path / "durable" / job.name / "steps").iterdir() if any(p.rglob("*.index"))
    )
    assert steps == left
    job.lose_memory()
    job.assert_restores(9, tiers={"durable"})
    job.assert_restores(4, tiers={"durable"}, named=4)


def test_compressed_objects_with_hashed_keys_round_trip(agent_dir, rclone):
    settings = durable_settings(rclone, compress="zstd", hashed_keys=True)
    job = CheckpointJob(agent_dir, settings)
    with job.checkpointer() as ckpt:
        state = {"zeros": torch.zeros(1 << 20), "noise": torch.randn(1000), "ints": torch.arange(1 << 18)}
        ckpt.save(state, 1).wait("durable")
    stored = list_objects(rclone, settings)
    (name,) = [n for n in stored if n.endswith(".safetensors.zst")]
    assert len(name.split("/")[0]) == 4
    assert stored[name] < (1 << 20)
    job.lose_memory()
    with job.checkpointer() as ckpt:
        found = zeros_like_state(state)
        assert ckpt.restore(found) == 1
        assert_same_bits(state, found)
        partly = {"ints": torch.zeros(1 << 18, dtype=torch.int64)}
        assert ckpt.restore(partly, strict=False) == 1
        assert_same_bits(state["ints"], partly["ints"])


def test_incompressible_shards_are_not_compressed(agent_dir, directory, tmp_path):
    job = CheckpointJob(agent_dir, DurableSettings(**{**vars(directory), "compress": "zstd"}))
    with job.checkpointer() as ckpt:
        noise = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8)
        ckpt.save({"noise": noise}, 1).wait("durable")
    assert not list((tmp_path / "durable").rglob("*.zst"))


# -- disabled durable tier ----------------------------------------------------------------------------------------


def test_switched_off_the_same_script_writes_plain_checkpoints(agent_dir, directory, monkeypatch, tmp_path):
    import torch.distributed.checkpoint as dcp

    from tieredckpt import TieredReader, TieredWriter

    monkeypatch.setenv("TIEREDCKPT_ENABLED", "0")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", directory.url)
    with Checkpointer("tiered://plain") as ckpt:
        assert ckpt.restore(state_at(0)) == -1
        for step in range(3):
            assert ckpt.save(state_at(step), step).ok
        assert [info.step for info in ckpt.steps()] == [0, 1, 2]
    dcp.save(state_at(3), storage_writer=TieredWriter("tiered://plain", 3), no_dist=True)
    found = zeros_like_state(state_at(0))
    dcp.load(found, storage_reader=TieredReader("tiered://plain"), no_dist=True)
    assert_same_bits(state_at(3), found)
    found = zeros_like_state(state_at(0))
    dcp.load(found, checkpoint_id=str(tmp_path / "durable/plain/step-2"), no_dist=True)
    assert_same_bits(state_at(2), found)
    assert not agent_dir.exists()


def test_reenabled_checkpointer_loses_no_step(agent_dir, directory, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", directory.url)
    monkeypatch.setenv("TIEREDCKPT_ENABLED", "0")
    with Checkpointer("tiered://plain") as ckpt:
        ckpt.save(state_at(7), 7)
    monkeypatch.setenv("TIEREDCKPT_ENABLED", "1")
    with Checkpointer("tiered://plain") as ckpt:
        found = zeros_like_state(state_at(0))
        assert ckpt.restore(found) == 7
        assert_same_bits(state_at(7), found)
        ckpt.save(state_at(8), 8).wait("durable")
        assert ckpt.restore(found) == 8


# -- the agent's own report ---------------------------------------------------------------------------------------


def test_metrics_and_status_match_the_events(agent_dir, directory):
    job = CheckpointJob(agent_dir, directory)
    job.save(0, 1)
    status = json.loads(get_text(agent_dir, "/status"))
    assert status["store"]["jobs"][0]["newest_committed"] == 1
    assert status["drain"]["totals"]["steps"] == 2
    text = get_text(agent_dir, "/metrics")
    assert f'tieredckpt_newest_complete_step{{job="{job.name}"}} 1.0' in text
    assert "tieredckpt_drained_steps_total 2.0" in text
    assert "tieredckpt_arena_budget_bytes" in text
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get_text(agent_dir, "/etc/passwd")


def test_restarted_agent_finishes_pending_uploads(agent_dir, rclone, rclone_proxy):
    settings, endpoint = proxied_url(rclone_proxy, rclone)
    settings = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": endpoint}})
    held = rclone_proxy.add_rule("PUT", r"\.safetensors").hold()
    job = CheckpointJob(agent_dir, settings)
    with job.checkpointer() as ckpt:
        ckpt.save(state_at(0), 0).wait()
        rclone_proxy.wait_for(lambda proxy: proxy.requests("PUT", r"\.safetensors"))
        stop_agent(agent_dir, signal.SIGKILL)
        held.drop()
        assert ckpt.wait("durable", timeout_s=40)
    close_sessions()
    job.lose_memory()
    job.assert_restores(0, tiers={"durable"})


def test_rewind_within_a_process_abandons_later_steps(agent_dir, directory):
    """A training loop reloads an older step after a loss spike and abandons the later steps."""
    settings = DurableSettings(**{**vars(directory), "on_busy": "wait"})
    job = CheckpointJob(agent_dir, settings)
    with job.checkpointer() as ckpt:
        for step in range(5):
            ckpt.save(state_at(step), step)
        assert ckpt.wait("durable")
        assert ckpt.restore(zeros_like_state(state_at(0)), 2) == 2
        ckpt.save(state_at(33), 3).wait("durable")
    close_sessions()
    for lose in (lambda: None, job.lose_memory):
        lose()
        with job.checkpointer() as ckpt:
            found = zeros_like_state(state_at(0))
            assert ckpt.restore(found) == 3
            assert_same_bits(state_at(33), found)


def test_agent_stops_promptly_while_the_store_is_unreachable(agent_dir, rclone, rclone_proxy):
    settings = durable_settings(rclone, retry_s=300.0, timeout_s=1.0)
    behind = DurableSettings(**{**vars(settings), "options": {**settings.options, "endpoint": rclone_proxy.endpoint}})
    rclone_proxy.add_rule("GET", times=10**6).fail(ReplyWithStatus(503, "SlowDown"))
    rclone_proxy.add_rule("PUT", times=10**6).fail(ReplyWithStatus(503, "SlowDown"))
    with CheckpointJob(agent_dir, behind).checkpointer() as ckpt:
        known = SaveDecision(
            ckpt.session.job, 0, Incarnation(1, "known"), 1, attempt=0, base=None, newest_complete=None
        )
        ckpt.session.adopt(known, ckpt.session.incarnation.capture())  # otherwise the first save would query the store
        ckpt.save(state_at(0), 0).wait()
        rclone_proxy.wait_for(lambda proxy: len(proxy.requests()) > 2)
        close_sessions()
        stop_agent(agent_dir)  # stop_agent waits 20 s, so an agent that drained for the full 60 s would fail here


@pytest.mark.parametrize("wanting", [0, 1])
def test_step_becomes_durable_if_one_rank_requires_it(agent_dir, directory, ranks, wanting):
    """A preempted rank requires its last step; the others may save it before they see the signal."""
    job = CheckpointJob(agent_dir, directory)
    ranks.run(2, save_as, job.name, directory.url, wanting)
    with job.checkpointer() as ckpt:
        assert ckpt.wait("durable", timeout_s=30)
    job.lose_memory()
    with job.checkpointer() as ckpt:
        found = {"own0": torch.zeros(1000), "own1": torch.zeros(1000)}
        assert ckpt.restore(found) == 7
        assert [float(found[f"own{rank}"].mean()) for rank in range(2)] == [0.0 + 7, 1.0 + 7]


def save_as(name, url, wanting):
    import torch.distributed as dist

    me = dist.get_rank()
    with Checkpointer(f"tiered://{name}", durable=url, durable_every=7 if me == wanting else 1000) as ckpt:
        ckpt.save({f"own{me}": torch.full((1000,), me + 7.0)}, 7).wait()
