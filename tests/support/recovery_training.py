"""Small sharded model whose training breaks in the middle of steps, repeatedly."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.elastic_training import batch_of, build_model, optimizer_of


class _Allocator(ctypes.Structure):
    """C's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


def allocated_kib() -> int:
    """Return the KiB that this process has allocated and not freed.

    Resident pages also count what the allocator holds back, which grows with the threads that ran at the same time.
    Torch's cache of fake tensors grows with every step of Adam, whose factors differ, and is cleared.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode.cache_clear()
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Allocator
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd) >> 10


def process_footprint() -> str:
    """Return threads, descriptors, allocated KiB and resident pages of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    here = Path("/proc/self")
    return f"{len(list((here / 'task').iterdir()))} {len(list((here / 'fd').iterdir()))} {allocated_kib()} {pages}"


def train_with_faults(say: Callable[[str], None], address: str, job: str, faults: int) -> str:
    """Train in ``faults`` worlds that one rank breaks in its second step, then in one that finishes."""
    from elastic.workers.train_loop import run
    from tests.support.socket_control_plane import SocketControlPlane

    return str(
        run(lambda world: _train_with_faults(say, world, job, faults), plane=SocketControlPlane(address)).outcome.value
    )


def _train_with_faults(say: Callable[[str], None], world: Any, job: str, faults: int) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from elastic.samples.rng import RNGState
    from tieredckpt import Checkpointer

    model = build_model()
    fully_shard(model, mesh=world.mesh())
    optimizer = optimizer_of(model)
    state = {"model": model, "optim": optimizer, "random": RNGState()}
    with Checkpointer(job, every=1) as ckpt:
        first = ckpt.restore(state) + 1
        say(f"world {world.epoch} {first} {process_footprint()} {time.monotonic()}")
        for step in world.steps(first, faults + 2, checkpoint=(ckpt, state)):
            part = batch_of(step).chunk(world.size)[world.rank]
            loss = model(part).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if world.epoch < faults and step == first + 1 and world.rank == world.epoch % world.size:
                raise ZeroDivisionError("in the middle of a step")
            optimizer.step()
            dist.all_reduce(loss.detach())
            ckpt.save(state, step)


def train_with_torn_optimizers(
    say: Callable[[str], None], address: str, job: str, total: int, torn: tuple[int, ...]
) -> str:
    """Train with all kinds of stateful objects.

    In step 3 of the first world the optimizers of the ranks ``torn`` update only their first parameter.
    """
    from elastic.workers.train_loop import run
    from tests.support.socket_control_plane import SocketControlPlane

    return str(
        run(
            lambda world: _train_with_torn_optimizers(say, world, job, total, torn), plane=SocketControlPlane(address)
        ).outcome.value
    )


def _train_with_torn_optimizers(
    say: Callable[[str], None], world: Any, job: str, total: int, torn: tuple[int, ...]
) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    from elastic.samples.rng import RNGState
    from tieredckpt import Checkpointer

    model = build_model()
    fully_shard(model, mesh=world.mesh())
    optimizer = optimizer_of(model)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total + 1)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    state = {"model": model, "optim": optimizer, "rate": rate, "scaler": scaler, "random": RNGState()}
    seed_all(world.rank)
    with Checkpointer(job, every=1) as ckpt:
        first = ckpt.restore(state) + 1
        say(f"world {world.epoch} {first}")
        for step in world.steps(first, total, checkpoint=(ckpt, state)):
            part = batch_of(step).chunk(world.size)[world.rank] + draw_numbers()
            optimizer.zero_grad()
            scaler.scale(model(part).square().mean()).backward()
            if world.epoch == 0 and step == 3 and torn:
                dist.barrier()  # all ranks have their gradients
                if world.rank in torn:
                    with torch.no_grad():
                        next(iter(model.parameters())).to_local().add_(1.0)
                    raise ZeroDivisionError("in the optimizer's step")
            scaler.step(optimizer)
            scaler.update()
            rate.step()
            ckpt.save(state, step)
            say(f"step {step} {world.rank} {rate.get_last_lr()[0]!r} {scaler.get_scale()} {digest(model, optimizer)}")


def seed_all(rank: int) -> None:
    import random

    import numpy as np
    import torch

    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002 - what scripts use
    torch.manual_seed(rank)


def draw_numbers() -> float:
    """Draw from every generator. Numpy and Python draw pairs and cache one half."""
    import random

    import numpy as np
    import torch

    return float(random.gauss() + np.random.standard_normal() + torch.randn(1).item())  # noqa: NPY002


def digest(model: Any, optimizer: Any) -> str:
    import hashlib

    values = [one.to_local() for one in model.parameters()]
    values += [one.to_local() for kept in optimizer.state.values() for one in kept.values() if hasattr(one, "to_local")]
    return hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in values)).hexdigest()


def train_with_rng(say: Callable[[str], None], job: str, save: bool, before: int) -> list[float]:
    """Save or restore the generators of a rank, and return its next draws."""
    import torch
    import torch.distributed as dist

    from elastic.samples.rng import RNGState
    from tieredckpt import Checkpointer

    state = {"weight": torch.zeros(8), "random": RNGState()}
    seed_all(dist.get_rank())
    for _ in range(before):
        draw_numbers()
    with Checkpointer(job, every=1) as ckpt:
        if save:
            ckpt.save(state, 0)
            ckpt.wait()
        else:
            assert ckpt.restore(state) == 0
            assert list(state["random"].state_dict()) == [f"rank{dist.get_rank()}"]  # this rank's name
        return [draw_numbers() for _ in range(3)]
