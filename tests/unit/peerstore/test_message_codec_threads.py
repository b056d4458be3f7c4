"""The first messages of a type may arrive in several threads without a crash."""

import subprocess
import sys

READ_AT_ONCE = """
import sys, threading
import msgspec
from peerstore.message_codec import from_json, from_msgpack

sys.setswitchinterval(1e-6)
inner = [msgspec.defstruct(f"Inner{n}", [("a", int, 0)]) for n in range(300)]
kinds = [msgspec.defstruct(f"Outer{n}", [("x", one | None, None), ("y", list[one], [])]) for n, one in enumerate(inner)]
said = {"x": {"a": 1}, "y": [{"a": 2}]}
packed, text, gate = msgspec.msgpack.encode(said), msgspec.json.encode(said), threading.Barrier(8)


def read(number):
    for kind in kinds:
        gate.wait()
        found = from_msgpack(packed, kind) if number % 2 else from_json(text, kind)
        assert (found.x.a, found.y[0].a) == (1, 2)


threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("read")
"""


def test_threads_may_decode_a_new_type_concurrently():
    """The test runs in a new process, because a type is prepared once in a process's life."""
    done = subprocess.run([sys.executable, "-c", READ_AT_ONCE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "read\n", "")
