"""Change of worlds in one process: health check, reset of cached state, hydration from survivors.

- DTensor caches, per operation, the sharding of its result and the *mesh* of that sharding. Two meshes of the same
  ranks compare equal on every rank. A process that was rank 3 of 4 and is now rank 1 of 4 would receive its old mesh
  with its old coordinate. It would act as rank 3 and save the wrong rows under the wrong name.
- DCP caches plans per planner class. A replacement rank has none, and its peers would wait for a plan that never
  arrives. For ``async_save``, DCP also runs a helper process with its own world.
- A tieredckpt session writes for one incarnation, with one world size.

Only imported modules can hold such state, so this module imports none of them.

Most objects that Python tracks exist before the first world: torch's modules, some hundred thousand objects. A garbage
collection that scans them takes 0.2 s or more at the end of every world, while all other ranks wait. So they are
frozen, and the collector scans only later objects.
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
from elastic.workers.world_handle import World
from tieredckpt.live.survivor_state import SurvivorState, track_step_boundaries
from tieredckpt.session.session import leave_worlds

log = logging.getLogger(__name__)


ProcessHealthCheck = Callable[[], Any]
"""Callable that raises if this process is not fit for another world."""


class DeviceHealthCheck:
    """Health check of the device: it completes its work within ``limit_s`` seconds and frees its memory.

    ``most_left_bytes`` limits how much more memory may be allocated after a later world than after the first one;
    ``None``: no limit. The check does nothing if this process has not used a device. It checks the current device of
    the calling thread.
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
        place = device.current()  # read it in this thread: in a new thread the current device is the first one
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
                f"{more_bytes} bytes more of the device's memory are in use than after the first world, and the limit "
                f"is {self._most_left_bytes}. An object outside the train function refers to its tensors"
            )


def run_within(limit_s: float, call: Callable[[], Any], what: str) -> None:
    """Raise :class:`UnhealthyProcessError` if ``call`` raises, or takes more than ``limit_s`` seconds."""
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
    """Exempt all objects that exist now from garbage collection, within this block.

    Objects that the caller froze before stay frozen. Unreachable cycles among the frozen objects live until the block
    ends. Objects of a world are never among them.
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
    """Drop all cached state of the world that this process has left."""
    clear_dtensor_caches()
    planner: Any = sys.modules.get("torch.distributed.checkpoint.planner")
    if planner is not None:
        for name, value in vars(planner.SavePlanner).items():
            if name.startswith("_cached_"):
                value.clear()
    _kill_helper(sys.modules.get("torch.distributed.checkpoint._async_process_executor"))
    leave_worlds()
    gc.collect()  # modules and their hooks form cycles, and the next world needs their memory


def drop_traceback_frames(error: BaseException) -> None:
    """Drop the tracebacks of ``error`` and of its causes, after adding their text as notes.

    The frames hold objects such as a model, with its groups and their threads. Clearing the frames is not enough: they
    still hold their functions, and those hold their closures.
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
            traceback.clear_frames(one.__traceback__)  # another object may hold it
            note = getattr(one, "add_note", None)  # not before Python 3.11
            if note is not None:
                note(
                    "".join(["It was raised here (most recent call last):\n", *traceback.format_tb(one.__traceback__)])
                )
            one.__traceback__ = None


def clear_dtensor_caches() -> None:
    """Clear DTensor's sharding caches, so that they are computed with the meshes of the next world."""
    api: Any = sys.modules.get(f"{_TENSOR}_api")
    if api is None:
        return
    propagator = api.DTensor._op_dispatcher.sharding_propagator
    per_thread = propagator.propagate_op_sharding
    # The cache is per thread, and only the cache of this thread could be cleared. A new cache is empty in all threads.
    propagator.propagate_op_sharding = type(per_thread)(propagator.propagate_op_sharding_non_cached)
    for module, path in (
        ("_redistribute", ("_gen_transform_infos",)),
        ("_sharding_prop", ("ShardingPropagator", "_propagate_tensor_meta_cached")),
        ("_sharding_prop", ("ShardingPropagator", "_propagate_tensor_meta")),
        ("_collective_utils", ("MeshTopoInfo", "build_from_mesh")),
    ):
        _clear(sys.modules.get(_TENSOR + module), path)
    # Their keys hold the mesh weakly, but their values hold it, with its groups and their threads, forever.
    getattr(sys.modules.get(f"{_TENSOR}_redistribute"), "clear_redistribute_planner_cache", _do_nothing)()
    _clear_in_all_threads(getattr(sys.modules["torch"]._C, "_clear_DTensor_sharding_propagator_cache", _do_nothing))


def _clear(owner: Any, path: tuple[str, ...]) -> None:
    for name in path:
        owner = getattr(owner, name, None)
    getattr(owner, "cache_clear", _do_nothing)()


def _do_nothing() -> None:
    pass


def _clear_in_all_threads(clear: Callable[[], None]) -> None:
    """Call ``clear`` in this thread and in autograd's backward thread.

    DTensor's fast path has a cache per thread.
    """
    from tieredckpt.tensors.device import accelerator

    class ClearInBackward(torch.autograd.Function):
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
        with contextlib.suppress(RuntimeError):  # a broken device does not compute
            on_device = torch.ones(1, device=device.current(), requires_grad=True)
            ClearInBackward.apply(on_device).backward()  # type: ignore[no-untyped-call]


def _kill_helper(executor: Any) -> None:
    """Kill the ``async_save`` helper process.

    It belongs to the old world, and DCP never replaces an existing one.
    """
    helper = getattr(executor, "_CHECKPOINT_PROCESS", None)
    if helper is None:
        return
    executor._CHECKPOINT_PROCESS = None
    with contextlib.suppress(AttributeError):
        helper._save_process.kill()
        helper._save_process.join()


class SurvivorRecovery:
    """Recovery of one process from survivors, over all its worlds.

    It is off if the launcher restarts all processes after a fault, or if the train function makes its own groups.
    """

    def __init__(self, plane: ControlPlane, *, own_groups: bool, settle_s: float) -> None:
        self._settle_s = settle_s
        self._survivor_state: SurvivorState | None = None
        self._stack = contextlib.ExitStack()
        self._disabled_reason = ""
        if plane.restarts_processes:
            self._disabled_reason = "after a fault all processes are started anew"
        elif own_groups:
            self._disabled_reason = "the train function makes its own groups"

    def __enter__(self) -> SurvivorRecovery:
        if self._disabled_reason:
            log.info("ranks recover from saved checkpoints only: %s", self._disabled_reason)
        else:
            self._survivor_state = self._stack.enter_context(track_step_boundaries())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def restore_into(self, world: World, *, silent: bool) -> None:
        """Restore the survivors' state in the groups of the new world, before it trains.

        Retains the recorded state if another fault interrupts it. ``silent``: collectives end without an error when
        they are aborted.
        """
        if self._survivor_state is None:
            return
        from tieredckpt.checkpointer.hydrate_from_survivors import hydrate_from_survivors

        store = dist.distributed_c10d._get_default_store()
        found = hydrate_from_survivors(self._survivor_state, store, world.rank, world.size)
        if any(one.failed for one in found) and world.wait_broken(self._settle_s):
            raise WorldChanged("another rank was lost before it had what survivors gave")
        world.hydration = found[0] if found else None
        self._survivor_state.enter_world(world.epoch, silent=silent)

    def keep_state(self, *, sealed: bool) -> None:
        """Retain this rank's state after it left a world. ``sealed``: the whole state is sealed."""
        if self._survivor_state is None:
            return
        if sealed:
            self._survivor_state.end_world()
        else:
            self._survivor_state.retain_after_fault()
