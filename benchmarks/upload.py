"""Upload speed against a server that drops what it gets: this package, and the best raw client there is.

    python benchmarks/upload.py [--size 1GiB] [--part 32MiB] [--concurrency 4] [--rounds 7] [--json FILE]

The source is a populated file on tmpfs, as a sealed slot is. Rounds are interleaved; ratios of one run are what counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import platform
import re
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import obstore.store

from tieredckpt.durable.digest import digest
from tieredckpt.durable.open import open_store
from tieredckpt.settings import DurableSettings
from tieredckpt.units import parse_size, show_size

CREATED = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
COMPLETED = b'<CompleteMultipartUploadResult><ETag>"e"</ETag></CompleteMultipartUploadResult>'


def serve() -> None:
    """Say the port, then take every PUT there is."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=take, args=(connection,), daemon=True).start()


def take(connection: socket.socket) -> None:
    buffer = memoryview(bytearray(1 << 20))
    rest = b""
    with connection, contextlib.suppress(OSError):
        while True:
            while b"\r\n\r\n" not in rest:
                block = connection.recv(1 << 16)
                if not block:
                    return
                rest += block
            head, _, rest = rest.partition(b"\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            left = int(length[1]) - len(rest) if length else 0
            while left > 0:
                left -= connection.recv_into(buffer, min(left, len(buffer)))
            rest = b""
            first = head.split(b"\r\n", 1)[0]
            body = b"" if first.startswith(b"PUT") else CREATED if b"?uploads" in first else COMPLETED
            connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: %d\r\n\r\n' % len(body) + body)


@contextlib.contextmanager
def null_server() -> Iterator[str]:
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


class NoJournal:
    def get(self, name: str) -> None:
        return None

    def put(self, name: str, data: bytes) -> None:
        pass

    def remove(self, name: str) -> None:
        pass


@dataclass
class Row:
    name: str
    run: Callable[[], object]
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def measure(self) -> None:
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        self.run()
        self.wall_s.append(time.perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_SELF)
        self.cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def raw_client(endpoint: str, source: Path, settings: argparse.Namespace, **config: str) -> Callable[[], object]:
    """obstore from a mapping, signed but without a digest of the payload unless asked for."""
    store = obstore.store.S3Store(
        "bucket",
        config={"endpoint": endpoint, "region": "us-east-1", "unsigned_payload": True, **config},
        client_options={"allow_http": True},
    )

    def run() -> None:
        with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            if hasattr(mmap, "MADV_POPULATE_READ"):
                mapped.madvise(mmap.MADV_POPULATE_READ)
            store.put("raw", memoryview(mapped), chunk_size=settings.part, max_concurrency=settings.concurrency)

    return run


def ours(
    undo: contextlib.ExitStack, endpoint: str, source: Path, settings: argparse.Namespace, checksum: str
) -> Callable[[], object]:
    durable = DurableSettings(
        part_size=str(settings.part),
        concurrency=settings.concurrency,
        options={"endpoint": endpoint, "region": "us-east-1", "checksum": checksum},
    )
    store = open_store("s3://bucket/prefix", durable)
    undo.callback(store.close)
    return lambda: store.upload("ours", source, settings.size, journal=NoJournal())


def crc32_by() -> str:
    digest(b"", "crc32")
    return "isal" if "isal.isal_zlib" in sys.modules else "zlib"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default=1 << 30)
    parser.add_argument("--part", type=parse_size, default=32 << 20)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.serve:
        serve()
    os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret")
    with contextlib.ExitStack() as undo:
        endpoint = undo.enter_context(null_server())
        source = Path(undo.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))) / "slot"
        block = os.urandom(1 << 20)
        with source.open("wb") as file:
            for _ in range(settings.size >> 20):
                file.write(block)
        rows = [
            Row("obstore, no checksum", raw_client(endpoint, source, settings)),
            Row("obstore, crc64nvme", raw_client(endpoint, source, settings, checksum_algorithm="CRC64NVME")),
            Row("tieredckpt, no checksum", ours(undo, endpoint, source, settings, "none")),
            Row(f"tieredckpt, crc32 by {crc32_by()}", ours(undo, endpoint, source, settings, "crc32")),
        ]
        for row in rows:
            row.run()
        for _ in range(settings.rounds):
            for row in rows:
                row.measure()
    best = statistics.median(rows[0].wall_s)
    print(f"{show_size(settings.size)} in parts of {show_size(settings.part)}, {settings.concurrency} in flight")
    for row in rows:
        wall, cpu = statistics.median(row.wall_s), statistics.median(row.cpu_s)
        speed = show_size(settings.size / wall)
        print(f"{row.name:28} {wall:6.3f} s  {speed:>9}/s  {cpu:6.3f} s CPU  {best / wall:5.2f} x {rows[0].name}")
    if settings.json:
        facts = {name: version(name) for name in ("obstore", "botocore")} | {"python": platform.python_version()}
        facts |= {"machine": platform.platform(), "cores": os.cpu_count()}
        raw = {row.name: {"wall_s": row.wall_s, "cpu_s": row.cpu_s} for row in rows}
        settings.json.write_text(json.dumps({"facts": facts, "rows": raw}, indent=1))


if __name__ == "__main__":
    main()
