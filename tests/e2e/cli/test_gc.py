"""``tieredckpt gc`` deletes steps outside the retention policy and never the newest complete step."""

import contextlib
import os
import time

import msgspec
import pytest

from peerstore.settings import StoreSettings
from peerstore.store.arena import TmpfsArena
from peerstore.store.node_store import NodeStore
from peerstore.store.slot_metadata import METADATA_FORMAT
from tests.support.jobs import CheckpointJob, durable_settings
from tests.support.local_nodes import wait_until
from tests.support.s3 import BUCKET
from tests.unit.tieredckpt.agent.test_agent_service import seal
from tieredckpt.agent import drain
from tieredckpt.agent.agent_service import NodeAgentService
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


@pytest.fixture
def job_of_six_steps(agent_dir, durable):
    job = CheckpointJob(agent_dir, durable, "llama")
    job.save(*range(1, 7))
    return job


def durable_steps(cli, job):
    said = cli("ls", job.name, "--durable", job.settings.durable.url, "--json")
    return [line["step"] for line in said.json["steps"] if "durable" in line["tiers"]]


def test_a_dry_run_deletes_nothing(cli, job_of_six_steps):
    said = cli("gc", "llama", "--keep-last", "2", "--dry-run", "--json")
    assert said.code == 0
    assert [one["step"] for one in said.json["deleted"]] == [1, 2, 3, 4]
    assert said.json["kept"] == [5, 6]
    assert durable_steps(cli, job_of_six_steps) == [1, 2, 3, 4, 5, 6]
    assert "4 steps would be deleted" in cli("gc", "llama", "--keep-last", "2", "-n").out


def test_gc_deletes_steps_with_all_their_objects(cli, job_of_six_steps, tmp_path):
    said = cli("gc", "llama", "--keep-last", "1", "--keep-every", "3", "--json")
    assert said.code == 0
    assert [one["step"] for one in said.json["deleted"]] == [1, 2, 4, 5]
    assert said.json["deleted_bytes"] == sum(one["size_bytes"] for one in said.json["deleted"]) > 4 << 20
    assert durable_steps(cli, job_of_six_steps) == [3, 6]
    assert {int(path.name) for path in (tmp_path / "durable" / "llama" / "steps").iterdir()} == {3, 6}
    job_of_six_steps.lose_memory()
    job_of_six_steps.assert_restores(6, tiers={"durable"})


def test_gc_without_arguments_applies_the_jobs_policy(cli, agent_dir, tmp_path, durable):
    job = CheckpointJob(agent_dir, durable, "llama")
    job.save(1, 2, 3)
    assert cli("gc", "llama", "--json").json["deleted"] == []
    close_sessions()
    policy = DurableSettings(url=durable.url, keep_last=1)
    with CheckpointJob(agent_dir, policy, "llama").checkpointer() as ckpt:
        ckpt.session.agent.configure("llama", policy)
    said = cli("gc", "llama", "--json")
    assert [one["step"] for one in said.json["deleted"]] == [1, 2]
    assert said.json["kept"] == [3]


def test_newest_good_step_stays_when_newer_ones_are_quarantined(cli, job_of_six_steps):
    for step in (5, 6):
        cli("quarantine", f"llama/step-{step}")
    said = cli("gc", "llama", "--keep-last", "1", "--json")
    assert [one["step"] for one in said.json["deleted"]] == [1, 2, 3]
    assert durable_steps(cli, job_of_six_steps) == [4, 5, 6]


def test_a_bucket(cli, agent_dir, moto, monkeypatch):
    job = CheckpointJob(agent_dir, durable_settings(moto))
    job.save(1, 2)
    close_sessions()
    prefix = job.settings.durable.url.removeprefix(f"s3://{BUCKET}/")
    with moto.client() as client:
        client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{job.name}/steps/x")
        said = cli(
            "gc", job.name, "--keep-last", "1", "--abandoned-after", "1000000", "--json"
        )  # moto's clock starts in 2010
        assert said.code == 0
        assert [one["step"] for one in said.json["deleted"]] == [1]
        assert said.json["discarded_uploads"] == 0, "the upload may still be in progress"
        said = cli("gc", job.name, "--abandoned-after", "0", "--json")
        assert said.json["discarded_uploads"] == 1
        assert client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", []) == []


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["other"], 3),
        (["llama/step-1"], 2),
        (["llama", "--keep-every", "2"], 2),
        (["llama", "--keep-last", "0"], 2),
        ([], 2),
    ],
)
def test_wrong_calls(cli, job_of_six_steps, arguments, code):
    assert cli("gc", *arguments).code == code
    assert durable_steps(cli, job_of_six_steps) == [1, 2, 3, 4, 5, 6]


