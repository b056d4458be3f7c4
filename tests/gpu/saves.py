"""Section "saves": saves and restores of one state, ours and torch's own, bits compared.

Every row is a multiple of R, the time of the same bytes over the bus from or to pinned memory. The section measures
that limit first. Without a device R is one copy of the bytes on one thread.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

from benchmarks.sandbox import sandbox
from peerstore.sizes_and_durations import parse_size
from tests.gpu.devices import is_real, where
from tests.gpu.report import Check, Figure, Finding
from tieredckpt import Checkpointer, TieredReader, TieredWriter
from tieredckpt.checkpointer.save_handle import SaveHandle
from tieredckpt.session.session import close_sessions, open_session
from tieredckpt.settings import Settings, settings_from_mapping
from tieredckpt.tensors.device import accelerator

SIZE = "TEST_GPU_SIZE"
"""Environment variable with the size of the state; ``--size`` sets it."""
_ON_GPU, _ON_CPU = "4GiB", "64MiB"
_WIDE, _NARROW = 2048, 256
_SLOTS, _FILES = 13, 4
"""States that the slots of three jobs and torch's files on tmpfs have room for."""
_SAVES, _MEASURED = 10, {0: "first", 1: "second", 9: "tenth"}
_STEPS, _STEP_R = 3, 10
"""Number of measured saves, and duration of a step in copies of the state."""
_WAIT_S = 60.0

Tensors = dict[str, torch.Tensor]
T = TypeVar("T")


class Limit(NamedTuple):
    """R: seconds that the state takes over the bus at its limit."""

    out_s: float
    """From the device to pinned memory."""
    in_s: float


