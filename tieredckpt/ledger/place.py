"""Where a process is in its run: what whoever writes an event of it has to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Place:
    """Kept by whoever has the process enter worlds; one that enters none stays as it is."""

    epoch: int = -1
    rank: int = -1
    reached: float | None = None
    """On the way to the first step of this world: since when it is in its present stage."""
    begun: int = -1
    """The newest step that it has begun."""
    next_step: int = 0
    """The one after what was restored in this world."""
