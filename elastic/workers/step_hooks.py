"""StepHooks: the steps of a world for a training loop that a framework owns.

::

    hooks = elastic.StepHooks(world, ckpt, state)
    while hooks.begin(step):           # False: all ranks stop here, and the step before is sealed
        train_one_step()
        ckpt.save(state, step)
        hooks.end(step)
        step += 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic.errors import PolicyError, StepOrderError, WorldChanged
from elastic.workers.world_handle import SealFunction, World
from tieredckpt.checkpointer.checkpointer import Checkpointer
from tieredckpt.checkpointer.null_checkpointer import NullCheckpointer

State = dict[str, Any]


class StepHooks:
    """:meth:`World.steps <elastic.World.steps>` as two calls, for callbacks before and after a step."""

    def __init__(
        self,
        world: World,
        checkpointer: Checkpointer | NullCheckpointer | None = None,
        state: State | Callable[[], State] | None = None,
        *,
        seal: SealFunction | None = None,
    ) -> None:
        """Seal a stop with ``checkpointer`` and ``state``, or with ``seal(step)``.

        ``state`` is the state that ``checkpointer`` saves, or a function that returns it; pass both or neither. Saves
        between stops are up to the caller. Raises :class:`~elastic.errors.PolicyError` for any other combination.
        """
        if (checkpointer is None) != (state is None) or (checkpointer is not None and seal is not None):
            raise PolicyError("StepHooks takes checkpointer and state together, or seal, or none of them")
        self._world = world
        self._checkpoint = None if checkpointer is None or state is None else (checkpointer, state)
        self._seal = seal if self._checkpoint is None else world.sealing(*self._checkpoint)
        self._next: int | None = None
        """Step that may begin; ``None`` before the first."""
        self._is_running = False
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """Whether all ranks have stopped after a sealed step, so that the loop has to end."""
        return self._is_stopped

    def begin(self, step: int) -> bool:
        """Return whether to do ``step``.

        All ranks get False at the same step: return from the train function then.

        Raises :class:`~elastic.errors.WorldChanged`, which is not an ``Exception``, if the world is broken or the stop
        could not be sealed. Raises :class:`~elastic.errors.StepOrderError` if ``step`` does not follow the last one.
        """
        if self._is_stopped:
            return False
        if self._is_running:
            raise StepOrderError(f"begin({step}): step {self._next} has begun and not ended")
        if self._next is None:
            self._next = self._world.completed = step
        elif step != self._next:
            raise StepOrderError(f"begin({step}): the next step is {self._next}")
        try:
            self._is_running = self._world.begin_step(None, self._seal)
        except WorldChanged:
            if not self._world.is_sealed:
                raise
            self._is_stopped = True
        return self._is_running

    def end(self, step: int) -> None:
        """Complete ``step``; raises :class:`~elastic.errors.StepOrderError` if it has not begun."""
        if not self._is_running or step != self._next:
            running = f"step {self._next}" if self._is_running else "no step"
            raise StepOrderError(f"end({step}): {running} has begun")
        self._is_running = False
        self._next = step + 1
        self._world.end_step(self._checkpoint)
