"""A secret that the nodes of a job exchange through a directory that only its user can read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from elastic.control.run_directory import write_private_file
from elastic.errors import PolicyError
from peerstore.daemon_process import ensure_private_directory
from peerstore.transport.authentication import generate_secret, read_secret

_TIMEOUT_S = 120.0
"""Seconds to wait for the secret: machines start and network file systems show new files late."""
_POLL_S = 0.2


@contextlib.contextmanager
def shared_secret(directory: Path, name: str, *, makes: bool, within_s: float = _TIMEOUT_S) -> Iterator[bytes]:
    """Yield the secret that the machine with ``makes`` writes to ``directory`` under ``name``.

    That machine deletes the file at the end. The others wait for it, ``within_s`` seconds at most, and raise
    :class:`PolicyError` after that.
    """
    path = directory / f"{name}.secret"
    ensure_private_directory(directory)
    if not makes:
        yield _wait_for_secret(path, within_s)
        return
    secret = generate_secret()
    write_private_file(path, secret)
    try:
        yield secret
    finally:
        path.unlink(missing_ok=True)


def _wait_for_secret(path: Path, within_s: float) -> bytes:
    deadline = time.monotonic() + within_s
    while path.name not in _list_names(path.parent):
        if time.monotonic() > deadline:
            raise PolicyError(
                f"the job's first machine has left no secret in {path} within {within_s:g} s. Do all machines share "
                "that directory? Name one they share in $ELASTIC_SHARED_DIRECTORY, or give them a secret before srun: "
                "export ELASTIC_SECRET=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')"
            )
        time.sleep(_POLL_S)
    return read_secret(path)


def _list_names(directory: Path) -> list[str]:
    """List a directory, because a network file system may cache that a single name is missing."""
    return [entry.name for entry in directory.iterdir()]
