"""A rank's injector, and the torch and checkpointer hooks that trigger it.

No hook exists before the first injection is known. Forward and backward passes and optimizers use torch's global hooks.
Collectives and the checkpointer's methods are replaced by wrappers.
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
    """The part of a world that the injector needs."""

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
    """Executes the faults of one rank on ``node``.

    ``request_partition`` cuts the node off for a number of seconds. ``on_fault`` is called before each fault.
    """

    def __init__(
        self,
        plan: Iterable[FaultInjection],
        record: InjectionRecord,
        node: str,
        *,
        request_partition: Callable[[float], None],
        on_fault: Callable[[InjectedFault], None] = lambda _: None,
    ) -> None:
        self._record, self._node, self._request_partition, self._on_fault = record, node, request_partition, on_fault
        self._started_at = record.job_started_at()
        self._world: InjectionWorld | None = None
        self._pending: list[FaultInjection] = []
        self._known: set[str] = set()
        self._slow: tuple[FaultInjection, int] | None = None
        """Injection that slows steps, and the first step after it."""
        self._slowed_step = -1
        self.add(plan)

    def add(self, plan: Iterable[FaultInjection]) -> None:
        """Add injections. Known and completed ones are skipped."""
        for injection in plan:
            if injection.name not in self._known:
                self._known.add(injection.name)
                if not self._record.is_done(injection.name):
                    self._pending = [*self._pending, injection]  # another thread may iterate over the old list

    def enter_world(self, world: InjectionWorld) -> None:
        """Enter a world whose ranks have not met; run the recovery phase if it follows a restart."""
        self._world = world
        if world.restarts > 0:
            self.at_phase(InjectionPhase.RECOVERY)

    def attach_world(self, world: InjectionWorld) -> None:
        """Set the world if it was entered before the first injection was known."""
        self._world = world

    def leave_world(self) -> None:
        self._world = None

    def at_phase(self, phase: InjectionPhase) -> InjectionKind | None:
        """Execute the injection that is due in ``phase``; return its kind, or ``None`` if none is due.

        Does not return if the fault ends or blocks the process. The caller executes ``NAN``, as it has the tensors.
        """
        if not self._pending and self._slow is None:
            return None
        world = self._world
        if world is None:
            return None
        self._slow_down(phase, world.step)
        for injection in self._pending:
            if injection.effective_phase is phase and self._is_due(injection, world):
                self._pending = [other for other in self._pending if other is not injection]
                if self._claim(injection, phase, world):
                    return self._execute(injection, world)
        return None

    def has_pending(self, phase: InjectionPhase) -> bool:
        """Return whether an injection is pending for ``phase``."""
        return any(injection.effective_phase is phase for injection in self._pending)

    def _is_due(self, injection: FaultInjection, world: InjectionWorld) -> bool:
        if not injection.matches(RankLocation(world.rank, self._node, world.local_rank)):
            return False
        if injection.step is not None and world.step < injection.step:
            return False
        if injection.after_s is not None and time.time() < self._started_at + injection.after_s:
            return False
        return injection.then is None or self._record.is_done(injection.then)

    def _claim(self, injection: FaultInjection, phase: InjectionPhase, world: InjectionWorld) -> bool:
        place = RankLocation(world.rank, self._node, world.local_rank)
        fault = injected_here(injection, place, phase=phase, step=world.step, epoch=world.epoch)
        if not self._record.claim(fault):
            return False
        log.warning("injected at step %d, rank %d: %s", world.step, world.rank, injection)
        self._on_fault(fault)
        return True

    def _execute(self, injection: FaultInjection, world: InjectionWorld) -> InjectionKind | None:
        if injection.kind is InjectionKind.SLOW:
            self._slow = injection, world.step + injection.step_count
        elif injection.kind is InjectionKind.PARTITION:
            self._request_partition(injection.duration_s)
        elif injection.kind is not InjectionKind.NAN:
            fault_actions.RANK_ACTIONS[injection.kind]()
        return injection.kind

    def _slow_down(self, phase: InjectionPhase, step: int) -> None:
        if self._slow is None or phase is not InjectionPhase.FORWARD:
            return
        injection, end = self._slow
        if step >= end:
            self._slow = None
        elif step != self._slowed_step:
            self._slowed_step = step
            time.sleep(injection.duration_s)


_COLLECTIVES = ("all_reduce", "all_to_all_single", "reduce_scatter_tensor", "all_gather_into_tensor")
_NAN = float("nan")


@contextmanager
def fault_hooks(injector: FaultInjector) -> Iterator[None]:
    """Call ``injector`` in every phase while the block runs."""
    with ExitStack() as undo:
        for handle in (
            register_module_forward_pre_hook(functools.partial(_before_forward, injector)),
            register_module_forward_hook(functools.partial(_after_forward, injector)),
            register_optimizer_step_pre_hook(lambda *_: _discard(injector.at_phase(InjectionPhase.OPTIMIZER))),
        ):
            undo.callback(handle.remove)
        for name in _COLLECTIVES:
            undo.enter_context(_wrapped(dist, name, functools.partial(_collective, injector)))
        undo.enter_context(_wrapped(Checkpointer, "save", _phase_before(injector, InjectionPhase.SAVE)))
        undo.enter_context(_wrapped(Checkpointer, "restore", _phase_before(injector, InjectionPhase.RESTORE)))
        undo.enter_context(_wrapped(Session, "seal", functools.partial(_seal, injector)))
        yield


def _discard(_kind: InjectionKind | None) -> None:
    """Return ``None``, because torch uses a hook's result as new arguments."""


def _before_forward(injector: FaultInjector, _module: Any, inputs: tuple[Any, ...]) -> Any:
    if injector.at_phase(InjectionPhase.FORWARD) is InjectionKind.NAN:
        return tuple(_with_nan(value) for value in inputs)
    return None


def _with_nan(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value * _NAN
    return value


def _after_forward(injector: FaultInjector, _module: Any, _inputs: Any, output: Any) -> None:
    """Hook the gradient of a module's output, which torch computes in the backward pass."""
    if not injector.has_pending(InjectionPhase.BACKWARD):
        return
    outputs = output if isinstance(output, tuple | list) else (output,)
    tensor = next((value for value in outputs if isinstance(value, torch.Tensor) and value.requires_grad), None)
    if tensor is not None:
        tensor.register_hook(
            lambda gradient: _with_nan(gradient) if _injects_nan(injector, InjectionPhase.BACKWARD) else None
        )


def _injects_nan(injector: FaultInjector, phase: InjectionPhase) -> bool:
    return injector.at_phase(phase) is InjectionKind.NAN


def _collective(injector: FaultInjector, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    if _injects_nan(injector, InjectionPhase.ALLREDUCE):
        values = args[1] if len(args) > 1 and isinstance(args[1], torch.Tensor) else args[0]
        if values.is_floating_point():
            values.fill_(_NAN)
    return call(*args, **options)


def _phase_before(injector: FaultInjector, phase: InjectionPhase) -> Callable[..., Any]:
    def wrapper(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        injector.at_phase(phase)
        return call(*args, **options)

    return wrapper


def _seal(injector: FaultInjector, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    injector.at_phase(InjectionPhase.SEAL)
    sealed = call(*args, **options)
    injector.at_phase(InjectionPhase.REPLICATE)
    return sealed


@contextmanager
def _wrapped(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    """Replace ``owner.name`` while the block runs: ``wrapper`` receives the original and the arguments."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def call(*args: Any, **options: Any) -> Any:
        return wrapper(before, *args, **options)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, before)
