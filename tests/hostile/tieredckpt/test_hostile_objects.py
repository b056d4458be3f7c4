"""Planted pickles in the durable tier: they do not run, and the error names the object."""

from __future__ import annotations

import argparse
import collections
import datetime as dt
import decimal
import io
import logging
import os
import pathlib
import pickle
import random
import types
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.bits import zeros_like_state
from tieredckpt import Checkpointer, TieredReader, TieredWriter
from tieredckpt.dcp.rank_group import unwrap_save_error
from tieredckpt.errors import CheckpointDamagedError, UntrustedObjectError
from tieredckpt.tensors.safe_objects import check_safe_object, load_dcp_metadata
from tieredckpt.tensors.state_dict import archive_object

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class TouchesFileOnLoad:
    """An object that makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def load_error(state, reader):
    with pytest.raises(CheckpointException) as info:
        dcp.load(state, storage_reader=reader, no_dist=True)
    return unwrap_save_error(info.value)


# -- objects of a step ------------------------------------------------------------------------------------------------


def test_planted_object_does_not_run(agent_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", f"file://{tmp_path}/bucket")
    ran = tmp_path / "ran"
    state = {"model": {"weight": torch.ones(3)}, "extra": {"seen": TouchesFileOnLoad(ran)}}
    with Checkpointer("tiered://job") as ckpt:
        ckpt.save(state, 1).wait("durable")
    with Checkpointer("tiered://job") as ckpt:
        with pytest.raises(UntrustedObjectError, match=r"extra\.seen .*mkdir.*add_safe_globals.*memory\.trust_objects"):
            ckpt.restore({"model": {"weight": torch.zeros(3)}, "extra": {"seen": 0}})
        assert not ran.exists()
        found = {"model": {"weight": torch.zeros(3)}}
        assert ckpt.restore(found, strict=False) == 1  # tensors can be restored without the object
        assert found["model"]["weight"].eq(1).all()
    error = load_error({"extra": {"seen": 0}}, TieredReader("tiered://job"))
    assert isinstance(error, UntrustedObjectError)
    assert not ran.exists()


def test_untrusted_object_runs_when_the_store_is_trusted(agent_dir, tmp_path):
    ran = tmp_path / "ran"
    dcp.save({"extra": TouchesFileOnLoad(ran)}, storage_writer=TieredWriter("tiered://job", 1), no_dist=True)
    dcp.load({"extra": 0}, storage_reader=TieredReader("tiered://job", trust_objects=True), no_dist=True)
    assert ran.exists()


class OwnClass:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    __hash__ = None


def test_class_registered_with_torch_is_loaded(agent_dir):
    dcp.save({"own": OwnClass(7)}, storage_writer=TieredWriter("tiered://job", 1), no_dist=True)
    assert isinstance(load_error({"own": 0}, TieredReader("tiered://job")), UntrustedObjectError)
    with torch.serialization.safe_globals([OwnClass]):
        target = {"own": 0}
        dcp.load(target, storage_reader=TieredReader("tiered://job"), no_dist=True)
    assert target == {"own": OwnClass(7)}


@pytest.mark.parametrize("way", ["checkpointer", "writer"])
def test_save_warns_once_about_objects_a_restore_refuses(agent_dir, caplog, way):
    name = f"odd_{way}"
    caplog.set_level(logging.WARNING)
    with Checkpointer("tiered://job") as ckpt:
        for step in (1, 2, 3):
            state = {name: OwnClass(step), "plain": {"a": step}}
            if way == "checkpointer":
                assert ckpt.save(state, step).ok
            else:
                dcp.save(state, storage_writer=TieredWriter("tiered://job", step), no_dist=True)
    messages = [record.message for record in caplog.records if "will refuse" in record.message]
    assert len(messages) == 1
    assert messages[0].startswith(f"{name} is saved, but a restore will refuse to load it")


STATES = {
    "generators": random.Random(3).getstate(),
    "numpy generators": np.random.RandomState(3).get_state(),
    "a new numpy generator": np.random.default_rng(3).bit_generator.state,
    "torch generators": torch.get_rng_state(),
    "arrays": [np.arange(6.0).reshape(2, 3), np.array(["a", "bc"]), np.array([1, 2], dtype="<i2"), np.float32(2)],
    "numbers of numpy": [np.float64(1.5), np.int64(7), np.bool_(True), np.complex64(1j)],
    "times": [dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc), dt.timedelta(3), dt.date.min],
    "containers": [{1, 2}, frozenset({3}), collections.Counter("aab"), collections.OrderedDict(a=1), (1, (2,))],
    "of torch": [torch.Size([2, 3]), torch.float8_e4m3fn, torch.device("cpu"), torch.nn.Parameter(torch.ones(2))],
    "numbers": [1, 1 << 80, 1.5, 1j, True, None, b"bytes", bytearray(b"b"), "text", decimal.Decimal("1.5")],
    "arguments": [argparse.Namespace(lr=1.0), types.SimpleNamespace(a=[1])],
    "paths": [pathlib.Path("/a/b")],
}


@pytest.mark.parametrize("name", STATES)
def test_common_training_state_objects_are_loaded(name):
    value = STATES[name]
    data = archive_object(value)
    check_safe_object(name, data)
    found = torch.load(io.BytesIO(data), weights_only=False)  # as DCP does then
    assert repr(found) == repr(value)
    assert type(found) is type(value)


def torch_archive(pickled: bytes) -> bytes:
    """An archive as ``torch.save`` makes them, with another pickle in it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive_object(0))) as old, zipfile.ZipFile(out, "w") as new:
        for member in old.namelist():
            new.writestr(member, pickled if member.endswith("data.pkl") else old.read(member))
    return out.getvalue()


