"""P1: how long a save keeps the trainer from its next step."""

from __future__ import annotations

import contextlib
from typing import Any

from benchmarks.limits import WarmMapping
from benchmarks.opponents import AsyncFiles
from benchmarks.parameters import Scene
from benchmarks.rounds import COPY, Contender, built, measure, those_of, use_threads
from benchmarks.sandbox import JOB, settings_for
from benchmarks.states import State, advance, blank, wipe
from tieredckpt import Checkpointer
from tieredckpt.checkpointer.checkpointer import SaveHandle

OURS, ASYNC = "Checkpointer.save", "dcp.async_save, DefaultStager kept"
_ALL_SLOTS = 4
"""Saves until every slot of the rank has been written once, and one more."""


class Ours:
    """The training loop's checkpointer."""

    def __init__(self, checkpointer: Checkpointer, target: State) -> None:
        self._checkpointer = checkpointer
        self._target = target
        self._saved: SaveHandle | None = None

    def start(self, state: State, step: int) -> None:
        self._saved = self._checkpointer.save(state, step)

    def finish(self) -> None:
        if self._saved is not None:
            self._saved.wait()  # raises when it was not saved

    def found(self) -> State:
        wipe(self._target)
        self._checkpointer.restore(self._target)
        return self._target


def run(rank: int, scene: Scene) -> list[dict[str, Any]]:
    use_threads(scene.threads)
    state = built(scene, rank=rank, world=scene.ranks)
    target = blank(state)
    mapping = WarmMapping(scene.folder / f"warm-{rank}", state)
    with contextlib.ExitStack() as undo:
        checkpointer = undo.enter_context(Checkpointer(JOB, settings=settings_for(scene), on_sigterm="ignore"))
        checkpointer.restore(state)  # as a training script begins: nothing there yet, slots are prepared meanwhile
        ours, theirs = Ours(checkpointer, target), AsyncFiles(scene.folder, rank, state)
        undo.callback(theirs.close)

        def found_by_dcp() -> State:
            wipe(target)
            return theirs.load(target)

        contenders = [
            Contender(COPY, "limit", lambda _: mapping.copy_in(), lambda: mapping.as_state(state), objects=False),
            Contender(
                OURS,
                "ours",
                lambda turn: ours.start(state, turn),
                ours.found,
                after=ours.finish,
                warm_runs=_ALL_SLOTS,
            ),
            Contender(
                ASYNC, "opponent", lambda _: theirs.start(), found_by_dcp, after=theirs.finish, before=theirs.clear
            ),
        ]
        return measure(
            those_of(scene, contenders),
            scene.rounds,
            expected=state,
            prepare=lambda turn: advance(state, turn),
            every_round=False,
            spoil=scene.spoil,
        )
