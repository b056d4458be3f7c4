"""Copies of parameters and moments that go on while the training computes the next gradients.

Between two steps of an optimizer nothing else changes its parameters and moments. So a save copies them in the
background, and the next step of any optimizer waits for the copies. What no optimizer owns (buffers, counters, random
states) is copied before the save returns; on a device, before what the training computes next.

::

    save ── lease, copy the rest ──> returns
            └─ copy parameters and moments ─────────┐ check ──> seal
    training    forward, backward                   └> optimizer.step

What this rests on is checked, and a save that fails the check is not sealed:

- Only an optimizer whose steps were seen since the last save has its tensors copied late. A compiled step and a
  replayed graph call no hook: once one was seen, all is copied before a save returns.
- Who changes a tensor in between moves its version counter, or else changes the first or last bytes of a tensor, of
  which the save keeps some. Such a tensor is copied before a save returns from then on.
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
from tieredckpt.tensors.slot_copy import Copier, CopyPlan, MappedSlot, SlotCopy, SlotWrite, memory_at_address
from tieredckpt.tensors.state_dict import has_ordinary_dispatch, is_plain_tensor
from tieredckpt.tensors.state_structure import Addresses, local_values

log = logging.getLogger(__name__)

_END_BYTES = 16
"""Kept of each end of a tensor. A shard's header has more room than that for each of them."""
_SAMPLED_BYTES = 2 * _END_BYTES
_version = operator.attrgetter("_version")
_tensor = operator.attrgetter("tensor")


class OptimizerWatch:
    """Sees the steps of this process's optimizers, and has them wait for copies."""

    def __init__(self) -> None:
        self.steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self.is_compiled = False
        self.is_replayed = False
        self._running: list[OverlappedCopy] = []
        self._lock = threading.Lock()

    def before_step(self, optimizer: Optimizer, _args: Any, _named: Any) -> None:
        if torch.compiler.is_compiling():
            self.is_compiled = True  # only written: a compiled step that read it would be compiled anew
            return
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        if self._running:
            self.wait(by_device=not accelerator().is_capturing())

    def before_replay(self) -> None:
        self.is_replayed = True
        self.wait(by_device=False)

    def wait(self, *, by_device: bool = True) -> None:
        """Return when the copied tensors may change; ``by_device``: by what this thread gives its devices from now."""
        with self._lock:
            running = list(self._running)
        for copy in running:
            copy.wait_until_released(by_device=by_device)

    @property
    def problem(self) -> str:
        """Why nothing is copied late in this process; empty where it may be."""
        if self.is_replayed:
            return "device work was replayed from a graph, which calls no hook"
        return "an optimizer's step was compiled, which cannot wait" if self.is_compiled else ""

    def add(self, copy: OverlappedCopy) -> None:
        with self._lock:
            self._running.append(copy)

    def remove(self, copy: OverlappedCopy) -> None:
        with self._lock:
            self._running.remove(copy)


@functools.cache
def optimizer_watch() -> OptimizerWatch:
    """This process's, from the first call on."""
    watch = OptimizerWatch()
    register_optimizer_step_pre_hook(watch.before_step)
    contextlib.ExitStack().enter_context(accelerator().on_replay(watch.before_replay))
    return watch


def wait_for_overlapped_copies() -> None:
    """Return when no copy reads the training's tensors any more: before who loads into them."""
    optimizer_watch().wait(by_device=False)


class OverlappedStaging:
    """Decides which tensors of one job's state are copied late."""

    def __init__(self) -> None:
        self._watch = optimizer_watch()
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary(self._watch.steps)
        """Of each optimizer, the steps at the last save."""
        self._owned: WeakKeyDictionary[Optimizer, _OwnedTensors] = WeakKeyDictionary()
        self._changed: set[str] = set()
        """Names of tensors that were changed between an optimizer's steps."""
        self._choice: _Choice | None = None
        self._said = False

    def start(
        self, step: int, slot: MappedSlot, layout: Layout, writes: Sequence[SlotWrite], copier: Copier
    ) -> OverlappedCopy | None:
        """Copy what cannot wait and start the copy of the rest, or return ``None`` where nothing can wait.

        ``writes``: every tensor of ``layout``, in its order.
        """
        owned = self._owners()
        choice = self._choice
        if choice is None or not choice.is_of(layout, writes, owned):
            choice = self._choice = _Choice(layout, writes, owned, self._changed) if owned else None
        if choice is None or not choice.late:
            return None
        return OverlappedCopy(self, step, slot, choice, copier)

    def _owners(self) -> list[_OwnedTensors]:
        """What the optimizers own that have stepped since the last save."""
        before, self._steps = self._steps, WeakKeyDictionary(self._watch.steps)
        if problem := self._watch.problem:
            if not self._said:
                log.info("saves return when everything is copied: %s", problem)
            self._said = True
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
        """Copy this tensor before a save returns from now on."""
        self._changed.add(name)
        self._choice = None

    def close(self) -> None:
        """Let go of the state's tensors."""
        self._choice = None
        self._owned.clear()


