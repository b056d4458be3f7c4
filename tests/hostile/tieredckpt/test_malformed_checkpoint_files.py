"""Malformed checkpoint files, which cause a typed error or a restore of the older step."""

import re
import resource
import shutil
from pathlib import Path

import pytest
import torch

from peerstore.shard_records import VersionId
from tests.hostile.tieredckpt.make import FILES, JOB, STEP, hostile_manifests
from tests.support.bits import assert_same_bits, zeros_like_state
from tieredckpt import CheckpointDamagedError, Checkpointer
from tieredckpt.agent.agent_api import StepDescription
from tieredckpt.errors import FormatVersionError
from tieredckpt.format import object_keys
from tieredckpt.format.manifest import decode_manifest, decode_shard_file
from tieredckpt.restore.step_index import StepIndex
from tieredckpt.testing import memory_node

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HOSTILE = sorted(FILES.iterdir())
FUTURE = {"future.manifest", "far-future.manifest"}
BUILD_DEPENDENT = {"dtype-unknown.manifest"}
"""Valid files whose element types only some builds of torch know."""
GROUP = VersionId(1, STEP, 0, "abc")
hostile = pytest.mark.parametrize("file", HOSTILE, ids=lambda path: path.stem)


def hostile_by_turns(turn):
    """Parametrize a slower test with all files, half of them only in the nightly run."""
    files = [
        pytest.param(file, marks=() if number % 2 == turn or file.name in FUTURE else pytest.mark.nightly)
        for number, file in enumerate(HOSTILE)
    ]
    return pytest.mark.parametrize("file", files, ids=lambda path: path.stem)


@pytest.fixture
def limited_memory():
    """Limit the address space, so that allocating the 2 GiB that a file claims fails.

    Every thread reserves 128 MiB for its heap, so a lower limit is not possible.
    """
    used = int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (7 << 28), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def state_at(step):
    return {"a": torch.full((64,), float(step)), "b": torch.full((4, 8), step), "o": f"step {step}"}


@pytest.fixture(scope="module")
def good_step(tmp_path_factory):
    """Create a durable tier with step 1."""
    root = tmp_path_factory.mktemp("durable")
    with memory_node(), Checkpointer(JOB, durable=f"file://{root}", on_sigterm="ignore") as ckpt:
        ckpt.save(state_at(1), 1).wait("durable")
    return root


def test_stored_files_match_the_generator_script():
    assert {path.stem for path in HOSTILE} == set(hostile_manifests())
    assert sum(path.stat().st_size for path in HOSTILE) < 100_000


def open_manifest(data):
    return StepIndex(StepDescription(decode_manifest(data), {}))


@hostile
def test_malformed_manifest_is_refused(file, limited_memory):
    if file.name in BUILD_DEPENDENT:
        open_manifest(file.read_bytes())
        return
    with pytest.raises(FormatVersionError if file.name in FUTURE else CheckpointDamagedError):
        open_manifest(file.read_bytes())


@hostile
def test_malformed_manifest_is_refused_as_an_index(file, limited_memory):
    with pytest.raises((CheckpointDamagedError, FormatVersionError)):
        decode_shard_file(file.read_bytes())


@hostile_by_turns(0)
def test_malformed_step_falls_back_to_the_older_one(file, good_step, tmp_path, limited_memory):
    """Only a newer format ends the load: an older step may not be what the user of a newer release wants."""
    root = Path(shutil.copytree(good_step, tmp_path / "durable"))
    (root / object_keys.manifest_key(JOB, GROUP, None)).write_bytes(file.read_bytes())
    kept = {path.relative_to(root) for path in root.rglob("*") if path.is_file()}
    state = zeros_like_state(state_at(0))
    with memory_node(), Checkpointer(JOB, durable=f"file://{root}", on_sigterm="ignore") as ckpt:
        if file.name in FUTURE:
            with pytest.raises(FormatVersionError, match="upgrade tieredckpt"):
                ckpt.restore(state)
            assert_same_bits(zeros_like_state(state_at(0)), state)
        else:
            assert ckpt.restore(state) == 1
            assert_same_bits(state_at(1), state)
    assert kept <= {path.relative_to(root) for path in root.rglob("*") if path.is_file()}


@hostile_by_turns(1)
def test_single_malformed_manifest_is_an_error_and_no_fresh_start(file, tmp_path, limited_memory):
    root = tmp_path / "durable"
    path = root / object_keys.manifest_key(JOB, GROUP, None)
    path.parent.mkdir(parents=True)
    path.write_bytes(file.read_bytes())
    state = state_at(9)
    with memory_node(), Checkpointer(JOB, durable=f"file://{root}", on_sigterm="ignore") as ckpt:
        with pytest.raises((CheckpointDamagedError, FormatVersionError)):
            ckpt.restore(state)
        assert_same_bits(state_at(9), state)
        assert ckpt.save(state, 10).wait("durable").value == "durable"  # training continues
        assert ckpt.restore(zeros_like_state(state)) == 10


