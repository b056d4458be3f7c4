"""Names of a saved directory's files in a step's state."""

from __future__ import annotations

from tieredckpt.errors import CheckpointDamagedError

DIRECTORY_ENTRY = "directory"
"""Name in the step's state. The entries below it are files, named by their paths in the directory."""
ROOT_NAME = "./"
"""Entry of the directory itself. Names of directories end with a slash."""


def check_file_name(name: str) -> None:
    """Raise :class:`CheckpointDamagedError` for a name that is not a path below the directory."""
    parts = name.removesuffix("/").split("/")
    if name != ROOT_NAME and (not name or "\0" in name or any(part in ("", ".", "..") for part in parts)):
        raise CheckpointDamagedError(f"{name!r} in a saved directory is not a path below it")
