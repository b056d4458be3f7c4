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
import ctypes
import functools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from peerstore.failpoints import failpoint
from tieredckpt.errors import SaveFailedError
from tieredckpt.live.abort_fence import AbortFence, current_fence
from tieredckpt.tensors.device import DeviceCopy, DeviceEvent, DeviceWork, accelerator
from tieredckpt.tensors.slot_copy import Copier, MappedSlot, SlotCopy, SlotWrite
from tieredckpt.tensors.state_dict import has_ordinary_dispatch, is_plain_tensor

log = logging.getLogger(__name__)

_END_BYTES = 16
"""Kept of each end of a tensor. A shard's header has more room than that for each of them."""
_SAMPLED_BYTES = 2 * _END_BYTES


class NamedWrite(NamedTuple):
    """A tensor of the state, by name, and where its bytes go in a slot."""

    name: str
    write: SlotWrite


class _Chosen(NamedTuple):
    """What one save copies before it returns, and what late; the owners of the latter, in the same order."""

    now: list[SlotWrite]
    late: list[NamedWrite]
    owners: list[torch.Tensor]


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
        self._changed: set[str] = set()
        """Names of tensors that were changed between an optimizer's steps."""
        self._gathered: dict[torch.device, _GatheredEnds] = {}
        self._said = False

    def start(
        self, step: int, slot: MappedSlot, room: int, writes: Sequence[NamedWrite], copier: Copier
    ) -> OverlappedCopy | None:
        """Copy what cannot wait and start the copy of the rest, or return ``None`` where nothing can wait.

        ``room``: bytes at the start of the slot that are not written before the copy has ended.
        """
        owners = self._owners()
        chosen = _Chosen([], [], [])
        for one in writes:
            owner = owners.get(one.write.tensor.data_ptr()) if owners else None
            if owner is None or one.name in self._changed or not _can_wait(one.write.tensor, owner):
                chosen.now.append(one.write)
            else:
                chosen.late.append(one)
                chosen.owners.append(owner)
        return OverlappedCopy(self, step, slot, room, chosen, copier=copier) if chosen.late else None

    def _owners(self) -> dict[int, torch.Tensor]:
        """The parameters and moments of the optimizers that have stepped since the last save, by their addresses."""
        before, self._steps = self._steps, WeakKeyDictionary(self._watch.steps)
        if problem := self._watch.problem:
            if not self._said:
                log.info("saves return when everything is copied: %s", problem)
            self._said = True
            return {}
        found: dict[int, torch.Tensor] = {}
        for optimizer, steps in self._steps.items():
            if steps == before.get(optimizer, 0):
                continue
            for owner in _tensors_of(optimizer):
                local = _local(owner)
                if local.layout is torch.strided and not local.is_inference():
                    found[local.data_ptr()] = owner
        return found

    def copy_early(self, name: str) -> None:
        """Copy this tensor before a save returns from now on."""
        self._changed.add(name)

    def gather_ends(self, place: torch.device, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Have a device put the first and last bytes of its tensors into one tensor, in the order of its work."""
        known = self._gathered.get(place)
        if known is None or not known.is_of(tensors):
            known = self._gathered[place] = _GatheredEnds(tensors)
        device = accelerator()
        device.copy(known.copies, device.current_stream(place))
        return known.gathered


class _GatheredEnds:
    """The views for it, which are made once."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.gathered = tensors[0].new_empty((len(tensors), 2, _END_BYTES), dtype=torch.uint8)
        flat = (tensor.detach().view(-1).view(torch.uint8) for tensor in tensors)
        ends = chain.from_iterable((data[:_END_BYTES], data[-_END_BYTES:]) for data in flat)
        self.copies = list(map(DeviceCopy, self.gathered.view(-1, _END_BYTES), ends))

    def is_of(self, tensors: list[torch.Tensor]) -> bool:
        return len(tensors) == len(self._tensors) and all(map(_is_same_memory, tensors, self._tensors))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.nbytes == other.nbytes


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    yield from chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for state in optimizer.state.values():
        if isinstance(state, dict):
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _can_wait(tensor: torch.Tensor, owner: torch.Tensor) -> bool:
    """Whether its bytes are the owner's, in the order in which they are saved."""
    return (
        0 < tensor.nbytes <= _local(owner).nbytes
        and is_plain_tensor(tensor)
        and has_ordinary_dispatch(tensor)
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class OverlappedCopy:
    """One copy that goes on after its save has returned."""

    def __init__(
        self,
        staging: OverlappedStaging,
        step: int,
        slot: MappedSlot,
        room: int,
        chosen: _Chosen,
        *,
        copier: Copier,
    ) -> None:
        self._staging, self._step, self._slot = staging, step, slot
        now, late, owners = chosen
        counting = [(one.name, owner) for one, owner in zip(late, owners, strict=True)]
        # A DTensor counts for itself, or has its part count.
        counting += [(name, owner._local_tensor) for name, owner in counting if isinstance(owner, DTensor)]
        self._counting = counting
        self._versions = [one._version for _, one in self._counting]
        self._lock = threading.Lock()
        self._changed: str | None = None
        """The name of a tensor that was changed before it was released; ``None`` before that is known."""
        self._host_copied = threading.Event()
        self._copied = threading.Event()
        self._fence: AbortFence = current_fence()
        self._wait_began: float | None = None
        """When the training began to wait for it."""
        self._events: dict[torch.device, DeviceEvent] = {}
        self._sampled, samples = self._sample(late, room)
        self._copies = [SlotCopy(slot, pieces) for pieces in (now, samples, [one.write for one in late])]
        try:
            self._start([one.write.tensor for one in late], copier)
        except BaseException:
            self._wait_for_devices()
            raise
        optimizer_watch().add(self)

    def _sample(self, late: Sequence[NamedWrite], room: int) -> tuple[list[NamedWrite], list[SlotWrite]]:
        """Put the first and last bytes of tensors at the start of the slot.

        Returns the tensors in the order in which their bytes are there, and what devices have to copy for it.
        """
        device = accelerator()
        here: list[NamedWrite] = []
        groups: defaultdict[torch.device, list[NamedWrite]] = defaultdict(list)
        for one in late[: room // _SAMPLED_BYTES]:
            if one.write.tensor.nbytes >= _END_BYTES:
                place = device.device_of(one.write.tensor)
                (here if place is None else groups[place]).append(one)
        at = self._slot.address
        for one in here:
            first, size = one.write.tensor.data_ptr(), one.write.tensor.nbytes
            ctypes.memmove(at, first, _END_BYTES)
            ctypes.memmove(at + _END_BYTES, first + size - _END_BYTES, _END_BYTES)
            at += _SAMPLED_BYTES
        order, start = here, at - self._slot.address
        writes: list[SlotWrite] = []
        for place, some in groups.items():
            ends = self._staging.gather_ends(place, [one.write.tensor for one in some])
            writes.append(SlotWrite(ends, start))
            start += ends.nbytes
            order = [*order, *some]
        return order, writes

    def _start(self, late: list[torch.Tensor], copier: Copier) -> None:
        device = accelerator()
        released, _, self._events = [copy.start() for copy in self._copies]
        self._work: DeviceWork = self._fence.record(late)
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
                moved = (
                    name for (name, one), was in zip(self._counting, self._versions, strict=True) if one._version != was
                )
                self._changed = next(moved, "")
                self._counting = []

    def _raise_if_changed(self) -> None:
        name = self._changed or self._changed_at_an_end()
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

    def _changed_at_an_end(self) -> str:
        """The name of a tensor whose first or last bytes are not those that the save has kept."""
        import numpy as np

        if not self._sampled:
            return ""
        data = self._slot.tensor(0, torch.uint8, (self._slot.size_bytes,)).numpy()
        starts = np.array([one.write.start for one in self._sampled])
        ends = starts + np.array([one.write.tensor.nbytes for one in self._sampled])
        places = np.stack([starts, ends - _END_BYTES], 1)[:, :, None] + np.arange(_END_BYTES)
        kept = data[: len(self._sampled) * _SAMPLED_BYTES].reshape(places.shape)
        wrong = (data[places] != kept).any((1, 2)).nonzero()[0]
        return self._sampled[wrong[0]].name if len(wrong) else ""