def test_memory_slots_of_a_newer_agent_are_kept_until_dropped(cli, agent_dir):
    job = CheckpointJob(agent_dir, DurableSettings(), "llama")
    job.save(1, 2, durable=False)
    job.kill_agent()
    place = max((agent_dir / "notes").glob("seal.*"), key=lambda path: path.stat().st_mtime_ns)
    arena = TmpfsArena(agent_dir)
    note = msgspec.msgpack.decode(arena.get_metadata(place.name))
    arena.put_metadata(place.name, msgspec.msgpack.encode({**note, "format": METADATA_FORMAT + 1}))
    job.assert_restores(1, tiers={"memory"})
    (slot,) = cli("gc", "llama", "--unrecognized-slots", "--dry-run", "--json").json["dropped"]
    assert f"format {METADATA_FORMAT + 1}" in slot["reason"]
    assert (agent_dir / "slots" / slot["name"]).exists()
    assert "1 slot with" in cli("gc", "llama", "--unrecognized-slots").out
    assert not (agent_dir / "slots" / slot["name"]).exists()
    assert cli("gc", "llama", "--unrecognized-slots", "--json").json["dropped"] == []


# -- shards without a manifest ------------------------------------------------------------------------------------


@pytest.fixture
def job_without_manifests(job_of_six_steps, tmp_path):
    """Delete the manifests of steps 2 and 4, one shard of step 4, and the job's memory."""
    job_of_six_steps.lose_memory()
    root = tmp_path / "durable" / "llama"
    for step in (2, 4):
        (manifest,) = (root / "manifests").glob(f"{step:012d}.*.manifest")
        manifest.unlink()
    (shard,) = (root / "steps" / f"{4:012d}").rglob("*.safetensors")
    shard.unlink()
    return root / "steps"


@pytest.fixture
def store_options(durable):
    """Return options that name the durable tier, because no agent knows it."""
    return "--durable", durable.url


def make_older(folder, hours):
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - hours * 3600,) * 2)


def stored_steps(folder):
    return {int(path.name) for path in folder.iterdir()}


def steps_without_manifest(said):
    return {one["step"]: (one["deleted"], one["reason"]) for one in said.json["without_manifest"]}


def test_gc_deletes_old_shards_of_incomplete_steps(cli, job_of_six_steps, job_without_manifests, store_options):
    make_older(job_without_manifests / f"{4:012d}", 23)
    found = steps_without_manifest(cli("gc", "llama", *store_options, "--json"))
    assert found[4] == (False, "some of it was written 23 h ago")
    make_older(job_without_manifests / f"{4:012d}", 25)
    (index,) = (job_without_manifests / f"{4:012d}").rglob("*.index")
    os.utime(index)  # one file of the step is recent: an upload may be in progress
    assert not steps_without_manifest(cli("gc", "llama", *store_options, "--json"))[4][0]
    make_older(job_without_manifests / f"{4:012d}", 25)
    said = cli("gc", "llama", *store_options, "--dry-run", "--json")
    assert steps_without_manifest(said)[4] == (True, "0 of 1 parts, and no manifest")
    assert stored_steps(job_without_manifests) == {1, 2, 3, 4, 5, 6}
    assert "step 4" in cli("gc", "llama", *store_options, "-n").out
    assert "would be deleted (0 of 1 parts, and no manifest)" in cli("gc", "llama", *store_options, "-n").out
    assert cli("gc", "llama", *store_options, "--json").code == 0
    assert stored_steps(job_without_manifests) == {1, 2, 3, 5, 6}
    assert durable_steps(cli, job_of_six_steps) == [1, 3, 5, 6]
    job_of_six_steps.assert_restores(6, tiers={"durable"})


def test_gc_deletes_the_marks_of_a_step_without_a_manifest(cli, job_of_six_steps, tmp_path, store_options):
    manifests = tmp_path / "durable" / "llama" / "manifests"
    assert cli("pin", "llama", 4, *store_options).code == 0
    assert cli("unpin", "llama", 4, *store_options).code == 0
    job_of_six_steps.lose_memory()
    (manifest,) = manifests.glob(f"{4:012d}.*.manifest")
    manifest.unlink()
    assert [path.suffix for path in manifests.glob(f"{4:012d}.*")] == [".released"]
    make_older(tmp_path / "durable" / "llama" / "steps" / f"{4:012d}", 48)
    found = steps_without_manifest(cli("gc", "llama", *store_options, "--keep-last", "2", "--json"))
    assert found[4] == (True, "1 of 1 parts, and no manifest")
    assert [path.name for path in manifests.glob(f"{4:012d}.*")] == []
    job_of_six_steps.assert_restores(6, tiers={"durable"})


def test_complete_step_without_a_manifest_is_kept_for_rebuild(
    cli, job_of_six_steps, job_without_manifests, store_options
):
    make_older(job_without_manifests, 48)
    said = cli("gc", "llama", *store_options, "--json")
    assert steps_without_manifest(said)[2] == (
        False,
        "1 of 1 parts, and no manifest: `tieredckpt rebuild llama/step-2` makes it a step",
    )
    assert cli("rebuild", "llama/step-2", *store_options).code == 0
    assert durable_steps(cli, job_of_six_steps) == [1, 2, 3, 5, 6]
    (manifest,) = job_without_manifests.parent.joinpath("manifests").glob(f"{2:012d}.*.manifest")
    manifest.unlink()
    said = cli("gc", "llama", *store_options, "--keep-last", "2", "--keep-every", "2", "--json")
    assert not steps_without_manifest(said)[2][0]
    said = cli("gc", "llama", *store_options, "--keep-last", "2", "--json")
    assert steps_without_manifest(said)[2] == (True, "1 of 1 parts, and no manifest")
    assert stored_steps(job_without_manifests) == {5, 6}


