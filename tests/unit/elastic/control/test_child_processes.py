"""Exit statuses and signals of child processes as text, and stacks written before the end."""

from __future__ import annotations

import sys
import threading

import pytest

from elastic.control.child_processes import STACKS_SIGNAL, ChildProcess, describe_exit, stack_location
from tests.support.control_planes import PATIENCE_S

SCRIPT = """
import ctypes, faulthandler, threading
from elastic.workers.leave_deadline import stacks_on_signal


def stuck():
    print("stuck", flush=True)
    {wait}


threading.Thread(target=threading.Event().wait, daemon=True).start()
with stacks_on_signal():
    stuck()
"""


def test_exit_status_is_described():
    assert describe_exit(3) == "it ended with status 3"
    assert describe_exit(-9) == "it was killed by signal 9 (SIGKILL)"
    assert describe_exit(-63) == "it was killed by signal 63"
    assert describe_exit(-STACKS_SIGNAL) == "it was killed after it had written the stacks of its threads"


@pytest.mark.parametrize("wait", ["ctypes.PyDLL(None).pause()", "threading.Event().wait()"], ids=["native", "python"])
def test_process_ends_with_the_stacks_of_its_threads(tmp_path, wait):
    script = tmp_path / "trainer.py"
    script.write_text(SCRIPT.format(wait=wait))
    lines, is_stuck, ended = [], threading.Event(), threading.Event()
    status = []

    def on_line(line):
        lines.append(line.decode())
        if line == b"stuck\n":
            is_stuck.set()

    def on_exit(number):
        status.append(number)
        ended.set()

    environ = {"PYTHONPATH": ":".join(sys.path), "PATH": ""}
    one = ChildProcess([sys.executable, str(script)], environ=environ, on_line=on_line, on_exit=on_exit)
    assert is_stuck.wait(PATIENCE_S)
    one.end_with_stacks()
    assert ended.wait(PATIENCE_S)
    assert status == [-STACKS_SIGNAL]
    assert stack_location("".join(lines)) in ("trainer.py:7 in stuck", "trainer.py:8 in stuck")  # the line is out first
    assert one.join(PATIENCE_S)


DUMP = """
Thread 0x00007f01 (most recent call first):
  File "/home/me/trainer.py", line 3 in background
{main}
Current thread 0x00007f02 (most recent call first):
  File "/home/me/trainer.py", line 5 in inner
  File "/home/me/trainer.py", line 6 in <module>
"""


def test_stack_location_is_that_of_the_last_dump_and_thread():
    assert stack_location("") == ""
    assert stack_location("no stack\n") == ""
    assert stack_location(DUMP.format(main="")) == "trainer.py:5 in inner"
    only_library = f'Current thread 0x01 (most recent call first):\n  File "{threading.__file__}", line 9 in wait\n'
    assert stack_location(DUMP.format(main="") + only_library) == "threading.py:9 in wait"
