"""``tieredckpt gc``: what policy does not keep goes, the newest whole step never does."""

import msgspec
import pytest

from peerstore.arena import TmpfsArena
from peerstore.notes import FORMAT
from tests.support.jobs import Job, on_server
from tests.support.s3 import BUCKET
from tieredckpt.session import close_sessions
from tieredckpt.settings import DurableSettings

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


@pytest.fixture
def six(agent_dir, durable):
    job = Job(agent_dir, durable, "llama")
    job.save(*range(1, 7))
    return job


def left(cli, job):
    said = cli("ls", job.name, "--durable", job.settings.durable.url, "--json")
    return [line["step"] for line in said.json["steps"] if "durable" in line["tiers"]]


def test_a_dry_run_deletes_nothing(cli, six):
    said = cli("gc", "llama", "--keep-last", "2", "--dry-run", "--json")
    assert said.code == 0
    assert [one["step"] for one in said.json["deleted"]] == [1, 2, 3, 4]
    assert said.json["kept"] == [5, 6]
    assert left(cli, six) == [1, 2, 3, 4, 5, 6]
    assert "4 steps would be deleted" in cli("gc", "llama", "--keep-last", "2", "-n").out


def test_steps_are_deleted_with_everything_of_them(cli, six, tmp_path):
    said = cli("gc", "llama", "--keep-last", "1", "--keep-every", "3", "--json")
    assert said.code == 0
    assert [one["step"] for one in said.json["deleted"]] == [1, 2, 4, 5]
    assert said.json["deleted_bytes"] == sum(one["size_bytes"] for one in said.json["deleted"]) > 4 << 20
    assert left(cli, six) == [3, 6]
    assert {int(path.name) for path in (tmp_path / "durable" / "llama" / "steps").iterdir()} == {3, 6}
    six.lose_memory()
    six.expect(6, tiers={"durable"})


def test_without_arguments_the_jobs_policy_decides(cli, agent_dir, tmp_path, durable):
    job = Job(agent_dir, durable, "llama")
    job.save(1, 2, 3)
    assert cli("gc", "llama", "--json").json["deleted"] == []
    close_sessions()
    policy = DurableSettings(url=durable.url, keep_last=1)
    with Job(agent_dir, policy, "llama").checkpointer() as ckpt:
        ckpt.session.node.configure("llama", policy)
    said = cli("gc", "llama", "--json")
    assert [one["step"] for one in said.json["deleted"]] == [1, 2]
    assert said.json["kept"] == [3]


def test_the_newest_good_step_stays_when_newer_ones_are_quarantined(cli, six):
    for step in (5, 6):
        cli("quarantine", f"llama/step-{step}")
    said = cli("gc", "llama", "--keep-last", "1", "--json")
    assert [one["step"] for one in said.json["deleted"]] == [1, 2, 3]
    assert left(cli, six) == [4, 5, 6]


def test_a_bucket(cli, agent_dir, moto, monkeypatch):
    job = Job(agent_dir, on_server(moto))
    job.save(1, 2)
    close_sessions()
    prefix = job.settings.durable.url.removeprefix(f"s3://{BUCKET}/")
    with moto.client() as client:
        client.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/{job.name}/steps/x")
        said = cli(
            "gc", job.name, "--keep-last", "1", "--abandoned-after", "1000000", "--json"
        )  # moto begins all in 2010
        assert said.code == 0
        assert [one["step"] for one in said.json["deleted"]] == [1]
        assert said.json["discarded_uploads"] == 0, "it may still be going on"
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
def test_wrong_calls(cli, six, arguments, code):
    assert cli("gc", *arguments).code == code
    assert left(cli, six) == [1, 2, 3, 4, 5, 6]


def test_a_job_without_durable_tier(cli, agent_dir):
    Job(agent_dir, DurableSettings(), "near").save(1, durable=False)
    said = cli("gc", "near")
    assert said.code == 3
    assert "--durable URL" in said.err


def test_what_a_newer_agent_left_in_memory_is_kept_until_somebody_drops_it(cli, agent_dir):
    job = Job(agent_dir, DurableSettings(), "llama")
    job.save(1, 2, durable=False)
    job.kill_agent()
    place = max((agent_dir / "notes").glob("seal.*"), key=lambda path: path.stat().st_mtime_ns)
    arena = TmpfsArena(agent_dir)
    note = msgspec.msgpack.decode(arena.get_note(place.name))
    arena.put_note(place.name, msgspec.msgpack.encode({**note, "format": FORMAT + 1}))
    job.expect(1, tiers={"memory"})
    (slot,) = cli("gc", "llama", "--set-aside", "--dry-run", "--json").json["dropped"]
    assert f"format {FORMAT + 1}" in slot["reason"]
    assert (agent_dir / "slots" / slot["name"]).exists()
    assert "1 slot with" in cli("gc", "llama", "--set-aside").out
    assert not (agent_dir / "slots" / slot["name"]).exists()
    assert cli("gc", "llama", "--set-aside", "--json").json["dropped"] == []
