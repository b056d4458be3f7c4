"""Overlapped copies: copy parameters and moments while the training computes the next gradients.

Between two steps of an optimizer, nothing else changes its parameters and moments. So a save copies them in the
background, and the next step of any optimizer waits for the copies. Values without an optimizer (buffers, counters,
random states) are copied before the save returns. On a device, they are copied before the training's next work there.

::

    save ── lease, copy the rest ──> returns
            └─ copy parameters and moments ─────────┐ check ──> seal
    training    forward, backward                   └> optimizer.step

Each save checks these assumptions, and is not sealed if one of them fails:

- Tensors are copied late only if their optimizer has stepped since the last save. A compiled step and a replayed graph
  call no hook. After the first of them, saves copy everything before they return.
- Any other change of a tensor moves its version counter, or changes its first or last bytes, which the save records.
  After such a change, saves copy the tensor before they return.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from peerstore.failpoints import failpoint
from tieredckpt.errors import SaveFailedError
from tieredckpt.format.shard_layout import Layout
from tieredckpt.live.abort_fence import AbortFence, current_fence
from tieredckpt.tensors.device import DeviceCopy, DeviceWork, accelerator
from tieredckpt.tensors.plain_tensors import has_ordinary_dispatch, is_plain_tensor
from tieredckpt.tensors.slot_copy import Copier, CopyPlan, MappedSlot, SlotCopy, SlotWrite, memory_at_address
from tieredckpt.tensors.state_structure import Addresses, local_values

log = logging.getLogger(__name__)

_END_BYTES = 16
"""Bytes recorded at each end of a tensor. A shard's header has more room than that for each tensor."""
_SAMPLED_BYTES = 2 * _END_BYTES
_version = operator.attrgetter("_version")
_tensor = operator.attrgetter("tensor")


class OptimizerWatch:
    """Hooks of this process's optimizers: count their steps, and make each step wait for running copies."""

    def __init__(self) -> None:
        self.steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self.is_compiled = False
        self.is_replayed = False
        self._running: list[OverlappedCopy] = []
        self._lock = threading.Lock()
        self._hooks = contextlib.ExitStack()
        self._hooks.callback(register_optimizer_step_pre_hook(self.before_step).remove)
        self._hooks.enter_context(accelerator().on_replay(self.before_replay))

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    def before_step(self, optimizer: Optimizer, _args: Any, _named: Any) -> None:
        if torch.compiler.is_compiling():
            self.is_compiled = True  # only written: reading it would make torch compile the step again
            return
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        if self._running:
            self.wait(by_device=not accelerator().is_capturing())

    def before_replay(self) -> None:
        self.is_replayed = True
        self.wait(by_device=False)

    def wait(self, *, by_device: bool = True) -> None:
        """Wait until the tensors may change; ``by_device``: by device work that this thread enqueues next."""
        with self._lock:
            running = list(self._running)
        for copy in running:
            copy.wait_until_released(by_device=by_device)

    @property
    def problem(self) -> str:
        """Reason why this process copies no tensor late, or an empty string."""
        if self.is_compiled:
            return "an optimizer's step was compiled, which cannot wait"
        return "device work was replayed from a graph, which calls no hook" if self.is_replayed else ""

    def add(self, copy: OverlappedCopy) -> None:
        with self._lock:
            self._running.append(copy)

    def remove(self, copy: OverlappedCopy) -> None:
        with self._lock:
            self._running.remove(copy)


@functools.cache
def optimizer_watch() -> OptimizerWatch:
    """Return this process's watch; the first call registers its hooks."""
    return OptimizerWatch()


def wait_for_overlapped_copies() -> None:
    """Wait until no copy reads the training's tensors; call this before loading into them."""
    optimizer_watch().wait(by_device=False)


