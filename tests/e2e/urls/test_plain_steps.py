"""Plain checkpoints of the durable tier as files of ``tiered://``, next to the other steps."""

import pickle

import fsspec
import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.bits import assert_same_bits, zeros_like_state
from tests.support.jobs import state_at
from tieredckpt import CheckpointDamagedError, Checkpointer
from tieredckpt.errors import UsageError
from tieredckpt.session.session import close_sessions

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
    pytest.mark.e2e,
]


@pytest.fixture
def folder(tmp_path, monkeypatch, agent_dir):
    monkeypatch.setenv("TIEREDCKPT_DURABLE_URL", f"file://{tmp_path}/durable")
    return tmp_path / "durable" / "job"


def save_plain(*steps, of=0):
    """Save steps with the package disabled, and add ``of`` to the numbers in the state."""
    with pytest.MonkeyPatch.context() as disabled:
        disabled.setenv("TIEREDCKPT_ENABLED", "0")
        with Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
            for step in steps:
                assert ckpt.save(state_at(step + of), step, durable=True).ok
    close_sessions()


def save_tiered(*steps):
    with Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
        for step in steps:
            assert ckpt.save(state_at(step), step).wait("durable")


def restored_step():
    with Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
        return ckpt.restore(zeros_like_state(state_at(0)))


def assert_loads(step, number=None, **source):
    expected = state_at(step if number is None else number)
    found = zeros_like_state(expected)
    dcp.load(found, no_dist=True, **(source or {"checkpoint_id": f"tiered://job/step-{step}"}))
    assert_same_bits(expected, found)


@pytest.mark.parametrize(("plain", "tiered"), [((7, 12), (3, 9)), ((2,), (3, 9)), ((4,), ())])
def test_listing_ends_with_the_step_of_a_restore(folder, caplog, plain, tiered):
    save_tiered(*tiered)
    save_plain(*plain)
    fs = fsspec.filesystem("tiered")
    listed = fs.ls("tiered://job", detail=False)
    assert listed == [f"job/step-{step}" for step in sorted(plain + tiered)]
    assert listed[-1] == f"job/step-{restored_step()}"
    for step in plain + tiered:
        assert fs.isdir(f"tiered://job/step-{step}")
        assert_loads(step)
    assert "newer than the files listed" not in caplog.text


@pytest.mark.parametrize("tiered", [(), (2, 3)])
@pytest.mark.parametrize("restored", [5, 4])
def test_run_continues_from_a_restored_plain_step(folder, caplog, tiered, restored):
    """The next save follows the restored step, which may be older than the newest one."""
    save_tiered(*tiered)
    save_plain(4, 5)
    with Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
        assert [one.step for one in ckpt.steps()] == [*tiered, 4, 5]  # the agent lists the durable tier again
        found = zeros_like_state(state_at(0))
        assert ckpt.restore(found, None if restored == 5 else restored) == restored
        assert_same_bits(state_at(restored), found)
        assert ckpt.save(state_at(restored + 10), restored + 1).wait("durable")
    assert "nothing was restored" not in caplog.text
    assert restored_step() == restored + 1
    assert_loads(restored + 1, restored + 10)


def test_files_of_a_plain_step_are_those_of_the_durable_tier(folder):
    save_plain(7)
    (folder / "step-7" / "__0_1.distcp.tmp").write_bytes(b"unfinished")
    fs = fsspec.filesystem("tiered")
    files = {path.name: path.read_bytes() for path in (folder / "step-7").iterdir() if path.suffix != ".tmp"}
    assert fs.ls("tiered://job/step-7", detail=False) == [f"job/step-7/{name}" for name in sorted(files)]
    for name, data in files.items():
        path = f"tiered://job/step-7/{name}"
        assert fs.isfile(path)
        assert fs.size(path) == len(data)
        assert fs.cat_file(path) == data
    data = files["__0_0.distcp"]
    with fs.open("tiered://job/step-7/__0_0.distcp") as file:
        file.seek(1000)
        assert file.read(77) == data[1000:1077]
        file.seek(-10, 2)
        assert file.read() == data[-10:]
    assert fs.modified("tiered://job/step-7").timestamp() == pytest.approx(
        (folder / "step-7" / ".metadata").stat().st_mtime
    )
    assert not fs.exists("tiered://job/step-7/__1_0.distcp")
    with pytest.raises(FileNotFoundError):
        fs.open("tiered://job/step-7/__1_0.distcp")


def test_torchs_own_reader_loads_a_plain_step(folder):
    save_plain(7)
    assert_loads(7, storage_reader=FsspecReader("tiered://job/step-7"))


def test_step_with_both_kinds_has_the_files_that_a_restore_reads(folder):
    save_plain(5, of=100)
    assert_loads(5, 105)
    save_tiered(5)
    assert fsspec.filesystem("tiered").ls("tiered://job", detail=False) == ["job/step-5"]
    assert_loads(5)
    assert restored_step() == 5


