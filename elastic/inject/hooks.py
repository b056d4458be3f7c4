"""Where training comes by: hooks into torch and the checkpointer, there while something is to be injected.

Nothing is hooked before the first injection is known. Forward and backward pass have torch's global hooks, the
optimizer those of every optimizer; collectives and the checkpointer's steps are wrapped where they are looked up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic.inject.injector import Injector
from elastic.inject.plan import Kind, Phase
from tieredckpt.checkpointer import Checkpointer
from tieredckpt.session import Session

_COLLECTIVES = ("all_reduce", "all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor")
_NAN = float("nan")


@contextmanager
def hooked(injector: Injector) -> Iterator[None]:
    """While the block runs, ``injector`` is told of every phase."""
    with ExitStack() as undo:
        for handle in (
            register_module_forward_pre_hook(functools.partial(_before_forward, injector)),
            register_module_forward_hook(functools.partial(_after_forward, injector)),
            register_optimizer_step_pre_hook(lambda *_: _nothing(injector.reach(Phase.OPTIMIZER))),
        ):
            undo.callback(handle.remove)
        for name in _COLLECTIVES:
            undo.enter_context(_wrapped(dist, name, functools.partial(_collective, injector)))
        undo.enter_context(_wrapped(Checkpointer, "save", _told_before(injector, Phase.SAVE)))
        undo.enter_context(_wrapped(Checkpointer, "restore", _told_before(injector, Phase.RESTORE)))
        undo.enter_context(_wrapped(Session, "seal", functools.partial(_seal, injector)))
        yield


def _nothing(_kind: Kind | None) -> None:
    """Torch takes what a hook answers for new arguments."""


def _before_forward(injector: Injector, _module: Any, inputs: tuple[Any, ...]) -> Any:
    if injector.reach(Phase.FORWARD) is Kind.NAN:
        return tuple(_spoilt(value) for value in inputs)
    return None


def _spoilt(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value * _NAN
    return value


def _after_forward(injector: Injector, _module: Any, _inputs: Any, output: Any) -> None:
    """The gradient of what a module computed comes by in the backward pass."""
    if not injector.expects(Phase.BACKWARD):
        return
    every = output if isinstance(output, tuple | list) else (output,)
    one = next((one for one in every if isinstance(one, torch.Tensor) and one.requires_grad), None)
    if one is not None:
        one.register_hook(lambda gradient: _spoilt(gradient) if _reaches_nan(injector, Phase.BACKWARD) else None)


def _reaches_nan(injector: Injector, phase: Phase) -> bool:
    return injector.reach(phase) is Kind.NAN


def _collective(injector: Injector, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    if _reaches_nan(injector, Phase.ALLREDUCE):
        values = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
        if values.is_floating_point():
            values.fill_(_NAN)
    return call(*args, **options)


def _told_before(injector: Injector, phase: Phase) -> Callable[..., Any]:
    def through(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        injector.reach(phase)
        return call(*args, **options)

    return through


def _seal(injector: Injector, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    injector.reach(Phase.SEAL)
    sealed = call(*args, **options)
    injector.reach(Phase.REPLICATE)
    return sealed


@contextmanager
def _wrapped(owner: Any, name: str, through: Callable[..., Any]) -> Iterator[None]:
    """``owner.name`` goes by ``through``, which is given what was there before."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def call(*args: Any, **options: Any) -> Any:
        return through(before, *args, **options)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, before)
