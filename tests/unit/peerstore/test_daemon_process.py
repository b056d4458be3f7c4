"""Identity of a process: its number and its start time."""

import os
import subprocess
import sys

from peerstore.daemon_process import ProcessIdentity, current_process, process_identity, process_start_time


def test_process_is_alive_until_it_is_a_zombie():
    assert current_process().is_alive
    child = subprocess.Popen(["sleep", "60"])
    owner = process_identity(child.pid)
    assert owner.is_alive
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not owner.is_alive, "a zombie counts as alive"
    child.wait()
    assert not owner.is_alive
    assert process_start_time(child.pid) == -1


def test_a_number_given_to_a_later_process_is_another_owner():
    assert not ProcessIdentity(os.getpid(), current_process().start_time - 1).is_alive
    assert current_process() != ProcessIdentity(os.getpid(), 0)


def test_invisible_process_counts_as_alive():
    assert process_identity(0).is_alive


def test_an_agent_has_no_threads_of_numpy():
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    script = (
        "import argparse, os; from peerstore.cli import start_agent_process\n"
        "start_agent_process(argparse.Namespace(detach=False, log_level='warning'))\n"
        "import numpy; print(len(os.listdir('/proc/self/task')))"
    )
    found = subprocess.run([sys.executable, "-c", script], env=environ, check=True, capture_output=True, text=True)
    assert found.stdout == "1\n"