def test_disabled_package_shows_only_plain_steps(folder, monkeypatch):
    save_plain(5, of=100)
    save_tiered(5, 9)
    monkeypatch.setenv("TIEREDCKPT_ENABLED", "0")
    assert fsspec.filesystem("tiered").ls("tiered://job", detail=False) == ["job/step-5"]
    assert_loads(5, 105)
    assert restored_step() == 5


def test_side_files_lie_in_the_folder_of_a_plain_step(folder):
    save_plain(7)
    fs = fsspec.filesystem("tiered")
    fs.pipe("tiered://job/step-7/state.json", b"{}")
    names = [".metadata", "__0_0.distcp", "state.json"]
    assert fs.ls("tiered://job/step-7", detail=False) == [f"job/step-7/{name}" for name in names]


def test_removal_of_a_step_deletes_both_kinds_and_no_other_file(folder):
    save_plain(5)
    save_tiered(5)
    save_plain(6)
    (folder / "step-5" / "notes.txt").write_text("written by another program")
    fs = fsspec.filesystem("tiered")
    with pytest.raises(OSError, match="removed with their step"):
        fs.rm_file("tiered://job/step-6/__0_0.distcp")
    fs.rm("tiered://job/step-5", recursive=True)
    assert fs.ls("tiered://job", detail=False) == ["job/step-6"]
    assert [path.name for path in (folder / "step-5").iterdir()] == ["notes.txt"]
    fs.rm("tiered://job/step-6", recursive=True)
    assert not fs.exists("tiered://job/step-6")
    with pytest.raises(FileNotFoundError):
        fs.rm("tiered://job/step-6", recursive=True)
    assert restored_step() == -1


def test_drop_deletes_both_kinds_and_no_other_file(folder):
    save_plain(5)
    save_tiered(5)
    save_plain(6)
    (folder / "step-5" / "notes.txt").write_text("written by another program")
    with Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
        assert ckpt.drop(5)
        assert not ckpt.drop(5)
        assert [path.name for path in (folder / "step-5").iterdir()] == ["notes.txt"]
        assert [one.step for one in ckpt.steps()] == [6]
        assert ckpt.drop(6)
        assert ckpt.steps() == []
    assert restored_step() == -1


def test_drop_while_disabled_deletes_only_the_plain_checkpoint(folder, monkeypatch):
    save_plain(5, of=100)
    save_tiered(5)
    monkeypatch.setenv("TIEREDCKPT_ENABLED", "0")
    with Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
        assert [one.step for one in ckpt.steps()] == [5]
        assert ckpt.drop(5)
        assert not ckpt.drop(5)
        assert ckpt.steps() == []
    monkeypatch.delenv("TIEREDCKPT_ENABLED")
    assert_loads(5)


def test_refused_drop_keeps_the_plain_checkpoint(folder):
    save_tiered(10, 20)
    save_plain(11)
    with Checkpointer("tiered://job", on_sigterm="ignore") as ckpt:
        ckpt.restore(zeros_like_state(state_at(0)), 10)
        assert ckpt.save(state_at(11), 11).wait("durable")
        with pytest.raises(UsageError, match="the abandoned steps 20"):
            ckpt.drop(11)
        assert (folder / "step-11" / ".metadata").exists()
        with pytest.raises(UsageError, match="the abandoned steps 20"):
            fsspec.filesystem("tiered").rm("tiered://job/step-11", recursive=True)
        assert (folder / "step-11" / ".metadata").exists()


def test_damaged_metadata_is_refused(folder):
    save_plain(7)
    (folder / "step-7" / ".metadata").write_bytes(pickle.dumps({"no": "metadata"}))
    with pytest.raises(CheckpointDamagedError, match=r"step-7/\.metadata is not DCP metadata"):
        fsspec.filesystem("tiered").cat_file("tiered://job/step-7/.metadata")
    with pytest.raises(CheckpointException, match="is not DCP metadata"):
        assert_loads(7)


def test_shortened_file_is_an_error(folder):
    save_plain(7)
    fs = fsspec.filesystem("tiered")
    with fs.open("tiered://job/step-7/__0_0.distcp") as file:
        with (folder / "step-7" / "__0_0.distcp").open("r+b") as short:
            short.truncate(1000)
        with pytest.raises(CheckpointDamagedError):
            file.read()


def load_on_every_rank():
    found = zeros_like_state(state_at(7))
    dcp.load(found, checkpoint_id="tiered://job/step-7")
    assert_same_bits(state_at(7), found)
    return fsspec.filesystem("tiered").ls("tiered://job", detail=False)


def test_ranks_load_a_plain_step(folder, ranks):
    save_plain(7)
    assert ranks.run(2, load_on_every_rank) == [["job/step-7"]] * 2
