"""``tieredckpt export`` copies a step bit for bit, in every format, completely or not at all."""

import copy
import json
import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support.bits import assert_same_bits, tensor_bytes, zeros_like_state
from tests.support.jobs import CheckpointJob, state_at
from tieredckpt import Checkpointer, load

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
    pytest.mark.e2e,
]


class UnknownClass:
    """A class that safe unpickling rejects."""

    def __eq__(self, other):
        return isinstance(other, UnknownClass)

    __hash__ = None


def model_state():
    generator = torch.Generator().manual_seed(7)

    def bits(dtype, *shape):
        count = torch.Size(shape).numel() * dtype.itemsize
        return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)

    return {
        "model": {
            "embed": bits(torch.bfloat16, 100, 33),
            "scale": torch.tensor(1.5),
            "empty": torch.empty(0, 4),
            "mask": torch.tensor([True, False, True]),
            "fp8": bits(torch.float8_e4m3fn, 17),
            "fp8_5": bits(torch.float8_e5m2, 3, 5),
            "half": bits(torch.float16, 9),
            "ids": torch.arange(5, dtype=torch.int64),
            "unsigned": torch.tensor([1, 2, 3], dtype=torch.uint16),
            "double": bits(torch.float64, 2, 3),
        },
        "optim": {"state": [torch.arange(4.0), {"step": 3}], "lr": 0.1},
        "step": 11,
    }


def save_state(job, state, step=1):
    with job.checkpointer() as ckpt:
        assert ckpt.save(state, step).ok
        ckpt.wait()


@pytest.fixture
def saved_job(agent_dir, durable, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_MEMORY_NONFINITE", "save")  # any bits are exported
    job = CheckpointJob(agent_dir, durable, "m")
    save_state(job, model_state())
    return job


def test_safetensors_export_contains_the_tensors(cli, saved_job, tmp_path):
    path = tmp_path / "out" / "model.safetensors"
    said = cli("export", "m", path, "--prefix", "model.", "--json")
    assert said.code == 0
    expected = model_state()["model"]
    found = load_file(path)
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert tensor_bytes(found[name]) == tensor_bytes(tensor), name
    assert said.json["tensors"] == len(expected)
    assert said.json["left_out"] == []
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert [entry.name for entry in path.parent.iterdir()] == ["model.safetensors"]


def test_objects_left_out_of_the_export_are_named(cli, saved_job, tmp_path):
    said = cli("export", "m", tmp_path / "all.safetensors")
    assert said.code == 0
    assert "skipped, because safetensors holds tensors only: optim.lr" in said.out


def test_a_hugging_face_folder(cli, saved_job, tmp_path):
    folder = tmp_path / "hf"
    said = cli("export", "m/step-1", folder, "--format", "hf", "--prefix", "model.", "--max-shard-size", "2KB")
    assert said.code == 0
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    expected = model_state()["model"]
    assert sorted(index["weight_map"]) == sorted(expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 1
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as opened:
            assert tensor_bytes(opened.get_tensor(name)) == tensor_bytes(expected[name])
    for file in files:
        found = load_file(folder / file)
        assert len(found) == 1 or sum(tensor.nbytes for tensor in found.values()) <= 2000


def test_small_model_is_a_single_file_for_from_pretrained(cli, saved_job, tmp_path):
    assert cli("export", "m", tmp_path / "hf", "--format", "hf", "--prefix", "model.").code == 0
    assert [entry.name for entry in (tmp_path / "hf").iterdir()] == ["model.safetensors"]


def test_torch_export_preserves_the_state(cli, saved_job, tmp_path):
    path = tmp_path / "state.pt"
    assert cli("export", "m", path, "--format", "torch").code == 0
    expected, found = model_state(), torch.load(path, weights_only=True)
    assert sorted(found) == sorted(expected)
    for section, value in expected.items():
        if isinstance(value, dict):
            assert_same_bits(dict(sorted(value.items())), dict(sorted(found[section].items())))
        else:
            assert found[section] == value
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert tensor_bytes(mapped["model"]["embed"]) == tensor_bytes(expected["model"]["embed"])


def train(model, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def export_torch(cli, job, folder):
    assert cli("export", job, folder / "state.pt", "--format", "torch").code == 0
    return torch.load(folder / "state.pt", weights_only=True)


def load_whole(cli, job, folder):
    return load(job)


@pytest.mark.parametrize("read", [export_torch, load_whole])
@pytest.mark.parametrize(
    "optimizer",
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {})],
    ids=["adamw", "momentum", "stateless"],
)
def test_optimizer_loads_its_exported_state(cli, agent_dir, durable, tmp_path, read, optimizer):
    kind, options = optimizer
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(6)))
    saved = kind(model.parameters(), lr=0.1, **options)
    train(model, saved)
    save_state(CheckpointJob(agent_dir, durable, "m"), {"model": model, "optim": saved})
    found = read(cli, "m", tmp_path)
    copied = copy.deepcopy(model)
    restored = kind(copied.parameters(), lr=0.3, **options)
    restored.load_state_dict(found["optim"])
    moments, found_moments = saved.state_dict()["state"], restored.state_dict()["state"]
    assert list(moments) == list(found_moments)
    for number, values in moments.items():
        assert_same_bits(dict(sorted(values.items())), dict(sorted(found_moments[number].items())))
    train(model, saved)
    train(copied, restored)
    assert_same_bits(model.state_dict(), copied.state_dict())


