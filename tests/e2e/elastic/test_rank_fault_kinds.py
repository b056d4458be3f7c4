"""``elastic run`` with ranks that fail in every way and at every stage, and an unrecoverable fault."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.support.agents import stop_agent
from tests.support.elastic_runs import ROOT, elastic_job
from tests.support.local_nodes import wait_until

pytestmark = pytest.mark.e2e

SCRIPT = ROOT / "tests/support/faulty_rank.py"
RANKS = 3


def outcome(*faults, options=()):
    """Return the ranks' messages by kind, the exit status and the output."""
    with elastic_job() as job:
        job.environ |= {"OMP_NUM_THREADS": "1", "TIEREDCKPT_AGENT_BUDGET": "256MiB"}
        job.environ["TIEREDCKPT_AGENT_DIRECTORY"] = str(job.folder / "agent")
        job.touch("policy").write_text("abort_timeout_s: 15\nrestart_timeout_s: 200\n")
        shape = ("--nproc", str(RANKS), "--node", "n0", "--job", "job", "--policy", str(job.folder / "policy"))
        logs = ("--log-dir", str(job.folder / "logs"))
        try:
            running = job.start("run", *shape, *logs, *options, str(SCRIPT), str(job.folder), *faults)
            try:
                running.wait(900)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"it did not end\n{job.output()}") from None
            return {what: job.rank_messages(what) for what in ("in", "fails", "step")}, running.returncode, job.output()
        finally:
            for one in job.started:
                one.send_signal(signal.SIGKILL)
                one.wait()
            wait_until(lambda: not job.pids("faulty_rank"))
            for place in {path.parent for path in job.folder.rglob("agent.lock")}:
                stop_agent(place)


def assert_only_the_faulty_were_replaced(said, faults):
    """Check that a rank that raises keeps its process, and that only ranks that die or hang are replaced."""
    known, gone = {}, set()
    for epoch, fault in enumerate((*faults, "")):
        for rank, pid in pids(said, epoch).items():
            assert rank not in known or (pid != known[rank]) is (rank in gone), (epoch, rank)
            known[rank] = pid
            gone.discard(rank)
        rank, _, how = fault.partition(":")
        if how and not how.startswith("raise"):
            gone.add(int(rank))
    assert known.keys() == set(range(RANKS))
    assert not gone


def pids(said, epoch):
    """Return the process of each rank that entered this world or failed on entry."""
    return {one["rank"]: one["pid"] for what in ("in", "fails") for one in said[what] if one["epoch"] == epoch}


def assert_ends_with_words(said, status, output):
    done = max(one["step"] for one in said["step"])
    assert status == 8, output
    failed, attempts, resumes, command = output.splitlines()[-4:]
    assert failed.startswith("failed: ")
    assert f"the loss of step {done + 1} is not finite" in failed
    assert attempts == "attempts: not retried: another attempt would fail the same way"
    assert resumes == f"resumes from: step {done}"
    assert command.startswith(f"command: elastic run --nproc {RANKS} --node n0")


@pytest.mark.timeout(600)
def test_crash_is_followed_by_a_failure_for_a_nonfinite_loss():
    faults = ("2:crash-step",)
    said, status, output = outcome(*faults)
    assert_only_the_faulty_were_replaced(said, faults)
    assert "killed by signal 11 (SIGSEGV)" in output
    assert_ends_with_words(said, status, output)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_job_recovers_from_every_fault_at_every_stage():
    faults = (
        "1:stop-restore",  # before the very first step
        "0:raise-first",
        "0:loop-step",
        "2:hold-step",
        "0:stop-step",
        "1:kill-groups",
        "2:kill-restore",
        "1:kill-step",
        "0:raise-step",
    )
    said, status, output = outcome(*faults, options=("--hang-timeout", "15", "--spares", "1"))
    assert_only_the_faulty_were_replaced(said, faults)
    assert_ends_with_words(said, status, output)
