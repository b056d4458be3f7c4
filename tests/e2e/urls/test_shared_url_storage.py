"""One storage behind a URL: every interface lists and loads the saves of all others."""

import multiprocessing
import os
import re
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import tieredckpt
from peerstore.daemon_process import current_process
from tests.support.agents import module_agent
from tests.support.bits import assert_same_bits, zeros_like_state
from tieredckpt import TieredReader, TieredWriter
from tieredckpt.errors import UsageError
from tieredckpt.session.session import close_sessions, open_session
from tieredckpt.settings import load_settings

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

WAYS = ["url", "files", "objects", "whole"]


node = module_agent("one")


def state_at(step):
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "w": torch.randn(40, 3, generator=generator),
            "half": torch.randn(7, generator=generator).bfloat16(),
            "small": torch.tensor([1, 2, 3], dtype=torch.uint16),
            "c32": torch.tensor([1 + 2j, 3j]).to(torch.complex32),
            "bits": torch.randint(0, 255, (5,), dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn),
            "mask": torch.tensor([True, False]),
            "scalar": torch.tensor(float(step)),
            "empty": torch.empty(0, 3),
        },
        "list": [torch.ones(2) * step, {"x": torch.ones(1)}],
        "step": step,
        "text": "x" * step,
    }


def save(way, job, step, value=None):
    state, url = state_at(step if value is None else value), f"tiered://{job}/step-{step}"
    if way == "url":
        with tieredckpt.enable_urls():
            dcp.save(state, checkpoint_id=url, no_dist=True)
    elif way == "files":
        dcp.save(state, checkpoint_id=url, no_dist=True)
    elif way == "objects":
        dcp.save(state, storage_writer=TieredWriter(job, step), no_dist=True)
    else:
        tieredckpt.save(url, state)


def load(way, job, step, value=None):
    expected, url = state_at(step if value is None else value), f"tiered://{job}/step-{step}"
    found = zeros_like_state(expected)
    if way == "url":
        with tieredckpt.enable_urls():
            dcp.load(found, checkpoint_id=url, no_dist=True)
    elif way == "files":
        dcp.load(found, checkpoint_id=url, no_dist=True)
    elif way == "objects":
        dcp.load(found, storage_reader=TieredReader(job, step), no_dist=True)
    else:
        found = tieredckpt.load(url)
        found["model"] = {name: found["model"][name] for name in expected["model"]}
        found = {name: found[name] for name in expected}
    assert_same_bits(expected, found)


PAIRS = [
    pytest.param(saved, loaded, marks=() if (row - column) % 4 in (1, 2) else pytest.mark.nightly)
    for row, saved in enumerate(WAYS)
    for column, loaded in enumerate(WAYS)
]
"""Every way to save with every way to load. In a push, two other ways load what a way has saved."""


@pytest.mark.parametrize(("saved", "loaded"), PAIRS)
def test_step_saved_one_way_is_listed_and_loaded_by_the_others(saved, loaded):
    job, fs = f"{saved}-{loaded}", fsspec.filesystem("tiered")
    for step in (9, 10):
        save(saved, job, step)
    assert fs.ls(f"tiered://{job}", detail=False) == [f"{job}/step-9", f"{job}/step-10"]
    for step in (9, 10):
        load(loaded, job, step)
    target = zeros_like_state(state_at(10))
    dcp.load(target, storage_reader=TieredReader(job), no_dist=True)
    assert_same_bits(state_at(10), target)


