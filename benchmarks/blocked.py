"""P1: time a save blocks the trainer."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch

from benchmarks.limits import WarmMapping
from benchmarks.opponents import AsyncFiles
from benchmarks.parameters import Scene
from benchmarks.rounds import COPY, Contender, built, measure, those_of, use_threads
from benchmarks.sandbox import JOB, settings_for
from benchmarks.states import State, advance, blank, tensors, wipe
from tieredckpt import Checkpointer
from tieredckpt.checkpointer.save_handle import SaveHandle
from tieredckpt.settings import override_settings

OURS, ASYNC = "Checkpointer.save", "dcp.async_save, DefaultStager kept"
OVERLAPPED = "Checkpointer.save, overlapped"
STEP, STEP_WITH_SAVE = "a step alone", "a step that begins with a save"
_ALL_SLOTS = 4
"""Saves that write every slot of the rank once, plus one."""


_STEP_R = 10
"""Duration of a step, in copies of the state."""


class Ours:
    """A ``Checkpointer`` as a contender: start a save, wait for it, restore its result."""

    def __init__(self, checkpointer: Checkpointer, target: State) -> None:
        self._checkpointer = checkpointer
        self._target = target
        self._saved: SaveHandle | None = None

    def start(self, state: State, step: int) -> None:
        self._saved = self._checkpointer.save(state, step)

    def finish(self) -> None:
        if self._saved is not None:
            self._saved.wait()  # raises if the save failed

    def found(self) -> State:
        wipe(self._target)
        self._checkpointer.restore(self._target)
        return self._target


class Step:
    """Matrix products instead of a forward and backward pass, then a step of the state's optimizer.

    The optimizer has no gradients, so it changes nothing; a save cannot know that.
    """

    def __init__(self, state: State, seconds: float) -> None:
        owned = [one for one in tensors(state).values() if one.is_floating_point()]
        self._optimizer = torch.optim.SGD(owned, lr=0.1)
        self._matrix = torch.rand(512, 512)
        torch.mm(self._matrix, self._matrix)
        began = time.perf_counter()
        for _ in range(5):
            torch.mm(self._matrix, self._matrix)
        self._count = max(1, round(5 * seconds / (time.perf_counter() - began)))

    def end(self) -> None:
        self._optimizer.step()

    def run(self) -> None:
        for _ in range(self._count):
            torch.mm(self._matrix, self._matrix)
        self.end()


def run(rank: int, scene: Scene) -> list[dict[str, Any]]:
    use_threads(scene.threads)
    state = built(scene, rank=rank, world=scene.ranks)
    target = blank(state)
    mapping = WarmMapping(scene.folder / f"warm-{rank}", state)
    with contextlib.ExitStack() as undo:
        settings = settings_for(scene)
        checkpointer = undo.enter_context(Checkpointer(JOB, settings=settings, on_sigterm="ignore"))
        checkpointer.restore(state)  # as a training script does; finds no step and prepares slots in the background
        blocking = override_settings(settings, memory={"staging": "blocking"})
        ours = Ours(undo.enter_context(Checkpointer(JOB, settings=blocking, on_sigterm="ignore")), target)
        overlapped, theirs = Ours(checkpointer, target), AsyncFiles(scene.folder, rank, state)
        undo.callback(theirs.close)

        mapping.copy_in()
        began = time.perf_counter()
        mapping.copy_in()
        step = Step(state, _STEP_R * (time.perf_counter() - began))

        def step_with_save(turn: int) -> None:
            overlapped.start(state, turn)
            step.run()

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
                note="memory.staging=blocking",
            ),
            Contender(
                OVERLAPPED,
                "ours",
                lambda turn: overlapped.start(state, turn),
                overlapped.found,
                after=overlapped.finish,
                before=step.end,
                warm_runs=_ALL_SLOTS,
                note="parameters and moments are copied after it returned",
            ),
            Contender(
                STEP, "limit", lambda _: step.run(), None, note="matrix products for 10 R, then an optimizer's step"
            ),
            Contender(
                STEP_WITH_SAVE, "ours", step_with_save, overlapped.found, after=overlapped.finish, before=step.end
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