# -- foreign object names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "000000000009.000001.0.abc.manifest",  # no origin
        "9.1.0.abc.unknown.manifest",
        "000000000009.000001.0.a%2fb.unknown.manifest",
        "-00000000009.000001.0.abc.unknown.manifest",
        "000000000009.000001.0.abc.from--1.manifest",
        "99999999999999999999.000001.0.abc.unknown.manifest",
        "000000000009.000001.0." + "x" * 65 + ".unknown.manifest",
        ".000000000009.000001.0.abc.unknown.manifest.0123456789abcdef.staged",
        "readme.txt",
        "\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661.000001.0.abc.unknown.manifest",
    ],
)
def test_foreign_files_among_manifests_are_left_alone(name, good_step, tmp_path):
    root = Path(shutil.copytree(good_step, tmp_path / "durable"))
    stranger = root / JOB / "manifests" / name
    stranger.write_bytes(b"mine")
    with memory_node(), Checkpointer(JOB, durable=f"file://{root}", keep_last=1, on_sigterm="ignore") as ckpt:
        state = zeros_like_state(state_at(0))
        assert ckpt.restore(state) == 1
        assert_same_bits(state_at(1), state)
        for step in (2, 3):
            ckpt.save(state_at(step), step).wait("durable")
    assert stranger.read_bytes() == b"mine"


# -- shards -------------------------------------------------------------------------------------------------------


def shard_files(root, pattern="*.safetensors"):
    return sorted((root / JOB / "steps").rglob(pattern))


HARM = {
    "empty": lambda data: b"",
    "header only": lambda data: data[:4096],
    "a byte short": lambda data: data[:-1],
    "a byte long": lambda data: data + b"\0",
    "zeros": lambda data: b"\0" * len(data),
    "in the length": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "in the first tensor": lambda data: flip_byte(data, 4096),
    "in the last tensor": lambda data: flip_byte(data, 4096 + 64 * 4 + 4 * 8 * 8 - 1),
    "in the object": lambda data: flip_byte(data, len(data) - 1),
}


def flip_byte(data, at):
    changed = bytearray(data)
    changed[at] ^= 0x80
    return bytes(changed)


@pytest.mark.parametrize("harm", HARM)
def test_damaged_shard_is_never_loaded(harm, good_step, tmp_path):
    """The older step is restored, or without one an error is raised. Surplus bytes at the end are ignored."""
    root = Path(shutil.copytree(good_step, tmp_path / "durable"))
    with memory_node(), Checkpointer(JOB, durable=f"file://{root}", on_sigterm="ignore") as ckpt:
        ckpt.save(state_at(2), 2).wait("durable")
    old, new = shard_files(root)
    new.write_bytes(HARM[harm](new.read_bytes()))
    unread = harm == "a byte long"
    with memory_node(), Checkpointer(JOB, durable=f"file://{root}", on_sigterm="ignore") as ckpt:
        state = zeros_like_state(state_at(0))
        assert ckpt.restore(state) == (2 if unread else 1)
        assert_same_bits(state_at(2 if unread else 1), state)
        assert bool(ckpt.steps()[1].quarantined) is not unread
    old.write_bytes(HARM["zeros"](old.read_bytes()))
    if not unread:
        with memory_node(), Checkpointer(JOB, durable=f"file://{root}", on_sigterm="ignore") as ckpt:
            for _ in range(2):  # a second restore must not treat the store as empty
                with pytest.raises(CheckpointDamagedError):
                    ckpt.restore(zeros_like_state(state_at(0)))


def test_false_safetensors_header_is_detected(good_step, tmp_path):
    """Restores use the layout and not the header, but the checksums cover both."""
    root = Path(shutil.copytree(good_step, tmp_path / "durable"))
    (path,) = shard_files(root)
    data = path.read_bytes()
    lie = data.replace(b'"shape":[64],"data_offsets":[0,256]', b'"shape":[64],"data_offsets":[9,265]')
    assert lie != data
    assert len(lie) == len(data)
    path.write_bytes(lie)
    with (
        memory_node(),
        Checkpointer(JOB, durable=f"file://{root}", on_sigterm="ignore") as ckpt,
        pytest.raises(CheckpointDamagedError),
    ):
        ckpt.restore(zeros_like_state(state_at(0)))
