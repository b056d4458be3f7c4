"""Under a launcher that knows nothing of it: stopped by a signal at one rank, a job goes on where it was."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import launched
from tests.support.launched import restore_state, run_script, run_torchrun, start_ranks, train_polling
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[3] / "examples" / "elastic_loop.py"


@pytest.fixture
def port():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def pids(folder, count):
    """Of the ranks that are inside step 2."""
    return wait_until(lambda: len(found := [int(path.name[4:]) for path in folder.glob("pid-*")]) == count and found)


def test_torchrun_succeeds_when_one_rank_is_signaled(agent_dir, tmp_path, zygote, port):
    two = ["--nproc-per-node=2"]
    running = zygote.start(run_torchrun, launched.__file__, two, str(tmp_path), environ={"OMP_NUM_THREADS": "1"})
    os.kill(pids(tmp_path, 2)[1], signal.SIGUSR1)
    (tmp_path / "go").touch()  # without the signal it would never end
    assert running.wait().status == 0
    ends = {path.name.rpartition("-")[0] for path in tmp_path.glob("stopped-*")}
    assert len(ends) == 1
    assert len(list(tmp_path.glob("stopped-*"))) == 2
    steps = int(ends.pop().removeprefix("stopped-"))
    for one in start_ranks(zygote, 3, port, restore_state, "looping"):
        assert one.wait().lines == [f"restored {steps - 1} memory"]


def test_polling_loops_stop_at_the_same_step_and_the_next_start_resumes(agent_dir, tmp_path, zygote, port):
    ranks = start_ranks(zygote, 2, port, train_polling, str(tmp_path))
    pids(tmp_path, 2)
    ranks[1].kill(signal.SIGTERM)
    (tmp_path / "go").touch()
    first, second = (one.wait().lines for one in ranks)
    assert first == second
    restored, left = first
    assert restored == "restored -1"
    again = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for one in start_ranks(zygote, 1, again.port, restore_state, "asking"):
        assert one.wait().lines == [f"{left.replace('left', 'restored')} memory"]


def test_example_runs_unchanged(agent_dir, zygote, port):
    first = [one.wait().lines for one in start_ranks(zygote, 2, port, run_script, str(EXAMPLE))]
    assert sum(line.startswith("2 ranks did steps 0 to 19: loss ") for lines in first for line in lines) == 1
    (alone,) = zygote.start(run_script, str(EXAMPLE)).wait().lines[:1]
    assert alone.startswith("1 ranks did steps 20 to 39: loss ")
