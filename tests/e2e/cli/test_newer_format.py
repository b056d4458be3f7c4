"""``ls``, ``status`` and ``doctor`` show steps whose metadata has a newer, unreadable format."""

import msgspec
import pytest
import xxhash
import zstandard

from peerstore.store.arena import TmpfsArena
from peerstore.store.slot_metadata import METADATA_FORMAT
from tests.support.jobs import CheckpointJob
from tieredckpt.session.session import close_sessions

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


def test_commands_show_steps_of_a_newer_format_in_memory(cli, agent_dir, durable):
    job = CheckpointJob(agent_dir, durable, "llama")
    job.save(1, 2, durable=False)
    close_sessions()
    job.kill_agent()
    arena = TmpfsArena(agent_dir)
    for place in (agent_dir / "notes").glob("seal.*"):
        note = msgspec.msgpack.decode(arena.get_metadata(place.name))
        arena.put_metadata(place.name, msgspec.msgpack.encode({**note, "format": METADATA_FORMAT + 1}))
    arena.close()
    for manifest in agent_dir.parent.rglob("*.manifest"):
        manifest.unlink()
    job.save(3, durable=False)
    close_sessions()
    steps = {one["step"]: one for one in cli("ls", "llama", "--json").json["steps"]}
    assert steps[2]["state"] == "unsupported"
    assert f"format {METADATA_FORMAT + 1}" in steps[2]["unsupported"]
    assert steps[3]["state"] == "complete"
    assert any(f"format {METADATA_FORMAT + 1}" in one for one in cli("status", "--json").json["unrecognized"])
    assert "unsupported: slot.llama" in cli("status").out
    said = cli("doctor", "--json")
    assert said.code == 1
    assert any(one["what"] == "metadata format" for one in said.json["findings"])


def test_commands_show_durable_steps_of_a_newer_format(cli, agent_dir, durable, tmp_path):
    job = CheckpointJob(agent_dir, durable, "llama")
    job.save(1)
    job.lose_memory()
    (path,) = (tmp_path / "durable" / "llama" / "manifests").iterdir()
    inner = msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(path.read_bytes()[4:-8]))
    packed = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(inner | {"format": 99}))
    path.write_bytes(b"TCKP" + packed + xxhash.xxh3_64_digest(packed))
    said = cli("ls", "llama", "--durable", durable.url, "--json")
    assert said.code == 0
    (step,) = said.json["steps"]
    assert step["state"] == "unsupported"
    assert "step 1 of llama" in step["unsupported"]
    assert "format 99" in step["unsupported"]
