"""Enter a world, train in it, leave it, and enter the next one: in the same process, until the work is done."""

from __future__ import annotations

import enum
import functools
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, Literal, TypeVar, overload

from torch.distributed.checkpoint.api import CheckpointException

from elastic.control.plane import Assignment, ControlPlane, Dismissed, Notice, Want
from elastic.errors import ElasticError, GaveUpError, WorldChanged
from elastic.workers.blame import may_be_a_consequence
from elastic.workers.forgetting import forget_world
from elastic.workers.gate import Gate
from elastic.workers.groups import Groups, NoGroups, address_of, groups_of
from elastic.workers.hydrating import Hydrating
from elastic.workers.watching import Watch, signals_to, usual_wishes
from elastic.workers.world import World
from tieredckpt.preemption import left_to_others

log = logging.getLogger(__name__)

T = TypeVar("T")
Train = Callable[[World], T]


class End(enum.Enum):
    """How a rank's part in a job ended."""

    FINISHED = "finished"
    STOPPED = "stopped"
    """The job stopped at a sealed step, to be resumed another time."""
    DISMISSED = "dismissed"
    """The job goes on without this process."""


@dataclass(frozen=True)
class Ended(Generic[T]):
    """What became of this rank. A process that gets one of these ends with status 0."""

    how: End
    value: T | None = None
    """What the train function returned, when it finished."""
    steps: int = 0
    """Steps completed."""
    worlds: int = 0
    """In how many worlds this process was."""

    def __str__(self) -> str:
        if self.how is End.STOPPED:
            return f"stopped after step {self.steps - 1}; start it again to go on with step {self.steps}"
        return f"{self.how.value} after {self.worlds} world{'s' if self.worlds != 1 else ''}"


@dataclass(frozen=True)
class Policy:
    """How a rank takes part."""

    backend: str | None = None
    """Of the default process group; ``None``: NCCL for CUDA tensors where there is a GPU, gloo for the others;
    ``"none"``: the train function makes its groups, and leaves none behind."""
    timeout: timedelta | None = None
    """Of its collectives; ``None``: torch's own."""
    on_error: Literal["again", "raise"] = "again"
    """After an exception of the train function: take part in the next world (who runs the job counts, and gives up in
    the end), or report it and end."""
    settle_s: float = 10.0
    """How long an error that could come of the loss of another rank waits for word of one."""
    grace_s: float = 25.0
    """What SIGTERM leaves."""


@overload
def recoverable(train: Train[T]) -> Callable[[], Ended[T]]: ...
@overload
def recoverable(
    *, plane: ControlPlane | None = None, policy: Policy | None = None
) -> Callable[[Train[T]], Callable[[], Ended[T]]]: ...


def recoverable(
    train: Train[T] | None = None, *, plane: ControlPlane | None = None, policy: Policy | None = None
) -> Any:
    """The decorated function runs as :func:`run` runs it: called without arguments, it is entered with every world."""

    def decorate(inner: Train[T]) -> Callable[[], Ended[T]]:
        @functools.wraps(inner)
        def call() -> Ended[T]:
            return run(inner, plane=plane, policy=policy)

        return call

    return decorate if train is None else decorate(train)


def run(train: Train[T], *, plane: ControlPlane | None = None, policy: Policy | None = None) -> Ended[T]:
    """Call ``train`` with every world this process has a place in, until it returns.

    ``plane`` is who runs the job; by default the one that started this process: ``elastic run``, ``torchrun``, or
    nobody. Faults of other ranks, resizes and (``policy.on_error``) its own exceptions end one call of ``train`` and
    begin the next; what the process has imported, compiled and cached stays. Raises
    :class:`~elastic.errors.GaveUpError` when there is no further world, from the last exception of ``train``.
    """
    if plane is None:
        from elastic.workers.launched import launched_plane

        plane = launched_plane()
    try:
        policy = policy or Policy()
        own_groups = policy.backend == "none"
        with left_to_others(), Hydrating(plane, own_groups=own_groups, settle_s=policy.settle_s) as hydrating:
            return _Rank(train, plane, policy, hydrating).run()
    finally:
        plane.close()


