"""The run of docs/how-to/resizing.md: nodes are preempted and returned for minutes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.elastic_runs import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seed", [2, 3])
def test_preempted_job_loses_no_sample_and_throughput_follows_its_size(tmp_path, seed):
    command = (sys.executable, "-m", "benchmarks.preempted", "--minutes", "3.4", "--seed", str(seed))
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    story = json.loads((tmp_path / "run.json").read_text())
    assert story["steps_in_order"]
    assert story["losses_bit_for_bit_as_undisturbed"] == story["steps"]
    assert story["samples"]["problems"] == []
    assert all(event.get("processes_gone_s", 0.0) is not None for event in story["events"])
    assert set(story["by_world_size"]) == {"1", "2", "3", "4"}
    rates = [story["by_world_size"][size]["tokens_per_s"] for size in "1234"]
    assert rates == sorted(rates)
    assert (tmp_path / "run.svg").read_text().startswith("<svg")
