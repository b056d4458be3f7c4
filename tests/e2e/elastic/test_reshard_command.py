"""``elastic reshard`` converts any kind of checkpoint into any other, completely or not at all."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from elastic.cli import main
from elastic.reshard import targets as folder_module
from elastic.reshard.sources import PlainSource
from elastic.reshard.state_checksum import state_checksum
from tests.support.bits import assert_same_bits, tensor_bytes, zeros_like_state
from tests.support.jobs import bucket_url
from tests.support.layouts import Variant, build_variant
from tests.support.models import get_state
from tieredckpt import TieredReader, TieredWriter
from tieredckpt.dcp.plain_checkpoints import plain_writer
from tieredckpt.format.slice_boxes import full_box
from tieredckpt.session.session import close_sessions
from tieredckpt.settings import DurableSettings, load_settings, override_settings
from tieredckpt.testing import memory_node

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
]


def bits(dtype, *shape):
    generator = torch.Generator().manual_seed(dtype.itemsize)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def state():
    return {
        "model": {
            "embed": bits(torch.bfloat16, 101, 33),
            "wide": bits(torch.float32, 3, 5000),
            "scale": torch.tensor(1.5),
            "empty": torch.empty(0, 4),
            "mask": torch.tensor([True, False, True]),
            "fp8": bits(torch.float8_e4m3fn, 17),
            "double": bits(torch.float64, 7, 2, 3),
            "complex": bits(torch.complex128, 5),
        },
        "optim": {"state": [torch.arange(4.0), {"step": 3}], "lr": 0.1},
        "step": 11,
    }


EXPECTED = state_checksum(state()).all_reduced().tensors_only


class Said:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def run(capsys):
    def call(*arguments):
        capsys.readouterr()
        code = main(["reshard", *map(str, arguments)])
        return Said(code, *capsys.readouterr())

    return call


@pytest.fixture
def durable(tmp_path):
    return DurableSettings(url=f"file://{tmp_path}/durable")


@pytest.fixture
def plain(tmp_path):
    path = tmp_path / "plain"
    dcp.save(state(), checkpoint_id=path, no_dist=True)
    return path


def loads_from_folder(path):
    found = zeros_like_state(state())
    dcp.load(found, storage_reader=FileSystemReader(path), no_dist=True)
    assert_same_bits(state(), found)


def loads_from_store(job, url):
    found = zeros_like_state(state())
    reader = TieredReader(f"tiered://{job}", durable=url)
    with memory_node():
        dcp.load(found, storage_reader=reader, no_dist=True)
    assert_same_bits(state(), found)
    return reader.restored_step


def save_durable(durable, values, job="m", step=4):
    settings = override_settings(load_settings(), durable=vars(durable))
    with memory_node() as node:
        writer = TieredWriter(f"tiered://{job}", step, settings=settings)
        dcp.save(values, storage_writer=writer, no_dist=True)
        assert node.wait_durable(job, None, 60).state == "done"


# -- all sources and targets ----------------------------------------------------------------------------------------


SOURCES = ["durable", "durable path", "plain", "plain step", "plain url"]


@pytest.fixture
def source(request, durable, plain, tmp_path):
    """Return a value of SRC in the requested form."""
    if request.param == "plain":
        return str(plain)
    if request.param == "plain url":
        return plain.as_uri()
    if request.param == "plain step":
        dcp.save(state(), storage_writer=plain_writer(durable, "m", 4), no_dist=True)
        return f"{durable.url}/m"
    save_durable(durable, state())
    return f"{durable.url}/m/step-4" if request.param == "durable" else f"{tmp_path}/durable/m"


INTO_A_FOLDER = [
    pytest.param(source, ranks, marks=() if ranks == 3 or source == "plain" else pytest.mark.nightly)
    for source in SOURCES
    for ranks in (1, 3, 8)
]


@pytest.mark.parametrize(("source", "ranks"), INTO_A_FOLDER, indirect=["source"])
def test_into_a_plain_folder(run, source, tmp_path, ranks):
    said = run(source, tmp_path / "out", "--ranks", ranks, "--json")
    assert (said.code, said.err) == (0, "")
    assert said.json["verified"]
    assert (said.json["parts"], said.json["tensors"], said.json["objects"]) == (ranks, 9, 3)
    assert said.json["checksum"] == str(EXPECTED)
    loads_from_folder(tmp_path / "out")
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {".metadata", *(f"__{rank}_0.distcp" for rank in range(ranks))}


@pytest.mark.parametrize("source", ["durable", "plain"], indirect=True)
@pytest.mark.parametrize("layout", ["fsdp", "whole"])
def test_into_a_durable_tier(run, source, tmp_path, layout):
    url = f"file://{tmp_path}/other"
    said = run(source, f"{url}/new/step-9", "--ranks", 3, "--layout", layout)
    assert said.code == 0, said.err
    size = sum(entry.nbytes for entry in tensors())
    assert f"verified: checksum {EXPECTED} of 9 tensors, {size} bytes equal on both sides" in said.out
    assert loads_from_store("new", url) == 9


def test_reshard_reads_from_memory(run, agent_dir, tmp_path):
    """The command reads the step of a running job through the node's agent."""
    dcp.save(state(), storage_writer=TieredWriter("tiered://m", 4), no_dist=True)
    assert run("tiered://m", tmp_path / "out", "--ranks", 3).code == 0
    loads_from_folder(tmp_path / "out")
    assert run("tiered://m/step-4", f"file://{tmp_path}/durable/other", "--ranks", 3).code == 0
    dcp.save({"s": torch.eye(3).to_sparse()}, storage_writer=TieredWriter("tiered://sparse", 1), no_dist=True)
    said = run("tiered://sparse", tmp_path / "none", "--ranks", 2)
    assert (said.code, "sparse" in said.err) == (2, True)
    assert run("tiered://nothing", tmp_path / "none", "--ranks", 2).code == 3
    assert not (tmp_path / "none").exists()
    close_sessions()
    assert loads_from_store("other", f"file://{tmp_path}/durable") == 4


