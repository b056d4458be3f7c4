"""Whether the ranks of a world get on. Pure: the time is given."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.control.messages import Formed, NodeSays
from elastic.world.events import Hang


class Movement:
    """Of one world; it counts from the first step that one of its ranks completes, however long that takes."""

    def __init__(self) -> None:
        self._moved_at: float | None = None

    def said(self, before: NodeSays | None, says: NodeSays, now: float) -> None:
        """A node's two latest reports."""
        if before is not None and _steps(before) != _steps(says):
            self._moved_at = now

    def hangs(self, formed: Formed, reports: Mapping[str, NodeSays], limit_s: float, now: float) -> list[Hang]:
        """That nobody gets on, once; and whose rank is behind all others, where it is one."""
        if self._moved_at is None or now - self._moved_at <= limit_s:
            return []
        self._moved_at = None
        places = [
            (step, node, local_rank)
            for node in formed.places
            if node in reports
            for local_rank, step in enumerate(_steps(reports[node]))
        ]
        least = min((step for step, _, _ in places), default=-1)
        behind = [(node, local_rank) for step, node, local_rank in places if step == least]
        node, local_rank = behind[0] if len(behind) == 1 else ("", -1)
        return [Hang(formed.epoch, f"no rank has got on for {limit_s:g} s", node, local_rank)]


def _steps(says: NodeSays) -> list[int]:
    return [-1 if progress is None else progress.step for progress in says.steps]
