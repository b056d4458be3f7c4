"""Smallest Ceph with an object gateway, without root: one monitor, one in-memory store, radosgw.

Needs Debian's ceph-mon, ceph-osd, radosgw and ceph-common on the path, and about ten seconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.ports import free_port
from tests.support.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server, server_process

PROGRAMS = ("ceph", "ceph-authtool", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")

# auth none: tests use only the gateway's users and signatures. Without "crc secure" it waits for keys forever.
_CONFIGURATION = """\
[global]
fsid = {fsid}
mon initial members = a
mon host = [v2:127.0.0.1:{mon_v2},v1:127.0.0.1:{mon_v1}]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
auth cluster required = none
auth service required = none
auth client required = none
ms mon client mode = crc secure
run dir = {directory}
admin socket = {directory}/$name.asok
pid file =
log file = {directory}/$name.log
keyring = {directory}/keyring
mon data = {directory}/mon
osd data = {directory}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd class load list = *
osd class default list = *
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 2
osd pool default pgp num = 2
osd pool default pg autoscale mode = off
rgw rados pool pg num min = 1
mon allow pool size one = true
mon max pg per osd = 1000
osd max pg per osd hard ratio = 10
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw dns name = 127.0.0.1
rgw enable usage log = false
rgw enable gc threads = false
rgw enable lc threads = false
"""


def missing_programs() -> list[str]:
    return [program for program in PROGRAMS if shutil.which(program) is None]


@contextlib.contextmanager
def radosgw_server(directory: Path) -> Iterator[S3Server]:
    port, mon_v2, mon_v1 = free_port(), free_port(), free_port()
    configuration = directory / "ceph.conf"
    configuration.write_text(
        _CONFIGURATION.format(fsid=uuid.uuid4(), directory=directory, port=port, mon_v2=mon_v2, mon_v1=mon_v1)
    )
    cluster = _Cluster(directory, {**os.environ, "CEPH_CONF": str(configuration)})
    with contextlib.ExitStack() as daemons:
        cluster.make_monitor(mon_v2, mon_v1)
        daemons.enter_context(
            server_process(["ceph-mon", "-f", "-i", "a"], directory / "mon.out", mon_v2, env=cluster.env)
        )
        identity = cluster.make_store()
        daemons.enter_context(cluster.store(identity))
        daemons.enter_context(
            server_process(["radosgw", "-f", "-n", "client.admin"], directory / "rgw.out", port, env=cluster.env)
        )
        cluster.make_user()
        server = S3Server("radosgw", f"http://127.0.0.1:{port}", port, checks_credentials=True, keeps_conditions=True)
        with server.client() as client:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="first", Body=b"")  # creates the pools, which takes seconds
            client.delete_object(Bucket=BUCKET, Key="first")
        yield server


class _Cluster:
    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        self.env = env
        self._directory = directory
        for name in ("mon", "osd"):
            (directory / name).mkdir()

    def make_monitor(self, v2: int, v1: int) -> None:
        keyring, monmap = self._directory / "keyring", self._directory / "monmap"
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        capabilities = [word for part in ("mon", "osd", "mgr") for word in ("--cap", part, "allow *")]
        self._run("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *capabilities)
        address = f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]"
        fsid = self._run("ceph-conf", "--lookup", "fsid")
        self._run("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        shutil.copy(keyring, self._directory / "mon" / "keyring")

    def make_store(self) -> str:
        secret = str(uuid.uuid4())
        self._wait_until("a quorum", lambda: "quorum" in self._run("ceph", "--connect-timeout", "5", "-s"))
        identity = self._run("ceph", "osd", "new", secret)
        self._run("ceph-osd", "-i", identity, "--mkfs", "--osd-uuid", secret)
        self._run("ceph", "osd", "crush", "add", f"osd.{identity}", "1.0", "host=here", "root=default")
        return identity

    @contextlib.contextmanager
    def store(self, identity: str) -> Iterator[None]:
        with server_process(["ceph-osd", "-f", "-i", identity], self._directory / "osd.out", None, env=self.env):
            self._wait_until("the store", lambda: "1 up" in self._run("ceph", "osd", "stat"))
            yield

    def make_user(self) -> None:
        keys = (f"--access-key={ACCESS_KEY}", f"--secret={SECRET_KEY}")
        self._run("radosgw-admin", "user", "create", "--uid=test", "--display-name=test", *keys)

    def _run(self, *command: object) -> str:
        words = [str(word) for word in command]
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=200, cwd=self._directory)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
        return done.stdout.strip()

    def _wait_until(self, what: str, holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} was not ready after {timeout_s:.0f} s, see {self._directory}")