ATTACKS = {
    "a call": b"\x80\x02cos\nmkdir\nX%s\x85R.",
    "a builtin": b"\x80\x02c__builtin__\neval\nX%s\x85R.",
    "an attribute of what is allowed": b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93X%s\x85R.",
    "an old instance": b"(X%sios\nmkdir\n.",
    "a call that is asked for by name": b"\x80\x02cbuiltins\ngetattr\ncos\nX%s\x86R.",
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_every_way_to_name_a_function_is_refused(tmp_path, attack, legacy):
    ran = str(tmp_path / "ran").encode()
    pickled = ATTACKS[attack].replace(b"%s", len(ran).to_bytes(4, "little") + ran)
    with pytest.raises((UntrustedObjectError, CheckpointDamagedError)):
        check_safe_object("x", pickled if legacy else torch_archive(pickled))
    assert not (tmp_path / "ran").exists()


def test_legacy_pickle_file_is_refused(tmp_path):
    data = io.BytesIO()
    torch.save(TouchesFileOnLoad(tmp_path / "ran"), data, _use_new_zipfile_serialization=False)
    with pytest.raises(UntrustedObjectError):
        check_safe_object("x", data.getvalue())
    with pytest.raises((UntrustedObjectError, CheckpointDamagedError)):
        check_safe_object("x", pickle.dumps(TouchesFileOnLoad(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x80\x02", archive_object([1, 2])[:-100]])
def test_truncated_object_is_damage(data):
    with pytest.raises((CheckpointDamagedError, UntrustedObjectError)):
        check_safe_object("x", data)


# -- plain steps ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", f"file://{tmp_path}/bucket")
    return tmp_path / "bucket"


def plant_step(bucket, tmp_path, evil):
    """Write a step that is newer than all steps of the job."""
    folder = bucket / "job" / "step-900"
    dcp.save({"weight": torch.ones(3), "seen": evil}, checkpoint_id=str(folder), no_dist=True)
    return folder


@pytest.mark.parametrize("enabled", ["0", "1"])
def test_metadata_of_a_planted_plain_step_does_not_run(agent_dir, bucket, tmp_path, monkeypatch, enabled):
    folder = plant_step(bucket, tmp_path, 1)
    (folder / ".metadata").write_bytes(pickle.dumps(TouchesFileOnLoad(tmp_path / "ran")))
    monkeypatch.setenv("TIEREDCKPT_ENABLED", enabled)
    with (
        Checkpointer("tiered://job") as ckpt,
        pytest.raises(CheckpointDamagedError, match=r"is not DCP metadata.*mkdir"),
    ):
        ckpt.restore({"weight": torch.zeros(3)})
    error = load_error({"weight": torch.zeros(3)}, TieredReader("tiered://job"))
    assert isinstance(error, CheckpointDamagedError)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("enabled", ["0", "1"])
def test_objects_of_a_plain_checkpoint_run_no_code(agent_dir, bucket, tmp_path, monkeypatch, enabled):
    plant_step(bucket, tmp_path, TouchesFileOnLoad(tmp_path / "ran"))
    monkeypatch.setenv("TIEREDCKPT_ENABLED", enabled)
    with Checkpointer("tiered://job") as ckpt:
        with pytest.raises(UntrustedObjectError, match=r"^seen is an object that would run code"):
            ckpt.restore({"weight": torch.zeros(3), "seen": 0})
        found = {"weight": torch.zeros(3)}
        assert ckpt.restore(found, strict=False) == 900
    assert found["weight"].eq(1).all()
    assert not (tmp_path / "ran").exists()
    with Checkpointer("tiered://job", trust_objects=True) as ckpt:
        ckpt.restore({"weight": torch.zeros(3), "seen": 0})
    assert (tmp_path / "ran").exists()


GADGETS = {
    "a call": b"\x80\x02cos\nmkdir\nX%s\x85R.",
    "getattr of a class that is needed": (
        b"\x80\x02cbuiltins\ngetattr\nctorch.distributed.checkpoint.metadata\nMetadata\nX\x08\x00\x00\x00__init__\x86R."
    ),
    "getattr of a member": (
        b"\x80\x02cbuiltins\ngetattr\nctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n"
        b"X\x07\x00\x00\x00__doc__\x86R."
    ),
    "a name with a dot": (b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x11Metadata.__init__\x93."),
    "something else": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("gadget", GADGETS)
def test_metadata_loads_only_metadata_classes(tmp_path, gadget):
    ran = str(tmp_path / "ran").encode()
    with pytest.raises(pickle.UnpicklingError):
        load_dcp_metadata(io.BytesIO(GADGETS[gadget].replace(b"%s", len(ran).to_bytes(4, "little") + ran)))
    assert not (tmp_path / "ran").exists()


def test_metadata_written_by_dcp_is_read_the_same(tmp_path):
    state = {"a": {"b": torch.ones(3, 4), "c": [1, "x"]}, "s": torch.ones(2, 2).to_sparse(), "h": torch.ones(1).bool()}
    state.pop("s")
    dcp.save(state, checkpoint_id=str(tmp_path / "one"), no_dist=True)
    data = (tmp_path / "one" / ".metadata").read_bytes()
    assert load_dcp_metadata(io.BytesIO(data)) == pickle.loads(data)
    found = zeros_like_state(state)
    from tieredckpt.dcp.plain_checkpoints import folder_reader

    dcp.load(found, storage_reader=folder_reader(tmp_path / "one"), no_dist=True)
    assert found["a"]["b"].eq(1).all()