class OverlappedStaging:
    """Late copies of one job: choose the tensors that can wait, and start their copies."""

    def __init__(self) -> None:
        self._watch = optimizer_watch()
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary(self._watch.steps)
        """Number of steps of each optimizer at the last save."""
        self._owned: WeakKeyDictionary[Optimizer, _OwnedTensors] = WeakKeyDictionary()
        self._changed: set[str] = set()
        """Names of tensors that changed outside of an optimizer's step."""
        self._choice: _Choice | None = None
        self._problem_logged = False

    def start(
        self, step: int, slot: MappedSlot, layout: Layout, writes: Sequence[SlotWrite], copier: Copier
    ) -> OverlappedCopy | None:
        """Copy the tensors that cannot wait and start the copy of the others; ``None`` if none can wait.

        ``writes`` has every tensor of ``layout``, in the same order.
        """
        owned = self._owners()
        choice = self._choice
        if choice is None or not choice.is_of(layout, writes, owned):
            choice = self._choice = _Choice(layout, writes, owned, self._changed) if owned else None
        if choice is None or not choice.late:
            return None
        return OverlappedCopy(self, step, slot, choice, copier)

    def _owners(self) -> list[_OwnedTensors]:
        """Return the tensors of each optimizer that has stepped since the last save."""
        before, self._steps = self._steps, WeakKeyDictionary(self._watch.steps)
        if problem := self._watch.problem:
            if not self._problem_logged:
                log.info("saves return when everything is copied: %s", problem)
            self._problem_logged = True
            return []
        found: list[_OwnedTensors] = []
        for optimizer, steps in self._steps.items():
            if steps == before.get(optimizer, 0):
                continue
            known, tensors = self._owned.get(optimizer), tuple(_tensors_of(optimizer))
            if known is None or not known.is_of(tensors):
                known = self._owned[optimizer] = _OwnedTensors(tensors)
            found.append(known)
        return found

    def copy_early(self, name: str) -> None:
        """From now on, copy this tensor before a save returns."""
        self._changed.add(name)
        self._choice = None

    def close(self) -> None:
        """Release the state's tensors."""
        self._choice = None
        self._owned.clear()


def _tensors_of(optimizer: Optimizer) -> Iterator[Any]:
    """Yield an optimizer's parameters, and all values of its state for them."""
    states = optimizer.state.values()
    yield from chain.from_iterable(group["params"] for group in optimizer.param_groups)
    yield from chain.from_iterable(state.values() for state in states if isinstance(state, dict))


class _OwnedTensors:
    """Tensors that one optimizer changes in its step, by address."""

    def __init__(self, values: tuple[Any, ...]) -> None:
        self._values = values
        self.by_address: dict[int, torch.Tensor] = {}
        for value in values:
            if isinstance(value, torch.Tensor):
                local = local_values(value)
                if local.layout is torch.strided and not local.is_inference():
                    self.by_address[local.data_ptr()] = value

    def is_of(self, values: tuple[Any, ...]) -> bool:
        return len(values) == len(self._values) and all(map(operator.is_, values, self._values))


