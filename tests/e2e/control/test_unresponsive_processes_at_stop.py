"""``elastic run`` ends after SIGTERM although a process that it has started does not react."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import msgspec
import pytest

from elastic import launcher
from elastic.control.run_directory import write_private_file
from elastic.errors import JobFailedError
from elastic.launcher import CoordinatorSpec, JobLauncher, SupervisorSpec
from elastic.world.scaling_policy import ScalingPolicy
from peerstore.transport.authentication import generate_secret
from tests.support.local_nodes import wait_until
from tieredckpt.cli.exit_codes import ExitCode

pytestmark = pytest.mark.e2e

NODES = ("n0", "n1")
ALLOWED_S = 60.0


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The launcher of a coordinator and two supervisors, whose ranks never join."""
    monkeypatch.setattr(launcher, "_DISCONNECTED_S", 0.5)
    secret = generate_secret()
    write_private_file(tmp_path / "secret", secret)
    coordinator = CoordinatorSpec(
        job="job",
        secret_file=str(tmp_path / "secret"),
        listen="127.0.0.1:0",
        policy=ScalingPolicy(max_replicas=len(NODES)),
        nproc=1,
        fresh=True,
        address_file=str(tmp_path / "address"),
        end_file=str(tmp_path / "end"),
        farewell_s=1.0,
    )
    nodes = [
        SupervisorSpec(
            job="job",
            secret_file=str(tmp_path / "secret"),
            node=name,
            coordinator="",
            command=("sleep", "1000"),
            directory=str(tmp_path / name),
            logs=str(tmp_path / "logs"),
            nproc=1,
            spares=0,
            host="127.0.0.1",
            sigterm_grace_s=2.0,
            exit_timeout_s=0.5,
            heartbeat_s=0.2,
            starts_agent=False,
            has_local_coordinator=True,
        )
        for name in NODES
    ]
    return JobLauncher(nodes, coordinator, secret, grace_s=2.0)


@pytest.fixture
def one_machine(job, tmp_path):
    """The launcher of one machine of the job, whose coordinator runs on another machine."""
    job._start_coordinator(job._coordinator)
    wait_until((tmp_path / "address").exists, timeout_s=ALLOWED_S)
    nodes = [msgspec.structs.replace(node, coordinator=(tmp_path / "address").read_text()) for node in job._nodes]
    yield JobLauncher(nodes, None, job._secret, grace_s=2.0)
    job._kill_all()


def stop_with_a_stopped_process(job, pid_to_stop, then=lambda: None):
    """Stop a process once all ranks have started, then the job, and call ``then``."""
    ended = threading.Event()

    def stop():
        wait_until(lambda: all(_ranks_of(job, name) for name in NODES), timeout_s=ALLOWED_S)
        pid = pid_to_stop(job)
        os.kill(pid, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGTERM)
        then()
        if not ended.wait(ALLOWED_S):
            hung.append(pid)
            os.kill(pid, signal.SIGKILL)

    hung = []
    thread = threading.Thread(target=stop)
    thread.start()
    try:
        return job.run()
    finally:
        ended.set()
        thread.join()
        assert not hung


def _ranks_of(job, name):
    return [one for one in (job._running.get(name),) if one is not None and children(one.pid)]


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_stopped_supervisor_is_killed(job):
    assert stop_with_a_stopped_process(job, lambda job: job._running["n1"].pid) == ExitCode.STOPPED
    assert job.killed_nodes == {"n1"}


def test_stopped_supervisor_of_a_preempted_machine_is_killed(one_machine):
    stop_with_a_stopped_process(one_machine, lambda job: job._running["n1"].pid)
    assert "n1" in one_machine.killed_nodes


def test_signal_after_the_coordinator_has_ended_is_no_failure(job):
    job._grace_s = 0.2

    def signal_again():
        wait_until(lambda: job._coordinator_status is not None, timeout_s=ALLOWED_S)
        os.kill(os.getpid(), signal.SIGTERM)

    assert stop_with_a_stopped_process(job, lambda job: job._running["n1"].pid, signal_again) == ExitCode.STOPPED


def test_stopped_coordinator_fails_the_job(job):
    with pytest.raises(JobFailedError, match="the coordinator did not answer SIGTERM"):
        stop_with_a_stopped_process(job, lambda job: job._coordinator_process.pid)