def run(device: str, out: Path, limit_s: float) -> Iterator[Finding]:
    """Measure saves and restores of one process on the current device."""
    wanted = parse_size(os.environ.get(SIZE) or (_ON_GPU if is_real() else _ON_CPU))
    size = min(wanted, shutil.disk_usage("/dev/shm").free // (_SLOTS + _FILES))
    state = model(size, torch.device(device))
    size = size_of(state)
    limit = yield from _limits(state, size)
    with sandbox() as folder:
        budget = str(_SLOTS * size + (256 << 20))
        settings = settings_from_mapping({"agent": {"directory": str(folder / "agent"), "budget": budget}})
        try:
            yield from _checkpointer(state, settings, limit)
            yield from _prepared_and_overlapped(state, settings, limit)
            yield from _through_dcp(state, settings, limit)
        finally:
            close_sessions()
        for name, make in STAGERS.items():
            yield from _torch_async(name, make, state, folder, limit)
        yield from _torch_plain(state, folder, limit)


def model(size_bytes: int, device: torch.device) -> Tensors:
    """Return about ``size_bytes`` of bf16 parameters with two fp32 moments each."""
    width = _WIDE if size_bytes >= 1 << 30 else _NARROW
    quarter, double = width // 4, 2 * width
    shapes = {
        "q": (width, width), "k": (quarter, width), "v": (quarter, width), "o": (width, width),
        "up": (double, width), "down": (width, double), "norm1": (width,), "norm2": (width,),
    }  # fmt: skip
    elements = sum(torch.Size(shape).numel() for shape in shapes.values())
    torch.manual_seed(0)
    state: Tensors = {}
    for layer in range(max(1, round(size_bytes / (10 * elements)))):
        for name, shape in shapes.items():
            state[f"model.{layer}.{name}"] = torch.randn(shape, device=device).to(torch.bfloat16)
            for moment in ("exp_avg", "exp_avg_sq"):
                state[f"optim.{layer}.{name}.{moment}"] = torch.randn(shape, device=device)
    return state


def size_of(state: Tensors) -> int:
    return sum(one.nbytes for one in state.values())


def difference(expected: Tensors, found: Tensors) -> str:
    """Return "equal", or the name of the first tensor whose bits differ."""
    for name, one in expected.items():
        if not torch.equal(one.view(torch.uint8), found[name].view(torch.uint8)):
            return f"{name} differs"
    return "equal"


def advance(state: Tensors) -> None:
    """Change every tensor, as a training step does."""
    for one in state.values():
        one.add_(1)


def blank(state: Tensors) -> Tensors:
    return {name: torch.zeros_like(one) for name, one in state.items()}


def wipe(state: Tensors) -> None:
    for one in state.values():
        one.zero_()


def _limits(state: Tensors, size: int) -> Any:
    """Yield the limits of this machine and return R."""
    if is_real():
        part = max(1 << 20, size // 4)
        pinned = torch.ones(part, dtype=torch.uint8, pin_memory=True)
        there = torch.zeros_like(pinned, device=accelerator().current())
        rates = {}
        for name, to, of in (("device to pinned host", pinned, there), ("pinned host to device", there, pinned)):
            took = [timed(lambda to=to, of=of: to.copy_(of, non_blocking=True))[0] for _ in range(5)]
            rates[name] = part / min(took)
            yield Figure(f"limit: {name}", rates[name] / 1e9, "GB/s", where())
        limit = Limit(*(size / rate for rate in rates.values()))
    else:
        threads, other = torch.get_num_threads(), blank(state)
        torch.set_num_threads(1)

        def copy() -> None:
            for name, one in state.items():
                other[name].copy_(one)

        one_copy = min(timed(copy)[0] for _ in range(5))
        torch.set_num_threads(threads)
        yield Figure("limit: host to host, one thread", size / one_copy / 1e9, "GB/s", where())
        limit = Limit(one_copy, one_copy)
    yield Figure("bytes of the state", size / 2**30, "GiB", where(), note=f"{len(state)} tensors, bf16 and fp32")
    yield Figure("R of a save", limit.out_s, "s", where())
    yield Figure("R of a restore", limit.in_s, "s", where())
    return limit


def timed(call: Callable[[], T], *, until_done: bool = True) -> tuple[float, T]:
    """Return the seconds of ``call`` and its result.

    The devices are idle before; ``until_done``: the time ends when they have done what ``call`` gave them.
    """
    device = accelerator()
    device.synchronize(device.current())
    began = time.perf_counter()
    found = call()
    if until_done:
        device.synchronize(device.current())
    return time.perf_counter() - began, found


def _row(name: str, seconds: float, whole_s: float, bits: str, note: str = "") -> Iterator[Finding]:
    """Yield the row, and a failed check where the bits differ."""
    yield Figure(name, seconds, "s", where(), ratio=round(seconds / whole_s, 3), bits=bits, note=note)
    if bits not in ("equal", ""):
        yield Check(f"{name}: bits", "failed", why=bits)


# -- ours --------------------------------------------------------------------------------------------------------------


def _checkpointer(state: Tensors, settings: Settings, limit: Limit) -> Iterator[Finding]:
    """Yield the first, second and tenth save of this process, and restores with and without proof."""
    job, taken, saved_states = "tiered://gpu-saves", {}, {}
    fresh = blank(state)
    with Checkpointer(job, every=1, settings=settings, on_sigterm="ignore") as checkpointer:
        for step in range(_SAVES):
            advance(state)
            is_measured = step in _MEASURED
            blocked_s, saved = timed(
                lambda step=step, keep=is_measured: checkpointer.save(state, step, keep=keep), until_done=False
            )
            began = time.perf_counter()
            saved.wait(timeout_s=_WAIT_S)
            sealed_s = time.perf_counter() - began
            print(f"save {step}: blocked {blocked_s:.4f} s, sealed {sealed_s:.4f} s later, {saved.state.value}")
            if is_measured:
                taken[step] = (blocked_s, f"blocked; sealed {sealed_s:.2f} s later")
                saved_states[step] = {name: one.clone() for name, one in state.items()}
        newest = max(_MEASURED)
        for turn in ("first", "second"):
            wipe(fresh)
            took_s, step = timed(lambda: checkpointer.restore(fresh))
            bits = difference(saved_states[newest], fresh) if step == newest else f"step {step}, not {newest}"
            yield from _row(f"Checkpointer.restore, verified and proven, {turn}", took_s, limit.in_s, bits)
        yield from _row(
            f"Checkpointer.save, {_MEASURED[newest]}", taken[newest][0], limit.out_s, bits, taken[newest][1]
        )
    with Checkpointer(job, every=1, settings=settings, proof=False, on_sigterm="ignore") as checkpointer:
        for turn in ("first", "second"):
            wipe(fresh)
            took_s, step = timed(lambda: checkpointer.restore(fresh))
            bits = difference(saved_states[newest], fresh) if step == newest else f"step {step}, not {newest}"
            yield from _row(f"Checkpointer.restore, no proof, {turn}", took_s, limit.in_s, bits)
        for step in sorted(_MEASURED)[:-1]:
            wipe(fresh)
            checkpointer.restore(fresh, step)
            bits = difference(saved_states[step], fresh)
            yield from _row(f"Checkpointer.save, {_MEASURED[step]}", taken[step][0], limit.out_s, bits, taken[step][1])


def _prepared_and_overlapped(state: Tensors, settings: Settings, limit: Limit) -> Iterator[Finding]:
    """Yield the first two saves after ``prepare``, saves after a step, and a step during a save."""
    optimizer = torch.optim.SGD(list(state.values()), lr=0.1)  # without gradients its step changes nothing
    session = open_session("gpu-steps", settings)
    compute = _compute_for(_STEP_R * limit.out_s)
    fresh, steps = blank(state), itertools.count()

    def run_step() -> None:
        compute()
        optimizer.step()

    with Checkpointer("tiered://gpu-steps", every=1, settings=settings, on_sigterm="ignore") as checkpointer:

        def saves(count: int, after: Callable[[], None] = lambda: None, *, until_done: bool = False) -> list[float]:
            took = []
            for step in itertools.islice(steps, count):
                optimizer.step()
                advance(state)

                def save(step: int = step) -> SaveHandle:
                    saved = checkpointer.save(state, step)
                    after()
                    return saved

                took_s, saved = timed(save, until_done=until_done)
                saved.wait(timeout_s=_WAIT_S)
                took.append(took_s)
            return took

        def bits() -> str:
            """Compare the last save with the state; the next save plans again and must not be measured."""
            wipe(fresh)
            checkpointer.restore(fresh)
            return difference(state, fresh)

        took_s, _ = timed(lambda: (checkpointer.prepare(state), session.slots.wait_until_prepared()))
        yield Figure("Checkpointer.prepare, in the background", took_s, "s", where())
        for name, took_s in zip(("first", "second"), saves(2), strict=True):
            yield from _row(f"Checkpointer.save after prepare, {name}", took_s, limit.out_s, bits(), "blocked")
        _, *took = saves(1 + _STEPS)
        yield from _row("Checkpointer.save after an optimizer's step", _middle(took), limit.out_s, bits(), "blocked")
        alone_s = _middle([timed(run_step)[0] for _ in range(_STEPS)])
        yield from _row("a step alone", alone_s, limit.out_s, "", f"matrix products for {_STEP_R} R")
        _, *took = saves(1 + _STEPS, run_step, until_done=True)
        yield from _row("a step that begins with a save", _middle(took), limit.out_s, bits())


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _compute_for(seconds: float) -> Callable[[], None]:
    """Return matrix products that take the device about ``seconds``."""
    size = 4096 if is_real() else 256
    matrix = torch.rand(size, size, device=accelerator().current())

    def run(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    run(2)
    one_s = timed(lambda: run(5))[0] / 5
    count = max(1, round(seconds / one_s))
    return lambda: run(count)


def _through_dcp(state: Tensors, settings: Settings, limit: Limit) -> Iterator[Finding]:
    """Yield ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` with our writer and reader."""
    job, fresh = "tiered://gpu-dcp", blank(state)

    def loaded() -> float:
        wipe(fresh)
        reader = TieredReader(job, settings=settings)
        return timed(lambda: dcp.load(fresh, storage_reader=reader, no_dist=True))[0]

    took = []
    for step in range(3):
        advance(state)
        writer = TieredWriter(job, step=step, settings=settings)
        took.append(timed(lambda writer=writer: dcp.save(state, storage_writer=writer, no_dist=True))[0])
        print(f"dcp.save {step}: {took[-1]:.4f} s")
    load_s = loaded()
    bits = difference(state, fresh)
    yield from _row("dcp.save(TieredWriter), first", took[0], limit.out_s, "", "sealed when it returns")
    yield from _row("dcp.save(TieredWriter), third", took[-1], limit.out_s, bits, "sealed when it returns")
    yield from _row("dcp.load(TieredReader)", load_s, limit.in_s, bits)
    blocked = []
    for step in range(3, 6):
        advance(state)
        writer = TieredWriter(job, step=step, settings=settings)
        save = _async_save(state, writer, writer)
        blocked_s, saving = timed(save, until_done=False)
        blocked.append(blocked_s)
        _saved(saving)
        print(f"dcp.async_save {step}: blocked {blocked_s:.4f} s")
    loaded()
    bits = difference(state, fresh)
    yield from _row("dcp.async_save(TieredWriter), third", blocked[-1], limit.out_s, bits, "blocked")


# -- torch's -----------------------------------------------------------------------------------------------------------


def _default_stager() -> DefaultStager:
    pinned = is_real()
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned
        )
    )


STAGERS: dict[str, tuple[Callable[[], Any], bool]] = {
    "BlockingAsyncStager, its copy kept": (lambda: BlockingAsyncStager(cache_staged_state_dict=True), True),
    "DefaultStager, kept": (_default_stager, True),
    "DefaultStager, a new one each save": (_default_stager, False),
}
"""Torch's stagers, pinned with a device; and whether one instance serves all saves."""


def _async_save(state: Tensors, writer: Any, stager: Any) -> Callable[[], Any]:
    return lambda: dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True)


