"""Real elastic agents and an unchanged script: faults of every kind, in the same processes as far as they live."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import hyperpod_training
from tests.support.hyperpod_agents import Pod, agents, start, stop, wait
from tests.support.hyperpod_training import TOTAL, Process, done, processes, trains
from tests.support.launched import start_ranks
from tests.support.neighbours import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
PATIENCE_S = 180.0
RANKS = 4


class Story:
    """A job of two pods with two ranks each, and what its operator does."""

    def __init__(self, pods: list[Pod], folder: Path) -> None:
        self.pods, self.folder = pods, folder
        self.count = 0

    def let(self, limit: int) -> None:
        path = self.folder / "limit.new"
        path.write_text(str(limit))
        path.replace(self.folder / "limit")

    def until_done(self, step: int, count: int | None = None) -> list[Process]:
        """All ranks have done this step, in the start of this number; who they are."""
        wanted = self.count if count is None else count

        def there() -> list[Process]:
            at = [one for one in processes(self.folder) if _newest(one) == (wanted, step)]
            return at if len(at) == RANKS else []

        return until(there, f"step {step} of start {wanted}: {self.told()}", PATIENCE_S)

    def until_at_fault(self) -> dict[str, object]:
        wait(self.pods, "faulted", any_of=True)
        return next(found for pod in self.pods if (found := pod.status())["status"] == "faulted")

    def again(self, mode: str = "in_process_restart") -> None:
        stop(self.pods, mode=mode)
        self.count += 1
        start(self.pods, fault_count=self.count)

    def told(self) -> str:
        return "\n".join(pod.printed()[-2000:] for pod in self.pods)


def _newest(one: Process) -> tuple[int, int]:
    """Of a process: the start that it is in, and the last step it has done there."""
    count, step = -1, -1
    for words in one.lines:
        if words[0] == "world":
            count, step = int(words[4]), -1
        elif words[0] == "step":
            step = int(words[2])
    return count, step


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory):
    """What every rank has after every step where nothing happens."""
    from tests.support.agents import agent_directory

    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "limit").write_text(str(TOTAL))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with agent_directory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIEREDCKPT_AGENT_DIRECTORY", str(directory))
        patch.setenv("TIEREDCKPT_AGENT_BUDGET", "1GiB")
        ended = [one.wait() for one in start_ranks(zygote, RANKS, store.port, trains, str(folder))]
    assert [one.result for one in ended] == ["finished"] * RANKS
    found = done([line.split() for one in ended for line in one.lines])
    assert len(found) == RANKS * TOTAL
    return found


@contextlib.contextmanager
def story(folder, agent_dir, **options):
    environ = {
        "STORY": str(folder),
        "TIEREDCKPT_AGENT_DIRECTORY": str(agent_dir),
        "TIEREDCKPT_AGENT_BUDGET": "2GiB",
    }
    (folder / "limit").write_text("0")
    script = hyperpod_training.__file__
    with agents(2, script, folder=folder / "pods", nproc=2, inprocess=True, environ=environ, **options) as pods:
        yield Story(pods, folder)


def pids(found: list[Process]) -> set[int]:
    return {one.pid for one in found}


def of(found: list[Process], pod: str) -> set[int]:
    return {one.pid for one in found if one.pod == pod}


def test_faults_of_all_kinds_under_real_agents(agent_dir, tmp_path, undisturbed):
    with story(tmp_path, agent_dir, inprocess_timeout_s=30) as job:
        start(job.pods)
        job.let(3)
        first = job.until_done(2)

        # A rank raises: all four processes go on.
        (tmp_path / "break-raise").write_text("1 3")
        job.let(5)
        said = job.until_at_fault()
        assert "ZeroDivisionError" in str(said), said
        job.again()
        assert pids(job.until_done(4)) == pids(first)

        # A rank is killed: those of the other pod go on.
        (tmp_path / "break-kill").write_text("2 5")
        job.let(8)
        job.until_at_fault()
        job.again()
        second = job.until_done(7)
        assert of(second, "pod0") == of(first, "pod0")
        assert of(second, "pod1") != of(first, "pod1")

        # A rank hangs, and no abort wakes it: the agent does not wait for ever, and starts its pod anew.
        (tmp_path / "break-hang").write_text("1 8")
        job.let(TOTAL)
        job.until_done(7)
        until(lambda: not (tmp_path / "break-hang").exists(), "it hangs", PATIENCE_S)
        job.again()
        wait(job.pods, "completed", timeout_s=PATIENCE_S)
        all_of_them = processes(tmp_path)
        assert [one.lines[-1] for one in all_of_them].count(["ended", "finished"]) == RANKS
        third = {one.pid for one in all_of_them if one.lines[-1] == ["ended", "finished"]}
        assert third & of(second, "pod1") == of(second, "pod1")
        assert not third & of(second, "pod0")
    assert done([line for one in all_of_them for line in one.lines]) == undisturbed
    assert not [pid for pid in pids(all_of_them) if Path(f"/proc/{pid}").exists() and os.getpgid(pid) == pid]
