"""Saves through ``tiered://`` URLs while the package is disabled: plain checkpoints, and no agent."""

import contextlib

import fsspec
import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import tieredckpt
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.jobs import bucket_url, state_at
from tests.support.s3 import ACCESS_KEY, REGION, SECRET_KEY
from tieredckpt import Checkpointer
from tieredckpt.errors import SettingsError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.e2e,
]

WRITERS = ("enabled_urls", "fsspec_url", "fsspec_writer")


@pytest.fixture
def folder(tmp_path, monkeypatch, agent_dir):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", f"file://{tmp_path}/durable")
    monkeypatch.setenv("TIEREDCKPT_ENABLED", "0")
    return tmp_path / "durable" / "job"


def save(writer, step, number=None):
    url, state = f"tiered://job/step-{step}", state_at(step if number is None else number)
    options = {"no_dist": True} if not dist.is_initialized() else {}
    with tieredckpt.enable_urls() if writer == "enabled_urls" else contextlib.nullcontext():
        if writer == "fsspec_writer":
            dcp.save(state, storage_writer=FsspecWriter(url), **options)
        else:
            dcp.save(state, checkpoint_id=url, **options)


def assert_readable(*steps):
    """Read the steps in each way: by URL with both readers, with a Checkpointer, and as files."""
    options = {"no_dist": True} if not dist.is_initialized() else {}
    for step in steps:
        expected = state_at(step)
        for context in (tieredckpt.enable_urls, contextlib.nullcontext):
            found = zeros_like_state(expected)
            with context():
                dcp.load(found, checkpoint_id=f"tiered://job/step-{step}", **options)
            assert_same_bits(expected, found)
        with Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
            found = zeros_like_state(expected)
            assert ckpt.restore(found, step) == step
            assert_same_bits(expected, found)
    with Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
        assert ckpt.restore(zeros_like_state(state_at(0))) == steps[-1]
    assert fsspec.filesystem("tiered").ls("tiered://job", detail=False) == [f"job/step-{step}" for step in steps]


@pytest.mark.parametrize("writer", WRITERS)
def test_disabled_package_saves_plain_checkpoints_without_an_agent(folder, agent_dir, monkeypatch, writer):
    save(writer, 3)
    save(writer, 4)
    assert {path.name for path in (folder / "step-4").iterdir()} == {".metadata", "__0_0.distcp"}
    assert_readable(3, 4)
    found = zeros_like_state(state_at(4))
    dcp.load(found, checkpoint_id=folder / "step-4", no_dist=True)
    assert_same_bits(state_at(4), found)
    assert not agent_dir.exists()
    monkeypatch.delenv("TIEREDCKPT_ENABLED")
    assert_readable(3, 4)


@pytest.mark.parametrize("writer", WRITERS)
def test_disabled_package_saves_plain_checkpoints_on_s3(agent_dir, moto, monkeypatch, writer):
    monkeypatch.setenv("TIEREDCKPT_ENABLED", "0")
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", bucket_url())
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", REGION)
    save(writer, 3, number=100)
    save(writer, 3)
    save(writer, 4)
    assert_readable(3, 4)
    fsspec.filesystem("tiered").rm("tiered://job/step-4", recursive=True)
    assert_readable(3)
    assert not agent_dir.exists()


def save_on_every_rank(writer):
    save(writer, 7)
    assert_readable(7)


@pytest.mark.parametrize("writer", WRITERS)
def test_ranks_save_a_plain_checkpoint(folder, agent_dir, ranks, monkeypatch, writer):
    ranks.run(2, save_on_every_rank, writer)
    assert {path.name for path in (folder / "step-7").iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert not agent_dir.exists()
    monkeypatch.delenv("TIEREDCKPT_ENABLED")
    ranks.run(2, assert_readable, 7)


def save_in_the_background(kind):
    for step in (3, 4):
        dcp.async_save(state_at(step), storage_writer=FsspecWriter(f"tiered://job/step-{step}"), **kind).result()
    executor._CHECKPOINT_PROCESS = None  # ends DCP's background process
    assert_readable(3, 4)


@pytest.mark.parametrize("kind", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS])
def test_background_saves_write_plain_checkpoints(folder, agent_dir, ranks, kind):
    ranks.run(1, save_in_the_background, {"async_checkpointer_type": kind})
    assert not agent_dir.exists()


def test_second_save_of_a_step_replaces_the_first(folder):
    save("fsspec_writer", 3, number=100)
    save("fsspec_writer", 3)
    assert_readable(3)


@pytest.mark.parametrize("writer", WRITERS)
def test_disabled_package_without_a_durable_tier_names_the_setting(agent_dir, monkeypatch, writer):
    monkeypatch.setenv("TIEREDCKPT_ENABLED", "0")
    with pytest.raises((SettingsError, CheckpointException), match=r"durable\.url"):
        save(writer, 3)
    assert not agent_dir.exists()


def test_step_of_a_failed_save_does_not_exist(folder):
    fs = fsspec.filesystem("tiered")
    fs.makedirs("tiered://job/step-5", exist_ok=True)
    assert fs.isdir("tiered://job/step-5")
    with fs.open("tiered://job/step-5/__0_0.distcp", "wb") as file:
        file.write(b"half")
        fs.rm("tiered://job/step-5/__0_0.distcp")  # as DCP does after an error
    assert not list((folder / "step-5").iterdir())
    assert not fs.exists("tiered://job/step-5/.metadata")
    assert not fs.exists("tiered://job")


def test_files_of_a_complete_step_are_removed_only_with_it(folder, agent_dir):
    save("fsspec_url", 3)
    fs = fsspec.filesystem("tiered")
    with pytest.raises(OSError, match="removed with their step"):
        fs.rm_file("tiered://job/step-3/__0_0.distcp")
    fs.rm("tiered://job/step-3", recursive=True)
    assert not fs.exists("tiered://job/step-3")
    assert not agent_dir.exists()


def test_metadata_per_rank_is_refused(folder):
    fs = fsspec.filesystem("tiered")
    with fs.open("tiered://job/step-3/__0.metadata.tmp", "wb") as file:
        file.write(b"metadata")
    with pytest.raises(tieredckpt.UsageError, match="use_collectives"):
        fs.mv("tiered://job/step-3/__0.metadata.tmp", "tiered://job/step-3/__0.metadata")
    assert not list((folder / "step-3").iterdir())


def test_rename_of_an_unwritten_file_is_refused(folder):
    with pytest.raises(FileNotFoundError):
        fsspec.filesystem("tiered").mv("tiered://job/step-3/.metadata.tmp", "tiered://job/step-3/.metadata")


def test_side_files_need_no_agent(folder, agent_dir):
    save("fsspec_url", 3)
    fs = fsspec.filesystem("tiered")
    fs.pipe("tiered://job/step-3/state.json", b"{}")
    fs.pipe("tiered://job/notes/read.me", b"text")
    assert fs.cat_file("tiered://job/step-3/state.json") == b"{}"
    assert fs.ls("tiered://job", detail=False) == ["job/notes", "job/step-3"]
    fs.rm("tiered://job/notes/read.me")
    fs.rm("tiered://job/step-3", recursive=True)
    assert not fs.exists("tiered://job")
    assert not agent_dir.exists()