def test_a_dcp_folder_loads_with_dcp(cli, saved_job, tmp_path):
    assert cli("export", "m", tmp_path / "dcp", "--format", "dcp").code == 0
    expected = model_state()
    found = zeros_like_state(expected)
    dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same_bits(expected, found)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_dcp_export_refuses_sparse_tensors(cli, agent_dir, durable, tmp_path):
    dense = torch.eye(4)
    state = {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr(), "w": torch.ones(3)}
    save_state(CheckpointJob(agent_dir, durable, "sparse"), state)
    said = cli("export", "sparse", tmp_path / "dcp", "--format", "dcp")
    assert said.code == 2
    assert "Cannot export 'coo', 'csr' in DCP format" in said.err
    assert not list(tmp_path.glob("*dcp*"))
    assert cli("export", "sparse", tmp_path / "dcp", "--format", "dcp", "--exclude", "c*").code == 0
    target = {"w": torch.zeros(3)}
    dcp.load(target, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(target["w"], state["w"])


@pytest.mark.parametrize("kind", ["safetensors", "hf", "torch", "dcp"])
def test_export_writes_hostile_names_only_inside_the_destination(cli, agent_dir, durable, tmp_path, kind):
    names = ["../up", "/tieredckpt-absolute", "a/../../b", "line\nbreak"]
    save_state(CheckpointJob(agent_dir, durable, "hostile"), {name: torch.ones(3) for name in names})
    place = tmp_path / "deep" / "place"
    said = cli("export", "hostile", place / "out", "--format", kind, "--max-shard-size", "12B")
    assert said.code == 0, said.err
    assert not Path("/tieredckpt-absolute").exists()
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["place"]
    assert [entry.name for entry in place.iterdir()] == ["out"]
    assert {entry.name for entry in tmp_path.iterdir()} <= {"deep", "durable"}


def test_inspect_escapes_control_characters_in_names(cli, agent_dir, durable):
    state = {"line\nbreak": torch.ones(3), "car\rriage\ttab\x1b[2J": torch.ones(3), "object\nname": 1}
    save_state(CheckpointJob(agent_dir, durable, "hostile"), state)
    said = cli("inspect", "hostile", "--pieces")
    for shown in ("line\\x0abreak", "car\\x0driage\\x09tab\\x1b[2J", "object\\x0aname"):
        assert shown in said.out


def test_only_selected_names(cli, saved_job, tmp_path):
    path = tmp_path / "some.safetensors"
    assert cli("export", "m", path, "--select", "model.fp8*", "--select", "*.embed", "--exclude", "*_5").code == 0
    assert sorted(load_file(path)) == ["model.embed", "model.fp8"]
    assert cli("export", "m", tmp_path / "none", "--select", "zzz").code == 3


def test_types_that_safetensors_lacks_are_all_named(cli, agent_dir, durable, tmp_path):
    state = {
        "c": torch.ones(2, dtype=torch.complex64),
        "f": torch.ones(2).to(torch.float8_e4m3fnuz),
        "w": torch.ones(3),
    }
    save_state(CheckpointJob(agent_dir, durable, "odd"), state)
    said = cli("export", "odd", tmp_path / "x.safetensors")
    assert said.code == 2
    assert "c (complex64), f (float8_e4m3fnuz)" in said.err
    assert "--format torch or dcp" in said.err
    assert list(tmp_path.glob("*x.safetensors*")) == []
    assert cli("export", "odd", tmp_path / "x.safetensors", "--exclude", "[cf]").code == 0
    assert cli("export", "odd", tmp_path / "x.pt", "--format", "torch").code == 0
    assert_same_bits(state, torch.load(tmp_path / "x.pt", weights_only=True))


def test_objects_are_unpickled_only_with_allow_pickle(cli, agent_dir, durable, tmp_path):
    save_state(CheckpointJob(agent_dir, durable, "o"), {"w": torch.ones(3), "thing": UnknownClass()})
    said = cli("export", "o", tmp_path / "x.pt", "--format", "torch")
    assert said.code == 2
    assert "thing: reading would run pickled code" in said.err
    assert not (tmp_path / "x.pt").exists()
    assert cli("export", "o", tmp_path / "x.pt", "--format", "torch", "--allow-pickle").code == 0
    assert torch.load(tmp_path / "x.pt", weights_only=False)["thing"] == UnknownClass()
    assert cli("export", "o", tmp_path / "dcp", "--format", "dcp").code == 0, "DCP export copies the bytes unread"


def sharded_state(full):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placements = {"rows": Shard(0), "columns": Shard(1), "uneven": Shard(0), "fp8": Shard(1), "odd": Shard(1)}
    return {
        name: distribute_tensor(value, mesh, [placements[name]], src_data_rank=None) if name in placements else value
        for name, value in full.items()
    }


def full_state():
    generator = torch.Generator().manual_seed(3)
    return {
        "rows": torch.randn(8, 6, generator=generator),
        "columns": torch.randn(5, 7, 2, generator=generator).bfloat16(),
        "uneven": torch.randn(3, 4, generator=generator),
        "fp8": torch.randint(0, 256, (4, 6), dtype=torch.uint8, generator=generator).view(torch.float8_e5m2),
        "odd": torch.randint(0, 2, (4, 3), dtype=torch.uint8, generator=generator).bool(),
        "replicated": torch.arange(10),
    }


def save_sharded(name, url):
    with Checkpointer(f"tiered://{name}", durable=url) as ckpt:
        ckpt.save(sharded_state(full_state()), 5).wait("durable")


@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_export_assembles_sharded_tensors(cli, agent_dir, durable, ranks, tmp_path, memory):
    job = CheckpointJob(agent_dir, durable)
    ranks.run(2, save_sharded, job.name, durable.url)
    if memory == "lost":
        job.lose_memory()
    said = cli("export", job.name, tmp_path / "x.safetensors", "--durable", durable.url, "--json")
    assert said.code == 0
    assert list(said.json["read_bytes"]) == ["memory" if memory == "kept" else "durable"]
    found, expected = load_file(tmp_path / "x.safetensors"), full_state()
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert tensor_bytes(found[name]) == tensor_bytes(value), name
    assert cli("export", job.name, tmp_path / "dcp", "--format", "dcp", "--durable", durable.url).code == 0
    loaded = zeros_like_state(expected)
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert_same_bits(expected, loaded)


def test_export_reads_the_durable_copy_of_a_damaged_shard(cli, job, slot_of, flip_byte_of, tmp_path):
    flip_byte_of(slot_of(3))
    said = cli("export", "llama/step-3", tmp_path / "x.safetensors", "--json")
    assert said.code == 0
    assert "durable" in said.json["read_bytes"]
    assert tensor_bytes(load_file(tmp_path / "x.safetensors")["w"]) == tensor_bytes(state_at(3)["w"])


def test_export_of_damaged_copies_leaves_no_files(cli, job, shard_of, flip_byte_of, tmp_path):
    flip_byte_of(shard_of(1))
    said = cli("export", "llama/step-1", tmp_path / "x.safetensors")
    assert said.code == 4
    assert "not what was saved" in said.err
    assert list(tmp_path.glob("*x.safetensors*")) + list(tmp_path.glob(".*x.safetensors*")) == []


@pytest.mark.parametrize("kind", ["safetensors", "torch", "hf", "dcp"])
def test_nothing_is_overwritten_without_force(cli, job, tmp_path, kind):
    place = tmp_path / "out"
    assert cli("export", "llama/step-1", place, "--format", kind).code == 0
    before = {path.name: path.read_bytes() for path in ([place] if place.is_file() else place.iterdir())}
    said = cli("export", "llama/step-2", place, "--format", kind)
    assert said.code == 2
    assert "--force" in said.err
    assert {path.name: path.read_bytes() for path in ([place] if place.is_file() else place.iterdir())} == before
    assert cli("export", "llama/step-2", place, "--format", kind, "--force").code == 0
    after = {path.name: path.read_bytes() for path in ([place] if place.is_file() else place.iterdir())}
    assert after.keys() == before.keys()
    assert after != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["durable", "out"]


def test_force_does_not_replace_a_folder_with_foreign_files(cli, job, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    said = cli("export", "llama", tmp_path / "home", "--format", "hf", "--force")
    assert said.code == 2
    assert "thesis.tex" in said.err
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


def test_a_wrong_size_is_a_usage_error(cli, job, tmp_path):
    assert cli("export", "llama", tmp_path / "x", "--format", "hf", "--max-shard-size", "big").code == 2


def export_and_measure(say, name, url, place, kind):
    """Return the peak memory beyond the cost of reading the step's metadata and importing torch."""
    from tieredckpt.cli import main

    assert main(["inspect", name, "--durable", url]) == 0
    assert main(["export", name, f"{place}/warm", "--format", kind, "--durable", url, "--select", "t0"]) == 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert main(["export", name, f"{place}/all", "--format", kind, "--durable", url]) == 0
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


@pytest.mark.parametrize(
    "kind", ["safetensors", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("torch", "hf", "dcp"))]
)
def test_export_peak_memory_is_about_a_single_tensor(agent_dir, durable, tmp_path, zygote, kind):
    job = CheckpointJob(agent_dir, durable)
    with job.checkpointer() as ckpt:
        ckpt.save({f"t{n}": torch.full((4 << 20,), float(n)) for n in range(12)}, 1).wait("durable")
    job.lose_memory()  # mapped shards would count
    grown = zygote.run(export_and_measure, job.name, durable.url, str(tmp_path), kind).result
    assert grown < 64 << 20, f"{grown >> 20} MiB for 12 tensors of 16 MiB"


def test_directory_is_exported_as_its_files(agent_dir, cli, tmp_path):
    files = {"model.bin": os.urandom(1 << 20), "sub/config.json": b"{}", "empty": b""}
    for name, data in files.items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_bytes(data)
    (tmp_path / "out" / "no files").mkdir()
    with Checkpointer("tiered://folder") as ckpt:
        ckpt.save_directory(tmp_path / "out", 3).wait()
    said = cli("export", "folder", tmp_path / "back", "--format", "directory", "--json")
    assert (said.code, said.json["files"]) == (0, len(files))
    assert {name: (tmp_path / "back" / name).read_bytes() for name in files} == files
    assert (tmp_path / "back" / "no files").is_dir()


def test_state_is_not_exported_as_a_directory(agent_dir, cli, tmp_path):
    with Checkpointer("tiered://state") as ckpt:
        ckpt.save({"w": torch.ones(3)}, 1).wait()
    said = cli("export", "state", tmp_path / "back", "--format", "directory")
    assert said.code == 2
    assert "use another format" in said.err
    assert not (tmp_path / "back").exists()
