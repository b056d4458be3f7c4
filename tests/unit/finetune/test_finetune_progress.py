"""The progress file of a fine-tuning job: one line for every step, even after a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.finetune.progress import Progress, lines


def restored(path: Path, *, rank: int) -> Progress:
    """Return the progress of a rank that restored step 1, which another rank completed."""
    other = Progress(path, rank=1)
    other.write_step(step=1, loss=0.5)
    one = Progress(path, rank=rank)
    one.load_state_dict(other.state_dict())
    return one


def test_recover_writes_the_missing_line_of_the_restored_step(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    Progress(path, rank=0).write_step(step=0, loss=1.0)
    restored(path, rank=0).recover()
    assert lines(path)[0] == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}]


def test_recover_keeps_the_line_that_exists(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    Progress(path, rank=0).write_step(step=1, loss=0.5)
    restored(path, rank=0).recover()
    assert lines(path)[0] == [{"step": 1, "loss": 0.5}]


@pytest.mark.parametrize("rank", [1, 7])
def test_recover_writes_nothing_on_other_ranks(tmp_path: Path, rank: int) -> None:
    restored(tmp_path / "progress", rank=rank).recover()
    assert not (tmp_path / "progress").exists()


def test_recover_writes_nothing_before_the_first_step(tmp_path: Path) -> None:
    Progress(tmp_path / "progress", rank=0).recover()
    assert not (tmp_path / "progress").exists()
