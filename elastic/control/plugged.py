"""Control planes of platforms that this package does not know: whoever installs one names it as an entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points

from elastic.control.plane import ControlPlane
from elastic.errors import PolicyError

GROUP = "elastic.planes"

Bring = Callable[[Mapping[str, str]], "ControlPlane | None"]
"""Called with the environment of a process; ``None`` where it was not started by that platform."""


def plugged_plane(environ: Mapping[str, str], found: Iterable[EntryPoint] | None = None) -> ControlPlane | None:
    """Of the first platform, by name, that started this process."""
    for entry in sorted(entry_points(group=GROUP) if found is None else found, key=lambda one: (one.name, one.value)):
        plane = _loaded(entry)(environ)
        if plane is not None:
            return plane
    return None


def _loaded(entry: EntryPoint) -> Bring:
    """One that cannot be loaded may be the one that runs this job: to go on without it would be a guess."""
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise PolicyError(f"{entry.value}, a plane called {entry.name}, cannot be loaded: {error}") from error
