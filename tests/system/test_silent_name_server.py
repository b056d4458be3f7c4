"""A name server that does not answer torch's store.

The store resolves the name of each client in the thread that serves all ranks.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
INSIDE = """
ip link set lo up && ip address add 10.9.8.7/32 dev lo
echo nameserver 127.0.0.9 > {folder}/resolv.conf
mount --bind {folder}/resolv.conf /etc/resolv.conf
exec {python} {folder}/asked.py
"""
ASKED = """
import os, queue, socket, threading
from elastic.rendezvous.store_servers import StoreProcess

asked, told = [], queue.SimpleQueue()
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.9", 53))

def listen():
    while True:
        asked.append(server.recvfrom(512)[0])

threading.Thread(target=listen, daemon=True).start()
keeper = StoreProcess("10.9.8.7", told.put)
keeper.ensure(wanted=True)
host, _, port = told.get(timeout=60).rpartition(":")
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # this process sends queries, too
from torch.distributed import TCPStore

for client in [TCPStore(host, int(port), is_master=False, wait_for_workers=False) for _ in range(2)]:
    client.add("met", 1)
keeper.close()
print(len(asked), len({*asked}))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a network and a name server of its own")
def test_rendezvous_store_resolves_each_name_once(tmp_path):
    (tmp_path / "asked.py").write_text(ASKED)
    script = INSIDE.format(folder=tmp_path, python=sys.executable)
    environ = {name: value for name, value in os.environ.items() if name != "RES_OPTIONS"} | {"PYTHONPATH": str(ROOT)}
    command = ["unshare", "--net", "--mount", "--propagation=private", "sh", "-ec", script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    asked, different = map(int, done.stdout.split())
    assert asked == different >= 2