@pytest.mark.parametrize("way", WAYS)
def test_framework_finds_its_newest_step(way):
    """torchtitan and others list the folder, match names, and look for a ``.metadata`` file."""
    job = f"newest-{way}"
    folder = f"tiered://{job}"
    fs, _ = fsspec.core.url_to_fs(folder)
    assert not fs.exists(folder)
    assert not fs.isdir(folder)
    for step in (2, 10):
        save(way, job, step)
    assert fs.isdir(folder)
    found = [re.search(r"step-(\d+)", entry) for entry in fs.ls(folder, detail=False)]
    steps = [int(match[1]) for match in found if match and fs.isfile(f"{folder}/{match[0]}/.metadata")]
    assert max(steps) == 10
    assert fs.isdir(f"{folder}/step-10")
    assert not fs.exists(f"{folder}/step-11")
    assert not fs.exists(f"{folder}/step-10/model.safetensors.index.json")
    fs.rm(f"{folder}/step-2", recursive=True)
    assert fs.ls(folder, detail=False) == [f"{job}/step-10"]
    load(way, job, 10)
    save(way, job, 11)
    fs.rm(f"{folder}/step-11", recursive=True)
    assert newest(job) == 10


@pytest.mark.parametrize("order", [("files", "url"), ("url", "files")])
def test_step_saved_both_ways_is_the_last_saved(order):
    job = "-".join(("both", *order))
    save(order[0], job, 5, 50)
    save(order[1], job, 5, 51)
    for way in WAYS:
        load(way, job, 5, 51)


@pytest.mark.parametrize("first", ["step", "file"])
def test_files_beside_steps_are_evicted_with_their_steps(first):
    job, fs = f"beside-{first}", fsspec.filesystem("tiered")
    fs.pipe(f"tiered://{job}/latest.json", b"{}")
    for step in range(8):
        if first == "step":
            save("url", job, step)
        for name in ("state.json", "rng/0.json"):
            fs.pipe(f"tiered://{job}/step-{step}/{name}", b"{}")
        if first == "file":
            save("url", job, step)
    here = [int(one.rpartition("-")[2]) for one in fs.ls(f"tiered://{job}", detail=False) if "step-" in one]
    assert here[-1] == 7
    assert len(here) <= 4
    assert fs.cat(f"tiered://{job}/step-7/rng/0.json") == fs.cat(f"tiered://{job}/latest.json") == b"{}"


def newest(job):
    reader = TieredReader(job)
    found = zeros_like_state(state_at(10))
    dcp.load(found, storage_reader=reader, no_dist=True)
    assert_same_bits(state_at(reader.restored_step), found)
    return reader.restored_step


@pytest.mark.parametrize("saved", WAYS)
@pytest.mark.parametrize("loaded", ["url", "files", "objects"])
def test_rollback_by_one_way_applies_to_the_others(loaded, saved):
    """Step 20 belongs to an abandoned branch; memory keeps the last two or three steps."""
    job, fs = f"back-{loaded}-{saved}", fsspec.filesystem("tiered")
    save("url", job, 10)
    save("files", job, 20)
    load(loaded, job, 10)
    save(saved, job, 11)
    listed = fs.ls(f"tiered://{job}", detail=False)
    assert f"{job}/step-11" in listed
    assert f"{job}/step-20" not in listed
    assert newest(job) == 11


def test_reading_a_file_of_a_step_is_not_a_rollback(tmp_path):
    fs = fsspec.filesystem("tiered")
    for step in (10, 20):
        save("files", "looked-at", step)
    fs.get("tiered://looked-at/step-10", f"{tmp_path}/step-10", recursive=True)
    assert fs.cat("tiered://looked-at/step-10/__0_0.distcp")
    with pytest.raises(CheckpointException, match="Step 15 of job 'looked-at' is behind step 20"):
        save("files", "looked-at", 15)
    assert newest("looked-at") == 20
    found = zeros_like_state(state_at(10))
    dcp.load(found, checkpoint_id=tmp_path / "step-10", no_dist=True)
    assert_same_bits(state_at(10), found)


def go_back_with_a_process(job):
    kind = AsyncCheckpointerType.PROCESS
    for step in (10, 20, 11, 12):
        if step == 11:
            dcp.load(zeros_like_state(state_at(10)), checkpoint_id=f"tiered://{job}/step-10")
        url = f"tiered://{job}/step-{step}"
        dcp.async_save(state_at(step), checkpoint_id=url, async_checkpointer_type=kind).result()
    end_dcps_process()
    return fsspec.filesystem("tiered").ls(f"tiered://{job}", detail=False)