class _Choice:
    """Tensors that a save copies before it returns, and tensors that it copies late."""

    def __init__(
        self, layout: Layout, writes: Sequence[SlotWrite], owned: list[_OwnedTensors], early: AbstractSet[str]
    ) -> None:
        self._layout, self._owned = layout, owned
        self._tensors = list(map(_tensor, writes))
        owners: Mapping[int, torch.Tensor] = {key: one for some in owned for key, one in some.by_address.items()}
        now: list[SlotWrite] = []
        self.late: list[SlotWrite] = []
        self.owners: list[torch.Tensor] = []
        """For each entry of ``late``, the tensor that the optimizer changes."""
        names: list[str] = []
        for entry, write in zip(layout.tensors, writes, strict=True):
            owner = owners.get(write.tensor.data_ptr())
            if owner is None or entry.fqn in early or not _can_wait(write.tensor, owner):
                now.append(write)
                continue
            names.append(entry.fqn)
            self.late.append(write)
            self.owners.append(owner)
        self.now_plan, self.late_plan = CopyPlan(now), CopyPlan(self.late)
        counting = list(zip(names, self.owners, strict=True))
        # A change of a DTensor moves its own version counter, or that of its local tensor.
        counting += [(name, owner._local_tensor) for name, owner in counting if isinstance(owner, DTensor)]
        self.counting = [tensor for _, tensor in counting]
        self.counting_names = [name for name, _ in counting]
        self._addresses = Addresses(self.owners)
        device = accelerator()
        self.placed = [*{device.device_of(one.tensor): one.tensor for one in self.late}.values()]
        """One tensor of each device."""
        self.ends = _TensorEnds(names, self.late, layout.header_bytes // _SAMPLED_BYTES)

    def is_of(self, layout: Layout, writes: Sequence[SlotWrite], owned: list[_OwnedTensors]) -> bool:
        """Return whether the tensors, their addresses and their owners are unchanged."""
        return (
            layout is self._layout
            and len(owned) == len(self._owned)
            and all(map(operator.is_, owned, self._owned))
            and all(map(operator.is_, map(_tensor, writes), self._tensors))
            and self._addresses.are_same()
        )


def _can_wait(tensor: torch.Tensor, owner: torch.Tensor) -> bool:
    """Return whether the tensor's bytes are the owner's, in the order in which a save writes them."""
    return (
        0 < tensor.nbytes <= local_values(owner).nbytes
        and is_plain_tensor(tensor)
        and has_ordinary_dispatch(tensor)
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class _TensorEnds:
    """First and last bytes of tensors; a save stores them in the slot until the header replaces them."""

    def __init__(self, names: Sequence[str], writes: Sequence[SlotWrite], most: int) -> None:
        device = accelerator()
        here: list[tuple[str, SlotWrite]] = []
        groups: defaultdict[torch.device, list[tuple[str, SlotWrite]]] = defaultdict(list)
        for name, write in list(zip(names, writes, strict=True))[:most]:
            if write.tensor.nbytes >= _END_BYTES:
                place = device.device_of(write.tensor)
                (here if place is None else groups[place]).append((name, write))
        self._addresses = [
            address
            for _, (tensor, _) in here
            for address in (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes - _END_BYTES)
        ]
        self._gathered: list[tuple[torch.device, torch.Tensor, list[DeviceCopy]]] = []
        for place, some in groups.items():
            gathered = some[0][1].tensor.new_empty((2 * len(some), _END_BYTES), dtype=torch.uint8)
            flat = (write.tensor.detach().view(-1).view(torch.uint8) for _, write in some)
            ends = chain.from_iterable((data[:_END_BYTES], data[-_END_BYTES:]) for data in flat)
            self._gathered.append((place, gathered, list(map(DeviceCopy, gathered, ends))))
        # In the order of their bytes in the slot.
        self._sampled = [*here, *chain.from_iterable(groups.values())]

    def take(self, slot: MappedSlot) -> CopyPlan:
        """Write the ends of host tensors into the slot; return a plan for those of device tensors."""
        parts = [memory_at_address(address, _END_BYTES) for address in self._addresses]
        slot.write(0, b"".join(parts))
        start, device = len(parts) * _END_BYTES, accelerator()
        writes = []
        for place, gathered, copies in self._gathered:
            device.copy(copies, device.current_stream(place))
            writes.append(SlotWrite(gathered, start))
            start += gathered.nbytes
        return CopyPlan(writes)

    def changed(self, slot: MappedSlot) -> str:
        """Return the name of a tensor whose copied ends differ from the recorded ends, or an empty string."""
        import numpy as np

        if not self._sampled:
            return ""
        data = slot.tensor(0, torch.uint8, (slot.size_bytes,)).numpy()
        starts = np.array([write.start for _, write in self._sampled])
        ends = starts + np.array([write.tensor.nbytes for _, write in self._sampled])
        places = np.stack([starts, ends - _END_BYTES], 1)[:, :, None] + np.arange(_END_BYTES)
        taken = data[: len(self._sampled) * _SAMPLED_BYTES].reshape(places.shape)
        wrong = (data[places] != taken).any((1, 2)).nonzero()[0]
        return self._sampled[wrong[0]][0] if len(wrong) else ""


class OverlappedCopy:
    """A copy that continues after its save has returned."""

    def __init__(
        self, staging: OverlappedStaging, step: int, slot: MappedSlot, choice: _Choice, copier: Copier
    ) -> None:
        self._staging, self._step, self._slot, self._choice = staging, step, slot, choice
        self._versions = list(map(_version, choice.counting))
        self._lock = threading.Lock()
        self._changed: str | None = None
        """Name of a tensor that changed before its release, empty if none did; ``None`` until checked."""
        self._host_copied = threading.Event()
        self._copied = threading.Event()
        self._fence: AbortFence = current_fence()
        self._wait_began: float | None = None
        """Time at which the training began to wait for this copy."""
        self._copies = [SlotCopy(slot, plan) for plan in (choice.now_plan, choice.ends.take(slot), choice.late_plan)]
        try:
            self._start(copier)
        except BaseException:
            self._wait_for_devices()
            raise
        optimizer_watch().add(self)

    def _start(self, copier: Copier) -> None:
        device = accelerator()
        released, _, self._events = [copy.start() for copy in self._copies]
        self._work: DeviceWork = self._fence.record(self._choice.placed)
        for copy in self._copies[:2]:
            copy.copy_host_part(copier)
        for place, event in released.items():
            device.current_stream(place).wait_event(event)
        if not self._copies[-1].has_host_part:
            self._host_copied.set()

    def run(self, copier: Copier) -> float:
        """Finish and check the copy; return the seconds that the training has waited for it."""
        try:
            self._copies[-1].copy_host_part(copier)
            if not self._events:
                self._settle()
            began, ended = self._wait_began, time.perf_counter()
            self._host_copied.set()
            self._work.wait()
            if not self._fence.trusts(self._work):
                raise SaveFailedError(
                    f"step {self._step} is not saved: its world was aborted before its computation had completed"
                )
        finally:
            try:
                self._wait_for_devices()
            finally:
                self._settle()
                self._host_copied.set()
                self._copied.set()
                optimizer_watch().remove(self)
        self._raise_if_changed()
        failpoint("stage.filled")
        return 0.0 if began is None else max(0.0, ended - began)

    def _wait_for_devices(self) -> None:
        with contextlib.ExitStack() as stack:
            for copy in self._copies:
                stack.callback(copy.wait_for_devices)

    def wait_until_released(self, *, by_device: bool) -> None:
        """Wait until the tensors may change; ``by_device``: by device work that this thread enqueues next."""
        if self._wait_began is None:
            self._wait_began = time.perf_counter()
        if by_device:
            self._host_copied.wait()
            self._settle()
            for place, event in self._events.items():
                accelerator().current_stream(place).wait_event(event)
        else:
            self._copied.wait()

    def _settle(self) -> None:
        """Check once whether a version counter has moved, before an optimizer's step or after the copy."""
        with self._lock:
            if self._changed is None:
                versions = map(_version, self._choice.counting)
                moved = (
                    name
                    for name, now, before in zip(self._choice.counting_names, versions, self._versions, strict=True)
                    if now != before
                )
                self._changed = next(moved, "")

    def _raise_if_changed(self) -> None:
        name = self._changed or self._choice.ends.changed(self._slot)
        if name:
            self._staging.copy_early(name)
            raise SaveFailedError(
                f"step {self._step} is not saved: {name} was changed outside of an optimizer's step while it was "
                "copied. Saves copy it before they return from now on. To change the state right after a save, call "
                "save(...).wait('staged') first, or set memory.staging to 'blocking'"
            )
        watch = optimizer_watch()
        if watch.is_compiled:  # the replay of a graph has waited for the copy
            raise SaveFailedError(
                f"step {self._step} is not saved: while it was copied {watch.problem}. From now on saves return when "
                "everything is copied"
            )
