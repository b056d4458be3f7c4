"""Shares of ports, one for each process of the tests."""

import json
import subprocess
import sys

ASK = """
import json, os, sys
os.getpid = lambda: 7  # as if two processes had numbers that lead to one share
from tests.support.ports import free_ports
print(json.dumps(free_ports(3)), flush=True)
sys.stdin.read()
"""


def test_processes_never_share_their_ports():
    running = [
        subprocess.Popen([sys.executable, "-c", ASK], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)
    ]
    try:
        found = [json.loads(process.stdout.readline()) for process in running]
    finally:
        for process in running:
            process.communicate()
    assert len({port for ports in found for port in ports}) == 9
