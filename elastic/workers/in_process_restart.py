"""Between two worlds in one process: health check, reset of cached state, hydration from survivors.

- DTensor remembers, per operation, the sharding of its result and with it the *mesh* it was computed for. Two meshes of
  the same ranks are equal whoever asks, so a process that was rank 3 of 4 and is rank 1 of 4 later is handed its old
  mesh, with its old coordinate: it would take itself for rank 3, and save the wrong rows under the wrong name.
- DCP keeps plans per planner class (a replaced rank has none, and its peers wait for a plan that never comes), and for
  ``async_save`` a helper process that is in a world of its own.
- A session of tieredckpt writes for one incarnation, with one world size.

Only what was imported can have kept something, so nothing is imported for it.

What a process has before its first world is most of all that Python tracks: torch's modules, some hundred thousand
objects. To look through them for garbage takes a fifth of a second or more, at the end of every world, while all
others wait. So they are set apart, and only what came later is looked through.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from elastic.control.control_plane import ControlPlane
from elastic.errors import UnhealthyProcessError, WorldChanged
from elastic.workers.store_control_plane import StoreControlPlane
from elastic.workers.world_handle import World
from tieredckpt.live.survivor_state import SurvivorState, track_step_boundaries

log = logging.getLogger(__name__)


ProcessHealthCheck = Callable[[], Any]
"""Raises where this process is not fit for another world."""


class DeviceHealthCheck:
    """The device does what it is given within ``limit_s``, and has its memory back.

    ``most_left_bytes``: so much more than after the first world may be allocated after a later one; not given: as much
    as it likes. Nothing is looked at where this process has not used a device; else it is the calling thread's.
    """

    def __init__(self, limit_s: float = 30.0, most_left_bytes: int | None = None) -> None:
        self._limit_s = limit_s
        self._most_left_bytes = most_left_bytes
        self._baseline_bytes: int | None = None

    def __call__(self) -> None:
        from tieredckpt.tensors.device import accelerator

        device = accelerator()
        if not device.is_initialized():
            return
        place = device.current()  # asked here: a new thread's is the first one, whichever this rank has
        run_within(self._limit_s, lambda: device.synchronize(place), f"the device {place}")
        if self._most_left_bytes is None:
            return
        gc.collect()
        device.empty_cache()
        left_bytes = device.memory_allocated()
        if self._baseline_bytes is None:
            self._baseline_bytes = left_bytes
        more_bytes = left_bytes - self._baseline_bytes
        if more_bytes > self._most_left_bytes:
            raise UnhealthyProcessError(
                f"{more_bytes} bytes more of the device's memory are in use than after the first world, "
                f"{self._most_left_bytes} may be: something outside the train function keeps what it made"
            )


def run_within(limit_s: float, call: Callable[[], Any], what: str) -> None:
    """:class:`UnhealthyProcessError` where ``call`` raises, or does not come back within ``limit_s``."""
    from tieredckpt.tensors.device import answered

    try:
        answered(limit_s, call)
    except TimeoutError as error:
        raise UnhealthyProcessError(f"{what} has not answered for {limit_s:g} s") from error
    except Exception as error:
        raise UnhealthyProcessError(f"{what} is broken: {error}") from error


_TENSOR = "torch.distributed.tensor."


@contextlib.contextmanager
def freeze_startup_objects() -> Iterator[None]:
    """In this block the collector looks through nothing that was there before; whoever froze more keeps it frozen.

    A cycle of such objects that nobody needs any more stays until the end. What a world has made is never one of them.
    """
    others = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not others:
            gc.unfreeze()


def reset_process_state() -> None:
    """Forget what belongs to the world that was left."""
    clear_dtensor_caches()
    planner: Any = sys.modules.get("torch.distributed.checkpoint.planner")
    if planner is not None:
        for name, value in vars(planner.SavePlanner).items():
            if name.startswith("_cached_"):
                value.clear()
    _end_helper(sys.modules.get("torch.distributed.checkpoint._async_process_executor"))
    session: Any = sys.modules.get("tieredckpt.session.session")
    if session is not None:
        session.leave_worlds()
    gc.collect()  # modules and their hooks are cycles: their memory is wanted for the next world


def drop_traceback_frames(error: BaseException) -> None:
    """Keep what an error and those before it say, also where they were raised, but nothing that was at hand there.

    A model, say, with its groups and their threads. Frames that are only cleared would still hold their functions, and
    these what they close over.
    """
    known: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in known:
            continue
        known.add(id(one))
        left += [one.__cause__, one.__context__]
        if one.__traceback__ is not None:
            traceback.clear_frames(one.__traceback__)  # somebody else may have kept it
            note = getattr(one, "add_note", None)  # not before Python 3.11
            if note is not None:
                note(
                    "".join(["It was raised here (most recent call last):\n", *traceback.format_tb(one.__traceback__)])
                )
            one.__traceback__ = None


def clear_dtensor_caches() -> None:
    """Have DTensor compute every sharding anew, with the meshes of the next world."""
    api: Any = sys.modules.get(f"{_TENSOR}_api")
    if api is None:
        return
    propagator = api.DTensor._op_dispatcher.sharding_propagator
    per_thread = propagator.propagate_op_sharding
    # One cache per thread, of which only the own one could be cleared: a new one has none for any of them.
    propagator.propagate_op_sharding = type(per_thread)(propagator.propagate_op_sharding_non_cached)
    for module, path in (
        ("_redistribute", ("_gen_transform_infos",)),
        ("_sharding_prop", ("ShardingPropagator", "_propagate_tensor_meta_cached")),
        ("_sharding_prop", ("ShardingPropagator", "_propagate_tensor_meta")),
        ("_collective_utils", ("MeshTopoInfo", "build_from_mesh")),
    ):
        _clear(sys.modules.get(_TENSOR + module), path)
    # Their keys hold the mesh weakly, their values hold it, and all its groups with their threads, for good.
    getattr(sys.modules.get(f"{_TENSOR}_redistribute"), "clear_redistribute_planner_cache", _nothing)()
    _on_every_thread(getattr(sys.modules["torch"]._C, "_clear_DTensor_sharding_propagator_cache", _nothing))


def _clear(owner: Any, path: tuple[str, ...]) -> None:
    for name in path:
        owner = getattr(owner, name, None)
    getattr(owner, "cache_clear", _nothing)()


def _nothing() -> None:
    pass


def _on_every_thread(clear: Callable[[], None]) -> None:
    """DTensor's fast path has a cache per thread: here, and where autograd runs the backward pass of a device."""
    from tieredckpt.tensors.device import accelerator

    class There(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:
            clear()
            return gradients[0]

    clear()
    device = accelerator()
    if device.is_initialized():
        with contextlib.suppress(RuntimeError):  # a device that is broken computes nothing any more
            on_device = torch.ones(1, device=device.current(), requires_grad=True)
            There.apply(on_device).backward()  # type: ignore[no-untyped-call]


def _end_helper(executor: Any) -> None:
    """``async_save`` in a process of its own: it is in a world too, and never made again once it is there."""
    helper = getattr(executor, "_CHECKPOINT_PROCESS", None)
    if helper is None:
        return
    executor._CHECKPOINT_PROCESS = None
    with contextlib.suppress(AttributeError):
        helper._save_process.kill()
        helper._save_process.join()


class SurvivorRecovery:
    """One process's, for all the worlds it is in.

    Nothing is noted where nobody could be given anything: where whoever started the process starts all of them anew
    after a fault, and where the train function makes its own groups.
    """

    def __init__(self, plane: ControlPlane, *, own_groups: bool, settle_s: float) -> None:
        self._settle_s = settle_s
        self._keeper: SurvivorState | None = None
        self._stack = contextlib.ExitStack()
        self._why_not = ""
        if isinstance(plane, StoreControlPlane):
            self._why_not = "after a fault all processes are started anew"
        elif own_groups:
            self._why_not = "the train function makes its own groups"

    def __enter__(self) -> SurvivorRecovery:
        if self._why_not:
            log.info("recovery is from what was saved: %s", self._why_not)
        else:
            self._keeper = self._stack.enter_context(track_step_boundaries())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def restore_into(self, world: World, *, silent: bool) -> None:
        """In the groups of the new world, before it trains. Another fault leaves what is kept for the next one.

        ``silent``: its collectives end without an error when they are aborted.
        """
        if self._keeper is None:
            return
        from elastic.reshard.state_checksum import name_seed, weighted_sum
        from tieredckpt.checkpointer.hydrate_from_survivors import hydrate_from_survivors

        def weigh(name: str, tensor: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...]) -> int:
            return weighted_sum(name_seed(name), tensor, shape, offsets)

        store = dist.distributed_c10d._get_default_store()
        found = hydrate_from_survivors(self._keeper, store, world.rank, world.size, weigh=weigh)
        if any(one.failed for one in found) and world.wait_broken(self._settle_s):
            raise WorldChanged("another rank was lost before it had what survivors gave")
        world.hydration = found[0] if found else None
        self._keeper.enter_world(world.epoch, silent=silent)

    def keep_state(self, *, sealed: bool) -> None:
        """The world was left; ``sealed``: with nothing that is not safe."""
        if self._keeper is None:
            return
        if sealed:
            self._keeper.end_world()
        else:
            self._keeper.retain_after_fault()