def tensors():
    flat = [*state()["model"].values(), state()["optim"]["state"][0]]
    return [tensor for tensor in flat if isinstance(tensor, torch.Tensor)]


def test_reshard_round_trip_matches_the_original(run, plain, tmp_path):
    url = f"file://{tmp_path}/durable"
    assert run(plain, tmp_path / "eight", "--ranks", 8).code == 0
    assert run(tmp_path / "eight", f"{url}/m/step-0", "--ranks", 5).code == 0
    assert run(f"{url}/m", tmp_path / "three", "--ranks", 3, "--layout", "whole").code == 0
    said = run(tmp_path / "three", tmp_path / "like", "--like", tmp_path / "eight", "--json")
    assert (said.json["layout"], said.json["parts"], said.json["checksum"]) == ("like", 8, str(EXPECTED))
    loads_from_folder(tmp_path / "like")
    assert pieces(tmp_path / "like") == pieces(tmp_path / "eight")


def pieces(path):
    source = PlainSource("", FileSystemReader(path))
    return {name: sorted(form.pieces) for name, form in source.tensors.items()}


def test_an_object_store(run, plain, monkeypatch, rclone, tmp_path):
    url = bucket_url()
    monkeypatch.setenv("AWS_ENDPOINT_URL", rclone.endpoint)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_COMPRESS", "zstd")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_HASHED_KEYS", "1")
    assert run(plain, f"{url}/m/step-2", "--ranks", 2).code == 0
    assert loads_from_store("m", url) == 2
    assert run(f"{url}/m", tmp_path / "out", "--ranks", 3).code == 0
    loads_from_folder(tmp_path / "out")
    again = run(plain, f"{url}/m/step-2", "--ranks", 2)
    assert again.code == 2
    assert "exists" in again.err