class _Rank(Generic[T]):
    """One process's way through the worlds."""

    def __init__(self, train: Train[T], plane: ControlPlane, policy: Policy, hydrating: Hydrating) -> None:
        self._train = train
        self._hydrating = hydrating
        self._plane = plane
        self._policy = policy
        self._groups: Groups | NoGroups | None = None
        self._worlds = 0
        self._steps = 0
        self._last_error: BaseException | None = None
        self._finished: list[T] = []
        """What the train function returned, once it has and that was heard."""

    def run(self) -> Ended[T]:
        watch = Watch(self._plane, self._abort)
        try:
            with signals_to(watch, usual_wishes(self._policy.grace_s)):
                while True:
                    try:
                        place = self._plane.ready()
                    except Dismissed:
                        return self._ended(End.DISMISSED)
                    except GaveUpError as error:
                        raise error from self._last_error
                    world = self._one_world(watch, place)
                    if self._finished:
                        return self._ended(End.FINISHED)
                    if world.ended is not None and world.ended.want is Want.STOP and world.is_sealed:
                        return self._ended(End.STOPPED)
        finally:
            watch.close()

    def _ended(self, how: End) -> Ended[T]:
        return Ended(how, self._finished[0] if self._finished else None, self._steps, self._worlds)

    def _abort(self, notice: Notice) -> None:
        groups = self._groups
        if groups is not None:
            log.warning("epoch %d is broken: %s", notice.epoch, notice.reason)
            groups.abort()

    def _one_world(self, watch: Watch, place: Assignment) -> World:
        gate = Gate(self._plane, place.epoch)
        world = World(place, self._plane, gate)
        self._groups = groups = groups_of(place, self._policy.backend, self._policy.timeout)
        well = False
        watch.follow(gate)
        try:
            with _environment(place), _current(world):
                groups.enter()
                self._worlds += 1
                self._hydrating.enter(world)
                value = self._train(world)
            well = True
            self._returned(world, value)
        except WorldChanged as change:
            well = world.ended is not None
            log.info("epoch %d has ended: %s", place.epoch, change)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - a user's callback; torch derives the latter from BaseException
            well = self._failed(world, gate, error)
            traceback.clear_frames(error.__traceback__)  # else what they hold, a model say, stays beside the next one
        finally:
            self._steps = max(self._steps, world.completed)
            self._hydrating.leave(sealed=bool(self._finished) or world.is_sealed)
            watch.follow(None)
            gate.close()
            groups.leave(broken=not well)
            forget_world(fault=not well)
        return world

    def _returned(self, world: World, value: T) -> None:
        """The train function came back by itself: it has finished, or it saw that the world is to end."""
        if world.ended is not None:
            world.say_sealed()
            return
        try:
            self._plane.finished()
        except ElasticError as error:  # another rank was lost on its last steps: they are done again
            log.warning("it was not heard that this rank has finished: %s", error)
            return
        self._finished.append(value)

    def _failed(self, world: World, gate: Gate, error: BaseException) -> bool:
        """Whether the world ended well all the same."""
        if world.ended is not None:
            log.warning("on the way out of epoch %d: %s: %s", world.epoch, type(error).__name__, error)
            return True
        patience_s = self._policy.settle_s if may_be_a_consequence(error) else 0.0
        if gate.wait_broken(patience_s):
            log.info("epoch %d is broken (%s): %s", world.epoch, gate.why_broken, error)
            return False
        self._last_error = error
        log.error("epoch %d, rank %d: the train function failed", world.epoch, world.rank, exc_info=error)
        try:
            self._plane.fault(f"{type(error).__name__}: {error}")
        except ElasticError as unheard:
            log.warning("the fault was not heard: %s", unheard)
        if self._policy.on_error == "raise":
            raise error
        return False


@contextmanager
def _environment(place: Assignment) -> Iterator[None]:
    """What every launcher tells its processes; as long as this world lasts."""
    host, port = address_of(place.store)
    values = {
        "RANK": place.rank,
        "WORLD_SIZE": place.world_size,
        "LOCAL_RANK": place.local_rank,
        "LOCAL_WORLD_SIZE": place.local_world_size,
        "GROUP_RANK": place.node_rank,
        "GROUP_WORLD_SIZE": place.node_count,
        "ROLE_RANK": place.rank,
        "ROLE_WORLD_SIZE": place.world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": place.restarts,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_worlds: list[World] = []


@contextmanager
def _current(world: World) -> Iterator[None]:
    _worlds.append(world)
    try:
        yield
    finally:
        _worlds.remove(world)


def current_world() -> World | None:
    """The world that this process trains in now."""
    return _worlds[-1] if _worlds else None
