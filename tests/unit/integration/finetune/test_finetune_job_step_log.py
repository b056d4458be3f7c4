"""The progress file of a fine-tuning job: one line for every step, even after a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.finetune.finetune_job import StepLogWriter, read_step_log


def restored(path: Path, *, rank: int) -> StepLogWriter:
    """Return the progress of a rank that restored step 1, which another rank completed."""
    other = StepLogWriter(path, rank=1)
    other.write_step(step=1, loss=0.5)
    one = StepLogWriter(path, rank=rank)
    one.load_state_dict(other.state_dict())
    return one


def test_recover_writes_the_missing_line_of_the_restored_step(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    StepLogWriter(path, rank=0).write_step(step=0, loss=1.0)
    restored(path, rank=0).recover()
    assert read_step_log(path)[0] == [{"step": 0, "loss": 1.0}, {"step": 1, "loss": 0.5}]


def test_recover_keeps_the_line_that_exists(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    StepLogWriter(path, rank=0).write_step(step=1, loss=0.5)
    restored(path, rank=0).recover()
    assert read_step_log(path)[0] == [{"step": 1, "loss": 0.5}]


@pytest.mark.parametrize("rank", [1, 7])
def test_recover_writes_nothing_on_other_ranks(tmp_path: Path, rank: int) -> None:
    restored(tmp_path / "progress", rank=rank).recover()
    assert not (tmp_path / "progress").exists()


def test_recover_writes_nothing_before_the_first_step(tmp_path: Path) -> None:
    StepLogWriter(tmp_path / "progress", rank=0).recover()
    assert not (tmp_path / "progress").exists()