def test_rollback_applies_to_dcps_background_process(ranks):
    assert ranks.run(1, go_back_with_a_process, "own-process") == [["own-process/step-11", "own-process/step-12"]]
    assert newest("own-process") == 12


def load_then_start_who_trains(say):
    dcp.load(zeros_like_state(state_at(10)), checkpoint_id="tiered://parent/step-10", no_dist=True)
    trains = multiprocessing.get_context("fork").Process(target=load_newest_and_save)
    trains.start()
    trains.join()
    say(f"ended with {trains.exitcode}")


def load_newest_and_save():
    dcp.load(zeros_like_state(state_at(20)), checkpoint_id="tiered://parent/step-20", no_dist=True)
    save("files", "parent", 21)


def test_process_continues_from_the_step_it_loaded(zygote):
    """Its parent process has loaded another step, and does not train."""
    for step in (10, 20):
        save("files", "parent", step)
    running = zygote.start(load_then_start_who_trains)
    running.wait_line("ended with 0")
    running.wait()
    assert fsspec.filesystem("tiered").ls("tiered://parent", detail=False) == ["parent/step-20", "parent/step-21"]


def test_resume_points_of_killed_processes_are_dropped():
    """The newest are kept, because processes of other namespaces may only seem dead."""
    save("url", "killed", 1)
    store = open_session("killed", load_settings()).agent.store
    for started in range(100):
        store.blobs.put("killed", f"resumed.{os.getpid()}.{started}", b"")
    close_sessions()
    load("url", "killed", 1)
    store = open_session("killed", load_settings()).agent.store
    left = {int(name.rpartition(".")[2]) for name in store.blobs.list_names("killed") if name.startswith("resumed.")}
    assert left == {*range(68, 100), current_process().start_time}


def end_dcps_process():
    from torch.distributed.checkpoint import _async_process_executor as executor

    daemon, executor._CHECKPOINT_PROCESS = executor._CHECKPOINT_PROCESS, None
    del daemon  # ends the process


def save_by_process(steps):
    with tieredckpt.enable_urls():
        for step in steps:
            kind = AsyncCheckpointerType.PROCESS if step % 2 else AsyncCheckpointerType.THREAD
            url = f"tiered://process/step-{step}"
            dcp.async_save(state_at(step), checkpoint_id=url, async_checkpointer_type=kind).result()
        found = zeros_like_state(state_at(steps[-1]))
        dcp.load(found, checkpoint_id="tiered://process")
    end_dcps_process()
    assert_same_bits(state_at(steps[-1]), found)
    return fsspec.filesystem("tiered").ls("tiered://process", detail=False)


def test_a_save_by_dcps_own_process_is_found(ranks):
    listed = ranks.run(1, save_by_process, [1])
    assert listed == [["process/step-1"]]
    facts = open_session("process", load_settings()).agent.store.list_shards("process")
    assert {fact.key.version for fact in facts} == {1}, "the save must use this package's writer"


def test_url_mistaken_for_a_path_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tieredckpt.enable_urls(), pytest.raises(CheckpointException, match="checkpoint_id="):
        dcp.save({}, storage_writer=FileSystemWriter("tiered://mangled/step-1"), no_dist=True)
    assert not list(tmp_path.iterdir())
    Path("tiered://mangled/step-1").mkdir(parents=True)  # like os.makedirs
    with pytest.raises(CheckpointException) as failure:
        save("objects", "mangled", 1)
    assert isinstance(failure.value.failures[0][0], UsageError)
    assert f"local folder tiered: in {tmp_path}" in str(failure.value.failures[0][0])
    for way in ("url", "files", "whole"):
        with pytest.raises((CheckpointException, UsageError), match="local folder tiered:"):
            save(way, "mangled", 1)