def _saved(saving: Any) -> None:
    """Wait until an asynchronous save has ended, and raise what it raised."""
    getattr(saving, "upload_completion", saving).result(timeout=_WAIT_S)


def _torch_async(
    name: str, how: tuple[Callable[[], Any], bool], state: Tensors, folder: Path, limit: Limit
) -> Iterator[Finding]:
    """Yield the first and third ``dcp.async_save`` to tmpfs with one of torch's stagers."""
    make, is_kept = how
    files, what = folder / "async", f"torch's dcp.async_save, {name}"
    blocked: list[float] = []
    stager: Any = None
    try:
        for _ in range(3):
            advance(state)
            shutil.rmtree(files, ignore_errors=True)
            stager = make() if stager is None or not is_kept else stager
            blocked_s, saving = timed(_async_save(state, dcp.FileSystemWriter(files), stager), until_done=False)
            _saved(saving)
            blocked.append(blocked_s)
            print(f"{what}: blocked {blocked_s:.4f} s")
        fresh = blank(state)
        dcp.load(fresh, checkpoint_id=str(files), no_dist=True)
        bits = difference(state, fresh)
        yield from _row(f"{what}, first", blocked[0], limit.out_s, "", "blocked")
        yield from _row(f"{what}, third", blocked[-1], limit.out_s, bits, "blocked")
    except Exception as error:
        # Torch's own failure is a result of this comparison: its cached stager of 2.11 raises at the second save.
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        yield from (_row(f"{what}, first", blocked[0], limit.out_s, "", "blocked") if blocked else ())
        yield Check(f"{what}, third", "not run", why=f"torch raised at save {len(blocked) + 1}: {said}")
    finally:
        if stager is not None:
            stager.close()
        shutil.rmtree(files, ignore_errors=True)


def _torch_plain(state: Tensors, folder: Path, limit: Limit) -> Iterator[Finding]:
    """Yield torch's own ``dcp.save`` to tmpfs and ``dcp.load`` from it."""
    files, fresh, took = folder / "plain", blank(state), []
    for _ in range(2):
        advance(state)
        shutil.rmtree(files, ignore_errors=True)
        took.append(timed(lambda: dcp.save(state, checkpoint_id=str(files), no_dist=True))[0])
    load_s, _ = timed(lambda: dcp.load(fresh, checkpoint_id=str(files), no_dist=True))
    bits = difference(state, fresh)
    yield from _row("torch's dcp.save to tmpfs, second", took[-1], limit.out_s, bits, "no checksums")
    yield from _row("torch's dcp.load from tmpfs", load_s, limit.in_s, bits, "no checksums")
    shutil.rmtree(files, ignore_errors=True)
