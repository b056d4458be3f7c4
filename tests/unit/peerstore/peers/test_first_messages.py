"""The first messages of two nodes come at once, and reading them must not end the agent."""

import subprocess
import sys

READ_AT_ONCE = """
import sys, threading
import msgspec
from peerstore.peers import messages

sys.setswitchinterval(1e-6)
group = [1, 1, 0, "a"]
ping = {"gossip": None, "settled": group, "base": [1, "a", 0, group], "kept": [[group, True, 5]], "torn": [group]}
data, gate = msgspec.msgpack.encode(ping), threading.Barrier(8)


def read():
    gate.wait()
    try:
        msgspec.msgpack.decode(data, type=messages.Ping)
    except msgspec.ValidationError:
        pass


threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_two_threads_may_be_the_first_to_read_a_message():
    """In a process of its own each time: a type is made ready once in its life."""
    ends = [subprocess.run([sys.executable, "-c", READ_AT_ONCE], check=False).returncode for _ in range(10)]
    assert ends == [0] * 10
