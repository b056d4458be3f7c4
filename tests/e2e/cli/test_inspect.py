"""``tieredckpt inspect``, with its output compared to the saved state."""

import pytest
import torch
import torch.distributed as dist

from tests.support.jobs import CheckpointJob
from tieredckpt import Checkpointer

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


def test_names_types_shapes_and_sizes(cli, job):
    said = cli("inspect", "llama/step-2", "--json")
    assert said.code == 0
    found = {one["name"]: (one["dtype"], one["shape"], one["size_bytes"]) for one in said.json["tensors"]}
    assert found == {
        "w": ("float32", [1 << 18], 4 << 18),
        "nested.b": ("int64", [7], 56),
        "nested.half": ("bfloat16", [33], 66),
    }
    assert [one["name"] for one in said.json["objects"]] == ["step"]
    (shard,) = said.json["shards"]
    assert shard["tiers"] == ["memory", "durable"]
    assert shard["object"].startswith("llama/steps/000000000002/")
    assert said.json["step"] == 2


def test_default_step_is_the_one_a_load_uses(cli, job):
    assert cli("inspect", "llama", "--json").json["step"] == 3
    cli("quarantine", "llama/step-3")
    assert cli("inspect", "llama", "--json").json["step"] == 2


def test_names_can_be_filtered(cli, job):
    said = cli("inspect", "llama", "--match", "nested.*", "--json")
    assert [one["name"] for one in said.json["tensors"]] == ["nested.b", "nested.half"]
    assert said.json["objects"] == []
    said = cli("inspect", "llama", "--match", "nothing*")
    assert said.code == 3
    assert "3 tensors and 1 objects" in said.err


def save_sharded(name, url):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(60.0).view(10, 6)
    state = {
        "rows": distribute_tensor(full, mesh, [Shard(0)]),
        "columns": distribute_tensor(full, mesh, [Shard(1)]),
        "every": full.clone(),
    }
    with Checkpointer(f"tiered://{name}", durable=url) as ckpt:
        ckpt.save(state, 5).wait("durable")


def test_sharding_is_shown(cli, agent_dir, durable, ranks):
    job = CheckpointJob(agent_dir, durable)
    ranks.run(2, save_sharded, job.name, durable.url)
    said = cli("inspect", job.name, "--json")
    tensors = {one["name"]: one for one in said.json["tensors"]}
    assert tensors["rows"]["sharding"] == "2 pieces along 0"
    assert tensors["columns"]["sharding"] == "2 pieces along 1"
    assert tensors["every"]["sharding"] == "whole"
    assert [(p["part"], p["offsets"], p["sizes"]) for p in tensors["columns"]["pieces"]] == [
        (0, [0, 0], [10, 3]),
        (1, [0, 3], [10, 3]),
    ]
    text = cli("inspect", job.name, "--pieces").out
    assert "part 1: from (0, 3) size (10, 3)" in text
    assert "columns  float32  10x6" in text


def test_missing_step_is_not_found(cli, job):
    assert cli("inspect", "llama/step-9").code == 3