def test_step_still_in_memory_is_not_collected(cli, agent_dir, durable, tmp_path):
    job = CheckpointJob(agent_dir, durable, "llama")
    job.save(1)
    root = tmp_path / "durable" / "llama"
    (manifest,) = (root / "manifests").iterdir()
    manifest.unlink()
    (shard,) = root.rglob("*.safetensors")
    shard.unlink()
    make_older(root, 100)
    assert steps_without_manifest(cli("gc", "llama", "--json"))[1] == (
        False,
        "a node has it in memory, and may still make it durable",
    )
    job.lose_memory()
    assert steps_without_manifest(cli("gc", "llama", "--durable", durable.url, "--json"))[1][0]
    assert not any(path.is_file() for path in root.rglob("*"))


def test_gc_finds_shards_with_hashed_keys_when_configured(
    cli, agent_dir, durable, store_options, tmp_path, monkeypatch
):
    job = CheckpointJob(agent_dir, DurableSettings(url=durable.url, hashed_keys=True), "llama")
    job.save(1, 2)
    job.lose_memory()
    root = tmp_path / "durable"
    shards = {int(path.parts[-3]): path for path in root.rglob("*.safetensors")}
    (manifest,) = (root / "llama" / "manifests").glob(f"{1:012d}.*")
    manifest.unlink()
    (index,) = (root / "llama" / "steps" / f"{1:012d}").rglob("*.index")
    index.unlink()  # the agent was killed before it wrote the index
    make_older(root, 48)
    assert steps_without_manifest(cli("gc", "llama", *store_options, "--json")) == {}, "no index lists the parts"
    monkeypatch.setenv("TIEREDCKPT_DURABLE_HASHED_KEYS", "1")
    assert steps_without_manifest(cli("gc", "llama", *store_options, "--json"))[1] == (
        True,
        "0 of its parts, and no manifest",
    )
    assert (shards[1].exists(), shards[2].exists()) == (False, True)


def test_index_naming_another_steps_shard_does_not_delete_it(
    cli, job_of_six_steps, job_without_manifests, store_options
):
    (other,) = (job_without_manifests / f"{5:012d}").rglob("*.index")
    (index,) = (job_without_manifests / f"{4:012d}").rglob("*.index")
    index.write_bytes(other.read_bytes())
    make_older(job_without_manifests, 48)
    assert steps_without_manifest(cli("gc", "llama", *store_options, "--json"))[4][0]
    assert durable_steps(cli, job_of_six_steps) == [1, 3, 5, 6]
    job_of_six_steps.assert_restores(5, tiers={"durable"}, named=5)


def test_object_deleted_during_an_upload_is_uploaded_again(cli, agent_dir, tmp_path, monkeypatch):
    """Upload one part per node, with the first node's part deleted by a wrong gc before the second upload."""
    monkeypatch.setattr(drain, "_UNSURE_S", 0.0)
    durable = DurableSettings(url=f"file://{tmp_path}/durable")
    with contextlib.ExitStack() as cleanup:
        stores = [NodeStore(TmpfsArena(tmp_path / f"{n}"), StoreSettings(budget="64MiB")) for n in range(2)]
        services = [NodeAgentService(store) for store in stores]
        for one in (*stores, *services):
            cleanup.callback(one.close)
        for number, (store, service) in enumerate(zip(stores, services, strict=True)):
            monkeypatch.setattr(service, "is_committer", lambda *_, first=number == 0: first)
            store.claim("job", "incarnation")
            service.configure("job", durable)
        seal(stores[0], 3, 0, 2)
        wait_until(lambda: "other parts" in services[0].drain_status("job")[0].error)
        root = tmp_path / "durable" / "job"
        said = cli("gc", "job", "--abandoned-after", "0", "--durable", durable.url, "--json")
        assert steps_without_manifest(said)[3][0]
        assert not list(root.rglob("*.safetensors")) or services[0].drain_status("job")[0].state != "done"
        seal(stores[1], 3, 1, 2)
        for service in services:
            assert service.wait_durable("job", None, 60.0).state == "done"
        assert len(list(root.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize("command", [("gc", "llama"), ("rebuild", "llama/step-1")])
def test_job_without_durable_tier_is_a_usage_error(cli, agent_dir, command):
    CheckpointJob(agent_dir, DurableSettings(), "llama").save(1, durable=False)
    said = cli(*command)
    assert said.code == 2
    assert "job 'llama' has no durable tier that this node's agent knows of" in said.err
    assert "--durable URL" in said.err
    assert "tieredckpt ls" not in said.err
