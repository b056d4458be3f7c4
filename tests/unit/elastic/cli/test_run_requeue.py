"""Exactly one node of a job asks Slurm to requeue it."""

from __future__ import annotations

import pytest

from elastic.cli import run
from elastic.launcher import SupervisorSpec
from tieredckpt.cli.exit_codes import ExitCode


def task(node, *, leads=False):
    return SupervisorSpec(
        job="job", secret_file="", node=node, coordinator="n1:1", command=(), directory="", logs="", nproc=1, spares=0,
        host="", sigterm_grace_s=1.0,
        has_local_coordinator=leads, coordinator_node="" if leads else "n1", scheduled_job="12",
    )  # fmt: skip


LEADER, SECOND, THIRD = task("n1", leads=True), task("n2"), task("n3")
ALL, LOST = ("n1", "n2", "n3"), ("n2", "n3")


@pytest.mark.parametrize(
    ("left", "status", "noticed", "who"),
    [
        (ALL, ExitCode.STOPPED, True, ["n1"]),
        (ALL, ExitCode.STOPPED, False, []),  # `elastic stop`, SIGTERM: the user has ended the job
        (ALL, ExitCode.OK, True, []),
        (ALL, ExitCode.JOB_FAILED, True, []),
        (LOST, ExitCode.JOB_FAILED, False, ["n2"]),
        ((), ExitCode.JOB_FAILED, False, []),  # Slurm does not report it
        (LOST, ExitCode.REFUSED, False, []),
    ],
)
def test_only_a_single_node_requeues_the_job(monkeypatch, left, status, noticed, who):
    monkeypatch.setattr(run, "remaining_nodes", lambda job: {"12": left}[job])
    asking = [one.node for one in (LEADER, SECOND, THIRD) if run._is_to_requeue("12", one, status, noticed=noticed)]
    assert asking == who
