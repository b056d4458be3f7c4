"""A program forked from a template behaves like one in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

PROGRAM = """
import atexit, json, logging, os, resource, signal, sys, threading, time, warnings
if __name__ == "__main__":
    what = sys.argv[1]
    if what == "describe":
        open_ = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))
        print(json.dumps({
            "argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "environ": dict(os.environ),
            "shown": [open(f"/proc/self/{one}").read().split("\\0") for one in ("cmdline", "environ")],
            "name": open("/proc/self/comm").read()[:6],
            "files": [fd for fd in open_ if os.path.exists(f"/proc/self/fd/{fd}")],
            "parent": os.getppid() == int(sys.argv[2]), "session": os.getsid(0) == os.getpid(),
            "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "filters": [(one[0], one[2].__name__) for one in warnings.filters], "options": sys.warnoptions,
            "handlers": len(logging.getLogger().handlers), "file": __file__, "spec": __spec__ and __spec__.name,
            "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "threads": threading.active_count(),
            "main": sys.modules["__main__"].__name__, "input": sys.stdin.read(),
            "through": [one.write_through for one in (sys.stdout, sys.stderr)],
        }))
    elif what == "exit":
        sys.exit(3)
    elif what == "words":
        sys.exit("why it ended")
    elif what == "raise":
        raise ValueError("what went wrong")
    elif what == "last":
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.05), print("the thread"))).start()
    elif what == "wait":
        print("waits", flush=True)
        signal.pause()
    elif what == "exec":
        os.execvp(sys.executable, [sys.executable, "-u", *sys.argv[2:]])
"""

DRIVER = """
import json, os, signal, subprocess, sys
from tests.support import forked_starts
signal.signal(signal.SIGINT, signal.default_int_handler)  # both are ignored in what nohup or a shell starts aside
signal.signal(signal.SIGHUP, signal.SIG_DFL)
forked_starts._IMPORTED, forked_starts._warm = (), lambda: None
forked_starts.prepare()
forked_starts.install()
forks = []
there = forked_starts._start
def start(process, given):
    forks.append(there(process, given))
    return forks[-1]
forked_starts._start = start

def run(*words, before=(), wrapper="", **more):
    more = {"env": {**os.environ, "MARK": "a mark"}, "cwd": sys.argv[2], "input": "said", **more}
    read, write = os.pipe()
    try:
        command = [wrapper or sys.executable, *before, *words]
        done = subprocess.run(command, capture_output=True, text=True, pass_fds=(read,), **more)
    finally:
        os.close(read), os.close(write)
    return done.returncode, done.stdout, done.stderr.strip().splitlines()[-1:]

def signalled(number):
    command = [sys.executable, sys.argv[1], "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as one:
        one.stdout.readline()
        one.send_signal(number)
        return one.wait(20)

MODULE = "tests.unit.repository.test_forked_starts"
script, me = sys.argv[1], str(os.getpid())
wrapper = os.path.join(sys.argv[2], "wrapper")
with open(wrapper, "w") as file:
    file.write(f'#!/bin/sh\\nexec {sys.executable} "$@"\\n')
os.chmod(wrapper, 0o700)
safe = ["-P"] if sys.version_info >= (3, 11) else []
quiet = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
found = {}
for fresh in (True, False):
    forked_starts._here.fresh = fresh
    found[str(fresh)] = {
        "script": run(script, "describe", me, "two words", ""),
        "unbuffered": run(script, "describe", me, before=["-u"], env=quiet, start_new_session=True),
        "quiet": run(script, "describe", me, before=["-W", "ignore"], env=quiet),
        "safe": run(script, "describe", me, before=safe, env={**quiet, "PYTHONPATH": "/somewhere"}),
        "path": run(script, "describe", me, env={**quiet, "PYTHONPATH": "/somewhere:/else"}),
        "module": run("-m", MODULE, "describe", me, env={**quiet, "PYTHONPATH": os.getcwd()}),
        "wrapper": run(script, "describe", me, before=["-u"], env=quiet, wrapper=wrapper),
        "another": run(script, "exec", script, "describe", me),
        "exit": run(script, "exit"), "words": run(script, "words"), "raise": run(script, "raise"),
        "last": run(script, "last"),
        "ended": [signalled(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP)],
    }
print(json.dumps([found, forks]))
"""

if __name__ == "__main__":
    exec(PROGRAM)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forked")
    script = folder / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-c", DRIVER, str(script), str(folder)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_all_were_forked_that_were_to_be(told):
    assert told[1] == [True] * 16


@pytest.mark.parametrize("how", ["script", "unbuffered", "quiet", "safe", "path", "module", "wrapper", "another"])
def test_forked_program_sees_the_same_state_as_a_fresh_process(told, how):
    (status, said, _), (fresh_status, fresh_said, words) = told[0]["False"][how], told[0]["True"][how]
    assert (status, fresh_status) == (0, 0), words
    forked, fresh = json.loads(said), json.loads(fresh_said)
    if how == "wrapper":  # a shell passes its environment in an order of its own
        forked["shown"][1].sort(), fresh["shown"][1].sort()
    assert forked == fresh


@pytest.mark.parametrize("how", ["exit", "words", "raise", "last", "ended"])
def test_forked_program_ends_like_a_fresh_process(told, how):
    assert told[0]["False"][how] == told[0]["True"][how]
