"""A secret that the nodes of a job exchange through a directory that only its user can read."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from elastic.control.run_directory import write_private_file
from elastic.errors import PolicyError
from peerstore.server.store_server import ensure_private_directory
from peerstore.transport.authentication import generate_secret, read_secret

_WITHIN_S = 120.0
"""The machines of a step do not start in the same second, and a network file system shows a new file late."""
_POLL_S = 0.2


@contextlib.contextmanager
def shared_secret(directory: Path, name: str, *, makes: bool, within_s: float = _WITHIN_S) -> Iterator[bytes]:
    """What the machine that ``makes`` it left in ``directory`` under ``name``; it takes it away at the end."""
    path = directory / f"{name}.secret"
    ensure_private_directory(directory)
    if not makes:
        yield _wait(path, within_s)
        return
    secret = generate_secret()
    write_private_file(path, secret)
    try:
        yield secret
    finally:
        path.unlink(missing_ok=True)


def _wait(path: Path, within_s: float) -> bytes:
    deadline = time.monotonic() + within_s
    while path.name not in _listed(path.parent):
        if time.monotonic() > deadline:
            raise PolicyError(
                f"the job's first machine has left no secret in {path} within {within_s:g} s. Do all machines share "
                "that directory? Name one they share in $ELASTIC_SHARED_DIRECTORY, or give them a secret before srun: "
                "export ELASTIC_SECRET=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')"
            )
        time.sleep(_POLL_S)
    return read_secret(path)


def _listed(directory: Path) -> list[str]:
    """Asking for the one name could be answered from what a network file system remembers not to be there."""
    return [entry.name for entry in directory.iterdir()]
