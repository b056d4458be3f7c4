"""How far a job is: a line of JSON for each step, written by the first rank, read by whoever wants to know.

After a fault steps come again, with the same numbers; the last line of a step counts.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

_LOOK_S = 0.2


class Progress:
    """One rank's end. Ranks but the first write nothing.

    The line of the newest step is part of the checkpoint. A fault may interrupt the first rank before it has written
    that line, and the next world does not repeat a completed step.
    """

    def __init__(self, path: Path, *, rank: int) -> None:
        self._path = path if rank == 0 else None
        self._newest: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"newest": dict(self._newest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._newest = dict(state["newest"])

    def recover(self) -> None:
        """Write the line of the restored step if the file has none."""
        if self._path is not None and self._newest:
            steps = {line.get("step") for line in lines(self._path)[0]}
            if self._newest["step"] not in steps:
                self.write(**self._newest)

    def write_step(self, **values: Any) -> None:
        """Write the line of a completed step."""
        self._newest = values
        self.write(**values)

    def write(self, **values: Any) -> None:
        """One line, all of it or, on a machine that goes down, none."""
        if self._path is None:
            return
        line = (json.dumps(values) + "\n").encode()
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line)
        finally:
            os.close(handle)


def lines(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Complete lines from a place in the file on, and the place after them. No file yet: none yet."""
    try:
        with path.open("rb") as opened:
            opened.seek(start)
            text = opened.read()
    except FileNotFoundError:
        return [], start
    end = text.rfind(b"\n") + 1
    return [json.loads(line) for line in text[:end].splitlines()], start + end


class Following:
    """Calls ``heard`` with every new line, from a thread of its own, until the block is left; then with the rest."""

    def __init__(self, path: Path, heard: Callable[[dict[str, Any]], None]) -> None:
        self._path = path
        self._heard = heard
        self._at = path.stat().st_size if path.exists() else 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="finetune-progress", daemon=True)

    def __enter__(self) -> Following:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _follow(self) -> None:
        while not self._over.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        found, self._at = lines(self._path, self._at)
        for one in found:
            self._heard(one)