def _tensors_of(optimizer: Optimizer) -> Iterator[Any]:
    """Parameters and moments, and what else an optimizer keeps for a parameter."""
    states = optimizer.state.values()
    yield from chain.from_iterable(group["params"] for group in optimizer.param_groups)
    yield from chain.from_iterable(state.values() for state in states if isinstance(state, dict))


class _OwnedTensors:
    """What one optimizer changes in its step, by addresses."""

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
    """What is copied before a save returns and what late, for as long as the state has the same tensors."""

    def __init__(
        self, layout: Layout, writes: Sequence[SlotWrite], owned: list[_OwnedTensors], early: AbstractSet[str]
    ) -> None:
        self._layout, self._owned = layout, owned
        self._tensors = list(map(_tensor, writes))
        owners: Mapping[int, torch.Tensor] = {key: one for some in owned for key, one in some.by_address.items()}
        now: list[SlotWrite] = []
        self.late: list[SlotWrite] = []
        self.owners: list[torch.Tensor] = []
        """Of each of them, the tensor that the optimizer changes."""
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
        # A DTensor counts for itself, or has its part count.
        counting += [(name, owner._local_tensor) for name, owner in counting if isinstance(owner, DTensor)]
        self.counting = [tensor for _, tensor in counting]
        self.counting_names = [name for name, _ in counting]
        self._addresses = Addresses(self.owners)
        device = accelerator()
        self.placed = [*{device.device_of(one.tensor): one.tensor for one in self.late}.values()]
        """A tensor of each device."""
        self.ends = _TensorEnds(names, self.late, layout.header_bytes // _SAMPLED_BYTES)

    def is_of(self, layout: Layout, writes: Sequence[SlotWrite], owned: list[_OwnedTensors]) -> bool:
        """Whether these are the same tensors, at the same addresses, of the same owners."""
        return (
            layout is self._layout
            and len(owned) == len(self._owned)
            and all(map(operator.is_, owned, self._owned))
            and all(map(operator.is_, map(_tensor, writes), self._tensors))
            and self._addresses.are_same()
        )


def _can_wait(tensor: torch.Tensor, owner: torch.Tensor) -> bool:
    """Whether its bytes are the owner's, in the order in which they are saved."""
    return (
        0 < tensor.nbytes <= local_values(owner).nbytes
        and is_plain_tensor(tensor)
        and has_ordinary_dispatch(tensor)
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class _TensorEnds:
    """The first and last bytes of tensors, which a save puts where the header will be."""

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
        # In the order in which their bytes are in the slot.
        self._sampled = [*here, *chain.from_iterable(groups.values())]

    def take(self, slot: MappedSlot) -> CopyPlan:
        """Put those of this process's memory into the slot; return what devices have to copy into it."""
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
        """Return the name of a tensor of which the slot has other ends than those that were taken; or nothing."""
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
    """One copy that goes on after its save has returned."""

    def __init__(
        self, staging: OverlappedStaging, step: int, slot: MappedSlot, choice: _Choice, copier: Copier
    ) -> None:
        self._staging, self._step, self._slot, self._choice = staging, step, slot, choice
        self._versions = list(map(_version, choice.counting))
        self._lock = threading.Lock()
        self._changed: str | None = None
        """The name of a tensor that was changed before it was released; ``None`` before that is known."""
        self._host_copied = threading.Event()
        self._copied = threading.Event()
        self._fence: AbortFence = current_fence()
        self._wait_began: float | None = None
        """When the training began to wait for it."""
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
        """Return how long the training has waited, once nothing reads its tensors; or raise why the copy is no use."""
        try:
            self._copies[-1].copy_host_part(copier)
            if not self._events:
                self._settle()
            began, ended = self._wait_began, time.perf_counter()
            self._host_copied.set()
            self._work.wait()
            if not self._fence.trusts(self._work):
                raise SaveFailedError(
                    f"step {self._step} was not computed to its end before its world was aborted, so it is not saved"
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
        """Return when the tensors may change; ``by_device``: by what this thread gives its devices from now on."""
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
        """See once whether a version counter has moved: before the optimizer moves them, or when all is copied."""
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
        if problem := optimizer_watch().problem:
            raise SaveFailedError(
                f"step {self._step} is not saved: while it was copied {problem}. From now on saves return when "
                "everything is copied"
            )
