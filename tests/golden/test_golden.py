"""Golden checkpoints of every format version: this release must restore them bit for bit."""

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
import zstandard
from safetensors.torch import load as load_safetensors

from tests.golden.write import HERE, JOB, STORED, state_of, write
from tests.support.bits import assert_same_bits, tensor_bytes, zeros_like_state
from tieredckpt import Checkpointer
from tieredckpt.agent.durable_catalog import manifest_from_shard_files
from tieredckpt.format.manifest import FORMAT_VERSION, decode_manifest, decode_shard_file, encode_manifest
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FORMATS = sorted(HERE.glob("format-*"))


@pytest.fixture(params=FORMATS, ids=lambda path: path.name)
def golden(request, tmp_path):
    """Copy the checkpoint, since a failed read would mark a step as damaged in place."""
    return Path(shutil.copytree(request.param, tmp_path / "golden"))


def inside(path):
    """Decode the envelope of an index or a manifest with plain msgpack."""
    return msgspec.msgpack.decode(zstandard.decompress(path.read_bytes()[4:-8]))


def form(value):
    """Return keys and types without values, which other readers depend on."""
    if isinstance(value, dict):
        known = all(isinstance(key, str) and not is_digest(key) for key in value)
        return {key if known else "*": form(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [form(value[0])] if value else []
    return type(value).__name__


def is_digest(text):
    return len(text) == 32 and set(text) <= set("0123456789abcdef")


def test_newest_golden_format_is_the_current_one():
    assert FORMATS[-1].name == f"format-{FORMAT_VERSION}"


@pytest.mark.parametrize("step", STORED)
def test_golden_checkpoint_restores_bit_for_bit(golden, step):
    expected = state_of(step)
    with memory_node(), Checkpointer(JOB, durable=f"file://{golden}", on_sigterm="ignore") as ckpt:
        found = zeros_like_state(expected)
        assert ckpt.restore(found, step) == step
        assert_same_bits(expected, found)
        assert set(ckpt.last_restore.bytes_by_tier) == {"durable"}
        infos = {info.step: (info.tiers, info.is_complete, info.quarantined) for info in ckpt.steps()}
        assert infos == dict.fromkeys(STORED, (("durable",), True, ""))


@pytest.mark.parametrize("start", [0, 3, 5])
def test_golden_slices_restore(golden, start):
    with memory_node(), Checkpointer(JOB, durable=f"file://{golden}", on_sigterm="ignore") as ckpt:
        rows = {"model": {"rows": torch.zeros(7, 5), "wide": torch.zeros(64, dtype=torch.int16)}}
        assert ckpt.restore(rows, strict=False) == 8
        assert tensor_bytes(rows["model"]["rows"][start:]) == tensor_bytes(state_of(8)["model"]["rows"][start:])
        assert tensor_bytes(rows["model"]["wide"]) == tensor_bytes(state_of(8)["model"]["wide"])


def test_golden_shards_are_safetensors_files(golden):
    parts = [load_safetensors(path.read_bytes()) for path in sorted((golden / JOB / "steps").rglob("*.safetensors"))]
    assert sorted(name for part in parts for name in part if name.startswith("model.rows")) == [
        "model.rows@0,0",
        "model.rows@4,0",
    ]
    rows = torch.cat([part[f"model.rows@{offset},0"] for part, offset in zip(parts, (0, 4), strict=True)])
    assert tensor_bytes(rows) == tensor_bytes(state_of(7)["model"]["rows"])


def test_golden_manifests_match_their_indexes(golden):
    for path in (golden / JOB / "manifests").iterdir():
        manifest = decode_manifest(path.read_bytes())
        indexes = sorted((golden / JOB / "steps" / f"{manifest.step:012d}").rglob("*.index"))
        files = [decode_shard_file(index.read_bytes()) for index in indexes]
        assert len(files) == manifest.parts == 2
        again = manifest_from_shard_files(files, created_ns=manifest.created_ns, writer=manifest.writer)
        assert again == manifest
        assert decode_manifest(encode_manifest(again)) == manifest


def test_writer_output_has_the_newest_golden_format(tmp_path, ranks):
    write(tmp_path, ranks)
    today = FORMATS[-1]
    for pattern in ("golden/manifests/*.manifest", "golden/steps/*/*/*.index"):
        written, kept = sorted(tmp_path.glob(pattern)), sorted(today.glob(pattern))
        assert len(written) == len(kept)
        for new, old in zip(written, kept, strict=True):
            assert new.read_bytes()[:4] == b"TCKP"
            assert inside(new)["format"] == FORMAT_VERSION
            assert form(inside(new)) == form(inside(old))
    for pattern in ("golden/steps/*/*/*.safetensors", "*/golden/steps/*/*/*.zst"):
        sizes = [sorted(path.stat().st_size for path in root.glob(pattern)) for root in (tmp_path, today)]
        assert sizes[0] == pytest.approx(sizes[1], abs=64)
