"""What the platform a job runs on has to say about its settings: asked by name, answered by a plug-in.

A plug-in is an entry point of the group ``tieredckpt.platforms``: a function that is given what stands behind
``NAME:`` and returns settings, as a configuration file would have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from tieredckpt.errors import PluginError, SettingsError

PLATFORMS = "tieredckpt.platforms"
Answer = Callable[[str], Mapping[str, Any]]


def settings_at(source: str) -> dict[str, Any]:
    """Settings that ``NAME:WHERE`` says, in sections; what is said elsewhere goes before them."""
    name, colon, where = source.partition(":")
    points = list(metadata.entry_points(group=PLATFORMS, name=name)) if colon and where else []
    if not points:
        known = ", ".join(f"{known}:..." for known in sorted(metadata.entry_points(group=PLATFORMS).names)) or "none"
        raise SettingsError(f"cluster configuration {source!r}: there is no such platform; known are: {known}")
    try:
        answer: Answer = points[0].load()
    except Exception as error:
        raise PluginError(f"platform {name!r} ({points[0].value}) cannot be loaded: {error!r}") from error
    return {section: dict(keys) if isinstance(keys, Mapping) else keys for section, keys in answer(where).items()}
