"""A rank's injector, and the torch and checkpointer hooks that trigger it.

Nothing is hooked before the first injection is known. Forward and backward pass have torch's global hooks, the
optimizer those of every optimizer; collectives and the checkpointer's steps are wrapped where they are looked up.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic.fault_injection import fault_actions
from elastic.fault_injection.fault_actions import InjectedFault, InjectionRecord, injected_here
from elastic.fault_injection.fault_spec import FaultInjection, InjectionKind, InjectionPhase, RankLocation
from tieredckpt.checkpointer.checkpointer import Checkpointer
from tieredckpt.session.session import Session

log = logging.getLogger(__name__)


class InjectionWorld(Protocol):
    """As much of a world as is asked for here."""

    @property
    def rank(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def restarts(self) -> int: ...
    @property
    def step(self) -> int: ...


class FaultInjector:
    """Faults of ``node``: ``request_partition`` cuts it off for so many seconds; ``on_fault`` comes before each."""

    def __init__(
        self,
        plan: Iterable[FaultInjection],
        record: InjectionRecord,
        node: str,
        *,
        request_partition: Callable[[float], None],
        on_fault: Callable[[InjectedFault], None] = lambda _: None,
    ) -> None:
        self._record, self._node, self._cut, self._tell = record, node, request_partition, on_fault
        self._began = record.job_started_at()
        self._world: InjectionWorld | None = None
        self._waiting: list[FaultInjection] = []
        self._known: set[str] = set()
        self._slow: tuple[FaultInjection, int] | None = None
        """What makes steps slow, and the first step that it does not."""
        self._slowed = -1
        self.add(plan)

    def add(self, plan: Iterable[FaultInjection]) -> None:
        """Also of what is known already, or over."""
        for one in plan:
            if one.name not in self._known:
                self._known.add(one.name)
                if not self._record.is_done(one.name):
                    self._waiting = [*self._waiting, one]  # another thread may be looking through the old one

    def enter_world(self, world: InjectionWorld) -> None:
        """A world is entered; its ranks have not met."""
        self._world = world
        if world.restarts > 0:
            self.at_phase(InjectionPhase.RECOVERY)

    def attach_world(self, world: InjectionWorld) -> None:
        """A world that was entered before there was anything to inject."""
        self._world = world

    def leave_world(self) -> None:
        self._world = None

    def at_phase(self, phase: InjectionPhase) -> InjectionKind | None:
        """Have happen what is to happen here. Comes back only from what leaves the process as it is.

        ``NAN`` is for the caller, who has the numbers.
        """
        if not self._waiting and self._slow is None:
            return None
        world = self._world
        if world is None:
            return None
        self._drag(phase, world.step)
        for one in self._waiting:
            if one.effective_phase is phase and self._is_due(one, world):
                self._waiting = [other for other in self._waiting if other is not one]
                if self._claims(one, phase, world):
                    return self._carry_out(one, world)
        return None

    def has_pending(self, phase: InjectionPhase) -> bool:
        """Whether anything is still to happen in such a phase."""
        return any(one.effective_phase is phase for one in self._waiting)

    def _is_due(self, one: FaultInjection, world: InjectionWorld) -> bool:
        if not one.matches(RankLocation(world.rank, self._node, world.local_rank)):
            return False
        if one.step is not None and world.step < one.step:
            return False
        if one.after_s is not None and time.time() < self._began + one.after_s:
            return False
        return one.then is None or self._record.is_done(one.then)

    def _claims(self, one: FaultInjection, phase: InjectionPhase, world: InjectionWorld) -> bool:
        place = RankLocation(world.rank, self._node, world.local_rank)
        happens = injected_here(one, place, phase=phase, step=world.step, epoch=world.epoch)
        if not self._record.claim(happens):
            return False
        log.warning("injected at step %d, rank %d: %s", world.step, world.rank, one)
        self._tell(happens)
        return True

    def _carry_out(self, one: FaultInjection, world: InjectionWorld) -> InjectionKind | None:
        if one.kind is InjectionKind.SLOW:
            self._slow = one, world.step + one.step_count
        elif one.kind is InjectionKind.PARTITION:
            self._cut(one.duration_s)
        elif one.kind is not InjectionKind.NAN:
            fault_actions.RANK_ACTIONS[one.kind]()
        return one.kind

    def _drag(self, phase: InjectionPhase, step: int) -> None:
        if self._slow is None or phase is not InjectionPhase.FORWARD:
            return
        one, end = self._slow
        if step >= end:
            self._slow = None
        elif step != self._slowed:
            self._slowed = step
            time.sleep(one.duration_s)


_COLLECTIVES = ("all_reduce", "all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor")
_NAN = float("nan")


@contextmanager
def fault_hooks(injector: FaultInjector) -> Iterator[None]:
    """While the block runs, ``injector`` is told of every phase."""
    with ExitStack() as undo:
        for handle in (
            register_module_forward_pre_hook(functools.partial(_before_forward, injector)),
            register_module_forward_hook(functools.partial(_after_forward, injector)),
            register_optimizer_step_pre_hook(lambda *_: _nothing(injector.at_phase(InjectionPhase.OPTIMIZER))),
        ):
            undo.callback(handle.remove)
        for name in _COLLECTIVES:
            undo.enter_context(_wrapped(dist, name, functools.partial(_collective, injector)))
        undo.enter_context(_wrapped(Checkpointer, "save", _told_before(injector, InjectionPhase.SAVE)))
        undo.enter_context(_wrapped(Checkpointer, "restore", _told_before(injector, InjectionPhase.RESTORE)))
        undo.enter_context(_wrapped(Session, "seal", functools.partial(_seal, injector)))
        yield


def _nothing(_kind: InjectionKind | None) -> None:
    """Torch takes what a hook answers for new arguments."""


def _before_forward(injector: FaultInjector, _module: Any, inputs: tuple[Any, ...]) -> Any:
    if injector.at_phase(InjectionPhase.FORWARD) is InjectionKind.NAN:
        return tuple(_spoilt(value) for value in inputs)
    return None


def _spoilt(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value * _NAN
    return value


def _after_forward(injector: FaultInjector, _module: Any, _inputs: Any, output: Any) -> None:
    """The gradient of what a module computed comes by in the backward pass."""
    if not injector.has_pending(InjectionPhase.BACKWARD):
        return
    every = output if isinstance(output, tuple | list) else (output,)
    one = next((one for one in every if isinstance(one, torch.Tensor) and one.requires_grad), None)
    if one is not None:
        one.register_hook(
            lambda gradient: _spoilt(gradient) if _reaches_nan(injector, InjectionPhase.BACKWARD) else None
        )


def _reaches_nan(injector: FaultInjector, phase: InjectionPhase) -> bool:
    return injector.at_phase(phase) is InjectionKind.NAN


def _collective(injector: FaultInjector, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    if _reaches_nan(injector, InjectionPhase.ALLREDUCE):
        values = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
        if values.is_floating_point():
            values.fill_(_NAN)
    return call(*args, **options)


def _told_before(injector: FaultInjector, phase: InjectionPhase) -> Callable[..., Any]:
    def through(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        injector.at_phase(phase)
        return call(*args, **options)

    return through


def _seal(injector: FaultInjector, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    injector.at_phase(InjectionPhase.SEAL)
    sealed = call(*args, **options)
    injector.at_phase(InjectionPhase.REPLICATE)
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
