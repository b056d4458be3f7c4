"""Plain checkpoints without ``.metadata``: listed, deleted by ``rm`` alone, and never restored."""

import os

import pytest

from tests.e2e.cli.test_rm import save_plain
from tests.support.bits import zeros_like_state
from tests.support.jobs import state_at
from tieredckpt.errors import CheckpointNotFoundError
from tieredckpt.session.session import close_sessions

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.e2e]


@pytest.fixture
def unfinished(job, tmp_path):
    """A job with steps 1 to 3, a plain checkpoint of step 4, and one of step 5 whose save was interrupted."""
    save_plain(job, 4, 5)
    folder = tmp_path / "durable" / "llama" / "step-5"
    (folder / ".metadata").unlink()
    close_sessions()
    return folder


def listed(cli, *more):
    said = cli("ls", "llama", "--json", *more).json
    return said["plain_steps"], said["incomplete_plain_steps"]


def test_ls_lists_an_incomplete_plain_checkpoint(cli, job, unfinished):
    assert listed(cli) == ([4], [5])
    assert listed(cli, "--durable", job.settings.durable.url) == ([4], [5])
    (line,) = [line for line in cli("ls", "llama").out.splitlines() if line.split()[:1] == ["5"]]
    assert line.split()[1] == "torn"
    assert "no .metadata" in line
    (line,) = cli("ls", "llama/step-5").out.splitlines()[2:]
    assert line.split()[:2] == ["5", "torn"]


def test_ls_lists_other_files_of_the_folder_as_no_checkpoint(cli, job, unfinished):
    for path in unfinished.iterdir():
        path.rename(path.with_suffix(".txt"))
    assert listed(cli) == ([4], [])
    assert cli("ls", "llama/step-5").code == 3


def test_rm_deletes_an_incomplete_plain_checkpoint(cli, job, unfinished):
    size = sum(path.stat().st_size for path in unfinished.iterdir())
    assert "delete the plain checkpoint tiered://llama/step-5 from durable (" in cli("rm", "llama", 5).err
    said = cli("rm", "llama", 5, "--yes", "--json")
    assert said.code == 0, said.err
    assert (said.json["plain_steps"], said.json["bytes"]["durable"]) == ([5], size)
    assert not unfinished.exists() or not list(unfinished.iterdir())
    assert listed(cli) == ([4], [])
    assert cli("rm", "llama", 5, "--yes").code == 3


def test_rm_of_a_job_deletes_incomplete_plain_checkpoints(cli, job, unfinished):
    said = cli("rm", "llama", "--yes", "--json")
    assert (said.code, said.json["plain_steps"]) == (0, [4, 5])
    assert cli("ls", "llama", "--durable", job.settings.durable.url).code == 3


def test_drop_deletes_an_incomplete_plain_checkpoint(cli, job, unfinished):
    with job.checkpointer() as ckpt:
        assert ckpt.drop(5)
        assert not ckpt.drop(5)
    assert listed(cli) == ([4], [])


def test_gc_keeps_an_incomplete_plain_checkpoint(cli, job, unfinished):
    """Another process may still write it, and retention does not apply to plain checkpoints."""
    for path in unfinished.iterdir():
        os.utime(path, (0, 0))
    assert cli("gc", "llama", "--keep-last", 1, "--abandoned-after", 0).code == 0
    assert listed(cli) == ([4], [5])


def test_restore_takes_no_incomplete_plain_checkpoint(cli, job, unfinished):
    with job.checkpointer() as ckpt:
        assert ckpt.restore(zeros_like_state(state_at(0))) == 4
    with job.checkpointer() as ckpt, pytest.raises(CheckpointNotFoundError):
        ckpt.restore(zeros_like_state(state_at(0)), 5)
