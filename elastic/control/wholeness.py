"""Which step is left to go on from, as far as the ranks of a job have said. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastic.control.messages import Formed, NodeSays


class Wholeness:
    """The newest step that all ranks of some world had sealed."""

    def __init__(self) -> None:
        self.step = -1

    def said(self, formed: Formed, said: Sequence[NodeSays]) -> None:
        """What nodes say that know of this world."""
        sealed = [-1 if progress is None else progress.sealed for says in said for progress in says.steps]
        if len(said) == len(formed.places):
            self.step = max(self.step, min(sealed, default=-1))

    def __str__(self) -> str:
        if self.step < 0:
            return "no step is known to have been sealed by all ranks since the coordinator began"
        return f"the last whole step is {self.step}"
