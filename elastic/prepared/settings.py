"""Where prepared batches are, and the only place here that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def prepared_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """``$ELASTIC_PREPARED_DIR``, or this user's own directory on the machine's shared memory."""
    named = environ.get("ELASTIC_PREPARED_DIR")
    return Path(named) if named else Path("/dev/shm") / f"elastic-prepared-{os.getuid()}"  # noqa: S108
