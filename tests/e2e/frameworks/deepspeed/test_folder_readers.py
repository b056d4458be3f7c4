"""DeepSpeed's own loader reads the folders of steps, on the same and another number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")
with warnings.catch_warnings():  # its optional packages, and torch's own warnings
    warnings.simplefilter("ignore")
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

from tests.support.deepspeed_training import STEPS, URL, kill_self, states, train
from tieredckpt.cli import main

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[4]


def load_in_new_interpreters(folder, stage):
    """Load a folder on two ranks that have no part of tieredckpt; return their last lines."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.deepspeed_engine", str(folder), str(stage)]
    store = f"{folder}.store"
    started = [
        subprocess.Popen([*command, str(rank), "2", store], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        return [one.communicate(timeout=200)[0].splitlines()[-1] for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()


@pytest.mark.fresh_starts
@pytest.mark.parametrize("stage", [1, 3])
def test_exported_folder_is_read_by_deepspeed_alone(agent_dir, deepspeed_zygote, tmp_path, stage):
    first = deepspeed_zygote.run_ranks(2, train, str(tmp_path), stage)
    assert main(["export", URL.removeprefix("tiered://"), str(tmp_path / "plain"), "--format", "directory"]) == 0
    expected = f"loaded {STEPS} {first[0].result} False"
    assert load_in_new_interpreters(tmp_path / "plain", stage) == [expected, expected]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_gets_all_files_and_an_error(
    agent_dir, deepspeed_zygote, tmp_path, stage, before, after
):
    deepspeed_zygote.run_ranks(before, train, str(tmp_path), stage)
    expected = f"used a DP world size of {before} but the current world size is {after}"
    running = deepspeed_zygote.start_world(after, train, str(tmp_path / "after"), stage)
    try:
        for rank, one in enumerate(running):
            has_file = stage < 3 or rank < before  # DeepSpeed's error for a rank without a file has no text
            with pytest.raises(AssertionError, match=expected if has_file else "assert len.self.ckpt_list. > 0"):
                one.wait()
    finally:
        for one in running:
            one.kill_if_alive()
    for rank in range(after):
        assert names_below(tmp_path / "after" / f"node{rank}") == all_names(tmp_path, before)


def names_below(folder):
    return {str(one.relative_to(folder)) for one in folder.rglob("*")}


def all_names(root, ranks):
    return set().union(*(names_below(root / f"node{rank}") for rank in range(ranks)))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_universal_checkpoint_continues_with_another_number_of_ranks(
    agent_dir, deepspeed_zygote, tmp_path, stage, before, after
):
    killed = {(rank, "saved 3"): kill_self for rank in range(before)}
    first = deepspeed_zygote.run_ranks(before, train, str(tmp_path), stage, killed)
    converted = partial(train, universal=True)
    second = deepspeed_zygote.run_ranks(after, converted, str(tmp_path), stage)
    assert {one.lines[0] for one in second} == {f"first 3 {states(first[0])[3]}"}
    third = deepspeed_zygote.run_ranks(after, train, str(tmp_path), stage)
    assert {one.lines[0] for one in third} == {f"first {STEPS} {second[0].result}"}
