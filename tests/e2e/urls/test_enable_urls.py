"""Plain DCP calls with only a URL, with the real agent, in one process and on two ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _storage_utils
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

import tieredckpt
from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.jobs import state_at
from tests.support.models import build_model, full_state, get_state, set_state, train_steps
from tieredckpt import CheckpointNotFoundError, TieredReader, TieredWriter
from tieredckpt.errors import MissingStepError, SettingsError, UsageError
from tieredckpt.session.session import open_session
from tieredckpt.settings import load_settings

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
    pytest.mark.e2e,
]


@pytest.fixture
def urls():
    with tieredckpt.enable_urls() as enabled:
        yield enabled


def test_save_and_load_by_url(agent_dir, urls):
    for step in (5, 6):
        dcp.save(state_at(step), checkpoint_id=f"tiered://job/step-{step}", no_dist=True)
    for url, step in (("tiered://job", 6), ("tiered://job/step-5", 5)):
        found = zeros_like_state(state_at(step))
        dcp.load(found, checkpoint_id=url, no_dist=True)
        assert_same_bits(state_at(step), found)


def test_our_own_writer_and_reader_are_used(agent_dir, urls):
    assert type(_storage_utils._storage_setup(None, "tiered://job/step-1")) is TieredWriter
    assert type(_storage_utils._storage_setup(None, "tiered://job", reader=True)) is TieredReader
    dcp.save(state_at(1), checkpoint_id="tiered://job/step-1", no_dist=True)
    (fact,) = open_session("job", load_settings()).agent.store.list_shards("job")
    assert fact.key.version == 1


def test_async_save(agent_dir, urls):
    state = {"w": torch.arange(1000.0)}
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for step in range(3):
            future = dcp.async_save(state, checkpoint_id=f"tiered://job/step-{step}")
            state["w"] += 1  # already staged
            future.result()
        found = {"w": torch.zeros(1000)}
        dcp.load(found, checkpoint_id="tiered://job")
    finally:
        dist.destroy_process_group()
    assert_same_bits({"w": torch.arange(1000.0) + 2}, found)


def test_the_durable_tier_comes_from_the_call_or_the_settings(agent_dir, tmp_path):
    with tieredckpt.enable_urls(durable=f"file://{tmp_path}/durable"):
        dcp.save(state_at(3), checkpoint_id="tiered://job/step-3", no_dist=True)
    view = open_session("job", load_settings()).agent.wait_durable("job", None, 30)
    assert view.state == "done"
    assert list((tmp_path / "durable" / "job" / "manifests").iterdir())


def test_other_urls_keep_their_handlers(agent_dir, urls, tmp_path):
    dcp.save(state_at(1), checkpoint_id=tmp_path / "plain", no_dist=True)
    assert (tmp_path / "plain" / ".metadata").exists()
    found = zeros_like_state(state_at(1))
    dcp.load(found, checkpoint_id=str(tmp_path / "plain"), no_dist=True)
    assert_same_bits(state_at(1), found)
    assert type(_storage_utils._storage_setup(None, "memory://x/y")).__name__ == "FsspecWriter"
    assert not agent_dir.exists()


def test_enabled_urls_are_disabled_again():
    with tieredckpt.enable_urls():
        second = tieredckpt.enable_urls()
    assert _storage_utils.FileSystemWriter is not FileSystemWriter, "the second handle is still open"
    second.close()
    second.close()
    assert _storage_utils.FileSystemWriter is FileSystemWriter
    assert _storage_utils.FileSystemReader is FileSystemReader


def test_import_changes_no_torch_hooks(zygote):
    assert zygote.run(untouched).result


def untouched(_):
    import tieredckpt.dcp.tiered_urls

    return _storage_utils.FileSystemWriter is FileSystemWriter and bool(tieredckpt.dcp.tiered_urls)


def test_changed_torch_hook_is_refused_with_advice(monkeypatch):
    monkeypatch.setattr(_storage_utils, "_storage_setup", lambda *_, **__: object())
    with pytest.raises(UsageError, match="storage_writer=TieredWriter"):
        tieredckpt.enable_urls()
    assert _storage_utils.FileSystemWriter is FileSystemWriter


def test_invalid_settings_leave_torch_unchanged(monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_ENABLED", "0")
    with pytest.raises(SettingsError, match=r"needs durable\.url"):
        tieredckpt.enable_urls()
    assert _storage_utils.FileSystemWriter is FileSystemWriter
    assert _storage_utils.FileSystemReader is FileSystemReader


def test_url_mistakes_are_reported(agent_dir, urls):
    with pytest.raises(CheckpointException) as failure:
        dcp.save(state_at(1), checkpoint_id="tiered://job", no_dist=True)
    assert isinstance(failure.value.failures[0][0], MissingStepError)
    with pytest.raises(CheckpointException) as failure:
        dcp.load(state_at(1), checkpoint_id="tiered://nothing", no_dist=True)
    assert isinstance(failure.value.failures[0][0], CheckpointNotFoundError)
    with pytest.raises(UsageError, match="after the job"):
        dcp.save(state_at(1), checkpoint_id="tiered://job/stop-1", no_dist=True)


def save_and_load_fsdp():
    world = dist.get_world_size()
    with tieredckpt.enable_urls():
        model, optimizer = build_model("fsdp", world, seed=1)
        train_steps(model, optimizer, 2)
        state = get_state(model, optimizer)
        dcp.save(state, checkpoint_id="tiered://fsdp/step-2")
        expected = full_state(state)
        other, optimizer = build_model("fsdp", world, seed=2)
        state = get_state(other, optimizer)
        dcp.load(state, checkpoint_id="tiered://fsdp")
        set_state(other, optimizer, state)
        assert_same_bits(expected, full_state(get_state(other, optimizer)))
    return _storage_utils.FileSystemWriter is FileSystemWriter


def test_two_ranks(agent_dir, ranks):
    assert ranks.run(2, save_and_load_fsdp) == [True, True]
    facts = open_session("fsdp", load_settings()).agent.store.list_shards("fsdp")
    assert sorted(fact.key.part for fact in facts) == [0, 1]
