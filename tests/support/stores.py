"""Stores for tests: keys, writers and readers in one line each, and every implementation of a store."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peerstore.client.store_api import Store
from peerstore.client.store_client import Client
from peerstore.errors import AgentUnreachableError
from peerstore.server.store_server import StoreServer
from peerstore.settings import AgentPaths
from peerstore.shard_records import Lease, Pin, ShardKey, ShardRecord
from peerstore.store.arena import FileMapping
from peerstore.store.node_store import NodeStore
from peerstore.transport.unix import connect_to_agent
from tests.support import crashes
from tests.support.leaks import process_prefix

MIB = 1 << 20


def shard_key(
    version: int = 0, part: int = 0, *, job: str = "job", epoch: int = 1, name: str = "a", attempt: int = 0
) -> Any:
    return ShardKey(job, version, epoch, name, attempt, part)


def shard_content(of: ShardKey, size_bytes: int) -> bytes:
    """Return bytes unique to a key."""
    seed = repr(of).encode()
    return (seed * (size_bytes // len(seed) + 1))[:size_bytes]


def write_slot(lease: Lease, data: bytes, start: int = 0) -> None:
    """Write into a leased slot the way a trainer does: through a mapping."""
    if not data:
        return
    with (
        slot_file(lease.slot).open("r+b") as file,
        FileMapping(file.fileno(), start + len(data), writable=True) as mapping,
        mapping.view as view,
    ):
        view[start : start + len(data)] = data


def slot_file(slot: str) -> Path:
    """Find a slot's file by its unique name."""
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(fd.readlink()).startswith(f"/memfd:{slot} "):
                return fd
    mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    # Before Python 3.13, Path.glob fails when another test removes a directory during the search. This one does not.
    for place in (point for _, point, kind, *_ in mounts if kind == "tmpfs"):
        for found in (*glob.iglob(f"{place}/*/slots/{slot}"), *glob.iglob(f"{place}/*/*/slots/{slot}")):  # noqa: PTH207
            return Path(found)
    raise FileNotFoundError(slot)


def pinned_file(pin: Pin) -> Path:
    """Return the file of the pinned shard, to inspect or damage it."""
    return Path(f"/proc/self/fd/{pin.fd}")


def save_shard(store: Store, of: ShardKey, size_bytes: int = MIB, *, parts: int = 1, meta: bytes = b"") -> ShardRecord:
    lease = store.lease(of, size_bytes, parts)
    write_slot(lease, shard_content(of, size_bytes))
    return store.seal(lease.id, size_bytes, meta)


def load_shard(store: Store, of: ShardKey) -> bytes:
    pin = store.pin(of)
    try:
        with FileMapping(pin.fd, pin.record.size_bytes) as mapping, mapping.view as view:
            return bytes(view)
    finally:
        pin.close()
        store.unpin(pin.id)


def flip_byte(path: str | Path, at: int) -> None:
    """Change one byte of a file."""
    with Path(path).open("r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 0xFF]))


@contextlib.contextmanager
def serve_store(store: NodeStore, folder: Path) -> Iterator[Path]:
    """Run a server in this process and yield the path of its socket."""
    path = folder / f"{secrets.token_hex(4)}.sock"
    server = StoreServer(store, path, version="test")
    server.start()
    try:
        yield path
    finally:
        server.close()


@contextlib.contextmanager
def open_client(path: Path, **options: Any) -> Iterator[Client]:
    with contextlib.closing(Client(lambda: connect_to_agent(path), **{"retry_s": 5.0, **options})) as client:
        yield client


@contextlib.contextmanager
def store_directory() -> Iterator[Path]:
    """Yield a path on tmpfs for one store and remove it after the block."""
    directory = Path("/dev/shm") / (process_prefix("peerstore") + uuid.uuid4().hex[:8])
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


class StoreAgent:
    """A ``peerstore serve`` process as a child of the test."""

    def __init__(self, directory: Path, *options: str, crash_at: str = "", **popen: Any) -> None:
        self.place = AgentPaths(directory)
        environ = {**os.environ, **crashes.crash_environ(crash_at)}
        command = [sys.executable, "-m", "peerstore.cli", "serve", "--dir", str(directory), *options]
        self.process = subprocess.Popen(command, env=environ, **{"stderr": subprocess.DEVNULL, **popen})

    def wait_ready(self, timeout_s: float = 200.0) -> bool:
        """Wait until it answers (true) or has ended (false)."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            try:
                connect_to_agent(self.place.socket).close()
            except AgentUnreachableError:
                assert time.monotonic() < deadline, "the agent neither answers nor ends"
                time.sleep(0.01)
            else:
                return True
        return False

    def client(self, **options: Any) -> contextlib.AbstractContextManager[Client]:
        return open_client(self.place.socket, **options)

    def end(self) -> int:
        """Send SIGTERM, wait, and return the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(200)

    def kill(self) -> int:
        self.process.kill()
        return self.process.wait(200)


@contextlib.contextmanager
def store_agent(directory: Path, *options: str, crash_at: str = "", **popen: Any) -> Iterator[StoreAgent]:
    agent = StoreAgent(directory, *options, crash_at=crash_at, **popen)
    try:
        yield agent
    finally:
        if agent.process.poll() is None:
            agent.kill()
