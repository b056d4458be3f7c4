"""The agent's signal to a process group: its effect on the rank and on the rank's children."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from integration.hyperpod.elastic_agent.stop_signal import GroupSignalListener
from tests.support.local_nodes import wait_until

ROOT = Path(__file__).parents[5]

RANK = """
import json, multiprocessing, queue, signal, subprocess, sys

heard, done = [], queue.SimpleQueue()  # which a handler may put into while it is waited for
dies = () if sys.argv[1] == "ours" else ("spawn", "exec")  # of the signal: told to end, it could do so before that

def say_and_wait(there, end):
    there.set()
    end.recv()

def started(how):
    if how == "exec":
        words = [sys.executable, "-c", "input(print(flush=True) or '')"]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process.stdout.readline()
        return process.wait if how in dies else lambda: process.communicate(b"end") and process.returncode
    context = multiprocessing.get_context(how)
    there, (reading, writing) = context.Event(), context.Pipe(duplex=False)
    process = context.Process(target=say_and_wait, args=(there, reading))
    process.start()
    there.wait()
    reading.close()
    def ended():
        if how not in dies:
            writing.send(None)
        process.join()
        return process.exitcode
    return ended

if __name__ == "__main__":
    if sys.argv[1] == "ours":
        from integration.hyperpod.elastic_agent.stop_signal import agent_stop_signal
        signal.signal(signal.SIGUSR1, lambda *_: heard.append("the script's, before"))
        agent_stop_signal().add_callback(lambda: heard.append("ours"))
        earlier = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda *a: (earlier(*a), heard.append("the script's, after"), done.put(1)))
    else:
        signal.signal(signal.SIGUSR1, lambda *_: done.put(1))
    children = {how: started(how) for how in ("fork", "spawn", "exec")}
    print("ready", flush=True)
    done.get()
    print(json.dumps({"heard": heard, "ended": {how: ended() for how, ended in children.items()}}), flush=True)
"""


def signalled(tmp_path, how):
    """Signal a rank's group once its children run, and return the rank's report."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    rank = subprocess.Popen(
        [sys.executable, str(script), how],
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    assert rank.stdout is not None
    with rank:
        try:
            assert rank.stdout.readline() == "ready\n"
            os.killpg(rank.pid, signal.SIGUSR1)
            said = json.loads(rank.stdout.readline())
        finally:
            if rank.poll() is None and sys.exc_info()[0] is not None:
                os.killpg(rank.pid, signal.SIGKILL)
        assert rank.wait(60) == 0
    return said


def test_children_of_a_rank_survive_the_agents_group_signal(tmp_path):
    said = signalled(tmp_path, "ours")
    assert said["ended"] == {"fork": 0, "spawn": 0, "exec": 0}
    assert sorted(said["heard"]) == ["ours", "the script's, after", "the script's, before"]


def test_plain_handler_does_not_protect_children_from_the_signal(tmp_path):
    ended = signalled(tmp_path, "a handler")["ended"]
    assert ended["spawn"] == ended["exec"] == -signal.SIGUSR1


# -- in this process --------------------------------------------------------------------------------------------------


@pytest.fixture
def asked():
    before = signal.getsignal(signal.SIGUSR1)
    assert (wakes := signal.set_wakeup_fd(-1)) == -1
    with_mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    one = GroupSignalListener()
    yield one
    one.close()
    assert signal.getsignal(signal.SIGUSR1) == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == with_mask
    assert signal.set_wakeup_fd(-1) == wakes


def test_signal_is_received_while_the_main_thread_is_blocked(asked):
    calls = []
    asked.listen().add_callback(lambda: calls.append(1))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert asked.received.wait(60)  # threads of other libraries may be given it, and do not wake this one
    wait_until(lambda: calls)
    late = []
    asked.add_callback(lambda: late.append(1))
    assert late == [1]


def test_signal_to_an_older_thread_is_received(asked):
    ended, there = threading.Event(), threading.Event()
    old = threading.Thread(target=lambda: (there.set(), ended.wait()))
    old.start()
    there.wait()
    try:
        asked.listen()
        signal.pthread_kill(old.ident, signal.SIGUSR1)
        assert asked.received.wait(60)
    finally:
        ended.set()
        old.join()


def test_signal_handler_takes_no_lock_of_the_interrupted_thread(asked):
    asked.listen()
    with asked.received._cond:  # like a thread that begins to wait for the signal
        signal.getsignal(signal.SIGUSR1)(signal.SIGUSR1, None)
    assert asked.received.wait(60)


def test_removed_callback_is_not_called_and_a_failing_one_stops_no_other(asked):
    calls = []

    def failing() -> None:
        raise ValueError("no")

    def forgotten() -> None:
        calls.append("forgotten")

    asked.listen().add_callback(failing)
    asked.add_callback(forgotten)
    asked.add_callback(lambda: calls.append("called"))
    asked.remove_callback(forgotten)
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: calls)
    assert calls == ["called"]


def test_only_the_main_thread_changes_anything(asked):
    before = signal.getsignal(signal.SIGUSR1)
    other = threading.Thread(target=asked.listen)
    other.start()
    other.join()
    assert signal.getsignal(signal.SIGUSR1) == before
