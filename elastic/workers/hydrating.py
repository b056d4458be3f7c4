"""Between two worlds: what survivors of a fault still have is given to the next world before it trains."""

from __future__ import annotations

import contextlib
import logging
from types import TracebackType

import torch
import torch.distributed as dist

from elastic.control.plane import ControlPlane
from elastic.errors import WorldChanged
from elastic.workers.store_plane import StorePlane
from elastic.workers.world import World
from tieredckpt.live.keeping import Keeper, watching

log = logging.getLogger(__name__)


class Hydrating:
    """One process's, for all the worlds it is in.

    Nothing is noted where nobody could be given anything: where whoever started the process starts all of them anew
    after a fault, and where the train function makes its own groups.
    """

    def __init__(self, plane: ControlPlane, *, own_groups: bool, settle_s: float) -> None:
        self._settle_s = settle_s
        self._keeper: Keeper | None = None
        self._stack = contextlib.ExitStack()
        self._why_not = ""
        if isinstance(plane, StorePlane):
            self._why_not = "after a fault all processes are started anew"
        elif own_groups:
            self._why_not = "the train function makes its own groups"

    def __enter__(self) -> Hydrating:
        if self._why_not:
            log.info("recovery is from what was saved: %s", self._why_not)
        else:
            self._keeper = self._stack.enter_context(watching())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def enter(self, world: World, *, silent: bool) -> None:
        """In the groups of the new world, before it trains. Another fault leaves what is kept for the next one.

        ``silent``: its collectives end without an error when they are aborted.
        """
        if self._keeper is None:
            return
        from elastic.reshard.weights import seed_of, weighted_sum
        from tieredckpt.live.giving import hydrate

        def weigh(name: str, tensor: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
            return weighted_sum(seed_of(name), tensor, shape, offsets)

        store = dist.distributed_c10d._get_default_store()
        found = hydrate(self._keeper, store, world.rank, world.size, weigh=weigh)
        if any(one.failed for one in found) and world.is_broken(self._settle_s):
            raise WorldChanged("another rank was lost before it had what survivors gave")
        world.hydration = found[0] if found else None
        self._keeper.enter(world.epoch, silent=silent)

    def leave(self, *, sealed: bool) -> None:
        """The world was left; ``sealed``: with nothing that is not safe."""
        if self._keeper is None:
            return
        if sealed:
            self._keeper.end()
        else:
            self._keeper.hold()
