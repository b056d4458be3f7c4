"""In-process fake of the memory service that AWS's library expects."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

_NAMESPACE = re.compile(r"/v1/cp/namespaces/([^/]+)")
_LATEST = re.compile(r"/v1/cp/checkpoints/([^/]+)/latest")
_SHARD = re.compile(r"/v1/cp/checkpoints/([^/]+)/([0-9]+)/([0-9]+)")


class FakeMemoryService:
    """Namespaces of shards by rank and step; each rank keeps only its newest steps, complete or not."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.namespaces: dict[str, tuple[int, int]] = {}
        self.shards: dict[str, dict[int, dict[int, tuple[bytes, str]]]] = {}
        self.broken = False
        """Whether to answer every request with 500."""
        self.url = ""

    def shard_bytes(self, namespace: str, rank: int, step: int) -> bytes:
        return self.shards[namespace][rank][step][0]

    def delete_shard(self, namespace: str, rank: int, step: int) -> None:
        del self.shards[namespace][rank][step]

    def replace_shard(self, namespace: str, rank: int, step: int, data: bytes, *, resealed: bool = True) -> None:
        """Replace a shard's bytes, with a new checksum or (``resealed=False``) the old one."""
        meta = shard_meta(data) if resealed else self.shards[namespace][rank][step][1]
        self.shards[namespace].setdefault(rank, {})[step] = (data, meta)

    def handle_request(self, method: str, target: str, body: bytes, meta: str) -> tuple[int, bytes, str]:
        """Return status, body and Shard-Meta."""
        if self.broken:
            return 500, b"broken", ""
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        with self.lock:
            if match := _NAMESPACE.fullmatch(path):
                return self._namespace(method, match[1], query)
            if match := _LATEST.fullmatch(path):
                if match[1] not in self.namespaces:
                    return 404, b"", ""
                steps = {step for kept in self.shards[match[1]].values() for step in kept}
                limit = int(query.get("limit", ["5"])[0])
                return 200, json.dumps(sorted(steps, reverse=True)[:limit]).encode(), ""
            if match := _SHARD.fullmatch(path):
                return self._shard(method, match[1], int(match[2]), int(match[3]), body, meta)
            if path == "/v1/cp/cluster/reset" and method == "POST":
                self.namespaces.clear()
                self.shards.clear()
                return 200, b"{}", ""
        return 404, b"", ""

    def _namespace(self, method: str, name: str, query: dict[str, list[str]]) -> tuple[int, bytes, str]:
        if method == "POST":
            if name in self.namespaces:
                return 409, b"exists", ""
            self.namespaces[name] = int(query["num_ranks"][0]), int(query.get("steps_retained", ["3"])[0])
            self.shards[name] = {}
            return 200, b'{"status":"created"}', ""
        if name not in self.namespaces:
            return 404, b"", ""
        ranks, steps = self.namespaces[name]
        return 200, json.dumps({"num_ranks": ranks, "steps_to_retain_per_rank": steps}).encode(), ""

    def _shard(self, method: str, name: str, rank: int, step: int, body: bytes, meta: str) -> tuple[int, bytes, str]:
        if name not in self.namespaces:
            return 404, b"", ""
        kept = self.shards[name].setdefault(rank, {})
        if method == "POST":
            kept[step] = body, meta
            while len(kept) > self.namespaces[name][1]:
                del kept[min(kept)]
            return 200, b'{"status":"ok"}', ""
        if step not in kept:
            return 404, b"", ""
        return 200, *kept[step]


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: FakeMemoryService

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        status, data, meta = self.service.handle_request(
            self.command, self.path, body, self.headers.get("Shard-Meta", "")
        )
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if meta:
            self.send_header("Shard-Meta", meta)
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has read enough and closed
            self.wfile.write(data)

    do_POST = do_DELETE = do_GET

    def log_message(self, *args: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *args: object) -> None:
        """Ignore clients that hang up after reading the beginning."""


def shard_meta(data: bytes) -> str:
    import base64

    import xxhash

    digest = base64.b64encode(xxhash.xxh3_128_digest(data)).decode()
    return json.dumps({"checksum": digest, "algorithm": "xxh3_128"})


@contextlib.contextmanager
def fake_memory_service() -> Iterator[FakeMemoryService]:
    service = FakeMemoryService()
    handler = type("Handler", (_Handler,), {"service": service})
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = False
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
