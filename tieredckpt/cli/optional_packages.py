"""The extra of this distribution that provides a package which is not installed."""

from __future__ import annotations

import re
from importlib import metadata

from tieredckpt.cli.exit_codes import CommandError, ExitCode

_REQUIREMENT = re.compile(r"""([A-Za-z0-9._-]+).*;\s*extra\s*==\s*["']([A-Za-z0-9._-]+)["']""")


def missing_extra(error: ModuleNotFoundError) -> CommandError | None:
    """Return the error that names the extra to install; ``None`` if no extra provides the module."""
    module = (error.name or "").partition(".")[0]
    try:
        requirements = metadata.requires("tieredckpt") or []
    except metadata.PackageNotFoundError:
        return None
    for found in filter(None, map(_REQUIREMENT.fullmatch, requirements)):
        if module and found[1].replace("-", "_").lower() == module.lower():
            text = f"the package {found[1]} is not installed: pip install 'tieredckpt[{found[2]}]'"
            return CommandError(text, code=ExitCode.USAGE)
    return None