def save_sharded(variant):
    dcp.save(get_state(*build_variant(variant, blank=False)), storage_writer=TieredWriter("tiered://sharded", 3))


def load_sharded(variant, path):
    found = get_state(*build_variant(variant, blank=True))
    dcp.load(found, storage_reader=FileSystemReader(path))
    expected = get_state(*build_variant(variant, blank=False))
    assert_same_bits(expected, found)
    return state_checksum(found).all_reduced().tensors_only


@pytest.mark.parametrize("saved", [Variant("2d", (2, 2)), Variant("tp", (3,))], ids=str)
def test_saved_shards_are_loaded_by_another_world(run, ranks, agent_dir, tmp_path, saved):
    """The command prints the same checksum that the ranks compute."""
    ranks.run(saved.world, save_sharded, saved)
    said = run("tiered://sharded", tmp_path / "out", "--ranks", 3, "--json")
    assert said.json["parts_before"] == saved.world
    for found in ranks.run(3, load_sharded, Variant("fsdp", (3,)), str(tmp_path / "out")):
        assert str(found) == said.json["checksum"]


def test_the_real_command(plain, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "elastic", "reshard", plain, tmp_path / "out", "--ranks", "2"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert str(EXPECTED) in done.stdout
    loads_from_folder(tmp_path / "out")


def test_progress_bar_is_shown_on_a_terminal(run, plain, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    said = run(plain, tmp_path / "out", "--ranks", 2)
    assert said.code == 0
    assert "reading" in said.err
    assert "writing" in said.err


def test_help(run):
    said = run("--help")
    assert said.code == 0
    assert "--ranks M" in said.out
    assert "Exit codes:" in said.out


# -- existing targets ------------------------------------------------------------------------------------------------


def test_folder_is_replaced_only_with_force(run, plain, tmp_path):
    out = tmp_path / "out"
    assert run(plain, out, "--ranks", 5).code == 0
    before = sorted(out.iterdir())
    refused = run(plain, out, "--ranks", 2)
    assert refused.code == 2
    assert "--force" in refused.err
    assert sorted(out.iterdir()) == before
    assert run(plain, out, "--ranks", 2, "--force").code == 0
    loads_from_folder(out)
    assert len(list(out.iterdir())) == 3
    (out / "mine.txt").write_text("")
    assert run(plain, out, "--ranks", 2, "--force").code == 2


def test_step_is_replaced_only_with_force(run, plain, tmp_path):
    url = f"file://{tmp_path}/durable"
    assert run(plain, f"{url}/m/step-3", "--ranks", 5).code == 0
    assert run(plain, f"{url}/m/step-2", "--ranks", 1).code == 0
    assert run(plain, f"{url}/m/step-3", "--ranks", 2).code == 2
    assert run(plain, f"{url}/m/step-3", "--ranks", 2, "--force").code == 0
    assert loads_from_store("m", url) == 3
    assert len(list((tmp_path / "durable/m/manifests").iterdir())) == 2
    assert len(list((tmp_path / "durable/m/steps/000000000003").iterdir())) == 1
    dcp.save(state(), storage_writer=plain_writer(DurableSettings(url=url), "m", 8), no_dist=True)
    said = run(plain, f"{url}/m/step-8", "--ranks", 2, "--force")
    assert (said.code, "plain DCP checkpoint" in said.err) == (2, True)


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["SRC", "OUT"], "--ranks M"),
        (["SRC", "OUT", "--ranks", "2", "--like", "SRC"], "--ranks M"),
        (["SRC", "OUT", "--like", "SRC", "--layout", "whole"], "choose one"),
        (["SRC", "OUT", "--ranks", "0"], "Invalid value"),
        (["SRC", "tiered://job/step-1", "--ranks", "2"], "durable URL"),
        (["SRC", "file:///tmp/nowhere/job", "--ranks", "2"], "which step"),
        (["SRC", "s3://job", "--ranks", "2"], "names no job"),
        (["SRC", "file:///tmp/a job/step-1", "--ranks", "2"], "a job"),
        (["tiered://a/b/c", "OUT", "--ranks", "2"], "step-N"),
    ],
)
def test_usage(run, plain, tmp_path, arguments, said):
    places = {"SRC": str(plain), "OUT": str(tmp_path / "out")}
    done = run(*(places.get(argument, argument) for argument in arguments))
    assert done.code == 2
    assert said in done.err
    assert not (tmp_path / "out").exists()


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def flip_in(path, known):
    flip(path, path.read_bytes().index(known) + 1)


