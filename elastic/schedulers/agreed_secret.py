"""A secret that a job's machines agree on without being given one: through a directory that only its user reads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from elastic.control.runs import write_private
from elastic.errors import PolicyError
from peerstore.server import private_directory
from peerstore.transport.secret import new_secret, read_secret

_WITHIN_S = 120.0
"""The machines of a step do not start in the same second, and a network file system shows a new file late."""
_LOOK_S = 0.2


@contextlib.contextmanager
def agreed_secret(directory: Path, name: str, *, makes: bool, within_s: float = _WITHIN_S) -> Iterator[bytes]:
    """What the machine that ``makes`` it left in ``directory`` under ``name``; it takes it away at the end."""
    path = directory / f"{name}.secret"
    private_directory(directory)
    if not makes:
        yield _wait(path, within_s)
        return
    secret = new_secret()
    write_private(path, secret)
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
        time.sleep(_LOOK_S)
    return read_secret(path)


def _listed(directory: Path) -> list[str]:
    """Asking for the one name could be answered from what a network file system remembers not to be there."""
    return [entry.name for entry in directory.iterdir()]
