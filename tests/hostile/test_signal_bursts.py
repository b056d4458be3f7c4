"""Bursts of signals that interrupt signal handlers, which must not deadlock."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from elastic.control.run_directory import write_private_file
from elastic.launcher import CoordinatorSpec, child_environ, spec_command
from elastic.world.scaling_policy import ScalingPolicy
from peerstore.transport.authentication import generate_secret
from tests.support.stores import StoreAgent, store_directory

MANY, SIGNALS, WITHIN_S = 8, 2000, 30.0


def send_signal_burst(processes) -> None:
    """Send signals to all processes, so fast that some interrupt a handler."""
    for at in range(SIGNALS):
        for process in processes:
            process.send_signal(signal.SIGTERM)
        if at % 7:
            os.sched_yield()
        else:
            time.sleep(1e-5)
        if not at % 100 and all(process.poll() is not None for process in processes):
            return


def exit_statuses(processes) -> list[int]:
    """Return all exit statuses. A process that hangs is killed and has the status of SIGKILL."""
    until = time.monotonic() + WITHIN_S
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return [process.returncode for process in processes]


def test_agents_exit_after_a_signal_burst():
    with contextlib.ExitStack() as cleanup:
        agents = []
        for _ in range(MANY):
            agents.append(StoreAgent(cleanup.enter_context(store_directory()), "--budget", "64MiB"))
            cleanup.callback(agents[-1].process.kill)
        assert all(agent.wait_ready() for agent in agents)
        processes = [agent.process for agent in agents]
        send_signal_burst(processes)
        assert exit_statuses(processes) == [0] * MANY


def test_coordinators_exit_after_a_signal_burst(tmp_path):
    write_private_file(tmp_path / "secret", generate_secret())
    with contextlib.ExitStack() as cleanup:
        processes = []
        for number in range(MANY):
            task = CoordinatorSpec(
                job="job",
                secret_file=str(tmp_path / "secret"),
                listen="127.0.0.1:0",
                policy=ScalingPolicy(max_replicas=2),
                nproc=1,
                fresh=True,
                address_file=str(tmp_path / f"address-{number}"),
                end_file=str(tmp_path / f"end-{number}"),
            )
            processes.append(subprocess.Popen(spec_command(task), env=child_environ(), stderr=subprocess.DEVNULL))
            cleanup.callback(processes[-1].kill)
        until = time.monotonic() + WITHIN_S
        while not all((tmp_path / f"address-{number}").exists() for number in range(MANY)):
            assert time.monotonic() < until
            time.sleep(0.01)
        send_signal_burst(processes)
        assert exit_statuses(processes) == [7] * MANY


IN_A_PROCESS = {
    "the operator": """
from integration.hyperpod.operator.sim_cli import _interrupted
with _interrupted() as stop:
    ready()
    assert stop.wait(60)
    done()
""",
    "a rank": """
from elastic.workers.step_barrier import NoticeWatcher, SignalRequest, forward_signals
from elastic.control.control_plane import NoticeKind
class Plane:
    requests = 0
    def on_broken(self, call): pass
    def request_change(self, want, reason, deadline_s): Plane.requests += 1
watch = NoticeWatcher(Plane(), print)
with forward_signals(watch, {signal.SIGTERM: SignalRequest(NoticeKind.RESIZE, "SIGTERM")}):
    ready()
    while not Plane.requests:
        time.sleep(0.001)
    done()
watch.close()
""",
}
PREAMBLE = """
import os, signal, sys, time
def ready(): os.write(1, b".")
def done(): os._exit(0)
"""


@pytest.mark.parametrize("process", IN_A_PROCESS)
def test_interrupting_handlers_do_not_deadlock(process):
    code = PREAMBLE + IN_A_PROCESS[process]
    with contextlib.ExitStack() as cleanup:
        processes = [
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=child_environ())
            for _ in range(MANY)
        ]
        for process in processes:
            cleanup.callback(process.stdout.close)
            cleanup.callback(process.kill)
        for process in processes:
            assert process.stdout.read(1) == b"."
        send_signal_burst(processes)
        assert exit_statuses(processes) == [0] * MANY
