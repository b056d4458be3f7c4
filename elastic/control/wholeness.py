"""Which step is left to go on from, as far as the ranks of a job have said. Pure."""

from __future__ import annotations

from elastic.control.world_state import WorldState


class Wholeness:
    """The newest step that all ranks of some world had sealed."""

    def __init__(self) -> None:
        self.step = -1

    def said(self, state: WorldState) -> None:
        """What the nodes of a world have said by now."""
        self.step = max(self.step, state.sealed)

    def __str__(self) -> str:
        if self.step < 0:
            return "no step is known to have been sealed by all ranks since the coordinator began"
        return f"the last whole step is {self.step}"
