"""A receiver of traces by OTLP over HTTP, on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class OtlpReceiver(ThreadingHTTPServer):
    """An HTTP server that keeps all requests it received."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, dict[str, str], ExportTraceServiceRequest]] = []
        """Path, headers and content of each request."""
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def resources(self) -> list[dict[str, Any]]:
        """The attributes of the resource of each request."""
        return [_attributes(one.resource) for _, _, body in self.requests for one in body.resource_spans]

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for _, _, body in self.requests
            for resource in body.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def _attributes(holder: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}


class _Handler(BaseHTTPRequestHandler):
    server: OtlpReceiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.status == 200:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.server.requests.append((self.path, headers, ExportTraceServiceRequest.FromString(body)))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
        pass


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
