"""An S3 server that accepts and drops every upload, to measure the client alone."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

_CREATED = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
_COMPLETED = b'<CompleteMultipartUploadResult><ETag>"e"</ETag></CompleteMultipartUploadResult>'


@contextlib.contextmanager
def null_server() -> Iterator[str]:
    """Run the server in another process and yield its endpoint."""
    command = [sys.executable, "-m", "benchmarks.null_server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def serve() -> None:
    """Print the port, then accept all uploads."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_take, args=(connection,), daemon=True).start()


def _take(connection: socket.socket) -> None:
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
            if re.search(rb"(?i)expect: *100-continue", head):
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            length = re.search(rb"(?i)content-length: *(\d+)", head)
            left = int(length[1]) - len(rest) if length else 0
            while left > 0:
                left -= connection.recv_into(buffer, min(left, len(buffer)))
            rest = b""
            first = head.split(b"\r\n", 1)[0]
            body = b"" if first.startswith(b"PUT") else _CREATED if b"?uploads" in first else _COMPLETED
            connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: %d\r\n\r\n' % len(body) + body)


if __name__ == "__main__":
    serve()
