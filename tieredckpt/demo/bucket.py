"""A local S3 server for the demo: one that is installed, on loopback, ended with the demo."""

from __future__ import annotations

import contextlib
import importlib.util
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

BUCKET = "demo"
_START_S = 30.0


@dataclass(frozen=True)
class Bucket:
    """Where the demo's durable tier is, and how to reach it."""

    url: str
    environ: dict[str, str]
    name: str
    look: str
    """How a person looks into it."""


@contextlib.contextmanager
def local_bucket(folder: Path) -> Iterator[Bucket]:
    """An S3 bucket on this machine; a directory where no S3 server is installed."""
    if importlib.util.find_spec("moto") is not None and importlib.util.find_spec("flask") is not None:
        port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        with _server(command, port, folder / "s3.log"):
            yield _bucket(port, "moto")
    elif (rclone := shutil.which("rclone")) is not None:
        port = free_port()
        (folder / "s3" / BUCKET).mkdir(parents=True)
        keys = f"{_KEYS['AWS_ACCESS_KEY_ID']},{_KEYS['AWS_SECRET_ACCESS_KEY']}"
        command = [rclone, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", keys, "--config", os.devnull]
        with _server([*command, str(folder / "s3")], port, folder / "s3.log"):
            yield _bucket(port, "rclone")
    else:
        place = folder / "durable"
        place.mkdir()
        yield Bucket(f"file://{place}", {}, "a directory (install moto[server] for a local S3)", f"find {place}")


_KEYS = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demodemo", "AWS_REGION": "us-east-1"}


def _bucket(port: int, name: str) -> Bucket:
    endpoint = f"http://127.0.0.1:{port}"
    environ = {**_KEYS, "AWS_ENDPOINT_URL": endpoint}
    _create_bucket(endpoint)
    keys = " ".join(f"{key}={value}" for key, value in environ.items())
    return Bucket(
        f"s3://{BUCKET}", environ, f"S3 ({name}) on {endpoint}", f"{keys} aws s3 ls --recursive s3://{BUCKET}"
    )


def _create_bucket(endpoint: str) -> None:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=_KEYS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=_KEYS["AWS_SECRET_ACCESS_KEY"],
        region_name=_KEYS["AWS_REGION"],
    )
    with contextlib.closing(client), contextlib.suppress(client.exceptions.BucketAlreadyOwnedByYou):
        client.create_bucket(Bucket=BUCKET)


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