EMBEDDED = bits(torch.bfloat16, 101, 33).view(torch.uint8).numpy().tobytes()[500:540]


def no_folder(path):
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


WRONG = {
    "absent": (no_folder, 3),
    "no metadata": (lambda path: (path / ".metadata").unlink(), 3),
    "metadata cut short": (lambda path: (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:90]), 4),
    "metadata of another kind": (lambda path: (path / ".metadata").write_bytes(b"\x80\x04N."), 4),
    "no file": (lambda path: (path / "__1_0.distcp").unlink(), 4),
    "file cut short": (lambda path: os.truncate(path / "__1_0.distcp", 500), 4),
    "a flipped bit of a tensor": (lambda path: flip_in(path / "__0_0.distcp", EMBEDDED), 4),
    "a flipped bit of an object": (lambda path: flip_in(path / "__0_0.distcp", b"K\x0b."), 4),
}


@pytest.mark.parametrize("what", WRONG)
def test_damaged_plain_source_is_refused(run, plain, tmp_path, what):
    assert run(plain, tmp_path / "src", "--ranks", 2).code == 0
    damage, code = WRONG[what]
    damage(tmp_path / "src")
    said = run(tmp_path / "src", tmp_path / "out", "--ranks", 3, "--json")
    assert said.code == said.json["error"]["exit"] == code, said.err
    assert {path.name for path in tmp_path.iterdir()} <= {"plain", "src"}


def test_a_damaged_shard(run, durable, tmp_path):
    save_durable(durable, state())
    (shard,) = (tmp_path / "durable/m/steps").rglob("*.safetensors")
    flip(shard, 9000)
    said = run(f"{durable.url}/m", tmp_path / "out", "--ranks", 3)
    assert said.code == 4
    assert not (tmp_path / "out").exists()


def test_absent_and_unreachable_sources_are_distinguished(run, tmp_path, monkeypatch):
    assert run(f"file://{tmp_path}/durable/m", tmp_path / "out", "--ranks", 3).code == 3
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_RETRY_S", "0.1")
    assert run("s3://bucket/m", tmp_path / "out", "--ranks", 3).code == 5


def test_unreachable_target_is_unavailable(run, plain, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_RETRY_S", "0.1")
    assert run(plain, "s3://bucket/m/step-1", "--ranks", 3).code == 5


# -- complete or absent ------------------------------------------------------------------------------------------------


def test_incorrectly_written_target_is_not_kept(run, plain, tmp_path, monkeypatch):
    """One element of one slice is wrong, as after a bug in the writer or a disk error."""
    save = torch.save

    def wrong(tensor, file):
        if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.float64:
            tensor = tensor.clone()
            tensor.view(-1).view(torch.int64)[1] ^= 1 << 40
        save(tensor, file)

    monkeypatch.setattr(folder_module.torch, "save", wrong)
    said = run(plain, tmp_path / "out", "--ranks", 2)
    assert said.code == 1
    assert "model.double" in said.err
    assert "not kept" in said.err
    assert {path.name for path in tmp_path.iterdir()} == {"plain"}


@pytest.mark.parametrize("target", ["folder", "durable"])
def test_reshard_refuses_swapped_slices(run, plain, tmp_path, monkeypatch, target):
    """A read error during the write is not repeated during the comparison."""
    read, swapped = PlainSource.read, []

    def wrong(self, name, box):
        found = read(self, name, box)
        if name == "model.embed" and box.offsets == (51, 0) and not swapped:
            swapped.append(box)
            found = found.roll(1, 0)
        return found

    monkeypatch.setattr(PlainSource, "read", wrong)
    out = {"folder": tmp_path / "out", "durable": f"file://{tmp_path}/durable/m/step-1"}[target]
    said = run(plain, out, "--ranks", 2)
    assert swapped
    assert said.code == 1
    assert "model.embed" in said.err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "plain" not in path.parts]


