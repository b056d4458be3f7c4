"""What a process must not carry from one world into the next.

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
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

_TENSOR = "torch.distributed.tensor."


@contextlib.contextmanager
def only_what_worlds_made() -> Iterator[None]:
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


def forget_world() -> None:
    """Forget what belongs to the world that was left."""
    forget_meshes()
    planner: Any = sys.modules.get("torch.distributed.checkpoint.planner")
    if planner is not None:
        for name, value in vars(planner.SavePlanner).items():
            if name.startswith("_cached_"):
                value.clear()
    _end_helper(sys.modules.get("torch.distributed.checkpoint._async_process_executor"))
    session: Any = sys.modules.get("tieredckpt.session")
    if session is not None:
        session.forget_worlds()
    gc.collect()  # modules and their hooks are cycles: their memory is wanted for the next world


def forget_frames(error: BaseException) -> None:
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


def forget_meshes() -> None:
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
    import torch

    from tieredckpt.device import accelerator

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
    if device.in_use():
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
