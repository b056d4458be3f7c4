"""A seeded trainer on simulated asynchronous devices that stages its state while it computes."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator

import torch

from tests.support.async_device import AsyncDevice, AsyncStream
from tieredckpt.tensors.device import record_device_work, use_device_backend
from tieredckpt.tensors.slot_copy import Copier, MappedSlot, SlotWrite

_SHAPES = ((5000,), (1,), (0,), (), (33, 70), (3, 5, 7), (2, 1024))
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
_HEADER = 512


class WrongBytesError(AssertionError):
    """A slot differs from the state that was staged into it."""


class Trainer:
    """Tensors on devices and their expected values, computed on the calling thread's streams."""

    def __init__(self, device: AsyncDevice, seed: int) -> None:
        self.random = random.Random(seed)
        self.device = device
        made = torch.Generator().manual_seed(seed)
        self.expected: list[torch.Tensor] = []
        for _ in range(self.random.randrange(1, 7)):
            shape, dtype = self.random.choice(_SHAPES), self.random.choice(_DTYPES)
            tensor = torch.randint(0, 100, shape, generator=made).to(dtype)
            self.expected.append(tensor.t() if tensor.dim() == 2 and self.random.random() < 0.5 else tensor)
        self.where = [self.random.choice([None, 0, 1]) for _ in self.expected]
        self.state = [
            tensor.clone() if index is None else device.to_device(tensor, index)
            for tensor, index in zip(self.expected, self.where, strict=True)
        ]

    def step(self) -> None:
        for tensor, expected, index in zip(self.state, self.expected, self.where, strict=True):
            if not tensor.numel():
                continue
            if index is None:
                tensor.add_(1)
            else:
                self.device.launch(lambda it: it.add_(1), [tensor])
            expected.add_(1)

    def replace_one(self) -> None:
        """Replace one tensor by a new equal one, as ``optimizer.zero_grad(set_to_none=True)`` does."""
        number = self.random.randrange(len(self.state))
        index = self.where[number]
        fresh = self.expected[number].clone()
        self.state[number] = fresh if index is None else self.device.to_device(fresh, index)


@contextlib.contextmanager
def mapped_slot(pieces_bytes: int, generation: int = 0) -> Iterator[MappedSlot]:
    size = _HEADER + pieces_bytes + 4096
    fd = os.memfd_create("slot")
    os.ftruncate(fd, size)
    memory = MappedSlot(fd, size, generation)
    try:
        yield memory
    finally:
        memory.close()


def lay_out(state: list[torch.Tensor]) -> tuple[list[SlotWrite], int]:
    pieces, at = [], _HEADER
    for tensor in state:
        pieces.append(SlotWrite(tensor, at))
        at += -(-tensor.nbytes // 64) * 64
    return pieces, at - _HEADER


def stage_and_check(
    device: AsyncDevice, memory: MappedSlot, trainer: Trainer, copier: Copier, then: bool = True
) -> None:
    """Stage, train on at once, and only then check the slot, as the seal does."""
    pieces, _ = lay_out(trainer.state)
    expected = [one.clone() for one in trainer.expected]
    views = [memory.tensor(piece.start, piece.tensor.dtype, piece.tensor.shape) for piece in pieces]
    device.host_writes([one for one in views if one.numel()])
    memory.copy_in(pieces, copier)
    device.host_writes([one for one in trainer.state if one.numel() and device.device_of(one) is None])
    if then:
        trainer.step()
    device.host_reads([one for one in views if one.numel()])
    for number, (view, wanted) in enumerate(zip(views, expected, strict=True)):
        if not torch.equal(view, wanted):
            raise WrongBytesError(f"tensor {number} of {tuple(wanted.shape)}")


def run_seed(seed: int) -> AsyncDevice:
    """Run a trainer that stages into two slots in turn; the seed decides sizes and streams."""
    with use_device_backend(AsyncDevice(seed, chunk_bytes=1024)) as device, contextlib.closing(Copier(2)) as copier:
        choose = random.Random(seed)
        device.refuses = "out of locked memory" if choose.random() < 0.1 else ""
        mine: list[AsyncStream] = [device.new_stream(torch.device(device.type, index)) for index in range(2)]
        with contextlib.ExitStack() as stack:
            if choose.random() < 0.5:  # compute on streams other than the default ones
                for stream in mine:
                    stream.wait_stream(device.current_stream(stream.place))
                    stack.enter_context(device.use_stream(stream))
            trainer = Trainer(device, seed)
            size = lay_out(trainer.state)[1]
            slots = [stack.enter_context(mapped_slot(size + 100 * choose.randrange(50))) for _ in range(2)]
            for turn in range(choose.randrange(1, 5)):
                for _ in range(choose.randrange(3)):
                    trainer.step()
                work = record_device_work(trainer.state)
                stage_and_check(device, slots[turn % 2], trainer, copier)
                work.wait()
                assert work.has_completed()
                if choose.random() < 0.3:
                    trainer.replace_one()
            device.close()
            for tensor, expected in zip(trainer.state, trainer.expected, strict=True):
                assert torch.equal(tensor, expected)
        return device