@pytest.mark.parametrize("target", ["folder", "durable"])
def test_interrupted(run, plain, tmp_path, monkeypatch, target):
    read = PlainSource.read

    def stopped(self, name, box):
        if name == "model.fp8" and box.offsets[0]:
            raise KeyboardInterrupt
        return read(self, name, box)

    monkeypatch.setattr(PlainSource, "read", stopped)
    out = {"folder": tmp_path / "out", "durable": f"file://{tmp_path}/durable/m/step-1"}[target]
    said = run(plain, out, "--ranks", 2)
    assert (said.code, said.err.strip()) == (130, "interrupted")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "plain" not in path.parts]


def reshard_and_die(say, arguments, at):
    """Kill the process at its ``at``-th read: while it reads, writes or compares."""
    read, left = PlainSource.read, [at]

    def counted(self, name, box):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(self, name, box)

    PlainSource.read = counted
    main(["reshard", *arguments])


@pytest.mark.parametrize("at", [3, 15, 30])
@pytest.mark.parametrize("target", ["folder", "durable"])
def test_killed(run, zygote, plain, tmp_path, target, at):
    out = {"folder": str(tmp_path / "out"), "durable": f"file://{tmp_path}/durable/m/step-1"}[target]
    ended = zygote.run(reshard_and_die, [str(plain), out, "--ranks", "2"], at)
    if target == "folder":
        assert ended.status == -signal.SIGKILL
    if ended.status:
        assert not (tmp_path / "out").exists()
        assert run(out, tmp_path / "other", "--ranks", 1).code == 3
    assert run(plain, out, "--ranks", 2, *(["--force"] if not ended.status else [])).code == 0
    if target == "folder":
        loads_from_folder(out)
    else:
        assert loads_from_store("m", f"file://{tmp_path}/durable") == 1


def reshard_and_measure(say, source, targets):
    import resource

    for first in (True, False):
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for target in targets:
            if first:
                assert main(["reshard", f"{source}/small/step-1", target.replace("OUT", "warm"), "--ranks", "3"]) == 0
            else:
                assert main(["reshard", f"{source}/large/step-1", target.replace("OUT", "out"), "--ranks", "3"]) == 0
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown) << 10


def test_peak_memory_is_a_few_slices(durable, tmp_path, zygote):
    for name, count in (("small", 1), ("large", 14)):
        save_durable(durable, {f"t{n}": torch.full((2 << 20,), float(n)) for n in range(count)}, name, 1)
    targets = [f"{tmp_path}/OUT", f"file://{tmp_path}/other/OUT/step-1"]
    grown = zygote.run(reshard_and_measure, durable.url, targets).result
    assert grown < 48 << 20, f"{grown >> 20} MiB for 14 tensors of 8 MiB"


def test_reshard_keeps_the_bits_of_every_dtype(run, plain, tmp_path):
    """Each tensor is loaded alone, without the rest of its state."""
    assert run(plain, tmp_path / "out", "--ranks", 4).code == 0
    source = PlainSource("", FileSystemReader(tmp_path / "out"))
    for name, tensor in state()["model"].items():
        form = source.tensors[f"model.{name}"]
        assert tensor_bytes(source.read(f"model.{name}", full_box(form.shape))) == tensor_bytes(tensor)
