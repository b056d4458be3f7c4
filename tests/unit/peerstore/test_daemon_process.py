"""Identity of a process: its number and its start time."""

import os
import subprocess

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
