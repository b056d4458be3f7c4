"""A job's secret: what its nodes know and others do not."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from peerstore.errors import RequestError

MIN_BYTES = 16
MAX_BYTES = 4 << 10
_FILE = "file:"
_HOW = "make one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"


def new_secret() -> bytes:
    """A secret nobody has; printable."""
    return secrets.token_urlsafe(32).encode()


def read_secret(given: str | Path) -> bytes:
    """``given`` is the secret itself, or where it is: a :class:`~pathlib.Path`, or ``file:/path/to/it``."""
    if isinstance(given, Path):
        return _checked(_read(given), f"the secret in {given}")
    if given.startswith(_FILE):
        return read_secret(Path(given[len(_FILE) :]).expanduser())
    if "/" in given and os.path.exists(given):  # noqa: PTH110 - a Path raises for a secret too long to be one
        raise RequestError(f"the secret given is the name of a file: write file:{given} to use what is in it")
    return _checked(given.encode(), "the secret given")


def _checked(raw: bytes, what: str) -> bytes:
    secret = raw.strip()
    if len(secret) < MIN_BYTES:
        raise RequestError(f"{what} has {len(secret)} bytes, at least {MIN_BYTES} are needed: {_HOW}")
    if len(secret) > MAX_BYTES:
        raise RequestError(f"{what} has more than {MAX_BYTES} bytes: {_HOW}")
    return secret


def _read(path: Path) -> bytes:
    """Symbolic links are followed, because Kubernetes mounts secrets as such; what counts is who may read the file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RequestError(f"the secret cannot be read from {path}: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise RequestError(f"the secret cannot be read from {path}: it is not a file")
        if problem := exposed(found):
            raise RequestError(
                f"the secret in {path} {problem}: chmod 0400 it, or for a Kubernetes secret set the volume's "
                "defaultMode to 0400 (0440 with an fsGroup)"
            )
        return os.read(fd, MAX_BYTES + 64)
    finally:
        os.close(fd)


def exposed(found: os.stat_result) -> str:
    """What is wrong with who may read or write it. A group is fine where root chose it: that is Kubernetes' fsGroup."""
    mode, owner, me = found.st_mode, found.st_uid, os.getuid()
    if owner not in (me, 0):
        return f"belongs to user {owner}, not to user {me} or root"
    allowed = 0o740 if owner == 0 else 0o700
    if stat.S_IMODE(mode) & 0o777 & ~allowed:
        return f"may be read or written by others than its owner (mode {stat.S_IMODE(mode):04o})"
    return ""
